"""Make the engine serve an adapter, and believe it only after a probe.

The row says first that the adapter shall be resident, then the engine loads it, then it is probed:
whoever dies in between leaves a desire that the reconciler fulfils or takes back. What an alias
resolves to is desired as long as it does, whatever becomes of an attempt to load it once more.
Resident adapters are pinned, so that none that is wanted makes room by accident; where the engine
has no room, the registered adapter that is needed least goes.

The probe samples single tokens at temperature 1 with fixed seeds at the points where the trainer
wrote down its log-probabilities. It passes where the engine says it served the name asked for, its
numbers are the trainer's within a tolerance, and they have moved away from the base model's.

Scaling out: one engine address per wheel; replicas behind it share the shelf and load by name.
"""

import asyncio
import datetime as dt
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.records import Adapter
from flywheel.release.adapters import AdapterStore, probe_points, verify
from flywheel.store import transaction
from flywheel.training.job import ProbePoint
from flywheel.wheel import Wheel
from runtime.engine.protocol import Completion, CompletionRequest, Engine
from runtime.errors import (
    AdapterRefused,
    Conflict,
    EngineRefused,
    EngineUnavailable,
    ProbeFailed,
)
from runtime.run import PolicyId, Record, TenantId

log = logging.getLogger(__name__)
SEEDS = (11, 23, 37, 53)
"""Of the draws at each point."""
_NO_ROOM = 409
"""The embedded engine's answer; vLLM makes room by itself."""


class Tolerance(Record):
    """How far engine and trainer may be apart, in nats."""

    mean: float
    worst: float
    moved: float
    """The largest distance from the base must exceed this to be told from noise."""


EXACT = Tolerance(mean=2e-3, worst=5e-3, moved=1e-2)
"""fp32, merged from the pristine base: measured below 1e-3."""
BF16 = Tolerance(mean=0.15, worst=1.5, moved=0.3)
"""bf16: a single unlikely token may be far off, the mean may not (measured 0.05, at most 1.2)."""


class ProbeReport(Record):
    served: str
    """The name the engine says it served."""
    draws: int
    compared: int
    """Draws whose token the trainer's tables hold."""
    moved: float
    """Largest |policy - base| of the trainer, in nats, over the compared tokens."""
    worst: float
    """Largest |engine - trainer|, in nats."""
    mean: float
    reasons: list[str]
    """Why it did not pass; empty where it did."""

    @property
    def passed(self) -> bool:
        return not self.reasons


# ---------------------------------------------------------------- probe


async def probe(
    engine: Engine,
    policy_id: str,
    points: Sequence[ProbePoint],
    *,
    tolerance: Tolerance | None = None,
) -> ProbeReport:
    """Ask the engine at every point what the trainer was asked.

    Without a `tolerance`, the engine says whether it is held to fp32's or bf16's. Raises
    EngineUnavailable where it does not answer, PolicyNotLoaded where it does not serve the policy.
    """
    if tolerance is None:
        tolerance = EXACT if await engine.exact() else BF16
    asked = [(point, seed) for point in points for seed in SEEDS]
    replies = await asyncio.gather(
        *(engine.complete(_one_token(policy_id, point, seed)) for point, seed in asked)
    )
    drawn = [(point, reply) for (point, _), reply in zip(asked, replies, strict=True)]
    return judge(policy_id, drawn, tolerance)


def _one_token(policy_id: str, point: ProbePoint, seed: int) -> CompletionRequest:
    return CompletionRequest(
        PolicyId(policy_id), point.prompt_ids, max_tokens=1, temperature=1.0, seed=seed
    )


def judge(
    policy_id: str, drawn: Sequence[tuple[ProbePoint, Completion]], tolerance: Tolerance
) -> ProbeReport:
    """Whether these replies are those of the policy that the points describe."""
    served = next((r.served_policy for _, r in drawn if r.served_policy != policy_id), policy_id)
    told = [
        (point, reply.sampled[0], reply.logprobs[0]) for point, reply in drawn if reply.logprobs
    ]
    known = [(point, token, said) for point, token, said in told if token in point.policy]
    apart = [abs(said - point.policy[token]) for point, token, said in known]
    moves = [abs(point.policy[token] - point.base[token]) for point, token, _ in known]
    from_base = [abs(said - point.base[token]) for point, token, said in known]
    report = ProbeReport(
        served=served,
        draws=len(drawn),
        compared=len(known),
        moved=max(moves, default=0.0),
        worst=max(apart, default=0.0),
        mean=sum(apart) / len(apart) if apart else 0.0,
        reasons=[],
    )
    outside = sum(1 - sum(map(math.exp, point.policy.values())) for point, _ in drawn)
    reasons = _reasons(report, policy_id, tolerance, outside, sum(from_base))
    return report.model_copy(update={"reasons": reasons})


