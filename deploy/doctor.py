"""`noria doctor`: what this machine offers, found by trying it, not by asking for versions.

Each finding says how well it is, what a shortfall costs, and what to do about it. `missing` means
that something Noria needs is not there; `degraded` means it works with less. Nothing it starts or
makes is left behind.

Scaling past one machine: run it on every machine that shall run a runner; `--json` is for fleets.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from deploy.embedded import bwrap_program, postgres_program, valkey_program
from deploy.home import CannotRun, Home
from deploy.launcher import FREE_BYTES, OLDEST_GLIBC
from deploy.supervisor import port_is_free
from deploy.up_record import read_up
from deploy.vllm_environment import VllmEnvironment
from runtime.errors import NoriaError
from runtime.settings import Settings

Level = Literal["ok", "degraded", "missing"]
PROBE_SECONDS = 10.0


class Finding(BaseModel):
    """One line of the examination."""

    model_config = ConfigDict(frozen=True)

    name: str
    level: Level
    found: str
    costs: str = ""
    """What is lost by it; empty where nothing is."""
    do: str = ""
    """What would mend it."""


def examine(settings: Settings) -> list[Finding]:
    """Every finding. A probe that breaks is a finding, never an error."""
    return [finding for probe in PROBES for finding in _careful(probe, settings)]


def _careful(probe: "Probe", settings: Settings) -> list[Finding]:
    name = probe.__name__.strip("_").replace("_", " ")
    try:
        return list(probe(settings))
    except (OSError, subprocess.SubprocessError, CannotRun, NoriaError) as error:
        return [Finding(name=name, level="missing", found=str(error), costs="see above")]


# ---------------------------------------------------------------- the machine


def _python(settings: Settings) -> Iterator[Finding]:
    suitable = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        name="python",
        level="ok" if suitable else "missing",
        found=f"{platform.python_version()} ({sys.executable})",
        do="" if suitable else "install Python 3.11, 3.12 or 3.13",
    )


def _glibc(settings: Settings) -> Iterator[Finding]:
    name, version = platform.libc_ver()
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    suitable = name == "glibc" and parts >= OLDEST_GLIBC
    yield Finding(
        name="glibc",
        level="ok" if suitable else "missing",
        found=f"{name or 'none'} {version}",
        costs="" if suitable else "the packaged programs do not start",
        do="" if suitable else "use a distribution of 2019 or later",
    )


def _kernel(settings: Settings) -> Iterator[Finding]:
    release = platform.release()
    parts = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
    recent = parts >= (5, 11)
    yield Finding(
        name="kernel",
        level="ok" if recent else "degraded",
        found=release,
        costs="" if recent else "no overlay mounts without root: sandboxes copy their files",
        do="" if recent else "a kernel of 5.11 or newer",
    )


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = next(p for p in (settings.home, *settings.home.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    level: Level = (
        "ok" if free >= FREE_BYTES else "degraded" if free >= FREE_BYTES / 4 else "missing"
    )
    yield Finding(
        name="disk",
        level=level,
        found=f"{free / 2**30:.1f} GiB free for {settings.home}",
        costs="" if level == "ok" else "the model, the database and snapshots may not fit",
        do="" if level == "ok" else "free some space, or set NORIA_HOME to another disk",
    )


# ---------------------------------------------------------------- the sandbox


def _bubblewrap(settings: Settings) -> Iterator[Finding]:
    program = bwrap_program(settings)
    said = _output([program, "--version"])
    overlay = "--overlay" in _output([program, "--help"])
    yield Finding(
        name="bubblewrap",
        level="ok" if overlay else "degraded",
        found=f"{said} ({program})",
        costs="" if overlay else "this build cannot mount overlays",
        do="" if overlay else "unset NORIA_BWRAP to use the packaged one",
    )


def _user_namespaces(settings: Settings) -> Iterator[Finding]:
    """A real namespace: bubblewrap runs `true` in one of its own."""
    tried = _in_namespaces(settings)
    works = tried.returncode == 0
    yield Finding(
        name="user namespaces",
        level="ok" if works else "missing",
        found="work" if works else tried.stderr.strip().splitlines()[-1],
        costs="" if works else "no sandbox: no tool can run commands",
        do="" if works else _allow_namespaces(),
    )


def _in_namespaces(settings: Settings) -> subprocess.CompletedProcess[str]:
    arguments = ["--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--", "/bin/true"]
    return _try([bwrap_program(settings), *arguments])


FORBIDDING = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("user/max_user_namespaces", "0", "10000"),
)
"""Kernel settings, the value that forbids user namespaces, and one that allows them."""


def _allow_namespaces() -> str:
    """The setting of this machine that forbids them, where one does."""
    for knob, wrong, right in FORBIDDING:
        with suppress(OSError):
            if Path("/proc/sys", knob).read_text().strip() == wrong:
                return f"as root: sysctl -w {knob.replace('/', '.')}={right}"
    return "in a container: allow user namespaces (its seccomp or AppArmor profile forbids them)"


def _overlay(settings: Settings) -> Iterator[Finding]:
    """A real overlay on a tmpfs, inside namespaces of an ordinary user."""
    with tempfile.TemporaryDirectory(prefix="noria-doctor-") as folder:
        lower = Path(folder, "lower")
        lower.mkdir()
        (lower / "seen").touch()
        arguments = ["--unshare-all", "--unshare-user", "--ro-bind", "/", "/"]
        overlay = ["--overlay-src", str(lower), "--tmp-overlay", "/mnt"]
        command = [bwrap_program(settings), *arguments, *overlay, "--", "/bin/ls", "/mnt/seen"]
        tried = _try([str(word) for word in command])
    works = tried.returncode == 0
    yield Finding(
        name="overlay",
        level="ok" if works else "degraded",
        found="works in a user namespace" if works else tried.stderr.strip()[:200],
        costs="" if works else "workspaces are copied instead of layered",
        do="" if works else "a kernel of 5.11 or newer that allows overlay to users",
    )


def _cgroups(settings: Settings) -> Iterator[Finding]:
    writable = [str(p) for p in _cgroup_candidates() if os.access(p, os.W_OK)]
    yield Finding(
        name="cgroups",
        level="ok" if writable else "degraded",
        found=", ".join(writable) or "none that may be written",
        costs="" if writable else "memory and process limits are rlimits, summed by a supervisor",
        do="" if writable else "delegate a cgroup (systemd-run --user -p Delegate=yes …)",
    )


def _cgroup_candidates() -> Iterator[Path]:
    """Where this process sits in each cgroup hierarchy that can limit memory or processes."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            place = Path(f"/sys/fs/cgroup{path}")
            with suppress(OSError):
                if "memory" in (place / "cgroup.controllers").read_text().split():
                    yield place
        for controller in {"memory", "pids"} & set(controllers.split(",")):
            place = Path(f"/sys/fs/cgroup/{controller}{path}")
            yield place if place.exists() else Path(f"/sys/fs/cgroup/{controller}")


