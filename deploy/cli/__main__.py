"""The command line: `noria up`, `down`, `status`, `doctor`, `migrate`, `test`, `run`, …

Each command is a thin head over a part that does the work; heavy imports happen inside commands, so
that `noria status` stays fast. What a command finds wrong is one sentence on stderr and status 1.
`--json` prints one JSON object on stdout and nothing else there.

Scaling past one machine: commands that read or submit speak REST to NORIA_API_URL, wherever it is.
"""

import asyncio
import sys
from typing import Annotated

import typer

from deploy.cli.adapters import adapter_commands, release_commands
from deploy.cli.bench import bench_commands
from deploy.cli.cycle import cycle_commands
from deploy.cli.demo import demo_command
from deploy.cli.domain import domain_commands
from deploy.cli.engine import engine_commands
from deploy.cli.keys import key_commands
from deploy.cli.output import console, fail, print_json
from deploy.cli.run import run_command
from deploy.cli.tasks import task_commands
from deploy.cli.vllm import vllm_command
from deploy.home import CannotRun
from runtime.settings import load_settings

app = typer.Typer(
    name="noria",
    help="An agent runtime whose own failures turn the wheel that improves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(domain_commands, name="domain")
app.add_typer(cycle_commands, name="cycle")
app.add_typer(task_commands, name="tasks")
app.add_typer(adapter_commands, name="adapters")
app.add_typer(release_commands, name="release")
app.add_typer(key_commands, name="keys")
app.add_typer(engine_commands, name="engine")
app.add_typer(bench_commands, name="bench")
app.command("run")(run_command)
app.command("demo")(demo_command)
app.command("vllm", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    vllm_command
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def up(
    detach: Annotated[bool, typer.Option("--detach", help="Return when everything runs.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Start only this service (repeatable).")
    ] = None,
) -> None:
    """Start everything: Postgres, broker, engine, API, runner, worker, beat. Ctrl-C stops it."""
    from deploy.cli.up import up_detached, up_in_foreground

    (up_detached if detach else up_in_foreground)(load_settings(), only or [])


@app.command()
def down() -> None:
    """Stop the running `up` of this data directory, in order."""
    from deploy.attach import stop_up

    settings = load_settings()
    stopped = stop_up(settings)
    console.print("stopped" if stopped else f"nothing runs on {settings.home}")


@app.command()
def status(as_json: Json = False) -> None:
    """What runs, and since when. Exit status 1 unless all of it is ready."""
    from deploy.cli.up import status_object, status_table
    from deploy.up_record import read_up

    settings = load_settings()
    record = read_up(settings)
    if as_json:
        print_json(status_object(settings, record))
    elif record is None:
        console.print(f"nothing runs on {settings.home}; start it with: ./noria up")
    else:
        console.print(status_table(record))
    raise typer.Exit(0 if record is not None and record.ready else 1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine offers, what is missing, what that costs and what to do."""
    from deploy.doctor import examine, findings_table

    findings = examine(load_settings())
    if as_json:
        lines = [finding.model_dump() for finding in findings]
        print_json({"ok": all(f.level != "missing" for f in findings), "findings": lines})
    else:
        console.print(findings_table(findings))
    raise typer.Exit(1 if any(finding.level == "missing" for finding in findings) else 0)


@app.command()
def migrate(as_json: Json = False) -> None:
    """Bring the database to this version's schema."""
    from deploy.attach import running
    from deploy.embedded import postgres_url
    from deploy.home import Home
    from deploy.prepare import prepare_database

    settings = load_settings()
    if settings.database_url is not None:
        applied = asyncio.run(prepare_database(settings))
    else:
        with running(settings, only=["postgres"]):
            url = postgres_url(Home.of(settings))
            applied = asyncio.run(
                prepare_database(settings.model_copy(update={"database_url": url}))
            )
    if as_json:
        print_json({"applied": applied})
    else:
        console.print("\n".join(f"applied {name}" for name in applied) or "nothing to apply")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def test(context: typer.Context) -> None:
    """Linters, types and all tests; with arguments, pytest alone with these."""
    from deploy.quality import run_quality

    raise typer.Exit(run_quality(context.args))


def main() -> None:
    """Run one command; a known failure is one sentence, never a traceback."""
    from runtime.errors import NoriaError

    try:
        app(prog_name="noria")
    except (CannotRun, NoriaError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
