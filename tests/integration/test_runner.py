"""The runner on a real Postgres and sandbox: finishing, cancelling, dying, being replaced."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.database import EVENTS_CHANNEL, Database, Doorbell, migrate, wait_for
from runtime.domain import digest_of
from runtime.run import (
    Intent,
    Observed,
    Policy,
    PolicyId,
    Run,
    RunId,
    RunKind,
    RunState,
    Sampling,
    Started,
    Task,
    TenantId,
    Thought,
)
from runtime.run_queue import RunQueue
from runtime.run_store import Admission, RunStore
from tests.integration import runner_process

ROOT = Path(__file__).parent.parent.parent
TENANT = TenantId("default")


@pytest.fixture
def wiring(database_url: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "url": database_url,
        "book": str(tmp_path / "book.txt"),
        "state": str(tmp_path / "sandboxes"),
        "stall_at": None,
        "lease_seconds": 2.0,
    }


@asynccontextmanager
async def runner(wiring: dict[str, Any], **changes: Any) -> AsyncIterator[Process]:
    """A runner process that is serving; killed at the end unless the test ended it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.runner_process",
        json.dumps({**wiring, **changes}),
        cwd=ROOT,
        stdout=PIPE,
    )
    try:
        await hears(process, "ready")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def hears(process: Process, word: str) -> None:
    assert process.stdout is not None
    while line := await asyncio.wait_for(process.stdout.readline(), 30):
        if line.decode().strip() == word:
            return
    raise AssertionError(f"the runner ended before it said {word!r}")


async def admit(database: Database, **changes: Any) -> RunId:
    values: dict[str, Any] = {
        "tenant_id": TENANT,
        "kind": RunKind.PRODUCTION,
        "domain_digest": digest_of(runner_process.DOMAIN),
        "task": Task(id="t", domain="ledger", input={"amount": 5}),
        "policy": Policy(id=PolicyId("scripted"), base="scripted"),
        "sampling": Sampling(seed=1),
    }
    async with database.transaction() as connection:
        run_id, _ = await RunStore(connection).admit(Admission(**{**values, **changes}))
    return run_id


async def ended(database: Database, bell: Doorbell, run_id: RunId, seconds: float = 60) -> Run:
    """The run once it has ended; fails after `seconds`."""
    async with asyncio.timeout(seconds), bell.ear(EVENTS_CHANNEL, run_id) as rung:
        while True:
            rung.clear()
            async with database.transaction() as connection:
                run = await RunStore(connection).get(TENANT, run_id)
            if run.state.terminal:
                return run
            await wait_for(rung, 1.0)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Database, Doorbell]]:
    await migrate(url)
    async with Database(url) as database, Doorbell(url) as bell:
        yield database, bell


