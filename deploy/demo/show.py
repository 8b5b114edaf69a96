"""What a demo shows while it goes: one line for each step, with a bar and the time left.

On a terminal the line of the step at hand is live and is replaced by what came of it; elsewhere a
step is announced in one line and told in another, with a line now and then while it lasts.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

SAY_SECONDS = 20.0
"""How often a long step is told of where nobody watches a bar."""


@dataclass(slots=True)
class Step:
    """The step at hand."""

    _tell: Callable[[int, str], None]
    said: str = ""

    def advance(self, note: str = "") -> None:
        """One of the step's parts is done; `note` says how it stands."""
        self._tell(1, note)

    def note(self, text: str) -> None:
        """What goes on at the moment."""
        self._tell(0, text)

    def tell(self, said: str) -> None:
        """What came of the step."""
        self.said = said


class Show:
    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str, total: int) -> Generator[Step]:
        """A step of `total` parts; its line stays where it ends well."""
        began = monotonic()
        if self.console.is_terminal:
            with self._live(title, total) as step:
                yield step
        else:
            self.say(f"{title} …")
            step = Step(self._lines(total))
            yield step
        took = duration(monotonic() - began)
        self.say(f"[green]✓[/green] {title}: {step.said or 'done'} [dim]{took}[/dim]")

    def _lines(self, total: int) -> Callable[[int, str], None]:
        done, said_at = 0, monotonic()

        def tell(parts: int, note: str) -> None:
            nonlocal done, said_at
            done += parts
            if parts and monotonic() - said_at >= SAY_SECONDS:
                said_at = monotonic()
                self.say(f"  {done} of {total} ({note})")

        return tell

    @contextmanager
    def _live(self, title: str, total: int) -> Generator[Step]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}[/dim]"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            bar = progress.add_task(title, total=total, note="")

            def tell(parts: int, note: str) -> None:
                progress.update(bar, advance=parts, note=note)

            yield Step(tell)


def duration(seconds: float) -> str:
    """`41 s` or `3 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"
