"""The client for every engine that speaks OpenAI's completions with token ids: vLLM and our own.

Ids go in and come out, with the logprob of each sampled id. Everything else is the network's
business: connections are pooled and kept, failures that may pass (no connection, a cut reply, 429,
5xx) are tried again with jittered, growing pauses inside one deadline, and a reply is believed only
after it was checked: an engine that answers with something else is reported, not trained on.

Scaling out: one client per process serves hundreds of runs; base_url may be a load balancer that
keeps a run on one replica, where its prefix is cached.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from runtime.engine.protocol import Completion, CompletionRequest
from runtime.errors import (
    ContextOverflow,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    PolicyNotLoaded,
)
from runtime.run import PolicyId

_OVERFLOW_WORDS = (
    "maximum context length",
    "context_length_exceeded",
    "max_model_len",
    "max_tokens must be at least 1, got 0",  # vLLM, of a prompt that leaves no room for a reply
)
_CANNOT_LOAD = "Call to add_lora method failed"
"""vLLM, with status 500, of an adapter whose files it cannot read; it serves the others on."""
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent because vLLM else takes these from the model's own generation_config.json."""
_LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may put a logprob."""


@dataclass(frozen=True, slots=True)
class Retries:
    attempts: int = 6
    first_pause: float = 0.25
    """Seconds; doubles with every attempt, drawn between half and all of it."""
    longest_pause: float = 8.0
    not_loaded_seconds: float = 30.0
    """How long to wait for a policy that the engine does not serve: after a restart it answers
    before its adapters are loaded again."""
    not_loaded_pause: float = 1.0
    """Longest pause while waiting for one."""

    def pause(self, attempt: int, asked: float | None) -> float:
        """Seconds before the next attempt: never sooner than the engine asked for."""
        pause = min(self.longest_pause, self.first_pause * 2 ** min(attempt, 30))
        return max(asked or 0.0, pause * random.uniform(0.5, 1.0))

    def after(self, error: EngineUnavailable, attempt: int, seconds: float) -> float | None:
        """The pause after `attempt` (from 0) failed, `seconds` after the first; None: give up."""
        if isinstance(error, PolicyNotLoaded):
            pause = min(self.not_loaded_pause, self.pause(attempt, None))
            return pause if seconds + pause < self.not_loaded_seconds else None
        asked = error.detail.get("retry_after")
        return self.pause(attempt, asked) if attempt + 1 < self.attempts else None


class OpenAIEngine:
    """Implements `Engine` over HTTP. Close it when done; usable as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        retries: Retries | None = None,
        max_connections: int = 512,
        admin_timeout: float = 120.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_url` is the one that ends in `/v1`; `admin_timeout` is in seconds."""
        self._base = base_url.rstrip("/")
        self._retries = retries or Retries()
        self._admin_timeout = admin_timeout
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=128),
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------ completions

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one reply.

        Raises EngineUnavailable where retries or `request.timeout` run out (PolicyNotLoaded where
        the policy was not served all the while), EngineRefused, ContextOverflow, or EngineGarbage
        for an answer that is no completion of this request.
        """
        started = time.monotonic()
        body = await self._within(
            request.timeout,
            lambda: self._call("POST", "/completions", _body(request), most=_reply_bytes(request)),
        )
        return _completion(body, request, time.monotonic() - started)

    # ------------------------------------------------------------ adapters and health

    async def models(self) -> list[str]:
        return [model.id for model in await self._models()]

    async def exact(self) -> bool:
        """True of the embedded engine, which says who owns its models."""
        return all(model.owned_by == "noria" for model in await self._models())

    async def _models(self) -> "list[_Model]":
        body = await self._within(self._admin_timeout, lambda: self._call("GET", "/models"))
        try:
            return _Models.model_validate_json(body).data
        except ValidationError as error:
            raise EngineGarbage(f"{self._base}/models: not a list of models: {error}") from error

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """`pinned` (never evicted) is understood by the embedded engine only."""
        body = {"lora_name": name, "lora_path": path, **({"pinned": True} if pinned else {})}
        await self._admin("/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        await self._admin("/unload_lora_adapter", {"lora_name": name})

    async def healthy(self) -> bool:
        url = f"{self._base.removesuffix('/v1')}/health"
        try:
            return (await self._http.get(url, timeout=5.0)).is_success
        except httpx.HTTPError:
            return False

    async def _admin(self, path: str, body: Mapping[str, Any]) -> None:
        """Sent once: what changes the engine is not repeated blindly."""
        await self._within(self._admin_timeout, lambda: self._send("POST", path, body, 1 << 20))

    # ------------------------------------------------------------ HTTP

    async def _within(self, seconds: float, call: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                return await call()
        except TimeoutError as error:
            raise EngineUnavailable(
                f"{self._base} gave no answer within {seconds:g} seconds"
            ) from error

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, most: int = 1 << 20
    ) -> bytes:
        """`_send`, again while that may help. The caller sets the deadline."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return await self._send(method, path, body, most)
            except EngineUnavailable as error:
                pause = self._retries.after(error, attempt, time.monotonic() - started)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            attempt += 1

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, most: int
    ) -> bytes:
        url = f"{self._base}{path}"
        try:
            async with self._http.stream(method, url, json=body) as response:
                content = await _read(response, most)
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise EngineUnavailable(f"{url}: {what}") from error
        except httpx.DecodingError as error:
            raise EngineGarbage(f"{url}: the reply cannot be decoded: {error}") from error
        if response.status_code != 200:
            raise _refusal(url, response, content, asked=(body or {}).get("model"))
        return content


async def _read(response: httpx.Response, most: int) -> bytes:
    content = bytearray()
    async for block in response.aiter_bytes():
        content += block
        if len(content) > most:
            raise EngineGarbage(f"{response.url}: the reply is longer than {most} bytes")
    return bytes(content)


def _refusal(
    url: httpx.URL | str, response: httpx.Response, content: bytes, asked: str | None
) -> EngineError:
    """The error that a status stands for, in the engine's own words.

    A 404 whose words name the model asked for is about the model, any other about the route.
    """
    status = response.status_code
    words = content[:500].decode("utf-8", "replace").strip()
    message = f"{url}: HTTP {status}: {words or 'no explanation'}"
    if _CANNOT_LOAD in words:
        return EngineRefused(message, status=status)
    if status == 429 or status >= 500:
        return EngineUnavailable(message, status=status, retry_after=_retry_after(response))
    if status == 404 and asked is not None and asked in words:
        return PolicyNotLoaded(message, status=status, policy=asked)
    if status == 400 and any(word in words for word in _OVERFLOW_WORDS):
        return ContextOverflow(message, status=status)
    return EngineRefused(message, status=status)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; a date, which engines do not send, counts as absent."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else None


# ---------------------------------------------------------------- shapes


def _body(request: CompletionRequest) -> dict[str, Any]:
    return {
        "model": request.policy,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        **_NEUTRAL,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": list(request.stop_token_ids),
        **({} if request.seed is None else {"seed": request.seed}),
    }


def _reply_bytes(request: CompletionRequest) -> int:
    """More than an honest reply needs: the prompt's ids come back, and logprobs per token."""
    return 65_536 + 16 * len(request.prompt_ids) + 1_024 * request.max_tokens


class _Logprobs(BaseModel):
    token_logprobs: list[Annotated[FiniteFloat, Field(le=_LOGPROB_SLACK)]]


class _Choice(BaseModel):
    token_ids: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"]


class _PromptDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens_details: _PromptDetails | None = None


class _Reply(BaseModel):
    model: str
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage | None = None


class _Model(BaseModel):
    id: str
    owned_by: str = ""


class _Models(BaseModel):
    data: list[_Model]


def _completion(body: bytes, request: CompletionRequest, seconds: float) -> Completion:
    try:
        reply = _Reply.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:3]
        )
        raise EngineGarbage(f"the engine's reply is no completion: {problems}") from error
    choice = reply.choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
    _check_lengths(choice, logprobs, request)
    details = reply.usage.prompt_tokens_details if reply.usage else None
    return Completion(
        sampled=choice.token_ids,
        logprobs=[min(0.0, logprob) for logprob in logprobs],
        finish_reason=choice.finish_reason,
        served_policy=PolicyId(reply.model),
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        seconds=seconds,
    )


def _check_lengths(choice: _Choice, logprobs: list[float], request: CompletionRequest) -> None:
    sampled = len(choice.token_ids)
    if sampled > request.max_tokens:
        raise EngineGarbage(f"{sampled} ids were sampled where {request.max_tokens} were allowed")
    if logprobs and len(logprobs) != sampled:
        raise EngineGarbage(f"{len(logprobs)} logprobs came with {sampled} sampled ids")
    echoed = choice.prompt_token_ids
    if echoed is not None and echoed != list(request.prompt_ids):
        raise EngineGarbage("the engine answered another prompt than it was given")
