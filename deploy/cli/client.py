"""The typed client as commands use it: of NORIA_API_URL, of the running `up`, or of one started
for the duration of the command; and the names and ids that the shell completes.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from deploy.home import CannotRun
from deploy.up_record import UpRecord, read_up
from runtime.settings import CLONE, Settings, load_settings

if TYPE_CHECKING:
    from flywheel.client import WheelClient
    from runtime.client import NoriaClient

    Client = TypeVar("Client", bound=NoriaClient)


@contextmanager
def client(*, start: bool = True) -> "Generator[NoriaClient]":
    """A client of the API. With `start`, an `up` is started for the block where none runs.

    What the API refuses within the block is raised as CannotRun, in the API's words.
    """
    from runtime.client import NoriaClient

    with _opened(NoriaClient, start=start) as opened:
        yield opened


@contextmanager
def wheel_client(*, start: bool = True) -> "Generator[WheelClient]":
    """A client of the API with the wheel's routes; as `client`."""
    from flywheel.client import WheelClient

    with _opened(WheelClient, start=start) as opened:
        yield opened


@contextmanager
def _opened(kind: "type[Client]", *, start: bool) -> "Generator[Client]":
    from runtime.client import ApiProblem

    settings = load_settings()
    with _api_url(settings, start=start) as url:
        try:
            with kind(url, api_key(settings)) as opened:
                yield opened
        except ApiProblem as error:
            raise CannotRun(str(error)) from error


@contextmanager
def _api_url(settings: Settings, *, start: bool) -> Generator[str]:
    from deploy.attach import running

    if settings.api_url is not None:
        yield settings.api_url
        return
    if not start and read_up(settings) is None:
        raise CannotRun(
            f"nothing runs on {settings.home}; start it with ./noria up, or set NORIA_API_URL"
        )
    with running(settings, observe=_say_changes()) as record:
        if record.api_url is None:
            raise CannotRun("the running `up` has no API; start it without --only")
        yield record.api_url


def api_key(settings: Settings) -> str:
    """The key of the settings, else the bootstrap key of this home."""
    if settings.api_key is not None:
        return settings.api_key.get_secret_value()
    path = settings.home / "secrets" / "api-key"
    try:
        return path.read_text().strip()
    except OSError as error:
        raise CannotRun(
            f"no API key: {path}: {error.strerror}; set NORIA_API_KEY, or start ./noria up first"
        ) from error


def _say_changes() -> "Observer":
    """Tells on stderr how a start gets on; says nothing about what is ready already."""
    said: dict[str, str] = {}

    def observe(record: UpRecord) -> None:
        if record.ready and not said:
            return
        for process in record.processes:
            now = process.doing or process.state
            if said.get(process.name) != now:
                said[process.name] = now
                sys.stderr.write(f"{process.name}: {now}\n")

    return observe


if TYPE_CHECKING:
    from deploy.attach import Observer


# ---------------------------------------------------------------- what the shell completes


def complete_domain(incomplete: str) -> list[str]:
    folders = [CLONE / "runtime" / "domains", load_settings().domains]
    names = {path.parent.name for each in folders if each for path in each.glob("*/domain.yaml")}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_cycle(incomplete: str) -> list[str]:
    try:
        with wheel_client(start=False) as opened:
            ids = ["latest", *(cycle.id for cycle in opened.cycles())]
    except (Exception, SystemExit):  # a completion that cannot be made is no completion
        return []
    return [cycle_id for cycle_id in ids if cycle_id.startswith(incomplete)]


def complete_adapter(incomplete: str) -> list[str]:
    try:
        with wheel_client(start=False) as opened:
            names = [adapter.name for adapter in opened.adapters()]
    except (Exception, SystemExit):  # likewise
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    try:
        with client(start=False) as opened:
            ids = [key.id for key in opened.list_keys()]
    except (Exception, SystemExit):  # a completion that cannot be made is no completion
        return []
    return [key_id for key_id in ids if key_id.startswith(incomplete)]
