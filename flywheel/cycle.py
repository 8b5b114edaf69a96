"""One turn of the wheel: mine → compile → sample → SFT → (rollouts → GRPO)… → evaluate → gate →
release.

`PLAN` is the cycle, `advance` turns it by one stage. The row is the job: a worker claims the cycle
under a lease, runs its next stage, writes what came of it under the fence, gives the cycle back and
rings; whoever hears it goes on. A stage that waits for runs holds no worker. A worker that dies
leaves an expired lease, and the next one runs the same stage again: stages are idempotent. Celery
and NOTIFY only ring; `due` finds what can go on from Postgres alone.

Scaling out: any number of workers on any number of machines; a cycle is turned by one at a time,
different domains' cycles by different ones.
"""

import datetime as dt
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from zoneinfo import ZoneInfo

from flywheel.cycle_lease import CycleLease
from flywheel.cycle_store import CycleStore
from flywheel.recipe import Recipe, ScheduleRecipe
from flywheel.records import (
    Cycle,
    CycleId,
    CycleOptions,
    CycleState,
    Stage,
    StageName,
    StageState,
)
from flywheel.rollouts import cancel_open
from flywheel.stages import judgement, learning, lessons, practice
from flywheel.stages.turn import Answer, Done, Ended, Turn, Waiting
from flywheel.store import transaction
from flywheel.training.errors import TrainingStopped
from flywheel.wheel import Wheel
from runtime.errors import Conflict, InputError, LeaseLost, NoriaError, NotFound
from runtime.run import TenantId

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
REST_SECONDS = 5.0
"""Before the second attempt at a stage that failed; three times as long before the third."""

STAGES: dict[StageName, Callable[[Turn], Answer]] = {
    StageName.MINE: lessons.mine_runs,
    StageName.COMPILE: lessons.compile_tasks,
    StageName.SAMPLE: practice.sample_incumbent,
    StageName.SFT: learning.train_supervised,
    StageName.ROLLOUTS: practice.sample_groups,
    StageName.GRPO: learning.train_on_groups,
    StageName.EVALUATE: judgement.evaluate,
    StageName.GATE: judgement.judge,
    StageName.RELEASE: judgement.release,
}


def plan(recipe: Recipe) -> list[tuple[StageName, int]]:
    """The stages of a cycle in order, with their round."""
    before = [StageName.MINE, StageName.COMPILE, StageName.SAMPLE, StageName.SFT]
    rounds = [
        (name, number)
        for number in range(1, recipe.grpo.rounds + 1)
        for name in (StageName.ROLLOUTS, StageName.GRPO)
    ]
    after = [StageName.EVALUATE, StageName.GATE, StageName.RELEASE]
    return [*((name, 0) for name in before), *rounds, *((name, 0) for name in after)]


# ---------------------------------------------------------------- opening


def open_cycle(
    wheel: Wheel,
    tenant_id: TenantId,
    domain: str,
    *,
    trigger: str = "manual",
    date: dt.date | None = None,
    options: CycleOptions | None = None,
) -> tuple[Cycle, bool]:
    """A new cycle of the domain and True; or the one that runs (or ran, at night) and False.

    Raises NotFound for a domain without recipe, InputError for a profile or level it does not have,
    Conflict where the one that runs is about to stop.
    """
    options = options or CycleOptions()
    recipe = _recipe(wheel, domain, options)
    date = date or dt.datetime.now(ZoneInfo(recipe.schedule.timezone)).date()
    with transaction(wheel.url) as connection:
        store = CycleStore(connection)
        opened = store.insert(
            tenant_id, recipe, date=date, trigger=trigger, options=options, plan=plan(recipe)
        )
        there = opened or store.running(tenant_id, domain)
        there = there or store.nightly(tenant_id, domain, date)
        assert there is not None, "what kept the cycle from being opened exists"
        cycle = store.get(tenant_id, there)
    if cycle.stop_requested and cycle.state is CycleState.RUNNING:
        raise Conflict(f"cycle {cycle.id} is stopping; ask again in a few seconds")
    return cycle, opened is not None


