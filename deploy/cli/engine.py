"""`noria engine`: measure the engine."""

from typing import Annotated

import typer

from deploy.cli.output import console, print_json
from runtime.settings import load_settings

engine_commands = typer.Typer(help="The engine that serves tokens.", no_args_is_help=True)


@engine_commands.command("bench")
def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prefill and decode tokens per second of the embedded engine, with and without reuse."""
    from runtime.benchmark import holds, table
    from runtime.engine.local.bench import benchmark
    from runtime.engine.weights import ensure_model

    settings = load_settings()
    model = ensure_model(settings.home, settings.model, lambda doing, share: None)
    result = benchmark(model)
    if as_json:
        print_json(result)
    else:
        console.print(table(result))
    raise typer.Exit(0 if holds(result) else 1)
