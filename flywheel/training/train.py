"""One job from start to result: load the policy, train it, probe it, save what came of it."""

import resource
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from flywheel.training.errors import TrainingFailed
from flywheel.training.grpo import grpo_trainer
from flywheel.training.job import (
    ADAPTER_FOLDER,
    OPTIMIZER_FILE,
    Progress,
    TrainingJob,
    TrainingResult,
    TrainingRow,
)
from flywheel.training.lora import inner, load_moments, load_policy, save_adapter, save_moments
from flywheel.training.probe import probe
from flywheel.training.progress import Reporter, StepReports, beat_at_every_layer
from flywheel.training.sft import sft_trainer


def train(
    folder: Path, job: TrainingJob, rows: Sequence[TrainingRow], reporter: Reporter
) -> TrainingResult:
    """Leaves the adapter and the optimiser's moments in `folder`. Raises TrainingFailed."""
    began = time.monotonic()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    model = load_policy(job)
    beat_at_every_layer(inner(model), reporter)
    tally = Tally()
    callbacks: list[TrainerCallback] = [StepReports(reporter), tally]
    if job.optimizer is not None:
        callbacks.append(Moments(model, Path(job.optimizer)))
    trainer = _trainer(folder, job, model, rows, callbacks)
    _quietly(trainer)
    reporter.amend(trainer.closing_metrics())
    reporter.phase(Progress(phase="saving", step=tally.steps, steps=tally.steps))
    save_adapter(model, folder / ADAPTER_FOLDER)
    save_moments(trainer.optimizer.optimizer, model, folder / OPTIMIZER_FILE)
    return TrainingResult(
        adapter=ADAPTER_FOLDER,
        steps=tally.steps,
        rows=trainer.trained_rows,
        trained_tokens=trainer.trained_tokens,
        metrics=reporter.steps,
        probe=probe(model, job.probe_prompts),
        seconds=round(time.monotonic() - began, 3),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _trainer(
    folder: Path,
    job: TrainingJob,
    model: PeftModel,
    rows: Sequence[TrainingRow],
    callbacks: list[TrainerCallback],
) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.base, local_files_only=True)
    scratch = folder / "trainer"
    if job.stage == "sft":
        if job.sft is None:
            raise TrainingFailed("the job's stage is sft, and it has no recipe for it")
        return sft_trainer(job, job.sft, model, tokenizer, rows, callbacks, scratch)
    if job.grpo is None:
        raise TrainingFailed("the job's stage is grpo, and it has no recipe for it")
    return grpo_trainer(job, job.grpo, model, tokenizer, rows, callbacks, scratch)


def _quietly(trainer: Any) -> None:
    with warnings.catch_warnings():
        # peft asks transformers for an attribute that transformers is renaming
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        trainer.train()


class Tally(TrainerCallback):
    """Counts optimiser steps, and refuses to go on from gradients that are not numbers."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.steps = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not torch.isfinite(torch.tensor(float(value))):
                raise TrainingFailed(f"step {state.global_step}: {name} became {value}")


class Moments(TrainerCallback):
    """Gives the optimiser the moments of the round before."""

    def __init__(self, model: PeftModel, path: Path) -> None:
        self._model = model
        self._path = path

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        load_moments(optimizer.optimizer, self._model, self._path)
