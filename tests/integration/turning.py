"""A wheel for tests: real Postgres, real tools and checks, no model; and production to mine.

A test plays the customers, the support team and, where it needs no real run, the runner.
"""

import datetime as dt
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from connectors.support_desk import SupportDeskFactory
from flywheel.bridge import Bridge
from flywheel.cycle_store import CycleStore
from flywheel.recipe import RECIPES, Recipe
from flywheel.records import Cycle, CycleOptions, Stage, StageName
from flywheel.store import MIGRATIONS, transaction
from flywheel.wheel import Wheel
from runtime.database import Database, migrate
from runtime.domain import Domain
from runtime.engine.protocol import Engine
from runtime.engine.templates import ChatTemplate
from runtime.run import (
    Feedback,
    Json,
    Policy,
    PolicyId,
    RunId,
    RunKind,
    RunState,
    Sampling,
    Task,
    TenantId,
    Usage,
    Verdict,
    VerdictStatus,
)
from runtime.run_executor import Workplace
from runtime.run_queue import RunQueue
from runtime.run_store import Admission, Lease, Outcome, RunStore
from runtime.sandbox.protocol import SandboxBackend

TENANT = TenantId("default")
DOMAIN = "support_triage"
BASE = Policy(id=PolicyId("base"), base="sha256:base")


@contextmanager
def turning(
    url: str,
    domain: Domain,
    template: ChatTemplate,
    backend: SandboxBackend,
    home: Path,
    engine: Engine | None = None,
) -> Generator[Wheel]:
    """A wheel over a migrated database of the test's own."""
    with Bridge() as bridge:
        bridge.call(migrate(url))
        bridge.call(migrate(url, folder=MIGRATIONS, schema="flywheel"))
        database = Database(url)
        bridge.call(database.__aenter__())
        try:
            yield Wheel(
                url=url,
                home=home,
                bridge=bridge,
                database=database,
                engine=cast(Engine, engine),
                domains={domain.name: domain},
                recipes={domain.name: RECIPES / f"{domain.name}.yaml"},
                workplace=Workplace(backend, {"support_desk": SupportDeskFactory()}, template),
                base=BASE,
                model_dir=home,
            )
        finally:
            bridge.call(database.__aexit__(None, None, None))
            bridge.call(backend.close())


# ---------------------------------------------------------------- cycles


def new_cycle(wheel: Wheel) -> Cycle:
    """A cycle of the wheel's only domain; the one before it is over."""
    with transaction(wheel.url) as connection:
        connection.execute("UPDATE flywheel.cycles SET state = 'done' WHERE state = 'running'")
        store = CycleStore(connection)
        [path] = wheel.recipes.values()
        opened = store.insert(
            TENANT,
            Recipe.load(path),
            date=dt.date(2026, 7, 1),
            trigger="manual",
            options=CycleOptions(),
            plan=[(StageName.MINE, 0), (StageName.COMPILE, 0), (StageName.SAMPLE, 0)],
        )
        assert opened is not None
        return store.get(TENANT, opened)


def stage_of(wheel: Wheel, cycle: Cycle, name: StageName) -> Stage:
    with transaction(wheel.url) as connection:
        stages = CycleStore(connection).stages(TENANT, cycle.id)
    return next(stage for stage in stages if stage.name is name)


def finish_stage(wheel: Wheel, cycle: Cycle, name: StageName) -> None:
    with transaction(wheel.url) as connection:
        connection.execute(
            "UPDATE flywheel.stages SET state = 'done' WHERE cycle_id = %s AND name = %s",
            (cycle.id, name),
        )


# ---------------------------------------------------------------- production


def judged(status: VerdictStatus, reward: float | None) -> Verdict:
    return Verdict(
        status=status,
        basis="rules",
        reward=reward,
        checks=[],
        verifier_digest="sha256:v",
        evidence_hash=None,
    )


OUTCOMES = {
    RunState.ACCEPTED: judged(VerdictStatus.PASS, 1.0),
    RunState.REJECTED: judged(VerdictStatus.FAIL, 0.0),
    RunState.TIMED_OUT: judged(VerdictStatus.FAIL, 0.0),
    RunState.ERROR: None,
}


def production(
    wheel: Wheel,
    task: Task,
    *,
    state: RunState = RunState.REJECTED,
    answer: dict[str, Json] | None = None,
    kind: RunKind = RunKind.PRODUCTION,
) -> RunId:
    """A run of the task that ended like that."""

    async def run() -> RunId:
        admission = Admission(
            tenant_id=TENANT,
            kind=kind,
            domain_digest=wheel.domains[task.domain].digest,
            task=task,
            policy=BASE,
            sampling=Sampling(seed=1),
        )
        async with wheel.database.transaction() as connection:
            run_id, _ = await RunStore(connection).admit(admission)
            for lease in await RunQueue(connection).claim("test", limit=1000, lease_seconds=600):
                await end(connection, lease, state, answer)
        return run_id

    return wheel.bridge.call(run())


async def end(
    connection: Any, lease: Lease, state: RunState, answer: dict[str, Json] | None = None
) -> None:
    usage = Usage(steps=2, tool_calls=2, prompt_tokens=300, sampled_tokens=30, seconds=0.5)
    outcome = Outcome(state, None, answer, OUTCOMES[state], None, usage)
    await RunStore(connection).finish(lease, outcome)


def play_runner(wheel: Wheel, states: Sequence[RunState]) -> None:
    """End as many queued runs, in the order in which they are claimed."""

    async def run() -> None:
        async with wheel.database.transaction() as connection:
            queue = RunQueue(connection)
            leases = await queue.claim("test", limit=len(states), lease_seconds=600)
            for lease, state in zip(leases, states, strict=True):
                await end(connection, lease, state)

    wheel.bridge.call(run())


def feedback(wheel: Wheel, run_id: RunId, by: str = "Ada", **said: Any) -> int:
    async def run() -> int:
        async with wheel.database.transaction() as connection:
            return await RunStore(connection).give_feedback(TENANT, run_id, Feedback(by=by, **said))

    return wheel.bridge.call(run())


def correct(wheel: Wheel, run_id: RunId, right: Json, by: str = "Ada") -> int:
    return feedback(wheel, run_id, by=by, correction=right)
