"""The pool: tasks the wheel can practise on or hold out, each proved before it counts.

A task's content (domain, input, files, connectors, expectation) gives it its id, so that the same
lesson is stored once, however often it is learnt or imported. Its split is decided when it enters
and never changes: what the gate holds out is never trained on.

Scaling out: rows of one tenant and domain are independent of all others.
"""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from flywheel.records import CycleId, PoolStatus, PoolTask, PoolTaskId
from flywheel.store import Statements, as_json
from runtime.domain import Domain
from runtime.errors import NotFound
from runtime.run import Json, ModelCall, RunId, Task, TenantId

Split = Literal["practice", "gate", "report"]
Origin = Literal["correction", "import"]
Cursor = tuple[datetime, PoolTaskId]
"""(created_at, id) of the last task seen."""
CONTRADICTED = "contradictory corrections"
"""How the reason begins where people disagree: no new version of the domain mends that."""
LONGEST_REASON = 1_000


def content_digest(task: Task) -> str:
    """`sha256:…` of what a task is: neither its id nor its split, level or seed."""
    content = {
        "domain": task.domain,
        "input": task.input,
        "files": {path: hashlib.sha256(data).hexdigest() for path, data in task.files.items()},
        "connectors": task.connectors,
        "expectation": task.expectation,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def pool_task(
    tenant_id: TenantId,
    domain: Domain,
    task: Task,
    *,
    origin: Origin,
    split: Split,
    by: str,
    source_run: RunId | None = None,
    problem: str | None = None,
) -> PoolTask:
    """A task as it enters the pool; one with a problem is quarantined from the start."""
    digest = content_digest(task)
    name = PoolTaskId(f"task_{digest.removeprefix('sha256:')[:24]}")
    return PoolTask(
        tenant_id=tenant_id,
        id=name,
        domain=domain.name,
        domain_digest=domain.digest,
        origin=origin,
        source_run=source_run,
        source_by=by,
        split=split,
        task=task.model_copy(update={"id": name, "split": split}),
        content_digest=digest,
        status=PoolStatus.QUARANTINED if problem else PoolStatus.PENDING,
        reason=_storable(problem) if problem else None,
        created_at=datetime.now(UTC),
    )


class PoolStore(Statements):
    """The pool, over one open transaction."""

    FILE = "pool.sql"

    def add(self, task: PoolTask) -> bool:
        """False where the pool has its content already. A task that had been put aside is pending
        again, and counts as new."""
        row = self._one(
            "insert_task",
            **task.model_dump(
                include={
                    "tenant_id", "id", "domain", "domain_digest", "origin", "source_run",
                    "source_by", "split", "content_digest", "status", "reason", "cycle_id",
                }
            ),
            task=as_json(task.task.model_dump(mode="json", exclude={"files", "expectation"})),
            expectation=as_json(task.task.expectation),
        )  # fmt: skip
        if row is None:
            return False
        for path, content in task.task.files.items():
            keys = {"tenant_id": task.tenant_id, "task_id": task.id}
            self._run("insert_file", **keys, path=path, content=content)
        return True

    # ------------------------------------------------------------ reading

    def by_ids(self, tenant_id: TenantId, ids: Sequence[str]) -> list[PoolTask]:
        """Whole, newest first; ids that are not in the pool are left out."""
        return self._whole(tenant_id, self._all("get_tasks", tenant_id=tenant_id, ids=list(ids)))

    def get(self, tenant_id: TenantId, task_id: str) -> PoolTask:
        """Raises NotFound."""
        found = self.by_ids(tenant_id, [task_id])
        if not found:
            raise NotFound(f"there is no pool task {task_id!r}")
        return found[0]

    def page(
        self,
        tenant_id: TenantId,
        *,
        domain: str | None = None,
        status: PoolStatus | None = None,
        split: Split | None = None,
        before: Cursor | None = None,
        limit: int | None = 50,
    ) -> list[PoolTask]:
        """Whole tasks, newest first, starting after the cursor `before`."""
        rows = self._all(
            "list_tasks",
            tenant_id=tenant_id,
            domain=domain,
            status=status,
            split=split,
            before_at=before[0] if before else None,
            before_id=before[1] if before else None,
            limit=limit,
        )
        return self._whole(tenant_id, rows)

    def pending(self, tenant_id: TenantId, domain: str) -> list[PoolTask]:
        return self.page(tenant_id, domain=domain, status=PoolStatus.PENDING, limit=None)

    def admitted(
        self, tenant_id: TenantId, domain: str, split: Split, limit: int | None = None
    ) -> list[PoolTask]:
        """Newest first."""
        status = PoolStatus.ADMITTED
        return self.page(tenant_id, domain=domain, status=status, split=split, limit=limit)

    def of_inputs(
        self, tenant_id: TenantId, domain: str, inputs: Sequence[dict[str, Json]]
    ) -> list[PoolTask]:
        """Pending and admitted tasks whose input is one of these, newest first."""
        asked = [as_json(each) for each in inputs]
        rows = self._all("get_of_inputs", tenant_id=tenant_id, domain=domain, inputs=asked)
        return self._whole(tenant_id, rows)

    def counts(self, tenant_id: TenantId, domain: str | None = None) -> dict[str, int]:
        """Status → tasks, of one domain or of all; statuses without tasks count 0."""
        rows = self._all("count_by_status", tenant_id=tenant_id, domain=domain)
        found = {row["status"]: row["tasks"] for row in rows}
        return {status.value: found.get(status, 0) for status in PoolStatus}

    def _whole(self, tenant_id: TenantId, rows: Sequence[dict[str, Any]]) -> list[PoolTask]:
        ids = [row["id"] for row in rows]
        files: dict[str, dict[str, bytes]] = {}
        for each in self._all("get_files", tenant_id=tenant_id, ids=ids):
            files.setdefault(each["task_id"], {})[each["path"]] = bytes(each["content"])
        return [_pool_task(row, files.get(row["id"], {})) for row in rows]

    # ------------------------------------------------------------ what becomes of a task

    def admit(
        self,
        tenant_id: TenantId,
        task_id: str,
        *,
        snapshot: str | None,
        demonstration: Sequence[ModelCall],
        cycle_id: CycleId,
    ) -> None:
        """A pending task is proved; any other is left as it is."""
        self._run(
            "admit",
            tenant_id=tenant_id,
            id=task_id,
            snapshot=snapshot,
            demonstration=as_json([call.model_dump(mode="json") for call in demonstration]),
            cycle_id=cycle_id,
        )

    def quarantine(
        self, tenant_id: TenantId, task_id: str, *, reason: str, cycle_id: CycleId
    ) -> None:
        said = _storable(reason)
        self._run("quarantine", tenant_id=tenant_id, id=task_id, reason=said, cycle_id=cycle_id)

    def quarantine_of_run(
        self, tenant_id: TenantId, source_run: RunId, *, reason: str, cycle_id: CycleId
    ) -> None:
        """What a run taught is in doubt."""
        self._run(
            "quarantine_of_run",
            tenant_id=tenant_id,
            source_run=source_run,
            reason=_storable(reason),
            cycle_id=cycle_id,
        )

    def supersede(self, task: PoolTask) -> None:
        """Retire what earlier corrections of the task's run had taught."""
        self._run(
            "supersede",
            tenant_id=task.tenant_id,
            source_run=task.source_run,
            content_digest=task.content_digest,
        )

    def reopen(self, tenant_id: TenantId, domain: Domain) -> int:
        """Tasks validated under another version of the domain are pending again; how many."""
        return self._run(
            "reopen",
            tenant_id=tenant_id,
            domain=domain.name,
            domain_digest=domain.digest,
            contradicted=CONTRADICTED,
        )

    def mark_fixed(self, tenant_id: TenantId, ids: Sequence[str], adapter_name: str) -> int:
        """Say with which adapter failures first passed; how many had not been fixed before."""
        return self._run("mark_fixed", tenant_id=tenant_id, ids=list(ids), adapter=adapter_name)


def _storable(reason: str) -> str:
    """Whatever an author's code raised, as text that Postgres holds."""
    plain = reason.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return plain.encode(errors="replace").decode()[:LONGEST_REASON]


def _pool_task(row: dict[str, Any], files: dict[str, bytes]) -> PoolTask:
    values = dict(row)
    private = {"files": files, "expectation": values.pop("expectation")}
    task = Task.model_validate(values.pop("task")).model_copy(update=private)
    return PoolTask(**values, task=task)
