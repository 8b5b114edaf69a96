"""Sandboxes by bubblewrap: one bwrap, one helper and three tmpfs per sandbox.

    runner ── launch.py (private mounts, cgroup, uid) ═ bwrap (namespaces, seccomp) ── helper

`launch.py` becomes bwrap, and bwrap starts the helper as process 1 of the sandbox; the runner talks
to the helper over the pipes it was born with. The helper lives as long as the sandbox, so a command
costs a fork inside, not a new sandbox. The workspace is a tmpfs of the declared size and number of
files: the quota needs no privilege, and it vanishes with the last process. As root, sandboxes run
under a uid of their own, given up before bwrap, so that nothing inside is root outside.

A sandbox ends in one of three ways: closed (the helper hears the pipe close, kills everything,
exits), killed (it did not answer, or a call was cancelled: process 1 is killed, the kernel takes
the rest), or orphaned (the runner died: the death signal and the closed pipe do the same). Cgroups
that a killed runner left are removed by the next one (`leftovers.py`).

Scaling out: nothing is shared between sandboxes but the snapshot store, so runners on any number of
machines open them independently; a snapshot in a shared folder opens on any of them.
"""

import asyncio
import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from runtime.errors import InputError, SandboxError, ToolError
from runtime.run import SnapshotId
from runtime.sandbox.cgroups import Cgroup, Cgroups, cgroup_name
from runtime.sandbox.leftovers import Leftovers
from runtime.sandbox.profile import Profile, find_bwrap, find_python, find_stage, seccomp_filter
from runtime.sandbox.protocol import SandboxSpec, Strength
from runtime.sandbox.room import check_fits
from runtime.sandbox.sandbox_process import SandboxProcess
from runtime.sandbox.snapshots import SnapshotEntry, SnapshotStore, entries_of_files
from runtime.sandbox.workspace import BubblewrapSandbox

DROP_UID = 64_123
"""The uid of sandboxes where Noria runs as root and was told no other."""
HELPER_BYTES = 32 << 20
"""Memory for the helper, on top of what the command may use."""
HELPER_PROCESSES = 4
"""Launcher or bwrap, helper, and room for their change-overs."""


class BubblewrapBackend:
    """Opens bubblewrap sandboxes on this host."""

    def __init__(
        self,
        *,
        state_dir: Path,
        bwrap: Path | None = None,
        uid: int | None = None,
        use_cgroups: bool = True,
    ) -> None:
        """Raises SandboxUnavailable where the host has no usable bwrap or Python.

        `state_dir` holds snapshots and notes of open sandboxes; `uid` is what root gives up for.
        """
        root = os.geteuid() == 0
        own = (uid or DROP_UID) if root else os.geteuid()
        self._profile = Profile(find_bwrap(bwrap), find_python(), own, find_stage())
        self._seccomp = seccomp_filter()
        self.snapshots = SnapshotStore(state_dir / "snapshots")
        self._leftovers = Leftovers(state_dir / "sandboxes")
        self._prefix = cgroup_name(os.getpid(), secrets.token_hex(4))
        self._numbers = itertools.count(1)
        self._cgroups = Cgroups.probe(f"{self._prefix}-probe") if use_cgroups else None
        self._sweep()
        self._open: dict[str, BubblewrapSandbox] = {}

    @property
    def name(self) -> str:
        return "bubblewrap"

    def strengths(self) -> dict[str, Strength]:
        limited = self._cgroups.parents if self._cgroups is not None else {}
        return {
            "memory": "hard" if "memory" in limited else "soft",
            "processes": "hard" if "pids" in limited else "soft",
            "cpu_time": "soft",
            "open_files": "soft",
            "disk": "hard",
            "inodes": "hard",
            "output": "soft",
            "wall_time": "soft",
            "network": "hard",
            "user_namespace": "hard",
            "syscalls": "hard" if self._seccomp is not None else "none",
        }

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: SnapshotId | None = None,
    ) -> BubblewrapSandbox:
        """As the protocol says. Raises InputError for files that no workspace can hold."""
        entries = list(entries_of_files(files or {}))
        if snapshot is not None:
            stored = await asyncio.to_thread(list, self.snapshots.get(snapshot))
            entries = _laid_over(stored, [entry for entry in entries if entry.kind == "file"])
        check_fits(entries, spec)
        sandbox = await self._start(spec)
        try:
            await self._fill(sandbox, entries)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def _start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        name = f"{self._prefix}-{next(self._numbers)}"
        cgroup = self._cgroup(name, spec)
        try:
            process = await SandboxProcess.start(
                lambda info, seccomp: self._profile.arguments(
                    spec,
                    owner=os.getpid(),
                    cgroups=cgroup.join_files if cgroup else [],
                    limited_memory=cgroup is not None and "memory" in cgroup.folders,
                    info=info,
                    seccomp=seccomp,
                ),
                str(self._seccomp) if self._seccomp else None,
            )
        except BaseException as error:
            self._forget(name, cgroup)
            if isinstance(error, OSError):
                raise SandboxError(f"could not start a sandbox: {error}") from error
            raise
        self._leftovers.note(name, process.pid)
        sandbox = BubblewrapSandbox(
            spec,
            process,
            environment=self._profile.environment(spec),
            snapshots=self.snapshots,
            cgroup=cgroup,
            on_close=lambda: self._forget(name, cgroup),
        )
        self._open[name] = sandbox
        return sandbox

    def _cgroup(self, name: str, spec: SandboxSpec) -> Cgroup | None:
        if self._cgroups is None:
            return None
        try:
            return self._cgroups.create(
                name,
                memory_bytes=spec.memory_bytes + spec.disk_bytes + HELPER_BYTES,
                processes=spec.processes + HELPER_PROCESSES,
            )
        except OSError as error:
            raise SandboxError(f"could not make the sandbox's cgroup: {error}") from error

    def _forget(self, name: str, cgroup: Cgroup | None) -> None:
        self._open.pop(name, None)
        self._leftovers.forget(name)
        if cgroup is not None:
            cgroup.remove()

    async def _fill(self, sandbox: BubblewrapSandbox, entries: list[SnapshotEntry]) -> None:
        try:
            await sandbox.fill(entries)
        except ToolError as error:
            raise InputError(f"the workspace cannot hold these files: {error}") from error

    async def store(self, files: Mapping[str, bytes]) -> SnapshotId:
        """Raises InputError for names that no workspace can hold."""
        return await asyncio.to_thread(self.snapshots.put_files, files)

    async def read_snapshot(self, snapshot: SnapshotId) -> dict[str, bytes]:
        """Raises SandboxError where the snapshot is unknown or damaged."""
        return await asyncio.to_thread(self.snapshots.files, snapshot)

    async def close(self) -> None:
        """Close every sandbox still open and sweep what dead runners left. Idempotent."""
        closing = (sandbox.close() for sandbox in list(self._open.values()))
        await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.to_thread(self._sweep)

    def _sweep(self) -> None:
        self._leftovers.sweep()
        if self._cgroups is not None:
            self._cgroups.sweep()


def _laid_over(stored: list[SnapshotEntry], files: list[SnapshotEntry]) -> list[SnapshotEntry]:
    """The stored tree, its files and links replaced where a file is given under their path."""
    given = {entry.path for entry in files}
    kept = [entry for entry in stored if entry.kind == "directory" or entry.path not in given]
    return kept + files
