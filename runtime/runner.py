"""The runner: claims queued runs under a lease, executes them, and lets go of nothing.

Three small loops share one process: *claim* takes as many runs as there are free slots, woken by
the doorbell and polling besides; *heartbeat* extends the leases, carries out cancellations and
drops what another runner took over; *sweep* re-queues the runs of runners that went silent. Every
write of a run goes through its fence, so a runner that was only asleep can do no harm.

Scaling out: any number of runner processes on any number of machines share the queue through
`FOR UPDATE SKIP LOCKED`; each needs Postgres, the engine and the snapshot store.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.database import QUEUE_CHANNEL, Database, Doorbell, wait_for
from runtime.domain import Domain
from runtime.errors import Boundary, DomainError, Failure, LeaseLost, NoriaError, StoreError
from runtime.fold import seconds_spent
from runtime.journal import usage_of
from runtime.run import Event, EventBody, Json, ModelCall, Run, RunId, RunState, Usage
from runtime.run_executor import Attempt, Executed, RunExecutor
from runtime.run_queue import RunQueue
from runtime.run_store import Lease, Outcome, RunStore

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""How late a runner may notice work when the doorbell is lost."""


@dataclass(frozen=True, slots=True)
class StoreRecorder:
    """Commits a run's events under its lease, one transaction per call."""

    database: Database
    lease: Lease

    async def record(
        self,
        *bodies: EventBody,
        model_call: ModelCall | None = None,
        connector_states: Mapping[str, Json] | None = None,
    ) -> None:
        async with self.database.transaction() as connection:
            await RunStore(connection).record(
                self.lease, bodies, model_call=model_call, connector_states=connector_states
            )


@dataclass(slots=True)
class _Held:
    """A run this runner holds."""

    lease: Lease
    task: asyncio.Task[None]
    cancelled_by_user: bool = False


