"""Workers as processes, on a real Postgres and a Valkey of the test's own: each stage once,
whatever happens to the broker and to the workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from deploy.embedded import valkey_program
from flywheel.cycle import open_cycle, plan
from flywheel.cycle_store import CycleStore
from flywheel.records import Cycle, CycleState, StageState
from flywheel.store import MIGRATIONS, transaction
from runtime.database import migrate
from runtime.run import TenantId
from runtime.settings import CLONE, child_environment, load_settings
from tests.fixtures.wheel import letters_wheel

pytestmark = pytest.mark.timeout(300)  # every test starts processes that import much
TENANT = TenantId("default")


class Broker:
    """A Valkey that a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis+socket://{self._socket}"

    @property
    def _socket(self) -> Path:
        return self._folder / "v.sock"

    def start(self) -> None:
        program = valkey_program(load_settings())
        options = {"port": "0", "unixsocket": str(self._socket), "save": "", "dir": self._folder}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [program.at(program.tree), *words], stdout=subprocess.DEVNULL
        )
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None
                    time.sleep(0.02)  # it offers no event

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket))

    def kill(self) -> None:
        """With everything that was queued: nothing of it is on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path)
    yield made
    made.kill()


@pytest.fixture
async def wiring(database_url: str, tmp_path: Path, broker: Broker) -> dict[str, Any]:
    await migrate(database_url)
    await migrate(database_url, folder=MIGRATIONS, schema="flywheel")
    os.mkfifo(tmp_path / "go")
    return {
        "url": database_url,
        "broker": broker.url,
        "home": str(tmp_path),
        "ledger": str(tmp_path / "ledger"),
        "go": str(tmp_path / "go"),
        "stall_at": None,
        "queues": ["default", "gpu"],
    }


class Worker:
    def __init__(self, wiring: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.worker_process", json.dumps(wiring)],
            cwd=CLONE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self, word: str) -> None:
        """Wait for a line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return
        raise AssertionError(f"the worker ended before it said {word!r}")


@contextmanager
def worker(wiring: dict[str, Any], **changes: Any) -> Iterator[Worker]:
    """A worker that is watching; killed at the end unless the test ended it."""
    started = Worker({**wiring, **changes})
    try:
        started.hears("ready")
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        if started.process.stdout is not None:
            started.process.stdout.close()


def opened(wiring: dict[str, Any]) -> Cycle:
    with letters_wheel(wiring["url"], Path(wiring["home"])) as wheel:
        return open_cycle(wheel, TENANT, "letters")[0]


def ended(wiring: dict[str, Any], cycle: Cycle) -> Cycle:
    """The cycle once it is over, waited for by its own bell."""
    with closing(psycopg.connect(wiring["url"], autocommit=True)) as ear:
        ear.execute("LISTEN noria_cycles")
        while (now := current(wiring, cycle)).state is CycleState.RUNNING:
            for _ in ear.notifies(timeout=5, stop_after=1):
                pass
    return now


def current(wiring: dict[str, Any], cycle: Cycle) -> Cycle:
    with transaction(wiring["url"]) as connection:
        return CycleStore(connection).get(TENANT, cycle.id)


def ledger(wiring: dict[str, Any]) -> list[tuple[int, str]]:
    """(seq, name) of every stage that any worker began, in order."""
    lines = Path(wiring["ledger"]).read_text().splitlines()
    return [(int(line.split()[1]), line.split()[2]) for line in lines]


