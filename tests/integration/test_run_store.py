"""The run record on a real Postgres: admission, claims, fences, gap-free events."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from runtime.database import MIGRATIONS, Database, migrate
from runtime.errors import Conflict, IdempotencyMismatch, LeaseLost, NotFound, StoreError
from runtime.run import (
    Feedback,
    ModelCall,
    Policy,
    PolicyId,
    Run,
    RunId,
    RunKind,
    RunState,
    Sampling,
    Task,
    TenantId,
    Thought,
    Usage,
)
from runtime.run_queue import MAX_ATTEMPTS, RunQueue
from runtime.run_store import QUERIES, Admission, Lease, Outcome, RunStore, request_hash

TENANT = TenantId("default")


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    await migrate(database_url)
    async with Database(database_url, size=4) as opened:
        yield opened


def admission(**changes: object) -> Admission:
    values: dict[str, object] = {
        "tenant_id": TENANT,
        "kind": RunKind.PRODUCTION,
        "domain_digest": "sha256:d",
        "task": Task(id="t", domain="d", input={"message": "hi"}, files={"a.txt": b"\x00\xff"}),
        "policy": Policy(id=PolicyId("base"), base="sha256:b"),
        "sampling": Sampling(seed=1),
    }
    return Admission(**{**values, **changes})  # type: ignore[arg-type]


async def admit(database: Database, **changes: object) -> RunId:
    async with database.transaction() as connection:
        run_id, _ = await RunStore(connection).admit(admission(**changes))
    return run_id


async def claim(
    database: Database, owner: str = "r1", limit: int = 1, seconds: float = 30
) -> list[Lease]:
    async with database.transaction() as connection:
        return list(await RunQueue(connection).claim(owner, limit=limit, lease_seconds=seconds))


async def get(database: Database, run_id: RunId, **options: bool) -> Run:
    async with database.transaction() as connection:
        return await RunStore(connection).get(TENANT, run_id, **options)


def thought(step: int, text: str = "hello") -> Thought:
    return Thought(step=step, turn=step, text=text, calls=[], sampled_tokens=2, prompt_tokens=3)


def model_call(turn: int) -> ModelCall:
    return ModelCall(
        turn=turn,
        parent_turn=None,
        prompt_length=3,
        prompt_hash="0" * 16,
        prompt_delta=[1, 2, 3],
        sampled=[4, 5],
        logprobs=[-0.5, -1.25],
        finish_reason="stop",
        temperature=1.0,
        policy_id=PolicyId("base"),
        template_digest="sha256:t",
    )


def outcome(state: RunState = RunState.ACCEPTED) -> Outcome:
    return Outcome(state, None, {"queue": "cards"}, None, None, Usage(steps=1))


async def test_migrations_apply_once_and_refuse_edits(
    database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = await asyncio.gather(migrate(database_url), migrate(database_url))
    assert sorted(first + second) == sorted(p.stem for p in MIGRATIONS.glob("*.sql"))
    assert await migrate(database_url) == []
    edited = tmp_path_factory.mktemp("edited")
    for path in MIGRATIONS.glob("*.sql"):
        (edited / path.name).write_text(path.read_text() + "\n-- edited")
    with pytest.raises(StoreError, match="edited after it was applied"):
        await migrate(database_url, folder=edited)
    empty = tmp_path_factory.mktemp("older")
    with pytest.raises(StoreError, match="this version of Noria has not"):
        await migrate(database_url, folder=empty)


async def test_a_run_comes_back_as_it_was_admitted(database: Database) -> None:
    task = Task(
        id="t", domain="d", input={"m": "ü"}, files={"a": b"\x00"}, expectation={"queue": "cards"}
    )
    run_id = await admit(database, task=task)
    public = await get(database, run_id)
    assert public.state is RunState.QUEUED
    assert public.task.expectation is None, "the expectation is private"
    assert public.task.files == {}
    assert (await get(database, run_id, private=True)).task == task


async def test_one_key_is_one_run(database: Database) -> None:
    same = {"idempotency_key": "k", "request_hash": request_hash({"a": 1, "b": 2})}
    ids = await asyncio.gather(*(admit(database, **same) for _ in range(12)))
    assert len(set(ids)) == 1
    with pytest.raises(IdempotencyMismatch):
        await admit(database, idempotency_key="k", request_hash=request_hash({"a": 2}))


async def test_urgent_runs_first_then_the_oldest(database: Database) -> None:
    rollout = await admit(database, kind=RunKind.ROLLOUT)
    evaluation = await admit(database, kind=RunKind.EVALUATION)
    first = await admit(database)
    second = await admit(database)
    order = [(await claim(database))[0].run_id for _ in range(4)]
    assert order == [first, second, evaluation, rollout]


async def test_no_run_is_claimed_twice(database: Database) -> None:
    ids = {await admit(database) for _ in range(20)}
    claims = await asyncio.gather(*(claim(database, f"r{i}", limit=3) for i in range(10)))
    claimed = [lease.run_id for leases in claims for lease in leases]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) <= ids


async def test_events_are_gap_free_under_concurrent_writers(database: Database) -> None:
    run_id = await admit(database)
    (lease,) = await claim(database)

    async def write(step: int) -> None:
        async with database.transaction() as connection:
            await RunStore(connection).record(lease, [thought(step), thought(step)])

    await asyncio.gather(*(write(step) for step in range(10)))
    async with database.transaction() as connection:
        events = await RunStore(connection).events(TENANT, run_id)
    assert [event.seq for event in events] == list(range(1, 22))


async def test_a_fenced_off_runner_writes_nothing(database: Database) -> None:
    run_id = await admit(database)
    (zombie,) = await claim(database, "zombie", seconds=0)
    async with database.transaction() as connection:
        assert await RunQueue(connection).sweep() == 1
    (heir,) = await claim(database, "heir")
    assert heir.fence > zombie.fence
    async with database.transaction() as connection:
        store = RunStore(connection)
        with pytest.raises(LeaseLost):
            await store.record(zombie, [thought(0)])
        with pytest.raises(LeaseLost):
            await store.finish(zombie, outcome())
    async with database.transaction() as connection:
        await RunStore(connection).finish(heir, outcome())
    assert (await get(database, run_id)).state is RunState.ACCEPTED


async def test_a_run_that_kills_its_runners_is_buried_with_its_reason(database: Database) -> None:
    run_id = await admit(database)
    for _ in range(MAX_ATTEMPTS):
        assert await claim(database, seconds=0)
        async with database.transaction() as connection:
            await RunQueue(connection).sweep()
    run = await get(database, run_id)
    assert run.state is RunState.ERROR
    assert run.reason is not None
    assert "died or went silent" in run.reason
    assert await claim(database) == []


async def test_a_queued_run_is_cancelled_at_once_and_an_ended_one_never(database: Database) -> None:
    run_id = await admit(database)
    async with database.transaction() as connection:
        assert await RunQueue(connection).cancel(TENANT, run_id) is RunState.CANCELLED
    with pytest.raises(Conflict, match="already ended"):
        async with database.transaction() as connection:
            await RunQueue(connection).cancel(TENANT, run_id)
    with pytest.raises(NotFound):
        async with database.transaction() as connection:
            await RunQueue(connection).cancel(TENANT, RunId("run_none"))


async def test_held_kinds_are_not_claimed(database: Database) -> None:
    rollout = await admit(database, kind=RunKind.ROLLOUT)
    production = await admit(database)
    async with database.transaction() as connection:
        await connection.execute(
            "INSERT INTO runtime.holds VALUES ('h', '{rollout,shadow}', 'training', "
            "now() + interval '1 minute'), ('old', '{production}', 'over', now())"
        )
    assert [lease.run_id for lease in await claim(database, limit=9)] == [production]
    async with database.transaction() as connection:
        await connection.execute("UPDATE runtime.holds SET until = now()")
    assert [lease.run_id for lease in await claim(database, limit=9)] == [rollout]


async def test_model_calls_come_back_token_exact(database: Database) -> None:
    run_id = await admit(database)
    (lease,) = await claim(database)
    async with database.transaction() as connection:
        await RunStore(connection).record(lease, [thought(0)], model_call=model_call(0))
    async with database.transaction() as connection:
        assert await RunStore(connection).model_calls(TENANT, run_id) == [model_call(0)]


@given(text=st.text(st.characters(codec=None), max_size=40))
def test_storable_text_changes_nothing_but_nul_and_surrogates(text: str) -> None:
    import json

    from runtime.run_store import _storable

    stored = json.loads(_storable({"text": [text]}))["text"][0]
    expected = "".join(
        "\N{REPLACEMENT CHARACTER}" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in text
    )
    assert stored == expected


async def test_nul_bytes_and_lone_surrogates_are_stored(database: Database) -> None:
    run_id = await admit(database)
    (lease,) = await claim(database)
    async with database.transaction() as connection:
        await RunStore(connection).record(lease, [thought(0, "a\0b\ud800c 🙂")])
    async with database.transaction() as connection:
        events = await RunStore(connection).events(TENANT, run_id)
    assert events[-1].body.text == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c 🙂"  # type: ignore[union-attr]


async def test_events_cannot_be_edited(database: Database, database_url: str) -> None:
    await admit(database)
    with psycopg.connect(database_url) as connection, pytest.raises(psycopg.errors.RaiseException):
        connection.execute("UPDATE runtime.events SET seq = 9")


async def test_feedback_waits_for_the_end(database: Database) -> None:
    run_id = await admit(database)
    with pytest.raises(Conflict):
        async with database.transaction() as connection:
            await RunStore(connection).give_feedback(TENANT, run_id, Feedback(rating="down"))
    (lease,) = await claim(database)
    async with database.transaction() as connection:
        await RunStore(connection).finish(lease, outcome(RunState.REJECTED))
        seq = await RunStore(connection).give_feedback(
            TENANT, run_id, Feedback(rating="down", correction={"queue": "fraud"})
        )
    assert seq == 3


async def test_the_claim_uses_its_index(database: Database) -> None:
    for _ in range(3):
        await admit(database)
    async with database.transaction() as connection:
        await connection.execute("SET LOCAL enable_seqscan = off")
        cursor = await connection.execute(
            f"EXPLAIN {QUERIES['claim_runs']}".encode(),
            {"limit": 1, "owner": "r1", "lease_seconds": 30},
        )
        plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
    assert "runs_to_claim" in plan
    assert "Sort" not in plan
