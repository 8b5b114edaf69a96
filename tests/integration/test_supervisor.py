"""The supervisor over tiny real children: order, failure, Ctrl-C, kill -9, locks, records."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.home import CannotRun, Home
from deploy.supervisor import plan
from deploy.up_record import UpRecord, alive, read_up, start_time
from runtime.settings import CLONE, Settings, child_environment
from tests.integration.process_watch import descendants, survivors

TINY = Path(__file__).with_name("tiny_stack.py")

SERVES = """
import pathlib, signal, sys, os
from deploy.processes import notify_ready
def stop(*_):
    with open(os.environ["NORIA_HOME"] + "/order", "a") as order:
        order.write("NAME ")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("NAME serves", flush=True)
notify_ready()
while True:
    signal.pause()
"""
FAILS = """
import sys, time
print("one line before the end", flush=True)
sys.exit("the reason, in its own words")
"""
SERVES_THEN_FAILS = """
import os
from deploy.processes import notify_ready
notify_ready()
open(os.environ["NORIA_HOME"] + "/go").read()  # a FIFO: the test says when
os._exit(3)
"""
STUBBORN = """
import signal, subprocess, sys
from deploy.processes import notify_ready
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal\\nwhile True: signal.pause()"])
notify_ready()
while True:
    signal.pause()
"""
HANGS_AS_AN_ORPHAN = """
import signal
import deploy.processes
deploy.processes.ORPHAN_SECONDS = 1
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deploy.processes.notify_ready()
while True:
    signal.pause()
"""


def serves(name: str, *after: str, **options: Any) -> list[Any]:
    return [name, after, SERVES.replace("NAME", name), options]


class Tiny:
    """A running tiny stack."""

    def __init__(self, home: Path, *services: list[Any]) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, TINY, home, json.dumps(services)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(PYTHONPATH=str(CLONE)),
        )

    def until_ready(self) -> UpRecord:
        return self.until(lambda record: record.ready)

    def until(self, holds: Callable[[UpRecord], bool]) -> UpRecord:
        """The first record that holds, from those it prints at every change."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record = UpRecord.model_validate_json(line)
            if holds(record):
                return record
        raise AssertionError(self.process.communicate()[1])

    def end(self) -> tuple[int, str]:
        """Its status and what it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@contextmanager
def tiny(home: Path, *services: list[Any]) -> Iterator[Tiny]:
    stack = Tiny(home, *services)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stack.process.kill()
        stack.process.communicate()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory; what a killed supervisor leaves of its sockets goes with the test."""
    with tempfile.TemporaryDirectory(prefix="noria-t-") as sockets:
        monkeypatch.setenv("NORIA_RUNTIME_DIR", sockets)
        yield tmp_path / "data directory"


def pids(record: UpRecord) -> list[int]:
    return [process.pid for process in record.processes if process.pid is not None]


def settings(place: Path) -> Settings:
    return Settings(home=place)


def assert_nothing_left(place: Path) -> None:
    home = Home.of(settings(place))
    assert not home.sockets.exists()
    assert not home.up_file.exists()


# ---------------------------------------------------------------- in order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_in_reverse_order_and_leaves_nothing(place: Path, number: signal.Signals) -> None:
    stack = [serves("first"), serves("second", "first"), serves("third", "second")]
    with tiny(place, *stack) as running:
        record = running.until_ready()
        since = [process.since for process in record.processes]
        assert all(since)
        assert since == sorted(since, key=str), "each waited for the one it names"
        read = read_up(settings(place))
        assert read is not None
        assert read.ready
        running.process.send_signal(number)
        assert running.end() == (0, "")
    assert (place / "order").read_text().split() == ["third", "second", "first"]
    assert survivors(pids(record), 0) == []
    assert_nothing_left(place)


def test_ctrl_c_reaches_the_supervisor_alone(place: Path) -> None:
    """Children have sessions of their own, so a terminal's SIGINT cannot end them out of order."""
    with tiny(place, serves("one")) as running:
        (child,) = pids(running.until_ready())
        assert os.getsid(child) == child != os.getsid(running.process.pid)


def test_steps_that_run_once_come_before_those_that_wait_for_them(place: Path) -> None:
    once = [
        "step",
        [],
        "open(__import__('os').environ['NORIA_HOME'] + '/step', 'w')",
        {"once": True},
    ]
    with tiny(place, once, serves("server", "step")) as running:
        record = running.until_ready()
        assert (place / "step").exists()
        assert record.process("step").state == "done"


# ---------------------------------------------------------------- failure


def test_a_child_that_fails_at_the_start_stops_all(place: Path) -> None:
    with tiny(place, serves("good"), ["bad", ["good"], FAILS, {}]) as running:
        status, said = running.end()
    assert status == 1
    assert said.startswith("bad ended with status 1; the end of ")
    assert "the reason, in its own words" in said
    assert (place / "order").read_text().split() == ["good"]
    assert_nothing_left(place)


def test_a_child_that_fails_later_stops_all(place: Path) -> None:
    place.mkdir()
    os.mkfifo(place / "go")
    with tiny(place, serves("good"), ["bad", [], SERVES_THEN_FAILS, {}]) as running:
        record = running.until_ready()
        (place / "go").write_text("")
        status, said = running.end()
    assert (status, said.partition(";")[0]) == (1, "bad ended with status 3")
    assert survivors(pids(record), 0) == []
    assert_nothing_left(place)