def _limits(settings: Settings) -> Iterator[Finding]:
    """How strongly sandboxes are limited here, as the back end itself found out."""
    from runtime.sandbox.bubblewrap import BubblewrapBackend

    with tempfile.TemporaryDirectory(prefix="noria-doctor-") as folder:
        backend = BubblewrapBackend(
            state_dir=Path(folder), bwrap=bwrap_program(settings), uid=settings.sandbox_uid
        )
        strengths = backend.strengths()
    for name, strength in strengths.items():
        level, costs = STRENGTHS[strength]
        if strength == "soft" and name not in KERNEL_CAN:
            level, costs = "ok", ""
        yield Finding(
            name=f"limit: {name.replace('_', ' ')}", level=level, found=strength, costs=costs
        )


KERNEL_CAN = frozenset({"memory", "processes", "disk", "inodes"})
"""Limits that a kernel holds where it may; the others are held softly everywhere."""

STRENGTHS: dict[str, tuple[Level, str]] = {
    "hard": ("ok", ""),
    "soft": ("degraded", "held by rlimits or a watcher, not by the kernel for the whole sandbox"),
    "none": ("missing", "not limited"),
}


# ---------------------------------------------------------------- services and ports


def _postgres(settings: Settings) -> Iterator[Finding]:
    if settings.database_url is not None:
        yield Finding(name="postgres", level="ok", found="the one of NORIA_DATABASE_URL")
        return
    program = postgres_program(settings)
    found = f"{program.major} ({program.at(program.tree)})"
    yield Finding(name="postgres", level="ok", found=found)


def _valkey(settings: Settings) -> Iterator[Finding]:
    if settings.broker_url is not None:
        yield Finding(name="valkey", level="ok", found="the one of NORIA_BROKER_URL")
        return
    program = valkey_program(settings)
    found = f"{program.major} ({program.at(program.tree)})"
    yield Finding(name="valkey", level="ok", found=found)


def _vllm(settings: Settings) -> Iterator[Finding]:
    """Only where somebody has begun to install it: nothing needs it."""
    for cpu in (True, False):
        environment = VllmEnvironment.of(Home.of(settings), cpu=cpu)
        whole = environment.whole()
        if environment.folder.exists():
            yield Finding(
                name=f"vllm for {'CPUs' if cpu else 'GPUs'}",
                level="ok" if whole else "degraded",
                found=f"{'whole' if whole else 'half made, or of another version'} "
                f"({environment.folder})",
                do="" if whole else f"`./noria vllm{' --cpu' if cpu else ''}` makes it again",
            )


def _port(settings: Settings) -> Iterator[Finding]:
    record = read_up(settings)
    ours = record is not None and record.api_url is not None
    free = ours or settings.port == 0 or port_is_free(settings.host, settings.port)
    yield Finding(
        name="port",
        level="ok" if free else "degraded",
        found=f"{settings.port} is {'ours' if ours else 'free' if free else 'taken'}",
        costs="" if free else "the API cannot listen there",
        do="" if free else "end what listens there, or set NORIA_PORT (0 picks a free one)",
    )


def _running(settings: Settings) -> Iterator[Finding]:
    record = read_up(settings)
    if record is None:
        yield Finding(name="services", level="ok", found="nothing runs now")
        return
    for process in record.processes:
        yield Finding(
            name=f"service: {process.name}",
            level="ok" if process.ready else "degraded",
            found=process.doing or str(process.state),
            do="" if process.ready else f"read {process.log}",
        )


Probe = Callable[[Settings], Iterator[Finding]]
PROBES: Sequence[Probe] = (
    _python,
    _glibc,
    _kernel,
    _disk,
    _bubblewrap,
    _user_namespaces,
    _overlay,
    _cgroups,
    _limits,
    _postgres,
    _valkey,
    _vllm,
    _port,
    _running,
)


def _try(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )


def _output(command: Sequence[str | Path]) -> str:
    done = _try(command)
    return (done.stdout or done.stderr).strip()


STYLES = {"ok": "green", "degraded": "yellow", "missing": "bold red"}


def findings_table(findings: Sequence[Finding]) -> Table:
    table = Table("what", "", "found", "what it costs", "what to do")
    for each in findings:
        style = STYLES[each.level]
        mark = f"[{style}]{each.level}[/{style}]"
        table.add_row(each.name, mark, each.found, each.costs, each.do)
    return table
