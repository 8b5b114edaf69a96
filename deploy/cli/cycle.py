"""`noria cycle`: turn the wheel of a domain, watch it, read what became of it."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from deploy.cli.client import complete_cycle, complete_domain, wheel_client
from deploy.cli.output import console, fail, print_json

if TYPE_CHECKING:
    from flywheel.client import WheelClient
    from flywheel.schemas import CycleView

cycle_commands = typer.Typer(help="Turns of the wheel.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
REASON_SHOWN = 60
Which = Annotated[
    str, typer.Argument(metavar="ID|latest", autocompletion=complete_cycle, help="Which cycle.")
]


@cycle_commands.command("run")
def run(
    domain: Annotated[str, typer.Argument(autocompletion=complete_domain)],
    profile: Annotated[str | None, typer.Option(help="A profile of the recipe (fast).")] = None,
    level: Annotated[str | None, typer.Option(help="Level of the gate's tasks.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of training, sampling and tasks.")] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it has begun.")] = False,
    as_json: Json = False,
) -> None:
    """Turn the wheel once: learn from failures, and release if the gate says so.

    Status 0 whatever the gate decides, 1 where the cycle failed or was stopped.
    """
    out = Console(stderr=True) if as_json else console
    with wheel_client(start=not detach) as opened:
        begun = opened.create_cycle(domain, profile=profile, level=level, seed=seed)
        how = "cycle" if begun.new else "joined the running cycle"
        out.print(f"{how} [bold]{begun.cycle.id}[/bold]", highlight=False, soft_wrap=True)
        view = begun.cycle if detach else _followed(opened, begun.cycle.id, out)
    _end(view, as_json)


def _followed(opened: "WheelClient", cycle_id: str, out: Console) -> "CycleView":
    from deploy.cycle_progress import follow

    try:
        return follow(opened, cycle_id, out)
    except KeyboardInterrupt:
        out.print(f"it goes on while Noria runs; end it with: ./noria cycle stop {cycle_id}")
        raise


def _end(view: "CycleView", as_json: bool) -> None:
    from deploy.cycle_progress import outcome_lines

    if as_json:
        print_json(view.model_dump(mode="json"))
    else:
        for line in outcome_lines(view):
            console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if view.state in ("failed", "stopped") else 0)


@cycle_commands.command("show")
def show(
    cycle_id: Which = "latest",
    follow: Annotated[bool, typer.Option("--follow", help="Until it is over.")] = False,
    as_json: Json = False,
) -> None:
    """One cycle: its stages, what they measured, the gate's decision and its reasons."""
    from deploy.cycle_progress import cycle_table, outcome_lines

    with wheel_client() as opened:
        found = _named(opened, cycle_id)
        if follow:
            view = _followed(opened, found, Console(stderr=True) if as_json else console)
        else:
            view = opened.cycle(found)
    if as_json:
        print_json(view.model_dump(mode="json"))
        return
    if not follow:
        console.print(cycle_table(view))
    for line in outcome_lines(view):
        console.print(line, highlight=False, soft_wrap=True)


def _named(opened: "WheelClient", cycle_id: str) -> str:
    """The id; `latest` is the newest one's."""
    if cycle_id != "latest":
        return cycle_id
    newest = opened.cycles(limit=1)
    if not newest:
        fail("there is no cycle yet; turn one with: ./noria cycle run DOMAIN")
    return newest[0].id


@cycle_commands.command("list")
def list_cycles(
    domain: Annotated[str | None, typer.Option(autocompletion=complete_domain)] = None,
    as_json: Json = False,
) -> None:
    """Cycles, newest first."""
    from deploy.cycle_progress import outcome_words

    with wheel_client() as opened:
        cycles = opened.cycles(domain)
    if as_json:
        print_json({"cycles": [cycle.model_dump(mode="json") for cycle in cycles]})
        return
    table = Table(
        Column("id", no_wrap=True), "domain", "date", "trigger", "state", "outcome", "why"
    )
    for cycle in cycles:
        table.add_row(
            cycle.id,
            cycle.domain,
            str(cycle.date),
            cycle.trigger,
            cycle.state,
            outcome_words(cycle),
            escape(short(cycle.reason or "")),
        )
    console.print(table)


def short(reason: str) -> str:
    return reason if len(reason) <= REASON_SHOWN else f"{reason[: REASON_SHOWN - 1]}…"


@cycle_commands.command("stop")
def stop(cycle_id: Which = "latest", as_json: Json = False) -> None:
    """End a running cycle within seconds, and for good."""
    with wheel_client() as opened:
        view = opened.stop_cycle(_named(opened, cycle_id))
    if as_json:
        print_json(view.model_dump(mode="json"))
    else:
        ending = "asked to stop" if view.state == "running" else f"it has ended: {view.state}"
        console.print(f"{view.id}: {ending}", highlight=False)
