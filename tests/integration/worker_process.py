"""A worker as its own process, for tests that kill it. Takes its wiring as JSON in argv.

Cycle, lease, watch and Celery are the real ones; its stages only write a line into a ledger. At
the stage named `stall_at` it waits until somebody writes into the FIFO `go`, or it is to stop.
Prints `ready`, and `began SEQ NAME` at each stage.
"""

import json
import os
import select
import sys
from functools import partial
from pathlib import Path
from typing import Any

from deploy.broker import keep_quiet
from deploy.worker import turn_cycles
from flywheel import cycle
from flywheel.jobs import celery_app, chosen_queues
from flywheel.records import StageName
from flywheel.stages.turn import Answer, Done, Turn
from flywheel.training.errors import TrainingStopped
from tests.fixtures.wheel import letters_wheel


def recorded(turn: Turn, *, wiring: dict[str, Any]) -> Answer:
    """A stage that leaves one line behind."""
    with Path(wiring["ledger"]).open("a") as ledger:
        ledger.write(f"{os.getpid()} {turn.stage.seq} {turn.stage.name}\n")
    print(f"began {turn.stage.seq} {turn.stage.name}", flush=True)
    if turn.stage.name == wiring["stall_at"]:
        stall(turn, Path(wiring["go"]))
    outcome = {"decision": {"outcome": "hold"}} if turn.stage.name is StageName.GATE else {}
    return Done(outputs=outcome)


def stall(turn: Turn, go: Path) -> None:
    """Raises TrainingStopped where the stage is to stop."""
    descriptor = os.open(go, os.O_RDONLY | os.O_NONBLOCK)
    while not select.select([descriptor], [], [], 0.05)[0]:
        if turn.stop():
            raise TrainingStopped("stopped on request")


def main(wiring: dict[str, Any]) -> None:
    for name in cycle.STAGES:
        cycle.STAGES[name] = partial(recorded, wiring=wiring)
    keep_quiet()
    app, queues = celery_app(wiring["broker"]), chosen_queues(wiring["queues"])
    with letters_wheel(wiring["url"], Path(wiring["home"])) as wheel:
        status = turn_cycles(wheel, app, queues, lambda: print("ready", flush=True))
    sys.exit(status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
