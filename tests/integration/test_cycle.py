"""The cycle as a state machine on a real Postgres: opened once, turned by one worker at a time.

The stages here are plain functions in the places of the real ones: what is tested is how `advance`
claims, commits, gives back and gives up. The real stages turn in the demo's test.
"""

import asyncio
import datetime as dt
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from flywheel import cycle as cycles
from flywheel.cycle import STAGES, Advance, advance, due, open_cycle, open_due, plan, stop_cycle
from flywheel.cycle_store import CycleStore, cycle_view
from flywheel.recipe import RECIPES, Recipe
from flywheel.records import Cycle, CycleId, CycleState, Stage, StageName, StageState
from flywheel.stages.turn import Answer, Done, Ended, Turn, Waiting
from flywheel.store import MIGRATIONS, transaction
from flywheel.training.errors import TrainingFailed, TrainingStopped
from flywheel.wheel import Wheel
from runtime.database import migrate
from runtime.domain import Domain
from runtime.errors import Conflict, InputError, NotFound, StoreError
from runtime.run import TenantId

TENANT = TenantId("default")
DOMAIN = "support_triage"


@pytest.fixture
def wheel(database_url: str, triage: Domain) -> Wheel:
    async def prepare() -> None:
        await migrate(database_url)
        await migrate(database_url, folder=MIGRATIONS, schema="flywheel")

    asyncio.run(prepare())
    absent = cast(Any, None)
    return Wheel(
        url=database_url,
        home=Path("/nonexistent"),
        bridge=absent,
        database=absent,
        engine=absent,
        domains={DOMAIN: triage},
        recipes={DOMAIN: RECIPES / f"{DOMAIN}.yaml"},
        workplace=absent,
        base=absent,
        model_dir=Path("/nonexistent"),
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every stage answers Done; the names of those that ran, in order."""
    seen: list[str] = []

    def stand_in(turn: Turn) -> Answer:
        seen.append(f"{turn.stage.name}.{turn.stage.round}")
        decision = {"outcome": "hold"} if turn.stage.name is StageName.GATE else {}
        return Done(outputs={"decision": decision} if decision else {}, metrics={"n": len(seen)})

    for name in StageName:
        monkeypatch.setitem(STAGES, name, stand_in)
    return seen


def answering(
    monkeypatch: pytest.MonkeyPatch, name: StageName, answer: Callable[[Turn], Answer]
) -> None:
    monkeypatch.setitem(STAGES, name, answer)


def opened(wheel: Wheel) -> Cycle:
    cycle, new = open_cycle(wheel, TENANT, DOMAIN)
    assert new
    return cycle


def turn_until_ended(wheel: Wheel, cycle: Cycle, most: int = 40) -> None:
    for _ in range(most):
        if advance(wheel, TENANT, cycle.id, owner="one") is Advance.ENDED:
            return
    raise AssertionError("the cycle did not end")


def reread(wheel: Wheel, cycle: Cycle) -> tuple[Cycle, list[Stage]]:
    with transaction(wheel.url) as connection:
        store = CycleStore(connection)
        return store.get(TENANT, cycle.id), store.stages(TENANT, cycle.id)


def test_every_stage_runs_once_in_order(wheel: Wheel, ran: list[str]) -> None:
    cycle = opened(wheel)
    turn_until_ended(wheel, cycle)
    assert ran == [f"{name}.{round_}" for name, round_ in plan(cycle.recipe)]
    after, stages = reread(wheel, cycle)
    assert (after.state, after.outcome) == (CycleState.DONE, "hold")
    assert [stage.attempts for stage in stages] == [1] * len(stages)
    assert [stage.metrics["n"] for stage in stages] == list(range(1, len(stages) + 1))


def test_a_second_cycle_of_a_domain_waits_for_the_first_to_end(
    wheel: Wheel, ran: list[str]
) -> None:
    first = opened(wheel)
    again, new = open_cycle(wheel, TENANT, DOMAIN)
    assert (again.id, new) == (first.id, False)
    turn_until_ended(wheel, first)
    later, new = open_cycle(wheel, TENANT, DOMAIN)
    assert new
    assert (first.turn, later.turn) == (1, 2)


def test_two_that_start_together_are_one_cycle(wheel: Wheel) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_cycle(wheel, TENANT, DOMAIN), range(8)))
    assert len({cycle.id for cycle, _ in found}) == 1
    assert [new for _, new in found].count(True) == 1


def test_unknown_domain_profile_and_level_are_refused_by_name(wheel: Wheel) -> None:
    with pytest.raises(NotFound, match="domains with one: support_triage"):
        open_cycle(wheel, TENANT, "nowhere")
    with pytest.raises(InputError, match="profiles: fast"):
        open_cycle(wheel, TENANT, DOMAIN, options=cycles.CycleOptions(profile="slow"))
    with pytest.raises(InputError, match="allowed: easy, full"):
        open_cycle(wheel, TENANT, DOMAIN, options=cycles.CycleOptions(level="hard"))


def test_waiting_holds_no_worker_and_counts_no_attempt(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def patient(turn: Turn) -> Answer:
        waves = int(turn.stage.inputs.get("wave", 0))
        return Waiting(inputs={"wave": waves + 1}) if waves < 3 else Done()

    answering(monkeypatch, StageName.MINE, patient)
    cycle = opened(wheel)
    answers = [advance(wheel, TENANT, cycle.id, owner="one") for _ in range(4)]
    assert answers == [Advance.WAITING] * 3 + [Advance.ADVANCED]
    assert reread(wheel, cycle)[1][0].attempts == 1


def test_a_held_cycle_is_busy_for_everybody_else(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(turn: Turn) -> Answer:
        inside.set()
        assert go_on.wait(20)
        return Done()

    answering(monkeypatch, StageName.MINE, slow)
    cycle = opened(wheel)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(advance, wheel, TENANT, cycle.id, owner="one")
        assert inside.wait(20)
        assert advance(wheel, TENANT, cycle.id, owner="two") is Advance.BUSY
        assert due(wheel) == []
        go_on.set()
        assert first.result() is Advance.ADVANCED
    assert due(wheel) == [(TENANT, cycle.id)]


def test_a_zombie_is_fenced_off(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose lease ran out while it slept writes nothing; the other's result stands."""

    def overtaken(turn: Turn) -> Answer:
        answering(monkeypatch, StageName.MINE, lambda turn: Done(metrics={"by": "other"}))
        _expire(wheel, turn.cycle.id)
        assert advance(wheel, TENANT, turn.cycle.id, owner="two") is Advance.ADVANCED
        return Done(metrics={"by": "zombie"})

    answering(monkeypatch, StageName.MINE, overtaken)
    cycle = opened(wheel)
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.BUSY
    assert reread(wheel, cycle)[1][0].metrics == {"by": "other"}


def _expire(wheel: Wheel, cycle_id: CycleId) -> None:
    with psycopg.connect(wheel.url) as connection:
        connection.execute(
            "UPDATE flywheel.cycles SET lease_until = now() - interval '1 s' WHERE id = %s",
            (cycle_id,),
        )


class _Killed(BaseException):
    """Stands for a worker's death: nothing of `advance` handles it."""


def test_a_stage_whose_workers_die_is_given_up_with_its_reason(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(turn: Turn) -> Answer:
        raise _Killed

    answering(monkeypatch, StageName.SFT, deadly)
    cycle = opened(wheel)
    for _ in range(3):
        advance(wheel, TENANT, cycle.id, owner="one")
    for _ in range(3):
        with pytest.raises(_Killed):
            advance(wheel, TENANT, cycle.id, owner="one")
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.ENDED
    after, stages = reread(wheel, cycle)
    assert after.state is CycleState.FAILED
    assert "3 workers in a row died" in (after.reason or "")
    assert stages[3].state is StageState.FAILED
    assert {stage.state for stage in stages[4:]} == {StageState.SKIPPED}


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (TrainingFailed("the loss is not a number"), 1),
        (StoreError("disk full"), 3),
        (ZeroDivisionError("a fault of ours"), 3),
    ],
)
def test_what_may_pass_is_tried_again_and_what_will_not_is_not(
    wheel: Wheel,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    attempts: int,
) -> None:
    def failing(turn: Turn) -> Answer:
        raise error

    answering(monkeypatch, StageName.MINE, failing)
    monkeypatch.setattr(cycles, "REST_SECONDS", 0.0)
    cycle = opened(wheel)
    turn_until_ended(wheel, cycle)
    after, stages = reread(wheel, cycle)
    assert after.state is CycleState.FAILED
    assert str(error) in (after.reason or "")
    assert stages[0].attempts == attempts


