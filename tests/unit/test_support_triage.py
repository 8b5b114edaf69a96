"""The built-in domain: its rules, its generator, and that mail without look-ups does not decide."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from connectors.support_desk import QUEUES, SupportDesk
from runtime.checks.baselines import measures
from runtime.checks.protocol import Artefacts
from runtime.checks.registry import condition_of
from runtime.checks.verdict import run_checks
from runtime.domain import Domain, validate_answer, validate_input
from runtime.errors import InputError
from runtime.run import Task, ToolCall, ToolResult, Verdict, VerdictStatus


@pytest.fixture(scope="session")
def tasks(triage: Domain) -> ModuleType:
    return cast(ModuleType, triage.source)


def some(tasks: ModuleType, split: str = "practice", level: str = "full", count: int = 300):
    drawn: list[Task] = tasks.generate(split=split, level=level, count=count, seed=5)
    return drawn


EVERYWHERE = [
    (split, level) for split in ("practice", "gate", "report") for level in ("easy", "full")
]
everywhere = pytest.mark.parametrize(("split", "level"), EVERYWHERE)


def urgent(domain: Domain, task: Task) -> bool:
    """Whether a rule on fraud words or stolen cards applies to the message."""
    names = ("fraud_words_are_high", "stolen_card_is_high")
    rules = [condition_of(check) for check in domain.checks if check.name in names]
    return any(rule and rule.holds({"input": task.input}) for rule in rules)


# ---------------------------------------------------------------- generating


@everywhere
def test_equal_arguments_give_equal_tasks(tasks: ModuleType, split: str, level: str):
    assert some(tasks, split, level, 50) == some(tasks, split, level, 50)
    other = tasks.generate(split=split, level=level, count=50, seed=6)
    assert other != some(tasks, split, level, 50)


@everywhere
def test_inputs_and_gold_fit_the_schemas(triage: Domain, tasks: ModuleType, split: str, level: str):
    for task in some(tasks, split, level):
        assert validate_input(triage, task.input) == task.input
        assert task.expectation
        validate_answer(triage, task.expectation)
        assert len(task.expectation["reason"].split()) <= 5
        assert ("attachment" in task.input) == bool(task.files)


def test_splits_share_no_family_and_no_sentence(tasks: ModuleType):
    families = [{t.family for t in some(tasks, split)} for split in tasks.SPLITS]
    assert all(families)
    assert sum(map(len, families)) == len(set.union(*families))
    said = [
        {s for lines in tasks.phrases_of(split).topics.values() for s in lines}
        for split in tasks.SPLITS
    ]
    assert sum(map(len, said)) == len(set.union(*said))


def test_every_split_says_every_topic_in_several_ways(tasks: ModuleType):
    for split in tasks.SPLITS:
        topics = tasks.phrases_of(split).topics
        assert set(topics) == set(tasks.TOPICS)
        assert min(len(set(lines)) for lines in topics.values()) >= 4


@everywhere
def test_no_slot_is_left_open(tasks: ModuleType, split: str, level: str):
    for task in some(tasks, split, level, 600):
        for text in (task.input["message"], *(f.decode() for f in task.files.values())):
            assert not set(text) & set("{}")
            assert text == " ".join(text.split())


def test_every_queue_occurs_and_the_desk_knows_it(triage: Domain, tasks: ModuleType):
    assert triage.output_schema["properties"]["queue"]["enum"] == list(QUEUES)
    for level in triage.levels:
        seen = Counter(t.expectation["queue"] for t in some(tasks, level=level) if t.expectation)
        assert set(seen) == set(QUEUES)


def test_the_answer_is_what_the_desk_takes(triage: Domain):
    desk = SupportDesk({}, {}, cast(Any, None))
    routing = next(tool for tool in desk.tools() if tool.name == triage.finish)
    properties = triage.output_schema["properties"]
    assert list(routing.parameters["properties"]) == list(properties)
    for name in ("queue", "priority"):
        assert routing.parameters["properties"][name]["enum"] == properties[name]["enum"]


def test_unknown_splits_and_levels_and_impossible_counts_are_refused(tasks: ModuleType):
    with pytest.raises(InputError, match="unknown split 'test'; allowed: practice, gate, report"):
        tasks.generate(split="test", level="full", count=1, seed=0)
    with pytest.raises(InputError, match="unknown level"):
        tasks.generate(split="gate", level="hard", count=1, seed=0)


def test_gold_is_not_in_what_the_agent_is_given(tasks: ModuleType):
    """The id tells split and number only; nothing in the input names queue or priority."""
    for task in some(tasks):
        told = json.dumps({"id": task.id, "input": sorted(task.input), "files": sorted(task.files)})
        assert task.expectation
        assert task.expectation["reason"] not in told


# ---------------------------------------------------------------- the rules


@everywhere
def test_fraud_words_and_stolen_cards_always_mean_high_priority(
    triage: Domain, tasks: ModuleType, split: str, level: str
):
    drawn = some(tasks, split, level, 600)
    hits = [task for task in drawn if urgent(triage, task)]
    assert len(hits) > 5
    stolen = [t for t in drawn if tasks.observable(t) == "card_stolen"]
    assert stolen
    assert [t.input["message"] for t in stolen if t not in hits] == []
    assert {(t.expectation or {})["priority"] for t in hits} == {"high"}


def test_a_closed_account_is_never_sold_to(tasks: ModuleType):
    for topic in tasks.TOPICS:
        answer = tasks.gold(topic, "plus", "closed")
        assert answer["queue"] != "sales"
    assert tasks.gold("loan", "plus", "active")["queue"] == "sales"


def test_the_plan_sets_the_priority_except_for_fraud(tasks: ModuleType):
    for topic in tasks.TOPICS:
        answers = {plan: tasks.gold(topic, plan, "active") for plan in tasks.PLANS}
        if answers["basic"]["queue"] == "fraud":
            assert {a["priority"] for a in answers.values()} == {"high"}
        else:
            assert {p: a["priority"] for p, a in answers.items()} == tasks.PLANS


# ---------------------------------------------------------------- what a message alone can tell


@pytest.mark.parametrize("level", ["easy", "full"])
def test_the_bounds_of_the_issue_hold(tasks: ModuleType, level: str):
    found = measures(cast(Any, tasks), level, tasks.SPLITS, 700, 11)
    print(level, found)
    assert found["distinct_messages"] >= 2_000
    assert found["decided_by_state"] >= 0.30
    assert found["decided_by_attachment"] >= 0.20
    assert found["no_lookup"] <= 0.50
    assert found["keyword"] <= 0.60


def test_the_same_message_has_other_answers_for_other_customers(tasks: ModuleType):
    """What `decided_by` and `observable` claim is checked on the generator's own output."""
    answers: dict[str, set[str]] = {}
    for task in some(tasks, level="easy", count=1_500):
        key = tasks.observable(task)
        answers.setdefault(key, set()).add(json.dumps(task.expectation))
    assert all(len(found) == 1 for key, found in answers.items() if key == "card_stolen")
    assert all(len(found) >= 3 for key, found in answers.items() if key != "card_stolen")


