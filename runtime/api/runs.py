"""Routes of runs: create, read, list, follow, cancel, give feedback."""

import base64
import binascii
import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse

from runtime.api.admission import admission, check_scopes, known_domain, prefixed
from runtime.api.auth import Caller, Reader, Writer
from runtime.api.body import StrictRoute
from runtime.api.problems import Refused, answers
from runtime.api.schemas import (
    CreateRun,
    EventView,
    FeedbackTaken,
    FieldProblem,
    GiveFeedback,
    Name,
    RunPage,
    RunView,
    Trajectory,
)
from runtime.api.services import ApiServices, services_of
from runtime.api.streaming import (
    SSE_HEADERS,
    all_events,
    progress,
    read_events,
    sse,
    until_over,
)
from runtime.api.views import run_view
from runtime.domain import validate_answer
from runtime.errors import InputError, NotFound
from runtime.run import Feedback, Run, RunId, RunKind, RunState
from runtime.run_queue import RunQueue
from runtime.run_store import RunStore

MAX_SEQ = 2**31 - 1
EVENT_PAGE = 1_000
router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=StrictRoute)
Services = Annotated[ApiServices, Depends(services_of)]
_RUN_ID = re.compile(r"run_[0-9a-f]{28}")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_SSE_EXAMPLE = 'event: finished\ndata: {"seq": 9, "body": {"type": "finished", …}, …}\nid: 9\n\n'
_SSE = {"text/event-stream": {"schema": {"type": "string"}, "example": _SSE_EXAMPLE}}


def existing(run_id: str) -> RunId:
    """The id, if it can be one: what cannot exist is not found."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise NotFound(f"there is no run {run_id[:80]!r}")
    return RunId(run_id)


ExistingRun = Annotated[RunId, Depends(existing)]


# ---------------------------------------------------------------- create


@router.post(
    "",
    summary="Create a run",
    status_code=202,
    response_model=RunView,
    responses={
        200: {
            "model": RunView,
            "description": "`wait`: the finished run. `stream`: its events",
            "content": _SSE,
        },
        202: {
            "description": "Admitted, and not over yet",
            "headers": {"Location": {"schema": {"type": "string"}}},
        },
        **answers(400, 401, 403, 413, 415, 422, 503),
    },
)
async def create_run(
    request: Request,
    services: Services,
    caller: Writer,
    body: CreateRun,
    idempotency_key: Annotated[
        str | None,
        Header(description="The same key with the same request is the same run, however often"),
    ] = None,
) -> Response:
    """Admit one task. With an `Idempotency-Key`, sending it again returns the run it made."""
    _check_idempotency_key(idempotency_key)
    check_scopes(caller, body)
    async with services.database.transaction() as connection:
        pinned = await admission(services, connection, caller, body, idempotency_key)
        run_id, new = await RunStore(connection).admit(pinned)
    headers = {"Location": f"/v1/runs/{run_id}"}
    if not new:
        headers["Idempotent-Replayed"] = "true"
    if body.mode == "stream":
        return _stream(services, caller, run_id, 0, headers)
    if body.mode == "wait":
        await until_over(services, caller, run_id, body.wait_seconds)
    run = await _run(services, caller, run_id)
    over = body.mode == "wait" and run.state.terminal
    return _json(run_view(run), 200 if over else 202, headers)


def _check_idempotency_key(key: str | None) -> None:
    if key is not None and _IDEMPOTENCY_KEY.fullmatch(key) is None:
        message = "must be 1 to 255 visible ASCII characters"
        wrong = FieldProblem(field="Idempotency-Key", message=message)
        raise Refused(400, "invalid_header", f"Idempotency-Key {message}", errors=[wrong])


def _json(view: RunView, status: int, headers: dict[str, str]) -> Response:
    return Response(view.model_dump_json(), status, headers, media_type="application/json")


def _stream(
    services: ApiServices,
    caller: Caller,
    run_id: RunId,
    after: int,
    headers: dict[str, str] | None = None,
) -> Response:
    frames = sse(services, caller, run_id, after)
    return EventSourceResponse(frames, headers={**SSE_HEADERS, **(headers or {})})


# ---------------------------------------------------------------- read


async def _run(services: ApiServices, caller: Caller, run_id: RunId) -> Run:
    async with services.database.transaction() as connection:
        return await RunStore(connection).get(caller.tenant_id, run_id)


@router.get("", summary="List runs", responses=answers(401, 403, 422, 503))
async def list_runs(
    services: Services,
    caller: Reader,
    domain: Annotated[Name | None, Query()] = None,
    state: RunState | None = None,
    kind: RunKind | None = None,
    cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor`")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> RunPage:
    """The tenant's runs, newest first."""
    async with services.database.transaction() as connection:
        runs = await RunStore(connection).page(
            caller.tenant_id,
            domain=domain,
            state=state,
            kind=kind,
            before=None if cursor is None else decode_cursor(cursor),
            limit=limit + 1,
        )
    more = len(runs) > limit
    return RunPage(
        runs=[run_view(run) for run in runs[:limit]],
        next_cursor=encode_cursor(runs[limit - 1]) if more else None,
    )


