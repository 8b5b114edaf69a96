"""Supervised fine-tuning: TRL's SFTTrainer on recorded trajectories, loss on the policy's tokens.

Rows come tokenised, with labels where the mask is 1, so nothing is templated or tokenised again.
Only the forward pass is ours: it computes what the rows of a batch share once.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never, cast

from datasets import Dataset
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from flywheel.recipe import SftRecipe
from flywheel.training.errors import TrainingFailed
from flywheel.training.job import TrainingJob, TrainingRow
from flywheel.training.lora import inner
from flywheel.training.shared_prefix import score

IGNORED = -100
"""Label of a token that is no target."""
Schedule = Literal["constant", "linear", "cosine"]


def rate(step: int, *, schedule: Schedule, warmup: int, steps: int) -> float:
    """Share of the learning rate at a step (from 0): rises over `warmup` steps, then falls to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    past = (step - warmup) / max(1, steps - warmup)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - past
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * past))
        case _:
            assert_never(schedule)


class SharedSftTrainer(SFTTrainer):
    """SFTTrainer whose forward pass computes shared prefixes once."""

    schedule: Schedule = "constant"
    warmup = 0
    trained_rows = 0
    trained_tokens = 0

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        """The recipe's schedule, warmed up from its first share on: no step is made at rate 0."""
        ready = cast(Optimizer, optimizer or self.optimizer)
        share = partial(rate, schedule=self.schedule, warmup=self.warmup, steps=num_training_steps)
        self.lr_scheduler = LambdaLR(ready, share)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Mean negative log-probability of the targets, over the whole optimiser step."""
        labels = inputs["labels"]
        lengths = inputs["attention_mask"].sum(-1).tolist()
        rows = [ids[:n].tolist() for ids, n in zip(inputs["input_ids"], lengths, strict=True)]
        wanted = [(row[:n] != IGNORED).tolist() for row, n in zip(labels, lengths, strict=True)]
        scores = score(inner(self.accelerator.unwrap_model(model)), rows, wanted)
        targets = (labels[:, 1:] != IGNORED).sum()
        self.trained_rows += len(rows)
        self.trained_tokens += int(targets)
        self._metrics["train"]["entropy"].append((scores.entropies_B_T.sum() / targets).item())
        return -scores.logprobs_B_T.sum() / (num_items_in_batch or targets)

    def closing_metrics(self) -> dict[str, float]:
        """Nothing beyond the last step's."""
        return {}


def sft_trainer(
    job: TrainingJob,
    recipe: SftRecipe,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TrainingRow],
    callbacks: list[TrainerCallback],
    folder: Path,
) -> SharedSftTrainer:
    """Ready to train. Raises TrainingFailed for too few rows."""
    if len(rows) < recipe.minimum_rows:
        raise TrainingFailed(
            f"{len(rows)} rows to imitate are too few; the recipe asks for {recipe.minimum_rows}"
        )
    trainer = SharedSftTrainer(
        model=model,
        args=_arguments(job, recipe, folder),
        train_dataset=Dataset.from_list([_example(row) for row in rows]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.schedule, trainer.warmup = recipe.schedule, recipe.warmup_steps
    return trainer


def _example(row: TrainingRow) -> dict[str, list[int]]:
    labels = [
        token if mask else IGNORED for token, mask in zip(row.input_ids, row.mask, strict=True)
    ]
    return {"input_ids": row.input_ids, "labels": labels}


def _arguments(job: TrainingJob, recipe: SftRecipe, folder: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        weight_decay=0.0,
        seed=job.seed,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