@pytest.mark.parametrize("name", ["run-7", "report-real-1-12", "elsewhere-easy-1-12"])
def test_a_foreign_task_reveals_nothing(tasks: ModuleType, name: str):
    with pytest.raises(InputError, match="was not generated by support_triage"):
        tasks.observable(Task(id=name, domain="support_triage", input={"message": "hi"}))


# ---------------------------------------------------------------- demonstrating and judging


def test_demonstrations_read_look_up_and_route(tasks: ModuleType):
    for task in some(tasks, count=40):
        turns = tasks.demonstrate(task, task.expectation)
        names = [call.name for turn in turns for call in turn]
        reads = ["read_file"] if task.files else []
        assert names == [*reads, "lookup_customer", "route_ticket"]
        assert turns[-1][0].arguments == task.expectation


def test_a_bare_message_can_be_demonstrated(triage: Domain, tasks: ModuleType):
    given = validate_input(triage, {"message": "my card was stolen, help"})
    assert given["customer_id"] == tasks.DEFAULT_CUSTOMER
    task = Task(id="x", domain="support_triage", input={"message": "my card was stolen, help"})
    turns = tasks.demonstrate(task, tasks.gold("card_stolen", "basic", "active"))
    assert turns[0][0].arguments == {"customer_id": tasks.DEFAULT_CUSTOMER}


