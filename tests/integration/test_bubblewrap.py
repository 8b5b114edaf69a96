"""Bubblewrap on this host, seen from outside: who runs it, what outlives it, what is left."""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import SandboxError, SandboxUnavailable
from runtime.sandbox.bubblewrap import BubblewrapBackend
from runtime.sandbox.leftovers import Leftovers, process_name, runs
from runtime.sandbox.profile import find_bwrap, seccomp_filter
from runtime.sandbox.protocol import SandboxSpec
from runtime.sandbox.snapshots import digest_of_files
from runtime.settings import load_settings

ROOT = Path(__file__).parents[2]
OWNER = Path(__file__).with_name("sandbox_owner.py")
ORDINARY_UID = 64_130
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another uid")


def descendants(pid: int) -> list[int]:
    """Processes started by `pid`, at any depth."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


@pytest.fixture
def ours() -> Callable[[], list[int]]:
    """This process's descendants since the test began (a session's services run before)."""
    before = set(descendants(os.getpid()))
    return lambda: [pid for pid in descendants(os.getpid()) if pid not in before]


def wait_for_descendants(pid: int, count: int) -> list[int]:
    """At least so many; there is no event for a process's birth elsewhere, so this looks often."""
    deadline = time.monotonic() + 10
    while len(found := descendants(pid)) < count:
        assert time.monotonic() < deadline, f"only {len(found)} processes started"
        time.sleep(0.01)
    return found


def wait_for_end(pid: int, seconds: float = 10) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def uid_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))


