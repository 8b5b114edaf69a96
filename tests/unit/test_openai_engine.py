"""The engine client against a real HTTP server that misbehaves on purpose."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.engine.openai import OpenAIEngine, Retries
from runtime.engine.protocol import CompletionRequest
from runtime.errors import (
    ContextOverflow,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    PolicyNotLoaded,
)
from runtime.run import PolicyId

REQUEST = CompletionRequest(PolicyId("base"), [1, 2, 3], max_tokens=4, seed=9, timeout=5.0)
QUICK = Retries(attempts=4, first_pause=0.001)


def reply(**choice: Any) -> dict[str, Any]:
    """An honest reply, with parts of its choice replaced."""
    return {
        "model": "base",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [7, 8],
                "logprobs": {"token_logprobs": [-0.5, -1.25], "tokens": ["a", "b"]},
                "finish_reason": "stop",
                "prompt_token_ids": [1, 2, 3],
                **choice,
            }
        ],
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    }


def raw(body: str | bytes | dict[str, Any], status: str = "200 OK", *headers: str) -> bytes:
    """A whole HTTP response."""
    body = json.dumps(body) if isinstance(body, dict) else body
    data = body.encode() if isinstance(body, str) else body
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


@dataclass
class Server:
    """Answers the n-th request with the n-th script entry (the last one for ever after)."""

    script: list[bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]]
    requests: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        lengths = [line for line in head.split("\r\n") if line.lower().startswith("content-length")]
        size = int(lengths[0].split(":")[1]) if lengths else 0
        body = await reader.readexactly(size)
        self.requests.append((head.split(" HTTP")[0], json.loads(body) if body else None))
        step = self.script[min(len(self.requests), len(self.script)) - 1]
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        else:
            await step(writer)


async def cut(writer: asyncio.StreamWriter) -> None:
    """Half an honest reply, then nothing."""
    writer.write(raw(reply())[:-20])
    await writer.drain()
    writer.close()


async def hang(writer: asyncio.StreamWriter) -> None:
    await writer.wait_closed()


@asynccontextmanager
async def serving(
    *script: bytes | Callable[[asyncio.StreamWriter], Awaitable[None]], retries: Retries = QUICK
) -> AsyncGenerator[tuple[OpenAIEngine, Server]]:
    server = Server(list(script))
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    engine = OpenAIEngine(f"http://127.0.0.1:{port}/v1", api_key="key", retries=retries)
    try:
        yield engine, server
    finally:
        await engine.close()
        listener.close()


async def test_ids_go_in_and_come_out() -> None:
    async with serving(raw(reply())) as (engine, server):
        completion = await engine.complete(REQUEST)
    assert (completion.sampled, completion.logprobs) == ([7, 8], [-0.5, -1.25])
    assert (completion.prompt_tokens, completion.cached_tokens) == (3, 2)
    assert (completion.finish_reason, completion.served_policy) == ("stop", "base")
    (line, sent) = server.requests[0]
    assert line == "POST /v1/completions"
    assert sent == {
        "model": "base",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": [],
        "seed": 9,
    }


@pytest.mark.parametrize(
    "fault",
    [
        cut,
        raw("busy", "429 Too Many Requests", "Retry-After: 0"),
        raw("oops", "500 Internal Server Error"),
        raw("", "503 Service Unavailable"),
        b"not http at all\r\n\r\n",
    ],
)
async def test_what_may_pass_is_tried_again(fault: Any) -> None:
    async with serving(fault, fault, raw(reply())) as (engine, server):
        assert (await engine.complete(REQUEST)).sampled == [7, 8]
    assert len(server.requests) == 3


async def test_retries_are_bounded() -> None:
    async with serving(raw("", "503 Service Unavailable")) as (engine, server):
        with pytest.raises(EngineUnavailable, match="HTTP 503"):
            await engine.complete(REQUEST)
    assert len(server.requests) == QUICK.attempts


async def test_retry_after_is_honoured_within_the_deadline() -> None:
    busy = raw("busy", "429 Too Many Requests", "Retry-After: 60")
    started = time.monotonic()
    async with serving(busy, raw(reply())) as (engine, server):
        with pytest.raises(EngineUnavailable, match=r"no answer within 0\.2 seconds"):
            await engine.complete(CompletionRequest(PolicyId("base"), [1], 4, timeout=0.2))
    assert len(server.requests) == 1
    assert time.monotonic() - started < 5
    assert Retries(first_pause=1).pause(0, 60.0) == 60.0


async def test_a_silent_engine_is_unavailable() -> None:
    async with serving(hang) as (engine, _):
        with pytest.raises(EngineUnavailable, match=r"no answer within 0\.2 seconds"):
            await engine.complete(CompletionRequest(PolicyId("base"), [1], 4, timeout=0.2))


async def test_an_absent_engine_is_unavailable() -> None:
    async with serving(raw(reply())) as (gone, _):
        pass
    engine = OpenAIEngine(gone._base, retries=QUICK)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(EngineUnavailable, match="/v1/completions: "):
        await engine.complete(REQUEST)
    assert not await engine.healthy()
    await engine.close()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        ("400 Bad Request", {"error": {"message": "temperature is wrong"}}, EngineRefused),
        ("404 Not Found", {"error": {"message": "no model"}}, EngineRefused),
        ("401 Unauthorized", {}, EngineRefused),
        ("400 Bad Request", {"message": "the maximum context length is 8192"}, ContextOverflow),
        (
            "400 Bad Request",
            {"error": {"message": "max_tokens must be at least 1, got 0. (parameter=max_tokens)"}},
            ContextOverflow,
        ),
    ],
)
async def test_a_refusal_is_not_repeated(
    status: str, body: dict[str, Any], error: type[EngineError]
) -> None:
    async with serving(raw(body, status)) as (engine, server):
        with pytest.raises(error, match=status[:3]):
            await engine.complete(REQUEST)
    assert len(server.requests) == 1


NOT_LOADED = raw({"error": {"message": "The model `base` does not exist."}}, "404 Not Found")


async def test_a_policy_that_is_not_loaded_is_waited_for() -> None:
    many = [NOT_LOADED] * (QUICK.attempts + 3)
    async with serving(*many, raw(reply())) as (engine, server):
        assert (await engine.complete(REQUEST)).sampled == [7, 8]
    assert len(server.requests) == len(many) + 1


async def test_a_policy_that_stays_absent_is_named_as_such() -> None:
    soon = Retries(first_pause=0.001, not_loaded_seconds=0.05)
    async with serving(NOT_LOADED, retries=soon) as (engine, _):
        with pytest.raises(PolicyNotLoaded, match="does not exist") as caught:
            await engine.complete(REQUEST)
    assert caught.value.detail == {"status": 404, "policy": "base"}


def test_waiting_for_a_policy_is_bounded() -> None:
    rule = Retries(not_loaded_seconds=10, not_loaded_pause=1)
    absent = PolicyNotLoaded("absent")
    assert 0.5 <= (rule.after(absent, 1_000, 5.0) or 0) <= 1
    assert rule.after(absent, 3, 9.9) is None
    assert rule.after(EngineUnavailable("busy"), rule.attempts - 1, 0.0) is None


async def test_our_engine_says_that_it_is_exact() -> None:
    ours, theirs = ({"data": [{"id": "a", "owned_by": who}]} for who in ("noria", "vllm"))
    async with serving(raw(ours), raw(theirs), raw({"data": [{"id": "a"}]})) as (engine, _):
        assert [await engine.exact() for _ in range(3)] == [True, False, False]


def nan_reply() -> bytes:
    return raw(json.dumps(reply()).replace("-0.5", "NaN"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (raw("<html>hello</html>"), "no completion"),
        (raw(""), "no completion"),
        (raw(b"\xff\xfe"), "no completion"),
        (raw("[" * 10_000), "no completion"),
        (raw({}), "choices"),
        (raw(reply(token_ids=None)), "token_ids"),
        (raw(reply(token_ids=[])), "token_ids"),
        (raw(reply(token_ids=["7", "8"])), "token_ids"),
        (raw(reply(token_ids=[7, -1])), "token_ids"),
        (raw(reply(token_ids=[7])), "2 logprobs came with 1 sampled"),
        (raw(reply(token_ids=[7] * 5, logprobs=None)), "5 ids were sampled where 4"),
        (raw(reply(logprobs={"token_logprobs": [-1.0, 0.5]})), "token_logprobs"),
        (raw(reply(logprobs={"token_logprobs": [-1.0, None]})), "token_logprobs"),
        (nan_reply(), "token_logprobs"),
        (raw(reply(finish_reason="tool_calls")), "finish_reason"),
        (raw(reply(prompt_token_ids=[9])), "another prompt"),
        (raw({**reply(), "choices": reply()["choices"] * 2}), "choices"),
        (raw(reply(text="x" * 5_000_000)), "longer than"),
        (raw("x" * 40, "200 OK", "Content-Encoding: gzip"), "cannot be decoded"),
    ],
)
async def test_garbage_is_named_and_not_believed(body: bytes, words: str) -> None:
    async with serving(body) as (engine, server):
        with pytest.raises(EngineGarbage, match=words):
            await engine.complete(REQUEST)
    assert len(server.requests) == 1


async def test_an_engine_without_logprobs_gives_none() -> None:
    async with serving(raw(reply(logprobs=None))) as (engine, _):
        assert (await engine.complete(REQUEST)).logprobs == []


async def test_hundreds_at_once() -> None:
    async with serving(raw(reply())) as (engine, server):
        replies = await asyncio.gather(*(engine.complete(REQUEST) for _ in range(300)))
    assert len(server.requests) == len(replies) == 300


async def test_adapters_are_loaded_once_and_refused_in_the_engines_words() -> None:
    async with serving(raw("done"), raw('{"message": "rank 99"}', "400 Bad Request")) as pair:
        engine, server = pair
        await engine.load_adapter("a", "/adapters/a")
        with pytest.raises(EngineRefused, match="rank 99"):
            await engine.unload_adapter("a")
    assert server.requests == [
        ("POST /v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/adapters/a"}),
        ("POST /v1/unload_lora_adapter", {"lora_name": "a"}),
    ]


async def test_an_adapter_that_vllm_cannot_load_is_refused_though_it_says_500() -> None:
    words = {"error": {"message": "Call to add_lora method failed: Worker failed", "code": 500}}
    async with serving(raw(words, "500 Internal Server Error")) as (engine, server):
        with pytest.raises(EngineRefused, match="add_lora method failed"):
            await engine.load_adapter("a", "/adapters/a")
    assert len(server.requests) == 1


async def test_models_must_be_a_list() -> None:
    async with serving(raw({"data": [{"id": "a"}]}), raw("{}")) as (engine, _):
        assert await engine.models() == ["a"]
        with pytest.raises(EngineGarbage, match="not a list of models"):
            await engine.models()
