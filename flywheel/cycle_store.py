"""The rows of cycles and stages, over one open transaction; every write of a stage is fenced.

Scaling out: a cycle belongs to whoever holds its lease; any number of workers may ask for it.
"""

import datetime as dt
import secrets
import time
from collections.abc import Sequence
from typing import Any

from flywheel.recipe import Recipe
from flywheel.records import (
    Cycle,
    CycleId,
    CycleOptions,
    CycleState,
    Decision,
    Stage,
    StageName,
    StageState,
)
from flywheel.schemas import CycleView, StageView
from flywheel.store import CYCLES_CHANNEL, Statements, as_json
from runtime.errors import LeaseLost, NotFound
from runtime.run import Json, TenantId


def new_cycle_id() -> CycleId:
    """`cyc_` + 12 hex digits of milliseconds + 8 random ones: sorts by time."""
    return CycleId(f"cyc_{int(time.time() * 1000):012x}{secrets.token_hex(4)}")


class CycleStore(Statements):
    FILE = "cycles.sql"

    # ------------------------------------------------------------ opening, reading

    def insert(
        self,
        tenant_id: TenantId,
        recipe: Recipe,
        *,
        date: dt.date,
        trigger: str,
        options: CycleOptions,
        plan: Sequence[tuple[StageName, int]],
    ) -> CycleId | None:
        """A new cycle with its planned stages (name, round); None where it exists already."""
        row = self._one(
            "insert_cycle",
            tenant_id=tenant_id,
            id=new_cycle_id(),
            domain=recipe.domain,
            date=date,
            trigger=trigger,
            recipe=as_json(recipe),
            options=as_json(options),
        )
        if row is None:
            return None
        cycle_id = CycleId(row["id"])
        for seq, (name, round_) in enumerate(plan):
            self._run(
                "insert_stage",
                tenant_id=tenant_id,
                cycle_id=cycle_id,
                seq=seq,
                name=name,
                round=round_,
            )
        self.ring(cycle_id)
        return cycle_id

    def running(self, tenant_id: TenantId, domain: str) -> CycleId | None:
        row = self._one("running_cycle", tenant_id=tenant_id, domain=domain)
        return None if row is None else CycleId(row["id"])

    def nightly(self, tenant_id: TenantId, domain: str, date: dt.date) -> CycleId | None:
        row = self._one("nightly_cycle", tenant_id=tenant_id, domain=domain, date=date)
        return None if row is None else CycleId(row["id"])

    def get(self, tenant_id: TenantId, cycle_id: CycleId) -> Cycle:
        """Raises NotFound."""
        row = self._one("get_cycle", tenant_id=tenant_id, id=cycle_id)
        if row is None:
            raise NotFound(f"there is no cycle {cycle_id!r}")
        return Cycle.model_validate(row)

    def page(
        self, tenant_id: TenantId, *, domain: str | None = None, limit: int = 50
    ) -> list[Cycle]:
        """Newest first."""
        rows = self._all("list_cycles", tenant_id=tenant_id, domain=domain, limit=limit)
        return [Cycle.model_validate(row) for row in rows]

    def stages(self, tenant_id: TenantId, cycle_id: CycleId) -> list[Stage]:
        rows = self._all("list_stages", tenant_id=tenant_id, cycle_id=cycle_id)
        return [Stage.model_validate(row) for row in rows]

    def tenants(self, domain: str, *, before: dt.datetime) -> list[TenantId]:
        """Tenants that had work of the domain done before that moment."""
        rows = self._all("tenants", domain=domain, before=before)
        return [TenantId(row["tenant_id"]) for row in rows]

    def due(self) -> list[tuple[TenantId, CycleId]]:
        rows = self._all("due_cycles")
        return [(TenantId(row["tenant_id"]), CycleId(row["id"])) for row in rows]

    # ------------------------------------------------------------ leases

    def claim(
        self, tenant_id: TenantId, cycle_id: CycleId, owner: str, *, lease_seconds: float
    ) -> int | None:
        """The fence under which the owner may write; None where another holds the cycle, or it
        has ended."""
        row = self._one(
            "claim_cycle",
            tenant_id=tenant_id,
            id=cycle_id,
            owner=owner,
            lease_seconds=lease_seconds,
        )
        return None if row is None else row["fence"]

    def renew(
        self, tenant_id: TenantId, cycle_id: CycleId, fence: int, *, lease_seconds: float
    ) -> bool:
        """Whether somebody asked the cycle to stop. Raises LeaseLost."""
        row = self._one(
            "renew_lease",
            tenant_id=tenant_id,
            id=cycle_id,
            fence=fence,
            lease_seconds=lease_seconds,
        )
        if row is None:
            raise LeaseLost(f"cycle {cycle_id} is held by another worker, or has ended")
        return row["stop_requested"]

    def release(self, tenant_id: TenantId, cycle_id: CycleId, fence: int) -> None:
        self._run("release_lease", tenant_id=tenant_id, id=cycle_id, fence=fence)
        self.ring(cycle_id)

    # ------------------------------------------------------------ writing, fenced

    def start_stage(self, tenant_id: TenantId, stage: Stage, fence: int) -> int:
        """The number of this attempt, from 1. Raises LeaseLost."""
        row = self._one(
            "start_stage",
            tenant_id=tenant_id,
            cycle_id=stage.cycle_id,
            seq=stage.seq,
            fence=fence,
        )
        if row is None:
            raise LeaseLost(f"cycle {stage.cycle_id} is held by another worker")
        self.ring(stage.cycle_id)
        return row["attempts"]

    def save_stage(
        self,
        tenant_id: TenantId,
        stage: Stage,
        fence: int,
        state: StageState,
        *,
        inputs: dict[str, Json] | None = None,
        outputs: dict[str, Json] | None = None,
        metrics: dict[str, Json] | None = None,
        progress: dict[str, Json] | None = None,
        reason: str | None = None,
    ) -> None:
        """Write what a stage came to. Raises LeaseLost."""
        row = self._one(
            "save_stage",
            tenant_id=tenant_id,
            cycle_id=stage.cycle_id,
            seq=stage.seq,
            fence=fence,
            state=state,
            inputs=as_json(inputs or {}),
            outputs=as_json(outputs or {}),
            metrics=as_json(metrics or {}),
            progress=as_json(progress or {}),
            reason=reason,
            ended=state in (StageState.DONE, StageState.FAILED, StageState.SKIPPED),
        )
        if row is None:
            raise LeaseLost(f"cycle {stage.cycle_id} is held by another worker")
        self.ring(stage.cycle_id)

    def give_back(self, tenant_id: TenantId, stage: Stage, fence: int) -> None:
        """Leave a stage as if this attempt had not begun."""
        self._run(
            "give_back_stage",
            tenant_id=tenant_id,
            cycle_id=stage.cycle_id,
            seq=stage.seq,
            fence=fence,
        )

    def rest(self, tenant_id: TenantId, cycle_id: CycleId, fence: int, seconds: float) -> None:
        """Nobody claims the cycle for so long."""
        self._run("rest", tenant_id=tenant_id, id=cycle_id, fence=fence, seconds=seconds)

    def show_progress(
        self, tenant_id: TenantId, stage: Stage, fence: int, progress: dict[str, Json]
    ) -> None:
        self._run(
            "show_progress",
            tenant_id=tenant_id,
            cycle_id=stage.cycle_id,
            seq=stage.seq,
            fence=fence,
            progress=as_json(progress),
        )

    def skip(
        self,
        tenant_id: TenantId,
        cycle_id: CycleId,
        reason: str,
        names: Sequence[StageName] | None = None,
    ) -> None:
        """Mark what has not begun (of `names`) as skipped; without names, all that is not over."""
        self._run(
            "skip_stages",
            tenant_id=tenant_id,
            cycle_id=cycle_id,
            reason=reason,
            names=None if names is None else list(names),
        )

    def end(
        self,
        tenant_id: TenantId,
        cycle_id: CycleId,
        fence: int,
        state: CycleState,
        *,
        outcome: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Raises LeaseLost."""
        row = self._one(
            "end_cycle",
            tenant_id=tenant_id,
            id=cycle_id,
            fence=fence,
            state=state,
            outcome=outcome,
            reason=reason,
        )
        if row is None:
            raise LeaseLost(f"cycle {cycle_id} is held by another worker, or has ended")
        self.ring(cycle_id)

    def request_stop(self, tenant_id: TenantId, cycle_id: CycleId) -> bool:
        """False where the cycle has ended already."""
        row = self._one("request_stop", tenant_id=tenant_id, id=cycle_id)
        self.ring(cycle_id)
        return row is not None

    def ring(self, cycle_id: CycleId) -> None:
        self._connection.execute("SELECT pg_notify(%s, %s)", (CYCLES_CHANNEL, cycle_id))


# ---------------------------------------------------------------- views


def cycle_view(cycle: Cycle, stages: Sequence[Stage], *, whole: bool = True) -> CycleView:
    """The cycle as its tenant may see it; `whole` with its stages."""
    done = {stage.name: stage for stage in stages if stage.state is StageState.DONE}
    made = {name: done[name].outputs.get("adapter") for name in _TRAINING if name in done}
    decision = done[StageName.GATE].outputs["decision"] if StageName.GATE in done else None
    return CycleView(
        **cycle.model_dump(include=set(CycleView.model_fields) & set(Cycle.model_fields)),
        adapters={str(name): adapter for name, adapter in made.items() if adapter},
        decision=None if decision is None else Decision.model_validate(decision),
        stages=[_stage_view(stage) for stage in stages] if whole else [],
    )


_TRAINING = (StageName.SFT, StageName.GRPO)


def _stage_view(stage: Stage) -> StageView:
    fields: dict[str, Any] = stage.model_dump(include=set(StageView.model_fields))
    return StageView(**fields)
