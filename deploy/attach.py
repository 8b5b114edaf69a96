"""Attaching to a running `up`, starting one for a while, ending one.

`running()` is what `run`, `test` and `demo` stand in: it yields the `up` that runs on the home, or
starts one as a child process that ends with the block and dies with this process. A supervisor is
ended by SIGTERM and awaited by the event of its end, never by a time that ought to suffice.

Scaling past one machine: a client elsewhere sets NORIA_API_URL and attaches to nothing.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

from deploy.children import ENTER
from deploy.home import CannotRun, Home, tail
from deploy.up_record import UpRecord, alive, read_up
from runtime.settings import CLONE, Settings, child_environment

DOWN_SECONDS = 90.0
"""How long an ordered stop may take before `down` insists."""

Observer = Callable[[UpRecord], None]


def _nothing(record: UpRecord) -> None:
    del record


@contextmanager
def running(
    settings: Settings, only: Sequence[str] = (), observe: Observer = _nothing
) -> Generator[UpRecord]:
    """The `up` of this home, ready: the one that runs, or one for the duration of the block.

    Raises CannotRun where it does not start. Call it from the main thread: the kernel ends a child
    together with the thread that started it.
    """
    record = _started_elsewhere(settings, observe)
    if record is not None:
        yield record
        return
    process, channel = _start_up(settings, only, detached=False)
    try:
        yield _until_ready(settings, process, channel, observe)
    finally:
        channel.close()
        process.terminate()
        process.wait()


def _started_elsewhere(settings: Settings, observe: Observer) -> UpRecord | None:
    """The `up` that another command started, once it is ready; None where there is none."""
    while (record := read_up(settings)) is not None:
        observe(record)
        if record.ready:
            return record
        sleep(0.1)  # its record is a file: no event to await
    return None


def start_detached(settings: Settings, only: Sequence[str], observe: Observer) -> UpRecord:
    """Start an `up` that outlives this process; returns when it is ready.

    Raises CannotRun where it does not start; an interrupt while waiting ends it.
    """
    process, channel = _start_up(settings, only, detached=True)
    try:
        return _until_ready(settings, process, channel, observe)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        channel.close()


def _start_up(
    settings: Settings, only: Sequence[str], *, detached: bool
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    home = Home.of(settings)
    home.create()
    home.rotate("up")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    chosen = [word for name in only for word in ("--only", name)]
    argv = [sys.executable, "-P", "-m", "deploy.cli", "up", *chosen]
    given = {f"NORIA_{name.upper()}": _text(settings, name) for name in settings.model_fields_set}
    if settings.database_url is None:
        given["DATABASE_URL"] = None
    with theirs, home.log("up").open("ab") as log:
        given["NORIA_NOTIFY_FD"] = str(theirs.fileno())
        env = child_environment(PYTHONPATH=str(CLONE), **given)
        process = subprocess.Popen(
            argv if detached else _entered(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def _text(settings: Settings, name: str) -> str | None:
    value = getattr(settings, name)
    if value is None or name in ("notify_fd", "listen_fd"):
        return None
    return value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)


def _entered(argv: list[str]) -> list[str]:
    plan = {
        "argv": argv,
        "parent": os.getpid(),
        "death_signal": int(signal.SIGTERM),
        "uid": None,
        "mounts": [],
    }
    return [sys.executable, "-I", "-S", str(ENTER), json.dumps(plan)]


def _until_ready(
    settings: Settings,
    process: subprocess.Popen[bytes],
    channel: socket.socket,
    observe: Observer,
) -> UpRecord:
    """Follow the supervisor's records until one is ready. Raises CannotRun when it ends first."""
    while message := channel.recv(1 << 20):
        record = UpRecord.model_validate_json(message)
        observe(record)
        if record.ready:
            return record
    process.wait()
    raise CannotRun(_last_words(tail(Home.of(settings).log("up"), 40)))


def _last_words(lines: Sequence[str]) -> str:
    """The sentence with which a supervisor ended, from the end of its log."""
    starts = [number for number, line in enumerate(lines) if line.startswith("noria: ")]
    words = lines[starts[-1] :] if starts else lines[-12:]
    return "\n".join(words).removeprefix("noria: ") or "the supervisor ended without a word"


def stop_up(settings: Settings) -> bool:
    """End the running `up`; True where one ran. Returns when it is gone."""
    record = read_up(settings)
    if record is None:
        return False
    os.kill(record.pid, signal.SIGTERM)
    if not _gone_within(record, DOWN_SECONDS):
        os.kill(record.pid, signal.SIGKILL)  # its children hear of it from the kernel
        _gone_within(record, DOWN_SECONDS)
    return True


def _gone_within(record: UpRecord, seconds: float) -> bool:
    """Wait for the end of the process itself."""
    try:
        descriptor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return True
    try:
        deadline = monotonic() + seconds
        if not alive(record.pid, record.started):
            return True
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - monotonic()))
        return bool(ended)
    finally:
        os.close(descriptor)
