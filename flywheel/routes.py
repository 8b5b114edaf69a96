"""Routes of the wheel: cycles, the pool, adapters, releases.

Synchronous endpoints, each on a thread and in transactions of its own, under the same rules as all
others: the caller is known before the body is read, errors are problems, tenants see their own.
Whoever turns or reads the wheel needs the scope `flywheel`, whoever changes what production is
served by needs `release`.

Scaling out: replicas share nothing but Postgres; opening a cycle only writes its row and rings.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Response
from starlette.requests import HTTPConnection

from flywheel.cycle import open_cycle, stop_cycle
from flywheel.cycle_store import CycleStore, cycle_view
from flywheel.lessons.importing import store_imported
from flywheel.lessons.pool import PoolStore, Split
from flywheel.pool_page import pool_page
from flywheel.records import Adapter, Cycle, CycleId, CycleOptions, PoolStatus, Stage, StageState
from flywheel.release.adapters import AdapterStore
from flywheel.release.aliases import promote, releases, roll_back
from flywheel.rollouts import runs_progress, standing
from flywheel.schemas import (
    AdapterList,
    AdapterView,
    CreateCycle,
    CycleList,
    CycleView,
    Imported,
    ImportTasks,
    PoolPage,
    Promote,
    ReleaseList,
    ReleaseView,
    RollBack,
)
from flywheel.store import Connection, transaction
from flywheel.wheel import Wheel
from runtime.api.auth import Miller, Releaser
from runtime.api.body import StrictRoute
from runtime.api.problems import answers
from runtime.api.schemas import Name
from runtime.api.services import Extension, held_by
from runtime.errors import InputError, NotFound

NAME = "wheel"
_CYCLE_ID = re.compile(r"cyc_[0-9a-f]{20}")
_ADAPTER = re.compile(r"[\w.-]{1,200}", re.ASCII)
READING = answers(401, 403, 422, 503)
WRITING = answers(400, 401, 403, 404, 409, 413, 415, 422, 503)
RELEASING = WRITING | answers(502)


def wheel_extension(opened: Callable[[], AbstractContextManager[Wheel]]) -> Extension:
    """The wheel's routes, over the wheel that `opened` holds open while the app serves."""
    return Extension(NAME, (cycles, pool, adapters, release), opened)


def wheel_of(connection: HTTPConnection) -> Wheel:
    return cast("Wheel", held_by(connection, NAME))


TheWheel = Annotated[Wheel, Depends(wheel_of)]
OfDomain = Annotated[Name | None, Query(description="Only of this domain")]


# ---------------------------------------------------------------- cycles

cycles = APIRouter(prefix="/v1/cycles", tags=["cycles"], route_class=StrictRoute)


def existing_cycle(cycle_id: str) -> CycleId:
    """The id, if it can be one: what cannot exist is not found."""
    if _CYCLE_ID.fullmatch(cycle_id) is None:
        raise NotFound(f"there is no cycle {cycle_id[:80]!r}")
    return CycleId(cycle_id)


ExistingCycle = Annotated[CycleId, Depends(existing_cycle)]


@cycles.post(
    "",
    summary="Turn the wheel",
    status_code=202,
    responses={
        200: {"model": CycleView, "description": "The cycle that was running already"},
        202: {
            "description": "A new cycle, which has begun",
            "headers": {"Location": {"schema": {"type": "string"}}},
        },
        **WRITING,
    },
)
def create_cycle(
    wheel: TheWheel, caller: Miller, response: Response, body: CreateCycle
) -> CycleView:
    """One turn for one domain. A domain turns one cycle at a time: a second caller joins it."""
    _check_recipe(wheel, body.domain)
    options = CycleOptions(profile=body.profile, level=body.level, seed=body.seed)
    try:
        cycle, new = open_cycle(wheel, caller.tenant_id, body.domain, options=options)
    except NotFound:
        raise
    except InputError as error:  # it names a file of ours: say it in the caller's words
        words = str(error).replace(str(wheel.recipes[body.domain]), f"recipe of {body.domain}")
        raise InputError(words, **error.detail) from error
    response.status_code = 202 if new else 200
    response.headers["Location"] = f"/v1/cycles/{cycle.id}"
    return _whole(wheel, cycle)


def _check_recipe(wheel: Wheel, domain: str) -> None:
    if domain not in wheel.recipes:
        known = ", ".join(sorted(wheel.recipes)) or "none"
        message = f"there is no recipe for {domain!r}; domains that turn: {known}"
        raise InputError(message, errors=[{"field": "domain", "message": message}])


def _whole(wheel: Wheel, cycle: Cycle) -> CycleView:
    with transaction(wheel.url) as connection:
        stages = CycleStore(connection).stages(cycle.tenant_id, cycle.id)
        return cycle_view(cycle, [_as_of_now(connection, cycle, stage) for stage in stages])


def _as_of_now(connection: Connection, cycle: Cycle, stage: Stage) -> Stage:
    """A stage that waits for runs writes nothing meanwhile: its runs say how far they are."""
    if stage.state is not StageState.WAITING:
        return stage
    now = standing(connection, cycle, stage)
    return stage.model_copy(update={"progress": runs_progress(now.ended, now.total)})


