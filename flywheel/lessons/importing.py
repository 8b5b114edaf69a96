"""Importing: labelled messages from a CSV file become tasks with right answers.

A map (YAML) says which column holds the message, which its label, and which of the domain's
labels each label of the file stands for; the domain's `imported` makes the task and derives
everything else by its rules. Reading reports every row that is wrong, by number, and yields nothing
then; storing is one transaction. Importing a file again changes nothing. Nobody can learn two
answers to one question: rows that contradict each other, or the pool, are refused.

Rows are numbered as spreadsheets number them: the header is row 1. Files are read into memory and
are bounded in size; larger sets are split by their owner.
"""

import csv
import io
import json
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError

from flywheel.lessons.compiler import decisive_fields
from flywheel.lessons.pool import PoolStore, Split, content_digest, pool_task
from flywheel.schemas import Imported, ImportedTask
from flywheel.store import Connection
from runtime.domain import Domain, ImportSource, validate_answer, validate_input
from runtime.errors import InputError
from runtime.run import Json, Record, Task, TenantId

MAX_BYTES = 64 << 20
MAX_MAP_BYTES = 1 << 20
MAX_ROWS = 100_000
MAX_NAMED = 20
"""Different faults told of one file; rows named of one fault."""
SHOWN = 120
"""Characters of a contradicted question."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Text that Postgres cannot hold."""


class TaskMap(Record):
    """How the columns of a file become tasks of a domain."""

    input: str
    """Column of the message."""
    label: str
    """Column of what people said the message is."""
    labels: dict[str, str] | None = Field(default=None, min_length=1)
    """Label in the file → label of the domain; left out where the file uses the domain's own."""
    customer: Literal["generated"] = "generated"
    """Who wrote: drawn by the domain, since such files do not say."""


class Row(NamedTuple):
    number: int
    """As a spreadsheet shows it: the header is 1."""
    text: str
    label: str


# ---------------------------------------------------------------- the map


def read_map(path: Path) -> TaskMap:
    """Raises InputError naming the file, and each key that is wrong or missing."""
    text = _text(path, MAX_MAP_BYTES)
    try:
        raw = yaml.safe_load(text)
    except Exception as error:  # depth, tags and dates: PyYAML lets through whatever they raise
        raise InputError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a map is an object with the keys {_keys()}")
    try:
        return TaskMap.model_validate(raw)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {_said(e['msg'])}" for e in error.errors()]
        raise InputError(f"{path}: {'; '.join(wrong)}; keys: {_keys()}") from error


def _keys() -> str:
    return ", ".join(TaskMap.model_fields)


def _said(message: str) -> str:
    return "unknown key" if message.startswith("Extra inputs") else message.lower()


# ---------------------------------------------------------------- the file


def read_tasks(csv_path: Path, task_map: TaskMap, domain: Domain, seed: int) -> list[ImportedTask]:
    """A task for each row, in the file's order.

    Raises InputError naming the file and every wrong row: unknown columns and labels with those
    that exist, texts the domain does not take, cells that are missing or too many, the same input
    with different answers.
    """
    source = domain.source
    if not isinstance(source, ImportSource):
        raise InputError(
            f"{domain.name} imports no text: its tasks.py has no imported(text, label, *, seed)"
        )
    faults = _Faults(str(csv_path))
    tasks: list[ImportedTask] = []
    for row in _rows(csv_path, task_map, faults):
        try:
            label = _mapped(task_map, row.label)
            tasks.append(_imported(domain, source.imported(row.text, label, seed=seed), row.number))
        except InputError as error:
            faults.add(row.number, str(error))
    decisive = decisive_fields(domain)
    told = (_told(_json(each.input), each.expectation, decisive, each.row) for each in tasks)
    _contradictions(told, faults)
    faults.raise_any()
    if not tasks:
        raise InputError(f"{csv_path}: there is no row below the header")
    return tasks


def _mapped(task_map: TaskMap, label: str) -> str:
    if task_map.labels is None:
        return label
    if label not in task_map.labels:
        known = ", ".join(sorted(task_map.labels))
        raise InputError(f"label {label!r} is not in the map; it has {known}")
    return task_map.labels[label]


def _imported(domain: Domain, task: Task, row: int) -> ImportedTask:
    _check(domain, task.input, task.expectation or {}, task.connectors)
    return ImportedTask(
        input=task.input,
        expectation=task.expectation or {},
        files=task.files,
        connectors=task.connectors,
        seed=task.seed,
        row=row,
    )


def _rows(path: Path, task_map: TaskMap, faults: "_Faults") -> Iterator[Row]:
    """The rows that can be read; the others are faults. Raises InputError for the file itself."""
    reader = csv.reader(io.StringIO(_text(path, MAX_BYTES), newline=""), strict=True)
    number = 0
    try:
        header, number = next(reader, []), 1
        text, label = (_column(path, header, name) for name in (task_map.input, task_map.label))
        for number, cells in enumerate(reader, start=2):
            if number > MAX_ROWS + 1:
                raise InputError(f"{path}: more than {MAX_ROWS} rows; split the file")
            if len(cells) == len(header):
                yield Row(number, cells[text], cells[label].strip())
            elif cells:  # an empty line says nothing
                faults.add(number, f"{len(cells)} cells, the header has {len(header)}")
    except csv.Error as error:
        raise InputError(f"{path}: after row {number}: no CSV: {error}") from error


def _column(path: Path, header: Sequence[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise InputError(f"{path}: there are {header.count(name)} columns {name!r}; keep one")
    columns = ", ".join(header) or "none: the first line is empty"
    raise InputError(f"{path}: there is no column {name!r}; columns: {columns}")


def _text(path: Path, at_most: int) -> str:
    """The file's text. Raises InputError naming what cannot be read, and how to mend it."""
    raw = _bytes(path, at_most)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); save it as UTF-8"
        ) from error


