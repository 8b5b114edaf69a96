"""`noria bench`: what parts of Noria do on this machine, against their targets."""

from typing import Annotated

import typer

from deploy.cli_output import console, print_json
from runtime.settings import load_settings

bench_commands = typer.Typer(
    help="Benchmarks; exit status 1 where a target is missed.", no_args_is_help=True
)


@bench_commands.callback()
def group() -> None:
    """Benchmarks; exit status 1 where a target is missed."""


@bench_commands.command("hotload")
def hotload(
    rounds: Annotated[int, typer.Option(min=1, max=1_000, help="Adapters loaded.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Seconds from an adapter's file to its first token, under load, and failed requests."""
    from deploy.bench import hotload as measure
    from runtime.benchmark import holds, table
    from runtime.engine.weights import ensure_model

    settings = load_settings()
    model = ensure_model(settings.home, settings.model, lambda doing, share: None)
    result = measure(model, rounds=rounds)
    if as_json:
        print_json(result)
    else:
        console.print(table(result))
    raise typer.Exit(0 if holds(result) else 1)
