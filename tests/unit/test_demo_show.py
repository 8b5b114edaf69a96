"""What a demo shows: plain lines without a terminal, one lasting line a step with one."""

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.demo.result import DemoResult
from deploy.demo.show import Show, duration
from deploy.demo.table import closing_lines, stage_table


def shown(*, terminal: bool) -> tuple[Show, io.StringIO]:
    out = io.StringIO()
    return Show(Console(file=out, force_terminal=terminal, width=100)), out


def test_without_a_terminal_a_step_is_two_lines() -> None:
    show, out = shown(terminal=False)
    with show.step("3 messages", 3) as step:
        for _ in range(3):
            step.advance("1 accepted")
        step.tell("0 of 3 right")
    assert out.getvalue().splitlines() == ["3 messages …", "✓ 3 messages: 0 of 3 right 0 s"]


def test_on_a_terminal_the_last_line_stays() -> None:
    show, out = shown(terminal=True)
    with show.step("3 messages", 3) as step:
        step.note("waiting")
        step.advance("1 accepted")
        step.tell("0 of 3 right")
    assert "3 messages" in out.getvalue()
    assert out.getvalue().splitlines()[-1].count("0 of 3 right") == 1


def test_a_step_that_fails_is_not_ticked_off() -> None:
    show, out = shown(terminal=False)
    with pytest.raises(ValueError, match="broken"), show.step("3 messages", 3):
        raise ValueError("broken")
    assert "✓" not in out.getvalue()


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 185)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 05 s",
    ]


SCORE = {"passed": 32, "n": 64, "tasks": 32, "rate": 0.5, "low": 0.4, "high": 0.6}


def result(**fields: Any) -> DemoResult:
    values: dict[str, Any] = {
        "seed": 1,
        "level": "easy",
        "model": "tiny",
        "splits": {"report": 32},
        "stages": {"base": {**SCORE, "passed": 0, "rate": 0.0, "low": 0.0, "high": 0.1}},
        "difference": None,
        "baselines": {"no_lookup": 0.31},
        "gate": {"outcome": "hold", "reasons": ["no clear [difference]"]},
        "practice": {"submitted": 24, "accepted": 0, "corrections": 24},
        "sampled_tokens": 12_345,
        "seconds": {"practice": 61.0},
        "machine": {"cpu": "x", "cores": 2, "load": 0.1},
        **fields,
    }
    return DemoResult.model_validate(values)


def text_of(found: DemoResult) -> str:
    out = io.StringIO()
    console = Console(file=out, width=140)
    console.print(stage_table(found))
    for line in closing_lines(found):
        console.print(line, highlight=False)
    return out.getvalue()


def test_a_gate_that_holds_is_told_with_its_reasons() -> None:
    told = text_of(result())
    assert "gate: hold" in told
    assert "no clear [difference]" in told
    assert "12,345 tokens" in told
    assert "after SFT" not in told
    assert "31%" in told


def test_what_was_learnt_is_told() -> None:
    told = text_of(
        result(
            stages={"base": SCORE, "sft": SCORE, "grpo": SCORE},
            difference={"value": 0.5, "low": 0.4, "high": 0.6},
            grpo_difference={"value": 0.08, "low": -0.01, "high": 0.15},
            retried=12,
            fixed=[{"message": "where is it", "before": "no answer", "after": "cards, low"}],
            longest_prompt=390,
        )
    )
    assert "+50 points (+40 to +60)" in told
    assert "GRPO's own part: +8 points (-1 to +15)" in told
    assert "1 of 12 now right" in told
    assert "no answer → cards, low" in told
    assert "longest prompt 390" in told
