"""The run record in Postgres: admission, claims, events, results.

A store is a set of methods over an open transaction: it never connects and never commits. All
writes of a running run go through its fence; whoever lost the lease gets LeaseLost and must stop.
`seq` is gap-free because numbers are reserved by updating the run's own row, which serialises
writers of one run and nobody else.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb
from pydantic import BaseModel, TypeAdapter

from runtime.database import EVENTS_CHANNEL, QUEUE_CHANNEL, SQL_FOLDER, Connection, queries
from runtime.errors import Conflict, Failure, IdempotencyMismatch, LeaseLost, NotFound
from runtime.run import (
    Admitted,
    Event,
    EventBody,
    Feedback,
    Finished,
    Json,
    ModelCall,
    Policy,
    Run,
    RunId,
    RunKind,
    RunState,
    Sampling,
    SnapshotId,
    Started,
    Task,
    TenantId,
    Usage,
    Verdict,
)

QUERIES = queries(SQL_FOLDER / "runs.sql")
_UNSTORABLE = re.compile(r"\\u0000|\\u[dD][89a-fA-F]")
"""Finds candidates in escaped JSON; a proper surrogate pair is one too, and is left alone below."""
_UNSTORABLE_CHARACTER = re.compile("[\x00\ud800-\udfff]")
_body = TypeAdapter[EventBody](EventBody)


def new_run_id() -> RunId:
    """`run_` + 12 hex digits of milliseconds + 16 random ones: sorts by time of admission."""
    return RunId(f"run_{int(time.time() * 1000):012x}{secrets.token_hex(8)}")


@dataclass(frozen=True, slots=True)
class Admission:
    """What is pinned when a run is admitted."""

    tenant_id: TenantId
    kind: RunKind
    domain_digest: str
    task: Task
    policy: Policy
    sampling: Sampling
    idempotency_key: str | None = None
    request_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one run, until it expires or the fence rises."""

    tenant_id: TenantId
    run_id: RunId
    fence: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, as written into its row."""

    state: RunState
    reason: str | None
    answer: dict[str, Json] | None
    verdict: Verdict | None
    failure: Failure | None
    usage: Usage


class Statements:
    """Runs named queries on one open transaction; what both stores share."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def _ring(self, channel: str, payload: str) -> None:
        await self._connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))

    async def _run(self, query: str, **parameters: Any) -> None:
        await self._connection.execute(QUERIES[query].encode(), parameters)

    async def _one(self, query: str, **parameters: Any) -> dict[str, Any] | None:
        cursor = await self._connection.execute(QUERIES[query].encode(), parameters)
        return await cursor.fetchone()

    async def _all(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        cursor = await self._connection.execute(QUERIES[query].encode(), parameters)
        return await cursor.fetchall()


class RunStore(Statements):
    """The run record, over one open transaction."""

    # ------------------------------------------------------------ admission

    async def admit(self, admission: Admission) -> tuple[RunId, bool]:
        """Store a queued run; (id, True), or (the earlier run's id, False) for a repeated key.

        Raises IdempotencyMismatch where the key came with another request before.
        """
        run_id = new_run_id()
        task = admission.task
        row = await self._one(
            "insert_run",
            tenant_id=admission.tenant_id,
            id=run_id,
            kind=admission.kind,
            domain=task.domain,
            domain_digest=admission.domain_digest,
            task=_json(task.model_dump(mode="json", exclude={"files", "expectation"})),
            policy=_json(admission.policy.model_dump()),
            sampling=_json(admission.sampling.model_dump()),
            priority=admission.kind.priority,
            idempotency_key=admission.idempotency_key,
            request_hash=admission.request_hash,
        )
        if row is None:
            return await self._admitted_before(admission), False
        await self._store_private(admission.tenant_id, run_id, task)
        await self.append(admission.tenant_id, run_id, Admitted())
        await self._ring(QUEUE_CHANNEL, "")
        return run_id, True

    async def _admitted_before(self, admission: Admission) -> RunId:
        row = await self._one(
            "find_by_idempotency_key",
            tenant_id=admission.tenant_id,
            idempotency_key=admission.idempotency_key,
        )
        assert row is not None, "the conflicting row is committed and visible"
        if row["request_hash"] != admission.request_hash:
            raise IdempotencyMismatch(
                "this Idempotency-Key was used with a different request; "
                "use a new key, or send the same request again"
            )
        return RunId(row["id"])

    async def _store_private(self, tenant_id: TenantId, run_id: RunId, task: Task) -> None:
        if task.expectation is not None:
            await self._run(
                "insert_private",
                tenant_id=tenant_id,
                run_id=run_id,
                expectation=_json(task.expectation),
            )
        for path, content in task.files.items():
            await self._run(
                "insert_file", tenant_id=tenant_id, run_id=run_id, path=path, content=content
            )

    async def alias(self, tenant_id: TenantId, domain: str, alias: str) -> Policy | None:
        row = await self._one("get_alias", tenant_id=tenant_id, domain=domain, alias=alias)
        return None if row is None else Policy.model_validate(row["policy"])

    # ------------------------------------------------------------ reading

    async def get(self, tenant_id: TenantId, run_id: RunId, *, private: bool = False) -> Run:
        """The run; with `private`, its task carries files and expectation. Raises NotFound."""
        row = await self._one("get_run", tenant_id=tenant_id, id=run_id)
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        run = Run.model_validate(row)
        if not private:
            return run
        return run.model_copy(update={"task": await self._whole_task(run)})

    async def _whole_task(self, run: Run) -> Task:
        keys = {"tenant_id": run.tenant_id, "run_id": run.id}
        private = await self._one("get_private", **keys)
        files = {r["path"]: bytes(r["content"]) for r in await self._all("get_files", **keys)}
        expectation = None if private is None else private["expectation"]
        return run.task.model_copy(update={"files": files, "expectation": expectation})

    async def page(
        self,
        tenant_id: TenantId,
        *,
        domain: str | None = None,
        state: RunState | None = None,
        kind: RunKind | None = None,
        before: tuple[datetime, RunId] | None = None,
        limit: int = 50,
    ) -> list[Run]:
        """Newest first, starting after the cursor `before`."""
        rows = await self._all(
            "list_runs",
            tenant_id=tenant_id,
            domain=domain,
            state=state,
            kind=kind,
            before_at=before[0] if before else None,
            before_id=before[1] if before else None,
            limit=limit,
        )
        return [Run.model_validate(row) for row in rows]

    async def events(
        self, tenant_id: TenantId, run_id: RunId, *, after: int = 0, limit: int = 10_000
    ) -> list[Event]:
        rows = await self._all(
            "list_events", tenant_id=tenant_id, run_id=run_id, after=after, limit=limit
        )
        return [Event.model_validate(row) for row in rows]

    async def model_calls(self, tenant_id: TenantId, run_id: RunId) -> list[ModelCall]:
        rows = await self._all("list_model_calls", tenant_id=tenant_id, run_id=run_id)
        return [ModelCall.model_validate(row) for row in rows]

    async def connector_states(self, tenant_id: TenantId, run_id: RunId) -> dict[str, Json]:
        rows = await self._all("list_connector_states", tenant_id=tenant_id, run_id=run_id)
        return {row["connector"]: row["state"] for row in rows}

    async def count_by_state(self) -> dict[str, int]:
        return {row["state"]: row["runs"] for row in await self._all("count_by_state")}

    # ------------------------------------------------------------ writing a run

    async def append(self, tenant_id: TenantId, run_id: RunId, body: EventBody) -> int:
        """Append one event outside any lease (admission, feedback); its seq. Raises NotFound."""
        row = await self._one("next_seq", tenant_id=tenant_id, id=run_id)
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        await self._insert_event(tenant_id, run_id, row["last_seq"], body)
        await self._ring(EVENTS_CHANNEL, run_id)
        return row["last_seq"]

    async def give_feedback(self, tenant_id: TenantId, run_id: RunId, feedback: Feedback) -> int:
        """Raises NotFound, or Conflict while the run has not ended."""
        run = await self.get(tenant_id, run_id)
        if not run.state.terminal:
            raise Conflict(f"run {run_id} is {run.state}; feedback is taken once it has ended")
        return await self.append(tenant_id, run_id, feedback)

    async def record(
        self,
        lease: Lease,
        bodies: Sequence[EventBody],
        *,
        model_call: ModelCall | None = None,
        connector_states: Mapping[str, Json] | None = None,
    ) -> None:
        """Append events under the lease, with what belongs to them. Raises LeaseLost."""
        row = await self._one(
            "next_seq_fenced",
            tenant_id=lease.tenant_id,
            id=lease.run_id,
            fence=lease.fence,
            count=len(bodies),
        )
        if row is None:
            raise LeaseLost(f"run {lease.run_id} is held by another runner, or has ended")
        first = row["last_seq"] - len(bodies) + 1
        for seq, body in enumerate(bodies, start=first):
            await self._insert_event(lease.tenant_id, lease.run_id, seq, body)
            if isinstance(body, Started):
                await self._open_on(lease, body.snapshot)
        if model_call is not None:
            await self._run(
                "insert_model_call",
                tenant_id=lease.tenant_id,
                run_id=lease.run_id,
                **model_call.model_dump(),
            )
        for connector, state in (connector_states or {}).items():
            await self._run(
                "save_connector_state",
                tenant_id=lease.tenant_id,
                run_id=lease.run_id,
                connector=connector,
                state=_json(state),
            )
        await self._ring(EVENTS_CHANNEL, lease.run_id)

    async def _open_on(self, lease: Lease, snapshot: SnapshotId | None) -> None:
        """The workspace a run first opened on is its initial snapshot; later ones are not."""
        await self._run(
            "set_initial_snapshot", tenant_id=lease.tenant_id, id=lease.run_id, snapshot=snapshot
        )

    async def finish(self, lease: Lease, outcome: Outcome) -> None:
        """Append the last event and write the result into the row. Raises LeaseLost."""
        await self.record(
            lease,
            [Finished(state=outcome.state, reason=outcome.reason, failure=outcome.failure)],
        )
        await self._run(
            "finish_run",
            tenant_id=lease.tenant_id,
            id=lease.run_id,
            fence=lease.fence,
            state=outcome.state,
            reason=outcome.reason,
            answer=_json(outcome.answer),
            verdict=_json(outcome.verdict),
            failure=_json(outcome.failure),
            usage=_json(outcome.usage),
        )

    async def _insert_event(
        self, tenant_id: TenantId, run_id: RunId, seq: int, body: EventBody
    ) -> None:
        dumped = _body.dump_python(body, mode="json", exclude_defaults=False)
        await self._run(
            "insert_event", tenant_id=tenant_id, run_id=run_id, seq=seq, body=_json(dumped)
        )


def _json(value: Json | BaseModel) -> Jsonb | None:
    if value is None:
        return None
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return Jsonb(plain, dumps=_storable)


def _storable(value: Json) -> str:
    """JSON that Postgres can store: NUL and lone surrogates become U+FFFD, nothing else changes."""
    text = json.dumps(value)
    if _UNSTORABLE.search(text) is None:
        return text
    return json.dumps(_replace_unstorable(value))


def _replace_unstorable(value: Json) -> Json:
    match value:
        case str():
            return _UNSTORABLE_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", value)
        case list():
            return [_replace_unstorable(each) for each in value]
        case dict():
            return {_replace_unstorable(k): _replace_unstorable(v) for k, v in value.items()}
        case _:
            return value


def request_hash(request: Mapping[str, Json]) -> str:
    """Hash of a request body, independent of key order; what an idempotency key stands for."""
    canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