def _reasons(
    report: ProbeReport, policy_id: str, allowed: Tolerance, outside: float, from_base: float
) -> list[str]:
    """What speaks against it. `outside`: draws that the tables leave to expect outside of them."""
    reasons: list[str] = []
    missed = report.draws - report.compared
    if report.served != policy_id:
        reasons.append(f"the engine served {report.served!r} where {policy_id!r} was asked")
    if not report.compared:
        return [*reasons, f"none of {report.draws} draws can be compared with the trainer's tables"]
    if missed > outside + 3 * math.sqrt(max(outside, 0.0)) + 1:
        reasons.append(
            f"{missed} of {report.draws} draws fell outside of the trainer's tables, which leave "
            f"{outside:.1f} to expect"
        )
    if report.mean > allowed.mean or report.worst > allowed.worst:
        reasons.append(
            f"engine and trainer differ by {report.mean:.4f} nats on average and {report.worst:.4f}"
            f" at most; allowed: {allowed.mean:g} and {allowed.worst:g}"
        )
    if report.moved <= allowed.moved:
        reasons.append(
            f"the policy is at most {report.moved:.4f} nats away from the base model, which cannot "
            f"be told from noise; more than {allowed.moved:g} is needed"
        )
    elif report.mean * report.compared >= from_base:
        reasons.append("the engine's numbers are nearer to the base model's than to the trainer's")
    return reasons


# ---------------------------------------------------------------- load and unload


def load(wheel: Wheel, adapter: Adapter, *, tolerance: Tolerance | None = None) -> ProbeReport:
    """Serve the adapter under its name and keep it served; being resident already is fine.

    Raises AdapterRefused where its files or its base are wrong, ProbeFailed where the engine serves
    something else, EngineRefused in the engine's words, Conflict where the engine has no room; then
    it is neither resident nor desired, or, where an alias resolves to it, as it was before. Raises
    EngineUnavailable where the engine is away; then the reconciler loads it later.
    """
    demand_base(wheel, adapter)
    verify(adapter)
    _desire(wheel, adapter.tenant_id, adapter.name, loaded=True)
    try:
        return serve(wheel, adapter, tolerance=tolerance)
    except (AdapterRefused, ProbeFailed, EngineRefused, Conflict):
        withdraw(wheel, adapter)
        raise


def serve(wheel: Wheel, adapter: Adapter, *, tolerance: Tolerance | None = None) -> ProbeReport:
    """Make the engine serve the adapter, whatever is desired; `load` without the bookkeeping.

    One that fails its probe stays resident only where it was before.
    """
    demand_base(wheel, adapter)
    verify(adapter)
    points = probe_points(adapter)
    loaded_now = make_resident(wheel, adapter)
    report = wheel.bridge.call(probe(wheel.engine, adapter.name, points, tolerance=tolerance))
    if not report.passed:
        if loaded_now:
            drop(wheel, adapter.name)
        raise ProbeFailed(
            f"{adapter.name} is not served as it was trained: {'; '.join(report.reasons)}",
            report=report.model_dump(mode="json"),
        )
    return report


def unload(wheel: Wheel, adapter: Adapter) -> None:
    """Stop serving it; repeating it changes nothing. Runs that have begun a reply finish it.

    Raises Conflict where an alias resolves to it.
    """
    with transaction(wheel.url) as connection:
        aliases = AdapterStore(connection).aliases(adapter.tenant_id, adapter.name)
    if aliases:
        names = ", ".join(f"{alias} of {domain}" for domain, alias in aliases)
        raise Conflict(f"{adapter.name} serves {names}; promote another one or roll back first")
    withdraw(wheel, adapter)


