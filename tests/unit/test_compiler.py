"""From a run to a task, and what a task must prove: played by the real loop on fakes."""

import dataclasses
import types
from pathlib import Path
from typing import Any, cast

import pytest

from connectors.support_desk import SupportDeskFactory
from flywheel.lessons.compiler import completed, contradiction, decisive_fields, split_of
from flywheel.lessons.pool import CONTRADICTED, content_digest, pool_task
from flywheel.lessons.proof import examine
from flywheel.records import PoolStatus, PoolTask
from runtime.checks.protocol import CheckDeclaration
from runtime.domain import Domain, TaskSource
from runtime.engine.templates import ChatTemplate
from runtime.run import Task, TenantId, ToolCall
from runtime.run_executor import Workplace
from runtime.sandbox.testing import MemoryBackend

TENANT = TenantId("default")


@pytest.fixture
def workplace(model_template: ChatTemplate, memory_sandboxes: MemoryBackend) -> Workplace:
    return Workplace(memory_sandboxes, {"support_desk": SupportDeskFactory()}, model_template)


@pytest.fixture(scope="session")
def task(triage: Domain) -> Task:
    assert triage.source is not None
    drawn = triage.source.generate(split="practice", level="full", count=30, seed=1)
    return next(task for task in drawn if task.files)


def pooled(domain: Domain, task: Task, **changes: Any) -> PoolTask:
    values: dict[str, Any] = {"origin": "correction", "split": "practice", "by": "Ada"}
    return pool_task(TENANT, domain, task, **{**values, **changes})


def demonstrating(domain: Domain, demonstrate: Any) -> Domain:
    source = types.SimpleNamespace(generate=None, demonstrate=demonstrate)
    return dataclasses.replace(domain, source=cast(TaskSource, source))


# ---------------------------------------------------------------- the task


def test_a_task_is_known_by_what_it_is(triage: Domain, task: Task):
    same = task.model_copy(update={"id": "x", "seed": 99, "split": "gate", "level": "easy"})
    assert content_digest(same) == content_digest(task)
    assert pooled(triage, same).id == pooled(triage, task).id
    for change in (
        {"input": {**task.input, "message": "other"}},
        {"files": {name: b"other" for name in task.files}},
        {"connectors": {}},
        {"expectation": {**(task.expectation or {}), "queue": "other"}},
    ):
        assert content_digest(task.model_copy(update=change)) != content_digest(task)


def test_a_problem_quarantines_from_the_start(triage: Domain, task: Task):
    assert pooled(triage, task).status is PoolStatus.PENDING
    faulty = pooled(triage, task, problem="no")
    assert (faulty.status, faulty.reason) == (PoolStatus.QUARANTINED, "no")


def test_input_and_correction_are_completed_as_the_domain_has_them(triage: Domain, task: Task):
    asked = task.model_copy(update={"input": {"message": "hello"}, "expectation": None})
    right = {"queue": "cards", "priority": "low", "reason": "card"}
    done = completed(triage, asked, right)
    assert (done.input["customer_id"], done.expectation) == ("C100", right)
    wrong = {**right, "queue": "crads"}
    assert completed(triage, asked, wrong) == asked.model_copy(update={"expectation": wrong})


@pytest.mark.parametrize(
    ("came_from", "goes_to"),
    [("production", "practice"), ("practice", "practice"), ("gate", "gate"), ("report", "report")],
)
def test_held_out_splits_stay_held_out(task: Task, came_from: str, goes_to: str):
    assert split_of(task.model_copy(update={"split": came_from})) == goes_to


def test_people_contradict_each_other_where_it_matters_only(triage: Domain):
    decisive = decisive_fields(triage)
    one = {"queue": "cards", "priority": "low", "reason": "card"}
    assert contradiction([("Ada", one)], decisive) is None
    assert contradiction([("Ada", one), ("Ben", {**one, "reason": "so"})], decisive) is None
    said = contradiction([("Ada", one), ("Ben", {**one, "queue": "cash"})], decisive)
    assert said is not None
    assert said.startswith(CONTRADICTED)
    assert 'Ben says {"priority": "low", "queue": "cash"}' in said