class Owner:
    """A process with an open sandbox."""

    def __init__(
        self, state: Path, *, python: str = sys.executable, uid: int | None = None
    ) -> None:
        settings = load_settings()
        self.state = state
        self.running: list[int] = []
        path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
        self.process = subprocess.Popen(
            [python, OWNER, state, find_bwrap(settings.bwrap), str(settings.sandbox_uid)],
            stdout=subprocess.PIPE,
            env={
                "PYTHONPATH": path,
                "CANARY": "canary-in-the-environment",
                "PATH": "/usr/bin:/bin",
            },
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            cwd="/",
        )

    def ready(self) -> dict[str, Any]:
        """What it saw, once its endless command runs."""
        assert self.process.stdout is not None
        seen = json.loads(self.process.stdout.readline())
        self.running = wait_for_descendants(self.process.pid, 4)
        return seen

    def kill(self) -> None:
        """Kill -9, and whatever it had started is gone after that."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert all(wait_for_end(pid) for pid in self.running)
        BubblewrapBackend(state_dir=self.state / "next", bwrap=find_bwrap(load_settings().bwrap))
        assert cgroups_of(self.process.pid) == []


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path / "state")
    yield owner
    owner.kill()


def notes(state: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (state / "sandboxes").glob("*.json")]


def cgroups_of(pid: int) -> list[Path]:
    """Cgroups that the process made for its sandboxes."""
    return list(Path("/sys/fs/cgroup").glob(f"**/noria-{pid}-*"))


# ---------------------------------------------------------------- what outlives what


def test_a_killed_runner_leaves_nothing(owner: Owner) -> None:
    owner.ready()
    assert len(notes(owner.state)) == 1
    limited = cgroups_of(owner.process.pid)
    owner.process.kill()
    assert all(wait_for_end(pid) for pid in owner.running)
    BubblewrapBackend(state_dir=owner.state, bwrap=find_bwrap(load_settings().bwrap))
    assert notes(owner.state) == []
    assert [path for path in limited if path.exists()] == []


def test_a_live_runners_sandboxes_are_left_alone(owner: Owner, tmp_path: Path) -> None:
    owner.ready()
    limited = cgroups_of(owner.process.pid)
    (note,) = notes(tmp_path / "state")
    BubblewrapBackend(state_dir=tmp_path / "state", bwrap=find_bwrap(load_settings().bwrap))
    assert notes(tmp_path / "state") == [note]
    assert runs(note["process"])
    assert cgroups_of(owner.process.pid) == limited


def test_a_surviving_process_of_a_dead_runner_is_ended(tmp_path: Path) -> None:
    survivor = subprocess.Popen(["sleep", "3000"])
    try:
        leftovers = Leftovers(tmp_path)
        leftovers.note("one", survivor.pid)
        note = json.loads((tmp_path / "one.json").read_text())
        (tmp_path / "one.json").write_text(json.dumps(note | {"owner": "1:0:another-boot"}))
        leftovers.sweep()
        assert survivor.wait(timeout=10) == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []
    finally:
        survivor.kill()
        survivor.wait()


def test_a_recycled_process_id_is_another_process() -> None:
    mine = process_name(os.getpid())
    assert mine is not None
    pid, started, boot = mine.split(":")
    assert runs(mine)
    assert not runs(f"{pid}:{int(started) + 1}:{boot}")
    assert not runs(f"{pid}:{started}:another-boot")


async def test_closing_leaves_nothing(
    bubblewrap: BubblewrapBackend, tmp_path: Path, ours: Callable[[], list[int]]
) -> None:
    sandboxes = await asyncio.gather(*(bubblewrap.open(SandboxSpec()) for _ in range(8)))
    running = ours()
    results = await asyncio.gather(*(sandbox.exec("echo $$") for sandbox in sandboxes))
    assert all(result.exit_code == 0 for result in results)
    await bubblewrap.close()
    assert all(wait_for_end(pid) for pid in running)
    assert notes(tmp_path / "state") == []
    assert cgroups_of(os.getpid()) == []
    with pytest.raises(SandboxError):
        await sandboxes[0].exec("true")


async def test_a_cancelled_call_ends_the_sandbox(
    bubblewrap: BubblewrapBackend, ours: Callable[[], list[int]]
) -> None:
    sandbox = await bubblewrap.open(SandboxSpec())
    running = ours()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sandbox.exec("sleep 3000")
    with pytest.raises(SandboxError, match="gone"):
        await sandbox.exec("true")
    await sandbox.close()
    assert all(wait_for_end(pid) for pid in running)


async def test_a_dead_helper_is_an_infrastructure_failure(
    bubblewrap: BubblewrapBackend, ours: Callable[[], list[int]]
) -> None:
    sandbox = await bubblewrap.open(SandboxSpec())
    (outer,) = [pid for pid in ours() if len(descendants(pid)) == 1]
    os.kill(descendants(outer)[0], signal.SIGKILL)
    with pytest.raises(SandboxError, match="gone"):
        await sandbox.exec("true")
    await sandbox.close()


# ---------------------------------------------------------------- who runs it


def test_no_secret_of_the_runner_is_inside(owner: Owner) -> None:
    look = owner.ready()["look"]
    assert "HOME=/tmp" in look
    assert "canary" not in look.replace("grep -r canary", "")
    assert "PYTHONPATH" not in look


@needs_root
async def test_nothing_inside_is_root_outside(
    bubblewrap: BubblewrapBackend, ours: Callable[[], list[int]]
) -> None:
    await bubblewrap.open(SandboxSpec())
    wanted = load_settings().sandbox_uid
    assert {uid_of(pid) for pid in ours()} == {wanted}


def python_for_everyone() -> str | None:
    """A Python of this version that an ordinary user may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [path, "-c", "import pydantic, runtime"]
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                user=ORDINARY_UID,
                group=ORDINARY_UID,
                extra_groups=[],
                cwd="/",
                env={"PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"},
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


@needs_root
def test_an_ordinary_user_gets_sandboxes_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    python = python_for_everyone()
    if python is None:
        pytest.skip("no Python here that an ordinary user may run with this clone")
    base = tmp_path_factory.mktemp("ordinary")
    for folder in (base.parent, base.parent.parent, base):
        folder.chmod(0o711)
    state = base / "state"
    state.mkdir()
    os.chown(state, ORDINARY_UID, ORDINARY_UID)
    owner = Owner(state, python=python, uid=ORDINARY_UID)
    try:
        seen = owner.ready()
        assert {uid_of(pid) for pid in owner.running} == {ORDINARY_UID}
    finally:
        owner.kill()
    assert seen["snapshot"] == digest_of_files({"x": b"1"})


