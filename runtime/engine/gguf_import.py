"""Turn a GGUF file of a Llama-family model into the folder layout every trainer reads.

The packaged model comes quantised in one `.gguf` file. Dequantising it is exact arithmetic on fp32
(scale times integer, plus offset), so the same file gives the same bytes on every machine, and one
base digest holds for everybody. llama.cpp interleaves the halves of every attention head's rotary
dimensions; they are put back here. Nothing but numpy is needed, so conversion takes seconds and
needs no trainer.

Scaling out: a pure function of one file into one folder; each machine converts its own copy.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from runtime.errors import InputError

Array = npt.NDArray[np.float32]

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3
"""GGUF's token type of control tokens."""


def import_gguf(source: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write config.json, tokenizer.json, tokenizer_config.json and model.safetensors (fp32).

    `progress` is called with the finished share in [0, 1]. Raises InputError for a file that is
    not a Llama model with a byte-level BPE vocabulary.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(fields, source)
    config = _config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    save_file(
        _tensors(reader, config, progress), folder / "model.safetensors", metadata={"format": "pt"}
    )


def _require(fields: Mapping[str, Any], source: Path) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in wanted.items():
        if fields.get(key) != value:
            raise InputError(f"{source}: {key} is {fields.get(key)!r}; only {value!r} is supported")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


# ---------------------------------------------------------------- weights


def _tensors(
    reader: gguf.GGUFReader, config: Mapping[str, Any], progress: Callable[[float], None]
) -> dict[str, Array]:
    heads = {
        "attn_q": int(config["num_attention_heads"]),
        "attn_k": int(config["num_key_value_heads"]),
    }
    tensors: dict[str, Array] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _uninterleave(weight, heads[kind])
        tensors[_tensor_name(tensor.name)] = np.ascontiguousarray(weight)
        progress(done / len(reader.tensors))
    return tensors


def _tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.weight"
    return f"{_TENSORS[parts[0]]}.weight"


def _uninterleave(weight: Array, heads: int) -> Array:
    """Rows of each head from (pair, half) order back to (half, pair), as rotary code expects."""
    rows, columns = weight.shape
    pairs = rows // heads // 2
    return weight.reshape(heads, pairs, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# ---------------------------------------------------------------- config


def _config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": _short_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short_float(fields["llama.rope.freq_base"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _short_float(fields["llama.rope.freq_base"]),
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "dtype": "float32",
    }


def _short_float(value: float) -> float:
    """A float32 read as float64, as its author wrote it: 9.999999747e-06 → 1e-05."""
    return float(f"{value:.7g}")


# ---------------------------------------------------------------- tokenizer


def _tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A `tokenizers` file: byte-level BPE, digits one by one, control tokens never merged."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _control_token(index, token)
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _control_token(index: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": True}


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    named = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        **named,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields["tokenizer.chat_template"],
    }
