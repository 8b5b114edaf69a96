"""`noria up` in the foreground and detached, and the table of readiness it shares with `status`.

On a terminal the table is live; into a file or a pipe every change of state is one line. A
supervisor that was started by another command also sends each record to its starter.
"""

import asyncio
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from rich.live import Live
from rich.table import Table

from deploy.attach import start_detached
from deploy.cli.output import console
from deploy.supervisor import Stack, Supervisor, plan
from deploy.up_record import ProcessRecord, ProcessState, UpRecord, read_up
from runtime.settings import Settings

STYLES = {
    ProcessState.WAITING: "dim",
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.DONE: "green",
    ProcessState.FAILED: "bold red",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
}
Observer = Callable[[UpRecord], None]


def up_in_foreground(settings: Settings, only: Sequence[str]) -> None:
    """Run the stack until Ctrl-C or SIGTERM. Raises CannotRun."""
    stack = plan(settings, only)
    for note in stack.notes:
        console.print(note)
    with _shown() as show:
        asyncio.run(Supervisor(stack, _reporting(stack, settings, show)).run())
    console.print("stopped")


def up_detached(settings: Settings, only: Sequence[str]) -> None:
    """Start the stack in the background; return when it is ready. Raises CannotRun."""
    record = read_up(settings)
    if record is not None and record.ready:
        console.print("it runs already")
    else:
        with _shown() as show:
            record = start_detached(settings, only, show)
    _announce(record)
    console.print("stop it with: ./noria down")


def _reporting(stack: Stack, settings: Settings, show: Observer) -> Observer:
    """Shows each record, sends it to whoever started us, announces readiness once."""
    starter = None if settings.notify_fd is None else socket.socket(fileno=settings.notify_fd)
    announced = False

    def report(record: UpRecord) -> None:
        nonlocal announced
        show(record)
        if starter is not None:
            with suppress(OSError):  # it has gone its way
                starter.send(record.model_dump_json().encode())
        if record.ready and not announced:
            announced = True
            _announce(record)
            console.print("Ctrl-C stops everything")

    return report


def _announce(record: UpRecord) -> None:
    if record.api_url is not None:
        console.print(f"Noria is ready: [bold]{record.api_url}[/bold]", highlight=False)
        console.print(f"API key: {record.home}/secrets/api-key", highlight=False, soft_wrap=True)
    else:
        console.print("ready")


@contextmanager
def _shown() -> Generator[Observer]:
    """A live table on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield _lines()
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield lambda record: live.update(status_table(record))


def _lines() -> Observer:
    said: dict[str, str] = {}

    def show(record: UpRecord) -> None:
        for process in record.processes:
            line = f"{process.name}: {process.doing or process.state}"
            if said.get(process.name) != line:
                said[process.name] = line
                console.print(line, highlight=False)

    return show


def status_table(record: UpRecord) -> Table:
    table = Table(title=f"Noria {record.version} on {record.home}", title_justify="left")
    for column in ("process", "pid", "state", "since", "log"):
        table.add_column(column, overflow="fold")
    for process in record.processes:
        pid = "" if process.once or process.pid is None else str(process.pid)
        since = "" if process.since is None else f"{process.since.astimezone():%H:%M:%S}"
        table.add_row(process.name, pid, _state(process), since, process.log)
    if record.api_url is not None:
        table.caption = f"API {record.api_url}"
    return table


def _state(process: ProcessRecord) -> str:
    share = "" if process.share is None else f" {process.share:.0%}"
    style = STYLES[process.state]
    return f"[{style}]{process.doing or process.state}{share}[/{style}]"


def status_object(settings: Settings, record: UpRecord | None) -> dict[str, Any]:
    """What `noria status --json` prints."""
    if record is None:
        return {
            "ready": False,
            "home": str(settings.home),
            "api_url": settings.api_url,
            "processes": [],
        }
    facts = record.model_dump(mode="json", exclude={"processes", "started"})
    return {
        "ready": record.ready,
        **facts,
        "uptime_seconds": (datetime.now(UTC) - record.since).total_seconds(),
        "processes": [_process_object(p) for p in record.processes if not p.once],
        "steps": [_process_object(p) for p in record.processes if p.once],
    }


def _process_object(process: ProcessRecord) -> dict[str, Any]:
    line = process.model_dump(mode="json", exclude={"started", "once"})
    return {**line, "ready": process.ready}
