"""`noria tasks`: what the wheel can practise on, and tasks from a file with known answers."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from deploy.cli.client import complete_domain, wheel_client
from deploy.cli.output import console, fail, print_json
from runtime.settings import load_settings

if TYPE_CHECKING:
    from flywheel.schemas import ImportedTask, PoolTaskView

task_commands = typer.Typer(help="What the wheel practises on.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Split = Annotated[str | None, typer.Option(help="practice, gate or report.")]
TASKS_SHOWN = 100
TEXT_SHOWN = 70


@task_commands.command("import")
def import_tasks(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="Rows with right answers.")],
    domain: Annotated[str, typer.Option(autocompletion=complete_domain)],
    task_map: Annotated[Path, typer.Option("--map", metavar="MAP.yaml", help="Column → field.")],
    split: Annotated[str, typer.Option(help="practice, gate or report.")] = "practice",
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of what the map has generated.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Put the rows of a CSV file into the pool; the next cycle validates them."""
    tasks = _read(file, task_map, domain, seed)
    with wheel_client() as opened:
        taken = opened.import_tasks(domain, tasks, split=split)
    if as_json:
        print_json({"rows": len(tasks), **taken.model_dump(mode="json")})
    else:
        known = f"; {taken.known} known already or twice in the file" if taken.known else ""
        console.print(f"{len(tasks)} rows: {taken.stored} new tasks in the pool{known}")


def _read(file: Path, task_map: Path, domain: str, seed: int) -> "list[ImportedTask]":
    from deploy.composition import build_domains
    from flywheel.lessons.importing import read_map, read_tasks

    domains = build_domains(load_settings())
    if domain not in domains:
        fail(f"there is no domain {domain!r}; domains: {', '.join(sorted(domains))}")
    return read_tasks(file, read_map(task_map), domains[domain], seed)


@task_commands.command("list")
def list_tasks(
    domain: Annotated[str | None, typer.Option(autocompletion=complete_domain)] = None,
    status: Annotated[
        str | None, typer.Option(help="pending, admitted, quarantined or retired.")
    ] = None,
    split: Split = None,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest.")] = TASKS_SHOWN,
    as_json: Json = False,
) -> None:
    """Pool tasks, newest first: where they come from, and why one is quarantined."""
    with wheel_client() as opened:
        counts = opened.pool(domain, limit=1).counts
        tasks = list(islice(opened.pool_tasks(domain, status=status, split=split), limit))
    if as_json:
        print_json({"counts": counts, "tasks": [each.model_dump(mode="json") for each in tasks]})
        return
    console.print(_table(tasks))
    total = ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "none"
    console.print(f"in the pool: {total}", highlight=False)


def _table(tasks: "list[PoolTaskView]") -> Table:
    table = Table(
        Column("id", no_wrap=True), "origin", "split", "status", "input", "why or fixed by"
    )
    for task in tasks:
        said = " ".join(_texts(task))
        shown = said if len(said) <= TEXT_SHOWN else f"{said[: TEXT_SHOWN - 1]}…"
        why = task.reason or (f"fixed by {task.fixed_by}" if task.fixed_by else "")
        table.add_row(task.id, task.origin, task.split, task.status, escape(shown), escape(why))
    return table


def _texts(task: "PoolTaskView") -> Iterator[str]:
    for value in task.input.values():
        yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
