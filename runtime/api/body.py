"""Reading requests strictly: the caller is known before a byte of the body is read.

One reader for all routes. Bodies are capped while they arrive, must be UTF-8 JSON, and may not hold
what parsers disagree on (duplicate keys, NaN, numbers out of range) or what a database cannot keep
(NUL, lone surrogates). Large ones are parsed off the event loop.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from runtime.api.problems import Refused
from runtime.api.services import services_of
from runtime.run import Json

MAX_DEPTH = 64
MAX_DIGITS = 308
"""Of a whole number: what fits a double, as every JSON reader has it."""
OFF_THE_LOOP_BYTES = 64 << 10
"""Bodies larger than this are parsed in a thread."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_MAYBE_UNSTORABLE = re.compile(r"\\u0000|\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Json:
    """The value of a strict JSON text. Raises ValueError saying what is wrong."""
    try:
        text = body.decode()
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not JSON: {error.msg} at {where}") from error
    _check_depth(value)
    if _MAYBE_UNSTORABLE.search(text):
        _check_text(value)
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} is written twice in one object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the number {digits[:40]}… is out of range")
    return int(digits)


def _inside(value: Json) -> list[Json]:
    if isinstance(value, dict):
        return list(cast("dict[str, Json]", value).values())
    return cast("list[Json]", value) if isinstance(value, list) else []


def _check_depth(value: Json) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each for outer in level for each in _inside(outer)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_text(value: Json) -> None:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str) and _UNSTORABLE.search(each):
            raise ValueError("a text holds a NUL character or half a surrogate pair")
        pending.extend(_inside(each))
        if isinstance(each, dict):
            pending.extend(cast("dict[str, Json]", each))


class StrictRequest(Request):
    """A request whose body is capped and strict JSON."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = services_of(self).max_body_bytes
            _check_declared_length(self.headers.get("content-length"), limit)
            chunks: list[bytes] = []
            size = 0
            async for chunk in self.stream():
                if (size := size + len(chunk)) > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Json:
        body = await self.body()
        try:
            if len(body) <= OFF_THE_LOOP_BYTES:
                return parse_json(body)
            return await asyncio.to_thread(parse_json, body)
        except ValueError as error:
            raise Refused(400, "invalid_json", f"the body cannot be used: {error}") from error


def _check_declared_length(length: str | None, limit: int) -> None:
    if length is not None and length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> Refused:
    return Refused(413, "too_large", f"the body is larger than {limit} bytes")


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        shown = media_type[:80] or "none"
        detail = f"the Content-Type is {shown}; send application/json"
        raise Refused(415, "unsupported_media_type", detail)


class StrictRoute(APIRoute):
    """Authenticates, then reads the body strictly, then goes on as FastAPI does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def strictly(request: Request) -> Response:
            services = services_of(request)
            caller = await services.authenticator.caller(request.headers.get("authorization"))
            request.state.caller = caller
            if takes_body:
                _check_media_type(request)
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly
