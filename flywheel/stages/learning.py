"""The third quarter: supervised training on demonstrations, then GRPO on groups.

Both build a training job from recorded trajectories, run it in a process of its own while practice
runs are held back, register the adapter it leaves, and load and probe it as the candidate. A round
of GRPO that the breaker stops leaves the candidate as it was.
"""

import fcntl
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flywheel.lessons.pool import PoolStore
from flywheel.records import Adapter, Lineage, PoolTask, Sample, Stage, StageName
from flywheel.release.adapters import AdapterStore, register
from flywheel.release.holds import hold
from flywheel.release.hot_load import load, unload
from flywheel.rollouts import model_calls, samples
from flywheel.stages.practice import GROUP, fixed_tasks
from flywheel.stages.turn import Answer, Done, Ended, Turn
from flywheel.training.errors import BreakerTripped
from flywheel.training.job import OPTIMIZER_FILE, Progress, TrainingJob, TrainingResult, TrainingRow
from flywheel.training.process import run_training
from flywheel.training.trajectories import rows_of
from runtime.run import RunKind

PROBED_ROWS = 4
"""Demonstrations in which trainer and engine are compared, at two places each."""
NOTHING = "nothing_to_learn"


# ---------------------------------------------------------------- SFT


def train_supervised(turn: Turn) -> Answer:
    """Imitate demonstrations of corrections, and what the incumbent got right itself."""
    recipe = turn.recipe.sft
    tasks = _demonstrated(turn)
    accepted = _accepted(turn)
    rows = [row for task in tasks for row in _demonstration_rows(task)] + accepted
    if len(rows) < recipe.minimum_rows:
        return Ended(
            NOTHING,
            f"{len(rows)} demonstrations and accepted trajectories, of the {recipe.minimum_rows} "
            "that the recipe asks for before it trains",
        )
    job = TrainingJob(
        stage="sft",
        base=str(turn.wheel.model_dir),
        start=_incumbent_folder(turn),
        seed=_seed(turn),
        lora=turn.recipe.lora,
        sft=recipe,
        probe_prompts=_probe_prompts(turn),
    )
    result = _train(turn, job, rows)
    lineage = _lineage(
        turn,
        stage="sft",
        parent=turn.incumbent.id if turn.incumbent.adapter else None,
        tasks=[task.id for task in tasks],
        runs=sorted({row.id.partition("/")[0] for row in accepted}),
        corrections=[task.source_run for task in tasks if task.source_run],
        metrics=_summary(result),
    )
    done = _candidate(turn, result, lineage, {"rows": len(rows), "demonstrations": len(tasks)})
    return replace(done, outputs={**done.outputs, "shown": [task.id for task in tasks]})


def _demonstrated(turn: Turn) -> list[PoolTask]:
    """The tasks that are shown; the rest is practised on without having been."""
    with turn.transaction() as connection:
        tasks = PoolStore(connection).admitted(turn.tenant_id, turn.cycle.domain, "practice")
    return [task for task in tasks if task.demonstration][: turn.recipe.sft.tasks]


def _demonstration_rows(task: PoolTask) -> list[TrainingRow]:
    return rows_of(task.id, task.id, task.demonstration or [], reward=None, demonstration=True)


def _accepted(turn: Turn) -> list[TrainingRow]:
    """Accepted trajectories of the incumbent, a bounded number of each task."""
    stage = turn.last(StageName.SAMPLE)
    if stage is None:
        return []
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, stage).get(GROUP, [])
    passed = [sample for sample in found if sample.passed]
    most = turn.recipe.sft.accepted_per_task
    kept = [s for n, s in enumerate(passed) if _earlier(passed[:n], s.task_id) < most]
    return _rows(turn, kept)


def _earlier(found: Sequence[Sample], task_id: str) -> int:
    return sum(sample.task_id == task_id for sample in found)


def _incumbent_folder(turn: Turn) -> str | None:
    """Where training goes on from: what serves now, or nothing where the base does."""
    if turn.incumbent.adapter is None:
        return None
    with turn.transaction() as connection:
        return AdapterStore(connection).get(turn.tenant_id, turn.incumbent.id).folder


def _probe_prompts(turn: Turn) -> list[list[int]]:
    """Before the first token of a reply, where training changes most, and in the last reply's
    middle, where the answer is decided."""
    prompts: list[list[int]] = []
    for task in _demonstrated(turn)[:PROBED_ROWS]:
        for row in _demonstration_rows(task)[:1]:
            written = [place for place, mine in enumerate(row.mask) if mine]
            prompts += [row.input_ids[: written[0]], row.input_ids[: written[-8:][0]]]
    return prompts


# ---------------------------------------------------------------- GRPO


