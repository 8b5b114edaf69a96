"""One open bubblewrap sandbox: its commands, its files, its snapshots.

Calls are serialised by a lock, because the helper answers one request at a time. A call that does
not end in an orderly answer (silence, a broken frame, cancellation) leaves the pipes out of step:
the sandbox is killed and every later call says so.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from runtime.errors import SandboxError, ToolError
from runtime.run import SnapshotId
from runtime.sandbox.cgroups import Cgroup
from runtime.sandbox.channel import Channel, OutOfStep, Reply, integer
from runtime.sandbox.inside.bounds import INLINE, PAGE, whole_pages
from runtime.sandbox.inside.wire import CHUNK, number, seconds
from runtime.sandbox.paths import workspace_path
from runtime.sandbox.protocol import ExecResult, FileEntry, SandboxSpec
from runtime.sandbox.sandbox_process import SandboxProcess
from runtime.sandbox.snapshots import (
    KINDS,
    LETTERS,
    SnapshotEntry,
    SnapshotRefused,
    SnapshotStore,
)

GRACE = 15.0
"""Seconds past its own deadline after which a silent helper counts as dead."""
FILE_SECONDS = 60.0
"""For any one answer about files."""
MAX_STDIN = 8 << 20
OWNER = 0o700
BIG = 1 << 20
"""Bytes of content from which hashing and writing leave the event loop."""


class BubblewrapSandbox:
    """Made by `BubblewrapBackend.open`."""

    def __init__(
        self,
        spec: SandboxSpec,
        process: SandboxProcess,
        *,
        environment: Mapping[str, str],
        snapshots: SnapshotStore,
        cgroup: Cgroup | None,
        on_close: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._process = process
        self._environment = environment
        self._snapshots = snapshots
        self._cgroup = cgroup
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self._broken: str | None = None
        self._closing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ commands

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """As the protocol says; a time-out beyond the spec's is cut to it.

        Raises ToolError for a folder that does not exist or words that are no command.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        limit = min(timeout or self._spec.seconds_per_call, self._spec.seconds_per_call)
        if len(stdin) > MAX_STDIN:
            raise ToolError(f"standard input has {len(stdin)} bytes; {MAX_STDIN} are allowed")
        fields = [
            seconds(limit),
            os.fsencode(workspace_path(cwd)),
            stdin,
            number(len(argv)),
            *_encoded(argv, dict(self._environment) | dict(env or {})),
        ]
        async with self._turn() as channel:
            kills = self._begin_accounting()
            await channel.send(b"exec", *fields)
            room = 2 * self._spec.output_bytes
            reply = await channel.receive(limit=room, seconds=limit + GRACE)
            return self._result(reply, kills)

    def _begin_accounting(self) -> int:
        if self._cgroup is None:
            return 0
        self._cgroup.start_peak()
        return self._cgroup.oom_kills()

    def _result(self, reply: Reply, kills_before: int) -> ExecResult:
        if reply[0] != b"done" or len(reply) != 10:
            raise OutOfStep(f"expected the end of a command, got {reply[0][:20]!r}")
        code, timed_out, out_of_memory, truncated, wall, cpu, peak = map(integer, reply[1:8])
        killed = self._cgroup is not None and self._cgroup.oom_kills() > kills_before
        cap = self._spec.output_bytes
        return ExecResult(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=reply[8][:cap],
            stderr=reply[9][:cap],
            truncated=bool(truncated),
            timed_out=bool(timed_out),
            oom_killed=bool(out_of_memory) or killed,
            wall_seconds=wall / 1e6,
            cpu_seconds=cpu / 1e6,
            peak_memory_bytes=(self._cgroup.peak_bytes() if self._cgroup else 0) or peak,
        )

    # ------------------------------------------------------------ files

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Raises ToolError also where the file is longer than `max_bytes`."""
        name = os.fsencode(workspace_path(path))
        content = bytearray()
        async with self._turn() as channel:
            await channel.send(b"read", name, number(max_bytes))
            async for chunk in channel.pages(b"data", limit=CHUNK, seconds=FILE_SECONDS):
                content += chunk[0]
                if len(content) > max_bytes:
                    raise OutOfStep(f"the sandbox sent more than the {max_bytes} bytes asked for")
        return bytes(content)

    async def write(self, path: str, data: bytes) -> None:
        name = workspace_path(path)
        async with self._turn() as channel:
            await _store(channel, LETTERS["file"], 0, name, data)
            await _settle(channel)

    async def list(self, path: str = ".", *, max_entries: int = 1_000) -> list[FileEntry]:
        name = os.fsencode(workspace_path(path))
        found: list[FileEntry] = []
        async with self._turn() as channel:
            await channel.send(b"list", name, number(max_entries))
            async for fields in channel.pages(b"entries", limit=1 << 20, seconds=FILE_SECONDS):
                found += _listing(fields)
        return found[:max_entries]

    async def fill(self, entries: Sequence[SnapshotEntry]) -> None:
        """Write a tree into a fresh workspace, with one answer for all of it.

        A folder its owner may not write is closed only after everything is in it. Raises ToolError
        where it does not fit.
        """
        folders = [entry for entry in entries if entry.kind == "directory"]
        closed = [entry for entry in reversed(folders) if entry.mode & OWNER != OWNER]
        async with self._turn() as channel:
            for entry in entries:
                mode = entry.mode | OWNER if entry.kind == "directory" else entry.mode
                await _store(channel, LETTERS[entry.kind], mode, entry.path, entry.content)
            for entry in closed:
                await _store(channel, LETTERS[entry.kind], entry.mode, entry.path, b"")
            await _settle(channel)

    # ------------------------------------------------------------ snapshots

    async def snapshot(self) -> SnapshotId:
        """As the protocol says. Raises ToolError for a tree that could not be opened again.

        (Too deep a tree; hard links and sparse files, which claim more than the disk holds.)
        """
        entries = min(self._spec.inodes, self._snapshots.max_entries)
        inline = entries * INLINE
        room = max(0, self._snapshots.max_bytes - inline) // PAGE
        pages = min(whole_pages(self._spec.disk_bytes), room)
        most = pages * PAGE + inline
        with self._snapshots.writer(max_bytes=most, max_entries=entries) as writer:
            async with self._turn() as channel:
                await channel.send(b"dump", number(pages), number(entries))
                async for fields in channel.pages(b"entry", limit=CHUNK, seconds=FILE_SECONDS):
                    entry = await self._entry(channel, fields)
                    try:
                        if len(entry.content) > BIG:
                            await asyncio.to_thread(writer.add, entry)
                        else:
                            writer.add(entry)
                    except SnapshotRefused as error:
                        raise OutOfStep(f"the sandbox sent no tree: {error}") from error
            return await asyncio.to_thread(writer.commit)

    async def _entry(self, channel: Channel, fields: Reply) -> SnapshotEntry:
        """An entry's header, and its content where it is a file."""
        if len(fields) != 5 or fields[0] not in KINDS:
            raise OutOfStep("the sandbox sent an entry that is none")
        kind, mode, size, path, target = fields
        left = integer(size) if kind == b"f" else 0
        if left > self._spec.disk_bytes:
            raise OutOfStep("the sandbox announced a file larger than its disk")
        content = bytearray(target)
        while left > 0:
            verb, *chunk = await channel.receive(limit=CHUNK, seconds=FILE_SECONDS)
            if verb != b"data" or not 0 < len(chunk[0]) <= left:
                raise OutOfStep("the sandbox sent a file of another size than announced")
            content += chunk[0]
            left -= len(chunk[0])
        return SnapshotEntry(os.fsdecode(path), KINDS[kind], integer(mode), bytes(content))

    # ------------------------------------------------------------ life

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncGenerator[Channel]:
        """The channel, for one request. Whatever is not an orderly answer kills the sandbox."""
        async with self._lock:
            if self._broken is not None:
                raise SandboxError(f"this sandbox is gone: {self._broken}")
            try:
                yield self._process.channel
            except ToolError:
                raise
            except BaseException as error:
                self._broken = str(error) or f"a call was interrupted ({type(error).__name__})"
                self._process.kill()
                raise

    async def close(self) -> None:
        """Kill what runs and remove what was made. Idempotent; also while a call is running."""
        if self._closing is None:
            self._broken = self._broken or "it was closed"
            if self._lock.locked():
                self._process.kill()
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._lock:
            await self._process.stop()
        self._on_close()


