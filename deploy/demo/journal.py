"""The journal of one demo: what an interrupted one has done, so that the same command goes on.

A file of a few lines beside the report, replaced whole at every note. The runs themselves stand in
the database under keys made of the demo's id; the journal keeps that id, whom the corrections were
given for, which cycle turns, and how long each step took, over all interruptions.
"""

import hashlib
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Self

from pydantic import Field, ValidationError

from runtime.run import Record

NAME = "demo-unfinished.json"


class Notes(Record):
    plan: str
    """Hash of what was asked for: another demo starts anew."""
    demo_id: str
    corrected: list[str] = Field(default_factory=list[str])
    """Runs whose correction was given."""
    cycle_id: str | None = None
    seconds: dict[str, float] = Field(default_factory=dict[str, float])
    load: float
    """1-minute load average when the demo began."""


class Journal:
    """Of the demo in one folder. `resumed` says that there is something to go on with."""

    def __init__(self, path: Path, notes: Notes, *, resumed: bool) -> None:
        self._path = path
        self.notes = notes
        self.resumed = resumed

    @classmethod
    def open(cls, folder: Path, plan: object) -> Self:
        """The journal of an unfinished demo of the same plan, else a new one."""
        folder.mkdir(parents=True, exist_ok=True)
        path, wanted = folder / NAME, hashlib.sha256(repr(plan).encode()).hexdigest()
        there = _read(path)
        if there is not None and there.plan == wanted:
            return cls(path, there, resumed=True)
        fresh = Notes(plan=wanted, demo_id=secrets.token_hex(6), load=os.getloadavg()[0])
        journal = cls(path, fresh, resumed=False)
        journal.note()
        return journal

    def note(self, **changes: Any) -> None:
        self.notes = self.notes.model_copy(update=changes)
        part = self._path.with_suffix(".part")
        part.write_text(self.notes.model_dump_json(indent=1))
        part.replace(self._path)

    @contextmanager
    def timed(self, step: str) -> Generator[None]:
        """Adds the block's wall seconds to the step's, also where the block was interrupted."""
        began = monotonic()
        try:
            yield
        finally:
            before = self.notes.seconds.get(step, 0.0)
            self.note(seconds={**self.notes.seconds, step: before + monotonic() - began})

    def close(self) -> None:
        """The demo is finished: the same command starts another one."""
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> Notes | None:
    """What the file says; None where there is none, or none of this version's."""
    try:
        return Notes.model_validate_json(path.read_text())
    except (FileNotFoundError, ValidationError):
        return None
