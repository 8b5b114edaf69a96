"""The host's end of the pipes to a sandbox's helper.

Everything that arrives is hostile until checked: a frame longer than the request allows is refused
before it is read, every wait has an end, numbers are parsed from short byte strings. After anything
but an orderly answer the channel is out of step and its owner must kill the sandbox.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from runtime.errors import SandboxError, ToolError
from runtime.sandbox.inside.wire import OVERHEAD, WireError, pack, unpack

SEND_SECONDS = 60.0
"""For the helper to take what was sent before; what the pipe itself holds is not waited for."""
Reply = list[bytes]
"""Verb, then fields."""


class OutOfStep(SandboxError):
    """The helper died, fell silent, or sent something that is no answer."""

    code = "sandbox_out_of_step"


class Channel:
    """Requests go out, replies come in; the caller keeps two requests from interleaving."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        explain: Callable[[], str],
    ) -> None:
        """`explain` says why the helper is gone, where anything is known about it."""
        self._reader = reader
        self._writer = writer
        self._explain = explain

    async def send(self, *fields: bytes, seconds: float | None = None) -> None:
        """Raises OutOfStep where the helper is gone, or takes nothing for `seconds`."""
        seconds = SEND_SECONDS if seconds is None else seconds
        try:
            self._writer.write(pack(fields))
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError as error:
            raise OutOfStep(f"the sandbox took nothing for {seconds:g} s") from error
        except ConnectionError as error:
            raise OutOfStep(f"the sandbox is gone: {self._explain()}") from error

    async def receive(self, *, limit: int, seconds: float) -> Reply:
        """The next reply, of at most `limit` bytes of content.

        Raises ToolError where the helper refuses the request, OutOfStep where it does not answer.
        """
        try:
            async with asyncio.timeout(seconds):
                reply = await self._frame(limit + OVERHEAD)
        except TimeoutError as error:
            raise OutOfStep(f"the sandbox did not answer within {seconds:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise OutOfStep(f"the sandbox is gone: {self._explain()}") from error
        return _orderly(reply)

    async def pages(self, verb: bytes, *, limit: int, seconds: float) -> AsyncIterator[Reply]:
        """Replies of one verb until `end`, the verb left out."""
        while True:
            kind, *fields = await self.receive(limit=limit, seconds=seconds)
            if kind == b"end":
                return
            if kind != verb:
                raise OutOfStep(f"expected {verb!r}, the sandbox answered {kind[:20]!r}")
            yield fields

    async def _frame(self, limit: int) -> Reply:
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        if length > limit:
            raise OutOfStep(f"the sandbox sent {length} bytes where {limit} are allowed")
        try:
            return unpack(await self._reader.readexactly(length))
        except WireError as error:
            raise OutOfStep(f"the sandbox sent a broken frame: {error}") from error


def _orderly(reply: Reply) -> Reply:
    verb = reply[0]
    if verb in (b"refused", b"failed"):
        reason = b" ".join(reply[1:2]).decode("utf-8", "replace")
        if verb == b"refused":
            raise ToolError(reason)
        raise OutOfStep(f"the sandbox's helper failed: {reason}")
    return reply


def integer(field: bytes) -> int:
    """A number from the wire. Raises OutOfStep."""
    try:
        return int(field[:20])
    except ValueError as error:
        raise OutOfStep(f"the sandbox sent {field[:20]!r} where a number belongs") from error
