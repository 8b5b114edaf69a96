"""What a killed runner may have left, and how the next one finds it.

A sandbox's mounts and files live in its own mount namespace and end with its processes, which die
with the runner. Should the kernel have missed a death signal, processes are left over: each open
sandbox has a note under the state folder that says who owns it and which process it is. A note
whose owner is gone is swept. Processes are named by id, start time and boot, so that a recycled id
is never taken for them. (Cgroups carry their maker in their name: `cgroups.py`.)
"""

import contextlib
import json
import os
import select
import signal
from pathlib import Path

KILL_SECONDS = 2.0


def process_name(pid: int) -> str | None:
    """A name no other process ever has on this machine; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    if state in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{pid}:{started}:{boot}"


def runs(name: str) -> bool:
    return process_name(int(name.partition(":")[0])) == name


class Leftovers:
    """The notes of one state folder; several runners may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._owner = process_name(os.getpid())

    def note(self, sandbox: str, pid: int) -> None:
        """Remember a sandbox by its outermost process."""
        content = {"owner": self._owner, "process": process_name(pid)}
        (self._folder / f"{sandbox}.json").write_text(json.dumps(content))

    def forget(self, sandbox: str) -> None:
        (self._folder / f"{sandbox}.json").unlink(missing_ok=True)

    def sweep(self) -> None:
        """End what dead owners left running."""
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                note = json.loads(path.read_text())
                if note["owner"] and runs(note["owner"]):
                    continue
                if note["process"] and runs(note["process"]):
                    _end(int(note["process"].partition(":")[0]))
                path.unlink(missing_ok=True)


def _end(pid: int) -> None:
    """Kill, and wait a moment for the end."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], KILL_SECONDS)
    finally:
        os.close(descriptor)