def _bytes(path: Path, at_most: int) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never speak, a device never end
            raise InputError(f"{path}: no regular file; save it as one")
        with path.open("rb") as file:
            raw = file.read(at_most + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > at_most:
        raise InputError(f"{path}: more than {at_most} bytes; shorten or split it")
    return raw


class _Faults:
    """What is wrong with a file, equal faults of many rows told once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._rows: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, row: int, message: str) -> None:
        self._rows[message].append(row)

    def raise_any(self) -> None:
        """Raises InputError with every fault, where there is one."""
        if not self._rows:
            return
        named = list(self._rows.items())[:MAX_NAMED]
        said = [f"{_row_numbers(rows)}: {message}" for message, rows in named]
        more = len(self._rows) - len(named)
        said += [f"and {more} more faults"] if more else []
        errors = [{"field": f"row {rows[0]}", "message": message} for message, rows in named]
        raise InputError(f"{self._where}: {'; '.join(said)}", errors=errors)


def _row_numbers(rows: Sequence[int]) -> str:
    if len(rows) == 1:
        return f"row {rows[0]}"
    more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
    return f"rows {', '.join(map(str, rows[:MAX_NAMED]))}{more}"


# ---------------------------------------------------------------- contradictions


class _Told(NamedTuple):
    """One answer to one question."""

    question: str
    answer: str
    row: int | None
    """None where the pool says it."""
    by: str


def _told(
    question: str,
    right: Mapping[str, Json] | None,
    decisive: Sequence[str],
    row: int | None = None,
    by: str | None = None,
) -> _Told:
    answer = {name: (right or {}).get(name) for name in decisive}
    return _Told(question, _json(answer), row, by or f"row {row}")


def _contradictions(told: Iterable[_Told], faults: _Faults) -> None:
    """A fault of every row whose question is answered differently elsewhere."""
    questions: defaultdict[str, list[_Told]] = defaultdict(list)
    for each in told:
        questions[each.question].append(each)
    for question, found in questions.items():
        first: dict[str, str] = {}
        for each in found:
            first.setdefault(each.answer, each.by)
        if len(first) > 1:
            shown = question.partition("\n")[0][:SHOWN]
            said = "; ".join(f"{by} says {answer}" for answer, by in first.items())
            for each in found:
                if each.row:
                    faults.add(each.row, f"{said}; keep one answer to {shown}")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ---------------------------------------------------------------- into the pool


def store_imported(
    connection: Connection,
    tenant_id: TenantId,
    domain: Domain,
    split: Split,
    tasks: Sequence[ImportedTask],
    by: str,
) -> Imported:
    """Put tasks into the pool, pending: the next cycle proves them.

    Raises InputError naming each wrong task, by its row where it has one; nothing is stored then.
    Wrong is also what contradicts another task of the import, or a pending or admitted one.
    """
    faults = _Faults(f"import into {domain.name}")
    whole = list(_whole(domain, tasks, faults))
    pool = PoolStore(connection)
    in_pool = pool.of_inputs(tenant_id, domain.name, [task.input for _, task in whole])
    decisive = decisive_fields(domain)
    told = [
        _told(_asked(each.task), each.task.expectation, decisive, by=f"{each.id} in the pool")
        for each in in_pool
    ]
    told += [_told(_asked(task), task.expectation, decisive, row) for row, task in whole]
    _contradictions(told, faults)
    faults.raise_any()
    stored = sum(
        pool.add(pool_task(tenant_id, domain, task, origin="import", split=split, by=by))
        for _, task in whole
    )
    return Imported(stored=stored, known=len(whole) - stored)


def _asked(task: Task) -> str:
    """The input for people to read; below it a digest of all that an answer depends on."""
    return f"{_json(task.input)}\n{content_digest(task.model_copy(update={'expectation': None}))}"


def _whole(
    domain: Domain, tasks: Iterable[ImportedTask], faults: _Faults
) -> Iterator[tuple[int, Task]]:
    """Each right task, with its row."""
    for number, each in enumerate(tasks, start=1):
        row = each.row or number
        try:
            given, expected = _check(domain, each.input, each.expectation, each.connectors)
        except InputError as error:
            faults.add(row, str(error))
            continue
        yield (
            row,
            Task(
                id="",
                domain=domain.name,
                input=given,
                files=dict(each.files),
                seed=each.seed,
                connectors=dict(each.connectors),
                expectation=expected,
            ),
        )


def _check(
    domain: Domain,
    given: Mapping[str, Json],
    expectation: Mapping[str, Json],
    connectors: Mapping[str, Json],
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Input and expectation, completed by defaults. Raises InputError naming what is wrong."""
    for text in _unstorable([given, expectation, connectors]):
        raise InputError(f"a NUL or half a surrogate pair in {text[:40]!r}; leave it out")
    unknown = sorted(set(connectors) - set(domain.connectors))
    if unknown:
        known = ", ".join(domain.connectors) or "none"
        raise InputError(f"{domain.name} has no connector {unknown[0]!r}; its connectors: {known}")
    return validate_input(domain, given), validate_answer(domain, expectation)


def _unstorable(value: Any) -> Iterator[str]:
    """Texts within a JSON value that the database cannot hold."""
    if isinstance(value, str):
        yield from [value] if _UNSTORABLE.search(value) else ()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _unstorable(key)
            yield from _unstorable(each)
    elif isinstance(value, list):
        for each in value:
            yield from _unstorable(each)