# ---------------------------------------------------------------- the proof


async def test_a_good_task_is_admitted_with_its_demonstration(
    triage: Domain, task: Task, workplace: Workplace
):
    found = await examine(pooled(triage, task), triage, workplace)
    assert (found.admitted, found.reason) == (True, None)
    assert found.snapshot == await workplace.backend.store(task.files)
    assert found.demonstration is not None
    said = [workplace.template.decode(call.sampled).split()[0] for call in found.demonstration]
    assert said == ["read_file", "lookup_customer", "route_ticket"]


async def refused(task: PoolTask, domain: Domain, workplace: Workplace) -> str:
    found = await examine(task, domain, workplace)
    assert not found.admitted
    assert not found.host_failed
    assert found.demonstration is None
    assert found.reason
    return found.reason


async def test_a_task_of_another_version_is_refused(
    triage: Domain, task: Task, workplace: Workplace
):
    old = pooled(triage, task).model_copy(update={"domain_digest": "sha256:old"})
    assert "compile it again" in await refused(old, triage, workplace)


async def test_a_task_that_doing_nothing_solves_is_refused(
    triage: Domain, task: Task, workplace: Workplace
):
    lenient = CheckDeclaration(
        name="nothing_changed",
        kind="state.unchanged",
        parameters={"connector": "support_desk", "outside_of": ["ticket"]},
    )
    domain = dataclasses.replace(triage, checks=(lenient,))
    said = await refused(pooled(domain, task), domain, workplace)
    assert said == "doing nothing should fail, but the verdict is pass"


async def test_an_expectation_that_a_rule_forbids_is_refused_by_the_rules_name(
    triage: Domain, task: Task, workplace: Workplace
):
    wrong = {"queue": "fraud", "priority": "low", "reason": "scam"}
    said = await refused(
        pooled(triage, task.model_copy(update={"expectation": wrong})), triage, workplace
    )
    assert said.startswith("the demonstration should pass, but the verdict is fail")
    assert "fraud_queue_is_high" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": {"message": ""}}, "input of domain support_triage: message"),
        (
            {"expectation": {"queue": "cards"}},
            "answer of domain support_triage: priority: 'priority' is",
        ),
    ],
)
async def test_what_the_domain_does_not_take_is_refused(
    triage: Domain, task: Task, workplace: Workplace, change: dict[str, Any], said: str
):
    misfit = pooled(triage, task.model_copy(update=change))
    assert (await refused(misfit, triage, workplace)).startswith(said)


async def test_nobody_knows_the_answer(triage: Domain, task: Task, workplace: Workplace):
    asked = pooled(triage, task.model_copy(update={"expectation": None}))
    assert await refused(asked, triage, workplace) == "nobody said what the right answer is"


async def test_an_authors_mistake_is_a_reason_not_an_exception(
    triage: Domain, task: Task, workplace: Workplace
):
    def broken(task: Task, expectation: Any) -> list[list[ToolCall]]:
        return expectation["nothing"]

    domain = demonstrating(triage, broken)
    said = await refused(pooled(domain, task), domain, workplace)
    assert said == "demonstrating the expectation raised KeyError: 'nothing'"
    bare = dataclasses.replace(triage, source=None)
    assert "no tasks.py" in await refused(pooled(bare, task), bare, workplace)


async def test_a_demonstration_that_stops_short_is_refused(
    triage: Domain, task: Task, workplace: Workplace
):
    domain = demonstrating(triage, lambda task, expectation: [])
    said = await refused(pooled(domain, task), domain, workplace)
    assert said.startswith("the demonstration should pass, but the verdict is fail")


class Broken(MemoryBackend):
    async def store(self, files: Any) -> Any:
        raise OSError(28, "No space left on device", "/snapshots")


async def test_a_full_disk_says_nothing_about_the_task(
    triage: Domain, task: Task, workplace: Workplace, tmp_path: Path
):
    full = dataclasses.replace(workplace, backend=Broken(state_dir=tmp_path))
    found = await examine(pooled(triage, task), triage, full)
    assert (found.admitted, found.host_failed) == (False, True)
    assert "No space left" in str(found.reason)