def _recipe(wheel: Wheel, domain: str, options: CycleOptions) -> Recipe:
    if domain not in wheel.recipes:
        known = ", ".join(sorted(wheel.recipes)) or "none"
        raise NotFound(f"there is no recipe for domain {domain!r}; domains with one: {known}")
    recipe = Recipe.load(wheel.recipes[domain], options.profile)
    levels = wheel.domains[domain].levels
    level = options.level or recipe.level
    if level not in levels:
        raise InputError(f"{domain} has no level {level!r}; allowed: {', '.join(levels)}")
    return recipe.model_copy(update={"level": level})


def open_due(wheel: Wheel, now: dt.datetime) -> list[CycleId]:
    """Open tonight's cycle for each tenant and domain whose hour has come; exactly one a date.

    Who began to work after that hour waits for the next night.
    """
    opened: list[CycleId] = []
    for domain, path in wheel.recipes.items():
        try:
            opened += _open_due(wheel, domain, Recipe.load(path).schedule, now)
        except InputError as error:  # one domain's broken recipe keeps no other from turning
            log.error("no cycle of %s was opened: %s", domain, error)
    return opened


def _open_due(
    wheel: Wheel, domain: str, schedule: ScheduleRecipe, now: dt.datetime
) -> list[CycleId]:
    local = now.astimezone(ZoneInfo(schedule.timezone))
    if not schedule.enabled or local.strftime("%H:%M") < schedule.at:
        return []
    tenants = _tenants_without(wheel, domain, _scheduled(schedule, local))
    found = [
        open_cycle(wheel, tenant_id, domain, trigger="nightly", date=local.date())
        for tenant_id in tenants
    ]
    return [cycle.id for cycle, new in found if new]


def _scheduled(schedule: ScheduleRecipe, local: dt.datetime) -> dt.datetime:
    """The moment of the local date at which the cycle was due."""
    hour, minute = map(int, schedule.at.split(":"))
    return local.replace(hour=hour, minute=minute, second=0, microsecond=0)


def _tenants_without(wheel: Wheel, domain: str, scheduled: dt.datetime) -> list[TenantId]:
    with transaction(wheel.url) as connection:
        store = CycleStore(connection)
        worked = store.tenants(domain, before=scheduled)
        return [t for t in worked if store.nightly(t, domain, scheduled.date()) is None]


def stop_cycle(wheel: Wheel, tenant_id: TenantId, cycle_id: CycleId) -> Cycle:
    """Ask a cycle to stop: within seconds, and for good. Raises NotFound."""
    with transaction(wheel.url) as connection:
        store = CycleStore(connection)
        store.get(tenant_id, cycle_id)
        store.request_stop(tenant_id, cycle_id)
        return store.get(tenant_id, cycle_id)


def due(wheel: Wheel) -> list[tuple[TenantId, CycleId]]:
    """Cycles that can go on now."""
    with transaction(wheel.url) as connection:
        return CycleStore(connection).due()


# ---------------------------------------------------------------- turning


class Advance(StrEnum):
    ADVANCED = "advanced"
    WAITING = "waiting"
    """For runs."""
    BUSY = "busy"
    """Another worker holds it."""
    ENDED = "ended"


def advance(
    wheel: Wheel,
    tenant_id: TenantId,
    cycle_id: CycleId,
    *,
    owner: str,
    quitting: Callable[[], bool] = lambda: False,
    serves: Callable[[StageName], bool] = lambda name: True,
) -> Advance:
    """Run exactly one stage, or see whether its runs are over; commit, ring, let go.

    `quitting` says that this worker is going down: a training is then stopped and given back.
    `serves` says which stages this worker runs; others are left to other workers.
    """
    with CycleLease.take(wheel.url, tenant_id, cycle_id, owner) as lease:
        if lease is None:
            return Advance.BUSY
        with transaction(wheel.url) as connection:
            store = CycleStore(connection)
            cycle, stages = store.get(tenant_id, cycle_id), store.stages(tenant_id, cycle_id)
        if cycle.stop_requested:
            return _stop(wheel, cycle, lease)
        stage = _next(stages)
        if stage is None:
            return _finish(wheel, cycle, stages, lease)
        if not serves(stage.name):
            return Advance.BUSY
        try:
            return _run(wheel, cycle, stage, stages, lease, quitting)
        except LeaseLost:
            log.warning("cycle %s: its lease was lost; another worker goes on", cycle_id)
            return Advance.BUSY


