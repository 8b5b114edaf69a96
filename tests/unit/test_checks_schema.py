"""Family `schema`: conformance, and what never reaches the validator."""

from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("schema", "fits", "breaks"),
    [
        ({"pattern": "^C[0-9]{3}$"}, "C100", "C100\n"),
        ({"pattern": "^(a|b$)"}, "b", "b\n"),
        ({"pattern": "[$]$"}, "a$", "a$\n"),
        ({"pattern": r"^\$[0-9]+$"}, "$5", "$5\n"),
        ({"patternProperties": {"^a$": False}}, {"a\n": 1}, {"a": 1}),
        (
            {"patternProperties": {"^a$": {}, "^b$": {}}, "additionalProperties": False},
            {"a": 1, "b": 1},
            {"b\n": 1},
        ),
        (
            {"patternProperties": {"^a$": {}}, "additionalProperties": {"type": "null"}},
            {"a": 1, "c": None},
            {"a\n": 1},
        ),
    ],
)
def test_a_dollar_is_the_end_and_not_a_line_before_it(schema: Any, fits: Any, breaks: Any):
    """As ECMA-262 has it, which JSON Schema refers to."""
    assert violations(schema, fits) == []
    assert violations(schema, breaks)
    nested = {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": schema}}
    assert violations(nested, {"x": fits}) == []
    assert violations(nested, {"x": breaks})


def test_a_schema_that_names_its_dialect_is_judged_alike():
    schema: Any = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"name": {"pattern": "^a$"}, "inner": {"$ref": "#"}},
    }
    assert schema_problem(schema) is None
    assert violations(schema, {"inner": {"name": "a"}}) == []
    assert violations(schema, {"inner": {"name": "a\n"}})[0].field == "inner.name"


def test_a_hostile_text_costs_linear_time():
    pattern = {"pattern": "^(a+)+$"}
    assert str(violations(pattern, "aaa!")[0]) == "'aaa!' does not match '^(a+)+$'"
    assert violations(pattern, "a" * 200_000 + "!")


def test_half_a_surrogate_pair_is_judged_like_any_text():
    assert violations({"pattern": "a$"}, "\ud800a") == []
    assert violations({"pattern": "a$"}, "a\ud800")
    assert violations({"patternProperties": {"^a$": False}}, {"\ud800": 1}) == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "^(?!x)"}, "'^(?!x)' is not google-re2 syntax"),
        ({"properties": {"a": {"patternProperties": {"(?=x)": {}}}}}, "not google-re2 syntax"),
        (
            {"patternProperties": {"^a$": {}}, "unevaluatedProperties": False},
            "allowed: additionalProperties",
        ),
        (
            {"allOf": [{"patternProperties": {"^a$": {}}}], "unevaluatedProperties": False},
            "allowed: additionalProperties",
        ),
        (
            {"items": {"$schema": "http://json-schema.org/draft-07/schema#"}},
            "allowed: one dialect",
        ),
    ],
)
def test_patterns_that_cannot_be_judged_are_refused(schema: Any, said: str):
    assert said in (schema_problem(schema) or "")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(json_values)
def test_no_value_makes_it_raise_and_repeats_agree(value: Any):
    assert violations(SCHEMA, value) == violations(SCHEMA, value)
