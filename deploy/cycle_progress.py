"""Following a cycle: a live table of its stages on a terminal, a line for each change elsewhere.

`follow` asks the API every second until the cycle is over; leaving it early does the cycle no harm.
What is shown of a stage is what its row says: how far it is, what it measures, the time left.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from flywheel.client import WheelClient
    from flywheel.schemas import CycleView, StageView

POLL_SECONDS = 1.0
SAY_SECONDS = 15.0
"""How often a line tells of a stage that gets on, where nobody watches a table."""
STYLES = {
    "pending": "dim",
    "skipped": "dim",
    "running": "yellow",
    "waiting": "cyan",
    "done": "green",
    "failed": "bold red",
}
TITLES = {
    "mine": "find failures",
    "compile": "compile tasks",
    "sample": "runs of the incumbent",
    "sft": "SFT",
    "rollouts": "runs of the candidate",
    "grpo": "GRPO",
    "evaluate": "evaluate both",
    "gate": "gate",
    "release": "release",
}
"""Stage → what people read."""
NUMBERS_SHOWN = 4
FIRST = ("reward", "loss", "reward_std", "kl", "ratio_mean", "grad_norm")
"""Measures that are shown before others."""
PLACES = frozenset({"phase", "step", "steps", "seconds_left", "what"})
"""Entries of a stage's progress that are no measures."""


def follow(
    client: "WheelClient",
    cycle_id: str,
    console: Console,
    *,
    pause: Callable[[float], None] = sleep,
) -> "CycleView":
    """Show a cycle until it is over; how it ended. Raises ApiProblem."""
    with _shown(console) as show:
        while True:
            view = client.cycle(cycle_id)
            show(view)
            if view.state != "running":
                return view
            pause(POLL_SECONDS)  # the API offers no event for cycles


@contextmanager
def _shown(console: Console) -> "Generator[Callable[[CycleView], None]]":
    if not console.is_terminal:
        yield _lines(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda view: live.update(cycle_table(view))


# ---------------------------------------------------------------- a table


def cycle_table(view: "CycleView") -> Table:
    """All stages of a cycle, as they are now."""
    title = f"{view.domain}, cycle {view.id}: {view.state}"
    table = Table("stage", "state", "progress", "measured", "time", title=title)
    table.title_justify = "left"
    for stage in view.stages:
        style = STYLES.get(stage.state, "")
        table.add_row(
            stage_title(stage),
            f"[{style}]{stage.state}[/{style}]" if style else stage.state,
            escape(progress_text(stage)),
            escape(numbers_text(stage)),
            time_text(stage),
        )
    return table


def stage_title(stage: "StageView") -> str:
    title = TITLES.get(stage.name, str(stage.name))
    return f"{title}, round {stage.round}" if stage.round else title


def progress_text(stage: "StageView") -> str:
    """How far it is and how long it will take, or why it ended as it did."""
    if stage.reason:
        return "" if stage.state == "skipped" else stage.reason  # the stage that ended it says why
    now = stage.progress
    parts = [str(now["phase"])] if now.get("phase") not in (None, "training") else []
    if now.get("steps"):
        parts.append(f"{now.get('step', 0)} of {now['steps']} {now.get('what', 'steps')}")
    if now.get("seconds_left") is not None:
        parts.append(f"{duration(now['seconds_left'])} left")
    return ", ".join(parts)


def numbers_text(stage: "StageView") -> str:
    """The first few measures, the telling ones before the others."""
    under_way = {k: v for k, v in stage.progress.items() if k not in PLACES}
    numbers = dict(_numbers(under_way or stage.metrics))
    order = [*(name for name in FIRST if name in numbers), *(n for n in numbers if n not in FIRST)]
    return "  ".join(f"{name} {numbers[name]}" for name in order[:NUMBERS_SHOWN])


def _numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        yield name, str(value) if isinstance(value, int) else f"{value:.3g}"


def time_text(stage: "StageView") -> str:
    """How long it took, or has taken by now."""
    if stage.started_at is None:
        return ""
    end = stage.finished_at or datetime.now(UTC)
    return duration((end - stage.started_at).total_seconds())


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# ---------------------------------------------------------------- lines


def _lines(console: Console) -> "Callable[[CycleView], None]":
    """Tells of each change of state at once, of progress now and then."""
    states: dict[int, str] = {}
    said_at: dict[int, float] = {}

    def show(view: "CycleView") -> None:
        for stage in view.stages:
            changed = states.get(stage.seq, "pending") != stage.state
            under_way = stage.state in ("running", "waiting") and progress_text(stage)
            late = monotonic() - said_at.get(stage.seq, 0.0) >= SAY_SECONDS
            if changed or (under_way and late):
                states[stage.seq], said_at[stage.seq] = stage.state, monotonic()
                console.print(escape(line(stage)), highlight=False, soft_wrap=True)

    return show


def line(stage: "StageView") -> str:
    """One stage in one line."""
    told = [progress_text(stage), numbers_text(stage)]
    taken = time_text(stage) if stage.state in ("done", "failed") else ""
    rest = "; ".join(part for part in (*told, taken) if part)
    return f"{stage_title(stage)}: {stage.state}" + (f" ({rest})" if rest else "")


# ---------------------------------------------------------------- the end


def outcome_lines(view: "CycleView") -> Iterator[str]:
    """How a cycle ended, as console markup: the decision, its reasons, the numbers behind it."""
    if view.state != "done":
        why = f": {escape(view.reason)}" if view.reason else ""
        yield f"[bold]the cycle {_ENDS.get(view.state, view.state)}[/bold]{why}"
        return
    yield f"[bold]{outcome_words(view)}[/bold]"
    if view.decision is None:
        yield escape(view.reason or "")
        return
    yield from (f"  {escape(reason)}" for reason in view.decision.reasons)
    for who, score in (
        ("incumbent", view.decision.incumbent),
        ("candidate", view.decision.candidate),
    ):
        yield (
            f"  {who}: {score.passed} of {score.n} passed, {score.rate:.1%} "
            f"({score.low:.1%} to {score.high:.1%})"
        )
    if (difference := view.decision.difference) is not None:
        low, high = f"{difference.low:+.1%}", f"{difference.high:+.1%}"
        yield f"  difference: {difference.value:+.1%} ({low} to {high})"
    yield from (f"  adapter after {stage}: {name}" for stage, name in view.adapters.items())


def outcome_words(view: "CycleView") -> str:
    """`hold`, `nothing to learn`; nothing while it runs."""
    return (view.outcome or "").replace("_", " ")


_ENDS = {"failed": "failed", "stopped": "was stopped", "running": "is running"}
