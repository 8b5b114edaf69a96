"""The process of one sandbox, from its start to the end of the last process in it."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Self

from runtime.errors import SandboxUnavailable
from runtime.sandbox.channel import Channel, OutOfStep

START_SECONDS = 30.0
"""A sandbox starts in a fraction of a second; on a machine under heavy load in some."""
STOP_SECONDS = 5.0
COMPLAINT_BYTES = 4_096
HINT = (
    "sandboxes need unprivileged user namespaces "
    "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)


class SandboxProcess:
    """A bwrap with a helper that answers on `channel`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._handles = [handle for handle in [open_process(process.pid)] if handle is not None]
        """Descriptors of bwrap and, once it is known, of process 1 of the sandbox. Signals go by
        these, never by number: asyncio may have reaped the process already."""
        self.channel = Channel(process.stdout, process.stdin, self._explain)

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls, command: Callable[[int, int | None], list[str]], seccomp: str | None
    ) -> Self:
        """Start and wait until the helper is ready.

        `command` makes the arguments from two descriptors: where bwrap writes what it started, and
        the open system-call filter. Raises SandboxUnavailable where the host refuses.
        """
        info, info_inside = os.pipe()
        rules = os.open(seccomp, os.O_RDONLY | os.O_CLOEXEC) if seccomp else None
        inherited = [info_inside] if rules is None else [info_inside, rules]
        try:
            process = await asyncio.create_subprocess_exec(
                *command(info_inside, rules),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=inherited,
                start_new_session=True,
            )
        except BaseException:
            os.close(info)
            raise
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        started = cls(process)
        try:
            await started._become_ready(info)
        except BaseException:
            await asyncio.shield(started.stop())
            raise
        finally:
            os.close(info)
        return started

    async def _become_ready(self, info: int) -> None:
        try:
            await self.channel.receive(limit=0, seconds=START_SECONDS)
        except OutOfStep as error:
            complaint = await self._complaint()
            raise SandboxUnavailable(f"no sandbox here: {complaint or error}; {HINT}") from error
        report = json.loads(os.read(info, COMPLAINT_BYTES))
        first = open_process(report["child-pid"])
        if first is not None:
            self._handles.append(first)

    async def _complaint(self) -> str:
        """What launch.py or bwrap wrote before it gave up."""
        assert self._process.stderr is not None
        self.kill()
        text = await self._process.stderr.read(COMPLAINT_BYTES)
        return " ".join(text.decode("utf-8", "replace").split())

    def _explain(self) -> str:
        code = self._process.returncode
        return "its helper closed the pipe" if code is None else f"it ended with status {code}"

    def kill(self) -> None:
        """End everything in the sandbox, now. `stop` waits for it.

        Killing process 1 takes its namespace along, and bwrap ends only after that; killing bwrap
        first would leave a moment in which its parent is gone and its sandbox is not.
        """
        if self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[-1], signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the helper to end everything, else kill it; returns when all of it is gone."""
        self._stdin.close()
        while not await self._ended() and self._handles:
            self.kill()
            os.close(self._handles.pop())
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()

    async def _ended(self) -> bool:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                while await self._stdout.read(1 << 16):
                    pass
                await self._process.wait()
        except TimeoutError:
            return False
        return True


def open_process(pid: int) -> int | None:
    """A descriptor of the process, None where it is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