def judged(
    triage: Domain,
    answer: dict[str, Any] | None,
    *,
    message: str = "hello",
    status: str = "active",
    gold: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
) -> Verdict:
    ticket = {
        "customer_id": "C417",
        "status": "open",
        "queue": None,
        "priority": None,
        "reason": None,
    }
    before = {"customers": {"C417": {"status": status, "plan": "plus"}}, "ticket": ticket}
    after = {**before, "ticket": {**ticket, **({"status": "routed", **answer} if answer else {})}}
    routed = ToolCall(id="0.0", name="route_ticket", arguments=answer or {})
    result = ToolResult(call_id="0.0", name="route_ticket", ok=True, content="")
    artefacts = Artefacts(
        input={"message": message, "customer_id": "C417"},
        answer=answer,
        calls=[(routed, result)] if answer else [],
        states={"support_desk": {**after, **(end or {})}},
        initial_states={"support_desk": before},
    )
    return run_checks(triage.checks, artefacts, gold, reward=triage.reward, verifier_digest="v")


def failed(verdict: Verdict) -> set[str]:
    return {c.name for c in verdict.checks if c.required and c.status == "failed"}


ANSWER = {"queue": "cards", "priority": "normal", "reason": "card not arrived"}


def test_rules_judge_production_without_an_expectation(triage: Domain):
    verdict = judged(triage, ANSWER)
    assert (verdict.status, verdict.basis) == (VerdictStatus.PASS, "rules")


@pytest.mark.parametrize(
    ("change", "situation", "rule"),
    [
        ({}, {"message": "my card was STOLEN, help"}, "stolen_card_is_high"),
        ({}, {"message": "Is this a scam?"}, "fraud_words_are_high"),
        ({"queue": "fraud"}, {}, "fraud_queue_is_high"),
        ({"queue": "sales"}, {"status": "closed"}, "closed_account_is_not_sales"),
        ({"queue": "loans"}, {}, "answer_is_complete"),
        ({"reason": " "}, {}, "answer_is_complete"),
        ({}, {"end": {"customers": {}}}, "only_the_ticket_changed"),
        ({}, {"gold": {**ANSWER, "queue": "cash"}}, "ticket_is_right"),
        ({}, {"gold": {**ANSWER, "priority": "low"}}, "ticket_is_right"),
    ],
)
def test_each_rule_can_fail(
    triage: Domain, change: dict[str, Any], situation: dict[str, Any], rule: str
):
    verdict = judged(triage, {**ANSWER, **change}, **situation)
    assert (verdict.status, verdict.reward) == (VerdictStatus.FAIL, 0.0)
    assert rule in failed(verdict)


@pytest.mark.parametrize(
    ("answer", "situation"),
    [
        ({**ANSWER, "priority": "high"}, {"message": "My card was STOLEN, help"}),
        ({**ANSWER, "queue": "sales"}, {}),
        ({**ANSWER, "queue": "accounts"}, {"status": "closed"}),
        (ANSWER, {"message": "I love scampi", "gold": {**ANSWER, "reason": "other words"}}),
    ],
)
def test_each_rule_can_hold(triage: Domain, answer: dict[str, Any], situation: dict[str, Any]):
    assert judged(triage, answer, **situation).status is VerdictStatus.PASS


def test_guessing_right_without_a_look_up_passes_and_is_shown(triage: Domain):
    verdict = judged(triage, ANSWER, gold=ANSWER)
    assert (verdict.status, verdict.reward) == (VerdictStatus.PASS, 1.0)
    shown = {c.name: c.status for c in verdict.checks}
    assert shown["looked_the_customer_up"] == "failed"


def test_doing_nothing_fails_with_and_without_gold(triage: Domain):
    assert judged(triage, None).status is VerdictStatus.FAIL
    assert "ticket_is_right" in failed(judged(triage, None, gold=ANSWER))


def test_the_prompt_holds_the_rules_in_few_words(triage: Domain):
    assert len(triage.prompt) < 450
    assert (triage.folder / "prompt.md").stat().st_size < 500
    for word in ("basic low", "gold high", "stolen card", "never sales", "human"):
        assert word in triage.prompt


def test_the_phrases_are_part_of_the_version(triage: Domain):
    assert (Path(triage.folder) / "phrases" / "gate.yaml").is_file()


@pytest.mark.parametrize("field", ["customer_id", "attachment"])
def test_names_do_not_end_in_a_new_line(triage: Domain, field: str):
    good = {"message": "hi", "customer_id": "C101", "attachment": "a.txt"}
    assert validate_input(triage, good) == good
    with pytest.raises(InputError, match=f"{field}: .*does not match"):
        validate_input(triage, {**good, field: f"{good[field]}\n"})
