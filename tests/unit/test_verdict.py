"""From checks to a verdict: pass, fail, not judged; rewards; canonical form."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checks import registry
from runtime.checks.protocol import Artefacts, CheckDeclaration, CheckOutcome, CheckParameters
from runtime.checks.verdict import evidence_hash, run_checks, verifier_digest
from runtime.run import CheckStatus, Json, ToolCall, ToolResult, Verdict, VerdictStatus


class Scored(CheckParameters):
    """A check for tests: answers what it is told to."""

    kind: ClassVar[str] = "test.scored"
    passed: bool
    score: float = 0.0

    def judge(self, artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> CheckOutcome:
        return CheckOutcome(self.passed, self.score, "told so")


class Broken(CheckParameters):
    """A check for tests: cannot judge."""

    kind: ClassVar[str] = "test.broken"

    def judge(self, artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> CheckOutcome:
        raise ZeroDivisionError("nothing to divide by")


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch):
    for kind in (Scored, Broken):
        monkeypatch.setitem(registry.CHECK_KINDS, kind.kind, kind)


def declare(name: str, kind: str = "test.scored", **more: Any) -> CheckDeclaration:
    keys = ("required", "weight", "public", "needs", "when")
    own = {key: more.pop(key) for key in keys if key in more}
    return CheckDeclaration(name=name, kind=kind, parameters=more, **own)


def grade(
    *declarations: CheckDeclaration,
    expectation: dict[str, Any] | None = None,
    reward: Any = "strict",
    artefacts: Artefacts | None = None,
) -> Verdict:
    judged = artefacts or Artefacts(input={"text": "a scam"}, answer={"queue": "cash"})
    return run_checks(declarations, judged, expectation, reward=reward, verifier_digest="v")


def test_passes_iff_every_required_check_passes():
    good, bad = declare("good", passed=True), declare("bad", passed=False)
    assert grade(good).status is VerdictStatus.PASS
    assert grade(good, bad).status is VerdictStatus.FAIL
    assert grade(good, declare("bad", passed=False, required=False)).status is VerdictStatus.PASS


def test_nothing_required_that_applied_is_no_pass():
    verdict = grade(declare("nice", passed=True, required=False))
    assert (verdict.status, verdict.reward) == (VerdictStatus.FAIL, 0.0)
    stands_aside = declare("gold", passed=True, needs="expectation")
    assert grade(stands_aside).status is VerdictStatus.FAIL
    assert grade().status is VerdictStatus.FAIL


def test_a_check_without_its_expectation_is_not_applicable_and_changes_nothing():
    rule = declare("rule", passed=True)
    gold = declare("gold", passed=False, score=0.0, needs="expectation", weight=50)
    verdict = grade(rule, gold, reward="graded")
    assert verdict.checks[1].status is CheckStatus.NOT_APPLICABLE
    assert (verdict.status, verdict.reward, verdict.basis) == (VerdictStatus.PASS, 1.0, "rules")
    judged = grade(rule, gold, expectation={"queue": "cash"})
    assert (judged.status, judged.basis) == (VerdictStatus.FAIL, "rules+expectation")


def test_a_rule_applies_when_its_condition_holds():
    rule = {"kind": "text.equals", "field": "answer.queue", "value": "fraud"}
    scam = {"field": "input.text", "contains_any": ["scam"]}
    other = {"field": "input.text", "contains_any": ["loan"]}
    always = declare("always", passed=True)
    assert grade(always, declare("rule", when=scam, **rule)).status is VerdictStatus.FAIL
    assert grade(always, declare("rule", when=other, **rule)).status is VerdictStatus.PASS


def test_strict_reward_is_zero_unless_passed_and_lowered_by_optional_checks():
    good, bad = declare("good", passed=True, weight=3), declare("bad", passed=False, score=0.9)
    nice = declare("nice", passed=False, score=0.5, required=False)
    assert grade(good, bad).reward == 0.0
    assert grade(good, nice).reward == pytest.approx((3 + 0.5) / 4)


def test_graded_reward_gives_partial_credit_but_acceptance_is_never_graded():
    good, bad = declare("good", passed=True, weight=3), declare("bad", passed=False, score=0.6)
    verdict = grade(good, bad, reward="graded")
    assert verdict.status is VerdictStatus.FAIL
    assert verdict.reward == pytest.approx((3 + 0.6) / 4)


def test_checks_without_weight_are_shown_and_not_rewarded():
    good = declare("good", passed=True)
    shown = declare("shown", passed=False, required=False, weight=0)
    assert grade(good, shown).reward == 1.0
    assert grade(declare("good", passed=True, weight=0)).reward == 1.0


@pytest.mark.parametrize(
    "broken",
    [
        declare("broken", "test.broken"),
        declare("broken", "no.such.kind"),
        declare("broken", "text.equals", field="nowhere", value=1),
        declare("broken", passed=False, score=float("nan")),
        declare("broken", passed=False, score=1.5),
        declare("broken", passed=True, when={"field": "input.x"}),
        declare("broken", "test.broken", required=False),
        declare("broken", "state.unchanged", connector="none"),
    ],
)
def test_a_check_that_cannot_judge_is_never_a_pass_nor_a_zero(broken: CheckDeclaration):
    verdict = grade(declare("good", passed=True), broken)
    assert (verdict.status, verdict.reward) == (VerdictStatus.INFRA_ERROR, None)
    assert verdict.checks[1].status is CheckStatus.ERROR
    assert verdict.checks[1].score == 0.0


def test_an_expectation_with_a_gap_makes_the_task_invalid():
    gold = declare(
        "gold", "text.equals", field="answer.queue", value_of="expectation.q", needs="expectation"
    )
    verdict = grade(declare("good", passed=True), gold, expectation={})
    assert (verdict.status, verdict.reward) == (VerdictStatus.INVALID_TASK, None)
    broken = declare("broken", "test.broken")
    assert grade(gold, broken, expectation={}).status is VerdictStatus.INFRA_ERROR


def test_the_canonical_form_repeats_byte_for_byte_and_leaves_time_out():
    def artefacts(seconds: float) -> Artefacts:
        result = ToolResult(call_id="0.0", name="look", ok=True, content="", seconds=seconds)
        return Artefacts(input={}, answer={}, calls=[(ToolCall(id="0.0", name="look"), result)])

    checks = [declare("valid", "process.valid"), declare("good", passed=True)]
    forms = {grade(*checks, artefacts=artefacts(s)).canonical() for s in (0.1, 0.2, 0.2)}
    assert len(forms) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"input": {"a": 2}},
        {"answer": None},
        {"calls": [(ToolCall(id="0.0", name="x"), None)]},
        {"files": {"a": b"2"}},
        {"initial_files": {"a": b"1"}},
        {"states": {"desk": 2}},
        {"initial_states": {"desk": 1}},
    ],
)
def test_the_evidence_hash_covers_every_artefact(change: dict[str, Any]):
    artefacts = Artefacts(input={"a": 1}, answer={}, files={"a": b"1"}, states={"desk": 1})
    other = dataclasses.replace(artefacts, **change)
    assert evidence_hash(artefacts, {}) != evidence_hash(other, {})
    assert evidence_hash(artefacts, {}) != evidence_hash(artefacts, None)
    assert evidence_hash(artefacts, {}) == evidence_hash(dataclasses.replace(artefacts), {})


def test_an_expectation_that_no_check_looked_at_is_no_evidence():
    """A verdict by rules alone is shown whole: its hash must not tell which gold was kept."""
    rule = declare("rule", passed=True)
    aside = declare(
        "gold",
        passed=True,
        needs="expectation",
        when={"field": "answer.queue", "equals": "nowhere"},
    )
    by_rules = [grade(rule, aside, expectation=each) for each in (None, {"q": 1}, {"q": 2})]
    assert {verdict.basis for verdict in by_rules} == {"rules"}
    assert len({verdict.evidence_hash for verdict in by_rules}) == 1
    gold = declare("gold", passed=True, needs="expectation")
    by_gold = [grade(rule, gold, expectation=each) for each in ({"q": 1}, {"q": 2})]
    assert len({verdict.evidence_hash for verdict in by_gold}) == 2


@given(st.text(), st.dictionaries(st.text(), st.text() | st.floats(), max_size=3))
def test_any_answer_has_a_canonical_verdict(text: str, more: dict[str, Any]):
    answer = {"queue": text + "\ud800", "more": more}
    check = declare("rule", "text.equals", field="answer.queue", value="x")
    shape = declare("shape", "schema", schema={"properties": {"more": {"type": "null"}}})
    graded = [grade(check, shape, artefacts=Artefacts(input={}, answer=answer)) for _ in range(2)]
    assert graded[0].canonical() == graded[1].canonical()
    assert graded[0].status is VerdictStatus.FAIL


def test_the_verifier_digest_covers_the_declarations(triage: Any):
    digest = verifier_digest(triage)
    assert digest == verifier_digest(triage)
    first, *rest = triage.checks
    heavier = first.model_copy(update={"weight": 2.0})
    assert digest != verifier_digest(dataclasses.replace(triage, checks=(heavier, *rest)))
    assert digest != verifier_digest(dataclasses.replace(triage, reward="graded"))