def stages_by_worker(wiring: dict[str, Any]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in Path(wiring["ledger"]).read_text().splitlines():
        worker_pid, _, name = line.split()
        found.setdefault(int(worker_pid), set()).add(name)
    return found


def planned(cycle: Cycle) -> list[tuple[int, str]]:
    return [(seq, name) for seq, (name, _) in enumerate(plan(cycle.recipe))]


def expire_lease(wiring: dict[str, Any], cycle: Cycle) -> None:
    """What time would do to the lease of a worker that is gone."""
    with psycopg.connect(wiring["url"]) as connection:
        connection.execute(
            "UPDATE flywheel.cycles SET lease_until = now() WHERE id = %s", [cycle.id]
        )


# ---------------------------------------------------------------- with a broker


def test_two_workers_turn_one_cycle_and_each_stage_once(
    wiring: dict[str, Any], broker: Broker
) -> None:
    broker.start()
    with worker(wiring), worker(wiring):
        cycle = opened(wiring)
        over = ended(wiring, cycle)
    assert (over.state, over.outcome) == (CycleState.DONE, "hold")
    assert ledger(wiring) == planned(cycle)


def test_training_goes_to_the_workers_of_its_queue(wiring: dict[str, Any], broker: Broker) -> None:
    broker.start()
    with worker(wiring, queues=["default"]) as plain, worker(wiring, queues=["gpu"]) as gpu:
        cycle = opened(wiring)
        assert ended(wiring, cycle).state is CycleState.DONE
    done = stages_by_worker(wiring)
    assert done[gpu.process.pid] == {"sft", "grpo"}
    assert done[plain.process.pid].isdisjoint({"sft", "grpo"})
    assert ledger(wiring) == planned(cycle)


def test_a_broker_killed_and_flushed_mid_cycle_costs_nothing(
    wiring: dict[str, Any], broker: Broker
) -> None:
    broker.start()
    with worker(wiring, stall_at="sft") as only:
        cycle = opened(wiring)
        only.hears("began 3 sft")
        broker.kill()
        Path(wiring["go"]).write_text("")
        only.hears("began 5 grpo")
        broker.start()
        assert ended(wiring, cycle).state is CycleState.DONE
    assert ledger(wiring) == planned(cycle)


# ---------------------------------------------------------------- without


def test_without_a_broker_a_cycle_turns_and_a_stop_is_at_once(wiring: dict[str, Any]) -> None:
    with worker(wiring) as only:
        cycle = opened(wiring)
        assert ended(wiring, cycle).state is CycleState.DONE
        only.process.terminate()
        assert only.process.wait(60) == 0
    assert ledger(wiring) == planned(cycle)


# ---------------------------------------------------------------- workers that end


def test_a_killed_worker_is_replaced_at_its_stage(wiring: dict[str, Any], broker: Broker) -> None:
    broker.start()
    with worker(wiring, stall_at="grpo") as doomed:
        cycle = opened(wiring)
        doomed.hears("began 5 grpo")
        doomed.process.kill()
        doomed.process.wait()
    expire_lease(wiring, cycle)
    with worker(wiring):
        assert ended(wiring, cycle).state is CycleState.DONE
    assert ledger(wiring) == sorted([*planned(cycle), (5, "grpo")])
    assert len(stages_by_worker(wiring)) == 2


def test_a_stopped_worker_gives_its_stage_back_at_once(
    wiring: dict[str, Any], broker: Broker
) -> None:
    broker.start()
    with worker(wiring, stall_at="sft") as stopped:
        cycle = opened(wiring)
        stopped.hears("began 3 sft")
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(60) == 0
    assert current(wiring, cycle).state is CycleState.RUNNING
    with worker(wiring):
        assert ended(wiring, cycle).state is CycleState.DONE
    with transaction(wiring["url"]) as connection:
        stages = CycleStore(connection).stages(TENANT, cycle.id)
    assert {stage.state for stage in stages} == {StageState.DONE}
    assert ledger(wiring) == sorted([*planned(cycle), (3, "sft")])


def test_a_worker_that_is_stopped_while_it_starts_stops(
    wiring: dict[str, Any], broker: Broker
) -> None:
    broker.start()
    with worker(wiring) as starting:  # it watches, and Celery does not serve yet
        starting.process.send_signal(signal.SIGINT)
        assert starting.process.wait(60) == 0


# ---------------------------------------------------------------- beat


@pytest.mark.parametrize("there", [True, False])
def test_beat_is_ready_stops_at_once_and_leaves_no_file(
    tmp_path: Path, broker: Broker, there: bool
) -> None:
    if there:
        broker.start()
    place = tmp_path / "place"
    place.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = child_environment(
        NORIA_HOME=str(place),
        NORIA_BROKER_URL=broker.url,
        NORIA_NOTIFY_FD=str(theirs.fileno()),
        PYTHONPATH=str(CLONE),
    )
    command = [sys.executable, "-P", "-m", "deploy.processes", "beat"]
    with (
        ours,
        subprocess.Popen(command, cwd=place, env=environment, pass_fds=[theirs.fileno()]) as beat,
    ):
        theirs.close()
        assert json.loads(ours.recv(1000))["ready"]
        beat.terminate()
        assert beat.wait(60) == 0
    assert list(place.iterdir()) == []