async def test_a_run_is_executed_judged_and_recorded(wiring: dict[str, Any]) -> None:
    async with opened(wiring["url"]) as (database, bell), runner(wiring):
        run_id = await admit(database)
        run = await ended(database, bell, run_id)
        assert (run.state, run.reason) == (RunState.ACCEPTED, None)
        assert run.answer == {"note": "paid 5"}
        assert run.usage.steps == 4
        assert run.initial_snapshot is not None
        async with database.transaction() as connection:
            events = await RunStore(connection).events(TENANT, run_id)
            calls = await RunStore(connection).model_calls(TENANT, run_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [call.turn for call in calls] == [0, 1, 2, 3]


async def test_a_killed_runner_is_replaced_and_nothing_happens_twice(
    wiring: dict[str, Any],
) -> None:
    """A file written at step 1 is read at step 3 after the kill; each effect happened once."""
    async with opened(wiring["url"]) as (database, bell):
        async with runner(wiring, stall_at=2) as doomed:
            run_id = await admit(database)
            await hears(doomed, "stalled")
            doomed.kill()
            await doomed.wait()
        async with runner(wiring):
            run = await ended(database, bell, run_id)
        assert (run.state, run.reason) == (RunState.ACCEPTED, None)
        assert run.attempts == 2
        async with database.transaction() as connection:
            events = [e.body for e in await RunStore(connection).events(TENANT, run_id)]
    read = [b.result for b in events if isinstance(b, Observed) and b.result.name == "read_file"]
    assert [result.content for result in read] == ["paid 5"]
    assert [b.step for b in events if isinstance(b, Thought)] == [0, 1, 2, 3]
    assert [b.attempt for b in events if isinstance(b, Started)] == [1, 2]
    effects = Path(wiring["book"]).read_text().splitlines()
    assert effects == [f"{run_id}/1.0 5"]


async def test_an_effect_of_unknown_result_asks_for_a_person(wiring: dict[str, Any]) -> None:
    """The runner died after the intent and before the result: nobody may guess."""
    async with opened(wiring["url"]) as (database, bell):
        async with runner(wiring, stall_at=1) as doomed:
            run_id = await admit(database)
            await hears(doomed, "stalled")
            doomed.kill()
            await doomed.wait()
        await _announce_the_post(database, run_id)
        async with runner(wiring):
            run = await ended(database, bell, run_id)
    assert run.state is RunState.NEEDS_ATTENTION
    assert run.reason is not None
    assert "whether it took effect is unknown" in run.reason
    assert not Path(wiring["book"]).exists(), "the call was not repeated"


async def _announce_the_post(database: Database, run_id: RunId) -> None:
    """Write what a runner writes just before a consequential call, and die."""
    from runtime.context import Conversation
    from runtime.domain import load_domain
    from runtime.engine.protocol import Completion
    from runtime.engine.tool_calls import parse_calls
    from runtime.journal import ConnectorStates
    from runtime.run_executor import run_tools
    from runtime.sandbox.tools import sandbox_tools
    from runtime.testing import byte_template
    from tests.ledger import LedgerFactory

    template, factory = byte_template(), LedgerFactory(Path("unused"))
    domain = load_domain(
        runner_process.DOMAIN,
        known_tools=[*(t.name for t in sandbox_tools()), "finish"],
        known_connectors={"ledger": factory},
    )
    ledger = await factory.open(
        mode="simulate", seed=0, initial=None, state=ConnectorStates({}).of("ledger")
    )
    task = Task(id="t", domain="ledger", input={"amount": 5})
    conversation = Conversation.open(
        template, domain, task, list(run_tools(domain, {"ledger": ledger}))
    )
    async with database.transaction() as connection:
        store = RunStore(connection)
        for call in await store.model_calls(TENANT, run_id):
            conversation.replay(call)
        for event in await store.events(TENANT, run_id):
            if isinstance(event.body, Observed):
                conversation.observe([(event.body.result.name, event.body.result.content)])
    sampled = template.reply(runner_process.SCRIPT[1])
    completion = Completion(sampled, [-0.5] * len(sampled), "stop", PolicyId("scripted"), 0)
    model_call = conversation.commit(completion, policy_id=PolicyId("scripted"), temperature=1.0)
    text = template.decode(sampled)
    thought = Thought(
        step=1,
        turn=1,
        text=text,
        calls=parse_calls(text, 1),
        sampled_tokens=len(sampled),
        prompt_tokens=0,
    )
    intent = Intent(call_id="1.0", name="post", arguments_hash="0" * 16, effect="consequential")
    lease = await _take_over(database, run_id)
    async with database.transaction() as connection:
        await RunStore(connection).record(lease, [thought, intent], model_call=model_call)


async def _take_over(database: Database, run_id: RunId) -> Any:
    """Claim the run as a runner that will be silent at once."""
    async with asyncio.timeout(10):
        while True:
            async with database.transaction() as connection:
                queue = RunQueue(connection)
                await queue.sweep()
                leases = await queue.claim("silent", limit=1, lease_seconds=0.5)
            if leases:
                assert leases[0].run_id == run_id
                return leases[0]
            await asyncio.sleep(0.1)  # the dead runner's lease has to run out: there is no event


async def test_a_running_run_is_cancelled_and_its_usage_kept(wiring: dict[str, Any]) -> None:
    async with opened(wiring["url"]) as (database, bell), runner(wiring, stall_at=1) as process:
        run_id = await admit(database)
        await hears(process, "stalled")
        async with database.transaction() as connection:
            await RunQueue(connection).cancel(TENANT, run_id)
        run = await ended(database, bell, run_id, seconds=10)
    assert run.state is RunState.CANCELLED
    assert run.usage.steps == 1
    assert run.usage.sampled_tokens > 0


async def test_a_draining_runner_gives_its_run_back(wiring: dict[str, Any]) -> None:
    async with opened(wiring["url"]) as (database, bell):
        async with runner(wiring, stall_at=3, lease_seconds=60.0) as draining:
            run_id = await admit(database)
            await hears(draining, "stalled")
            draining.terminate()
            assert await draining.wait() == 0
        async with runner(wiring):
            run = await ended(database, bell, run_id, seconds=20)
    assert run.state is RunState.ACCEPTED
    assert run.attempts == 1, "giving a run back uses up no attempt"


async def test_a_domain_changed_after_admission_is_an_error_with_its_reason(
    wiring: dict[str, Any],
) -> None:
    async with opened(wiring["url"]) as (database, bell), runner(wiring):
        run = await ended(database, bell, await admit(database, domain_digest="sha256:old"))
    assert run.state is RunState.ERROR
    assert run.verdict is None
    assert run.reason is not None
    assert "changed after the run was admitted" in run.reason
