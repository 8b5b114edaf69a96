"""The supervisor: starts the embedded stack, watches it, and leaves nothing behind.

`services()` is the stack, one line each. A service starts as soon as those it names are ready, so
that the model loads while Postgres starts. Nothing is restarted silently: when a child ends, all
others are stopped in reverse order, and the error says which one, why, and how its log ends.
SIGINT and SIGTERM do the same without the error; a second one stops waiting for politeness. If the
supervisor itself is killed, the kernel signals every child.

Scaling past one machine: this starts the same programs that a service manager or Kubernetes starts
in production; it holds no state beyond `up.json`.
"""

import asyncio
import errno
import os
import platform
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from deploy.children import Child, ChildFailed, ChildSpec
from deploy.embedded import Postgres, Valkey, postgres_url, valkey_url
from deploy.home import CannotRun, Home
from deploy.up_record import ProcessRecord, ProcessState, UpRecord, start_time
from runtime.settings import CLONE, Settings, child_environment

VERSION = "0.1.0"
ROTATE_SECONDS = 30.0
"""How often logs are looked at."""

ENDED = frozenset({ProcessState.DONE, ProcessState.FAILED})
"""States of a child that has ended by itself."""

Prepare = Callable[[], Awaitable[ChildSpec]]
Observer = Callable[[UpRecord], None]


@dataclass(frozen=True, slots=True)
class Service:
    """One line of the stack."""

    name: str
    prepare: Prepare
    """Does what must be done before the start; returns what to start."""
    after: tuple[str, ...] = ()
    once: bool = False


# ---------------------------------------------------------------- the stack


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses and services of one `up`, decided before anything starts."""

    home: Home
    settings: Settings
    env: Mapping[str, str]
    services: tuple[Service, ...]
    api_url: str | None
    engine_url: str | None
    notes: tuple[str, ...] = ()
    """What was decided otherwise than asked, one sentence each."""
    listener: socket.socket | None = None
    """The API's address, held from the start so that nobody takes it while the API gets ready."""

    def close(self) -> None:
        """Let go of the address."""
        if self.listener is not None:
            self.listener.close()


def plan(settings: Settings, only: Sequence[str] = ()) -> Stack:
    """Decide addresses and list the services (those of `only`, where given).

    Raises CannotRun for a taken port or an unknown name.
    """
    home = Home.of(settings)
    home.create()
    listener, notes = _listen(settings) if not only or "api" in only else (None, ())
    port = listener.getsockname()[1] if listener else settings.port
    engine_url = settings.engine_url or f"http://127.0.0.1:{free_port()}/v1"
    env = child_environment(
        NORIA_HOME=str(home.root),
        NORIA_DATABASE_URL=settings.database_url or postgres_url(home),
        NORIA_BROKER_URL=settings.broker_url or valkey_url(home),
        NORIA_ENGINE_URL=engine_url,
        NORIA_HOST=settings.host,
        NORIA_PORT=str(port),
        PYTHONPATH=str(CLONE),
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="0",
    )
    stack = _chosen(services(home, settings, env, listener), only)
    names = {service.name for service in stack}
    return Stack(
        home=home,
        settings=settings,
        env=env,
        services=stack,
        api_url=f"http://{settings.host}:{port}" if "api" in names else None,
        engine_url=engine_url if "engine" in names or settings.engine_url else None,
        notes=(*notes, *_silent_engine(settings)),
        listener=listener,
    )


def services(
    home: Home,
    settings: Settings,
    env: Mapping[str, str],
    listener: socket.socket | None = None,
) -> tuple[Service, ...]:
    """The whole stack in the order of its start; what the settings name by URL is left out."""

    def python(name: str, *after: str, once: bool = False, stop_seconds: float = 15) -> Service:
        spec = python_process(name, home, env, once=once, stop_seconds=stop_seconds)
        if name == "api" and listener is not None:
            spec = replace(spec, listener=listener.fileno())
        return Service(name, _prepared(spec), after, once)

    stack = [
        Service("postgres", Postgres(home, settings, env).prepare),
        Service("valkey", Valkey(home, settings, env).prepare),
        python("migrate", "postgres", once=True),
        python("engine"),
        python("api", "migrate"),
        python("runner", "migrate", "engine", stop_seconds=30),
        python("worker", "migrate", "engine", "valkey", stop_seconds=30),
        python("beat", "valkey"),
    ]
    named = {
        "postgres": settings.database_url,
        "valkey": settings.broker_url,
        "engine": settings.engine_url,
    }
    return tuple(service for service in stack if not named.get(service.name))


def python_process(
    name: str, home: Home, env: Mapping[str, str], *, once: bool, stop_seconds: float
) -> ChildSpec:
    """One of Noria's own processes (`deploy/processes.py`)."""
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-P", "-m", "deploy.processes", name),
        log=home.log(name),
        env=env,
        once=once,
        stop_seconds=stop_seconds,
        lock=home.run / f"{name}.lock",
    )


def _prepared(spec: ChildSpec) -> Prepare:
    async def prepare() -> ChildSpec:
        return spec

    return prepare


