"""Family `files`: the regular files the agent left in its workspace.

Only what was collected as artefacts is judged: regular files beneath the workspace, read without
following links. JSON and CSV are parsed here on plain types under caps; whatever would have to
execute or render the agent's bytes belongs to families that run in a fresh sandbox.
"""

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, ClassVar, cast

from pydantic import Field, model_validator

from runtime.checks.document import MISSING, Expected, quoted, same_json, shown, value_at
from runtime.checks.numbers import read_quantity
from runtime.checks.protocol import Artefacts, CheckOutcome, CheckParameters
from runtime.run import Json

MAX_PARSED_BYTES = 4 << 20
Expectation = Mapping[str, Json] | None


class Unreadable(Exception):
    """The agent's file cannot be read as what it should be: the check fails, with these words."""


def _path_problem(path: str) -> str | None:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        return f"path {path!r} must be relative to the workspace, without .."
    return None


class OneFile(CheckParameters):
    path: str

    @model_validator(mode="after")
    def _path_is_inside(self) -> "OneFile":
        if problem := _path_problem(self.path):
            raise ValueError(problem)
        return self


def _outcome(passed: bool, reason: str, **evidence: Json) -> CheckOutcome:
    shortened = {name: shown(value) for name, value in evidence.items()}
    return CheckOutcome(passed, float(passed), reason, shortened)


class FileExists(OneFile):
    """`files.exists`: the file is there, with at least `at_least_bytes`."""

    kind: ClassVar[str] = "files.exists"
    at_least_bytes: int = Field(default=1, ge=0)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        content = artefacts.files.get(self.path)
        if content is None:
            return _outcome(False, f"{self.path} does not exist.", files=len(artefacts.files))
        passed = len(content) >= self.at_least_bytes
        return _outcome(passed, f"{self.path} has {len(content)} bytes.", bytes=len(content))


class FileAbsent(OneFile):
    """`files.absent`: there is no such file."""

    kind: ClassVar[str] = "files.absent"

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        passed = self.path not in artefacts.files
        return _outcome(passed, f"{self.path} {'is absent' if passed else 'should not exist'}.")


class FileEquals(OneFile, Expected):
    """`files.equals`: UTF-8 text equal to `value` or `value_of`; line ends are made equal."""

    kind: ClassVar[str] = "files.equals"

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        wanted = self.expected(artefacts, expectation)
        try:
            found = _text(artefacts, self.path)
        except Unreadable as problem:
            return _outcome(False, str(problem))
        passed = isinstance(wanted, str) and _lines(found) == _lines(wanted)
        verb = "has" if passed else "does not have"
        return _outcome(passed, f"{self.path} {verb} the expected content.", found=found)


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip("\n")


class FileGlob(CheckParameters):
    """`files.glob`: between `at_least` and `at_most` files match the pattern."""

    kind: ClassVar[str] = "files.glob"
    pattern: str
    at_least: int = Field(default=1, ge=0)
    at_most: int | None = Field(default=None, ge=0)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        matching = sorted(path for path in artefacts.files if fnmatchcase(path, self.pattern))
        upper = len(matching) if self.at_most is None else self.at_most
        passed = self.at_least <= len(matching) <= upper
        reason = f"{len(matching)} files match {self.pattern!r}."
        return _outcome(passed, reason, files=cast(Json, matching[:20]))


class FileHash(OneFile):
    """`files.hash`: the file's bytes have this sha256."""

    kind: ClassVar[str] = "files.hash"
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        content = artefacts.files.get(self.path)
        found = None if content is None else hashlib.sha256(content).hexdigest()
        passed = found == self.sha256
        verb = "is" if passed else "is not"
        return _outcome(passed, f"{self.path} {verb} the expected file.", found=found)


class FileJson(OneFile, Expected):
    """`files.json`: the value at dotted `field` of a JSON file equals the expected one."""

    kind: ClassVar[str] = "files.json"
    field: str

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        wanted = self.expected(artefacts, expectation)
        try:
            value = _json(_text(artefacts, self.path), self.path)
        except Unreadable as problem:
            return _outcome(False, str(problem))
        found = value_at({"file": value}, f"file.{self.field}")
        passed = found is not MISSING and same_json(found, wanted)
        reason = f"{self.field} in {self.path} is {quoted(found)}."
        return _outcome(passed, reason, found=shown(found), wanted=wanted)


class FileCsv(OneFile, Expected):
    """`files.csv`: the cell at `row` (from 0, below the header) and `column` (by name).

    A number is compared as a quantity within `tolerance`, everything else as text.
    """

    kind: ClassVar[str] = "files.csv"
    row: int = Field(ge=0)
    column: str
    tolerance: float = Field(default=0.0, ge=0)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        wanted = self.expected(artefacts, expectation)
        try:
            found = self._cell(_text(artefacts, self.path))
        except Unreadable as problem:
            return _outcome(False, str(problem))
        reason = f"{self.path}, row {self.row}, {self.column} is {found!r}."
        return _outcome(self._agrees(found, wanted), reason, found=found, wanted=wanted)

    def _cell(self, text: str) -> str:
        try:
            rows = list(csv.DictReader(io.StringIO(text), strict=True))
        except csv.Error as error:
            raise Unreadable(f"{self.path} is not CSV: {error}.") from error
        if self.row >= len(rows):
            raise Unreadable(f"{self.path} has {len(rows)} rows, none with number {self.row}.")
        cell = cast("Mapping[str, str | None]", rows[self.row]).get(self.column)
        if cell is None:
            raise Unreadable(f"{self.path} has no column {self.column!r} in row {self.row}.")
        return cell

    def _agrees(self, found: str, wanted: Json) -> bool:
        if isinstance(wanted, str):
            return found.strip() == wanted.strip()
        target, given = read_quantity(wanted), read_quantity(found)
        if target is None or given is None:
            return False
        return abs(given.value - target.value) <= self.tolerance


class FilesUnchanged(CheckParameters):
    """`files.unchanged`: nothing outside the globs of `outside_of` differs from the start."""

    kind: ClassVar[str] = "files.unchanged"
    outside_of: list[str] = Field(default_factory=list)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        before, after = artefacts.initial_files, artefacts.files
        touched = sorted(
            path
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path) and not self._allowed(path)
        )
        reason = f"{touched[0]} was changed." if touched else "Nothing else was changed."
        return _outcome(not touched, reason, changed=cast(Json, touched[:20]))

    def _allowed(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.outside_of)


# ---------------------------------------------------------------- reading the agent's bytes


def _text(artefacts: Artefacts, path: str) -> str:
    content = artefacts.files.get(path)
    if content is None:
        raise Unreadable(f"{path} does not exist.")
    if len(content) > MAX_PARSED_BYTES:
        raise Unreadable(f"{path} has {len(content)} bytes; at most {MAX_PARSED_BYTES} are read.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not UTF-8 (byte {error.start}).") from error


def _json(text: str, path: str) -> Json:
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not JSON: {error}.") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has the same key twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