def test_a_stage_that_failed_is_left_alone_for_a_while(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(turn: Turn) -> Answer:
        raise StoreError("disk full")

    answering(monkeypatch, StageName.MINE, failing)
    cycle = opened(wheel)
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.BUSY
    assert due(wheel) == []
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.BUSY
    assert reread(wheel, cycle)[1][0].attempts == 1
    stop_cycle(wheel, TENANT, cycle.id)  # people do not wait for that
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.ENDED


def test_stopping_ends_a_cycle_also_in_the_middle_of_its_training(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(turn: Turn) -> Answer:
        stop_cycle(wheel, TENANT, turn.cycle.id)
        deadline = threading.Event()
        while not turn.stop():
            assert not deadline.wait(0.05)
        raise TrainingStopped("asked to")

    answering(monkeypatch, StageName.MINE, training)
    cycle = opened(wheel)
    assert advance(wheel, TENANT, cycle.id, owner="one") is Advance.ENDED
    after, stages = reread(wheel, cycle)
    assert after.state is CycleState.STOPPED
    assert {stage.state for stage in stages} == {StageState.SKIPPED}


def test_nobody_joins_a_cycle_that_is_stopping(wheel: Wheel, ran: list[str]) -> None:
    cycle = opened(wheel)
    stop_cycle(wheel, TENANT, cycle.id)
    with pytest.raises(Conflict, match="is stopping"):
        open_cycle(wheel, TENANT, DOMAIN)
    turn_until_ended(wheel, cycle)
    _, new = open_cycle(wheel, TENANT, DOMAIN)
    assert new


def test_a_worker_that_goes_down_gives_its_stage_back(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(turn: Turn) -> Answer:
        assert turn.stop()
        raise TrainingStopped("the worker is going down")

    answering(monkeypatch, StageName.MINE, training)
    cycle = opened(wheel)
    quitting: Callable[[], bool] = lambda: True  # noqa: E731
    assert advance(wheel, TENANT, cycle.id, owner="one", quitting=quitting) is Advance.BUSY
    after, stages = reread(wheel, cycle)
    assert (after.state, stages[0].state, stages[0].attempts) == ("running", "pending", 0)
    assert due(wheel) == [(TENANT, cycle.id)]


def test_a_cycle_with_nothing_to_learn_says_so(
    wheel: Wheel, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, StageName.SFT, lambda turn: Ended("nothing_to_learn", "3 of 16 rows"))
    cycle = opened(wheel)
    turn_until_ended(wheel, cycle)
    after, stages = reread(wheel, cycle)
    assert (after.state, after.outcome) == (CycleState.DONE, "nothing_to_learn")
    assert stages[-1].state is StageState.SKIPPED
    view = cycle_view(after, stages)
    assert (view.decision, view.adapters, view.reason) == (None, {}, "3 of 16 rows")


# ---------------------------------------------------------------- the night


def _someone_ran_something(wheel: Wheel, at: str = "2026-01-01") -> None:
    with psycopg.connect(wheel.url) as connection:
        connection.execute(
            "INSERT INTO runtime.runs (tenant_id, id, kind, domain, domain_digest, task, policy, "
            "sampling, priority, created_at) VALUES ('default', 'run_1', 'production', %s, 'x', "
            "'{}', '{}', '{}', 0, %s)",
            (DOMAIN, at),
        )


def test_the_night_opens_one_cycle_a_date_and_catches_up_once(wheel: Wheel, ran: list[str]) -> None:
    _someone_ran_something(wheel)
    before = dt.datetime(2026, 11, 30, 1, 59, tzinfo=dt.UTC)
    assert open_due(wheel, before) == []
    late = before + dt.timedelta(hours=7)  # nobody was there at two
    (cycle_id,) = open_due(wheel, late)
    assert open_due(wheel, late) == []
    with transaction(wheel.url) as connection:
        cycle = CycleStore(connection).get(TENANT, cycle_id)
    assert (cycle.trigger, cycle.turn, cycle.date) == ("nightly", 0, dt.date(2026, 11, 30))
    turn_until_ended(wheel, cycle)
    assert open_due(wheel, late) == []
    assert len(open_due(wheel, late + dt.timedelta(days=1))) == 1


def test_who_begins_after_the_hour_waits_for_the_next_night(wheel: Wheel) -> None:
    _someone_ran_something(wheel, at="2026-11-30T09:00Z")
    noon = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
    assert open_due(wheel, noon) == []
    assert len(open_due(wheel, noon + dt.timedelta(days=1))) == 1


def test_a_night_with_two_two_o_clocks_has_one_cycle(wheel: Wheel, tmp_path: Path) -> None:
    """Europe/Berlin sets its clocks back at 03:00 on 2026-10-25."""
    _someone_ran_something(wheel)
    text = (RECIPES / f"{DOMAIN}.yaml").read_text()
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace("timezone: UTC", "timezone: Europe/Berlin"))
    assert Recipe.load(path).schedule.timezone == "Europe/Berlin"
    berlin = replace(wheel, recipes={DOMAIN: path})
    first_two = dt.datetime(2026, 10, 25, 0, 5, tzinfo=dt.UTC)
    opened_at = [open_due(berlin, first_two + dt.timedelta(minutes=30 * n)) for n in range(6)]
    assert [len(each) for each in opened_at] == [1, 0, 0, 0, 0, 0]
