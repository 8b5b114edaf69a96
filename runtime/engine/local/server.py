"""The embedded engine: an OpenAI-compatible server in a process of its own.

Routes and shapes are vLLM's, so that production differs by a URL: `/v1/models`, `/v1/completions`
with token ids in and out and the logprobs of what was sampled, `/v1/chat/completions`, loading and
unloading adapters at run time, `/health`, `/metrics`. Weights are fp32 and adapters are merged, so
that sampled logprobs are those a trainer computes. A client that hangs up frees its place.

Whoever spawns the process sets `OMP_WAIT_POLICY=passive` and `GOMP_SPINCOUNT=0` in its environment:
OpenMP reads them when it is loaded, and its spinning threads would starve every neighbour. The
routes have no authentication: the port belongs to the control plane alone.

Scaling out: one process per machine; for more, vLLM behind the same client.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from runtime.engine.local import wire
from runtime.engine.local.batching import EngineLimits
from runtime.engine.local.engine import LocalEngine
from runtime.engine.local.generation import Generation
from runtime.engine.local.metrics import exposition
from runtime.engine.local.replies import CHAT, COMPLETION, Format, Reply
from runtime.errors import EngineUnavailable, InputError, NoriaError

RETRY_AFTER_SECONDS = 1


def serve(
    model_dir: Path,
    *,
    host: str,
    port: int,
    on_ready: Callable[[], None],
    limits: EngineLimits | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve a base model folder until SIGTERM; `on_ready` is called once requests are answered.

    The base is served under the folder's name. A bound `listener` is served instead of host and
    port. Raises InputError for a folder this engine cannot compute.
    """
    engine = LocalEngine(model_dir, limits or EngineLimits())
    config = uvicorn.Config(
        create_app(engine),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    _Server(config, on_ready).run(sockets=[listener] if listener else None)


class _Server(uvicorn.Server):
    """Announces when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


# ---------------------------------------------------------------- routes


def create_app(engine: LocalEngine) -> FastAPI:
    """The server's routes over one engine, which starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.scheduler.start()
        yield
        await asyncio.to_thread(engine.scheduler.close)

    app = FastAPI(title="Noria embedded engine", lifespan=lifespan, openapi_url=None)
    _add_generation_routes(app, engine)
    _add_adapter_routes(app, engine)
    _add_watching_routes(app, engine)
    app.add_exception_handler(NoriaError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    return app


def _add_generation_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.post("/v1/completions")
    async def completions(body: wire.CompletionBody, request: Request) -> Response:
        return await _answer(engine, body, request, COMPLETION, body.logprobs is not None)

    @app.post("/v1/chat/completions")
    async def chat(body: wire.ChatBody, request: Request) -> Response:
        return await _answer(engine, body, request, CHAT, bool(body.logprobs))

    _ = completions, chat


def _add_adapter_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(body: wire.LoadBody) -> Response:
        return PlainTextResponse(await engine.load(body))

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: wire.UnloadBody) -> Response:
        engine.scheduler.withdraw(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    _ = load, unload


def _add_watching_routes(app: FastAPI, engine: LocalEngine) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        scheduler = engine.scheduler
        return wire.models(scheduler.base, scheduler.names(), engine.context)

    @app.get("/health")
    async def health() -> Response:
        alive = engine.scheduler.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(exposition(engine.scheduler))

    _ = models, health, metrics


def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, EngineUnavailable):
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return JSONResponse(wire.error(429, str(error), "RateLimitError"), 429, headers)
    status = error.http_status if isinstance(error, InputError) else 500
    status = 400 if status == 422 else status
    kind = {400: "BadRequestError", 404: "NotFoundError", 409: "ConflictError"}.get(
        status, "InternalServerError"
    )
    return JSONResponse(wire.error(status, str(error), kind), status)


def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(
        f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()[:5]
    )
    return JSONResponse(wire.error(400, problems, "BadRequestError"), 400)


# ---------------------------------------------------------------- one reply


async def _answer(
    engine: LocalEngine,
    body: wire.CompletionBody | wire.ChatBody,
    request: Request,
    format: Format,
    logprobs: bool,
) -> Response:
    progress = _Progress(every_token=body.stream)
    generation = engine.generation(body, progress.listen)
    reply = Reply(
        id=f"{'chatcmpl' if format is CHAT else 'cmpl'}-{secrets.token_hex(12)}",
        generation=generation,
        template=engine.template,
        format=format,
        stops=body.stops,
        logprobs=logprobs,
        token_ids=body.return_token_ids,
        usage=body.wants_usage,
    )
    engine.scheduler.submit(generation)
    if body.stream:
        events = _cancelling(reply.events(progress.steps(generation)), engine, generation)
        return StreamingResponse(events, media_type="text/event-stream")
    await _finished_or_gone(engine, generation, progress, request)
    return JSONResponse(reply.whole())


class _Progress:
    """Wakes the request's task from the scheduler's thread."""

    def __init__(self, *, every_token: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._every_token = every_token
        self._changed = asyncio.Event()

    def listen(self, generation: Generation) -> None:
        if self._every_token or generation.finish or generation.failure:
            self._loop.call_soon_threadsafe(self._changed.set)

    async def steps(self, generation: Generation) -> AsyncIterator[None]:
        """Once per change, the last time when it is finished. Raises its failure."""
        finished = False
        while not finished:
            await self._changed.wait()
            self._changed.clear()
            if generation.failure is not None:
                raise generation.failure
            finished = generation.finish is not None
            yield


async def _finished_or_gone(
    engine: LocalEngine, generation: Generation, progress: _Progress, request: Request
) -> None:
    """Wait for the end; cancel when the client hangs up. Raises the generation's failure."""
    gone = asyncio.create_task(_disconnected(request))
    done = asyncio.create_task(_drain(progress.steps(generation)))
    try:
        await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            engine.scheduler.cancel(generation)
        await done
    finally:
        gone.cancel()
        done.cancel()
        await asyncio.gather(gone, done, return_exceptions=True)
        if generation.finish is None:
            engine.scheduler.cancel(generation)


async def _drain(steps: AsyncIterator[None]) -> None:
    async for _ in steps:
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelling(
    events: AsyncIterator[str], engine: LocalEngine, generation: Generation
) -> AsyncIterator[str]:
    """The events; whatever ends the stream early frees the generation's place."""
    try:
        async for event in events:
            yield event
    finally:
        if generation.finish is None:
            engine.scheduler.cancel(generation)
