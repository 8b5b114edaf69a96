"""Family `process`: what the agent did on the way."""

from typing import Any

import pytest

from runtime.checks.protocol import Artefacts, CheckDeclaration
from runtime.checks.registry import bind, problems
from runtime.run import ToolCall, ToolResult


def calls(script: str) -> list[tuple[ToolCall, ToolResult | None]]:
    """`look! route bad?`: a trailing ! is a failed tool, a trailing ? an unparsable call."""
    made: list[tuple[ToolCall, ToolResult | None]] = []
    for index, word in enumerate(script.split()):
        name, call_id = word.rstrip("!?"), f"{index}.0"
        error = "not parsable" if word.endswith("?") else None
        result = ToolResult(call_id=call_id, name=name, ok=not word.endswith("!"), content="")
        made.append((ToolCall(id=call_id, name=name, error=error), None if error else result))
    return made


def outcome(kind: str, parameters: dict[str, Any], script: str):
    declaration = CheckDeclaration(name="check", kind=kind, parameters=parameters)
    return bind(declaration).judge(Artefacts(input={}, answer={}, calls=calls(script)), None)


@pytest.mark.parametrize(
    ("kind", "parameters", "good", "bad"),
    [
        ("process.valid", {}, ["", "look route", "look! route"], ["bad? route"]),
        ("process.valid", {"failures_count": True}, ["look"], ["look! route"]),
        ("process.valid", {"at_most": 1}, ["bad? route"], ["bad? bad? route"]),
        ("process.allowed", {"tools": ["look"]}, ["", "look look!"], ["look route", "route?"]),
        ("process.forbidden", {"tools": ["pay"]}, ["look"], ["pay", "pay!", "look pay?"]),
        (
            "process.order",
            {"first": ["look", "read"], "then": "route"},
            ["look read route", "read look route route"],
            ["", "look read", "look route read", "look! read route", "look? read route"],
        ),
        (
            "process.count",
            {"tool": "route", "at_most": 1},
            ["", "route", "route! route"],
            ["route route"],
        ),
        ("process.count", {"tool": "route", "at_least": 1}, ["route"], ["", "route!", "route?"]),
        ("process.budget", {"calls": 2}, ["", "a b!"], ["a b! c", "a? b? c?"]),
    ],
)
def test_each_kind_accepts_what_it_should_and_nothing_else(
    kind: str, parameters: dict[str, Any], good: list[str], bad: list[str]
):
    assert [script for script in good if not outcome(kind, parameters, script).passed] == []
    assert [script for script in bad if outcome(kind, parameters, script).passed] == []


def test_invalid_calls_cost_their_share():
    assert outcome("process.valid", {}, "bad? look route route").score == 0.75
    assert outcome("process.valid", {}, "bad? bad?").score == 0.0


def test_bounds_that_cannot_hold_are_refused_when_the_domain_loads():
    parameters = {"tool": "a", "at_least": 2, "at_most": 1}
    declaration = CheckDeclaration(name="c", kind="process.count", parameters=parameters)
    assert "at_most must be at least at_least" in problems(declaration)[0][1]
