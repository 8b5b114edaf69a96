"""The one place that wires connectors, domains, stores and engines by name.

Everything below `deploy` takes what it needs as arguments; here the names in settings and domain
folders become objects. Nothing is connected at import: each process calls its own factory.

Scaling out: the same factories serve the embedded stack and production; only the URLs in the
settings differ.
"""

import asyncio
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.support_desk import SupportDeskFactory
from flywheel.bridge import Bridge
from flywheel.recipe import RECIPES
from flywheel.wheel import Wheel
from runtime.checks.certification import Certification, certify
from runtime.database import Database, Doorbell
from runtime.demonstration import play
from runtime.domain import Domain, discover
from runtime.engine.openai import OpenAIEngine
from runtime.engine.templates import ChatTemplate
from runtime.engine.weights import base_digest, ensure_model
from runtime.errors import NotFound, StoreError
from runtime.run import Policy, PolicyId, Task, ToolCall
from runtime.run_executor import Executed, RunExecutor, Workplace
from runtime.runner import Runner
from runtime.sandbox.bubblewrap import BubblewrapBackend, find_bwrap
from runtime.sandbox.tools import sandbox_tools
from runtime.settings import Settings
from runtime.tools import ConnectorFactory, FinishTool

if TYPE_CHECKING:
    from fastapi import FastAPI

BUILTIN_DOMAINS = Path(__file__).parent.parent / "runtime" / "domains"


def build_connectors() -> dict[str, ConnectorFactory]:
    """Every connector by the name that domains use."""
    return {factory.name: factory for factory in (SupportDeskFactory(),)}


def build_domains(settings: Settings) -> dict[str, Domain]:
    """The built-in domains and the operator's own. Raises DomainError naming every fault."""
    return discover(
        BUILTIN_DOMAINS,
        settings.domains,
        known_tools=[*(tool.name for tool in sandbox_tools()), FinishTool.name],
        known_connectors=build_connectors(),
    )


def find_recipes(settings: Settings, domains: Mapping[str, Domain]) -> dict[str, Path]:
    """Domain → its recipe: `recipe.yaml` in the operator's own folder of it, else the built-in."""
    found = {name: RECIPES / f"{name}.yaml" for name in domains}
    if settings.domains is not None:
        own = {path.parent.name: path for path in settings.domains.glob("*/recipe.yaml")}
        found |= {name: path for name, path in own.items() if name in domains}
    return {name: path for name, path in found.items() if path.is_file()}


def model_folder(settings: Settings) -> Path:
    """The base model on disk, converted if it is not there yet."""
    return ensure_model(settings.home.absolute(), settings.model, lambda what, share: None)


def base_policy(model_dir: Path) -> Policy:
    """The base model alone, under the name that engines serve it by."""
    return Policy(id=PolicyId(model_dir.name), base=base_digest(model_dir))


def build_backend(settings: Settings) -> BubblewrapBackend:
    return BubblewrapBackend(
        state_dir=settings.home.absolute() / "sandboxes",
        bwrap=find_bwrap(settings.bwrap),
        uid=settings.sandbox_uid,
    )


def build_workplace(settings: Settings) -> Workplace:
    return Workplace(
        backend=build_backend(settings),
        connectors=build_connectors(),
        template=ChatTemplate.from_folder(model_folder(settings)),
    )


def build_engine(settings: Settings) -> OpenAIEngine:
    """Raises StoreError where no engine is configured."""
    return OpenAIEngine(_required(settings.engine_url, "NORIA_ENGINE_URL"), api_key=_key(settings))


def _key(settings: Settings) -> str | None:
    return settings.engine_key.get_secret_value() if settings.engine_key else None


def database_url(settings: Settings) -> str:
    return _required(settings.database_url, "NORIA_DATABASE_URL")


def _required(value: str | None, variable: str) -> str:
    if value is None:
        raise StoreError(f"{variable} is not set; `noria up` sets it for the embedded stack")
    return value


@contextmanager
def build_wheel(settings: Settings) -> Generator[Wheel]:
    """What turning the wheel needs; closed with the block. Raises StoreError, DomainError."""
    url, domains = database_url(settings), build_domains(settings)
    workplace, engine, model = (
        build_workplace(settings),
        build_engine(settings),
        model_folder(settings),
    )
    with Bridge() as bridge:
        database = Database(url)
        bridge.call(database.__aenter__())
        try:
            yield Wheel(
                url=url,
                home=settings.home.absolute(),
                bridge=bridge,
                database=database,
                engine=engine,
                domains=domains,
                recipes=find_recipes(settings, domains),
                workplace=workplace,
                base=base_policy(model),
                model_dir=model,
            )
        finally:
            bridge.call(database.__aexit__(None, None, None))
            bridge.call(workplace.backend.close())
            bridge.call(engine.close())


async def certify_domains(
    settings: Settings, names: Sequence[str], *, sample: int, seed: int
) -> list[Certification]:
    """Certify the named domains (all, where none is named) on `sample` tasks each.

    Attempts are demonstrations through the real loop, tools and sandbox; no model replies. Raises
    NotFound for a name that is no domain.
    """
    domains = build_domains(settings)
    for name in names:
        if name not in domains:
            raise NotFound(f"there is no domain {name!r}; domains: {', '.join(domains)}")
    workplace = build_workplace(settings)

    async def attempt(domain: Domain, task: Task, turns: list[list[ToolCall]]) -> Executed:
        return await play(domain, task, turns, workplace)

    try:
        return [
            await certify(domains[name], attempt=attempt, sample=sample, seed=seed)
            for name in names or domains
        ]
    finally:
        await workplace.backend.close()


# ---------------------------------------------------------------- processes


def build_api(settings: Settings) -> "FastAPI":
    """The app, with the wheel's routes; only this process pays for the server's imports."""
    from flywheel.routes import wheel_extension
    from runtime.api.app import ApiServices, create_app

    url = database_url(settings)
    return create_app(
        ApiServices(
            database=Database(url),
            doorbell=Doorbell(url),
            domains=build_domains(settings),
            base_policy=base_policy(model_folder(settings)),
            engine_healthy=build_engine(settings).healthy,
        ),
        [wheel_extension(partial(build_wheel, settings))],
    )


async def run_runner(settings: Settings, on_ready: Callable[[], None]) -> None:
    """Claim and execute runs until SIGTERM or SIGINT, then give unfinished ones back."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    url, workplace, engine = (
        database_url(settings),
        build_workplace(settings),
        build_engine(settings),
    )
    try:
        async with Database(url) as database, Doorbell(url) as doorbell:
            runner = Runner(
                database,
                doorbell,
                RunExecutor(workplace, engine),
                build_domains(settings),
                concurrency=settings.concurrency,
                lease_seconds=settings.lease_seconds,
            )
            await runner.run(stop, on_ready)
    finally:
        await workplace.backend.close()
        await engine.close()
