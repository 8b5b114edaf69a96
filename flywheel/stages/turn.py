"""What a stage sees of its cycle, and what it may answer: done, waiting for runs, or the end.

A stage is a function of a `Turn`. It may be called again after a crash at any instruction, so
whatever it does outside its own row is either idempotent (requests under keys, adapters by digest)
or thrown away (a training folder without a result). It writes its own row nowhere: the answer is
committed by `advance`, under the fence.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from flywheel.recipe import Recipe
from flywheel.records import Cycle, Stage, StageName, StageState
from flywheel.store import Connection, transaction
from flywheel.wheel import Wheel
from runtime.domain import Domain
from runtime.errors import DomainError
from runtime.run import Json, Policy, TenantId


@dataclass(frozen=True, slots=True)
class Done:
    outputs: dict[str, Json] = field(default_factory=dict[str, Any])
    metrics: dict[str, Json] = field(default_factory=dict[str, Any])
    inputs: dict[str, Json] = field(default_factory=dict[str, Any])
    reason: str | None = None
    skip: Sequence[StageName] = ()
    """Stages that need not come any more."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """For the runs it requested; asked again once they are over."""

    inputs: dict[str, Json] = field(default_factory=dict[str, Any])
    progress: dict[str, Json] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Ended:
    """The cycle ends here, without a decision of the gate."""

    outcome: str
    reason: str


Answer = Done | Waiting | Ended


@dataclass(frozen=True, slots=True)
class Turn:
    """One stage of one cycle, about to be run."""

    wheel: Wheel
    cycle: Cycle
    stage: Stage
    stages: Sequence[Stage]
    """All of the cycle's, in order."""
    show: Callable[[dict[str, Json]], None]
    """Publishes progress while the stage runs."""
    stop: Callable[[], bool]
    """Whether the cycle was asked to stop, or this worker is going down."""

    def transaction(self) -> AbstractContextManager[Connection]:
        return transaction(self.wheel.url)

    @property
    def tenant_id(self) -> TenantId:
        return self.cycle.tenant_id

    @property
    def recipe(self) -> Recipe:
        return self.cycle.recipe

    @property
    def domain(self) -> Domain:
        """Raises DomainError where this process does not have it."""
        if self.cycle.domain not in self.wheel.domains:
            raise DomainError(f"domain {self.cycle.domain!r} is not installed in this worker")
        return self.wheel.domains[self.cycle.domain]

    @property
    def first_time(self) -> bool:
        """Whether the stage has not requested its runs yet."""
        return self.stage.state is not StageState.WAITING

    def last(self, *names: StageName) -> Stage | None:
        """The latest stage of these names that is done."""
        done = [s for s in self.stages if s.name in names and s.state is StageState.DONE]
        return done[-1] if done else None

    @property
    def incumbent(self) -> Policy:
        """What production was served by when the cycle began."""
        mined = self.last(StageName.MINE)
        assert mined is not None, "mine is the first stage"
        return Policy.model_validate(mined.outputs["incumbent"])

    @property
    def candidate(self) -> str | None:
        """Name of the newest adapter this cycle made."""
        made = self.last(StageName.SFT, StageName.GRPO)
        return None if made is None else made.outputs.get("adapter")
