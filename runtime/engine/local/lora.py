"""Read a LoRA adapter in PEFT's format and merge it into a copy of the base weights.

W' = W + scale · B·A in fp32, with scale = alpha / r (alpha / √r for rank-stabilised adapters;
Hu et al. 2021, Kalajdzievski 2023). The base stays pristine: every adapter is merged into copies of
the tensors it touches, never into another adapter and never taken out again, so that no rounding
accumulates. Tensors that an adapter leaves alone are shared with the base.

Only safetensors are read. An adapter is whole or refused, each with its own reason: a missing
file, an unknown module, a wrong rank or shape, a tensor left over, NaN.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.engine.local.llama import Layer, LlamaConfig, Weights
from runtime.errors import InputError

MAX_RANK = 512
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.([a-z_]+\.[a-z]+_proj)\.lora_([AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole, checked adapter: (layer, module) → A [r, in] and B [out, r]."""

    scale: float
    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]

    @classmethod
    def from_folder(cls, folder: Path, config: LlamaConfig) -> Self:
        """Raises InputError saying what is wrong with it."""
        raw = _read_config(folder)
        rank, scale = _rank_and_scale(folder, raw)
        halves = _read_halves(folder)
        pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        for layer, module in sorted({key[:2] for key in halves}):
            pair = tuple(halves.get((layer, module, half)) for half in "AB")
            name = f"{folder.name}: layer {layer} {module}"
            right = _module(name, layer, module, config).lora_shapes(rank)
            pairs[layer, module.split(".")[1]] = _checked(name, pair, right)
        if not pairs:
            raise InputError(f"{folder}: adapter_model.safetensors holds no LoRA tensors")
        return cls(scale, pairs)

    @torch.inference_mode()
    def merged(self, base: Weights) -> Weights:
        """The base with this adapter in it. The base is not changed."""
        layers = list(base.layers)
        for index in sorted({layer for layer, _ in self.pairs}):
            layers[index] = self._merged_layer(index, base.layers[index], base.config)
        return replace(base, layers=tuple(layers))

    def _merged_layer(self, index: int, layer: Layer, config: LlamaConfig) -> Layer:
        copies: dict[str, Tensor] = {}
        modules = _modules(config)
        for (of_layer, module), (a, b) in self.pairs.items():
            if of_layer != index:
                continue
            place = modules[module]
            if place.tensor not in copies:
                copies[place.tensor] = getattr(layer, place.tensor).clone()
            copies[place.tensor][place.rows] += self.scale * (b @ a)
        return replace(layer, **copies)


@dataclass(frozen=True, slots=True)
class _Module:
    """Where the weight of one linear module lives."""

    block: str
    """self_attn or mlp."""
    tensor: str
    """The field of `Layer` that holds it, stacked with others."""
    rows: slice
    columns: int

    def lora_shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B."""
        return (rank, self.columns), (self.rows.stop - self.rows.start, rank)


def _modules(config: LlamaConfig) -> dict[str, _Module]:
    c = config
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = {
        "q_proj": _Module("self_attn", "qkv", slice(0, query), c.hidden),
        "k_proj": _Module("self_attn", "qkv", slice(query, query + key), c.hidden),
        "v_proj": _Module("self_attn", "qkv", slice(query + key, query + 2 * key), c.hidden),
        "o_proj": _Module("self_attn", "output", slice(0, c.hidden), query),
    }
    return attention | {
        "gate_proj": _Module("mlp", "gate_up", slice(0, c.intermediate), c.hidden),
        "up_proj": _Module("mlp", "gate_up", slice(c.intermediate, 2 * c.intermediate), c.hidden),
        "down_proj": _Module("mlp", "down", slice(0, c.hidden), c.intermediate),
    }


# ---------------------------------------------------------------- reading


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: missing or unreadable; an adapter folder has one") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type must be LORA")
    unsupported = ["use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias"]
    if found := [key for key in unsupported if raw.get(key)]:
        raise InputError(f"{path}: {', '.join(found)} is not supported; train plain LoRA")
    if raw.get("bias", "none") != "none":
        raise InputError(f"{path}: bias must be none, not {raw['bias']!r}")
    return raw


def _rank_and_scale(folder: Path, raw: Mapping[str, Any]) -> tuple[int, float]:
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise InputError(f"{folder}: r must be a whole number from 1 to {MAX_RANK}, not {rank!r}")
    if not isinstance(alpha, int | float):
        raise InputError(f"{folder}: lora_alpha must be a number, not {alpha!r}")
    return rank, alpha / (rank**0.5 if raw.get("use_rslora") else rank)


def _read_halves(folder: Path) -> dict[tuple[int, str, str], Tensor]:
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise InputError(f"{path}: missing; adapters are loaded from safetensors only")
    halves: dict[tuple[int, str, str], Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                match = _KEY.fullmatch(key)
                if match is None:
                    raise InputError(f"{path}: unknown tensor {key!r}; LoRA of linear layers only")
                halves[int(match[1]), match[2], match[3]] = file.get_tensor(key).float()
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file: {error}") from error
    return halves


def _module(name: str, layer: int, module: str, config: LlamaConfig) -> _Module:
    """The base's module of this name, `self_attn.q_proj`. Raises InputError where it has none."""
    block, last = module.split(".")
    found = _modules(config).get(last)
    if found is None or found.block != block or layer >= config.layers:
        known = ", ".join(_modules(config))
        raise InputError(f"{name} is not in the base: it has {config.layers} layers with {known}")
    return found


def _checked(
    name: str, pair: tuple[Tensor | None, ...], right: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    a, b = pair
    if a is None or b is None:
        raise InputError(f"{name} has only one of lora_A and lora_B")
    found = (tuple(a.shape), tuple(b.shape))
    if found != right:
        raise InputError(f"{name}: A and B have shapes {found}, this base and r need {right}")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise InputError(f"{name} holds NaN or infinity")
    return a, b
