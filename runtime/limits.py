"""Limits (declared by a domain) and Budget (what is left of them in one run).

The budget is asked before anything is spent. What it answers is data (`TaskTimeout`), not an
exception: running out of steps is a graded outcome, not a fault. The clock is handed in so that
the arithmetic is pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LimitName = Literal["steps", "seconds", "tokens", "cost", "tool_calls", "no_progress"]


class Limits(BaseModel):
    """What one run may spend. `tokens` are sampled tokens, `cost` is in US dollars."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=8, ge=1, le=10_000)
    seconds: float = Field(default=300.0, gt=0, le=86_400)
    tokens: int = Field(default=2_000, ge=1)
    cost: float | None = Field(default=None, gt=0)
    tool_calls: int = Field(default=32, ge=1)
    tokens_per_step: int = Field(default=128, ge=1)
    """Upper bound of one sampled reply, in tokens."""
    repeated_calls: int = Field(default=3, ge=2)
    """The same call with the same arguments this many times in a row ends the run: no progress."""
    empty_replies: int = Field(default=3, ge=1)
    """Consecutive replies without a usable tool call that end the run: no progress."""


@dataclass(frozen=True, slots=True)
class TaskTimeout:
    """Which limit ended the run, in words a person can read."""

    limit: LimitName
    reason: str


@dataclass(slots=True)
class Budget:
    """What one run has spent. Mutable, owned by one run, rebuilt from its record on resume."""

    limits: Limits
    clock: Callable[[], float]
    steps: int = 0
    tokens: int = 0
    cost: float = 0.0
    tool_calls: int = 0
    seconds_before: float = 0.0
    """Seconds already spent by earlier holders of the run."""
    engine_seconds: float = 0.0
    """Seconds waited for the engine: they count, but are never the task's fault."""
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def seconds(self) -> float:
        return self.seconds_before + (self.clock() - self._started)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.limits.seconds - self.seconds)

    @property
    def tokens_this_step(self) -> int:
        """How many tokens the next reply may have."""
        return min(self.limits.tokens_per_step, self.limits.tokens - self.tokens)

    @property
    def engine_ate_it(self) -> bool:
        """The time is over, and it would not be without the wait for the engine."""
        return self.seconds >= self.limits.seconds > self.seconds - self.engine_seconds

    def exhausted(self) -> TaskTimeout | None:
        """The first limit that forbids another step, or None."""
        limits = self.limits
        if self.steps >= limits.steps:
            return TaskTimeout("steps", f"used all {limits.steps} steps")
        if self.seconds >= limits.seconds:
            return TaskTimeout("seconds", f"used all {limits.seconds:g} seconds")
        if self.tokens >= limits.tokens:
            return TaskTimeout("tokens", f"sampled all {limits.tokens} tokens")
        if limits.cost is not None and self.cost >= limits.cost:
            return TaskTimeout("cost", f"spent all of ${limits.cost:g}")
        if self.tool_calls >= limits.tool_calls:
            return TaskTimeout("tool_calls", f"made all {limits.tool_calls} tool calls")
        return None
