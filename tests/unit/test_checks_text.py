"""Family `text`, the document it addresses, and how quantities are read."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.checks.document import (
    MISSING,
    Condition,
    contains_any,
    normalised,
    path_problem,
    same_json,
    value_at,
)
from runtime.checks.numbers import Quantity, read_quantity
from runtime.checks.protocol import Artefacts, CheckDeclaration
from runtime.checks.registry import bind


def outcome(kind: str, parameters: dict[str, Any], answer: Any, expectation: Any = None):
    declaration = CheckDeclaration(name="check", kind=kind, parameters=parameters)
    return bind(declaration).judge(Artefacts(input={}, answer=answer), expectation)


def passes(kind: str, parameters: dict[str, Any], value: Any, expectation: Any = None) -> bool:
    answer = {} if value is MISSING else {"x": value}
    return outcome(kind, {"field": "answer.x", **parameters}, answer, expectation).passed


@pytest.mark.parametrize(
    ("kind", "parameters", "good", "bad"),
    [
        ("text.equals", {"value": "a"}, ["a"], ["A", "", None, MISSING, ["a"]]),
        ("text.equals", {"value": "Straße", "normalise": True}, [" STRASSE "], ["Strasse 1"]),
        ("text.equals", {"value": 1}, [1, 1.0], [True, "1", 1.1, None]),
        ("text.equals", {"value": None}, [None], [MISSING, 0, False, ""]),
        ("text.one_of", {"values": ["a", 1]}, ["a", 1.0], ["b", True, MISSING]),
        ("text.none_of", {"values": ["a"]}, ["b", 1], ["a", MISSING]),
        ("text.none_of", {"values": ["a"], "normalise": True}, ["b"], ["A"]),
        ("text.contains", {"all_of": ["red fox"]}, ["The RED\n fox!"], ["red foxes", 3, MISSING]),
        ("text.contains", {"any_of": ["cat", "dog"]}, ["a dog."], ["dogma", "concat"]),
        ("text.contains", {"none_of": ["tbd"]}, ["done"], ["TBD", MISSING]),
        ("text.matches", {"pattern": "[a-z]+"}, ["abc"], ["abc1", "", 3, MISSING]),
        ("text.matches", {"pattern": "b", "anywhere": True}, ["abc"], ["ac"]),
        ("text.length", {"at_least": 1, "at_most": 3}, ["a", " abc "], ["", "  ", "abcd", 3]),
        ("text.length", {"unit": "words", "at_most": 2}, ["one two"], ["one two three"]),
        (
            "text.list",
            {"value": ["a", "b", "b"]},
            [["B", "a", "b"]],
            [["a", "b"], ["a", "b", "b", "b"]],
        ),
        ("text.list", {"value": ["a", "b"], "ordered": True}, [["a", "b"]], [["b", "a"], "ab"]),
        ("text.number", {"value": 1234.5}, [1234.5, "1,234.5"], ["1234.6", True, "a", MISSING]),
        ("text.number", {"value": 12, "unit": "%"}, ["12%", "12 percent", 12], ["12 eur", "-12%"]),
        ("text.number", {"value": "$5", "unit_required": True}, ["5 usd", "$5"], ["5", "5 eur"]),
        (
            "text.number",
            {"value": 3, "scale": "million"},
            ["3 million", "3", "3,000 thousand"],
            ["3 bn"],
        ),
        ("text.number", {"value": 100, "relative": 0.01}, ["101", "99"], ["101.1", "nan", "inf"]),
        ("text.number", {"value": -12.3}, ["(12.3)", "-12.3", "−12.3"], ["12.3", "12.3 12.3"]),
    ],
)
def test_each_kind_accepts_what_it_should_and_nothing_else(
    kind: str, parameters: dict[str, Any], good: list[Any], bad: list[Any]
):
    assert [v for v in good if not passes(kind, parameters, v)] == []
    assert [v for v in bad if passes(kind, parameters, v)] == []


def test_lists_give_partial_credit():
    found = outcome("text.list", {"field": "answer.x", "value": ["a", "b"]}, {"x": ["a", "c"]})
    assert (found.passed, found.score) == (False, 0.5)


def test_values_come_from_the_expectation():
    parameters = {"value_of": "expectation.x"}
    assert passes("text.equals", parameters, 5, {"x": 5})
    assert not passes("text.equals", parameters, 5, {"x": 6})


@pytest.mark.parametrize(
    "parameters",
    [
        {"field": "answer.x"},
        {"field": "answer.x", "value": 1, "value_of": "expectation.x"},
        {"field": "reply.x", "value": 1},
        {"field": "answer..x", "value": 1},
        {"field": "answer.{input.x", "value": 1},
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(parameters: dict[str, Any]):
    with pytest.raises(Exception, match="check"):
        outcome("text.equals", parameters, {})


def test_a_hostile_pattern_or_text_is_judged_in_linear_time():
    started = time.process_time()
    assert not passes("text.matches", {"pattern": "(a+)+b"}, "a" * 100_000)
    assert read_quantity("1," * 39) is None
    assert time.process_time() - started < 2


# ---------------------------------------------------------------- document


def test_paths_walk_objects_arrays_and_named_records():
    document = {
        "input": {"id": "C1"},
        "state": {"desk": {"C1": {"lines": [{"n": 1}, {"n": None}]}}},
    }
    assert value_at(document, "state.desk.{input.id}.lines.0.n") == 1
    assert value_at(document, "state.desk.C1.lines.1.n") is None
    assert value_at(document, "state.desk.C1.lines.2.n") is MISSING
    assert value_at(document, "state.desk.{input.other}.lines") is MISSING
    assert value_at(document, "input.id.x") is MISSING
    assert path_problem("state.desk.{input.id}.x") is None
    assert "starts with 'nope'" in (path_problem("state.{nope.id}.x") or "")


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        ({"equals": "a"}, ["a"], ["b", None]),
        ({"in": ["a", 1]}, ["a", 1], ["b", True]),
        ({"contains_any": ["scam"]}, ["A SCAM!"], ["scampi", 3]),
        ({"matches": "^a"}, ["ab"], ["ba", 3]),
        ({"exists": True}, [None, "a"], []),
        ({"exists": False}, [], [None, "a"]),
    ],
)
def test_conditions(condition: dict[str, Any], holds: list[Any], fails: list[Any]):
    bound = Condition.model_validate({"field": "answer.x", **condition})
    assert all(bound.holds({"answer": {"x": value}}) for value in holds)
    assert not any(bound.holds({"answer": {"x": value}}) for value in fails)
    assert bound.holds({"answer": None}) == (condition == {"exists": False})


@pytest.mark.parametrize(
    "condition", [{}, {"equals": 1, "in": [1]}, {"like": 1}, {"matches": "("}, {"in": []}]
)
def test_a_condition_has_exactly_one_known_operator(condition: dict[str, Any]):
    with pytest.raises(ValidationError):
        Condition.model_validate({"field": "answer.x", **condition})


# ---------------------------------------------------------------- comparing and reading


@given(st.text())
def test_normalising_is_idempotent(text: str):
    assert normalised(normalised(text)) == normalised(text)


@given(st.text(), st.text(min_size=1), st.text())
def test_a_word_surrounded_by_spaces_is_found(before: str, word: str, after: str):
    text = f"{before} {word} {after}"
    if normalised(word) and normalised(word) in normalised(text):
        assert contains_any(text, [word])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_every_value_equals_itself(value: Any):
    assert same_json(value, value)


@given(st.text(max_size=90))
def test_reading_a_quantity_never_raises(text: str):
    read_quantity(text)


@given(st.integers(-(10**12), 10**12))
def test_separators_do_not_change_a_number(number: int):
    assert read_quantity(f"{number:,} EUR") == Quantity(float(number), "eur")
