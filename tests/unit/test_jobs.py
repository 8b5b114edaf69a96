"""Celery's settings, the watch's judgement, following a cycle: without broker and database."""

import datetime as dt
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console

from deploy.cycle_progress import cycle_table, duration, follow, outcome_lines
from flywheel.client import IMPORT_VALUES, WheelClient, portions
from flywheel.jobs import QUEUES, celery_app, chosen_queues, queue_of, ring
from flywheel.records import CycleId, CycleState, Decision, Interval, Outcome, Score, StageName
from flywheel.schemas import CycleView, ImportedTask, StageView
from flywheel.watch import Due, Duties, Watch
from runtime.errors import StoreError
from runtime.run import TenantId

TENANT = TenantId("default")
CYCLE = CycleId("cyc_1")


# ---------------------------------------------------------------- Celery


def test_a_lost_message_is_delivered_again_and_nothing_else_is_remembered() -> None:
    conf = celery_app("redis+socket:///tmp/none.sock").conf
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost
    assert conf.task_ignore_result
    assert conf.result_backend is None
    assert conf.accept_content == ["json"]
    assert not conf.task_always_eager
    assert conf.broker_connection_max_retries is None
    options = conf.broker_transport_options
    assert (options["unacked_restore_interval"], options["unacked_restore_throttle"]) == (2, 1)


def test_other_brokers_get_no_options_of_redis() -> None:
    assert "visibility_timeout" not in celery_app("amqp://host").conf.broker_transport_options


def test_only_training_asks_for_an_accelerator() -> None:
    assert {name for name in StageName if queue_of(name) == "gpu"} == {
        StageName.SFT,
        StageName.GRPO,
    }
    assert chosen_queues(["gpu"]) == {"gpu"}
    with pytest.raises(ValueError, match="no queue cpu; queues: default, gpu"):
        chosen_queues(["cpu"])


def test_ringing_at_a_broker_that_is_away_fails_at_once() -> None:
    app = celery_app("redis+socket:///tmp/none.sock")
    assert not ring(app, Due(TENANT, CYCLE, 0, "pending", "default"))


# ---------------------------------------------------------------- the watch


@dataclass
class Office:
    """Duties that note what was asked of them."""

    due: list[Due] = field(default_factory=list[Due])
    answers: bool = True
    """Whether the bell gets through."""
    rung: list[Due] = field(default_factory=list[Due])
    advanced: list[CycleId] = field(default_factory=list[CycleId])
    fails: Exception | None = None
    at_work: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def advance(self, tenant_id: TenantId, cycle_id: CycleId) -> None:
        self.advanced.append(cycle_id)
        self.at_work.set()
        self.go_on.wait(10)
        if self.fails is not None:
            raise self.fails

    def ring(self, due: Due) -> bool:
        self.rung.append(due)
        return self.answers

    def watch(self, *queues: str, clock: Sequence[float] = (0.0,)) -> Watch:
        ticks = iter(clock)
        duties = Duties(
            due=lambda: self.due,
            advance=self.advance,
            open_due=lambda: None,
            reconcile=lambda: None,
            ring=self.ring,
        )
        self.go_on.set()
        return Watch(
            "",
            duties,
            queues=frozenset(queues or QUEUES),
            stop=threading.Event(),
            clock=lambda: next(ticks),
        )


def due(stage: int = 0, state: str = "pending", queue: str = "default") -> Due:
    return Due(TENANT, CYCLE, stage, state, queue)


def test_a_cycle_is_rung_for_once_and_taken_only_if_nobody_came() -> None:
    office = Office(due=[due()])
    watch = office.watch(clock=[0.0, 0.5, 1.0])
    assert watch.look() == []
    assert watch.look() == [], "whoever heard the bell may be on the way"
    assert watch.look() == [due()]
    assert office.rung == [due()]


def test_a_cycle_that_moved_on_is_rung_for_anew() -> None:
    office = Office(due=[due(0)])
    watch = office.watch(clock=[0.0, 5.0])
    assert watch.look() == []
    office.due = [due(1)]
    assert watch.look() == []
    assert office.rung == [due(0), due(1)]


def test_without_a_bell_a_cycle_is_taken_at_once_by_whom_its_queue_allows() -> None:
    office = Office(due=[due(), due(3, queue="gpu")], answers=False)
    assert office.watch("default", clock=[0.0, 0.0]).look() == [due()]
    assert office.watch("gpu", clock=[0.0, 0.0]).look() == [due(3, queue="gpu")]


def test_a_cycle_in_hand_is_not_taken_twice() -> None:
    office = Office()
    watch = office.watch()
    office.go_on.clear()
    first = threading.Thread(target=watch.take, args=(TENANT, CYCLE))
    first.start()
    assert office.at_work.wait(10)
    watch.take(TENANT, CYCLE)
    assert office.advanced == [CYCLE]
    office.go_on.set()
    first.join(10)
    watch.take(TENANT, CYCLE)
    assert office.advanced == [CYCLE, CYCLE]


