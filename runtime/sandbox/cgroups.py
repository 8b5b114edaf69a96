"""Kernel-enforced limits of memory and processes, where this host lets us make cgroups.

A sandbox gets one cgroup per controller beneath the runner's own, so that whatever limits the
runner limits its sandboxes too. Version 1 has a tree per controller; version 2 has one tree and
needs its controllers delegated (a systemd unit with `Delegate=yes`). What can be used is found by
trying it: `probe` makes a cgroup, sets its limits and removes it. Without any the helper's rlimits
and its memory supervisor remain, and `strengths()` says `soft`.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from runtime.sandbox.leftovers import process_name

Controller = Literal["memory", "pids"]
CONTROLLERS: Sequence[Controller] = ("memory", "pids")


NAME = "noria"


def cgroup_name(pid: int, suffix: str) -> str:
    """A name that tells which process made the cgroup."""
    return f"{NAME}-{_maker(pid)}-{suffix}"


def _maker(pid: int) -> str | None:
    """`pid-start` of a living process; None where it is gone."""
    name = process_name(pid)
    return "-".join(name.split(":")[:2]) if name else None


@dataclass(frozen=True, slots=True)
class Flavour:
    """File names of one cgroup version."""

    memory_limits: Sequence[str]
    """The first must exist; the others are set where they do (swap)."""
    swap_counts_memory: bool
    """Whether the swap limit includes memory (version 1) or is swap alone (version 2)."""
    peak: str
    events: str
    """Holds a line `oom_kill N`."""


V1 = Flavour(
    memory_limits=("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    swap_counts_memory=True,
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
)
V2 = Flavour(
    memory_limits=("memory.max", "memory.swap.max"),
    swap_counts_memory=False,
    peak="memory.peak",
    events="memory.events",
)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one sandbox: a folder per controller (the same one in version 2)."""

    folders: Mapping[Controller, Path]
    flavour: Flavour

    @property
    def join_files(self) -> list[str]:
        """Files to which a process writes its id to join."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Raises OSError where the kernel refuses."""
        if "memory" in self.folders:
            self._limit_memory(self.folders["memory"], memory_bytes)
        if "pids" in self.folders:
            (self.folders["pids"] / "pids.max").write_text(str(processes))

    def _limit_memory(self, folder: Path, memory_bytes: int) -> None:
        first, swap = self.flavour.memory_limits
        (folder / first).write_text(str(memory_bytes))
        if (folder / swap).exists():
            swap_limit = memory_bytes if self.flavour.swap_counts_memory else 0
            (folder / swap).write_text(str(swap_limit))

    def oom_kills(self) -> int:
        """How often the kernel killed a process of this cgroup for memory."""
        if "memory" not in self.folders:
            return 0
        for line in (self.folders["memory"] / self.flavour.events).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def start_peak(self) -> None:
        """Forget the peak so far, where the kernel can (version 1, and 2 since Linux 6.12)."""
        if "memory" in self.folders:
            with contextlib.suppress(OSError):
                (self.folders["memory"] / self.flavour.peak).write_text("0")

    def peak_bytes(self) -> int:
        """Highest memory use since `start_peak`; 0 where the kernel does not say."""
        if "memory" not in self.folders:
            return 0
        try:
            return int((self.folders["memory"] / self.flavour.peak).read_text())
        except OSError:
            return 0

    def remove(self) -> bool:
        """Whether nothing is left; a cgroup with processes in it stays."""
        for folder in set(self.folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders.values())


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where this process may make cgroups: controller → the parent folder."""

    parents: Mapping[Controller, Path]
    flavour: Flavour

    @classmethod
    def probe(cls, name: str) -> Self | None:
        """What works here, found by making and removing a cgroup of this name."""
        for flavour, parents in ((V1, _parents_v1()), (V2, _parents_v2())):
            usable: dict[Controller, Path] = {
                controller: parent
                for controller, parent in parents.items()
                if _works(Cgroup({controller: parent / name}, flavour))
            }
            if usable:
                return cls(usable, flavour)
        return None

    def sweep(self) -> None:
        """Remove what dead processes left; what is not empty stays."""
        for folder in (f for p in set(self.parents.values()) for f in p.glob(f"{NAME}-*-*-*")):
            _, pid, started, _ = folder.name.split("-", 3)
            if pid.isdigit() and _maker(int(pid)) != f"{pid}-{started}":
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def create(self, name: str, *, memory_bytes: int, processes: int) -> Cgroup:
        """Raises OSError; leaves nothing behind then."""
        cgroup = Cgroup({c: parent / name for c, parent in self.parents.items()}, self.flavour)
        try:
            for folder in set(cgroup.folders.values()):
                folder.mkdir()
            cgroup.limit(memory_bytes, processes)
        except OSError:
            cgroup.remove()
            raise
        return cgroup


def _works(cgroup: Cgroup) -> bool:
    try:
        for folder in cgroup.folders.values():
            folder.mkdir()
        cgroup.limit(1 << 30, 100)
        return all(os.access(file, os.W_OK) for file in cgroup.join_files)
    except OSError:
        return False
    finally:
        cgroup.remove()


def _parents_v1() -> dict[Controller, Path]:
    own = _own_cgroups()
    mounts = _mounts("cgroup")
    return {
        controller: _beneath(mount, own[controller])
        for controller in CONTROLLERS
        for options, mount in mounts
        if controller in options and controller in own
    }


def _parents_v2() -> dict[Controller, Path]:
    own = _own_cgroups().get("")
    mounts = _mounts("cgroup2")
    if own is None or not mounts:
        return {}
    parent = _beneath(mounts[0][1], own)
    try:
        delegated = (parent / "cgroup.subtree_control").read_text().split()
    except OSError:
        return {}
    return {controller: parent for controller in CONTROLLERS if controller in delegated}


def _own_cgroups() -> dict[str, str]:
    """Controller → path of our own cgroup; the empty name is version 2."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


@dataclass(frozen=True, slots=True)
class _Mount:
    point: Path
    root: str
    """The cgroup that the mount shows as its top."""


def _mounts(kind: str) -> list[tuple[list[str], _Mount]]:
    """(super-block options, mount) of every cgroup file system of this kind."""
    found: list[tuple[list[str], _Mount]] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if tail[0] == kind:
            found.append((tail[-1].split(","), _Mount(Path(fields[4]), fields[3])))
    return found


def _beneath(mount: _Mount, path: str) -> Path:
    inner = path.removeprefix(mount.root) if mount.root != "/" else path
    return mount.point / inner.lstrip("/")
