"""Runs of a demo through the REST API, many at once, as an application asks for them.

Every run is admitted under an idempotency key made of the demo's id and of what is asked, so that
asking again after an interrupt finds the run that is there already: whatever was finished costs
nothing the second time. A run that infrastructure failed is asked for anew, twice at most; what
still has no verdict then is left out of every rate, never counted as a failure.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from deploy.home import CannotRun
from runtime.api.schemas import RunView
from runtime.client import NoriaClient
from runtime.run import RunKind, RunState, Task

AT_ONCE = 40
"""Runs under way at once: a few more than a runner takes on, so that none waits for us."""
LOOK_SECONDS = 5.0
"""How long one request waits for its run to end; an interrupt is heard this soon."""
TRIES = 3
INVALID = frozenset({RunState.ERROR, RunState.NEEDS_ATTENTION, RunState.CANCELLED})
"""States in which a run is over and nobody judged it."""
MOST_INVALID = 0.2
"""With a larger share of unjudged runs, nothing can be concluded."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One run as it is wanted."""

    role: str
    """What it is for: `practice`, `base`, `sft`, `grpo`, `fixed`."""
    task: Task
    member: int = 0
    kind: RunKind = RunKind.PRODUCTION
    policy: str | None = None
    """Policy id; None lets the alias `production` decide, as for any application."""
    seed: int | None = None
    """Of sampling."""


@dataclass(frozen=True, slots=True)
class Ran:
    wish: Wish
    run: RunView

    @property
    def valid(self) -> bool:
        return self.run.state not in INVALID

    @property
    def passed(self) -> bool:
        return self.run.state is RunState.ACCEPTED


Advance = Callable[[Ran], None]


def sampling_seed(demo_seed: int, task: Task, member: int) -> int:
    """Equal for every policy that is measured, different for every task and member; 31 bits."""
    text = f"demo/{demo_seed}/{task.id}/{member}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4]) >> 1


def play(client: NoriaClient, demo_id: str, wishes: Sequence[Wish], advance: Advance) -> list[Ran]:
    """Every wish to its end, in the order of the wishes; `advance` hears of each as it ends.

    Raises what the API refuses first, and CannotRun where too many have no verdict. An interrupt
    leaves within seconds; what was admitted stays admitted.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(_play, client, demo_id, each, stop) for each in wishes]
        try:
            for future in as_completed(futures):
                advance(future.result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    ran = [future.result() for future in futures]
    _check_enough(ran)
    return ran


class _Interrupted(Exception):
    """Another run was refused, or the user had enough; nobody waits for this one any more."""


def _play(client: NoriaClient, demo_id: str, wish: Wish, stop: threading.Event) -> Ran:
    ran = _attempt(client, demo_id, wish, 0, stop)
    for number in range(1, TRIES):
        if ran.valid:
            break
        ran = _attempt(client, demo_id, wish, number, stop)
    return ran


def _attempt(
    client: NoriaClient, demo_id: str, wish: Wish, number: int, stop: threading.Event
) -> Ran:
    """Ask for the run, and again under the same key until it is over."""
    key = f"demo-{demo_id}-{wish.role}-{wish.task.id}-{wish.member}-{number}"
    while not stop.is_set():
        run = client.create_run(
            wish.task.domain,
            wish.task.input,
            files=wish.task.files,
            kind=wish.kind,
            wait=True,
            wait_seconds=LOOK_SECONDS,
            idempotency_key=key,
            **_options(wish),
        )
        if run.state.terminal:
            return Ran(wish, run)
    raise _Interrupted


def _options(wish: Wish) -> dict[str, Any]:
    """What else is fixed: the simulated customer always; who judges and samples where measured."""
    task = wish.task
    options: dict[str, Any] = {
        "connectors": task.connectors,
        "seed": task.seed,
        "level": task.level,
    }
    if wish.kind is RunKind.PRODUCTION:
        return options
    measured = {
        "expectation": task.expectation,
        "policy": wish.policy,
        "task_id": task.id,
        "split": task.split,
        "family": task.family,
        "sampling": {"seed": wish.seed},
    }
    return {**options, **{name: value for name, value in measured.items() if value is not None}}


def _check_enough(ran: Sequence[Ran]) -> None:
    invalid = [each for each in ran if not each.valid]
    if len(invalid) > MOST_INVALID * len(ran):
        last = invalid[-1].run
        why = last.failure.message if last.failure else last.reason or last.state
        raise CannotRun(
            f"{len(invalid)} of {len(ran)} runs of policy {last.policy.id} ended without a "
            f"verdict; the last ({last.id}): {why}"
        )
