"""Family `schema`: conformance, and what never reaches the validator."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runtime.checks.protocol import Artefacts
from runtime.checks.schema import SchemaCheck, schema_problem, violations

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["day", "total"],
    "properties": {"day": {"type": "string", "format": "date"}, "total": {"type": "number"}},
}


def judge(answer: Any):
    check = SchemaCheck.model_validate({"schema": SCHEMA})
    return check.judge(Artefacts(input={}, answer=answer), None)


def test_a_conforming_answer_passes():
    assert judge({"day": "2026-02-28", "total": 1}).passed


def test_formats_are_checked():
    outcome = judge({"day": "2026-02-30", "total": 1})
    assert not outcome.passed
    assert "day: '2026-02-30' is not a 'date'" in outcome.reason


def test_no_answer_fails():
    assert not judge(None).passed


def test_missing_fields_are_named():
    assert [v.field for v in violations(SCHEMA, {})] == ["day", "total"]


def test_deep_large_and_non_finite_values_are_refused():
    deep: Any = {}
    for _ in range(5_000):
        deep = {"a": deep}
    assert "deeper than 32" in str(violations({}, deep)[0])
    assert "at most 262144" in str(violations({}, ["x" * (300 << 10)])[0])
    assert "not finite" in str(violations({}, {"a": [float("inf")]})[0])
    assert "not a JSON value" in str(violations({}, {"a": object()})[0])


def test_references_out_of_the_schema_are_refused_and_inner_ones_followed():
    assert "leaves the schema" in (schema_problem({"$ref": "https://example.org/x"}) or "")
    inner = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert schema_problem(inner) is None
    assert violations(inner, {"a": "x"})[0].field == "a"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(json_values)
def test_no_value_makes_it_raise_and_repeats_agree(value: Any):
    assert violations(SCHEMA, value) == violations(SCHEMA, value)
