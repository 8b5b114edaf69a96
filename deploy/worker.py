"""The process `worker`: the wheel, its watch and Celery, wired.

One process serves as many queues as it is told to, on threads: what is heavy (training) runs in a
subprocess of its own, so the worker keeps its heartbeats. SIGTERM is a warm stop: the stage in hand
is given back at once, a training subprocess with it, and another worker goes on there.

Scaling past one machine: as many workers as wanted, `gpu` ones where the accelerators are.
"""

import datetime as dt
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from celery import Celery, signals
from celery.worker import state

from deploy.broker import broker, keep_quiet
from deploy.composition import build_wheel
from flywheel.cycle import advance, open_due
from flywheel.jobs import QUEUES, add_tasks, chosen_queues, due_now, ring, serves
from flywheel.release.reconciler import reconcile
from flywheel.watch import HANDS, Duties, Watch
from flywheel.wheel import Wheel
from runtime.settings import Settings


def run_worker(settings: Settings, on_ready: Callable[[], None]) -> NoReturn:
    """Turn cycles until SIGTERM or SIGINT. Raises StoreError where no database is named."""
    keep_quiet()
    app = broker(settings)
    with build_wheel(settings) as wheel:
        status = turn_cycles(wheel, app, chosen_queues(QUEUES), on_ready)
    raise SystemExit(status)


def turn_cycles(
    wheel: Wheel, app: Celery, queues: frozenset[str], on_ready: Callable[[], None]
) -> int:
    """Watch and serve the queues until a signal says stop; the exit status."""
    stop = threading.Event()
    _hear_signals(stop)
    duties = duties_of(wheel, app, queues, stop)
    watch = Watch(wheel.url, duties, queues=queues, stop=stop)
    add_tasks(app, watch, duties)
    with watch.watching():
        on_ready()
        status = serve_queues(app, sorted(queues))
        return 0 if stop.is_set() else status


def _hear_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`, before Celery takes them over and afterwards.

    Nothing is raised in the middle of something: Celery looks at its flag as soon as it serves.
    """

    def early(number: int, frame: FrameType | None) -> None:
        del number, frame
        state.should_stop = 0
        stop.set()

    def late(**_: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, early)
    signals.worker_shutting_down.connect(late, weak=False)


def duties_of(wheel: Wheel, app: Celery, queues: frozenset[str], stop: threading.Event) -> Duties:
    """What the watch of this process does with its wheel."""
    owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    return Duties(
        due=partial(due_now, wheel.url),
        advance=partial(
            advance, wheel, owner=owner, quitting=stop.is_set, serves=partial(serves, queues)
        ),
        open_due=lambda: open_due(wheel, dt.datetime.now(dt.UTC)),
        reconcile=partial(reconcile, wheel),
        ring=partial(ring, app),
    )


def serve_queues(app: Celery, queues: list[str]) -> int:
    """Serve until a signal says stop; the exit status. A broker that is away is waited for."""
    worker: Any = app.Worker(
        pool="threads",
        concurrency=HANDS,
        queues=queues,
        hostname=f"noria-{os.getpid()}@{socket.gethostname()}",
        loglevel="WARNING",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