@needs_root
async def test_a_bwrap_under_a_closed_folder_works(tmp_path: Path) -> None:
    bwrap = find_bwrap(load_settings().bwrap)
    package = bwrap.parent.parent
    shutil.copytree(package, tmp_path / package.name)
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(libraries, tmp_path / libraries.name)
    copied = tmp_path / bwrap.relative_to(package.parent)
    for closed in (tmp_path, tmp_path / package.name, copied.parent, copied):
        closed.chmod(0o700)
    backend = BubblewrapBackend(state_dir=tmp_path / "state", bwrap=copied)
    sandbox = await backend.open(SandboxSpec())
    assert (await sandbox.exec("true")).exit_code == 0
    await backend.close()


# ---------------------------------------------------------------- what is said


def test_a_missing_or_useless_bwrap_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="absent is not a working bwrap"):
        find_bwrap(tmp_path / "absent")
    with pytest.raises(SandboxUnavailable, match="not a working bwrap"):
        find_bwrap(Path("/bin/false"))
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    old.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=r"0\.11 or newer"):
        find_bwrap(old)


async def test_a_host_that_refuses_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    script = (
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.11.0 && exit\necho no way >&2; exit 1"
    )
    broken.write_text(script)
    broken.chmod(0o755)
    backend = BubblewrapBackend(state_dir=tmp_path / "state", bwrap=broken)
    with pytest.raises(SandboxUnavailable, match="no way"):
        await backend.open(SandboxSpec())
    assert notes(tmp_path / "state") == []
    await backend.close()


async def test_strengths_tell_what_is_in_force(tmp_path: Path) -> None:
    bwrap = find_bwrap(load_settings().bwrap)
    backend = BubblewrapBackend(state_dir=tmp_path, bwrap=bwrap, use_cgroups=False)
    told = backend.strengths()
    assert (told["memory"], told["processes"]) == ("soft", "soft")
    assert (told["network"], told["disk"]) == ("hard", "hard")
    assert told["syscalls"] == ("hard" if seccomp_filter() else "none")
    sandbox = await backend.open(SandboxSpec())
    await sandbox.close()
    assert notes(tmp_path) == []
    await backend.close()


async def test_without_a_filter_the_namespaces_still_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.sandbox.bubblewrap.seccomp_filter", lambda: None)
    backend = BubblewrapBackend(state_dir=tmp_path, bwrap=find_bwrap(load_settings().bwrap))
    assert backend.strengths()["syscalls"] == "none"
    sandbox = await backend.open(SandboxSpec())
    result = await sandbox.exec("grep Seccomp: /proc/self/status; unshare --user true")
    assert result.stdout.split()[1] == b"0"
    assert b"unshare failed" in result.stderr
    await backend.close()


async def test_accounting_is_of_the_call(bubblewrap: BubblewrapBackend) -> None:
    sandbox = await bubblewrap.open(SandboxSpec())
    busy = await sandbox.exec(
        ["python3", "-c", "import time\nwhile time.process_time() < .2: pass"]
    )
    assert 0.15 < busy.cpu_seconds < 2
    large = await sandbox.exec(["python3", "-c", "b'x' * (100 << 20)"])
    assert large.peak_memory_bytes > 100 << 20
    small = await sandbox.exec(["true"])
    assert small.peak_memory_bytes < 60 << 20
    assert small.cpu_seconds < 0.1


async def test_a_runner_may_have_many_descriptors(bubblewrap: BubblewrapBackend) -> None:
    """The numbers of those that a sandbox is started with are then high, and one after another."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(90)]
    try:
        for _ in range(8):
            sandbox = await bubblewrap.open(SandboxSpec())
            seen = await sandbox.exec("ls /proc/self/fd; cat /proc/self/oom_score_adj")
            assert seen.stdout.split() == [b"0", b"1", b"2", b"3", b"1000"]
    finally:
        for descriptor in held:
            os.close(descriptor)
