"""The REST app: `create_app(services, extensions)`.

A factory, so that importing has no effects; the lifespan opens the database pool and the doorbell
and closes them again. Routes live one noun a file (`runs`, `domains`, `keys`, `operations`), every
error is a problem (`problems`), every body is read strictly after its caller is known (`body`,
`auth`), and events are streamed from the record (`streaming`). Other parts bring their routes as
`Extension`s, under the same rules.

Scaling out: replicas behind any load balancer; they share nothing but Postgres.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from runtime.api import domains, keys, operations, problems, runs
from runtime.api.services import ApiServices, Extension

__all__ = ["ApiServices", "Extension", "create_app"]


def create_app(services: ApiServices, extensions: Sequence[Extension] = ()) -> FastAPI:
    """The app. Its lifespan opens and closes `services.database`, `services.doorbell` and what the
    extensions bring."""
    app = FastAPI(
        title="Noria",
        version="1",
        description="Submit work to agents, watch it, judge it.",
        lifespan=_lifespan,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # its page would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    app.state.services = services
    app.state.extensions = extensions
    app.state.held = {}
    app.state.metrics = operations.Metrics()
    app.add_middleware(operations.MeasureRequests, metrics=app.state.metrics)
    for module in (runs, domains, keys, operations):
        app.include_router(module.router)
    for router in (router for extension in extensions for router in extension.routers):
        app.include_router(router)
    problems.install(app)
    _describe(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    services: ApiServices = app.state.services
    with ExitStack() as held:
        for extension in app.state.extensions:
            app.state.held[extension.name] = held.enter_context(extension.open())
        async with services.database, services.doorbell:
            yield


def _operation_id(route: APIRoute) -> str:
    return route.name


def _describe(app: FastAPI) -> None:
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = problems.as_problem_json(plain())
        return app.openapi_schema

    app.openapi = described  # pyright: ignore[reportAttributeAccessIssue]
