"""Entry points of Noria's own processes: `python -m deploy.processes NAME`.

Each reads the settings from its environment, builds what it serves, tells the supervisor over an
inherited socket that it is ready, and serves until SIGTERM. Heavy imports happen inside the entry
points, so that a process pays for what it serves and for nothing else. Without a supervisor (under
systemd, in a container) the notifications go nowhere and everything else is the same.

Scaling past one machine: `api`, `runner` and `worker` are started as often as needed, with the same
URLs in the environment; `engine` is replaced by any OpenAI-compatible endpoint.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from runtime.errors import NoriaError
from runtime.settings import Settings, load_settings

ORPHAN_SECONDS = 10
"""How long a process whose supervisor died may take to stop before the kernel ends it."""


class Notifier:
    """This process's end of the socket to its supervisor, where it has one."""

    def __init__(self, descriptor: int | None) -> None:
        self._socket = None if descriptor is None else socket.socket(fileno=descriptor)
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._outlive, name="supervisor watch", daemon=True).start()

    def ready(self, **facts: str) -> None:
        """Serving now. `facts` are shown by `noria status`."""
        self._send({"ready": True, **facts})

    def progress(self, doing: str, share: float | None = None) -> None:
        """Still starting; `share` in [0, 1] of what is being done."""
        self._send({"doing": doing, "share": share})

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the supervisor is gone: the watch below deals with it
                self._socket.send(json.dumps(message).encode())

    def _outlive(self) -> None:
        """End for certain, even if hung in native code, soon after the supervisor died.

        The kernel's SIGTERM has asked for an orderly stop by now; an unhandled SIGALRM insists.
        """
        assert self._socket is not None
        with suppress(OSError):
            while self._socket.recv(1):
                pass
        signal.alarm(ORPHAN_SECONDS)


_notifier: Notifier | None = None


def notifier() -> Notifier:
    """The one of this process, made at the first call."""
    global _notifier
    if _notifier is None:
        _notifier = Notifier(load_settings().notify_fd)
    return _notifier


def notify_ready() -> None:
    """Tell the supervisor, if there is one, that this process serves now."""
    notifier().ready()


# ---------------------------------------------------------------- entry points


def run_migrate(settings: Settings) -> None:
    """Bring the database to this version's schema and see that the home has its key."""
    from deploy.prepare import prepare_database

    for name in asyncio.run(prepare_database(settings)):
        print(f"applied {name}")


def run_engine(settings: Settings) -> None:
    """The embedded engine on the port that NORIA_ENGINE_URL names."""
    from urllib.parse import urlsplit

    from runtime.engine.local.server import serve
    from runtime.engine.weights import ensure_model

    address = urlsplit(settings.engine_url or "")
    if address.hostname is None or address.port is None:
        sys.exit(f"NORIA_ENGINE_URL is {settings.engine_url!r}; http://127.0.0.1:8322/v1 would do")
    model = ensure_model(settings.home, settings.model, notifier().progress)
    notifier().progress("loading the model")
    serve(model, host=address.hostname, port=address.port, on_ready=notify_ready)


def run_api(settings: Settings) -> None:
    """The REST API on the host and port of the settings."""
    import uvicorn

    from deploy.composition import build_api

    app = build_api(settings)

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if not self.should_exit:
                notify_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.services.draining.set()  # open event streams end, their clients reconnect
            await super().shutdown(sockets=sockets)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=10,
        log_level="warning",
        server_header=False,
    )
    held = None if settings.listen_fd is None else [socket.socket(fileno=settings.listen_fd)]
    Announced(config).run(sockets=held)


def run_runner(settings: Settings) -> None:
    """One runner, until SIGTERM."""
    from deploy.composition import run_runner as serve

    asyncio.run(serve(settings, on_ready=notify_ready))


def run_worker(settings: Settings) -> None:
    """One Celery worker on all queues, until SIGTERM."""
    from deploy.worker import run_worker as serve

    serve(settings, on_ready=notify_ready)


def run_beat(settings: Settings) -> None:
    """Celery's beat, until SIGTERM."""
    from deploy.beat import run_beat as serve

    serve(settings, on_ready=notify_ready)


PROCESSES: dict[str, Callable[[Settings], None]] = {
    "migrate": run_migrate,
    "engine": run_engine,
    "api": run_api,
    "runner": run_runner,
    "worker": run_worker,
    "beat": run_beat,
}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in PROCESSES:
        sys.exit(f"usage: python -m deploy.processes {'|'.join(PROCESSES)}")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    notifier()
    try:
        PROCESSES[arguments[0]](load_settings())
    except NoriaError as error:
        sys.exit(f"noria: {error}")


if __name__ == "__main__":
    # Under -m this file is `__main__`; the module that others import is `deploy.processes`.
    from deploy.processes import main as run_main

    run_main(sys.argv[1:])
