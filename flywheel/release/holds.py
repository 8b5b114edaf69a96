"""Holds: runs of some kinds stay queued while the block is open.

Training shares its cores with the engine, so practice runs wait meanwhile. The hold is a row with
an end that a thread keeps moving: a process that dies holds nothing for longer than the row says.

Scaling out: the row holds every runner that shares the database.
"""

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from flywheel.store import Statements, transaction
from flywheel.wheel import Wheel
from runtime.database import QUEUE_CHANNEL
from runtime.errors import StoreError
from runtime.run import RunKind

log = logging.getLogger(__name__)
SECONDS = 30.0
"""How long a hold lasts that nobody renews."""


class HoldStore(Statements):
    FILE = "releases.sql"

    def hold(self, name: str, kinds: Sequence[RunKind], reason: str, seconds: float) -> None:
        self._run("hold", name=name, kinds=list(kinds), reason=reason, seconds=seconds)

    def lift(self, name: str) -> None:
        """End it and wake the runners; repeating it changes nothing."""
        self._run("lift_hold", name=name, channel=QUEUE_CHANNEL)


@contextmanager
def hold(
    wheel: Wheel,
    name: str,
    kinds: Sequence[RunKind],
    reason: str,
    *,
    seconds: float = SECONDS,
) -> Generator[None]:
    """Runners claim no run of these kinds while the block is open; runs that go on, go on.

    `name` belongs to one holder at a time (a cycle's id). Production cannot be held.
    """
    if RunKind.PRODUCTION in kinds:
        raise ValueError("production runs are never held")
    done = threading.Event()

    def renew() -> None:
        while not done.wait(seconds / 3):
            try:
                with transaction(wheel.url) as connection:
                    HoldStore(connection).hold(name, kinds, reason, seconds)
            except StoreError as error:  # the hold runs out unless the database is back in time
                log.warning("the hold %s could not be renewed: %s", name, error)

    with transaction(wheel.url) as connection:
        HoldStore(connection).hold(name, kinds, reason, seconds)
    renewer = threading.Thread(target=renew, name=f"hold {name}", daemon=True)
    renewer.start()
    try:
        yield
    finally:
        done.set()
        renewer.join()
        with transaction(wheel.url) as connection:
            HoldStore(connection).lift(name)
