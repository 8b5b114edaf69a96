"""A whole job in this process: rounds go on, equal jobs leave equal bytes, NaN is never saved."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flywheel.recipe import GrpoRecipe, LoraRecipe, SftRecipe
from flywheel.training.errors import TrainingFailed
from flywheel.training.job import Progress, TrainingJob, TrainingResult, TrainingRow
from flywheel.training.progress import Reporter
from flywheel.training.train import train

pytestmark = [
    # peft and trl ask transformers for attributes that transformers is renaming
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`:UserWarning"),
]

ROWS = [
    TrainingRow(
        id=f"demo{n}",
        group_id=f"task{n}",
        input_ids=[5, 6, 7, 8, 10 + n, 11, 2],
        mask=[0, 0, 0, 0, 1, 1, 1],
    )
    for n in range(4)
]


def sft_job(base: Path, steps: int, **changes: Any) -> TrainingJob:
    recipe = SftRecipe(
        steps=steps, batch_size=4, learning_rate=1e-2, minimum_rows=4, warmup_steps=0
    )
    values = {"stage": "sft", "seed": 3, "lora": LoraRecipe(rank=4, alpha=8), "sft": recipe}
    return TrainingJob(base=str(base), **(values | changes))


def trained(
    folder: Path, job: TrainingJob, rows: list[TrainingRow] = ROWS, stream: Any = None
) -> TrainingResult:
    folder.mkdir(exist_ok=True)
    return train(folder, job, rows, Reporter(stream or io.StringIO()))


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def apart(one: Path, two: Path) -> float:
    """Largest difference between two adapters."""
    first, second = weights(one), weights(two)
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_a_round_goes_on_with_adapter_and_moments(tiny_base: Path, tmp_path: Path) -> None:
    """Two rounds with moments handed on are one longer training; without them they are not."""
    first, whole = tmp_path / "first", tmp_path / "whole"
    trained(first, sft_job(tiny_base, 1))
    trained(whole, sft_job(tiny_base, 2))
    forgot = sft_job(tiny_base, 1, start=str(first / "adapter"))
    handed = forgot.model_copy(update={"optimizer": str(first / "optimizer.safetensors")})
    trained(tmp_path / "handed", handed)
    trained(tmp_path / "forgot", forgot)
    assert apart(tmp_path / "handed", whole) < 1e-6
    assert apart(tmp_path / "forgot", whole) > 1e-4


def test_equal_jobs_leave_equal_bytes(tiny_base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        trained(tmp_path / name, sft_job(tiny_base, 1))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        one, two = ((tmp_path / n / "adapter" / file).read_bytes() for n in ("one", "two"))
        assert one == two
    assert str(tiny_base.parent).encode() not in two


def test_moments_of_another_shape_are_refused(tiny_base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "one", sft_job(tiny_base, 1))
    other = sft_job(
        tiny_base, 1,
        lora=LoraRecipe(rank=2), optimizer=str(tmp_path / "one" / "optimizer.safetensors"),
    )  # fmt: skip
    with pytest.raises(TrainingFailed, match="holds no moments of"):
        trained(tmp_path / "two", other)


def test_a_grpo_job_starts_from_the_adapter_it_is_given(tiny_base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "sft", sft_job(tiny_base, 1))
    rows = [
        row.model_copy(
            update={"group_id": "g", "reward": float(n % 2), "old_logprobs": [0.0] * 4 + [-4.0] * 3}
        )
        for n, row in enumerate(ROWS)
    ]
    recipe = GrpoRecipe(rounds=1, learning_rate=1e-3, max_ratio=1e6)
    start = str(tmp_path / "sft" / "adapter")
    heard = io.StringIO()
    job = sft_job(tiny_base, 1, stage="grpo", sft=None, grpo=recipe, start=start)
    result = trained(tmp_path / "grpo", job, rows, heard)
    (step,) = result.metrics
    assert {"ratio_mean", "ratio_max", "clip_share", "kl", "entropy"} <= step.metrics.keys()
    assert step.metrics["reward"] == 0.5
    assert 0 < apart(tmp_path / "sft", tmp_path / "grpo") < 0.01
    lines = [Progress.model_validate(json.loads(line)) for line in heard.getvalue().splitlines()]
    assert step in lines
    assert step.metrics["update_kl"] > 0
    assert step.metrics["update_ratio_max"] >= step.metrics["update_ratio_mean"]


def test_the_kl_term_is_measured_to_the_start(tiny_base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "sft", sft_job(tiny_base, 1))
    rows = [
        row.model_copy(
            update={"group_id": "g", "reward": float(n % 2), "old_logprobs": [0.0] * 4 + [-4.0] * 3}
        )
        for n, row in enumerate(ROWS)
    ]
    recipe = GrpoRecipe(rounds=1, learning_rate=1e-3, max_ratio=1e6, beta=0.1)
    start = str(tmp_path / "sft" / "adapter")
    job = sft_job(tiny_base, 1, stage="grpo", sft=None, grpo=recipe, start=start)
    (step,) = trained(tmp_path / "grpo", job, rows).metrics
    assert step.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert set(weights(tmp_path / "grpo")) == set(weights(tmp_path / "sft"))
    trained(tmp_path / "far", sft_job(tiny_base, 6))
    moved = job.model_copy(update={"reference": str(tmp_path / "far" / "adapter")})
    (step,) = trained(tmp_path / "again", moved, rows).metrics
    assert step.metrics["kl"] > 1e-3


def test_weights_that_are_no_numbers_are_never_saved(tiny_base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "start", sft_job(tiny_base, 1))
    file = tmp_path / "start" / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.full_like(t, torch.nan) for name, t in load_file(file).items()}, file)
    with pytest.raises(TrainingFailed, match="became nan"):
        trained(tmp_path / "again", sft_job(tiny_base, 1, start=str(file.parent)))
    assert not (tmp_path / "again" / "adapter").exists()
