"""Reading requests strictly: the caller is known before a byte of the body is read.

One reader for all routes. Bodies are capped while they arrive, in bytes and in the number of values
they hold, must be UTF-8 JSON, and may not hold what parsers disagree on (duplicate keys, NaN,
numbers out of range) or what a database cannot keep (NUL, lone surrogates). Large ones are parsed
and validated off the event loop, so that no caller's body delays another's.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from runtime.api.problems import Refused, wrong_fields
from runtime.api.services import services_of
from runtime.run import Json

MAX_DEPTH = 64
MAX_VALUES = 20_000
"""In one body, at any depth. Bulk belongs into `files`, where content is one text."""
MAX_DIGITS = 308
"""Of a whole number: what fits a double, as every JSON reader has it."""
OFF_THE_LOOP_BYTES = 64 << 10
"""Bodies larger than this are parsed and validated in a thread."""
_TO_THE_NEXT_VALUE = re.compile(
    rb'[^",\[{]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^",\[{]*+)*+[,\[{]', re.DOTALL
)
"""Up to and with the next comma or opening bracket outside texts; never looks back."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_MAYBE_UNSTORABLE = re.compile(r"\\u0000|\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Json:
    """The value of a strict JSON text. Raises ValueError saying what is wrong."""
    _check_values(body)
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


def _check_values(body: bytes) -> None:
    """Before memory is spent on them: every value is the root or follows a comma or a bracket."""
    at = 0
    for _ in range(MAX_VALUES):
        if (found := _TO_THE_NEXT_VALUE.match(body, at)) is None:
            return  # the last value, or no JSON: the parser says which
        at = found.end()
    raise ValueError(f"it holds more than {MAX_VALUES} values")


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


class BodyField(Protocol):
    """What a route takes its body as: the framework's field."""

    def validate(
        self, value: Json, *, loc: tuple[int | str, ...]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """The value as the route takes it, or what is wrong with it."""
        ...


class StrictRequest(Request):
    """A request whose body is capped and strict JSON; `field` is what the route takes it as."""

    def __init__(self, request: Request, field: BodyField | None) -> None:
        super().__init__(request.scope, request.receive)
        self._field = field

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
            return await asyncio.to_thread(self._validated, body)
        except ValueError as error:
            raise Refused(400, "invalid_json", f"the body cannot be used: {error}") from error

    def _validated(self, body: bytes) -> Json:
        """What the route takes, ready: the framework then has nothing left to validate."""
        value = parse_json(body)
        if self._field is None:
            return value
        taken, wrong = self._field.validate(value, loc=("body",))
        if wrong:
            raise wrong_fields(wrong)
        return taken


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
            return await handle(StrictRequest(request, self.body_field))

        return strictly