def _chosen(stack: tuple[Service, ...], only: Sequence[str]) -> tuple[Service, ...]:
    names = {service.name for service in stack}
    if unknown := set(only) - names:
        raise CannotRun(f"no service {', '.join(sorted(unknown))} here; there are {sorted(names)}")
    return tuple(service for service in stack if not only or service.name in only)


# ---------------------------------------------------------------- ports


def _listen(settings: Settings) -> tuple[socket.socket, tuple[str, ...]]:
    """The API's listening socket, and what to say where its port is not the usual one."""
    host, port = settings.host, settings.port
    try:
        return _bound(host, port), ()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise CannotRun(
                f"cannot listen on {host}:{port}: {error.strerror}; set NORIA_HOST to an address "
                "of this machine, and NORIA_PORT to a port you may use"
            ) from error
    if "port" in settings.model_fields_set:
        raise CannotRun(
            f"port {port} of {host} is taken; end what listens there, or set NORIA_PORT "
            "to another port (0 picks a free one)"
        )
    listener = _bound(host, 0)
    other = listener.getsockname()[1]
    return listener, (f"port {port} is taken, so the API listens on {other}",)


def _silent_engine(settings: Settings) -> tuple[str, ...]:
    """What to say where the settings name an engine that takes no connection."""
    if settings.engine_url is None:
        return ()
    address = urlsplit(settings.engine_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=2).close()
    except OSError as error:
        why = error.strerror or str(error)
        return (f"no engine answers at {settings.engine_url} ({why}): runs fail until one does",)
    return ()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def port_is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- supervising


@dataclass(slots=True)
class Supervisor:
    """Runs one stack until told to stop or until a child ends."""

    stack: Stack
    observe: Observer
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _children: list[Child] = field(default_factory=list[Child])
    _ready: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _record: UpRecord = field(init=False)

    def __post_init__(self) -> None:
        self._ready = {service.name: asyncio.Event() for service in self.stack.services}
        self._record = UpRecord(
            version=VERSION,
            python=platform.python_version(),
            pid=os.getpid(),
            started=start_time(),
            since=datetime.now(UTC),
            home=str(self.stack.home.root),
            api_url=self.stack.api_url,
            engine_url=self.stack.engine_url,
            processes=tuple(
                ProcessRecord(name=s.name, once=s.once, log=str(self.stack.home.log(s.name)))
                for s in self.stack.services
            ),
        )

    async def run(self) -> None:
        """Start, watch, stop in order. Raises CannotRun: a child failed, or another `up` runs."""
        home = self.stack.home
        with closing(self.stack), home.supervised():
            home.open_sockets()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signalled)
            try:
                await self._until_stopped()
            finally:
                await self._stop_all()
                home.close_sockets()
                home.up_file.unlink(missing_ok=True)
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    async def _until_stopped(self) -> None:
        """Ends without error when stopped, with the first failure otherwise."""
        self._publish()
        stopped = asyncio.create_task(self.stop.wait(), name="stop")
        pending: set[asyncio.Task[Any]] = {
            stopped,
            asyncio.create_task(self._rotate_logs(), name="logs"),
            *(asyncio.create_task(self._serve(s), name=s.name) for s in self.stack.services),
        }
        try:
            while not stopped.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _serve(self, service: Service) -> None:
        """One service's life. Returns when a `once` service is done; raises when a child ends."""
        for name in service.after:
            if name in self._ready:
                await self._ready[name].wait()
        self._change(service.name, state=ProcessState.STARTING)
        self.stack.home.rotate(service.name)
        try:
            child = await self._started(service)
            await child.ready(lambda doing, share: self._doing(service.name, doing, share))
            state = ProcessState.DONE if service.once else ProcessState.READY
            self._change(service.name, state=state, since=datetime.now(UTC), doing="", share=None)
            self._ready[service.name].set()
            if not service.once:
                await child.end()
                raise child.failed()
        except ChildFailed:
            self._change(service.name, state=ProcessState.FAILED)
            raise

    async def _started(self, service: Service) -> Child:
        child = await Child.start(await service.prepare())
        self._children.append(child)
        self._change(service.name, pid=child.pid, started=start_time(child.pid))
        return child

    async def _stop_all(self) -> None:
        """Stop whatever was started, the last started first. Runs to its end, whatever happens."""
        order = [service.name for service in self.stack.services]
        for child in sorted(self._children, key=lambda c: -order.index(c.spec.name)):
            name = child.spec.name
            to_tell = self._record.process(name).state not in ENDED
            if to_tell:
                self._change(name, state=ProcessState.STOPPING)
            await child.stop(self.hurry)
            if to_tell:
                self._change(name, state=ProcessState.STOPPED)

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_SECONDS)
            for service in self.stack.services:
                self.stack.home.rotate(service.name)

    # ------------------------------------------------------------ the record

    def _doing(self, name: str, doing: str, share: float | None) -> None:
        self._change(name, doing=doing, share=share)

    def _change(self, name: str, **changes: object) -> None:
        changed = self._record.process(name).model_copy(update=changes)
        self._record = self._record.with_process(changed)
        self._publish()

    def _publish(self) -> None:
        with suppress(OSError):  # a full disk must not keep children from being stopped
            self._record.write(self.stack.home.up_file)
        self.observe(self._record)
