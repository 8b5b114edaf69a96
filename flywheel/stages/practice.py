"""The second quarter: runs on pool tasks, by the incumbent and by the candidate.

Groups that say nothing (all members equal) are replaced by groups of other tasks, up to a bounded
number of waves; members that infrastructure took are requested again. Nothing waits inside: runs
are requested, and the stage is asked again once they are over.
"""

import random
from collections.abc import Sequence
from statistics import fmean

from flywheel.lessons.pool import PoolStore
from flywheel.records import PoolTask, Sample, StageName
from flywheel.release.adapters import AdapterStore, policy_of
from flywheel.rollouts import (
    Wanted,
    replace_failed,
    request,
    runs_progress,
    samples,
    standing,
)
from flywheel.stages.turn import Answer, Done, Turn, Waiting
from runtime.errors import Boundary, NoriaError
from runtime.run import Policy, RunKind, Task

WAVES = 2
"""How often groups without signal are replaced in one stage."""
GROUP = "group"
"""The arm of rollouts: all of a stage are by one policy."""


class TooManyFaults(NoriaError):
    """Infrastructure took so many runs that what is left may mislead."""

    boundary = Boundary.SANDBOX
    code = "too_many_faults"


def practice_tasks(turn: Turn) -> list[PoolTask]:
    """Admitted practice tasks, whole, in this stage's own random order."""
    with turn.transaction() as connection:
        tasks = PoolStore(connection).admitted(turn.tenant_id, turn.cycle.domain, "practice")
    dice = random.Random(f"{turn.cycle.options.seed}/{turn.stage.seq}")
    return dice.sample(tasks, len(tasks))


def wanted(task: Task, policy: Policy, members: Sequence[int], arm: str, seed: int) -> list[Wanted]:
    """One run a member; equal seeds, tasks and members sample alike in every arm."""
    return [
        Wanted(
            arm=arm,
            task=task,
            member=member,
            policy=policy,
            seed=random.Random(f"{seed}/{task.id}/{member}").randrange(2**31),
        )
        for member in members
    ]


def runs_over(turn: Turn) -> Waiting | None:
    """None once every requested run has ended; those that infrastructure took are run again.

    Raises TooManyFaults.
    """
    replaced = replace_failed(turn.wheel, turn.cycle, turn.stage)
    with turn.transaction() as connection:
        now = standing(connection, turn.cycle, turn.stage)
    if replaced or now.ended < now.total:
        return Waiting(progress=runs_progress(now.ended, now.total))
    if now.total and now.infra > turn.recipe.rollouts.infra_share * now.total:
        raise TooManyFaults(
            f"{now.infra} of {now.total} runs ended in an infrastructure error, more than the "
            f"{turn.recipe.rollouts.infra_share:.0%} that the recipe allows"
        )
    return None


# ---------------------------------------------------------------- the incumbent


def sample_incumbent(turn: Turn) -> Answer:
    """What the incumbent makes of pool tasks: its successes are worth imitating."""
    recipe = turn.recipe.rollouts
    if turn.first_time:
        tasks = practice_tasks(turn)[: recipe.tasks]
        members = range(recipe.group_size)
        seed = turn.cycle.options.seed
        runs = [w for t in tasks for w in wanted(t.task, turn.incumbent, members, GROUP, seed)]
        return _requested(turn, runs)
    if (waiting := runs_over(turn)) is not None:
        return waiting
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, turn.stage).get(GROUP, [])
    accepted = [sample.run_id for sample in found if sample.passed]
    return Done(outputs={"accepted": accepted}, metrics=_metrics(found))


def _requested(turn: Turn, runs: Sequence[Wanted], **inputs: object) -> Answer:
    if not runs:
        return Done(outputs={"accepted": [], "groups": []}, reason="there was nothing to run")
    request(turn.wheel, turn.cycle, turn.stage, RunKind.ROLLOUT, runs)
    return Waiting(inputs=inputs, progress=runs_progress(0, len(runs)))