@cycles.get("", summary="List cycles", responses=READING)
def list_cycles(
    wheel: TheWheel,
    caller: Miller,
    domain: OfDomain = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> CycleList:
    """The tenant's cycles, newest first, without their stages."""
    with transaction(wheel.url) as connection:
        store = CycleStore(connection)
        page = store.page(caller.tenant_id, domain=domain, limit=limit)
        stages = {cycle.id: store.stages(caller.tenant_id, cycle.id) for cycle in page}
    return CycleList(cycles=[cycle_view(each, stages[each.id], whole=False) for each in page])


@cycles.get("/{cycle_id}", summary="Read a cycle", responses=answers(401, 403, 404, 503))
def read_cycle(wheel: TheWheel, caller: Miller, cycle_id: ExistingCycle) -> CycleView:
    """Stage by stage: how far it is, what it measured, what the gate decided and why."""
    with transaction(wheel.url) as connection:
        cycle = CycleStore(connection).get(caller.tenant_id, cycle_id)
    return _whole(wheel, cycle)


@cycles.post("/{cycle_id}/stop", summary="Stop a cycle", responses=answers(401, 403, 404, 503))
def stop_a_cycle(wheel: TheWheel, caller: Miller, cycle_id: ExistingCycle) -> CycleView:
    """It ends within seconds, and for good. Stopping one that has ended changes nothing."""
    return _whole(wheel, stop_cycle(wheel, caller.tenant_id, cycle_id))


# ---------------------------------------------------------------- pool

pool = APIRouter(prefix="/v1/pool", tags=["pool"], route_class=StrictRoute)


@pool.post("/tasks", summary="Import tasks", status_code=201, responses=WRITING)
def import_tasks(wheel: TheWheel, caller: Miller, body: ImportTasks) -> Imported:
    """Tasks with their right answers; all of them or, where one is wrong, none."""
    if body.domain not in wheel.domains:
        known = ", ".join(sorted(wheel.domains)) or "none"
        message = f"there is no domain {body.domain!r}; known: {known}"
        raise InputError(message, errors=[{"field": "domain", "message": message}])
    with transaction(wheel.url) as connection:
        return store_imported(
            connection,
            caller.tenant_id,
            wheel.domains[body.domain],
            body.split,
            body.tasks,
            caller.name,
        )


@pool.get("/tasks", summary="List the pool", responses=READING)
def list_pool(
    wheel: TheWheel,
    caller: Miller,
    domain: OfDomain = None,
    status: PoolStatus | None = None,
    split: Split | None = None,
    cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor`")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> PoolPage:
    """The tenant's pool tasks, newest first, and how many there are of each status."""
    with transaction(wheel.url) as connection:
        return pool_page(
            PoolStore(connection),
            caller.tenant_id,
            domain=domain,
            status=status,
            split=split,
            cursor=cursor,
            limit=limit,
        )


# ---------------------------------------------------------------- adapters

adapters = APIRouter(prefix="/v1/adapters", tags=["adapters"], route_class=StrictRoute)


@adapters.get("", summary="List adapters", responses=READING)
def list_adapters(wheel: TheWheel, caller: Miller, domain: OfDomain = None) -> AdapterList:
    """The tenant's adapters, newest first."""
    with transaction(wheel.url) as connection:
        found = AdapterStore(connection).page(caller.tenant_id, domain)
    return AdapterList(adapters=[_adapter_view(each, whole=False) for each in found])


@adapters.get("/{name}", summary="Read an adapter", responses=answers(401, 403, 404, 503))
def read_adapter(wheel: TheWheel, caller: Miller, name: str) -> AdapterView:
    """With its lineage and the gate's decision."""
    if _ADAPTER.fullmatch(name) is None:
        raise NotFound(f"there is no adapter {name[:80]!r}")
    with transaction(wheel.url) as connection:
        return _adapter_view(AdapterStore(connection).get(caller.tenant_id, name))


def _adapter_view(adapter: Adapter, *, whole: bool = True) -> AdapterView:
    fields = set(AdapterView.model_fields) - (set() if whole else {"manifest"})
    return AdapterView(**adapter.model_dump(include=fields))


# ---------------------------------------------------------------- releases

release = APIRouter(prefix="/v1/releases", tags=["releases"], route_class=StrictRoute)


@release.post("", summary="Promote an adapter", status_code=201, responses=RELEASING)
def promote_adapter(wheel: TheWheel, caller: Releaser, body: Promote) -> ReleaseView:
    """Load it, probe it, let the alias resolve to it; runs that have begun keep their policy."""
    return promote(
        wheel,
        caller.tenant_id,
        body.adapter,
        alias=body.alias,
        by=caller.name,
        reason=body.reason,
    )


@release.post("/rollback", summary="Roll back", status_code=201, responses=RELEASING)
def roll_back_alias(wheel: TheWheel, caller: Releaser, body: RollBack) -> ReleaseView:
    """Let the alias resolve to what it resolved to before; queued runs are pinned anew."""
    return roll_back(
        wheel,
        caller.tenant_id,
        body.domain,
        alias=body.alias,
        by=caller.name,
        reason=body.reason,
    )


@release.get("", summary="List releases", responses=READING)
def list_releases(wheel: TheWheel, caller: Miller, domain: OfDomain = None) -> ReleaseList:
    """Who let which alias resolve to what, when and why; newest first."""
    with transaction(wheel.url) as connection:
        return ReleaseList(releases=releases(connection, caller.tenant_id, domain))
