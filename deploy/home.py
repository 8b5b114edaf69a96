"""The data directory (`NORIA_HOME`): where everything lives, who holds it, what is secret.

    postgres/  valkey/  models/   data          logs/      one file per process, rotated
    secrets/   0700, files 0600                 run/       locks and up.json

Unix socket paths end at 107 bytes, a data directory may be deep: sockets live in a short folder
of their own, named after the data directory, removed at stop and swept at the next start.

Scaling past one machine: a data directory belongs to one machine; what must be shared is in
Postgres and the object store, which the settings name by URL.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from runtime.settings import Settings

LOG_BYTES = 10 << 20
"""A log longer than this is rotated."""
LOGS_KEPT = 3
SOCKET_PATH_BYTES = 60
"""Longest runtime folder that leaves room for the names of sockets beneath it."""


class CannotRun(Exception):
    """What keeps the embedded stack from running, in one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Home:
    root: Path
    sockets: Path
    """Short folder for sockets and mount points; exists while an `up` runs."""

    @classmethod
    def of(cls, settings: Settings) -> "Home":
        root = settings.home.resolve()
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:10]
        return cls(root, settings.runtime_dir / f"noria-{os.getuid()}-{name}")

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def up_file(self) -> Path:
        return self.run / "up.json"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def create(self) -> None:
        """Make what is missing. Raises CannotRun where the place is not writable."""
        try:
            for folder in (self.root, self.run, self.root / "logs"):
                folder.mkdir(parents=True, exist_ok=True)
            (self.root / "secrets").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CannotRun(
                f"cannot create the data directory {self.root}: {error.strerror}; "
                "set NORIA_HOME to a folder you may write"
            ) from error

    # ------------------------------------------------------------ secrets

    def secret(self, name: str, make: Callable[[], str] = lambda: secrets.token_urlsafe(32)) -> str:
        """The secret of that name, made at the first call; its file is 0600 from birth."""
        path = self.root / "secrets" / name
        if not path.exists():
            self.create()
            part = path.with_name(f".{name}.{secrets.token_hex(4)}")
            part.touch(mode=0o600)
            part.write_text(make())
            try:
                os.link(part, path)  # two first callers agree on one secret
            except FileExistsError:
                pass
            finally:
                part.unlink()
        return path.read_text()

    # ------------------------------------------------------------ sockets

    def open_sockets(self) -> None:
        """Make the short folder anew; whatever a killed `up` left in it goes.

        Raises CannotRun where the folder cannot be ours. The caller holds the supervisor's lock.
        """
        length = len(os.fsencode(self.sockets))
        if length > SOCKET_PATH_BYTES:
            raise CannotRun(
                f"the folder for sockets, {self.sockets}, is {length} bytes long and may have "
                f"{SOCKET_PATH_BYTES}; set NORIA_RUNTIME_DIR to a shorter one"
            )
        self.close_sockets()
        try:
            self.sockets.mkdir(mode=0o700)
            self.sockets.chmod(0o711 if os.getuid() == 0 else 0o700)
        except OSError as error:
            raise CannotRun(
                f"cannot make {self.sockets} for sockets: {error.strerror}; "
                "set NORIA_RUNTIME_DIR to a folder you may write"
            ) from error

    def close_sockets(self) -> None:
        """Remove the short folder. Idempotent; a folder of somebody else's is left alone."""
        try:
            found = self.sockets.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            shutil.rmtree(self.sockets)

    # ------------------------------------------------------------ locks and logs

    @contextmanager
    def supervised(self) -> Generator[None]:
        """Hold this data directory as its one supervisor. Raises CannotRun where another does."""
        self.create()
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise CannotRun(
                    f"Noria already runs on {self.root} (process {holder}); see `noria status`, "
                    "stop it with `noria down`, or set NORIA_HOME to another folder"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _lock_file(self) -> TextIO:
        try:
            return (self.run / "supervisor.lock").open("a+")
        except OSError as error:
            raise CannotRun(
                f"cannot write in the data directory {self.root}: {error.strerror}; "
                "start as the user it belongs to, or set NORIA_HOME to another folder"
            ) from error

    def rotate(self, name: str) -> None:
        """Move a long log to `.1` (to `.2` …) by copying, since its writer keeps it open."""
        log = self.log(name)
        if not log.exists() or log.stat().st_size < LOG_BYTES:
            return
        for number in range(LOGS_KEPT, 1, -1):
            older = log.with_suffix(f".log.{number - 1}")
            if older.exists():
                older.replace(log.with_suffix(f".log.{number}"))
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)


def tail(path: Path, lines: int = 12) -> list[str]:
    """The last lines of a text file; none where it is absent."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
