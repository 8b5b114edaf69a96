"""Group-relative policy optimisation: TRL's GRPOTrainer on groups that were sampled elsewhere.

Nothing is generated here. `rollout_func` hands TRL the recorded trajectories, with environment
tokens masked; the log-probabilities recorded when they were sampled are the old policy of the
importance ratio (left to itself, TRL would take the current policy for it, and the ratio would be 1
however stale the groups are). Advantages are relative to the members of a group that have a reward.
The loss is TRL's DAPO variant: clipped, a mean over all tokens of the step (Yu et al. 2025, eq. 8).

TRL wants as many rows in every group, and as many groups in every step; what is missing is filled
up with rows whose mask is all 0, which change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from flywheel.recipe import GrpoRecipe
from flywheel.training.errors import BreakerTripped, TrainingFailed
from flywheel.training.job import Group, TrainingJob, TrainingRow
from flywheel.training.lora import inner, load_reference
from flywheel.training.shared_prefix import score
from flywheel.training.trajectories import advantages, signal

CLOSING_GROUPS = 2
"""Groups on which a job's whole update is measured: enough to see it break, cheap enough to do."""


@dataclass(frozen=True, slots=True)
class Member:
    """One row at its place in a step; a filler has mask 0 everywhere."""

    row: TrainingRow
    advantage: float
    filler: bool = False

    @property
    def split(self) -> int:
        """Where TRL's completion begins: at the first token the policy chose."""
        return self.row.mask.index(1)


Steps = list[list[list[Member]]]
"""Of every optimiser step its groups, of every group its members: all equally many."""


def groups_of(rows: Sequence[TrainingRow]) -> list[Group]:
    """Rows with a reward and logprobs by group, in order; groups that teach nothing left out."""
    grouped: dict[str, list[TrainingRow]] = {}
    for row in rows:
        if row.reward is not None and not row.demonstration:
            grouped.setdefault(row.group_id, []).append(row)
    groups = [Group(group_id, members) for group_id, members in grouped.items()]
    return [group for group in groups if signal(group)]


def steps_of(groups: Sequence[Group], steps: int) -> Steps:
    """Deal the groups out to at most `steps` optimiser steps, filled up to equal shapes.

    Raises TrainingFailed where there is no group.
    """
    if not groups:
        raise TrainingFailed("no group has attempts with different rewards: nothing to learn from")
    steps = min(steps, len(groups))
    dealt = [[_members(group) for group in groups[step::steps]] for step in range(steps)]
    size = max(len(members) for step in dealt for members in step)
    width = max(len(step) for step in dealt)
    filler = Member(groups[0].rows[0], 0.0, filler=True)
    for step in dealt:
        step.extend([] for _ in range(width - len(step)))
        for members in step:
            members.extend([filler] * (max(2, size) - len(members)))
    return dealt


def _members(group: Group) -> list[Member]:
    """One reward a run: branches of one run share its advantage and count once in the baseline."""
    rewards = {row.id.split("/")[0]: row.reward for row in group.rows}
    relative = dict(zip(rewards, advantages(list(rewards.values())), strict=True))
    return [Member(row, relative[row.id.split("/")[0]]) for row in group.rows]


# ---------------------------------------------------------------- TRL


