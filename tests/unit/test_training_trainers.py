"""TRL's trainers as we use them: whose logprobs, whose tokens, whose advantages move the policy."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flywheel.recipe import GrpoRecipe, LoraRecipe, SftRecipe
from flywheel.training.errors import TrainingFailed
from flywheel.training.grpo import groups_of, grpo_trainer, steps_of
from flywheel.training.job import TrainingJob, TrainingRow
from flywheel.training.lora import inner, load_policy
from flywheel.training.sft import rate, sft_trainer
from flywheel.training.shared_prefix import score

pytestmark = [
    # peft and trl ask transformers for attributes that transformers is renaming
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`:UserWarning"),
]

PROMPT = [5, 6, 7, 8]
RESULT = [30, 31, 32]
"""What a tool said between two turns."""


def trajectory(
    name: str, group: str, turns: Sequence[Sequence[int]], reward: float | None
) -> TrainingRow:
    """Prompt, then turns with a tool result between them; logprobs are filled in by `recorded`."""
    ids, mask = list(PROMPT), [0] * len(PROMPT)
    for number, turn in enumerate(turns):
        between = RESULT if number else []
        ids += [*between, *turn]
        mask += [*([0] * len(between)), *([1] * len(turn))]
    return TrainingRow(
        id=name, group_id=group, input_ids=ids, mask=mask,
        old_logprobs=[0.0] * len(ids), policy_id="p", reward=reward,
    )  # fmt: skip


def recorded(model: Any, rows: Sequence[TrainingRow], shift: float = 0.0) -> list[TrainingRow]:
    """The rows as if the model had sampled them; `shift` makes the record of another policy."""
    with torch.no_grad():
        scores = score(inner(model), [r.input_ids for r in rows], [r.mask for r in rows])
    return [
        row.model_copy(
            update={
                "old_logprobs": [
                    (logprob + shift) * on
                    for logprob, on in zip(logprobs.tolist(), row.mask, strict=False)
                ]
            }
        )
        for row, logprobs in zip(rows, scores.logprobs_B_T, strict=True)
    ]


GROUPS = [
    trajectory("a1", "a", [[10, 11], [12, 2]], 1.0),
    trajectory("a2", "a", [[10, 11], [13, 14, 2]], 0.0),
    trajectory("b1", "b", [[15, 2]], 1.0),
    trajectory("b2", "b", [[16, 17, 2]], 0.0),
]


@pytest.fixture
def job(tiny_base: Path) -> TrainingJob:
    return TrainingJob(stage="grpo", base=str(tiny_base), seed=3, lora=LoraRecipe(rank=4, alpha=8))


@pytest.fixture
def policy(job: TrainingJob) -> Any:
    """A policy that already differs from its base."""
    model = load_policy(job)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def grpo(job: TrainingJob, policy: Any, tmp_path: Path) -> Callable[..., Any]:
    def build(rows: Sequence[TrainingRow], **recipe: Any) -> Any:
        values = GrpoRecipe(rounds=1, learning_rate=1e-2, **recipe)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(job.base)
        return grpo_trainer(job, values, policy, tokenizer, rows, [], tmp_path)

    return build


def logged(trainer: Any) -> Mapping[str, float]:
    """The metrics of the first step."""
    trainer.train()
    return trainer.state.log_history[0]


def weights(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def moved(before: Mapping[str, Tensor], model: Any) -> float:
    return max((p - before[n]).abs().max().item() for n, p in weights(model).items())


# ---------------------------------------------------------------- grpo


def test_fresh_groups_have_ratio_one_and_move_the_policy(
    grpo: Callable[..., Any], policy: Any
) -> None:
    before = weights(policy)
    metrics = logged(grpo(recorded(policy, GROUPS)))
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["grad_norm"] > 0
    assert moved(before, policy) > 1e-4


def test_the_old_policy_is_the_recorded_one(grpo: Callable[..., Any], policy: Any) -> None:
    metrics = logged(grpo(recorded(policy, GROUPS, shift=-0.5)))
    assert metrics["ratio_mean"] == pytest.approx(torch.tensor(0.5).exp().item(), rel=1e-4)
    assert metrics["kl"] == pytest.approx(torch.tensor(0.5).exp().item() - 1.5, rel=1e-3)
    assert 0 < metrics["clip_ratio/region_mean"] < 1


def test_clipped_tokens_have_no_gradient(grpo: Callable[..., Any], policy: Any) -> None:
    """Good attempts recorded as far less likely, bad ones as far more likely: all is clipped."""
    good = recorded(policy, [r for r in GROUPS if r.reward == 1.0], shift=-0.5)
    bad = recorded(policy, [r for r in GROUPS if r.reward == 0.0], shift=0.5)
    before = weights(policy)
    metrics = logged(grpo([*good, *bad]))
    assert metrics["clip_ratio/region_mean"] == 1.0
    assert metrics["grad_norm"] == 0
    assert moved(before, policy) == 0


def test_a_ratio_beyond_the_breaker_fails_before_anything_moves(
    grpo: Callable[..., Any], policy: Any
) -> None:
    before = weights(policy)
    trainer = grpo(recorded(policy, GROUPS, shift=-2.0), max_ratio=4.0)
    with pytest.raises(TrainingFailed, match=r"the mean importance ratio is 7\.39, beyond 4"):
        trainer.train()
    assert moved(before, policy) == 0


def test_environment_tokens_have_no_gradient(
    grpo: Callable[..., Any], policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the loss at every token's logprob: 0 exactly where the mask is 0."""
    rows = recorded(policy, GROUPS)
    trainer = grpo(rows)
    seen: list[Tensor] = []
    plain = trainer._get_per_token_logps_and_entropies

    def watched(*arguments: Any, **named: Any) -> Any:
        logprobs, entropies, _ = plain(*arguments, **named)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            seen.append(logprobs)
        return logprobs, entropies, None

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", watched)
    masks: list[Tensor] = []
    loss = trainer._compute_loss

    def noted(model: Any, inputs: dict[str, Any]) -> Tensor:
        masks.append((inputs["completion_mask"] * inputs["tool_mask"]).bool())
        return loss(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", noted)
    trainer.train()
    (logprobs,), (mask,) = seen, masks
    assert logprobs.grad is not None
    assert int(mask.sum()) == sum(sum(row.mask) for row in rows)
    assert int((~mask).sum()) >= 2 * len(RESULT)
    assert logprobs.grad[~mask].eq(0).all()
    assert logprobs.grad[mask].ne(0).all()


def test_changed_environment_logprobs_change_nothing(grpo: Callable[..., Any], policy: Any) -> None:
    """Garbage recorded where the policy sampled nothing is never read."""
    rows = recorded(policy, GROUPS)
    garbage = [
        row.model_copy(
            update={
                "old_logprobs": [
                    logprob if on else -50.0
                    for logprob, on in zip(row.old_logprobs, row.mask, strict=True)
                ]
            }
        )
        for row in rows
    ]
    assert logged(grpo(garbage))["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_attempts_that_failed_for_other_reasons_change_nothing(
    grpo: Callable[..., Any], policy: Any
) -> None:
    start = weights(policy)
    rows = recorded(policy, GROUPS)
    logged(grpo(rows))
    expected = weights(policy)
    policy.load_state_dict(start, strict=False)
    failed = recorded(policy, [trajectory("a3", "a", [[20, 21]], None)])
    logged(grpo([*rows, *failed]))
    assert moved(expected, policy) < 1e-6


def test_groups_of_unequal_size_are_filled_up_without_effect(
    grpo: Callable[..., Any], policy: Any
) -> None:
    rows = recorded(policy, [*GROUPS, trajectory("a3", "a", [[18, 19, 2]], 0.0)])
    trainer = grpo(rows)
    metrics = logged(trainer)
    assert trainer.trained_rows == 5
    assert trainer.trained_tokens == sum(sum(row.mask) for row in rows)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_members_share_the_baseline_and_branches_of_one_run_count_once() -> None:
    rows = [
        trajectory("a1/0", "a", [[10]], 1.0),
        trajectory("a1/1", "a", [[11]], 1.0),
        trajectory("a2", "a", [[12]], 0.0),
    ]
    (((first, second, third),),) = steps_of(groups_of(rows), 1)
    assert first.advantage == second.advantage == pytest.approx(0.707, abs=1e-3)
    assert third.advantage == pytest.approx(-0.707, abs=1e-3)


def test_groups_without_difference_are_left_out() -> None:
    same = [trajectory(f"c{n}", "c", [[10 + n]], 1.0) for n in range(2)]
    assert [group.group_id for group in groups_of([*same, *GROUPS])] == ["a", "b"]
    with pytest.raises(TrainingFailed, match="nothing to learn from"):
        steps_of(groups_of(same), 1)


def test_steps_deal_groups_out_evenly() -> None:
    rows = [trajectory(f"{g}{n}", str(g), [[10 + n]], float(n)) for g in range(5) for n in range(2)]
    dealt = steps_of(groups_of(rows), 2)
    assert [len(step) for step in dealt] == [3, 3]
    real = [[m.row.group_id for members in step for m in members if not m.filler] for step in dealt]
    assert [len(set(groups)) for groups in real] == [3, 2]
    assert len(steps_of(groups_of(rows[:4]), 5)) == 2


def test_mixed_temperatures_are_refused(grpo: Callable[..., Any], policy: Any) -> None:
    first, *rest = recorded(policy, GROUPS)
    with pytest.raises(TrainingFailed, match="share one temperature"):
        grpo([first.model_copy(update={"temperature": 0.7}), *rest])


# ---------------------------------------------------------------- sft


def test_sft_learns_the_masked_tokens_and_only_those(
    job: TrainingJob, policy: Any, tmp_path: Path
) -> None:
    rows = [row.model_copy(update={"old_logprobs": [], "reward": None}) for row in GROUPS[:1]]
    recipe = SftRecipe(steps=12, batch_size=1, learning_rate=3e-2, warmup_steps=0, minimum_rows=1)
    ids, mask = [rows[0].input_ids], [rows[0].mask]
    others = [[0] * len(PROMPT) + [1 - on for on in rows[0].mask[len(PROMPT) :]]]
    before = {n: score(inner(policy), ids, w).logprobs_B_T.sum().item() for n, w in
              (("mask", mask), ("others", others))}  # fmt: skip
    trainer = sft_trainer(
        job, recipe, policy, PreTrainedTokenizerFast.from_pretrained(job.base), rows, [], tmp_path
    )
    first = logged(trainer)["loss"]
    assert first == pytest.approx(-before["mask"] / sum(rows[0].mask), rel=1e-4)
    after = score(inner(policy), ids, mask).logprobs_B_T.sum().item()
    assert after > before["mask"] + 5
    assert trainer.trained_tokens == 12 * sum(rows[0].mask)


def test_too_few_rows_are_refused(job: TrainingJob, policy: Any, tmp_path: Path) -> None:
    recipe = SftRecipe(steps=1, learning_rate=1e-3, minimum_rows=2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job.base)
    with pytest.raises(TrainingFailed, match="1 rows to imitate are too few"):
        sft_trainer(job, recipe, policy, tokenizer, GROUPS[:1], [], tmp_path)


def test_the_rate_rises_from_its_first_share_and_falls_as_the_schedule_says() -> None:
    warm = [rate(step, schedule="constant", warmup=2, steps=6) for step in range(5)]
    assert warm == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    linear = [rate(step, schedule="linear", warmup=0, steps=4) for step in range(5)]
    assert linear == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rate(2, schedule="cosine", warmup=0, steps=4) == pytest.approx(0.5)
