"""`noria run`: one piece of work live, or every row of a CSV file at once.

A single run is shown event by event as the record grows, then its verdict, check by check. Rows are
submitted and followed by a few threads, as many as a runner takes on; a row that cannot be
submitted is reported beside the others and loses none of them.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from deploy.cli.client import client, complete_domain
from deploy.cli.output import console, fail, print_json
from runtime.run import Event, Finished, Graded, Observed, RunState, Started, Stopped, Thought

if TYPE_CHECKING:
    from runtime.api.schemas import RunView
    from runtime.client import NoriaClient

FOLLOWERS = 32
"""Rows that are under way at once."""
ROWS_SHOWN = 100
UNFINISHED = frozenset({RunState.ERROR, RunState.NEEDS_ATTENTION})
"""States in which a run is over and was not judged."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the file, and what became of it."""

    number: int
    text: str
    run: "RunView | None"
    error: str | None = None


def run_command(
    domain: Annotated[str, typer.Argument(autocompletion=complete_domain)],
    text: Annotated[str | None, typer.Argument(help="The text the domain works on.")] = None,
    input_json: Annotated[
        str | None, typer.Option("--input", help="The whole input as JSON, instead of TEXT.")
    ] = None,
    attach: Annotated[
        list[Path] | None, typer.Option(help="A file to put into the workspace (repeatable).")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A CSV file: every row is one run.")] = None,
    column: Annotated[str | None, typer.Option(help="Its column with the text.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a domain on TEXT and watch it, or on every row of --file."""
    if sum(given is not None for given in (text, input_json, file)) != 1:
        fail("give one of TEXT, --input JSON or --file CSV")
    if file is not None:
        texts = read_column(file, column, limit)
        with client() as opened:
            rows = _run_rows(opened, domain, texts)
        _report_rows(rows, as_json)
        return
    files = {path.name: _content(path) for path in attach or []}
    with client() as opened:
        given = _whole_input(input_json) if input_json else {_text_field(opened, domain): text}
        run = _run_live(opened, domain, given, files, quiet=as_json)
    if as_json:
        print_json({"runs": [run.model_dump(mode="json")]})
    raise typer.Exit(1 if run.state in UNFINISHED else 0)


# ---------------------------------------------------------------- input


def read_column(file: Path, column: str | None, limit: int | None) -> list[str]:
    """The texts of one column. Ends the command with a sentence where there is no such thing."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            names = list(reader.fieldnames or [])
            if not names:
                fail(f"{file} is empty; a header and rows are needed")
            chosen = column or (names[0] if len(names) == 1 else None)
            if chosen not in names:
                wrong = f"has no column {column!r}" if column else "has more than one column"
                fail(f"{file} {wrong}; --column may be: {', '.join(names)}")
            texts = [_cell(file, reader, row, chosen) for row in reader]
    except csv.Error as error:
        fail(f"{file} is not CSV to its end: {error}; is a quote left open?")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {file} as a UTF-8 CSV file: {error}")
    if not texts:
        fail(f"{file} has a header and no rows")
    return texts[:limit]


def _cell(file: Path, reader: "csv.DictReader[str]", row: dict[Any, Any], column: str) -> str:
    """One text; a row whose number of fields is not the header's ends the command."""
    if None in row or None in row.values():
        fields = len(reader.fieldnames or [])
        fail(f"{file}:{reader.line_num}: this row has not {fields} fields as the header has")
    return row[column]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")


def _whole_input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"--input is not JSON: {error}")
    if not isinstance(value, dict):
        fail('--input must be a JSON object, such as {"message": "…"}')
    return value


def _text_field(opened: "NoriaClient", domain: str) -> str:
    """The input's one required field that takes text."""
    schema = opened.domain(domain).input_schema
    required = schema.get("required", [])
    texts = [name for name in required if schema["properties"][name].get("type") == "string"]
    if len(texts) != 1 or len(required) != 1:
        fail(f"{domain} needs {required}: give them all with --input JSON")
    return texts[0]


# ---------------------------------------------------------------- one run


def _run_live(
    opened: "NoriaClient",
    domain: str,
    given: Mapping[str, Any],
    files: Mapping[str, bytes],
    *,
    quiet: bool,
) -> "RunView":
    """Submit, follow to the end, show. An interrupt cancels the run."""
    out = Console(stderr=True) if quiet else console
    run = opened.create_run(domain, dict(given), files=files or None, idempotency_key=str(uuid4()))
    out.print(f"run [bold]{run.id}[/bold]", highlight=False, soft_wrap=True)
    try:
        for event in opened.events(run.id):
            for line in event_lines(event):
                out.print(line, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        opened.cancel(run.id)
        out.print(f"asked to cancel {run.id}", highlight=False)
        raise
    return opened.run(run.id)


def event_lines(event: Event) -> Iterator[str]:
    """What a person reads of one event, as console markup."""
    body = event.body
    match body:
        case Started() if body.attempt > 1:
            yield f"[yellow]taken over: attempt {body.attempt}[/yellow]"
        case Thought():
            yield f"[dim]step {body.step}  {body.sampled_tokens} tokens[/dim]"
            yield from _thought_lines(body)
        case Observed():
            mark = "[green]✓[/green]" if body.result.ok else "[red]✗[/red]"
            name = f"{escape(body.result.name)}: " if body.result.name else ""
            yield f"  {mark} {name}{escape(_short(body.result.content))}"
        case Stopped():
            said = json.dumps(body.answer, ensure_ascii=False) if body.answer else body.reason
            yield f"[bold]{body.outcome}[/bold] {escape(said)}"
        case Graded():
            yield from _verdict_lines(body)
        case Finished():
            why = f": {escape(body.reason)}" if body.reason else ""
            yield f"[bold]{body.state}[/bold]{why}"
        case _:
            return


def _thought_lines(body: Thought) -> Iterator[str]:
    """The calls; the reply itself where it holds none (its observation says what was wrong)."""
    named = [call for call in body.calls if call.name]
    if not named:
        yield f'  [dim]"{escape(_short(body.text))}"[/dim]'
    for call in named:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        yield f"  → [bold]{escape(call.name)}[/bold] {escape(_short(arguments))}"


def _verdict_lines(body: Graded) -> Iterator[str]:
    verdict = body.verdict
    reward = "" if verdict.reward is None else f", reward {verdict.reward:.2f}"
    yield f"verdict [bold]{verdict.status}[/bold] by {verdict.basis}{reward}"
    for check in verdict.checks:
        needed = "required" if check.required else f"weight {check.weight:g}"
        yield f"  {check.status:<14} {check.name} ({needed}) {escape(_short(check.reason))}"


def _short(text: str, length: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


# ---------------------------------------------------------------- many rows


def _run_rows(opened: "NoriaClient", domain: str, texts: Sequence[str]) -> list[Row]:
    """Every row to its end, several at once; in the order of the file."""
    name = _text_field(opened, domain)
    with _progress(len(texts)) as advance, ThreadPoolExecutor(FOLLOWERS) as pool:
        futures = [
            pool.submit(_run_row, opened, domain, name, number, text)
            for number, text in enumerate(texts, start=1)
        ]
        try:
            for future in as_completed(futures):
                advance(future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _run_row(opened: "NoriaClient", domain: str, name: str, number: int, text: str) -> Row:
    from runtime.client import ApiProblem

    try:
        run = opened.create_run(domain, {name: text}, idempotency_key=str(uuid4()))
        for _ in opened.events(run.id):
            pass
        return Row(number, text, opened.run(run.id))
    except ApiProblem as error:  # this row's problem: the others go on
        return Row(number, text, None, str(error))


@contextmanager
def _progress(total: int) -> "Generator[Advance]":
    counts: Counter[str] = Counter()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("running", total=total)

        def advance(row: Row) -> None:
            counts[_state(row)] += 1
            said = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
            progress.update(bar, advance=1, description=said)

        yield advance


if TYPE_CHECKING:
    from collections.abc import Callable

    Advance = Callable[[Row], None]


def _state(row: Row) -> str:
    return "not submitted" if row.run is None else str(row.run.state)


def _report_rows(rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        print_json({"runs": [_row_object(row) for row in rows]})
    else:
        console.print(rows_table(rows[:ROWS_SHOWN]))
        if len(rows) > ROWS_SHOWN:
            console.print(f"… and {len(rows) - ROWS_SHOWN} more rows; --json prints all")
        console.print(_summary(rows))
    unfinished = [row for row in rows if row.run is None or row.run.state in UNFINISHED]
    if unfinished:
        sys.stderr.write(f"{len(unfinished)} of {len(rows)} rows have no verdict\n")
    raise typer.Exit(1 if unfinished else 0)


def _row_object(row: Row) -> dict[str, Any]:
    if row.run is None:
        return {"row": row.number, "id": None, "state": None, "verdict": None, "error": row.error}
    return {"row": row.number, **row.run.model_dump(mode="json")}


def rows_table(rows: Iterable[Row]) -> Table:
    table = Table("row", "text", "state", "verdict", "answer or reason")
    table.add_column("run", overflow="fold", min_width=17)
    for row in rows:
        if row.run is None:
            table.add_row(str(row.number), escape(_short(row.text, 40)), "not submitted", "",
                          escape(row.error or ""), "")  # fmt: skip
            continue
        said = json.dumps(row.run.answer, ensure_ascii=False) if row.run.answer else row.run.reason
        table.add_row(
            str(row.number),
            escape(_short(row.text, 40)),
            row.run.state,
            "" if row.run.verdict is None else row.run.verdict.status,
            escape(_short(said or "", 60)),
            row.run.id,
        )
    return table


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter(_state(row) for row in rows)
    return f"{len(rows)} rows: " + ", ".join(f"{n} {state}" for state, n in counts.most_common())
