"""`NORIA_HOME/run/up.json`: what runs on a data directory now, for whoever wants to attach.

Written whole at every change (beside, then renamed), removed at an ordered stop. A record outlives
a killed supervisor; it counts only while the process it names is the same one, told by pid *and*
start time, since pids come back.

Scaling past one machine: it describes one machine's embedded stack; in production `/health` and the
platform's own status answer the same question.
"""

import os
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from runtime.settings import Settings

START_FIELD = 19
"""`starttime` counted from the state, which follows the command's closing bracket."""


class ProcessState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ProcessRecord(BaseModel):
    """One line of `noria status`."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: ProcessState = ProcessState.WAITING
    once: bool = False
    """Runs to its end during the start."""
    pid: int | None = None
    started: int | None = None
    """Clock ticks after boot, as the kernel tells."""
    since: datetime | None = None
    """When it became ready."""
    doing: str = ""
    share: float | None = None
    """Finished share in [0, 1] of what it is doing."""
    log: str = ""

    @property
    def ready(self) -> bool:
        return self.state in {ProcessState.READY, ProcessState.DONE}


class UpRecord(BaseModel):
    """What one `up` has started."""

    model_config = ConfigDict(frozen=True)

    version: str
    python: str
    pid: int
    started: int | None
    since: datetime
    home: str
    api_url: str | None
    engine_url: str | None
    processes: tuple[ProcessRecord, ...] = Field(default=())

    @property
    def ready(self) -> bool:
        return bool(self.processes) and all(process.ready for process in self.processes)

    def with_process(self, changed: ProcessRecord) -> Self:
        rest = tuple(changed if p.name == changed.name else p for p in self.processes)
        return self.model_copy(update={"processes": rest})

    def process(self, name: str) -> ProcessRecord:
        return next(p for p in self.processes if p.name == name)

    def write(self, path: Path) -> None:
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.model_dump_json(indent=1))
        part.replace(path)

    def checked(self) -> Self:
        """The record with processes that are gone since marked as failed."""
        return self.model_copy(update={"processes": tuple(map(_checked, self.processes))})


def _checked(process: ProcessRecord) -> ProcessRecord:
    gone = process.state is ProcessState.READY and not alive(process.pid, process.started)
    return process.model_copy(update={"state": ProcessState.FAILED}) if gone else process


def read_up(settings: Settings) -> UpRecord | None:
    """The record of the running `up` of this home; None where none runs (a file may be left)."""
    try:
        record = UpRecord.model_validate_json((settings.home / "run" / "up.json").read_text())
    except (OSError, ValueError):
        return None
    return record.checked() if alive(record.pid, record.started) else None


def alive(pid: int | None, started: int | None) -> bool:
    """Whether this very process runs (a zombie does not)."""
    return pid is not None and started is not None and start_time(pid) == started


def start_time(pid: int | None = None) -> int | None:
    """When a process started, in clock ticks after boot; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid or os.getpid()}/stat").read_text()
    except OSError:
        return None
    fields: Sequence[str] = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[START_FIELD])