def _next(stages: Sequence[Stage]) -> Stage | None:
    over = (StageState.DONE, StageState.SKIPPED, StageState.FAILED)
    return next((stage for stage in stages if stage.state not in over), None)


def _run(
    wheel: Wheel,
    cycle: Cycle,
    stage: Stage,
    stages: Sequence[Stage],
    lease: CycleLease,
    quitting: Callable[[], bool],
) -> Advance:
    attempt = lease.start(stage)
    if attempt > MAX_ATTEMPTS:
        return _fail(
            wheel, cycle, stage, lease, f"{MAX_ATTEMPTS} workers in a row died in this stage"
        )
    turn = Turn(
        wheel=wheel,
        cycle=cycle,
        stage=stage,
        stages=stages,
        show=lambda progress: lease.show(stage, progress),
        stop=lambda: lease.lost or lease.stop_requested or quitting(),
    )
    try:
        answer = STAGES[stage.name](turn)
    except TrainingStopped:
        return _stopped(wheel, cycle, stage, lease)
    except LeaseLost:
        raise
    except NoriaError as error:
        log.error("cycle %s, stage %s: %s", cycle.id, stage.name, error)
        again = error.retriable and attempt < MAX_ATTEMPTS
        return _failed(wheel, cycle, stage, lease, str(error), attempt if again else None)
    except Exception as error:  # the boundary: a fault of ours must not turn the wheel for ever
        log.exception("cycle %s, stage %s", cycle.id, stage.name)
        reason = f"{type(error).__name__}: {error}"
        again = attempt < MAX_ATTEMPTS
        return _failed(wheel, cycle, stage, lease, reason, attempt if again else None)
    return _commit(wheel, cycle, stage, lease, answer)


def _commit(wheel: Wheel, cycle: Cycle, stage: Stage, lease: CycleLease, answer: Answer) -> Advance:
    match answer:
        case Done():
            lease.save(
                stage,
                StageState.DONE,
                inputs=answer.inputs,
                outputs=answer.outputs,
                metrics=answer.metrics,
                reason=answer.reason,
                skip=answer.skip,
            )
            return Advance.ADVANCED
        case Waiting():
            lease.save(stage, StageState.WAITING, inputs=answer.inputs, progress=answer.progress)
            return Advance.WAITING
        case Ended():
            lease.save(stage, StageState.DONE, reason=answer.reason)
            lease.end(CycleState.DONE, outcome=answer.outcome, reason=answer.reason)
            return Advance.ENDED


def _finish(wheel: Wheel, cycle: Cycle, stages: Sequence[Stage], lease: CycleLease) -> Advance:
    """Every stage is over: the cycle's outcome is the gate's."""
    gate = next(stage for stage in stages if stage.name is StageName.GATE)
    decision = gate.outputs.get("decision", {})
    lease.end(CycleState.DONE, outcome=decision.get("outcome"), reason=gate.reason)
    return Advance.ENDED


def _stop(wheel: Wheel, cycle: Cycle, lease: CycleLease) -> Advance:
    cancel_open(wheel, cycle)
    lease.end(CycleState.STOPPED, reason="somebody asked it to stop")
    return Advance.ENDED


def _stopped(wheel: Wheel, cycle: Cycle, stage: Stage, lease: CycleLease) -> Advance:
    """Training was stopped: for good where somebody asked, else given back to another worker."""
    if lease.stop_requested:
        return _stop(wheel, cycle, lease)
    lease.give_back(stage)
    return Advance.BUSY


def _failed(
    wheel: Wheel, cycle: Cycle, stage: Stage, lease: CycleLease, reason: str, attempt: int | None
) -> Advance:
    """Try again after a growing rest, or, where no attempt is left, end the cycle."""
    if attempt is None:
        return _fail(wheel, cycle, stage, lease, reason)
    lease.retry(stage, reason, after=REST_SECONDS * 3 ** (attempt - 1))
    return Advance.BUSY


def _fail(wheel: Wheel, cycle: Cycle, stage: Stage, lease: CycleLease, reason: str) -> Advance:
    cancel_open(wheel, cycle)
    lease.save(stage, StageState.FAILED, reason=reason)
    lease.end(CycleState.FAILED, reason=f"{stage.name}: {reason}")
    return Advance.ENDED