async def _store(channel: Channel, kind: bytes, mode: int, path: str, content: bytes) -> None:
    """Send one entry, in chunks; whether it fitted is told by `_settle`."""
    name = os.fsencode(path)
    starts = range(0, len(content), CHUNK) or range(1)
    for start in starts:
        last = number(start + CHUNK >= len(content))
        await channel.send(b"store", last, number(mode), kind, name, content[start : start + CHUNK])


async def _settle(channel: Channel) -> None:
    """Raises ToolError where an entry sent since the last time was refused."""
    await channel.send(b"settle")
    await channel.receive(limit=0, seconds=FILE_SECONDS)


def _listing(fields: Reply) -> list[FileEntry]:
    if len(fields) % 4:
        raise OutOfStep("the sandbox sent a listing that is none")
    return [_listed(*fields[at : at + 4]) for at in range(0, len(fields), 4)]


def _listed(kind: bytes, mode: bytes, size: bytes, path: bytes) -> FileEntry:
    return FileEntry(os.fsdecode(path), KINDS.get(kind, "other"), integer(size), integer(mode))


def _encoded(argv: list[str], environment: Mapping[str, str]) -> list[bytes]:
    """Raises ToolError for words and variables that cannot be handed to a program."""
    if not argv or not argv[0]:
        raise ToolError("there is no command to run")
    wrong = [name for name in environment if not name or "=" in name]
    if wrong:
        raise ToolError(f"{wrong[0]!r} is not a name for an environment variable")
    words = [*argv, *(f"{name}={value}" for name, value in environment.items())]
    try:
        encoded = [os.fsencode(word) for word in words]
    except UnicodeEncodeError as error:
        raise ToolError("the command holds characters that cannot be encoded") from error
    if any(b"\0" in word for word in encoded):
        raise ToolError("the command holds a NUL character")
    return encoded
