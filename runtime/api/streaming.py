"""A run's events as they are committed: woken by the doorbell, polling besides.

A follower holds no connection while it waits: it asks one small question per ring or second, and
reads events in batches, so that a slow reader bounds its own memory. Every poll also asks whether
the caller's key is still good. A stream ends when the run is over and everything was sent, when
the key is revoked, when the process drains, and where the database is away; clients come back with
`Last-Event-ID` and miss nothing.

Scaling out: any process can serve any run's stream; all state is the number of the last event.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi.sse import format_sse_event

from runtime.api.auth import Caller
from runtime.api.schemas import EventView
from runtime.api.services import ApiServices
from runtime.api.views import event_view
from runtime.database import EVENTS_CHANNEL, wait_for
from runtime.errors import NotFound, StoreError
from runtime.run import RunId, RunState
from runtime.run_store import RunStore, Statements

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
BATCH = 100
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run's record has come."""

    state: RunState
    last_seq: int
    has_gold: bool

    def over(self, after: int) -> bool:
        """Whether nothing will come after event `after`."""
        return self.state.terminal and self.last_seq <= after


class _Progress(Statements):
    async def of(self, caller: Caller, run_id: RunId) -> Progress:
        row = await self._one("run_progress", tenant_id=caller.tenant_id, id=run_id)
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        return Progress(RunState(row["state"]), row["last_seq"], row["has_gold"])


async def progress(services: ApiServices, caller: Caller, run_id: RunId) -> Progress:
    """Raises NotFound."""
    async with services.database.transaction() as connection:
        return await _Progress(connection).of(caller, run_id)


async def read_events(
    services: ApiServices, caller: Caller, run_id: RunId, after: int, limit: int = BATCH
) -> tuple[Progress, list[EventView]]:
    """Up to `limit` events after `after`, and how far the record had come. Raises NotFound."""
    async with services.database.transaction() as connection:
        now = await _Progress(connection).of(caller, run_id)
        if now.last_seq <= after:
            return now, []
        events = await RunStore(connection).events(
            caller.tenant_id, run_id, after=after, limit=limit
        )
    return now, [event_view(event, has_gold=now.has_gold) for event in events]


async def all_events(services: ApiServices, caller: Caller, run_id: RunId) -> list[EventView]:
    """The whole record so far. Raises NotFound."""
    found: list[EventView] = []
    while True:
        after = found[-1].seq if found else 0
        now, batch = await read_events(services, caller, run_id, after, limit=1_000)
        found += batch
        if not batch or batch[-1].seq >= now.last_seq:
            return found


async def until_over(
    services: ApiServices, caller: Caller, run_id: RunId, seconds: float
) -> RunState:
    """Wait for the end of a run, at most so many seconds; its state by then. Raises NotFound."""
    deadline = time.monotonic() + seconds
    async with services.doorbell.ear(EVENTS_CHANNEL, run_id) as rung:
        while True:
            rung.clear()
            now = await progress(services, caller, run_id)
            left = deadline - time.monotonic()
            if now.state.terminal or left <= 0 or services.draining.is_set():
                return now.state
            await wait_for(rung, min(left, POLL_SECONDS))


async def follow(
    services: ApiServices, caller: Caller, run_id: RunId, after: int
) -> AsyncIterator[EventView | None]:
    """Every event after `after` as it is committed, until the run is over; None while idle."""
    async with services.doorbell.ear(EVENTS_CHANNEL, run_id) as rung:
        while True:
            rung.clear()
            now, events = await read_events(services, caller, run_id, after)
            for event in events:
                yield event
                after = event.seq
            if now.over(after) or await _must_end(services, caller):
                return
            if now.last_seq <= after and not await wait_for(rung, POLL_SECONDS):
                yield None


async def _must_end(services: ApiServices, caller: Caller) -> bool:
    return services.draining.is_set() or not await services.authenticator.still_valid(caller)


async def sse(
    services: ApiServices, caller: Caller, run_id: RunId, after: int
) -> AsyncIterator[bytes]:
    """The followed events in the wire format of server-sent events, with heartbeat comments."""
    yield format_sse_event(comment=f"events of {run_id} after {after}", retry=1000)
    sent_at = time.monotonic()
    try:
        async for event in follow(services, caller, run_id, after):
            if event is not None:
                yield _frame(event)
            elif time.monotonic() - sent_at < services.heartbeat_seconds:
                continue
            else:
                yield format_sse_event(comment="still here")
            sent_at = time.monotonic()
            await asyncio.sleep(0)  # a reader that left is noticed even where no send waits
    except StoreError as error:  # the answer has begun: end it, the client comes back for the rest
        log.warning("stream of %s ended: %s", run_id, error)


def _frame(event: EventView) -> bytes:
    return format_sse_event(data_str=event.model_dump_json(), event=event.type, id=str(event.seq))
