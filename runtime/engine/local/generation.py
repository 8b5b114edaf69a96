"""One request in progress: what was asked, what is computed, what was sampled.

Written by the scheduler's thread alone (but for `cancelled`), read by its listener. The request's
own generator is seeded once, so its draws do not depend on who shares the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from runtime.engine.local.sampling import Drawn, SamplingRule

FinishReason = Literal["stop", "length", "abort"]


StopTest = Callable[[Sequence[int]], bool]
"""Whether a stop text was reached, given the sampled ids."""


@dataclass(slots=True, eq=False)
class Generation:
    policy: str
    prompt: list[int]
    """At least one id."""
    max_tokens: int
    rule: SamplingRule
    seed: int
    stop_ids: frozenset[int]
    listener: Callable[["Generation"], None]
    """Called after every token, and once more at the end, when `finish` or `failure` is set."""
    stopped: StopTest | None = None
    drawn: list[Drawn] = field(default_factory=list[Drawn])
    cached: int = 0
    """Prompt tokens that were copied, not computed."""
    computed: int = 0
    """Tokens whose keys and values are in the slot."""
    finish: FinishReason | None = None
    failure: Exception | None = None
    cancelled: bool = False
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def sampled(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    @property
    def length(self) -> int:
        """Tokens in all: the prompt and what was sampled."""
        return len(self.prompt) + len(self.drawn)

    @property
    def in_prompt(self) -> bool:
        return self.computed < len(self.prompt)

    def next_ids(self, most: int) -> list[int]:
        """The next tokens to compute; of the prompt at most `most`."""
        if self.in_prompt:
            return self.prompt[self.computed : self.computed + most]
        return [self.drawn[-1].token]

    def point(self) -> float:
        """The next draw, uniform in [0, 1)."""
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def accept(self, drawn: Drawn) -> None:
        """Append a token and decide whether it was the last."""
        self.drawn.append(drawn)
        if drawn.token in self.stop_ids or (self.stopped and self.stopped(self.sampled)):
            self.finish = "stop"
        elif len(self.drawn) >= self.max_tokens:
            self.finish = "length"