def encode_cursor(last: Run) -> str:
    return base64.urlsafe_b64encode(f"{last.created_at.isoformat()} {last.id}".encode()).decode()


def decode_cursor(cursor: str) -> tuple[datetime, RunId]:
    """Raises InputError for what `encode_cursor` did not write."""
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode("ascii")
        at, _, run_id = text.partition(" ")
        created_at = datetime.fromisoformat(at)
        if created_at.tzinfo is None or _RUN_ID.fullmatch(run_id) is None:
            raise ValueError("incomplete")
    except (binascii.Error, ValueError) as error:
        message = "not a cursor of this API; pass next_cursor of the page before"
        errors = [{"field": "cursor", "message": message}]
        raise InputError(f"cursor: {message}", errors=errors) from error
    return created_at, RunId(run_id)


@router.get("/{run_id}", summary="Read a run", responses=answers(401, 403, 404, 503))
async def read_run(services: Services, caller: Reader, run_id: ExistingRun) -> RunView:
    return run_view(await _run(services, caller, run_id))


@router.get(
    "/{run_id}/events",
    summary="Follow a run",
    response_model=list[EventView],
    responses={
        200: {
            "description": "Server-sent events; a JSON list where only `application/json` is "
            "accepted",
            "content": {
                "text/event-stream": {**_SSE["text/event-stream"], "example": _SSE_EXAMPLE}
            },
        },
        204: {"description": "The run is over and has no further events: do not reconnect"},
        **answers(401, 403, 404, 422, 503),
    },
)
async def read_run_events(
    services: Services,
    caller: Reader,
    run_id: ExistingRun,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ, description="Events with a greater seq")] = 0,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_SEQ)] = None,
    accept: Annotated[str, Header(max_length=1_000)] = "*/*",
) -> Response:
    """Events as they happen, until the run is over. `Last-Event-ID` overrides `after`.

    With `Accept: application/json`, up to 1,000 events that are there already.
    """
    after = after if last_event_id is None else last_event_id
    if "application/json" in accept and "text/event-stream" not in accept:
        _, events = await read_events(services, caller, run_id, after, limit=EVENT_PAGE)
        return JSONResponse([event.model_dump(mode="json") for event in events])
    if (await progress(services, caller, run_id)).over(after):
        return Response(status_code=204)
    return _stream(services, caller, run_id, after)


@router.get(
    "/{run_id}/trajectory", summary="Read all of a run", responses=answers(401, 403, 404, 503)
)
async def read_trajectory(services: Services, caller: Reader, run_id: ExistingRun) -> Trajectory:
    """The run, its events and its token-exact model calls."""
    events = await all_events(services, caller, run_id)
    async with services.database.transaction() as connection:
        store = RunStore(connection)
        run = await store.get(caller.tenant_id, run_id)
        calls = await store.model_calls(caller.tenant_id, run_id)
    return Trajectory(run=run_view(run), events=events, model_calls=calls)


# ---------------------------------------------------------------- change


@router.post("/{run_id}/cancel", summary="Cancel a run", responses=answers(401, 403, 404, 409, 503))
async def cancel_run(services: Services, caller: Writer, run_id: ExistingRun) -> RunView:
    """A queued run ends at once, a running one within seconds."""
    async with services.database.transaction() as connection:
        await RunQueue(connection).cancel(caller.tenant_id, run_id)
        return run_view(await RunStore(connection).get(caller.tenant_id, run_id))


@router.post(
    "/{run_id}/feedback",
    summary="Judge a finished run",
    status_code=201,
    responses=answers(400, 401, 403, 404, 409, 413, 415, 422, 503),
)
async def give_feedback(
    services: Services, caller: Writer, run_id: ExistingRun, body: GiveFeedback
) -> FeedbackTaken:
    """A rating, what came of it, the right answer, a comment; taken once the run is over."""
    async with services.database.transaction() as connection:
        store = RunStore(connection)
        run = await store.get(caller.tenant_id, run_id)
        if body.correction is not None:
            domain = known_domain(services, run.domain, "correction")
            prefixed("correction", validate_answer, domain, body.correction)
        feedback = Feedback(**body.model_dump(), by=caller.name)
        seq = await store.give_feedback(caller.tenant_id, run_id, feedback)
    return FeedbackTaken(run_id=run_id, seq=seq)