def train_on_groups(turn: Turn) -> Answer:
    """One round: a few optimiser steps on groups sampled with the candidate as it is."""
    stage = turn.last(StageName.ROLLOUTS)
    assert stage is not None, "a round's rollouts come before its training"
    found = _members(turn, stage)
    rows = _rows(turn, found)
    if not rows:
        reason = "no group of this round said anything: the candidate stays as it is"
        return Done(outputs={"adapter": turn.candidate}, metrics={"rows": 0}, reason=reason)
    before = _adapter(turn, str(turn.candidate))
    job = TrainingJob(
        stage="grpo",
        base=str(turn.wheel.model_dir),
        start=before.folder,
        optimizer=_optimizer(turn),
        seed=_seed(turn),
        lora=turn.recipe.lora,
        grpo=turn.recipe.grpo,
        probe_prompts=_probe_prompts(turn),
    )
    try:
        result = _train(turn, job, rows)
    except BreakerTripped as tripped:
        reason = f"{tripped}; the candidate of before goes on"
        return Done(
            outputs={"adapter": before.name, "breaker": str(tripped)},
            reason=reason,
            skip=(StageName.ROLLOUTS, StageName.GRPO),
        )
    lineage = _lineage(
        turn,
        stage="grpo",
        parent=before.name,
        tasks=before.manifest.tasks,
        runs=sorted({*before.manifest.runs, *(sample.run_id for sample in found)}),
        corrections=before.manifest.corrections,
        metrics=_summary(result),
    )
    answer = _candidate(turn, result, lineage, {"rows": len(rows)})
    if before.stage == "grpo":
        unload(turn.wheel, before)
    return answer


def _members(turn: Turn, stage: Stage) -> list[Sample]:
    """Valid members of the groups that have signal."""
    chosen = set(stage.outputs["groups"])
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, stage).get(GROUP, [])
    return [sample for sample in found if sample.valid and sample.task_id in chosen]


def _optimizer(turn: Turn) -> str | None:
    """The optimiser's state as the round before left it."""
    stage = turn.last(StageName.GRPO)
    if stage is None:
        return None
    path = turn.wheel.job_folder(turn.cycle.id, stage.seq) / OPTIMIZER_FILE
    return str(path) if path.exists() else None


# ---------------------------------------------------------------- shared by both


def _rows(turn: Turn, found: Sequence[Sample]) -> list[TrainingRow]:
    with turn.transaction() as connection:
        calls = model_calls(connection, turn.tenant_id, [sample.run_id for sample in found])
    return [
        row
        for sample in found
        for row in rows_of(
            sample.run_id,
            sample.task_id,
            calls.get(sample.run_id, []),
            reward=sample.reward,
            demonstration=False,
        )
    ]


def _train(turn: Turn, job: TrainingJob, rows: Iterable[TrainingRow]) -> TrainingResult:
    def show(progress: Progress) -> None:
        turn.show({**progress.model_dump(exclude={"metrics"}), **progress.metrics})

    reason = f"cycle {turn.cycle.id} trains on these cores"
    held = [RunKind.ROLLOUT, RunKind.EVALUATION, RunKind.SHADOW]
    with _only_training_here(turn.wheel.home), hold(turn.wheel, turn.cycle.id, held, reason):
        return run_training(_folder(turn), job, rows, on_progress=show, stop=turn.stop)


@contextmanager
def _only_training_here(home: Path) -> Generator[None]:
    """One training at a time on a machine: the cores are all it has."""
    with (home / "training.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _seed(turn: Turn) -> int:
    """Of this training: every round's own, within what numpy takes."""
    return (turn.cycle.options.seed + turn.stage.round) % 2**31


def _folder(turn: Turn) -> Path:
    return turn.wheel.job_folder(turn.cycle.id, turn.stage.seq)


def _lineage(turn: Turn, **known: Any) -> Lineage:
    return Lineage(
        domain=turn.cycle.domain,
        domain_digest=turn.domain.digest,
        cycle_id=turn.cycle.id,
        recipe=turn.recipe,
        **known,
    )


def _candidate(
    turn: Turn, result: TrainingResult, lineage: Lineage, metrics: dict[str, Any]
) -> Done:
    """Register what was trained, load and probe it."""
    folder = _folder(turn) / result.adapter
    adapter = register(turn.wheel, turn.tenant_id, folder, lineage, result.probe)
    report = load(turn.wheel, adapter)
    _mark_fixed(turn)
    return Done(
        outputs={"adapter": adapter.name, "digest": adapter.digest, "probe": report.model_dump()},
        metrics={**lineage.metrics, **metrics, "probe_moved": report.moved},
    )


def _mark_fixed(turn: Turn) -> None:
    """Pool tasks that the policy of the last rollouts passes: their failure is fixed by it."""
    stage = turn.last(StageName.ROLLOUTS)
    if stage is None or stage.outputs.get("policy") is None:
        return
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, stage).get(GROUP, [])
        PoolStore(connection).mark_fixed(
            turn.tenant_id, fixed_tasks(found), stage.outputs["policy"]
        )


def _adapter(turn: Turn, name: str) -> Adapter:
    with turn.transaction() as connection:
        return AdapterStore(connection).get(turn.tenant_id, name)


def _summary(result: TrainingResult) -> dict[str, Any]:
    """The last step's metrics, and what the training cost."""
    last = result.metrics[-1].metrics if result.metrics else {}
    return {
        **last,
        "steps": result.steps,
        "trained_tokens": result.trained_tokens,
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "curve": [progress.metrics for progress in result.metrics],
    }
