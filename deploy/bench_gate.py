"""`noria bench gate`: whether the gate is honest about what serves production now.

Three candidates meet the serving adapter on the gate's held-out tasks, by real runs: one trained on
from it with the answers of other tasks (sabotage, which must be rejected), one with the same
function in other bytes (which must not be promoted), and the same adapter against the base model on
five tasks only (which must be too little evidence). Run it where a cycle has promoted something.

Scaling past one machine: the runs go through the API of NORIA_API_URL like everybody's.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from deploy.demo.evidence import sample_of
from deploy.demo.runs import Wish, play, sampling_seed
from flywheel.client import WheelClient
from flywheel.evaluation.gate import decide
from flywheel.recipe import Recipe
from flywheel.records import Adapter, Decision, Lineage, Outcome, Sample
from flywheel.release.adapters import AdapterStore, probe_points, register
from flywheel.release.hot_load import load, unload
from flywheel.store import transaction
from flywheel.training.job import TrainingJob, TrainingRow
from flywheel.training.process import run_training
from flywheel.training.trajectories import rows_of
from flywheel.wheel import Wheel
from runtime.benchmark import Row, report
from runtime.demonstration import play_recorded
from runtime.domain import Domain
from runtime.errors import Conflict
from runtime.run import RunKind, Task, TenantId

TENANT = TenantId("default")
SEED = 7_001
"""Of the gate's tasks here; no cycle that a person opens is likely to have drawn them."""
SABOTAGE_TASKS = 64
SABOTAGE_STEPS = 12
FEW = 5


def gate(
    wheel: Wheel, client: WheelClient, domain_name: str, *, level: str, seed: int = SEED
) -> dict[str, Any]:
    """Measure; the result is the JSON of `noria bench gate --json`.

    Raises Conflict where the base model serves production: nothing can be sabotaged then.
    """
    domain, recipe = wheel.domains[domain_name], Recipe.load(wheel.recipes[domain_name])
    serving = _serving(wheel, client, domain_name)
    assert domain.source is not None
    tasks = domain.source.generate(split="gate", level=level, count=recipe.gate.tasks, seed=seed)
    arms = _Arms(client, tasks, recipe, seed)
    incumbent, base = arms.samples(serving.name), arms.samples(wheel.base.id)
    few = FEW * recipe.gate.samples
    decisions = {
        "sabotaged": arms.against(incumbent, serving, _sabotaged(wheel, serving, domain, level)),
        "copy": arms.against(incumbent, serving, _copied(wheel, serving)),
        "five_tasks": _decided(base[:few], incumbent[:few], recipe, None, serving.digest),
        "itself": _decided(incumbent, incumbent, recipe, serving.digest, serving.digest),
    }
    return report("gate", 1, [_row(name, each) for name, each in decisions.items()], ("trl",))


def _serving(wheel: Wheel, client: WheelClient, domain: str) -> Adapter:
    names = [each.name for each in client.adapters(domain) if each.status == "serving"]
    if not names:
        raise Conflict(f"the base model serves {domain}; let a cycle promote an adapter first")
    with transaction(wheel.url) as connection:
        return AdapterStore(connection).get(TENANT, names[0])


# ---------------------------------------------------------------- judging