class RecordedGrpoTrainer(GRPOTrainer):
    """GRPOTrainer whose old policy is the recorded one."""

    max_ratio: float
    last_places: Sequence[Sequence[Member]]
    """The groups of the last step."""
    trained_rows = 0
    trained_tokens = 0
    _scored: Tensor

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        output["advantages"] = torch.tensor(
            [each["advantage"] for each in inputs], device=output["advantages"].device
        )
        return output

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        """[rows, completion] log-probabilities and entropies, shared prefixes computed once."""
        real = attention_mask.bool()
        rows = [ids[mask].tolist() for ids, mask in zip(input_ids, real, strict=True)]
        kept = torch.zeros_like(real)
        kept[:, -logits_to_keep:] = real[:, -logits_to_keep:]
        wanted = [keep[mask].tolist() for keep, mask in zip(kept, real, strict=True)]
        scores = score(
            inner(self.accelerator.unwrap_model(model)), rows, wanted, temperature=self.temperature
        )
        flat = torch.zeros(input_ids.shape, device=input_ids.device)
        at = torch.tensor([[i, t] for i, w in enumerate(wanted) for t, on in enumerate(w) if on])
        per_token = flat.masked_scatter(kept, scores.logprobs_B_T[at[:, 0], at[:, 1]])
        entropies = flat.masked_scatter(kept, scores.entropies_B_T[at[:, 0], at[:, 1]])
        self._scored = per_token[:, -logits_to_keep:].detach()
        return per_token[:, -logits_to_keep:], entropies[:, -logits_to_keep:], None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        log_ratio = (self._scored - inputs["old_per_token_logps"])[mask]
        ratio = torch.exp(log_ratio)
        self.trained_rows += int(mask.any(-1).sum())
        self.trained_tokens += int(mask.sum())
        noted = self._metrics["train"]
        noted["ratio_mean"].append(ratio.mean().item())
        noted["ratio_max"].append(ratio.max().item())
        if self.beta == 0:  # Schulman's k3 estimator of KL(behaviour ‖ current)
            noted["kl"].append((ratio - 1 - log_ratio).mean().item())
        self._refuse(loss, ratio.mean().item())
        return loss

    @torch.no_grad()
    def closing_metrics(self) -> dict[str, float]:
        """How far the job moved the policy, on its last step's first groups.

        Raises TrainingFailed where that is beyond the breaker.
        """
        rows = [m.row for place in self.last_places[:CLOSING_GROUPS] for m in place if not m.filler]
        ids, mask = [row.input_ids for row in rows], [row.mask for row in rows]
        model = inner(self.accelerator.unwrap_model(self.model))
        scores = score(model, ids, mask, temperature=self.temperature)
        log_ratio = torch.cat(
            [
                logprobs[: len(row.mask)][torch.tensor(row.mask, dtype=torch.bool)]
                - torch.tensor(row.old_logprobs)[torch.tensor(row.mask, dtype=torch.bool)]
                for logprobs, row in zip(scores.logprobs_B_T.cpu(), rows, strict=True)
            ]
        )
        ratio = torch.exp(log_ratio)
        self._refuse(ratio.mean(), ratio.mean().item())
        return {
            "update_kl": (ratio - 1 - log_ratio).mean().item(),
            "update_ratio_mean": ratio.mean().item(),
            "update_ratio_max": ratio.max().item(),
        }

    def _refuse(self, loss: Tensor, ratio: float) -> None:
        if not torch.isfinite(loss):
            raise TrainingFailed(f"the loss became {loss.item()}")
        if not 1 / self.max_ratio <= ratio <= self.max_ratio:
            raise BreakerTripped(
                f"the mean importance ratio is {ratio:.3g}, beyond {self.max_ratio:g}: "
                "the policy no longer resembles the one that sampled these groups"
            )


def grpo_trainer(
    job: TrainingJob,
    recipe: GrpoRecipe,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TrainingRow],
    callbacks: list[TrainerCallback],
    folder: Path,
) -> RecordedGrpoTrainer:
    """Ready to train. Raises TrainingFailed for rows that teach nothing or mix temperatures."""
    dealt = steps_of(groups_of(rows), recipe.steps_per_round)
    places = [members for step in dealt for members in step]
    trainer = RecordedGrpoTrainer(
        model=model,
        reward_funcs=_recorded_reward,
        args=_arguments(job, recipe, dealt, _temperature(rows), folder),
        train_dataset=Dataset.from_dict({"prompt": [str(place) for place in range(len(places))]}),
        processing_class=tokenizer,
        rollout_func=_replay(places),
        callbacks=callbacks,
    )
    trainer.max_ratio = recipe.max_ratio
    trainer.last_places = dealt[-1]
    if recipe.beta > 0 and job.reference is not None:
        load_reference(model, Path(job.reference))
    return trainer


def _temperature(rows: Sequence[TrainingRow]) -> float:
    found = {row.temperature for row in rows if not row.demonstration}
    if len(found) != 1:
        raise TrainingFailed(f"groups must share one temperature, not {sorted(found)}")
    return found.pop()


def _recorded_reward(**columns: Any) -> list[float | None]:
    return columns["recorded_reward"]


def _replay(places: Sequence[Sequence[Member]]) -> Callable[[list[str], Any], dict[str, Any]]:
    """The rollout function: every prompt names a place, and comes once for each of its members."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        size = len(places[0])
        members = [m for prompt in prompts[::size] for m in places[int(prompt)]]
        return {
            "prompt_ids": [m.row.input_ids[: m.split] for m in members],
            "completion_ids": [m.row.input_ids[m.split :] for m in members],
            "logprobs": [m.row.old_logprobs[m.split :] for m in members],
            "env_mask": [[0 if m.filler else on for on in m.row.mask[m.split :]] for m in members],
            "advantage": [m.advantage for m in members],
            "recorded_reward": [None if m.filler else m.row.reward for m in members],
        }

    return rollout


def _arguments(
    job: TrainingJob, recipe: GrpoRecipe, dealt: Steps, temperature: float, folder: Path
) -> GRPOConfig:
    groups, size = len(dealt[0]), len(dealt[0][0])
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=len(dealt),
        per_device_train_batch_size=groups * size,
        steps_per_generation=1,
        num_generations=size,
        shuffle_dataset=False,
        temperature=temperature,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        epsilon=recipe.epsilon_low,
        epsilon_high=recipe.epsilon_high,
        beta=recipe.beta,
        seed=job.seed,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