def test_a_killed_child_is_named_with_its_signal(place: Path) -> None:
    with tiny(place, serves("victim"), serves("other")) as running:
        victim = running.until_ready().process("victim").pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        status, said = running.end()
    assert (status, said.partition(";")[0]) == (1, "victim was ended by SIGKILL")


def test_a_child_that_hangs_at_the_start_is_a_failure(place: Path) -> None:
    hanging = ["hanging", [], "import signal\nsignal.pause()", {"start_seconds": 0.3}]
    with tiny(place, hanging) as running:
        status, said = running.end()
    assert status == 1
    assert "did not become ready and said nothing for 0.3 s" in said


def test_a_stubborn_child_and_its_children_are_killed(place: Path) -> None:
    with tiny(place, ["stubborn", [], STUBBORN, {"stop_seconds": 0.3}]) as running:
        running.until_ready()
        below = descendants(running.process.pid)
        assert len(below) == 2
        running.process.terminate()
        assert running.end()[0] == 0
    assert survivors(below) == []


def test_a_second_signal_stops_the_patience(place: Path) -> None:
    with tiny(place, ["stubborn", [], STUBBORN, {"stop_seconds": 600}]) as running:
        running.until_ready()
        below = descendants(running.process.pid)
        running.process.terminate()
        running.until(lambda record: record.process("stubborn").state == "stopping")
        running.process.terminate()
        assert running.end()[0] == 0
    assert survivors(below) == []


# ---------------------------------------------------------------- kill -9


def test_kill_9_of_the_supervisor_ends_every_child(place: Path) -> None:
    stack = [serves("polite"), ["hangs", [], HANGS_AS_AN_ORPHAN, {}]]
    with tiny(place, *stack) as running:
        running.until_ready()
        below = descendants(running.process.pid)
        assert len(below) == 2
        running.process.kill()
        assert survivors(below) == []
    assert read_up(settings(place)) is None, "the record that is left counts for nothing"
    with tiny(place, serves("again")) as running:
        assert running.until_ready().ready
        running.process.terminate()
        assert running.end() == (0, "")
    assert_nothing_left(place)


def test_a_start_waits_for_what_still_writes(place: Path) -> None:
    """A new child may not open a data directory that a dying one still holds."""
    holds = "import signal\nfrom deploy.processes import notify_ready\n"
    holds += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnotify_ready()\nsignal.pause()"
    with tiny(place, ["writer", [], holds, {"death_signal": int(signal.SIGCONT)}]) as running:
        (old,) = pids(running.until_ready())
        running.process.kill()
        running.process.wait()
        with tiny(place, serves("writer")) as second:
            assert second.process.stdout is not None
            second.process.stdout.readline()
            assert alive(old, start_time(old))
            os.kill(old, signal.SIGKILL)
            assert second.until_ready().ready


# ---------------------------------------------------------------- locks, records, ports


def test_a_second_supervisor_is_told_of_the_first(place: Path) -> None:
    with tiny(place, serves("one")) as running:
        running.until_ready()
        with tiny(place, serves("two")) as second:
            status, said = second.end()
        assert status == 1
        assert f"already runs on {place} (process {running.process.pid})" in said
        assert read_up(settings(place)) is not None, "the first one is unharmed"


def test_a_record_of_another_process_with_the_same_pid_is_stale(place: Path) -> None:
    with tiny(place, serves("one")) as running:
        record = running.until_ready()
    mine = record.model_copy(update={"pid": os.getpid(), "started": start_time()})
    path = Home.of(settings(place)).up_file
    mine.write(path)
    assert read_up(settings(place)) is not None
    mine.model_copy(update={"started": (start_time() or 0) + 1}).write(path)
    assert read_up(settings(place)) is None
    path.write_text("{ cut")
    assert read_up(settings(place)) is None


def test_a_process_that_died_is_not_ready_in_the_record(place: Path) -> None:
    with tiny(place, serves("one")) as running:
        record = running.until_ready()
    assert survivors(pids(record)) == []
    assert record.ready
    assert not record.checked().ready


def test_a_taken_port_is_refused_if_asked_for_and_avoided_if_not(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotRun, match=f"port {port} of 127.0.0.1 is taken"):
            plan(Settings(home=place, port=port))
        with pytest.raises(CannotRun, match="is taken"):
            plan(Settings(home=place, port=port), only=["api"])
    with closing(plan(Settings(home=place, port=port))) as stack:
        assert stack.api_url == f"http://127.0.0.1:{port}"
        with pytest.raises(CannotRun, match="is taken"):  # held from the start
            plan(Settings(home=place, port=port))


def test_a_free_port_is_taken_where_the_usual_one_is_not_free(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NORIA_PORT", raising=False)
    usual = Settings.model_fields["port"].default
    try:
        holder = socket.create_server(("127.0.0.1", usual))
    except OSError:
        holder = socket.socket()  # something else holds it: just as well
    with holder, closing(plan(Settings(home=place))) as stack:
        assert stack.api_url != f"http://127.0.0.1:{usual}"
        assert stack.notes[0].startswith(f"port {usual} is taken")


def test_what_the_settings_name_by_url_is_not_started(place: Path) -> None:
    given = Settings(
        home=place, port=0, database_url="postgresql://x/y", engine_url="http://localhost:1/v1"
    )
    with closing(plan(given)) as stack:
        names = [service.name for service in stack.services]
        assert stack.notes[-1].startswith("no engine answers at http://localhost:1/v1")
    assert names == ["valkey", "migrate", "api", "runner", "worker", "beat"]
    with pytest.raises(CannotRun, match="no service postgres here"):
        plan(given, only=["postgres"])
