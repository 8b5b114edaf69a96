"""The compiler: a corrected run becomes a pool task, and no task counts until it is proved.

Compiling freezes what the run was asked: input, files, the connectors' initial state, the seed, the
person's answer as expectation. What people contradict each other about is quarantined; a later
correction retires what an earlier one had taught. What came from a held-out split stays held out: a
correction never moves a gate or report task into practice.

Whatever is wrong with a task quarantines that task, with its reason; where this host is at fault
the task stays pending for the next cycle. Tasks are proved a few at once and committed as they go,
so a cycle that was killed goes on where it was; shards of the pending tasks could be proved on
several machines.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from flywheel.lessons.evidence import Evidence
from flywheel.lessons.mining import MERGED, Candidate, Mined
from flywheel.lessons.pool import CONTRADICTED, PoolStore, Split, pool_task
from flywheel.lessons.proof import Validation, examine
from flywheel.records import Cycle, PoolStatus, PoolTask
from flywheel.store import Connection, transaction
from flywheel.wheel import Wheel
from runtime.checks.baselines import Latent
from runtime.domain import Domain, validate_answer, validate_input
from runtime.errors import DomainError, InputError, NotFound
from runtime.run import Json, Task
from runtime.run_executor import Workplace

AT_ONCE = 8
"""Tasks validated at the same time, and committed together."""
Count = Literal[
    "without_correction", "gone", "merged", "compiled", "known", "contradicted", "reopened",
    "admitted", "quarantined", "unchecked",
]  # fmt: skip
"""What `compile_lessons` counts. `unchecked` tasks are still pending: this host was at fault."""


# ---------------------------------------------------------------- run → task


def compile_candidate(
    connection: Connection, cycle: Cycle, candidate: Candidate, domain: Domain
) -> PoolTask:
    """The pending pool task of a corrected run; quarantined where people contradict each other.

    Raises NotFound where the run is gone, InputError for a candidate without a correction.
    """
    if candidate.correction is None:
        raise InputError(f"run {candidate.run_id} has no correction to compile a task from")
    evidence = Evidence(connection)
    asked = evidence.task(cycle.tenant_id, candidate.run_id)
    said = evidence.last_corrections(cycle.tenant_id, candidate.run_id)
    return pool_task(
        cycle.tenant_id,
        domain,
        completed(domain, asked, candidate.correction),
        origin="correction",
        split=split_of(asked),
        by=candidate.by,
        source_run=candidate.run_id,
        problem=contradiction(said, decisive_fields(domain)),
    )


def completed(domain: Domain, asked: Task, correction: dict[str, Json]) -> Task:
    """The task with the correction as its expectation, both with the defaults the domain has now.

    What the domain cannot take stays as it is: the proof will say why.
    """
    task = asked.model_copy(update={"expectation": correction})
    try:
        given, right = validate_input(domain, asked.input), validate_answer(domain, correction)
    except InputError:
        return task
    return task.model_copy(update={"input": given, "expectation": right})


def split_of(asked: Task) -> Split:
    """Practice, unless the run came from a held-out split."""
    held_out: dict[str, Split] = {s: s for s in get_args(Split) if s != "practice"}
    return held_out.get(asked.split, "practice")


def decisive_fields(domain: Domain) -> tuple[str, ...]:
    """Fields of the answer that make it right or wrong: all, unless the domain says which."""
    if isinstance(domain.source, Latent):
        return domain.source.decisive
    return tuple(domain.output_schema.get("properties", {}))


def contradiction(
    said: Sequence[tuple[str, dict[str, Json]]], decisive: Sequence[str]
) -> str | None:
    """What is wrong where people's last corrections differ in a decisive field."""
    answers = {
        by: json.dumps({name: answer.get(name) for name in decisive}, sort_keys=True)
        for by, answer in said
    }
    if len(set(answers.values())) < 2:
        return None
    told = "; ".join(f"{by or 'somebody'} says {answer}" for by, answer in answers.items())
    return f"{CONTRADICTED}: {told}; one of them must correct the run again"


# ---------------------------------------------------------------- all of a cycle


def compile_lessons(
    wheel: Wheel, cycle: Cycle, mined: Mined, on_progress: Callable[[int, int], None]
) -> dict[str, int]:
    """Compile what was mined and prove everything pending of the domain, imports included.

    Returns counts by `Count`. `on_progress` hears (tasks validated, tasks to validate). May be
    called again after a crash: what is known stays known, what is proved stays proved. Raises
    DomainError where this process lacks the domain.
    """
    domain = wheel.domains.get(cycle.domain)
    if domain is None:
        raise DomainError(f"domain {cycle.domain!r} is not installed in this worker")
    counts = Counter[str]({MERGED: mined.counts.get(MERGED, 0)})
    with transaction(wheel.url) as connection:
        pool = PoolStore(connection)
        counts["reopened"] = pool.reopen(cycle.tenant_id, domain)
        for candidate in mined.candidates:
            counts[_compile(connection, cycle, candidate, domain)] += 1
        pending = pool.pending(cycle.tenant_id, domain.name)
    counts += _prove(wheel, cycle, domain, pending, on_progress)
    return {name: counts[name] for name in get_args(Count)}


def _compile(connection: Connection, cycle: Cycle, candidate: Candidate, domain: Domain) -> Count:
    if candidate.correction is None:
        return "without_correction"
    try:
        task = compile_candidate(connection, cycle, candidate, domain)
    except NotFound:
        return "gone"
    pool = PoolStore(connection)
    new = pool.add(task.model_copy(update={"cycle_id": cycle.id if task.reason else None}))
    if task.status is PoolStatus.PENDING:
        pool.supersede(task)
        return "compiled" if new else "known"
    pool.quarantine_of_run(
        cycle.tenant_id, candidate.run_id, reason=str(task.reason), cycle_id=cycle.id
    )
    return "contradicted"


def _prove(
    wheel: Wheel,
    cycle: Cycle,
    domain: Domain,
    pending: Sequence[PoolTask],
    on_progress: Callable[[int, int], None],
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for start in range(0, len(pending), AT_ONCE):
        tasks = pending[start : start + AT_ONCE]
        found = wheel.bridge.call(_together(tasks, domain, wheel.workplace))
        with transaction(wheel.url) as connection:
            for task, validation in zip(tasks, found, strict=True):
                counts[_settle(PoolStore(connection), cycle, task, validation)] += 1
        on_progress(start + len(tasks), len(pending))
    return counts


async def _together(
    tasks: Sequence[PoolTask], domain: Domain, workplace: Workplace
) -> list[Validation]:
    return await asyncio.gather(*(examine(task, domain, workplace) for task in tasks))


def _settle(pool: PoolStore, cycle: Cycle, task: PoolTask, validation: Validation) -> Count:
    if validation.admitted:
        pool.admit(
            task.tenant_id,
            task.id,
            snapshot=validation.snapshot,
            demonstration=validation.demonstration or [],
            cycle_id=cycle.id,
        )
        return "admitted"
    if validation.host_failed:
        return "unchecked"
    reason = validation.reason or "it was refused without a reason"
    pool.quarantine(task.tenant_id, task.id, reason=reason, cycle_id=cycle.id)
    return "quarantined"
