"""What keeps cycles turning: three loops that ask Postgres, and need neither broker nor beat.

*turn* looks which cycles can go on (nobody holds them, their runs are over). It rings Celery for
each, once, so that any worker may take it; a cycle that is still there at the next look, or whose
ring did not get through, is advanced here. *open* opens the cycles whose hour has come, whatever
beat does. *reconcile* keeps the adapters resident that should be. NOTIFY wakes the first; losing it
costs at most `POLL_SECONDS`. A worker that died is no special case: its lease runs out, and the
cycle can go on.

Scaling out: any number of workers watch the same rows; the lease in Postgres decides who advances
a cycle, the fence keeps a worker that was only asleep from writing.
"""

import logging
import os
import select
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic

import psycopg
from psycopg import sql

from flywheel.records import CycleId
from flywheel.store import CYCLES_CHANNEL
from runtime.errors import NoriaError
from runtime.run import TenantId

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""How late the watch may notice a cycle when every bell is lost; also what a ring is given to be
answered before the watch takes the cycle itself."""
SECONDS = {"reconcile": 5.0, "open": 30.0}
"""Between two looks at the adapters, and at the clock."""
HANDS = 4
"""Cycles that one worker advances at once."""


@dataclass(frozen=True, slots=True)
class Due:
    """A cycle that can go on, and where it stands."""

    tenant_id: TenantId
    cycle_id: CycleId
    stage: int
    """Seq of its next stage."""
    state: str
    """That stage's state: a stage that waited is due anew."""
    queue: str
    """Whose workers run that stage."""


@dataclass(frozen=True, slots=True)
class Duties:
    """What a watch does, by whom it does not care."""

    due: Callable[[], Sequence[Due]]
    advance: Callable[[TenantId, CycleId], object]
    """Runs one stage, or leaves where somebody else holds the cycle."""
    open_due: Callable[[], object]
    reconcile: Callable[[], object]
    ring: Callable[[Due], bool]
    """False where it did not get through."""


class Watch:
    """The loops of one worker. `stop` ends them, and the stage in hand where it listens."""

    def __init__(
        self,
        url: str,
        duties: Duties,
        *,
        queues: frozenset[str],
        stop: threading.Event,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._url = url
        self._duties = duties
        self._queues = queues
        self._stop = stop
        self._clock = clock
        self._lock = threading.Lock()
        self._in_hand: set[CycleId] = set()
        self._rung: dict[Due, float] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch while in the block, after a first look at adapters and clock; then set `stop`."""
        timed = {"reconcile": self._duties.reconcile, "open": self._duties.open_due}
        for name, duty in timed.items():
            self._calmly(name, duty)
        loops = [
            threading.Thread(target=self._turn, name="turn"),
            *(self._every(SECONDS[name], name, duty) for name, duty in timed.items()),
        ]
        for loop in loops:
            loop.start()
        try:
            yield
        finally:
            self._stop.set()
            for loop in loops:
                loop.join()

    def take(self, tenant_id: TenantId, cycle_id: CycleId) -> None:
        """Advance a cycle by one stage, unless this worker is at it. What fails is logged: the row
        tells whoever looks next."""
        with self._lock:
            if cycle_id in self._in_hand or self._stop.is_set():
                return
            self._in_hand.add(cycle_id)
        try:
            self._calmly(f"cycle {cycle_id}", lambda: self._duties.advance(tenant_id, cycle_id))
        finally:
            with self._lock:
                self._in_hand.discard(cycle_id)

    def look(self) -> list[Due]:
        """Ring for what is newly due; what this worker has to take itself, since nobody came.

        Raises StoreError.
        """
        due = self._duties.due()
        self._rung = {each: at for each, at in self._rung.items() if each in due}
        unanswered = [each for each in due if not self._answered(each)]
        return [each for each in unanswered if each.queue in self._queues]

    # ------------------------------------------------------------ loops

    def _every(self, seconds: float, name: str, duty: Callable[[], object]) -> threading.Thread:
        def loop() -> None:
            while not self._stop.wait(seconds):
                self._calmly(name, duty)

        return threading.Thread(target=loop, name=name)

    def _turn(self) -> None:
        """Look, wait for a bell, look again."""
        with (
            ThreadPoolExecutor(HANDS, thread_name_prefix="cycle") as hands,
            _woken(self._stop) as w,
        ):
            while not self._stop.is_set():
                with suppress(psycopg.OperationalError), _ear(self._url) as ear:
                    while not self._stop.is_set():
                        self._calmly("due", lambda: self._hand_out(hands))
                        _wait(ear, w)
                self._stop.wait(POLL_SECONDS)  # the database is away: it has no bell

    def _hand_out(self, hands: ThreadPoolExecutor) -> None:
        for due in self.look():
            hands.submit(self.take, due.tenant_id, due.cycle_id)

    def _answered(self, due: Due) -> bool:
        """Ring for a cycle at its first sight; whether somebody may still come for it."""
        if (rung_at := self._rung.get(due)) is not None:
            return self._clock() - rung_at < POLL_SECONDS
        self._rung[due] = self._clock()
        return self._duties.ring(due)

    def _calmly(self, what: str, duty: Callable[[], object]) -> None:
        """The boundary of a loop: whatever one look meets, the next one comes."""
        try:
            duty()
        except NoriaError as error:
            log.warning("%s: %s", what, error)
        except Exception:
            log.exception("%s failed", what)


# ---------------------------------------------------------------- bells


@contextmanager
def _ear(url: str) -> Generator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CYCLES_CHANNEL)))
        yield connection


@contextmanager
def _woken(stop: threading.Event) -> Generator[int]:
    """A descriptor that becomes readable when `stop` is set."""
    reader, writer = os.pipe()

    def tell() -> None:
        stop.wait()
        os.close(writer)

    teller = threading.Thread(target=tell, name="stop")
    teller.start()
    try:
        yield reader
    finally:
        stop.set()
        teller.join()
        os.close(reader)


def _wait(ear: psycopg.Connection, stopped: int) -> None:
    """Until a bell rings, the time is up or the watch is stopped. Raises OperationalError."""
    select.select([ear.fileno(), stopped], [], [], POLL_SECONDS)
    for _ in ear.notifies(timeout=0):
        pass
