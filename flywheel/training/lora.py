"""The policy in training: an fp32 base, frozen, with one LoRA adapter, and the optimiser's moments.

fp32 because the engine serves fp32: in bf16 the two disagree by more than a small update. What is
saved is canonical (sorted keys, no paths of this machine), so that equal training gives equal
bytes; it is written beside its place and renamed, so that a folder is whole or absent.
"""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from flywheel.recipe import LoraRecipe
from flywheel.training.errors import TrainingFailed
from flywheel.training.job import TrainingJob

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def load_policy(job: TrainingJob) -> PeftModel:
    """The base with the job's starting adapter, or with a new one seeded by the job."""
    base = AutoModelForCausalLM.from_pretrained(
        job.base, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    base.config.use_cache = False
    if job.start is not None:
        return PeftModel.from_pretrained(base, job.start, is_trainable=True)
    torch.manual_seed(job.seed)
    return get_peft_model(base, _config(job.lora, Path(job.base).name))


def _config(lora: LoraRecipe, base: str) -> LoraConfig:
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def load_reference(model: PeftModel, folder: Path) -> None:
    """Make the frozen adapter `ref`, which TRL copied from the start, another one."""
    tensors = load_file(folder / "adapter_model.safetensors")
    set_peft_model_state_dict(model, tensors, adapter_name="ref")


def inner(model: Any) -> PreTrainedModel:
    """The transformer inside, adapter layers in place."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files. Raises TrainingFailed, and writes nothing, for NaN or infinity."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in sorted(_state(model).items())
    }
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingFailed(f"{len(broken)} of the adapter's tensors hold NaN, first {broken[0]}")
    fresh = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    save_file(tensors, fresh / "adapter_model.safetensors", metadata={"format": "pt"})
    (fresh / "adapter_config.json").write_text(_config_json(model), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors; the embeddings are the base's, which PEFT would ask a hub about."""
    return get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)


def _config_json(model: PeftModel) -> str:
    raw = model.peft_config["default"].to_dict()
    raw |= {
        "base_model_name_or_path": Path(raw["base_model_name_or_path"] or "").name,
        "inference_mode": True,
        "target_modules": sorted(raw["target_modules"]),
    }
    plain = {key: getattr(value, "value", value) for key, value in raw.items()}
    return json.dumps(plain, indent=1, sort_keys=True, default=sorted) + "\n"


# ---------------------------------------------------------------- moments


def save_moments(optimizer: torch.optim.Optimizer, model: PeftModel, path: Path) -> None:
    """Adam's moments by parameter name."""
    states = {
        f"{moment}:{name}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }
    fresh = path.with_name(f"{path.name}.partial")
    save_file(states, fresh)
    fresh.rename(path)


def load_moments(optimizer: torch.optim.Optimizer, model: PeftModel, path: Path) -> None:
    """Go on with saved moments. Raises TrainingFailed where they are not this adapter's."""
    saved = load_file(path)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = {m: saved[f"{m}:{name}"] for m in _MOMENTS if f"{m}:{name}" in saved}
        if len(state) < len(_MOMENTS) or state["exp_avg"].shape != parameter.shape:
            raise TrainingFailed(f"{path.name} holds no moments of {name}'s shape")
        optimizer.state[parameter] = {m: t.to(parameter.device) for m, t in state.items()}
        optimizer.state[parameter]["step"] = state["step"].cpu()
