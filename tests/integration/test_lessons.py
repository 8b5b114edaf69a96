"""From corrected production runs to proved pool tasks, on a real Postgres with real tools."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.lessons.compiler import compile_lessons
from flywheel.lessons.evidence import BEGINNING, Evidence
from flywheel.lessons.importing import store_imported
from flywheel.lessons.mining import Mined, mine
from flywheel.lessons.pool import CONTRADICTED, PoolStore
from flywheel.records import Cycle, PoolStatus, PoolTask, StageName
from flywheel.schemas import ImportedTask
from flywheel.store import SQL_FOLDER, transaction
from flywheel.wheel import Wheel
from runtime.database import queries
from runtime.domain import Domain
from runtime.engine.templates import ChatTemplate
from runtime.errors import InputError, SandboxError
from runtime.run import RunKind, RunState, SnapshotId, Task
from runtime.sandbox.bubblewrap import BubblewrapBackend, find_bwrap
from runtime.sandbox.testing import MemoryBackend
from tests.integration.turning import (
    DOMAIN,
    TENANT,
    correct,
    feedback,
    finish_stage,
    new_cycle,
    production,
    turning,
)


@pytest.fixture
def wheel(
    database_url: str, triage: Domain, model_template: ChatTemplate, tmp_path: Path
) -> Iterator[Wheel]:
    backend = MemoryBackend(state_dir=tmp_path / "state")
    with turning(database_url, triage, model_template, backend, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def tasks(triage: Domain) -> list[Task]:
    """Different tasks, the first of them with an attachment."""
    assert triage.source is not None
    drawn = triage.source.generate(split="practice", level="easy", count=40, seed=9)
    return sorted(drawn, key=lambda task: not task.files)


def asked(task: Task, **changes: Any) -> Task:
    """As production is asked: nobody knows the answer."""
    return task.model_copy(update={"expectation": None, "split": "production", **changes})


def mined(wheel: Wheel, cycle: Cycle) -> Mined:
    with transaction(wheel.url) as connection:
        return mine(connection, cycle)


def compiled(wheel: Wheel, cycle: Cycle) -> dict[str, int]:
    counts = compile_lessons(wheel, cycle, mined(wheel, cycle), lambda done, total: None)
    return {name: count for name, count in counts.items() if count}


def turned(wheel: Wheel) -> dict[str, int]:
    """One more cycle up to its compiled lessons."""
    cycle = new_cycle(wheel)
    counts = compiled(wheel, cycle)
    finish_stage(wheel, cycle, StageName.COMPILE)
    return counts


def pool(wheel: Wheel, status: PoolStatus | None = None) -> list[PoolTask]:
    with transaction(wheel.url) as connection:
        return PoolStore(connection).page(TENANT, status=status, limit=None)


# ---------------------------------------------------------------- the whole way


def test_a_corrected_run_becomes_a_proved_task(wheel: Wheel, tasks: list[Task]) -> None:
    task = tasks[0]
    assert task.files
    run_id = production(wheel, asked(task))
    correct(wheel, run_id, task.expectation)
    cycle = new_cycle(wheel)
    assert compiled(wheel, cycle) == {"compiled": 1, "admitted": 1}
    with transaction(wheel.url) as connection:
        [made] = PoolStore(connection).admitted(TENANT, DOMAIN, "practice")
    assert made.task == task.model_copy(update={"id": made.id, "split": "practice"}), (
        "input, files, connectors, seed and level are frozen; the correction is the expectation"
    )
    assert (made.origin, made.source_run, made.source_by) == ("correction", run_id, "Ada")
    assert (made.domain_digest, made.cycle_id) == (wheel.domains[DOMAIN].digest, cycle.id)
    stored = wheel.bridge.call(wheel.workplace.backend.store(task.files))
    assert made.snapshot == stored
    assert made.demonstration is not None
    read, _, route = made.demonstration
    template = wheel.workplace.template
    assert template.decode(read.sampled).startswith("read_file")
    assert str(task.expectation and task.expectation["queue"]) in template.decode(route.sampled)
    assert all(not call.logprobs for call in made.demonstration)


def test_what_a_cycle_compiled_the_next_one_leaves_alone(wheel: Wheel, tasks: list[Task]) -> None:
    correct(wheel, production(wheel, asked(tasks[1])), tasks[1].expectation)
    production(wheel, asked(tasks[2]))
    assert turned(wheel) == {"without_correction": 1, "compiled": 1, "admitted": 1}
    assert turned(wheel) == {}
    late = production(wheel, asked(tasks[3]))
    correct(wheel, late, tasks[3].expectation)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}


def test_a_cycle_that_died_before_compiling_loses_nothing(wheel: Wheel, tasks: list[Task]) -> None:
    correct(wheel, production(wheel, asked(tasks[1])), tasks[1].expectation)
    assert len(mined(wheel, new_cycle(wheel)).candidates) == 1
    assert turned(wheel) == {"compiled": 1, "admitted": 1}


def test_compiling_again_after_a_crash_changes_nothing(wheel: Wheel, tasks: list[Task]) -> None:
    for task in tasks[1:4]:
        correct(wheel, production(wheel, asked(task)), task.expectation)
    cycle = new_cycle(wheel)
    assert compiled(wheel, cycle) == {"compiled": 3, "admitted": 3}
    before = pool(wheel)
    assert compiled(wheel, cycle) == {"known": 3}
    assert pool(wheel) == before


def test_progress_is_told_up_to_the_last_task(wheel: Wheel, tasks: list[Task]) -> None:
    for task in tasks[:10]:
        correct(wheel, production(wheel, asked(task)), task.expectation)
    heard: list[tuple[int, int]] = []
    cycle = new_cycle(wheel)
    compile_lessons(wheel, cycle, mined(wheel, cycle), lambda *at: heard.append(at))
    assert heard == [(8, 10), (10, 10)]


# ---------------------------------------------------------------- what is mined


def test_only_production_of_the_domain_and_tenant_is_mined(wheel: Wheel, tasks: list[Task]) -> None:
    for state in (RunState.ACCEPTED, RunState.ERROR, RunState.REJECTED, RunState.TIMED_OUT):
        production(wheel, asked(tasks[1]), state=state)
    practised = production(wheel, asked(tasks[2]), kind=RunKind.ROLLOUT)
    correct(wheel, practised, tasks[2].expectation)
    liked = production(wheel, asked(tasks[3]), state=RunState.ACCEPTED)
    feedback(wheel, liked, rating="up")
    disliked = production(wheel, asked(tasks[4]), state=RunState.ACCEPTED)
    feedback(wheel, disliked, rating="down")
    with transaction(wheel.url) as connection:
        connection.execute("INSERT INTO runtime.tenants (tenant_id, name) VALUES ('b', 'B')")
    cycle = new_cycle(wheel)
    found = mined(wheel, cycle)
    assert found.counts == {"rejected": 1, "timed_out": 1, "down_rated": 1, "merged": 0}
    assert {each.run_id for each in found.candidates if each.seq} == {disliked}
    with transaction(wheel.url) as connection:
        elsewhere = cycle.model_copy(update={"tenant_id": "b"})
        assert mine(connection, elsewhere).candidates == []
        assert mine(connection, cycle.model_copy(update={"domain": "x"})).candidates == []


def test_near_duplicates_are_one_lesson(wheel: Wheel, tasks: list[Task]) -> None:
    task = tasks[-1]
    message = str(task.input["message"])
    for text in (message, f"  {message.upper()} ", message):
        run_id = production(wheel, asked(task, input={**task.input, "message": text}))
        correct(wheel, run_id, task.expectation)
    other = production(wheel, asked(task))
    correct(wheel, other, {**(task.expectation or {}), "reason": "something else"})
    assert turned(wheel) == {"merged": 2, "compiled": 2, "admitted": 2}


# ---------------------------------------------------------------- what people say


def test_a_later_correction_of_the_same_run_replaces_the_earlier(
    wheel: Wheel, tasks: list[Task]
) -> None:
    right = tasks[1].expectation or {}
    wrong = {**right, "queue": next(q for q in ("cards", "cash") if q != right["queue"])}
    run_id = production(wheel, asked(tasks[1]))
    correct(wheel, run_id, wrong)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}
    correct(wheel, run_id, right)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}
    [kept] = pool(wheel, PoolStatus.ADMITTED)
    assert kept.task.expectation == right
    [retired] = pool(wheel, PoolStatus.RETIRED)
    assert retired.task.expectation == wrong


def test_people_who_contradict_each_other_teach_nothing_until_they_agree(
    wheel: Wheel, tasks: list[Task]
) -> None:
    right = tasks[1].expectation or {}
    wrong = {**right, "queue": next(q for q in ("cards", "cash") if q != right["queue"])}
    run_id = production(wheel, asked(tasks[1]))
    correct(wheel, run_id, right)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}
    correct(wheel, run_id, wrong, by="Ben")
    assert turned(wheel) == {"contradicted": 1}
    doubtful = pool(wheel, PoolStatus.QUARANTINED)
    assert len(doubtful) == 2, "also what was admitted before"
    for task in doubtful:
        assert str(task.reason).startswith(CONTRADICTED)
        assert "Ada" in str(task.reason)
        assert "Ben" in str(task.reason)
    correct(wheel, run_id, {**right, "reason": "in other words"}, by="Ben")
    assert turned(wheel) == {"compiled": 1, "admitted": 1}


def test_a_correction_that_the_rules_refuse_is_quarantined_with_its_reason(
    wheel: Wheel, tasks: list[Task]
) -> None:
    task = asked(tasks[-1], input={**tasks[-1].input, "message": "I was scammed, help"})
    run_id = production(wheel, task)
    correct(wheel, run_id, {"queue": "fraud", "priority": "low", "reason": "scam"})
    incomplete = production(wheel, asked(tasks[2]))
    correct(wheel, incomplete, {"queue": "cards"})
    assert turned(wheel) == {"compiled": 2, "quarantined": 2}
    reasons = sorted(str(task.reason) for task in pool(wheel, PoolStatus.QUARANTINED))
    assert "priority" in reasons[0]
    assert reasons[0].startswith("answer of domain support_triage")
    assert "demonstration should pass, but the verdict is fail; fraud_words_are_high" in reasons[1]


def test_held_out_work_is_never_practised_on(wheel: Wheel, tasks: list[Task]) -> None:
    run_id = production(wheel, asked(tasks[1], split="report"))
    correct(wheel, run_id, tasks[1].expectation)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}
    with transaction(wheel.url) as connection:
        store = PoolStore(connection)
        assert store.admitted(TENANT, DOMAIN, "practice") == []
        assert len(store.admitted(TENANT, DOMAIN, "report")) == 1


def test_a_run_that_was_deleted_since_is_counted(wheel: Wheel, tasks: list[Task]) -> None:
    run_id = production(wheel, asked(tasks[1]))
    correct(wheel, run_id, tasks[1].expectation)
    cycle = new_cycle(wheel)
    found = mined(wheel, cycle)
    with transaction(wheel.url) as connection:
        connection.execute("DELETE FROM runtime.runs WHERE id = %s", (run_id,))
    counts = compile_lessons(wheel, cycle, found, lambda done, total: None)
    assert {name for name, count in counts.items() if count} == {"gone"}


# ---------------------------------------------------------------- what is at fault


class FullDisk(MemoryBackend):
    async def store(self, files: Any) -> SnapshotId:
        raise SandboxError("no room")


def test_a_failing_host_leaves_the_task_pending(
    wheel: Wheel, tasks: list[Task], tmp_path: Path
) -> None:
    correct(wheel, production(wheel, asked(tasks[1])), tasks[1].expectation)
    broken = dataclasses.replace(
        wheel, workplace=dataclasses.replace(wheel.workplace, backend=FullDisk(state_dir=tmp_path))
    )
    cycle = new_cycle(wheel)
    counts = compile_lessons(broken, cycle, mined(wheel, cycle), lambda done, total: None)
    assert (counts["unchecked"], counts["quarantined"]) == (1, 0)
    finish_stage(wheel, cycle, StageName.COMPILE)
    assert turned(wheel) == {"admitted": 1}


def test_a_connector_that_cannot_open_is_the_tasks_fault(wheel: Wheel, tasks: list[Task]) -> None:
    task = asked(tasks[1], connectors={"support_desk": {"tickets": "many"}})
    correct(wheel, production(wheel, task), tasks[1].expectation)
    assert turned(wheel) == {"compiled": 1, "quarantined": 1}
    [faulty] = pool(wheel)
    assert "support_desk: initial state: tickets" in str(faulty.reason)


def test_another_version_of_the_domain_proves_its_tasks_anew(
    wheel: Wheel, tasks: list[Task]
) -> None:
    correct(wheel, production(wheel, asked(tasks[1])), tasks[1].expectation)
    assert turned(wheel) == {"compiled": 1, "admitted": 1}
    newer = dataclasses.replace(wheel.domains[DOMAIN], digest="sha256:newer")
    upgraded = dataclasses.replace(wheel, domains={DOMAIN: newer})
    assert turned(upgraded) == {"reopened": 1, "admitted": 1}
    assert [task.domain_digest for task in pool(wheel)] == ["sha256:newer"]
    mute = dataclasses.replace(newer, digest="sha256:mute", source=None)
    assert turned(dataclasses.replace(wheel, domains={DOMAIN: mute})) == {
        "reopened": 1,
        "quarantined": 1,
    }
    assert turned(upgraded) == {"reopened": 1, "admitted": 1}, "the domain was mended"


# ---------------------------------------------------------------- the pool


def imported(task: Task, row: int | None = None, **changes: Any) -> ImportedTask:
    values: dict[str, Any] = {
        "input": task.input,
        "expectation": task.expectation,
        "connectors": task.connectors,
        "seed": task.seed,
        "row": row,
    }
    whole = ImportedTask.model_construct(**values)
    return whole.model_copy(update={"files": task.files, **changes})


def test_imports_are_stored_whole_or_not_at_all_and_proved_by_the_next_cycle(
    wheel: Wheel, tasks: list[Task]
) -> None:
    domain = wheel.domains[DOMAIN]
    good = [imported(task) for task in tasks[:5]]
    wrong = [imported(tasks[6], 7, expectation={"queue": "crads"}), imported(tasks[7], 9, input={})]
    with (
        pytest.raises(InputError, match=r"row 7: answer of domain.*row 9: input of domain") as told,
        transaction(wheel.url) as connection,
    ):
        store_imported(connection, TENANT, domain, "gate", [*good, *wrong], "Ada")
    assert [error["field"] for error in told.value.detail["errors"]] == ["row 7", "row 9"]
    assert pool(wheel) == []
    for stored, known in ((5, 0), (0, 5)):
        with transaction(wheel.url) as connection:
            taken = store_imported(connection, TENANT, domain, "gate", good, "Ada")
        assert (taken.stored, taken.known) == (stored, known)
    assert turned(wheel) == {"admitted": 5}
    assert {task.split for task in pool(wheel)} == {"gate"}


@pytest.mark.parametrize("text", ["a\x00b", "half \ud83d a pair"])
def test_text_that_the_database_cannot_hold_is_refused(
    wheel: Wheel, tasks: list[Task], text: str
) -> None:
    task = imported(tasks[-1], 3, input={**tasks[-1].input, "message": text})
    with (
        pytest.raises(InputError, match="row 3: a NUL or half a surrogate pair"),
        transaction(wheel.url) as connection,
    ):
        store_imported(connection, TENANT, wheel.domains[DOMAIN], "practice", [task], "Ada")


def test_pages_counts_and_what_is_fixed(wheel: Wheel, tasks: list[Task]) -> None:
    some = [imported(task) for task in tasks[:5]]
    with transaction(wheel.url) as connection:
        store_imported(connection, TENANT, wheel.domains[DOMAIN], "practice", some, "Ada")
        store = PoolStore(connection)
        first = store.page(TENANT, domain=DOMAIN, limit=2)
        rest = store.page(TENANT, before=(first[-1].created_at, first[-1].id), limit=10)
        ids = [task.id for task in [*first, *rest]]
        assert len(set(ids)) == 5
        assert store.counts(TENANT, DOMAIN)["pending"] == 5
        assert store.counts(TENANT, "nowhere")["pending"] == 0
        assert store.mark_fixed(TENANT, ids[:2], "adapter-1") == 2
        assert store.mark_fixed(TENANT, ids[:3], "adapter-2") == 1, "what was fixed stays fixed"
        assert [task.fixed_by for task in store.by_ids(TENANT, ids[:1])] == ["adapter-1"]
        stored = [task.task.files for task in store.by_ids(TENANT, ids)]
        assert sorted(map(sorted, stored)) == sorted(sorted(task.files) for task in tasks[:5])


# ---------------------------------------------------------------- scale


def test_mining_reads_feedback_through_its_index(wheel: Wheel, tasks: list[Task]) -> None:
    correct(wheel, production(wheel, asked(tasks[1])), tasks[1].expectation)
    cycle = new_cycle(wheel)
    query = queries(SQL_FOLDER / Evidence.FILE)["new_feedback"]
    keys = {"tenant_id": TENANT, "domain": DOMAIN, "cycle_id": cycle.id, "since": BEGINNING}
    with transaction(wheel.url) as connection:
        connection.execute("SET LOCAL enable_seqscan = off")
        explained = connection.execute(f"EXPLAIN (FORMAT JSON) {query}".encode(), keys).fetchone()
    assert "events_feedback" in json.dumps(explained)


def test_corrections_are_proved_in_the_real_sandbox(
    database_url: str, triage: Domain, model_template: ChatTemplate, tmp_path: Path
) -> None:
    backend = BubblewrapBackend(state_dir=tmp_path / "state", bwrap=find_bwrap(None))
    assert triage.source is not None
    drawn = triage.source.generate(split="practice", level="full", count=24, seed=3)
    with turning(database_url, triage, model_template, backend, tmp_path) as wheel:
        for task in drawn:
            correct(wheel, production(wheel, asked(task)), task.expectation)
        assert turned(wheel) == {"compiled": 24, "admitted": 24}