@pytest.mark.parametrize("error", [StoreError("the database is away"), RuntimeError("a bug")])
def test_what_fails_is_logged_and_can_be_taken_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    office = Office(fails=error)
    watch = office.watch()
    watch.take(TENANT, CYCLE)
    watch.take(TENANT, CYCLE)
    assert len(office.advanced) == 2
    assert str(error) in caplog.text


# ---------------------------------------------------------------- imports in portions


def task(words: int) -> ImportedTask:
    return ImportedTask(input={"list": ["x"] * words}, expectation={"queue": "cards"})


def test_large_imports_go_in_portions_that_the_api_takes() -> None:
    tasks = [task(IMPORT_VALUES // 3) for _ in range(5)]
    parts = list(portions(tasks))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [each for part in parts for each in part] == tasks
    assert list(portions([])) == []
    assert [len(part) for part in portions([task(IMPORT_VALUES * 2), task(1)])] == [1, 1]


# ---------------------------------------------------------------- following

NOW = dt.datetime(2026, 11, 30, 2, tzinfo=dt.UTC)
PASSED = Score(passed=3, n=4, tasks=4, rate=0.75, low=0.5, high=0.9)
FAILED = Score(passed=1, n=4, tasks=4, rate=0.25, low=0.1, high=0.5)


def view(state: CycleState, *stages: StageView, **changes: Any) -> CycleView:
    values: dict[str, Any] = {
        "id": CYCLE,
        "domain": "letters",
        "date": NOW.date(),
        "turn": 1,
        "trigger": "manual",
        "created_at": NOW,
        "stages": list(stages),
    }
    return CycleView.model_validate({**values, "state": state, **changes})


def sft(state: str, step: int, **changes: Any) -> StageView:
    progress = {"phase": "training", "step": step, "steps": 32, "seconds_left": 95, "loss": 1.25}
    values = {"seq": 3, "name": "sft", "state": state, "progress": progress, "started_at": NOW}
    return StageView.model_validate({**values, **changes})


class Replayed:
    """What the API would have answered, one view after the other."""

    def __init__(self, *views: CycleView) -> None:
        self._views = list(views)

    def cycle(self, cycle_id: str) -> CycleView:
        assert cycle_id == CYCLE
        return self._views.pop(0)


def plain(*, width: int = 120) -> Console:
    return Console(file=StringIO(), force_terminal=False, width=width)


def said(console: Console) -> str:
    return cast("StringIO", console.file).getvalue()


def test_following_tells_each_change_and_ends_with_the_cycle() -> None:
    done = sft("done", 32, finished_at=NOW + dt.timedelta(seconds=185), progress={})
    client = Replayed(
        view(CycleState.RUNNING, sft("running", 4)),
        view(CycleState.RUNNING, sft("running", 5)),
        view(CycleState.DONE, done, outcome="hold"),
    )
    console = plain()
    pauses: list[float] = []
    last = follow(cast("WheelClient", client), CYCLE, console, pause=pauses.append)
    assert last.outcome == "hold"
    assert said(console).splitlines() == [
        "SFT: running (4 of 32 steps, 1 min 35 s left; loss 1.25)",
        "SFT: done (3 min 05 s)",
    ]
    assert len(pauses) == 2


def test_the_table_shows_progress_and_measures_as_they_are() -> None:
    console = plain()
    odd = sft("failed", 4, reason="[bold]no[/bold] engine", finished_at=NOW)
    console.print(cycle_table(view(CycleState.RUNNING, sft("running", 4), odd)))
    assert "4 of 32 steps, 1 min 35 s left" in said(console)
    assert "loss 1.25" in said(console)
    assert "[bold]no[/bold] engine" in said(console), "a reason is no markup"


def test_the_end_says_the_decision_its_reasons_and_numbers() -> None:
    decision = Decision(
        outcome=Outcome.PROMOTE,
        reasons=["surely better"],
        incumbent=FAILED,
        candidate=PASSED,
        difference=Interval(value=0.5, low=0.3, high=0.7),
    )
    ended = view(CycleState.DONE, outcome="promote", decision=decision, adapters={"sft": "a-1"})
    assert list(outcome_lines(ended)) == [
        "[bold]promote[/bold]",
        "  surely better",
        "  incumbent: 1 of 4 passed, 25.0% (10.0% to 50.0%)",
        "  candidate: 3 of 4 passed, 75.0% (50.0% to 90.0%)",
        "  difference: +50.0% (+30.0% to +70.0%)",
        "  adapter after sft: a-1",
    ]
    failed = view(CycleState.FAILED, reason="sft: out of memory")
    assert list(outcome_lines(failed)) == ["[bold]the cycle failed[/bold]: sft: out of memory"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7800, "2 h 10 min")],
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
