"""Runs that a cycle asks for: requested once, replaced where infrastructure failed, counted."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from flywheel import rollouts
from flywheel.records import Cycle, Sample, Stage, StageName
from flywheel.rollouts import (
    MAX_REPLACEMENTS,
    Standing,
    Wanted,
    cancel_open,
    model_calls,
    replace_failed,
    request,
    samples,
    standing,
)
from flywheel.store import transaction
from flywheel.wheel import Wheel
from runtime.database import Doorbell
from runtime.domain import Domain
from runtime.engine.protocol import CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import StoreError
from runtime.run import RunId, RunKind, RunState, Task
from runtime.run_executor import RunExecutor
from runtime.run_store import RunStore
from runtime.runner import Runner
from runtime.sandbox.testing import MemoryBackend
from runtime.testing import ScriptedEngine
from tests.integration.turning import (
    BASE,
    DOMAIN,
    TENANT,
    new_cycle,
    play_runner,
    stage_of,
    turning,
)

ACCEPTED, REJECTED, ERROR = RunState.ACCEPTED, RunState.REJECTED, RunState.ERROR


@pytest.fixture
def wheel(
    database_url: str, triage: Domain, model_template: ChatTemplate, tmp_path: Path
) -> Iterator[Wheel]:
    backend = MemoryBackend(state_dir=tmp_path / "state")
    with turning(database_url, triage, model_template, backend, tmp_path) as opened:
        yield opened


@pytest.fixture
def cycle(wheel: Wheel) -> Cycle:
    return new_cycle(wheel)


@pytest.fixture
def stage(wheel: Wheel, cycle: Cycle) -> Stage:
    return stage_of(wheel, cycle, StageName.SAMPLE)


@pytest.fixture(scope="session")
def tasks(triage: Domain) -> list[Task]:
    assert triage.source is not None
    return triage.source.generate(split="practice", level="full", count=12, seed=2)


def wishes(tasks: list[Task], members: int = 2, arm: str = "group") -> list[Wanted]:
    return [
        Wanted(arm=arm, task=task, member=member, policy=BASE, seed=100 + member)
        for task in tasks
        for member in range(members)
    ]


def runs(wheel: Wheel) -> list[dict[str, object]]:
    with transaction(wheel.url) as connection:
        return connection.execute(
            "SELECT id, kind, state, priority, sampling, task, expectation, domain_digest "
            "FROM runtime.runs JOIN runtime.run_private AS private ON private.run_id = id "
            "ORDER BY id"
        ).fetchall()


def stands(wheel: Wheel, cycle: Cycle, stage: Stage) -> Standing:
    with transaction(wheel.url) as connection:
        return standing(connection, cycle, stage)


def found(wheel: Wheel, cycle: Cycle, stage: Stage) -> dict[str, list[Sample]]:
    with transaction(wheel.url) as connection:
        return samples(connection, cycle, stage)


# ---------------------------------------------------------------- requesting


def test_a_request_is_a_queued_run_with_all_that_judging_it_takes(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    attached = next(task for task in tasks if task.files)
    request(wheel, cycle, stage, RunKind.ROLLOUT, wishes([attached], members=1))
    [run] = runs(wheel)
    assert (run["kind"], run["state"], run["priority"]) == ("rollout", "queued", 20)
    assert run["sampling"] == {"temperature": 1.0, "top_p": 1.0, "seed": 100}
    assert run["expectation"] == attached.expectation
    assert run["domain_digest"] == wheel.domains[DOMAIN].digest

    async def whole() -> Task:
        async with wheel.database.transaction() as connection:
            store = RunStore(connection)
            return (await store.get(TENANT, RunId(str(run["id"])), private=True)).task

    assert wheel.bridge.call(whole()) == attached


def test_asking_again_makes_no_second_run(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    wanted = wishes(tasks)
    request(wheel, cycle, stage, RunKind.ROLLOUT, wanted[:10])
    request(wheel, cycle, stage, RunKind.ROLLOUT, wanted)
    request(wheel, cycle, stage, RunKind.ROLLOUT, wanted)
    assert len(runs(wheel)) == len(wanted)
    assert stands(wheel, cycle, stage) == Standing(total=len(wanted), ended=0, infra=0)


def test_a_request_that_broke_off_leaves_no_run_without_its_link(
    wheel: Wheel,
    cycle: Cycle,
    stage: Stage,
    tasks: list[Task],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollouts, "AT_ONCE", 4)
    wanted = wishes(tasks, members=1)
    with psycopg.connect(wheel.url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'cut' USING ERRCODE = 'connection_failure'; END $$"
        )
        connection.execute(
            "CREATE TRIGGER cut BEFORE INSERT ON flywheel.samples FOR EACH ROW "
            f"WHEN (NEW.task_id = '{tasks[6].id}') EXECUTE FUNCTION refuse()"  # type: ignore[arg-type]
        )
        with pytest.raises(StoreError):
            request(wheel, cycle, stage, RunKind.ROLLOUT, wanted)
        assert len(runs(wheel)) == 4 == stands(wheel, cycle, stage).total
        connection.execute("DROP TRIGGER cut ON flywheel.samples")
    request(wheel, cycle, stage, RunKind.ROLLOUT, wanted)
    assert len(runs(wheel)) == len(wanted) == stands(wheel, cycle, stage).total


# ---------------------------------------------------------------- infrastructure


def test_what_infrastructure_took_is_run_again_and_counts_once(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    request(wheel, cycle, stage, RunKind.EVALUATION, wishes(tasks[:2]))
    play_runner(wheel, [ACCEPTED, ERROR, REJECTED, ACCEPTED])
    assert stands(wheel, cycle, stage) == Standing(total=4, ended=4, infra=1)
    assert replace_failed(wheel, cycle, stage) == 1
    assert replace_failed(wheel, cycle, stage) == 0, "its replacement has not ended"
    assert stands(wheel, cycle, stage) == Standing(total=4, ended=3, infra=0)
    before, after = runs(wheel)[1], runs(wheel)[4]
    assert after["id"] != before["id"]
    same = ("kind", "priority", "sampling", "task", "expectation", "domain_digest")
    assert [after[name] for name in same] == [before[name] for name in same]
    play_runner(wheel, [ACCEPTED])
    members = found(wheel, cycle, stage)["group"]
    assert [(each.task_id, each.member) for each in members] == sorted(
        (task.id, member) for task in tasks[:2] for member in range(2)
    )
    assert all(each.valid for each in members)
    assert sum(each.passed for each in members) == 3


def test_a_member_is_replaced_twice_at_most_and_is_invalid_then(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    request(wheel, cycle, stage, RunKind.ROLLOUT, wishes(tasks[:1], members=1))
    for _ in range(MAX_REPLACEMENTS):
        play_runner(wheel, [ERROR])
        assert replace_failed(wheel, cycle, stage) == 1
    play_runner(wheel, [ERROR])
    assert replace_failed(wheel, cycle, stage) == 0
    assert stands(wheel, cycle, stage) == Standing(total=1, ended=1, infra=1)
    [sample] = found(wheel, cycle, stage)["group"]
    assert (sample.valid, sample.passed, sample.reward) == (False, False, None)
    assert sample.run_id == runs(wheel)[-1]["id"]
    assert len(runs(wheel)) == 1 + MAX_REPLACEMENTS


# ---------------------------------------------------------------- samples


def test_samples_say_what_each_arm_did_and_what_it_took(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    arms = [*wishes(tasks[:1], arm="incumbent"), *wishes(tasks[:1], arm="candidate")]
    request(wheel, cycle, stage, RunKind.EVALUATION, arms)
    play_runner(wheel, [REJECTED, RunState.TIMED_OUT, ACCEPTED, REJECTED])
    by_arm = found(wheel, cycle, stage)
    assert {arm: [s.passed for s in each] for arm, each in by_arm.items()} == {
        "incumbent": [False, False],
        "candidate": [True, False],
    }
    first = by_arm["candidate"][0]
    assert (first.policy_id, first.valid, first.reward) == (BASE.id, True, 1.0)
    used = (first.prompt_tokens, first.sampled_tokens, first.tool_calls, first.seconds)
    assert used == (300, 30, 2, 0.5)
    other = stage.model_copy(update={"seq": stage.seq + 1})
    assert found(wheel, cycle, other) == {}
    assert stands(wheel, cycle, other) == Standing(total=0, ended=0, infra=0)


def test_real_runs_come_back_with_their_tokens(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task], model_template: ChatTemplate
) -> None:
    """Through the real runner and loop; only the model's words are written down."""

    def reply(asked: CompletionRequest) -> str:
        return "route_ticket queue=cards priority=low reason=card"

    request(wheel, cycle, stage, RunKind.ROLLOUT, wishes(tasks[:3]))
    engine = ScriptedEngine(reply, model_template)

    async def run() -> None:
        executor = RunExecutor(wheel.workplace, engine)
        async with Doorbell(wheel.url) as bell:
            runner = Runner(
                wheel.database, bell, executor, wheel.domains, concurrency=4, lease_seconds=15
            )
            stop = asyncio.Event()
            serving = asyncio.create_task(runner.run(stop))
            async with asyncio.timeout(60), bell.ear("noria_events") as rung:
                while True:
                    rung.clear()
                    now = await asyncio.to_thread(stands, wheel, cycle, stage)
                    if now.ended == now.total:
                        break
                    await asyncio.wait_for(rung.wait(), 30)
            stop.set()
            await serving

    wheel.bridge.call(run())
    members = found(wheel, cycle, stage)["group"]
    assert [each.valid for each in members] == [True] * 6
    with transaction(wheel.url) as connection:
        calls = model_calls(connection, TENANT, [*(m.run_id for m in members), RunId("run_x")])
    assert calls.pop(RunId("run_x")) == []
    for turns in calls.values():
        assert [call.turn for call in turns] == list(range(len(turns)))
        assert model_template.decode(turns[0].sampled).startswith("route_ticket")
        assert len(turns[0].logprobs) == len(turns[0].sampled) > 0


# ---------------------------------------------------------------- calling it off


def test_a_stopped_cycle_takes_its_open_runs_with_it(
    wheel: Wheel, cycle: Cycle, stage: Stage, tasks: list[Task]
) -> None:
    request(wheel, cycle, stage, RunKind.ROLLOUT, wishes(tasks[:3]))
    play_runner(wheel, [ACCEPTED, REJECTED])
    assert cancel_open(wheel, cycle) == 4
    assert sorted(str(run["state"]) for run in runs(wheel)) == [
        "accepted",
        *["cancelled"] * 4,
        "rejected",
    ]
    assert cancel_open(wheel, cycle) == 0
