"""Parsing what a policy wrote: never raises, mends what has one reading, takes linear time."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.tool_calls import MAX_CALLS, MAX_CHARACTERS, format_call, parse_calls
from runtime.run import ToolCall

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.builds(
    ToolCall,
    id=st.just("0.0"),
    name=st.text(min_size=1, max_size=12),
    arguments=st.dictionaries(st.text(max_size=10), VALUES, max_size=4),
)


def arguments_of(text: str) -> dict[str, Any]:
    (call,) = parse_calls(text, 0)
    assert call.error is None, call.error
    return call.arguments


def error_of(text: str) -> str:
    (call,) = parse_calls(text, 0)
    assert call.error is not None, call
    return call.error


@settings(deadline=None)
@given(CALLS)
def test_what_is_written_is_read_back(call: ToolCall) -> None:
    assert parse_calls(format_call(call), 0) == [call]


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=4))
def test_several_calls_are_read_back_in_order(calls: list[ToolCall]) -> None:
    read = parse_calls("\n".join(map(format_call, calls)), 7)
    assert [(c.name, c.arguments) for c in read] == [(c.name, c.arguments) for c in calls]
    assert [c.id for c in read] == [f"7.{n}" for n in range(len(calls))]


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *"\n ={}[]()\"',:\\é\x00\ud800",
            "name",
            "a=b",
            "\\u12",
            "<tool_call>",
            "</tool_call>",
            "1e999",
            "NaN",
        ]
    ),
    max_size=40,
).map("".join)


@settings(deadline=None)
@given(st.text() | FRAGMENTS)
def test_nothing_raises_and_every_reply_gives_a_call(text: str) -> None:
    calls = parse_calls(text, 3)
    assert 1 <= len(calls) <= MAX_CALLS
    assert all(call.error is None or call.error for call in calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("route queue=cards priority=high", {"queue": "cards", "priority": "high"}),
        ('route queue="cards" priority=\'high\'', {"queue": "cards", "priority": "high"}),
        ("route reason=card was stolen n=2", {"reason": "card was stolen", "n": 2}),
        ("route reason=the customer's card.", {"reason": "the customer's card."}),
        ("route(queue=cards, priority=high)", {"queue": "cards", "priority": "high"}),
        ('route({"queue": "cards"})', {"queue": "cards"}),
        ("route()", {}),
        ("route {}", {}),
        ('route {"queue": "cards",}', {"queue": "cards"}),
        ("route {'queue': 'cards'}", {"queue": "cards"}),
        ("route {queue: cards, n: 3}", {"queue": "cards", "n": 3}),
        ('route {"queue": "cards"', {"queue": "cards"}),
        ('route {"queue": "cards"}}', {"queue": "cards"}),
        ('route {"a": [1, 2, {"b": true}', {"a": [1, 2, {"b": True}]}),
        ('{"name": "route", "arguments": {"queue": "cards"}}', {"queue": "cards"}),
        ('{"name": "route", "arguments": "{\\"queue\\": \\"cards\\"}"}', {"queue": "cards"}),
        ('<tool_call>\n{"name": "route", "arguments": {"q": 1}}\n</tool_call>', {"q": 1}),
        ('<tool_call>{"name":"r","arguments":{"q":"</tool_call>"}}', {"q": "</tool_call>"}),
        ('route text="a {, a \\"q\\", </tool_call>"', {"text": 'a {, a "q", </tool_call>'}),
        ('route code="print(1)\nprint(2)"', {"code": "print(1)\nprint(2)"}),
        ("route path=notes/a-b.txt n=-1.5", {"path": "notes/a-b.txt", "n": -1.5}),
        ("route id=007", {"id": "007"}),
        ("route ok=true none=null", {"ok": True, "none": None}),
        ("I look the customer up first.\nroute queue=cards", {"queue": "cards"}),
        ("```\nroute queue=cards\n```", {"queue": "cards"}),
        ('route text="\\ud83d\\ude00"', {"text": "😀"}),
    ],
)  # fmt: skip
def test_one_reading_is_mended(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no tool call found"),
        ("The ticket belongs to the card team.", "no tool call found; answer with one line: name"),
        ("route", "no tool call found"),
        ('route text="never closed', "is not closed"),
        ('route {"queue": "car', "is not closed"),
        ('route reason=he said "hi" to me', "must be quoted"),
        ("route queue=", "a value is missing"),
        ("route queue=a queue=b", "'queue' is given twice"),
        ('route {"a": 1, "a": 2}', "'a' is given twice"),
        ('route {"a": NaN}', "NaN is not a finite number"),
        ("route a=1e999", "not a finite number"),
        ('route {"a" 1}', "a colon is missing"),
        ('route {"a": 1 "b": 2}', "a comma or } is missing"),
        ("route a=" + "[" * 40, "nested more than 16 deep"),
        ('{"tool": "route"}', 'needs "name"'),
        ('{"name": "route", "arguments": [1]}', "must be a JSON object"),
        ('route {"a": 1} and then wait', "after the call"),
        ("x" * (MAX_CHARACTERS + 1), "characters; at most"),
    ],
)
def test_everything_else_says_what_was_wrong(text: str, problem: str) -> None:
    assert problem in error_of(text)


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    broken, second = parse_calls("look id=\nroute queue=cards", 0)
    assert broken.error is not None
    assert second.arguments == {"queue": "cards"}


def test_too_many_calls_are_refused() -> None:
    calls = parse_calls("a x=1\n" * (MAX_CALLS + 5), 0)
    assert len(calls) == MAX_CALLS
    assert "more than 16 calls" in (calls[-1].error or "")


@pytest.mark.parametrize(
    "unit", ["a=x y ", "[", "{a:", "word ", " ", "\\", "a x=1\n", "<tool_call>", "x" * 64 + "= "]
)
def test_time_is_linear(unit: str) -> None:
    """The longest reply that is read takes less than a quarter of a second, whatever is in it."""
    text = "name " + unit * (MAX_CHARACTERS // len(unit) - 1)
    started = time.process_time()
    parse_calls(text[:MAX_CHARACTERS], 0)
    assert time.process_time() - started < 0.25


def test_a_number_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        format_call(ToolCall(id="0.0", name="a", arguments={"x": float("nan")}))
