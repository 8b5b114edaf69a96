"""What the trainer says while it works: one JSON line per step, and a sign of life in between.

Signs of life come from the work itself (a layer computed, a file read), never from a thread of
their own: a trainer that hangs is silent, and its worker notices.
"""

import time
from typing import Any, TextIO

from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from flywheel.training.job import Progress

BEAT_SECONDS = 2.0
_NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "kl": "kl",
    "ratio_mean": "ratio_mean",
    "ratio_max": "ratio_max",
    "clip_ratio/region_mean": "clip_share",
}
"""A trainer's name for a metric → ours."""


class Reporter:
    """Writes progress to the stream the worker reads, and remembers every step's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said = 0.0
        self._now = Progress(phase="loading")
        self.steps: list[Progress] = []

    def phase(self, progress: Progress) -> None:
        self._now = progress
        self._said = time.monotonic()
        print(progress.model_dump_json(), file=self._stream, flush=True)

    def step(self, progress: Progress) -> None:
        self.steps.append(progress)
        self.phase(progress)

    def amend(self, metrics: dict[str, float]) -> None:
        """Add to the last step what could be measured only after it."""
        if metrics:
            last = self.steps.pop()
            self.step(last.model_copy(update={"metrics": {**last.metrics, **metrics}}))

    def beat(self) -> None:
        """Say again where we are, if nothing was said for a while."""
        if time.monotonic() - self._said >= BEAT_SECONDS:
            self.phase(self._now.model_copy(update={"metrics": {}}))


class StepReports(TrainerCallback):
    """Turns a trainer's log lines into progress."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._began = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._began = time.monotonic()
        self._reporter.phase(Progress(phase="training", steps=state.max_steps))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return  # the trainer's closing summary
        done, spent = state.global_step, time.monotonic() - self._began
        self._reporter.step(
            Progress(
                phase="training",
                step=done,
                steps=state.max_steps,
                seconds_left=round(spent / done * (state.max_steps - done), 1),
                metrics={
                    ours: float(logs[theirs])
                    for theirs, ours in _NAMES.items()
                    if isinstance(logs.get(theirs), int | float)
                },
            )
        )


def beat_at_every_layer(model: PreTrainedModel, reporter: Reporter) -> None:
    """Forward and backward passes beat as they go through the model."""

    def forward(module: Any, inputs: Any, output: Any) -> None:
        reporter.beat()
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: reporter.beat())

    for layer in getattr(model, model.base_model_prefix).layers:
        layer.register_forward_hook(forward)
