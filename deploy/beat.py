"""The process `beat`: Celery's clock, which rings every minute for cycles that are due by the hour.

It keeps no file and no state: what it rings for is a question that the rows answer, and every
worker asks the clock by itself too. The clock ticks in a thread, so that a broker that is away
keeps no signal waiting.

Scaling past one machine: one active is enough, two do no harm, none costs half a minute.
"""

import signal
from collections.abc import Callable
from typing import Any

from celery import signals
from celery.beat import EmbeddedService, Scheduler

from deploy.broker import broker, keep_quiet
from runtime.settings import Settings

STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
LOOK_SECONDS = 5.0
"""How soon the end of a broken clock is noticed."""


class BrokenClock(RuntimeError):
    """The ticking thread ended; the log has its reason."""


def run_beat(settings: Settings, on_ready: Callable[[], None]) -> None:
    """Ring until SIGTERM or SIGINT. Raises StoreError where no broker is named, or BrokenClock."""
    keep_quiet()
    app = broker(settings)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    signals.beat_init.connect(lambda **_: on_ready(), weak=False)
    clock: Any = EmbeddedService(app, thread=True, scheduler_cls=Scheduler)
    clock.start()
    while signal.sigtimedwait(STOPS, LOOK_SECONDS) is None:
        if not clock.is_alive():
            raise BrokenClock("the clock stopped ticking")
