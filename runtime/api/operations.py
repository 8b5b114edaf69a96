"""Routes for operators, without a key: alive, ready, metrics.

Metrics are this process's own request latencies and the database's count of runs by state; they
name no tenant. Scaling out: every replica is scraped by itself.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api.problems import answers, problem
from runtime.api.schemas import Alive, FieldProblem, Ready
from runtime.api.services import ApiServices, services_of
from runtime.errors import StoreError
from runtime.run import RunState
from runtime.run_store import RunStore

PROBE_SECONDS = 2.0
router = APIRouter(tags=["operations"])
Services = Annotated[ApiServices, Depends(services_of)]


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Alive:
    return Alive()


@router.get("/readyz", summary="Can it take work?", response_model=Ready, responses=answers(503))
async def readyz(services: Services) -> Ready | Response:
    """503 names what is missing."""
    database, engine = await asyncio.gather(
        _answers(_ping(services)), _answers(services.engine_healthy())
    )
    parts = {"database": database, "engine": engine, "process": not services.draining.is_set()}
    missing = [name for name, there in parts.items() if not there]
    if not missing:
        return Ready(parts=parts)
    wrong = [FieldProblem(field=name, message=_MISSING[name]) for name in missing]
    detail = "; ".join(each.message for each in wrong)
    return problem(503, "not_ready", detail, errors=wrong, headers={"Retry-After": "1"})


_MISSING = {
    "database": "the database does not answer",
    "engine": "the engine does not answer",
    "process": "this process is shutting down",
}


async def _answers(probe: Awaitable[bool]) -> bool:
    """A part that fails or is silent is not there: the boundary of probes that may raise."""
    try:
        return await asyncio.wait_for(probe, PROBE_SECONDS)
    except Exception:
        return False


async def _ping(services: ApiServices) -> bool:
    async with services.database.transaction() as connection:
        await connection.execute("SELECT 1")
    return True


# ---------------------------------------------------------------- metrics


class Metrics:
    """What one app measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.runs = Gauge("noria_runs", "Runs by state", ["state"], registry=self.registry)
        self.requests = Histogram(
            "noria_http_request_seconds",
            "Seconds from a request to the first byte of its answer",
            ["method", "route", "status"],
            registry=self.registry,
        )


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request, services: Services) -> Response:
    measured: Metrics = request.app.state.metrics
    try:
        async with services.database.transaction() as connection:
            counts = await RunStore(connection).count_by_state()
    except StoreError:  # latencies are of use just then; stale counts would not be
        measured.runs.clear()
    else:
        for state in RunState:
            measured.runs.labels(state).set(counts.get(state, 0))
    return Response(generate_latest(measured.registry), media_type=CONTENT_TYPE_LATEST)


class MeasureRequests:
    """Middleware: observes each request when its answer begins."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope, message["status"], time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, observed)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, status).observe(seconds)


_METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
