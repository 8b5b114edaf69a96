"""A plain forward pass for Llama-family models in fp32: tokens of many sequences in one batch.

One call takes the new tokens of any number of sequences packed into one row axis N, whether a
sequence brings one token (decoding) or hundreds (a prompt), so prompts ride along with decoding
and every weight is read once per step. Keys and values go to slots (`kv_cache`); attention of the
one-token sequences is one batched call over the slots, each prompt has its own. Grouped queries are
folded into the query axis, which spares repeating keys and values.

Per CPU-second this is as fast as transformers' own model on a uniform batch (135M parameters, 2
cores: both are bound by the matrix products). What it adds is what serving needs: sequences of any
length side by side without padding, joining and leaving without copying the others' cache, and
prompts in the same pass as decoding. Other architectures belong on another engine; loading one
says so.

Scaling out: one process per machine; a GPU or a larger model belongs to vLLM.

Axis suffixes: N packed rows, S slots, T positions, H heads, K key/value heads, D head dimension.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from runtime.engine.local.kv_cache import Slots
from runtime.errors import InputError

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Longest sequence in tokens."""
    epsilon: float
    rope_theta: float

    @classmethod
    def from_folder(cls, model_dir: Path) -> Self:
        """Raises InputError naming what this engine does not compute."""
        raw: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _require_supported(model_dir, raw, rope)
        heads = int(raw["num_attention_heads"])
        return cls(
            vocabulary=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            context=int(raw["max_position_embeddings"]),
            epsilon=float(raw["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        )


def _require_supported(model_dir: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    supported = {
        "model_type": (raw.get("model_type"), FAMILIES),
        "hidden_act": (raw.get("hidden_act", "silu"), {"silu"}),
        "rope type": (rope.get("rope_type", "default"), {"default"}),
        "sliding window": (_slides(raw), {False}),
        "mlp_bias": (bool(raw.get("mlp_bias")), {False}),
    }
    for what, (value, allowed) in supported.items():
        if value not in allowed:
            raise InputError(
                f"{model_dir}: {what} is {value!r}; the embedded engine computes "
                f"{sorted(map(str, allowed))}: serve this model with vLLM (NORIA_ENGINE_URL)"
            )


def _slides(raw: dict[str, Any]) -> bool:
    return bool(raw.get("sliding_window")) and raw.get("use_sliding_window", True)


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Projections that read the same input are stacked by rows."""

    attention_norm: Tensor
    qkv: Tensor
    """[(H + 2K)·D, hidden]"""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """[2·intermediate, hidden]"""
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of one policy, fp32. Policies share the tensors an adapter left alone."""

    config: LlamaConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def from_folder(cls, model_dir: Path) -> Self:
        """Read the safetensors of a base model. Raises InputError where one is missing."""
        config = LlamaConfig.from_folder(model_dir)
        tensors = _read_tensors(model_dir)
        try:
            embedding = tensors["model.embed_tokens.weight"]
            return cls(
                config=config,
                embedding=embedding,
                layers=tuple(_layer(tensors, index) for index in range(config.layers)),
                norm=tensors["model.norm.weight"],
                head=tensors.get("lm_head.weight", embedding),
            )
        except KeyError as error:
            raise InputError(f"{model_dir}: the safetensors hold no tensor {error}") from error


def _read_tensors(model_dir: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    return tensors


def _layer(tensors: dict[str, Tensor], index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    projections = ("q_proj", "k_proj", "v_proj")
    biased = f"{attention}q_proj.bias" in tensors
    return Layer(
        attention_norm=tensors[f"{prefix}input_layernorm.weight"],
        qkv=torch.cat([tensors[f"{attention}{name}.weight"] for name in projections]),
        qkv_bias=torch.cat([tensors[f"{attention}{name}.bias"] for name in projections])
        if biased
        else None,
        q_norm=tensors.get(f"{attention}q_norm.weight"),
        k_norm=tensors.get(f"{attention}k_norm.weight"),
        output=tensors[f"{attention}o_proj.weight"],
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=torch.cat(
            [tensors[f"{prefix}mlp.{name}.weight"] for name in ("gate_proj", "up_proj")]
        ),
        down=tensors[f"{mlp}down_proj.weight"],
    )


# ---------------------------------------------------------------- one step


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence: they go to `slot` at positions `start`, `start + 1`, …"""

    slot: int
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A chunk of several tokens: its rows, and what each of them may look at."""

    rows: slice
    slot: int
    length: int
    mask: Tensor
    """[G·tokens, length], True where a query row may look; G query heads share a key head."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every layer of one step needs to know, computed once."""

    slots_N: Tensor
    positions_N: Tensor
    cos_N: Tensor
    sin_N: Tensor
    prompts: list[_Prompt]
    single_rows: Tensor
    """Rows of the one-token chunks."""
    single_slots: Tensor
    span: int
    """Slots that the batched attention covers: 0 … span-1."""
    length: int
    """Positions that it covers."""
    mask: Tensor | None
    """[span, 1, 1, length], True where a slot holds a key of its sequence."""


class Llama:
    """The forward pass. Holds no weights: they are handed in, one policy a step."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(config.context, dtype=torch.float32),
            1.0 / config.rope_theta ** (half / config.head_dim),
        )
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def step(
        self, weights: Weights, slots: Slots, chunks: Sequence[Chunk], wanted: Sequence[int]
    ) -> Tensor:
        """Compute the chunks, store their keys and values, and give logits.

        `wanted` are indices of chunks; the result is [len(wanted), vocabulary]: the logits after
        the last token of each.
        """
        plan = self._plan(chunks)
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids])
        x = F.embedding(ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(x, layer, slots.keys[index], slots.values[index], plan)
            x = x + self._mlp(x, layer)
        ends = torch.tensor([len(chunk.ids) for chunk in chunks]).cumsum(0) - 1
        last = self._norm(x[ends[list(wanted)]], weights.norm)
        return F.linear(last, weights.head)

    def _plan(self, chunks: Sequence[Chunk]) -> _Plan:
        groups = self.config.heads // self.config.kv_heads
        prompts: list[_Prompt] = []
        singles: list[tuple[int, Chunk]] = []
        row = 0
        for chunk in chunks:
            if len(chunk.ids) == 1:
                singles.append((row, chunk))
            else:
                prompts.append(_prompt(chunk, row, groups))
            row += len(chunk.ids)
        positions = torch.cat(
            [torch.arange(c.start, c.start + len(c.ids), dtype=torch.long) for c in chunks]
        )
        return _Plan(
            slots_N=torch.tensor([c.slot for c in chunks for _ in c.ids]),
            positions_N=positions,
            cos_N=self._cos[positions].unsqueeze(1),
            sin_N=self._sin[positions].unsqueeze(1),
            prompts=prompts,
            single_rows=torch.tensor([r for r, _ in singles], dtype=torch.long),
            single_slots=torch.tensor([c.slot for _, c in singles], dtype=torch.long),
            span=max((c.slot + 1 for _, c in singles), default=0),
            length=max((c.start + 1 for _, c in singles), default=0),
            mask=_slot_mask([c for _, c in singles]) if singles else None,
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.epsilon)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def _attention(
        self, x: Tensor, layer: Layer, keys: Tensor, values: Tensor, plan: _Plan
    ) -> Tensor:
        c = self.config
        qkv = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        q_NHD, k_NKD, v_NKD = qkv.view(len(x), -1, c.head_dim).split(
            [c.heads, c.kv_heads, c.kv_heads], dim=1
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q_NHD, k_NKD = self._norm(q_NHD, layer.q_norm), self._norm(k_NKD, layer.k_norm)
        q_NHD = _rotate(q_NHD, plan.cos_N, plan.sin_N)
        keys[plan.slots_N, :, plan.positions_N] = _rotate(k_NKD, plan.cos_N, plan.sin_N)
        values[plan.slots_N, :, plan.positions_N] = v_NKD
        mixed = torch.empty_like(q_NHD)
        for prompt in plan.prompts:
            mixed[prompt.rows] = self._attend_prompt(q_NHD[prompt.rows], keys, values, prompt)
        if plan.mask is not None:
            mixed[plan.single_rows] = self._attend_singles(q_NHD, keys, values, plan)
        return F.linear(mixed.view(len(x), -1), layer.output)

    def _attend_prompt(
        self, q_tHD: Tensor, keys: Tensor, values: Tensor, prompt: _Prompt
    ) -> Tensor:
        c, tokens = self.config, len(q_tHD)
        q = q_tHD.view(tokens, c.kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(
            q.reshape(1, c.kv_heads, -1, c.head_dim),
            keys[prompt.slot : prompt.slot + 1, :, : prompt.length],
            values[prompt.slot : prompt.slot + 1, :, : prompt.length],
            attn_mask=prompt.mask,
        )
        mixed = mixed.view(c.kv_heads, -1, tokens, c.head_dim).permute(2, 0, 1, 3)
        return mixed.reshape(tokens, c.heads, c.head_dim)

    def _attend_singles(self, q_NHD: Tensor, keys: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        c = self.config
        q_SHD = q_NHD.new_zeros(plan.span, c.heads, c.head_dim)
        q_SHD[plan.single_slots] = q_NHD[plan.single_rows]
        mixed = F.scaled_dot_product_attention(
            q_SHD.view(plan.span, c.kv_heads, -1, c.head_dim),
            keys[: plan.span, :, : plan.length],
            values[: plan.span, :, : plan.length],
            attn_mask=plan.mask,
        )
        return mixed.reshape(plan.span, c.heads, c.head_dim)[plan.single_slots]


def _prompt(chunk: Chunk, row: int, groups: int) -> _Prompt:
    tokens = len(chunk.ids)
    length = chunk.start + tokens
    causal = torch.ones(tokens, length, dtype=torch.bool).tril(chunk.start)
    return _Prompt(slice(row, row + tokens), chunk.slot, length, causal.repeat(groups, 1))


def _slot_mask(singles: Sequence[Chunk]) -> Tensor:
    """Slots without a one-token chunk look at position 0, so that no row is empty."""
    span = max(c.slot for c in singles) + 1
    lengths = torch.ones(span, dtype=torch.long)
    for chunk in singles:
        lengths[chunk.slot] = chunk.start + 1
    positions = torch.arange(int(lengths.max()))
    return (positions[None, :] < lengths[:, None])[:, None, None, :]


def _rotate(x: Tensor, cos_N: Tensor, sin_N: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos_N - second * sin_N, second * cos_N + first * sin_N), dim=-1)