class Runner:
    def __init__(
        self,
        database: Database,
        doorbell: Doorbell,
        executor: RunExecutor,
        domains: Mapping[str, Domain],
        *,
        concurrency: int,
        lease_seconds: float,
    ) -> None:
        self._database = database
        self._doorbell = doorbell
        self._executor = executor
        self._domains = domains
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._held: dict[RunId, _Held] = {}
        self._slot_freed = asyncio.Event()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set, then give unfinished runs back to the queue."""
        loops = [
            asyncio.create_task(self._forever(self._claim_free_slots), name="claim"),
            asyncio.create_task(self._forever(self._heartbeat), name="heartbeat"),
            asyncio.create_task(self._forever(self._sweep), name="sweep"),
        ]
        on_ready()
        try:
            await stop.wait()
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self._drain()

    async def _forever(self, once: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await once()
            except StoreError as error:  # the database is away: leases run on until it is back
                log.warning("%s: %s", once.__name__, error)
                await asyncio.sleep(POLL_SECONDS)

    # ------------------------------------------------------------ claim

    async def _claim_free_slots(self) -> None:
        async with self._doorbell.ear(QUEUE_CHANNEL) as rung:
            while True:
                rung.clear()
                self._slot_freed.clear()
                free = self._concurrency - len(self._held)
                claimed = await self._claim(free) if free else 0
                if free == 0:
                    await self._slot_freed.wait()
                elif claimed < free:
                    await wait_for(rung, POLL_SECONDS)

    async def _claim(self, free: int) -> int:
        async with self._database.transaction() as connection:
            leases = await RunQueue(connection).claim(
                self.name, limit=free, lease_seconds=self._lease_seconds
            )
        for lease in leases:
            task = asyncio.create_task(self._serve(lease), name=lease.run_id)
            self._held[lease.run_id] = _Held(lease, task)
        return len(leases)

    # ------------------------------------------------------------ one run

    async def _serve(self, lease: Lease) -> None:
        """Execute one leased run to its end; whatever happens, the slot is freed."""
        try:
            run, attempt = await self._load(lease)
            executed = await self._execute(run, attempt, lease)
            await self._finish(lease, executed.outcome)
        except asyncio.CancelledError:
            await self._after_cancel(lease)
        except LeaseLost as error:
            log.warning("dropped: %s", error)
        except StoreError as error:  # not recorded: the lease runs out and the run is resumed
            log.warning("run %s: %s", lease.run_id, error)
        except Exception:  # a bug: the run is tried again, and buried when it keeps happening
            log.exception("run %s could not be recorded", lease.run_id)
        finally:
            del self._held[lease.run_id]
            self._slot_freed.set()

    async def _load(self, lease: Lease) -> tuple[Run, Attempt]:
        async with self._database.transaction() as connection:
            store = RunStore(connection)
            run = await store.get(lease.tenant_id, lease.run_id, private=True)
            attempt = Attempt(
                run_id=run.id,
                task=run.task,
                policy=run.policy,
                sampling=run.sampling,
                runner=self.name,
                number=lease.attempt,
                events=await store.events(lease.tenant_id, lease.run_id),
                model_calls=await store.model_calls(lease.tenant_id, lease.run_id),
                connector_states=await store.connector_states(lease.tenant_id, lease.run_id),
            )
        return run, attempt

    async def _execute(self, run: Run, attempt: Attempt, lease: Lease) -> Executed:
        recorder = StoreRecorder(self._database, lease)
        try:
            return await self._executor.execute(attempt, self._domain(run), recorder)
        except (LeaseLost, StoreError):
            raise
        except NoriaError as error:
            return _broken(error.failure())
        except Exception as error:  # the boundary of a run: a bug in one must not stop the others
            log.exception("run %s failed inside Noria", lease.run_id)
            return _broken(_internal(error))

    def _domain(self, run: Run) -> Domain:
        domain = self._domains.get(run.domain)
        if domain is None or domain.digest != run.domain_digest:
            raise DomainError(
                f"this runner has no domain {run.domain!r} at {run.domain_digest}: it changed "
                "after the run was admitted; submit the run again"
            )
        return domain

    async def _finish(self, lease: Lease, outcome: Outcome) -> None:
        async with self._database.transaction() as connection:
            await RunStore(connection).finish(lease, outcome)

    async def _after_cancel(self, lease: Lease) -> None:
        held = self._held[lease.run_id]
        async with self._database.transaction() as connection:
            if held.cancelled_by_user:
                events = await RunStore(connection).events(lease.tenant_id, lease.run_id)
                await RunStore(connection).finish(lease, _cancelled(events))
            else:
                await RunQueue(connection).release(lease)

    # ------------------------------------------------------------ heartbeat, sweep, drain

    async def _heartbeat(self) -> None:
        await asyncio.sleep(min(POLL_SECONDS, self._lease_seconds / 3))
        if not self._held:
            return
        before = set(self._held)
        async with self._database.transaction() as connection:
            ours = await RunQueue(connection).heartbeat(
                self.name, lease_seconds=self._lease_seconds
            )
        for run_id in before & set(self._held):
            self._tend(self._held[run_id], ours.get(run_id))

    def _tend(self, held: _Held, cancel_requested: bool | None) -> None:
        if cancel_requested is None:
            held.task.cancel()  # taken over, or finished this instant: nothing of ours counts
        elif cancel_requested and not held.cancelled_by_user:
            held.cancelled_by_user = True
            held.task.cancel()

    async def _sweep(self) -> None:
        await asyncio.sleep(self._lease_seconds / 2)
        async with self._database.transaction() as connection:
            swept = await RunQueue(connection).sweep()
        if swept:
            log.warning("took %d runs back from silent runners", swept)

    async def _drain(self) -> None:
        tasks = [held.task for held in self._held.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _broken(failure: Failure) -> Executed:
    return Executed(
        Outcome(
            state=RunState.ERROR,
            reason=failure.message,
            answer=None,
            verdict=None,
            failure=failure,
            usage=Usage(),
        ),
        artefacts=None,
    )


def _internal(error: Exception) -> Failure:
    return Failure(
        boundary=Boundary.STORE,
        code="internal",
        message=f"a fault inside Noria ({type(error).__name__}); the runner's log has the details",
    )


def _cancelled(events: Sequence[Event]) -> Outcome:
    return Outcome(
        state=RunState.CANCELLED,
        reason="cancelled on request",
        answer=None,
        verdict=None,
        failure=None,
        usage=usage_of([e.body for e in events], seconds_spent(events)),
    )
