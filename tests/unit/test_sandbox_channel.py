"""The host's end of the pipes, fed by a hostile helper."""

import asyncio
import os
from collections.abc import Callable

import pytest

from runtime.errors import ToolError
from runtime.sandbox.channel import Channel, OutOfStep, integer
from runtime.sandbox.inside.wire import WireError, number, pack, seconds, unpack


class Pipes(asyncio.Transport):
    """Takes what is written and keeps it; there is nothing to close."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return True


def channel_fed_with(data: bytes, *, ended: bool = True) -> Channel:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if ended:
        reader.feed_eof()
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    writer = asyncio.StreamWriter(Pipes(), protocol, reader, loop)
    return Channel(reader, writer, lambda: "it was a test")


async def test_an_orderly_reply_is_read() -> None:
    channel = channel_fed_with(pack([b"data", b"", b"\0\xff"]))
    assert await channel.receive(limit=10, seconds=1) == [b"data", b"", b"\0\xff"]


async def test_a_refusal_is_the_agents_to_read() -> None:
    channel = channel_fed_with(pack([b"refused", b"no \xff such file"]))
    with pytest.raises(ToolError, match=r"no . such file"):
        await channel.receive(limit=10, seconds=1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xff", "are allowed"),
        (pack([b"data", b"x" * 100_000]), "are allowed"),
        (b"\0\0\0\0", "broken frame"),
        (b"\0\0\0\5\0\0\0\2", "gone: it was a test"),
        (b"\0\0\0\5\0\0\0\2a", "broken frame"),
        (b"\0\0\0\5\0\0\0\xffa", "broken frame"),
        (b"\0\0\0\2\0\0", "broken frame"),
        (b"", "gone: it was a test"),
        (b"\0\0", "gone"),
        (pack([b"failed", b"MemoryError()"]), "helper failed: MemoryError"),
    ],
    ids=str,
)
async def test_anything_else_is_out_of_step(data: bytes, said: str) -> None:
    with pytest.raises(OutOfStep, match=said):
        await channel_fed_with(data).receive(limit=10, seconds=1)


async def test_silence_ends() -> None:
    with pytest.raises(OutOfStep, match=r"did not answer within 0\.01 s"):
        await channel_fed_with(b"\0\0", ended=False).receive(limit=10, seconds=0.01)


async def test_pages_end_and_stay_one_kind() -> None:
    channel = channel_fed_with(pack([b"data", b"1"]) + pack([b"data", b"2"]) + pack([b"end"]))
    pages = [page async for page in channel.pages(b"data", limit=10, seconds=1)]
    assert pages == [[b"1"], [b"2"]]
    with pytest.raises(OutOfStep, match="expected b'data'"):
        async for _ in channel_fed_with(pack([b"entry"])).pages(b"data", limit=10, seconds=1):
            pass


@pytest.mark.parametrize("field", [b"", b"x", b"1e9", b"\xff", b"9" * 19 + b"x"])
def test_what_is_no_number_is_refused(field: bytes) -> None:
    with pytest.raises(OutOfStep):
        integer(field)


@pytest.mark.parametrize(
    ("encode", "value", "expected"),
    [(number, -9, b"-9"), (number, True, b"1"), (seconds, 0.25, b"250000")],
)
def test_numbers_are_plain(encode: Callable[[float], bytes], value: float, expected: bytes) -> None:
    assert encode(value) == expected
    assert integer(expected) == int(expected)


def test_frames_nest_nothing() -> None:
    inner = pack([b"a", b"b"])
    assert unpack(pack([b"x", inner])[4:]) == [b"x", inner]
    with pytest.raises(WireError):
        unpack(b"")


async def test_a_helper_that_takes_nothing_is_given_up() -> None:
    loop = asyncio.get_running_loop()
    unread, front = os.pipe()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), loop=loop)
    transport, _ = await loop.connect_write_pipe(lambda: protocol, os.fdopen(front, "wb"))
    try:
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        channel = Channel(asyncio.StreamReader(), writer, lambda: "it was a test")
        with pytest.raises(OutOfStep, match=r"took nothing for 0\.01 s"):
            await channel.send(bytes(1 << 20), seconds=0.01)
    finally:
        transport.abort()
        os.close(unread)
