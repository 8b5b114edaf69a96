"""`noria bench`: what parts of Noria do on this machine, against their targets."""

from typing import Annotated

import typer

from deploy.cli.output import console, print_json
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


@bench_commands.command("gate")
def gate(
    domain: Annotated[str, typer.Argument(help="Whose serving adapter is put to the test.")],
    level: Annotated[str, typer.Option(help="Level of the gate's tasks.")] = "easy",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Whether the gate rejects sabotage, holds a copy, and asks for more than five tasks."""
    from deploy.attach import running
    from deploy.bench_gate import gate as measure
    from deploy.cli.client import api_key
    from deploy.composition import build_wheel
    from deploy.embedded import postgres_url
    from deploy.home import Home
    from flywheel.client import WheelClient
    from runtime.benchmark import holds, table

    settings = load_settings()
    with running(settings) as record:
        database = settings.database_url or postgres_url(Home.of(settings))
        here = settings.model_copy(
            update={"database_url": database, "engine_url": record.engine_url}
        )
        assert record.api_url is not None
        with build_wheel(here) as wheel, WheelClient(record.api_url, api_key(here)) as client:
            result = measure(wheel, client, domain, level=level)
    if as_json:
        print_json(result)
    else:
        console.print(table(result))
    raise typer.Exit(0 if holds(result) else 1)
