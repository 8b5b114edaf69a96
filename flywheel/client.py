"""The typed client of the wheel's routes: `NoriaClient` with cycles, pool, adapters and releases.

Opening a cycle is safe to repeat (a domain turns one cycle at a time), and so is an import (the
pool knows what it has); promoting and rolling back are sent once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flywheel.schemas import (
    AdapterList,
    AdapterView,
    CreateCycle,
    CycleList,
    CycleView,
    Imported,
    ImportedTask,
    ImportTasks,
    PoolPage,
    PoolTaskView,
    Promote,
    ReleaseList,
    ReleaseView,
    RollBack,
)
from runtime.client import NoriaClient, checked, read, segment

IMPORT_VALUES = 10_000
"""JSON values in one import request at most; the API refuses bodies of more than twice as many."""


@dataclass(frozen=True, slots=True)
class OpenedCycle:
    cycle: CycleView
    new: bool
    """False where it was running already."""


class WheelClient(NoriaClient):
    """Needs a key with the scope `flywheel`; promoting and rolling back need `release`."""

    # ------------------------------------------------------------ cycles

    def create_cycle(
        self,
        domain: str,
        *,
        profile: str | None = None,
        level: str | None = None,
        seed: int = 0,
    ) -> OpenedCycle:
        """Turn the wheel of a domain now, or join the cycle that is running."""
        given = {"domain": domain, "profile": profile, "level": level, "seed": seed}
        body = checked(CreateCycle, {name: v for name, v in given.items() if v is not None})
        answer = self._call("POST", "/v1/cycles", body=body, repeatable=True)
        return OpenedCycle(read(CycleView, answer), answer.status_code == 202)

    def cycle(self, cycle_id: str) -> CycleView:
        return read(CycleView, self._call("GET", f"/v1/cycles/{segment(cycle_id)}"))

    def cycles(self, domain: str | None = None, *, limit: int = 50) -> list[CycleView]:
        """Newest first, without their stages."""
        query = _query(domain=domain, limit=limit)
        return read(CycleList, self._call("GET", "/v1/cycles", query=query)).cycles

    def stop_cycle(self, cycle_id: str) -> CycleView:
        """Asks; the cycle ends within seconds."""
        path = f"/v1/cycles/{segment(cycle_id)}/stop"
        return read(CycleView, self._call("POST", path, repeatable=True))

    # ------------------------------------------------------------ pool

    def import_tasks(
        self, domain: str, tasks: Sequence[ImportedTask], *, split: str = "practice"
    ) -> Imported:
        """Put tasks into the pool, in as many requests as it takes."""
        stored = known = 0
        for part in portions(tasks):
            body = checked(ImportTasks, {"domain": domain, "split": split, "tasks": part})
            answer = self._call("POST", "/v1/pool/tasks", body=body, repeatable=True)
            taken = read(Imported, answer)
            stored, known = stored + taken.stored, known + taken.known
        return Imported(stored=stored, known=known)

    def pool(
        self,
        domain: str | None = None,
        *,
        status: str | None = None,
        split: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> PoolPage:
        """One page, newest first, with the counts by status."""
        query = _query(domain=domain, status=status, split=split, cursor=cursor, limit=limit)
        return read(PoolPage, self._call("GET", "/v1/pool/tasks", query=query))

    def pool_tasks(
        self, domain: str | None = None, *, status: str | None = None, split: str | None = None
    ) -> Iterator[PoolTaskView]:
        """Newest first, fetching page after page as they are needed."""
        cursor = None
        while True:
            page = self.pool(domain, status=status, split=split, cursor=cursor)
            yield from page.tasks
            if (cursor := page.next_cursor) is None:
                return

    # ------------------------------------------------------------ adapters and releases

    def adapters(self, domain: str | None = None) -> list[AdapterView]:
        query = _query(domain=domain)
        return read(AdapterList, self._call("GET", "/v1/adapters", query=query)).adapters

    def adapter(self, name: str) -> AdapterView:
        return read(AdapterView, self._call("GET", f"/v1/adapters/{segment(name)}"))

    def promote(self, adapter: str, *, reason: str, alias: str = "production") -> ReleaseView:
        """Let an adapter serve an alias: loaded, probed and switched when this returns."""
        body = checked(Promote, {"adapter": adapter, "alias": alias, "reason": reason})
        return read(
            ReleaseView, self._call("POST", "/v1/releases", body=body, timeout=RELEASE_SECONDS)
        )

    def roll_back(self, domain: str, *, reason: str, alias: str = "production") -> ReleaseView:
        """Let an alias resolve to what it resolved to before its last change."""
        body = checked(RollBack, {"domain": domain, "alias": alias, "reason": reason})
        path = "/v1/releases/rollback"
        return read(ReleaseView, self._call("POST", path, body=body, timeout=RELEASE_SECONDS))

    def releases(self, domain: str | None = None) -> list[ReleaseView]:
        query = _query(domain=domain)
        return read(ReleaseList, self._call("GET", "/v1/releases", query=query)).releases


RELEASE_SECONDS = 120.0
"""A promotion may have to wait for an engine that is busy."""


def _query(**given: object) -> dict[str, str]:
    return {name: str(value) for name, value in given.items() if value is not None}


def portions(tasks: Sequence[ImportedTask]) -> Iterator[list[ImportedTask]]:
    """The tasks in order, in parts that one request may hold."""
    portion: list[ImportedTask] = []
    values = 0
    for task in tasks:
        more = _values(task.model_dump(mode="json", exclude_unset=True))
        if portion and values + more > IMPORT_VALUES:
            yield portion
            portion, values = [], 0
        portion.append(task)
        values += more
    if portion:
        yield portion


def _values(value: object) -> int:
    """JSON values within one, itself included."""
    if isinstance(value, dict):
        return 1 + sum(map(_values, value.values()))
    return 1 + sum(map(_values, value)) if isinstance(value, list) else 1
