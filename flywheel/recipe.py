"""A recipe: how one domain's wheel turns, per base model; every value with its reason.

Recipes are YAML in `flywheel/recipes/<domain>.yaml`, or `recipe.yaml` in an operator's own domain
folder: a line of why stands as a comment above each value. `profiles` change single values (the
demo's `fast`). A recipe is pinned, whole, into the cycle that uses it, so that a cycle can be
explained long after its file has changed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError

from runtime.errors import InputError
from runtime.run import Record

RECIPES = Path(__file__).parent / "recipes"


class LoraRecipe(Record):
    rank: int = Field(default=16, ge=1, le=512)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class SftRecipe(Record):
    steps: int = Field(ge=1, le=10_000)
    batch_size: int = Field(default=8, ge=1)
    learning_rate: float = Field(gt=0, lt=1)
    warmup_steps: int = Field(default=2, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    minimum_rows: int = Field(default=16, ge=1)
    """Fewer accepted trajectories and demonstrations than this, and the cycle refuses to train."""
    tasks: int | None = Field(default=None, ge=1)
    """Pool tasks demonstrated, the newest first; the others are left to practise on. None: all."""
    accepted_per_task: int = Field(default=2, ge=0)
    """Accepted trajectories of one task that may enter, beside its demonstration."""


class GrpoRecipe(Record):
    rounds: int = Field(ge=0, le=1_000)
    """Times that groups are sampled with the candidate as it then is; 0 leaves GRPO out."""
    steps_per_round: int = Field(default=1, ge=1)
    """Optimiser steps before the candidate is published and sampled again."""
    groups_per_step: int = Field(default=6, ge=1)
    group_size: int = Field(default=8, ge=2)
    learning_rate: float = Field(gt=0, lt=1)
    epsilon_low: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float = Field(default=0.28, gt=0)
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the start of GRPO."""
    max_ratio: float = Field(default=4.0, gt=1)
    """Breaker: a larger mean importance ratio (or below its inverse) ends the training."""


class RolloutRecipe(Record):
    tasks: int = Field(ge=0)
    """Pool tasks the incumbent is sampled on before SFT."""
    group_size: int = Field(default=2, ge=1)
    infra_share: float = Field(default=0.2, ge=0, le=1)
    """A larger share of runs that ended in an infrastructure error fails the stage."""


class GateRecipe(Record):
    tasks: int = Field(ge=1)
    """Held-out tasks of the gate split."""
    samples: int = Field(default=4, ge=1)
    minimum_tasks: int = Field(default=16, ge=2)
    """Fewer tasks with a valid pair of samples are insufficient evidence, whatever they say."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    harm: float = Field(default=0.05, ge=0, le=1)
    """A difference surely below minus this is rejected, not just held."""


class ScheduleRecipe(Record):
    at: str = Field(default="02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    timezone: str = "UTC"
    enabled: bool = True


class Recipe(Record):
    domain: str
    base: str = "any"
    """Model the values were found with, for people."""
    schedule: ScheduleRecipe = ScheduleRecipe()
    level: str = "full"
    """Level of the gate's generated tasks."""
    lora: LoraRecipe = LoraRecipe()
    rollouts: RolloutRecipe
    sft: SftRecipe
    grpo: GrpoRecipe
    gate: GateRecipe

    @classmethod
    def load(cls, path: Path, profile: str | None = None, **changes: Any) -> Self:
        """Raises InputError naming file and field, or the profiles that exist."""
        try:
            raw = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"{path}: no readable recipe: {error}") from error
        if not isinstance(raw, dict):
            raise InputError(f"{path}: a recipe is a mapping, not {type(raw).__name__}")
        profiles = raw.pop("profiles", None) or {}
        if profile is not None and profile not in profiles:
            known = ", ".join(profiles) or "none"
            raise InputError(f"{path}: there is no profile {profile!r}; profiles: {known}")
        merged = _merged(raw, profiles[profile] if profile is not None else {})
        try:
            return cls.model_validate(_merged(merged, changes))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise InputError(f"{path}: {wrong}") from error


def _merged(whole: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(whole)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged
