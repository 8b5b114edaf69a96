"""What the gate asks: held-out tasks, enough of them, and nothing that was practised."""

import datetime as dt
from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from flywheel.evaluation.suites import gate_tasks
from flywheel.recipe import GateRecipe, GrpoRecipe, Recipe, RolloutRecipe, SftRecipe
from flywheel.records import CycleOptions, PoolTask, PoolTaskId
from runtime.domain import Domain
from runtime.errors import InputError
from runtime.run import Task, TenantId

RECIPE = Recipe(
    domain="support_triage",
    level="easy",
    rollouts=RolloutRecipe(tasks=4),
    sft=SftRecipe(steps=1, learning_rate=1e-3),
    grpo=GrpoRecipe(rounds=0, learning_rate=1e-4),
    gate=GateRecipe(tasks=24, minimum_tasks=16),
)
GOLD: dict[str, Any] = {"queue": "cards", "priority": "low", "reason": "card"}


def pooled(split: Literal["practice", "gate"], number: int, **changes: Any) -> PoolTask:
    given = {"message": f"{split} message {number}", "customer_id": f"C{number + 100}"}
    task = Task(id=f"pool-{split}-{number:03}", domain="support_triage", input=given, split=split,
                expectation=GOLD).model_copy(update=changes)  # fmt: skip
    return PoolTask(
        tenant_id=TenantId("acme"),
        id=PoolTaskId(task.id),
        domain=task.domain,
        domain_digest="sha256:d",
        origin="import",
        split=split,
        task=task,
        content_digest=f"sha256:{task.id}",
        created_at=dt.datetime(2025, 5, 1, tzinfo=dt.UTC),
    )


def held(count: int) -> list[PoolTask]:
    return [pooled("gate", n) for n in range(count)]


def asked(
    domain: Domain,
    held_out: list[PoolTask],
    practised: list[PoolTask] | None = None,
    options: CycleOptions | None = None,
) -> list[Task]:
    options = options or CycleOptions()
    return gate_tasks(domain, RECIPE, options, held_out=held_out, practised=practised or [])


def test_the_pools_held_out_tasks_come_first(triage: Domain):
    assert asked(triage, held(16)[::-1]) == [each.task for each in held(16)]


def test_of_many_some_are_drawn_by_seed_and_in_any_order_the_same(triage: Domain):
    first = asked(triage, held(60))
    assert len(first) == 24
    assert asked(triage, held(60)[::-1]) == first
    assert asked(triage, held(60), options=CycleOptions(seed=1)) != first


def test_too_few_are_replaced_by_generated_ones_of_the_gates_split(triage: Domain):
    tasks = asked(triage, held(15))
    assert len(tasks) == 24
    assert {(t.split, t.level) for t in tasks} == {("gate", "easy")}
    assert asked(triage, []) == tasks
    assert {t.level for t in asked(triage, [], options=CycleOptions(level="full"))} == {"full"}
    assert asked(triage, [], options=CycleOptions(seed=5)) != tasks


def test_what_was_practised_is_not_asked(triage: Domain):
    """The same words are the same message, whoever wrote them and however they are spaced."""
    same: dict[str, Any] = {"message": "GATE  message 3", "customer_id": "C999"}
    practised = [pooled("practice", 0, input=same)]
    tasks = asked(triage, held(17), practised)
    assert len(tasks) == 16
    assert "pool-gate-003" not in {task.id for task in tasks}
    assert {t.split for t in asked(triage, held(16), practised)} == {"gate"}
    assert len(asked(triage, held(16), practised)) == 24  # one short, so generated


def test_generated_tasks_that_were_practised_are_dropped(triage: Domain):
    source = triage.source
    assert source is not None
    leaked = source.generate(split="gate", level="easy", count=3, seed=0)
    practised = [pooled("practice", n, input=t.input, files=t.files) for n, t in enumerate(leaked)]
    tasks = asked(triage, [], practised)
    assert len(tasks) == 21
    assert not {t.id for t in tasks} & {t.id for t in leaked}


def test_one_cover_note_on_two_letters_is_two_tasks(triage: Domain):
    note: dict[str, Any] = {"message": "please read my letter", "attachment": "letter.txt"}
    letters = [
        pooled("gate", n, input=note, files={"letter.txt": f"letter {n}".encode()})
        for n in range(16)
    ]
    practised = [pooled("practice", 0, input=note, files={"letter.txt": b"another letter"})]
    assert len(asked(triage, letters, practised)) == 16
    assert asked(triage, letters, practised)[0].split == "gate"


def test_tasks_without_gold_cannot_be_judged_and_are_left_out(triage: Domain):
    bare = pooled("gate", 99, expectation=None)
    assert bare.task not in asked(triage, [*held(20), bare])


def test_a_practice_task_never_slips_in(triage: Domain):
    mixed = [*held(16), pooled("practice", 1)]
    assert {task.split for task in asked(triage, mixed)} == {"gate"}


def test_a_domain_that_has_nothing_to_ask_asks_nothing(triage: Domain):
    assert asked(replace(triage, source=None), held(15)) == []
    assert asked(replace(triage, splits=("practice",)), []) == []
    assert len(asked(replace(triage, source=None), held(16))) == 16


def test_more_than_the_domain_can_say_is_an_error(triage: Domain):
    many = RECIPE.model_copy(update={"gate": GateRecipe(tasks=100_000)})
    impossible = replace(triage, source=cast(Any, Dry()))
    with pytest.raises(InputError, match="cannot"):
        gate_tasks(impossible, many, CycleOptions(), held_out=[], practised=[])


class Dry:
    """A source that has run out."""

    def generate(self, *, split: str, level: str, count: int, seed: int) -> list[Task]:
        raise InputError(f"{split}/{level} cannot give {count} tasks")
