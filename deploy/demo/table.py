"""What a demo ends with on the console: the table of its stages, and what stands beside it."""

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from deploy.demo.result import STAGES, DemoResult
from deploy.demo.show import duration
from flywheel.records import Interval, Score

NAMES = {"base": "base model", "sft": "after SFT", "grpo": "after GRPO"}
FIXED_SHOWN = 3


def stage_table(result: DemoResult) -> Table:
    """`each` is for each accepted run, over the runs of all."""
    what = f"{result.model}, {result.messages} messages, {result.level}, seed {result.seed}"
    table = Table("policy", "passed", "pass@1", "95 %", "tokens each", "seconds each", title=what)
    table.title_justify = "left"
    for stage in STAGES:
        if (score := result.stages.get(stage)) is None:
            continue
        spent = result.spent.get(stage)
        table.add_row(
            NAMES[stage],
            f"{score.passed} of {score.n}",
            f"[bold]{score.rate:.0%}[/bold]",
            _range(score),
            _number(spent.tokens_per_accepted if spent else None),
            _number(spent.seconds_per_accepted if spent else None),
        )
    for name, rate in (
        ("base, best of 4", result.baselines.best_of_4),
        ("no look-up, at best", result.baselines.no_lookup),
        ("keyword classifier", result.baselines.keyword),
    ):
        if rate is not None:
            table.add_row(f"[dim]{name}[/dim]", "", f"[dim]{rate:.0%}[/dim]", "", "", "")
    return table


def closing_lines(result: DemoResult) -> Iterator[str]:
    """Differences, the gate, what is fixed and what it took, as console markup."""
    if result.difference is not None:
        yield f"base to last policy: [bold]{_points(result.difference)}[/bold], paired"
    if result.grpo_difference is not None:
        yield f"GRPO's own part: {_points(result.grpo_difference)}, paired"
    if result.groups_with_signal is not None:
        yield f"groups with signal: {result.groups_with_signal:.0%}"
    yield f"gate: [bold]{result.gate.outcome}[/bold]"
    yield from (f"  {escape(reason)}" for reason in result.gate.reasons)
    if result.retried:
        yield f"failed messages sent again: {len(result.fixed)} of {result.retried} now right"
    for each in result.fixed[:FIXED_SHOWN]:
        yield f"  [dim]{escape(_short(each.message))}[/dim]"
        yield f"    {escape(_short(each.before, 40))} → [green]{escape(each.after)}[/green]"
    took = duration(sum(result.seconds.values()))
    prompt = f", longest prompt {result.longest_prompt}" if result.longest_prompt else ""
    yield f"took {took}; {result.sampled_tokens:,} tokens sampled{prompt}"


def _range(score: Score) -> str:
    return f"{score.low:.0%} to {score.high:.0%}"


def _points(interval: Interval) -> str:
    value, low, high = (100 * each for each in (interval.value, interval.low, interval.high))
    return f"{value:+.0f} points ({low:+.0f} to {high:+.0f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _short(text: str, length: int = 90) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