def demand_base(wheel: Wheel, adapter: Adapter) -> None:
    """Raises AdapterRefused where it was trained on another base than the one that serves."""
    if adapter.base != wheel.base.base:
        raise AdapterRefused(
            f"{adapter.name} was trained on the base {adapter.manifest.base_name} "
            f"({adapter.base}); {wheel.base.id} ({wheel.base.base}) is served",
            reason="wrong_base",
        )


def _desire(wheel: Wheel, tenant_id: TenantId, name: str, *, loaded: bool) -> None:
    with transaction(wheel.url) as connection:
        AdapterStore(connection).set_loaded(tenant_id, name, loaded)


def withdraw(wheel: Wheel, adapter: Adapter) -> None:
    """Not desired any more unless an alias resolves to it, and not resident unless desired.

    Another tenant may desire the same weights.
    """
    _desire(wheel, adapter.tenant_id, adapter.name, loaded=False)
    with transaction(wheel.url) as connection:
        desired = {each.name for each in AdapterStore(connection).desired()}
    if adapter.name not in desired:
        drop(wheel, adapter.name)


def drop(wheel: Wheel, name: str) -> None:
    """Take a name out of the engine; one that is not there, or an engine that is away, is fine."""
    try:
        wheel.bridge.call(wheel.engine.unload_adapter(name))
    except EngineRefused as error:
        log.info("%s was not resident: %s", name, error)
    except EngineUnavailable as error:  # the row says what is wanted; a restart forgets the rest
        log.warning("%s could not be unloaded: %s", name, error)


# ---------------------------------------------------------------- room


@dataclass(frozen=True, slots=True)
class Resident:
    """A registered adapter that the engine serves now."""

    tenant_id: TenantId
    name: str
    stage: str
    cycle_id: str | None
    created_at: dt.datetime
    loaded: bool
    """Desired."""
    aliased: bool
    in_use: bool
    """Queued or running runs are pinned to it."""


def make_resident(wheel: Wheel, adapter: Adapter) -> bool:
    """Load it into the engine, making room where there is none; False where it is there already.

    Raises EngineRefused, EngineUnavailable, or Conflict where every resident adapter is needed.
    """
    missing = False
    while adapter.name not in _served(wheel):
        missing = True
        if not _loaded(wheel, adapter) and adapter.name not in (served := _served(wheel)):
            _make_room(wheel, adapter, served)
    return missing


def _served(wheel: Wheel) -> list[str]:
    return wheel.bridge.call(wheel.engine.models())


def _loaded(wheel: Wheel, adapter: Adapter) -> bool:
    """Ask the engine to load it; False where it has no room."""
    load = wheel.engine.load_adapter(adapter.name, adapter.folder, pinned=True)
    try:
        wheel.bridge.call(load)
    except EngineRefused as error:
        if error.detail.get("status") == _NO_ROOM:
            return False
        if adapter.name not in _served(wheel):  # else another worker was faster
            raise
    return True


def _make_room(wheel: Wheel, adapter: Adapter, served: Sequence[str]) -> None:
    with transaction(wheel.url) as connection:
        store = AdapterStore(connection)
        residents = [Resident(**row) for row in store.residents(served)]
        gone = least_needed(residents, adapter)
        if gone is None:
            needed = ", ".join(each.name for each in residents) or "unregistered adapters"
            raise Conflict(
                f"the engine has no room for {adapter.name}: {needed} serve an alias or have runs "
                "open; unload one of them"
            )
        for resident in residents:
            if resident.name == gone:
                store.set_loaded(resident.tenant_id, gone, False)
    log.info("%s makes room for %s", gone, adapter.name)
    drop(wheel, gone)


def least_needed(residents: Sequence[Resident], coming: Adapter) -> str | None:
    """Which resident goes: never one that an alias or an open run needs.

    First what nobody desires, then what a later adapter of the same stage of its cycle superseded,
    then the oldest.
    """
    needed = {each.name for each in residents if each.aliased or each.in_use}
    loose = [each for each in residents if each.name not in needed]

    def superseded(each: Resident) -> bool:
        later = [(r.cycle_id, r.stage) for r in residents if r.created_at > each.created_at]
        return (each.cycle_id, each.stage) in [*later, (coming.cycle_id, coming.stage)]

    loose.sort(key=lambda each: (each.loaded, not superseded(each), each.created_at))
    return loose[0].name if loose else None