class _Arms:
    """Runs of policies on equal tasks and seeds."""

    def __init__(
        self, client: WheelClient, tasks: Sequence[Task], recipe: Recipe, seed: int
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._recipe = recipe
        self._seed = seed

    def samples(self, policy: str) -> list[Sample]:
        wishes = [
            Wish("gate", task, n, RunKind.EVALUATION, policy, sampling_seed(self._seed, task, n))
            for task in self._tasks
            for n in range(self._recipe.gate.samples)
        ]
        ran = play(self._client, f"bench-gate-{policy}", wishes, lambda ran: None)
        return [sample_of(each) for each in ran]

    def against(
        self, incumbent: list[Sample], serving: Adapter, candidate: tuple[Wheel, Adapter]
    ) -> Decision:
        """The gate's decision on a candidate, which is let go afterwards."""
        wheel, adapter = candidate
        load(wheel, adapter)
        found = self.samples(adapter.name)
        unload(wheel, adapter)
        return _decided(incumbent, found, self._recipe, serving.digest, adapter.digest)


def _decided(
    incumbent: list[Sample],
    candidate: list[Sample],
    recipe: Recipe,
    before: str | None,
    after: str | None,
) -> Decision:
    return decide(
        incumbent, candidate, recipe.gate, incumbent_digest=before, candidate_digest=after
    )


RIGHT: dict[str, tuple[str, set[Outcome]]] = {
    "sabotaged": ("trained on from it with other tasks' answers: rejected", {Outcome.REJECT}),
    "copy": (
        "the same function in other bytes: not promoted",
        {Outcome.HOLD, Outcome.INSUFFICIENT_EVIDENCE},
    ),
    "five_tasks": (
        f"against the base on {FEW} tasks: too little evidence",
        {Outcome.INSUFFICIENT_EVIDENCE},
    ),
    "itself": ("the same bytes: too little evidence", {Outcome.INSUFFICIENT_EVIDENCE}),
}


def _row(name: str, decision: Decision) -> Row:
    what, right = RIGHT[name]
    value = float(decision.outcome in right)
    return Row(
        id=name,
        what=f"{what}; {decision.reasons[0]}",
        value=value,
        unit=str(decision.outcome),
        target=1,
        op="value >=",
        holds=value == 1,
    )


# ---------------------------------------------------------------- candidates


def _sabotaged(wheel: Wheel, serving: Adapter, domain: Domain, level: str) -> tuple[Wheel, Adapter]:
    """Trained on from the serving adapter with every task's answer swapped for another's."""
    assert serving.manifest.recipe is not None
    recipe = serving.manifest.recipe
    job = TrainingJob(
        stage="sft",
        base=str(wheel.model_dir),
        start=serving.folder,
        seed=SEED,
        lora=recipe.lora,
        sft=recipe.sft.model_copy(update={"steps": SABOTAGE_STEPS}),
        probe_prompts=[point.prompt_ids for point in probe_points(serving)],
    )
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        result = run_training(
            Path(folder),
            job,
            _swapped(wheel, domain, level),
            on_progress=lambda progress: None,
            stop=lambda: False,
        )
        lineage = _lineage(serving, "trained on swapped answers by `noria bench gate`")
        made = register(wheel, TENANT, Path(folder) / result.adapter, lineage, result.probe)
    return wheel, made


def _swapped(wheel: Wheel, domain: Domain, level: str) -> list[TrainingRow]:
    """Demonstrations that look the customer up and then give another task's answer."""
    assert domain.source is not None
    tasks = domain.source.generate(split="practice", level=level, count=SABOTAGE_TASKS, seed=SEED)
    rows: list[TrainingRow] = []
    for task, other in zip(tasks, [*tasks[1:], tasks[0]], strict=True):
        turns = domain.source.demonstrate(task, dict(other.expectation or {}))
        _, recorder = wheel.bridge.call(play_recorded(domain, task, turns, wheel.workplace))
        rows += rows_of(task.id, task.id, recorder.model_calls, reward=None, demonstration=True)
    return rows


def _copied(wheel: Wheel, serving: Adapter) -> tuple[Wheel, Adapter]:
    """Every B doubled, every A halved: the same products, exactly, in other bytes."""
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as name:
        folder = Path(name)
        weights = load_file(Path(serving.folder) / "adapter_model.safetensors")
        scaled = {
            key: np.ascontiguousarray(value * (2.0 if ".lora_B." in key else 0.5))
            for key, value in weights.items()
        }
        save_file(scaled, folder / "adapter_model.safetensors")
        shutil.copy(Path(serving.folder) / "adapter_config.json", folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] == serving.manifest.rank
        lineage = _lineage(serving, "the same function in other bytes, by `noria bench gate`")
        return wheel, register(wheel, TENANT, folder, lineage, probe_points(serving))


def _lineage(serving: Adapter, note: str) -> Lineage:
    manifest = serving.manifest
    return Lineage(
        domain=manifest.domain,
        domain_digest=manifest.domain_digest,
        stage=manifest.stage,
        parent=serving.name,
        recipe=manifest.recipe,
        metrics={"note": note},
    )
