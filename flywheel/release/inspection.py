"""Whether a folder holds a LoRA adapter of our base, decided without loading a tensor library.

The base's own safetensors header says which linear modules exist and their shapes, so every
architecture is judged alike. Each refusal has its own reason; nothing in the files is executed,
imported or fetched, and what would change the result in a way that the engines do not compute
(DoRA, ranks per layer, trained biases) is refused rather than ignored.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flywheel.release.tensor_file import TensorEntry, first_not_finite, read_entries
from runtime.errors import AdapterRefused
from runtime.run import Json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MAX_RANK = 512
_PREFIX = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("F32", "F16", "BF16")
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "target_parameters",
    "auto_mapping",
)
Shape = tuple[int, ...]


def read_config(content: bytes) -> dict[str, Json]:
    """A LoRA configuration, as PEFT writes it. Raises AdapterRefused."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _wrong_config(f"is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise _wrong_config("must have peft_type LORA")
    if found := [key for key in _UNSUPPORTED if raw.get(key)]:
        raise _wrong_config(f"asks for {', '.join(found)}; train plain LoRA")
    if raw.get("bias", "none") != "none":
        raise _wrong_config(f"has bias {raw['bias']!r}; only 'none' is served")
    alpha = raw.get("lora_alpha")
    if not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise _wrong_config(f"has lora_alpha {alpha!r}; a positive number is needed")
    return raw


def _wrong_config(what: str) -> AdapterRefused:
    return AdapterRefused(f"{CONFIG} {what}", reason="wrong_config")


def rank_of(config: Mapping[str, Json], wanted: int | None = None) -> int:
    """Its rank. Raises AdapterRefused for one out of range, or other than the recipe's."""
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise AdapterRefused(
            f"{CONFIG} has r {rank!r}; a whole number from 1 to {MAX_RANK} is needed",
            reason="wrong_rank",
        )
    if wanted is not None and rank != wanted:
        raise AdapterRefused(
            f"the adapter has rank {rank}, its recipe says {wanted}", reason="wrong_rank"
        )
    return rank


def inspect_weights(path: Path, rank: int, base: Mapping[str, Shape]) -> None:
    """Demand that the file holds whole, finite LoRA pairs of modules that the base has.

    `base` is `base_shapes(...)`. Raises AdapterRefused with the reason.
    """
    entries = read_entries(path)
    if not entries:
        raise AdapterRefused(f"{path.name} holds no tensors", reason="empty")
    modules = {_module(name) for name in entries}
    for module in sorted(modules):
        _inspect_pair(module, rank, base, entries)
    if (name := first_not_finite(path, entries)) is not None:
        raise AdapterRefused(f"{name} holds NaN or infinity", reason="not_finite")


def base_shapes(model_dir: Path) -> dict[str, Shape]:
    """Module name → [out, in] of every linear module of a base model's folder."""
    shapes: dict[str, Shape] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        for name, entry in read_entries(path).items():
            if name.endswith(".weight") and len(entry.shape) == 2:
                shapes[name.removesuffix(".weight")] = entry.shape
    return shapes


def _module(name: str) -> str:
    for half in _HALVES:
        if name.startswith(_PREFIX) and name.endswith(half):
            return name.removeprefix(_PREFIX).removesuffix(half)
    raise AdapterRefused(
        f"{name!r} is not a LoRA tensor; the pattern is {_PREFIX}<module>{_HALVES[0]}",
        reason="unknown_tensor",
    )


def _inspect_pair(
    module: str, rank: int, base: Mapping[str, Shape], entries: Mapping[str, TensorEntry]
) -> None:
    found = [entries.get(f"{_PREFIX}{module}{half}") for half in _HALVES]
    if None in found:
        raise AdapterRefused(f"{module} has only one of lora_A and lora_B", reason="half_a_pair")
    a, b = (entry for entry in found if entry is not None)
    if module not in base:
        raise AdapterRefused(
            f"the base has no module {module!r}: this adapter was trained on another one",
            reason="wrong_base",
        )
    out, into = base[module]
    if (a.shape[:1], b.shape[1:]) != ((rank,), (rank,)):
        raise AdapterRefused(
            f"{module}: A and B have shapes {a.shape} and {b.shape}, the configuration says "
            f"rank {rank}",
            reason="wrong_rank",
        )
    if (a.shape, b.shape) != ((rank, into), (out, rank)):
        raise AdapterRefused(
            f"{module}: A and B have shapes {a.shape} and {b.shape}, the base needs "
            f"{(rank, into)} and {(out, rank)}",
            reason="wrong_base",
        )
    if wrong := {a.dtype, b.dtype} - set(_DTYPES):
        raise AdapterRefused(
            f"{module} is stored as {', '.join(wrong)}; allowed: {', '.join(_DTYPES)}",
            reason="wrong_dtype",
        )


def normalised(config: Mapping[str, Any], base_name: str) -> bytes:
    """The configuration as it is stored: no path of the machine it was trained on, sorted."""
    changed = {**config, "base_model_name_or_path": base_name, "inference_mode": True}
    if isinstance(config.get("target_modules"), list):
        changed["target_modules"] = sorted(config["target_modules"])
    return json.dumps(changed, indent=1, sort_keys=True).encode() + b"\n"
