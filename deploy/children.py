"""One child process of the supervisor: started, awaited until ready, stopped for good.

A child runs in a session of its own, so that Ctrl-C reaches the supervisor alone and stops happen
in order. The kernel signals it when the supervisor dies (see `enter.py`). Noria's own processes
tell that they are ready over an inherited socket (`processes.notify_ready`); Postgres and Valkey
are ready when they answer. The lock of a data directory is inherited too: it is free again only
when the last process that could write there is gone, however the supervisor ended.

Scaling past one machine: this is the embedded stack's process manager; elsewhere systemd or
Kubernetes starts the same programs with the same environment.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deploy.home import CannotRun, tail

ENTER = Path(__file__).with_name("enter.py")
LOCK_SECONDS = 30.0
"""How long a start waits for processes of an earlier `up` to leave a data directory."""
PROBE_SECONDS = 0.02

Progress = Callable[[str, float | None], None]
"""What a child says it is doing, and the finished share in [0, 1] where it knows."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Everything it takes to start one child."""

    name: str
    argv: tuple[str, ...]
    """`argv[0]` is an absolute path."""
    log: Path
    env: Mapping[str, str]
    once: bool = False
    """Runs to its end, and is ready when it ended with status 0."""
    probe: Callable[[], Awaitable[bool]] | None = None
    """Asks whether the child answers; None: the child notifies."""
    start_seconds: float = 120.0
    """Silent for so long while starting, the child counts as hung; progress restarts the clock."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 20.0
    death_signal: signal.Signals = signal.SIGTERM
    uid: int | None = None
    mounts: tuple[tuple[Path, Path], ...] = ()
    lock: Path | None = None
    """Lock file of the data directory the child writes."""
    listener: int | None = None
    """Descriptor of a listening socket that the child is to serve."""
    leftovers: tuple[Path, ...] = ()
    """What a killed predecessor may have left; removed once the lock is held."""


def _descriptors(notify: int, listener: int | None) -> dict[str, str]:
    names = {"NORIA_NOTIFY_FD": notify, "NORIA_LISTEN_FD": listener}
    return {name: str(fd) for name, fd in names.items() if fd is not None}


class ChildFailed(CannotRun):
    """A child ended or hung; the message carries the last lines of its log."""

    def __init__(self, spec: ChildSpec, what: str) -> None:
        lines = "".join(f"\n  | {line}" for line in tail(spec.log))
        super().__init__(f"{spec.name} {what}; the end of {spec.log}:{lines}")
        self.child = spec.name


@dataclass(slots=True)
class Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process
    channel: socket.socket
    exited: asyncio.Task[int] = field(init=False)

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self.process.wait(), name=f"{self.spec.name} exits")

    @property
    def pid(self) -> int:
        return self.process.pid

    @classmethod
    async def start(cls, spec: ChildSpec) -> Self:
        """Raises CannotRun where the data directory stays locked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lock = await _locked(spec.lock) if spec.lock else None
        inherited = [fd for fd in (theirs.fileno(), lock, spec.listener) if fd is not None]
        try:
            for leftover in spec.leftovers:
                leftover.unlink(missing_ok=True)
            with spec.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *_enter(spec),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**spec.env, **_descriptors(theirs.fileno(), spec.listener)},
                    pass_fds=inherited,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if lock is not None:
                os.close(lock)
        ours.setblocking(False)
        return cls(spec, process, ours)

    async def ready(self, progress: Progress = lambda what, share: None) -> None:
        """Wait until the child serves (or ended well, if `once`). Raises ChildFailed."""
        waiting = asyncio.create_task(self._until_ready(progress))
        done, _ = await asyncio.wait({waiting, self.exited}, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            waiting.result()
        else:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if not (self.spec.once and self.exited.result() == 0):
                raise self.failed()

    async def end(self) -> None:
        """Wait for its end. Cancelling the wait leaves the child as it is."""
        await asyncio.wait({self.exited})

    def failed(self) -> ChildFailed:
        """How it ended, as an error to raise."""
        return ChildFailed(self.spec, _ending(self.exited.result()))

    async def _until_ready(self, progress: Progress) -> None:
        if self.spec.probe is not None:
            await self._until_it_answers(self.spec.probe)
            return
        while not (message := await self._message()).get("ready"):
            progress(str(message.get("doing", "")), message.get("share"))

    async def _until_it_answers(self, probe: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(self.spec.start_seconds):
                while not await probe():  # noqa: ASYNC110  # they offer no event
                    await asyncio.sleep(PROBE_SECONDS)
        except TimeoutError:
            raise ChildFailed(self.spec, self._silence()) from None

    async def _message(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.spec.start_seconds):
                data = await loop.sock_recv(self.channel, 65_536)
                if not data:  # the child closed its end, which it does by ending
                    await asyncio.Event().wait()
        except TimeoutError:
            raise ChildFailed(self.spec, self._silence()) from None
        return json.loads(data)

    def _silence(self) -> str:
        return f"did not become ready and said nothing for {self.spec.start_seconds:g} s"

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Ask it to stop, insist after `stop_seconds` (at once when `hurry` is set). Idempotent."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                self.process.send_signal(self.spec.stop_signal)
            await self._exit_within(self.spec.stop_seconds, hurry)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # whoever is left in its process group
        await self.end()
        self.channel.close()

    async def _exit_within(self, seconds: float, hurry: asyncio.Event | None) -> None:
        waits: set[asyncio.Task[Any]] = {self.exited}
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait(waits | {hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()


def _enter(spec: ChildSpec) -> list[str]:
    plan = {
        "argv": spec.argv,
        "parent": os.getpid(),
        "death_signal": int(spec.death_signal),
        "uid": spec.uid,
        "mounts": [(str(source), str(target)) for source, target in spec.mounts],
    }
    return [sys.executable, "-I", "-S", str(ENTER), json.dumps(plan)]


async def _locked(path: Path) -> int:
    """A descriptor that holds the lock. Raises CannotRun after LOCK_SECONDS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        async with asyncio.timeout(LOCK_SECONDS):
            while not _try_lock(descriptor):  # noqa: ASYNC110  # flock offers no event
                await asyncio.sleep(PROBE_SECONDS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, TimeoutError):
            raise CannotRun(
                f"processes of an earlier start still hold {path}; "
                "end them (`fuser` names them), or set NORIA_HOME to another folder"
            ) from None
        raise
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"
