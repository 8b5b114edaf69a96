"""What production left to learn from: feedback, failed runs, and what those runs were asked.

Reads the runtime's record through its views and keeps book of what a cycle has looked at. A cycle
that never came to compile what it mined loses it to the next one, so nothing said is ever lost.

Scaling out: reads go back to the last cycle that compiled, not to the beginning; a margin of a day
covers what was committed late, and the book drops what comes twice.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from flywheel.records import Cycle
from flywheel.store import Statements
from runtime.errors import NotFound
from runtime.run import Json, RunId, RunState, Task, TenantId

MARGIN = timedelta(days=1)
BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)


class Heard(NamedTuple):
    """One correction or bad rating of a production run."""

    run_id: RunId
    seq: int
    by: str
    answer: dict[str, Json] | None
    """What the run had answered."""
    correction: dict[str, Json] | None


class Seen(NamedTuple):
    """An entry of the book: this feedback was looked at; seq 0 is the failure itself."""

    run_id: RunId
    seq: int
    category: str


class Asked(NamedTuple):
    """What a run was asked."""

    input: dict[str, Json]
    files: tuple[str, ...]
    """`<path> <sha256>` of each, sorted by path."""


class Evidence(Statements):
    FILE = "mining.sql"

    def since(self, cycle: Cycle) -> datetime:
        """How far back this cycle has to look."""
        row = self._one("mined_until", **_keys(cycle))
        return row["at"] - MARGIN if row and row["at"] else BEGINNING

    def new_feedback(self, cycle: Cycle, since: datetime) -> list[Heard]:
        """By run, in the order in which it came."""
        rows = self._all("new_feedback", **_keys(cycle), since=since)
        return [Heard(**row) for row in rows]

    def new_failures(self, cycle: Cycle, since: datetime) -> list[tuple[RunId, RunState]]:
        rows = self._all("new_failures", **_keys(cycle), since=since)
        return [(RunId(row["run_id"]), RunState(row["state"])) for row in rows]

    def mark(self, cycle: Cycle, seen: Sequence[Seen]) -> None:
        self._run(
            "mark_mined",
            tenant_id=cycle.tenant_id,
            cycle_id=cycle.id,
            run_ids=[each.run_id for each in seen],
            seqs=[each.seq for each in seen],
            categories=[each.category for each in seen],
        )

    def asked(self, tenant_id: TenantId, run_ids: Sequence[RunId]) -> dict[RunId, Asked]:
        rows = self._all("what_was_asked", tenant_id=tenant_id, run_ids=list(run_ids))
        return {row["run_id"]: Asked(row["input"], tuple(row["files"])) for row in rows}

    def task(self, tenant_id: TenantId, run_id: RunId) -> Task:
        """The task a run attempted, with its files and without any gold. Raises NotFound."""
        keys = {"tenant_id": tenant_id, "run_id": run_id}
        row = self._one("run_task", **keys)
        if row is None:
            raise NotFound(f"there is no run {run_id!r}; it was deleted since it was mined")
        files = {each["path"]: bytes(each["content"]) for each in self._all("run_files", **keys)}
        return Task.model_validate(row["task"]).model_copy(update={"files": files})

    def last_corrections(
        self, tenant_id: TenantId, run_id: RunId
    ) -> list[tuple[str, dict[str, Json]]]:
        """What each person said last about the run, the newest first."""
        rows = self._all("last_corrections", tenant_id=tenant_id, run_id=run_id)
        return [(row["by"], row["correction"]) for row in rows]


def _keys(cycle: Cycle) -> dict[str, str]:
    return {"tenant_id": cycle.tenant_id, "domain": cycle.domain, "cycle_id": cycle.id}
