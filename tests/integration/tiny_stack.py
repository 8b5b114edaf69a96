"""A real supervisor over tiny real children, for tests of the supervisor itself.

Run as `python tiny_stack.py HOME STACK`, STACK being a JSON list of `[name, after, code, options]`.
Every record is printed as one JSON line; the error that ends it goes to stderr.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from deploy.children import ChildSpec
from deploy.home import CannotRun, Home
from deploy.supervisor import Service, Stack, Supervisor
from deploy.up_record import UpRecord
from runtime.settings import CLONE, Settings, child_environment


def service(home: Home, name: str, after: list[str], code: str, options: dict[str, Any]) -> Service:
    spec = ChildSpec(
        name=name,
        argv=(sys.executable, "-c", code),
        log=home.log(name),
        env=child_environment(PYTHONPATH=str(CLONE), NORIA_HOME=str(home.root)),
        lock=home.run / f"{name}.lock",
        death_signal=signal.Signals(options.pop("death_signal", signal.SIGTERM)),
        **options,
    )

    async def prepare() -> ChildSpec:
        return spec

    return Service(name, prepare, tuple(after), spec.once)


def show(record: UpRecord) -> None:
    print(record.model_dump_json(), flush=True)


def main() -> None:
    settings = Settings(home=Path(sys.argv[1]))
    home = Home.of(settings)
    home.create()
    services = tuple(service(home, *line) for line in json.loads(sys.argv[2]))
    stack = Stack(home, settings, {}, services, api_url=None, engine_url=None)
    try:
        asyncio.run(Supervisor(stack, show).run())
    except CannotRun as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
