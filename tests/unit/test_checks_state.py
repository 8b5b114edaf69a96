"""Family `state`: the expected change happened, nothing else did."""

from typing import Any

import pytest

from runtime.checks.document import ExpectationGap
from runtime.checks.protocol import Artefacts
from runtime.checks.state import StateEquals, StateUnchanged, differences
from runtime.errors import CheckError

BEFORE = {"ticket": {"queue": None, "note": ""}, "others": {"T1": {"queue": "cash"}}}


def after(**changes: Any) -> dict[str, Any]:
    return {**BEFORE, "ticket": {"queue": "cards", "note": ""}, **changes}


def judge(end: Any, expectation: Any = None, **more: Any):
    parameters = {
        "connector": "desk",
        "changes": {"ticket.queue": {"value_of": "expectation.queue"}},
    }
    check = StateEquals.model_validate({**parameters, **more})
    artefacts = Artefacts(
        input={}, answer={}, states={"desk": end}, initial_states={"desk": BEFORE}
    )
    return check.judge(artefacts, expectation or {"queue": "cards"})


def test_the_expected_change_passes():
    assert judge(after()).passed


def test_the_wrong_value_fails_and_says_which():
    outcome = judge(after(ticket={"queue": "cash", "note": ""}))
    assert (outcome.passed, outcome.score) == (False, 0.0)
    assert outcome.reason == "ticket.queue should be 'cards' but is 'cash'."


@pytest.mark.parametrize(
    "collateral",
    [
        {"others": {"T1": {"queue": "fraud"}}},
        {"others": {}},
        {"others": {"T1": {"queue": "cash"}, "T2": {}}},
        {"extra": 1},
        {"ticket": {"queue": "cards", "note": "x"}},
    ],
)
def test_collateral_changes_fail_and_earn_nothing(collateral: dict[str, Any]):
    outcome = judge(after(**collateral))
    assert (outcome.passed, outcome.score) == (False, 0.0)
    assert outcome.evidence["collateral"]


def test_what_may_change_is_not_judged():
    end = after(ticket={"queue": "cards", "note": "x"})
    assert judge(end, may_change=["ticket.note"]).passed


def test_doing_nothing_passes_only_where_that_may_be_right():
    nothing = {"queue": None}
    assert not judge(BEFORE, nothing).passed
    assert judge(BEFORE, nothing, may_do_nothing=True).passed
    assert not judge(BEFORE, {"queue": "cards"}, may_do_nothing=True).passed


def test_some_right_changes_earn_partial_credit():
    changes = {"ticket.queue": {"value": "cards"}, "ticket.note": {"value": "x"}}
    outcome = judge(after(), changes=changes)
    assert (outcome.passed, outcome.score) == (False, 0.5)


def test_a_missing_state_or_gold_is_never_the_runs_fault():
    with pytest.raises(ExpectationGap):
        judge(after(), {"priority": "low"})
    check = StateUnchanged(connector="desk")
    with pytest.raises(CheckError, match="no state of connector 'desk'"):
        check.judge(Artefacts(input={}, answer={}), None)


def test_unchanged_lists_what_changed_outside_the_allowed_paths():
    check = StateUnchanged(connector="desk", outside_of=["ticket.queue"])

    def outcome(end: Any):
        states = {"states": {"desk": end}, "initial_states": {"desk": BEFORE}}
        return check.judge(Artefacts(input={}, answer={}, **states), None)

    assert outcome(after()).passed
    assert outcome(after(extra=1)).evidence["changed"] == ["extra"]


def test_differences_are_the_smallest_and_type_strict():
    assert list(differences({"a": 1, "b": {"c": 1}}, {"a": True, "b": {"c": 1.0}})) == ["a"]
    assert list(differences({"a": {"b": 1}}, {"a": 2})) == ["a"]
