"""Who runs what: claims, leases, heartbeats, sweeping and cancellation.

The row is the job. A claim raises the row's fence; every later write of the run shows the fence it
was claimed with, so a holder that went silent and was replaced can change nothing. A run whose
holders keep dying is buried with its reason instead of being tried for ever.
"""

from collections.abc import Sequence

from runtime.database import QUEUE_CHANNEL
from runtime.errors import Conflict, NotFound
from runtime.run import Finished, RunId, RunState, TenantId
from runtime.run_store import Lease, RunStore, Statements

MAX_ATTEMPTS = 3


class RunQueue(Statements):
    """The queue, over one open transaction."""

    async def claim(self, owner: str, *, limit: int, lease_seconds: float) -> Sequence[Lease]:
        rows = await self._all("claim_runs", owner=owner, limit=limit, lease_seconds=lease_seconds)
        return [
            Lease(TenantId(r["tenant_id"]), RunId(r["id"]), r["fence"], r["attempts"]) for r in rows
        ]

    async def heartbeat(self, owner: str, *, lease_seconds: float) -> dict[RunId, bool]:
        """Extend this owner's leases; run id → whether its cancellation was asked for."""
        rows = await self._all("heartbeat", owner=owner, lease_seconds=lease_seconds)
        return {RunId(row["id"]): row["cancel_requested"] for row in rows}

    async def release(self, lease: Lease) -> None:
        """Give an unfinished run back to the queue (a draining runner)."""
        await self._run(
            "release_run", tenant_id=lease.tenant_id, id=lease.run_id, fence=lease.fence
        )
        await self._ring(QUEUE_CHANNEL, "")

    async def sweep(self, *, limit: int = 100) -> int:
        """Re-queue runs whose holder went silent; bury those that used up their attempts."""
        rows = await self._all("expired_runs", limit=limit)
        for row in rows:
            tenant_id, run_id = TenantId(row["tenant_id"]), RunId(row["id"])
            if row["attempts"] < MAX_ATTEMPTS:
                await self._run("requeue_expired", tenant_id=tenant_id, id=run_id)
            else:
                await self._end(
                    tenant_id,
                    run_id,
                    RunState.RUNNING,
                    RunState.ERROR,
                    f"{MAX_ATTEMPTS} runners in a row died or went silent while running it",
                )
        if rows:
            await self._ring(QUEUE_CHANNEL, "")
        return len(rows)

    async def cancel(self, tenant_id: TenantId, run_id: RunId) -> RunState:
        """Ask for cancellation: a queued run ends at once, a running one within seconds.

        Raises NotFound, or Conflict for a run that has already ended.
        """
        row = await self._one("request_cancel", tenant_id=tenant_id, id=run_id)
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        state = RunState(row["state"])
        if state.terminal:
            raise Conflict(f"run {run_id} has already ended: {state}")
        if state is RunState.RUNNING:
            return state
        await self._end(tenant_id, run_id, state, RunState.CANCELLED, "cancelled before it started")
        return RunState.CANCELLED

    async def _end(
        self, tenant_id: TenantId, run_id: RunId, was: RunState, state: RunState, reason: str
    ) -> None:
        await RunStore(self._connection).append(
            tenant_id, run_id, Finished(state=state, reason=reason)
        )
        await self._run(
            "end_unleased",
            tenant_id=tenant_id,
            id=run_id,
            from_state=was,
            state=state,
            reason=reason,
            failure=None,
        )
