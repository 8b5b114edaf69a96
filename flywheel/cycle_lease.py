"""The right to turn one cycle: taken, renewed by a thread while held, given back.

Every write goes through the fence it was taken with. A worker that lost its lease learns it from
the renewing thread within seconds, and from its next write at the latest.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from flywheel.cycle_store import CycleStore
from flywheel.records import CycleId, CycleState, Stage, StageName, StageState
from flywheel.store import transaction
from runtime.errors import LeaseLost, StoreError
from runtime.run import Json, TenantId

log = logging.getLogger(__name__)

LEASE_SECONDS = 20.0
RENEW_SECONDS = 2.0
"""Also how soon a request to stop is heard."""
SHOW_SECONDS = 0.5
"""Progress is written at most this often."""


class CycleLease:
    """Made by `take`."""

    def __init__(self, url: str, tenant_id: TenantId, cycle_id: CycleId, fence: int) -> None:
        self._url = url
        self._tenant_id = tenant_id
        self._cycle_id = cycle_id
        self._fence = fence
        self._shown = 0.0
        self._over = threading.Event()
        self.lost = False
        self.stop_requested = False

    @classmethod
    @contextmanager
    def take(
        cls,
        url: str,
        tenant_id: TenantId,
        cycle_id: CycleId,
        owner: str,
        seconds: float = LEASE_SECONDS,
    ) -> Generator["CycleLease | None"]:
        """The lease for the block; None where another worker holds it, or the cycle has ended."""
        with transaction(url) as connection:
            store = CycleStore(connection)
            fence = store.claim(tenant_id, cycle_id, owner, lease_seconds=seconds)
        if fence is None:
            yield None
            return
        lease = cls(url, tenant_id, cycle_id, fence)
        renewing = threading.Thread(target=lease._renew, args=(seconds,), name="cycle-lease")
        renewing.start()
        try:
            yield lease
        finally:
            lease._over.set()
            renewing.join()
            lease._write(lambda store: store.release(tenant_id, cycle_id, fence))

    def _renew(self, seconds: float) -> None:
        while not self._over.wait(RENEW_SECONDS):
            try:
                self._write(lambda store: self._renewed(store, seconds))
            except LeaseLost:
                self.lost = True
                return
            except StoreError as error:  # the database is away; the lease outlives a short absence
                log.warning("cycle %s: lease not renewed: %s", self._cycle_id, error)

    def _renewed(self, store: CycleStore, seconds: float) -> None:
        self.stop_requested = store.renew(
            self._tenant_id, self._cycle_id, self._fence, lease_seconds=seconds
        )

    def _write(self, write: Callable[[CycleStore], Any]) -> Any:
        with transaction(self._url) as connection:
            return write(CycleStore(connection))

    # ------------------------------------------------------------ what the holder may write

    def start(self, stage: Stage) -> int:
        """The attempt's number. Raises LeaseLost."""
        return self._write(lambda store: store.start_stage(self._tenant_id, stage, self._fence))

    def show(self, stage: Stage, progress: dict[str, Json]) -> None:
        """Publish progress, unless that was done a moment ago."""
        if time.monotonic() - self._shown < SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        self._write(lambda s: s.show_progress(self._tenant_id, stage, self._fence, progress))

    def save(
        self,
        stage: Stage,
        state: StageState,
        *,
        skip: Sequence[StageName] = (),
        **written: Any,
    ) -> None:
        """Write what the stage came to, in one transaction with what it skips. Raises LeaseLost."""

        def write(store: CycleStore) -> None:
            store.save_stage(self._tenant_id, stage, self._fence, state, **written)
            if skip:
                reason = written.get("reason") or "not needed"
                store.skip(self._tenant_id, self._cycle_id, reason, skip)

        self._write(write)

    def give_back(self, stage: Stage) -> None:
        """Leave the stage to another worker; the attempt does not count."""
        self._write(lambda store: store.give_back(self._tenant_id, stage, self._fence))

    def retry(self, stage: Stage, reason: str, *, after: float) -> None:
        """Have the stage run again, `after` seconds from now at the earliest. Raises LeaseLost."""

        def write(store: CycleStore) -> None:
            store.save_stage(self._tenant_id, stage, self._fence, StageState.PENDING, reason=reason)
            store.rest(self._tenant_id, self._cycle_id, self._fence, after)

        self._write(write)

    def end(
        self, state: CycleState, *, outcome: str | None = None, reason: str | None = None
    ) -> None:
        """Raises LeaseLost."""

        def write(store: CycleStore) -> None:
            store.end(
                self._tenant_id,
                self._cycle_id,
                self._fence,
                state,
                outcome=outcome,
                reason=reason,
            )
            store.skip(self._tenant_id, self._cycle_id, reason or f"the cycle is {state}")

        self._write(write)
