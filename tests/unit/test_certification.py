"""Certification: the built-in domain is certified, and domains that cannot be trusted are not."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.support_desk import SupportDeskFactory
from runtime.checks.baselines import keyword, no_lookup
from runtime.checks.certification import certify, random_value
from runtime.checks.protocol import Artefacts
from runtime.checks.schema import violations
from runtime.checks.verdict import run_checks, verifier_digest
from runtime.domain import Domain
from runtime.errors import CheckError, ToolError
from runtime.journal import ConnectorStates
from runtime.run import Task, ToolCall, ToolResult, Verdict
from runtime.tools import ToolContext


@dataclasses.dataclass(frozen=True)
class Played:
    artefacts: Artefacts | None
    verdict: Verdict | None


class DeskPlayer:
    """A small player for tests: the real desk and checks, files from memory, no sandbox."""

    def __init__(self, gold: bool = True) -> None:
        self._gold = gold

    async def __call__(self, domain: Domain, task: Task, turns: list[list[ToolCall]]) -> Played:
        desk = await SupportDeskFactory().open(
            mode="simulate",
            seed=task.seed,
            initial=task.connectors["support_desk"],
            state=ConnectorStates({}).of("support_desk"),
        )
        before = desk.snapshot()
        answer: dict[str, Any] | None = None
        calls: list[tuple[ToolCall, ToolResult | None]] = []
        for call in (call for turn in turns for call in turn):
            result = await self._call(desk, task, call)
            calls.append((call, result))
            if call.name == domain.finish and result.ok:
                answer = result.data
        artefacts = Artefacts(
            input=task.input,
            answer=answer,
            calls=calls,
            files=task.files,
            initial_files=task.files,
            states={"support_desk": desk.snapshot()},
            initial_states={"support_desk": before},
        )
        verdict = run_checks(
            domain.checks,
            artefacts,
            task.expectation if self._gold else None,
            reward=domain.reward,
            verifier_digest=verifier_digest(domain),
        )
        return Played(artefacts, verdict)

    async def _call(self, desk: Any, task: Task, call: ToolCall) -> ToolResult:
        if call.name == "read_file":
            text = task.files[call.arguments["path"]].decode()
            return ToolResult(call_id=call.id, name=call.name, ok=True, content=text)
        tool = next(tool for tool in desk.tools() if tool.name == call.name)
        try:
            context = ToolContext(run_id=task.id, key=f"{task.id}/{call.id}")
            output = await tool(context, tool.validate(call.arguments))
        except ToolError as error:
            return ToolResult(call_id=call.id, name=call.name, ok=False, content=str(error))
        return ToolResult(
            call_id=call.id, name=call.name, ok=True, content=output.content, data=output.data
        )


async def test_the_built_in_domain_is_certified(triage: Domain):
    result = await certify(triage, attempt=DeskPlayer(), sample=24, population=700)
    assert result.failures == []
    assert result.certified
    assert (result.tasks, result.gold.rate) == (24, 1.0)
    assert result.empty.passed == result.do_nothing.passed == result.random.passed == 0
    assert result.gradings_agree
    assert result.no_lookup is not None
    assert result.no_lookup <= 0.5
    assert set(result.levels) == {"easy", "full"}
    assert result.model_dump(mode="json")["random"] == {"passed": 0, "n": 24}


async def test_certifying_twice_says_the_same(triage: Domain):
    options: dict[str, Any] = {"sample": 6, "population": 50, "levels": ["easy"]}
    first = await certify(triage, attempt=DeskPlayer(), **options)
    assert first == await certify(triage, attempt=DeskPlayer(), **options)


def without(domain: Domain, *names: str) -> Domain:
    kept = tuple(check for check in domain.checks if check.name not in names)
    return dataclasses.replace(domain, checks=kept)


async def test_checks_that_random_answers_satisfy_are_not_certified(triage: Domain):
    lenient = without(triage, "ticket_is_right")
    result = await certify(lenient, attempt=DeskPlayer(), sample=6, population=50)
    assert not result.certified
    assert result.random.passed > 0
    assert any("random should fail but the verdict is pass" in each for each in result.failures)


async def test_checks_that_doing_nothing_satisfies_are_not_certified(triage: Domain):
    lenient = without(triage, "ticket_is_right", "answer_is_complete", "routed_once")
    result = await certify(lenient, attempt=DeskPlayer(), sample=6, population=50)
    assert result.do_nothing.passed > 0
    assert any(
        "-0: do_nothing should fail but the verdict is pass" in each for each in result.failures
    )


async def test_gold_that_fails_names_the_task_and_the_check(triage: Domain):
    strict = triage.checks[1].model_copy(
        update={"when": None, "parameters": {"field": "answer.queue", "value": "nowhere"}}
    )
    domain = dataclasses.replace(triage, checks=(*triage.checks[:1], strict))
    result = await certify(domain, attempt=DeskPlayer(), sample=6, population=50)
    assert result.gold.passed == 0
    assert "practice-easy-0-0: gold should pass" in result.failures[0]
    assert "fraud_words_are_high (answer.queue should be 'nowhere'" in result.failures[0]


async def test_gradings_that_differ_are_not_certified(triage: Domain):
    result = await certify(triage, attempt=DeskPlayer(gold=False), sample=6, population=50)
    assert not result.gradings_agree
    assert any("3 gradings of gold do not agree" in each for each in result.failures)


async def test_broken_bounds_are_named(triage: Domain):
    strict = SimpleNamespace(
        **{
            **vars(triage.source),
            "at_most": {"no_lookup": 0.1},
            "at_least": {"decided_by_attachment": 0.9},
        }
    )
    domain = dataclasses.replace(triage, source=strict)
    result = await certify(domain, attempt=DeskPlayer(), sample=6, population=60)
    assert not result.certified
    assert any("level full: no_lookup is 0." in each for each in result.failures)
    assert any("decided_by_attachment is 0." in each for each in result.failures)


async def test_a_domain_without_tasks_is_not_certified(triage: Domain):
    bare = dataclasses.replace(triage, source=None)
    result = await certify(bare, attempt=DeskPlayer())
    assert not result.certified
    assert "nothing to certify on" in result.failures[0]


async def test_an_attempt_without_a_verdict_is_no_result(triage: Domain):
    async def broken(domain: Domain, task: Task, turns: Any) -> Played:
        return Played(None, None)

    with pytest.raises(CheckError, match="practice-easy-0-0: the gold attempt ended without"):
        await certify(triage, attempt=broken, sample=6)


def test_random_values_fit_their_schema():
    import random

    schema: dict[str, Any] = {
        "type": "object",
        "required": ["a", "b", "c", "d", "e", "f"],
        "properties": {
            "a": {"enum": ["x", "y"]},
            "b": {"type": "integer", "minimum": 3, "maximum": 4},
            "c": {"type": "array", "minItems": 2, "items": {"type": "string", "minLength": 20}},
            "d": {"type": "boolean"},
            "e": {"const": None},
            "f": {"type": "number"},
        },
    }
    dice = random.Random(0)
    assert [violations(schema, random_value(schema, dice)) for _ in range(50)] == [[]] * 50


def told(words: str, label: str) -> Task:
    return Task(id=words, domain="d", input={"message": words}, expectation={"queue": label})


def test_the_baselines_on_a_case_worked_by_hand():
    class Source:
        decisive = ("queue",)

        def observable(self, task: Task) -> str:
            return task.input["message"][0]

    tasks = [told("a1", "x"), told("a2", "x"), told("a3", "y"), told("b1", "y")]
    assert no_lookup(Source(), tasks) == 0.75  # type: ignore[arg-type]
    train = [told("red fish", "x"), told("blue bird", "y")]
    test = [told("red", "x"), told("bird", "y"), told("fish", "y")]
    assert keyword(train, test, ("queue",)) == pytest.approx(2 / 3)