# ---------------------------------------------------------------- the candidate


def sample_groups(turn: Turn) -> Answer:
    """Groups for one round of GRPO, sampled with the candidate as it is now."""
    recipe = turn.recipe.grpo
    needed = recipe.groups_per_step * recipe.steps_per_round
    if turn.first_time:
        return _next_wave(turn, needed, 1)
    if (waiting := runs_over(turn)) is not None:
        return waiting
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, turn.stage).get(GROUP, [])
    groups = by_task(found)
    speaking = [task_id for task_id, members in groups.items() if has_signal(members)]
    wave = int(turn.stage.inputs.get("wave", 1))
    if len(speaking) < needed and wave < WAVES:
        more = _next_wave(turn, needed - len(speaking), wave + 1)
        if isinstance(more, Waiting):
            return more
    return Done(
        outputs={"groups": speaking[:needed], "policy": turn.candidate},
        metrics={**_metrics(found), "groups": len(groups), "groups_with_signal": len(speaking)},
    )


def _next_wave(turn: Turn, count: int, wave: int) -> Answer:
    """Request `count` groups of tasks that this stage has not asked for yet."""
    with turn.transaction() as connection:
        asked = by_task(samples(connection, turn.cycle, turn.stage).get(GROUP, []))
        adapter = AdapterStore(connection).get(turn.tenant_id, str(turn.candidate))
    fresh = [task for task in practice_tasks(turn) if task.id not in asked]
    known, silent = _known(turn), _silent_before(turn)
    fresh.sort(key=lambda task: (task.id in silent, task.id in known))  # random order otherwise
    policy, members = policy_of(adapter), range(turn.recipe.grpo.group_size)
    seed = turn.cycle.options.seed + turn.stage.seq
    runs = [w for t in fresh[:count] for w in wanted(t.task, policy, members, GROUP, seed)]
    return _requested(turn, runs, wave=wave)


def _known(turn: Turn) -> set[str]:
    """Tasks that were demonstrated, or practised in this cycle: others teach more."""
    sft = turn.last(StageName.SFT)
    known = set[str](sft.outputs.get("shown", [])) if sft is not None else set[str]()
    rounds = [s for s in turn.stages if s.name is StageName.ROLLOUTS and s.seq < turn.stage.seq]
    return known.union(*(stage.outputs.get("groups", []) for stage in rounds))


def _silent_before(turn: Turn) -> set[str]:
    """Tasks whose last group in this cycle said nothing: asked last."""
    silent: set[str] = set()
    for stage in turn.stages:
        if stage.name is StageName.ROLLOUTS and stage.seq < turn.stage.seq:
            with turn.transaction() as connection:
                groups = by_task(samples(connection, turn.cycle, stage).get(GROUP, []))
            for task_id, members in groups.items():
                (silent.discard if has_signal(members) else silent.add)(task_id)
    return silent


def by_task(found: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Valid samples by task."""
    groups: dict[str, list[Sample]] = {}
    for sample in found:
        if sample.valid:
            groups.setdefault(sample.task_id, []).append(sample)
    return groups


def has_signal(members: Sequence[Sample]) -> bool:
    """Whether rewards differ: without that, every advantage is zero."""
    return len({sample.reward for sample in members}) > 1


def _metrics(found: Sequence[Sample]) -> dict[str, object]:
    valid = [sample for sample in found if sample.valid]
    return {
        "runs": len(found),
        "valid": len(valid),
        "passed": sum(sample.passed for sample in valid),
        "reward": fmean([sample.reward or 0.0 for sample in valid]) if valid else None,
        "sampled_tokens": sum(sample.sampled_tokens for sample in found),
    }


# ---------------------------------------------------------------- what is fixed


def fixed_tasks(found: Sequence[Sample]) -> list[str]:
    """Tasks that at least half of their group passes."""
    groups = by_task(found)
    return [t for t, members in groups.items() if fmean([m.passed for m in members]) >= 0.5]
