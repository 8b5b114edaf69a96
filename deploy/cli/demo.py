"""`noria demo`: the whole loop on one machine, with a report; and several reports pooled."""

import json
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.cli.output import console, fail, print_json
from deploy.home import CannotRun
from runtime.settings import Settings, load_settings

if TYPE_CHECKING:
    from deploy.demo.demo import DemoPlan
    from deploy.demo.result import DemoResult
    from deploy.demo.show import Show
    from deploy.demo.tasks import DemoTasks, MessageFiles
    from deploy.up_record import UpRecord
    from flywheel.client import WheelClient
    from runtime.domain import Domain

DOMAIN = "support_triage"
GATE_TASKS = 48
"""Held-out real messages that the cycle's gate may draw from."""


def demo_command(
    easy: Annotated[bool, typer.Option("--easy/--full", help="Level of the tasks.")] = True,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Another seed draws other tasks.")
    ] = 1,
    fast: Annotated[
        bool, typer.Option("--fast", help="As little as shows that every part works.")
    ] = False,
    corrections: Annotated[
        int | None, typer.Option(min=1, help="Answers that the support team corrects.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="In a data directory of its own, from the base model.")
    ] = False,
    messages: Annotated[
        Path | None, typer.Option(help="CSV of real, labelled messages to practise on.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="CSV of others, for the gate and the report.")
    ] = None,
    map_file: Annotated[
        Path | None, typer.Option("--map", help="YAML: which column and label is what.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report.")] = None,
    pool: Annotated[
        list[Path] | None, typer.Option(help="Pool this demo-report.json with others, run nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Watch a domain fail, be corrected, and be right the next time: with numbers."""
    said = Console(stderr=True) if as_json else console
    if pool:
        _pool(pool, out or Path("demo-report"), said, as_json)
        return
    settings, files = load_settings(), _message_files(messages, held_out, map_file)
    wanted = _Wanted("full" if files or not easy else "easy", seed, fast, corrections, files)
    folder = out or settings.home / "demo" / _folder_name(wanted)
    result = _run(settings, folder, wanted, said, fresh=fresh)
    _finish(result, folder, said, as_json)


# ---------------------------------------------------------------- what was asked for


@dataclass(frozen=True, slots=True)
class _Wanted:
    level: str
    seed: int
    fast: bool
    corrections: int | None
    files: "MessageFiles | None"

    def plan(self, base: str) -> "DemoPlan":
        from deploy.demo.demo import DemoPlan

        real = self.files is not None
        plan = DemoPlan(DOMAIN, base=base, level=self.level, seed=self.seed, real=real)
        plan = plan.fast() if self.fast else plan
        return plan if self.corrections is None else replace(plan, corrections=self.corrections)

    def tasks(self, plan: "DemoPlan", domain: "Domain") -> "DemoTasks":
        from deploy.demo.tasks import from_files, generated

        counts = {"practice": plan.corrections, "report": plan.report_tasks}
        if self.files is None:
            return generated(domain, level=self.level, seed=self.seed, **counts)
        return from_files(domain, self.files, seed=self.seed, gate=GATE_TASKS, **counts)


def _message_files(
    messages: Path | None, held_out: Path | None, map_file: Path | None
) -> "MessageFiles | None":
    """The user's own messages; all three files or none."""
    if messages is None and held_out is None and map_file is None:
        return None
    if messages is None or held_out is None or map_file is None:
        fail("real messages need all of --messages CSV, --held-out CSV and --map YAML")
    from deploy.demo.tasks import MessageFiles

    return MessageFiles(messages, held_out, map_file)


def _folder_name(wanted: _Wanted) -> str:
    kind = "real" if wanted.files else wanted.level
    return f"{kind}-seed-{wanted.seed}" + ("-fast" if wanted.fast else "")


# ---------------------------------------------------------------- running it


def _run(
    settings: Settings, folder: Path, wanted: _Wanted, out: Console, *, fresh: bool
) -> "DemoResult":
    """Raises CannotRun; an interrupt says what is kept."""
    from deploy.composition import build_domains
    from deploy.demo.demo import Demo
    from deploy.demo.journal import Journal
    from deploy.demo.show import Show

    show = Show(out)
    domain = build_domains(settings)[DOMAIN]
    plan = wanted.plan(_base(settings, show))
    tasks = wanted.tasks(plan, domain)
    journal = Journal.open(folder, (plan, domain.digest, wanted.files, fresh))
    if fresh:
        settings = _fresh(settings, folder / f"home-{journal.notes.demo_id}")
    try:
        with _connected(settings, show) as client:
            result = Demo(client, plan, domain, tasks, journal, show).run()
    except KeyboardInterrupt:
        show.say(
            "interrupted: finished runs, corrections and the cycle are kept; the same command "
            "goes on from here"
        )
        raise
    journal.close()
    if fresh:
        show.say(f"look around in it with: NORIA_HOME={settings.home} ./noria up")
    return result


def _base(settings: Settings, show: "Show") -> str:
    """Policy id of the base model, which is made here if it is not there yet."""
    from deploy.composition import model_folder

    with show.step("base model", 1) as step:
        name = model_folder(settings).name
        step.tell(name)
    return name


def _fresh(settings: Settings, home: Path) -> Settings:
    """The same settings in a data directory of the demo's own, which shares only the model."""
    if settings.api_url is not None or settings.database_url is not None:
        raise CannotRun("--fresh starts its own services: unset NORIA_API_URL and DATABASE_URL")
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "models").is_symlink():
        (home / "models").symlink_to(settings.home / "models")
    return settings.model_copy(update={"home": home.absolute(), "port": 0, "api_key": None})


@contextmanager
def _connected(settings: Settings, show: "Show") -> "Generator[WheelClient]":
    """A client of the API: of the settings', of the running `up`, or of one started for it."""
    from deploy.cli.client import api_key
    from flywheel.client import WheelClient
    from runtime.client import ApiProblem

    with ExitStack() as stack:
        url = settings.api_url or stack.enter_context(_started(settings, show))
        try:
            yield stack.enter_context(WheelClient(url, api_key(settings)))
        except ApiProblem as problem:
            raise CannotRun(str(problem)) from problem


@contextmanager
def _started(settings: Settings, show: "Show") -> Generator[str]:
    """Address of the API of an `up`, running already or for the duration of the block."""
    from deploy.attach import running

    with ExitStack() as stack:
        with show.step("services", 1) as step:

            def observe(record: "UpRecord") -> None:
                late = [p for p in record.processes if p.state == "starting"]
                step.note(", ".join(f"{p.name} {p.doing or ''}".strip() for p in late))

            url = stack.enter_context(running(settings, observe=observe)).api_url
            step.tell(f"ready, API at {url}")
        if url is None:
            raise CannotRun("the running `up` has no API; start it without --only")
        yield url


def _finish(result: "DemoResult", folder: Path, out: Console, as_json: bool) -> None:
    from deploy.demo.report import write_report
    from deploy.demo.table import closing_lines, stage_table

    paths = write_report(result, folder)
    out.print(stage_table(result))
    for line in closing_lines(result):
        out.print(line, highlight=False, soft_wrap=True)
    _tell_files(paths, out)
    if as_json:
        print_json(result.model_dump(mode="json"))


# ---------------------------------------------------------------- several reports


def _pool(paths: Sequence[Path], folder: Path, out: Console, as_json: bool) -> None:
    from deploy.demo.report import write_pooled

    _tell_files(write_pooled([_read(path) for path in paths], folder), out)
    if as_json:
        print_json(json.loads((folder / "demo-report.json").read_text()))


def _read(path: Path) -> "DemoResult":
    from pydantic import ValidationError

    from deploy.demo.result import DemoResult

    try:
        return DemoResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CannotRun(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise CannotRun(f"{path} is no demo-report.json of one demo: {error}") from error


def _tell_files(paths: Sequence[Path], out: Console) -> None:
    out.print("report: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
