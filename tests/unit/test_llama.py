"""The forward pass equals transformers' for every family it claims, in any packing of chunks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runtime.engine.local.kv_cache import Slots
from runtime.engine.local.llama import Chunk, Llama, LlamaConfig, Weights
from runtime.errors import InputError

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 5_000.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A tiny random model of the family: its folder, and transformers' own."""
    name, extra = FAMILIES[request.param]
    config = getattr(transformers, f"{name}Config")(**TINY, **extra)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms start at 1 and biases at 0: too easy
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_any_packing_gives_transformers_logits(family: tuple[Path, Any]) -> None:
    folder, model = family
    weights = Weights.from_folder(folder)
    llama, slots = Llama(weights.config), Slots(weights.config, capacity=16)
    slots.reserve(3, 16)
    reference, other = expected(model, IDS), expected(model, IDS[::-1])

    def step(*chunks: Chunk) -> torch.Tensor:
        return llama.step(weights, slots, chunks, range(len(chunks)))

    first = step(Chunk(0, 0, IDS[:4]), Chunk(2, 0, IDS[::-1][:7]), Chunk(1, 0, IDS[:1]))
    assert torch.allclose(first, torch.stack([reference[3], other[6], reference[0]]), atol=1e-4)
    second = step(Chunk(0, 4, IDS[4:5]), Chunk(1, 1, IDS[1:9]), Chunk(2, 7, IDS[::-1][7:8]))
    assert torch.allclose(second, torch.stack([reference[4], reference[8], other[7]]), atol=1e-4)
    slots.move(1, 0, 9)
    third = step(Chunk(0, 9, IDS[9:10]))
    assert torch.allclose(third, reference[9:10], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type is 'yarn'"),
        ({"sliding_window": 16}, "sliding window is True"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    raw = {**TINY, "model_type": "llama", "rms_norm_eps": 1e-6, **change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=words):
        LlamaConfig.from_folder(tmp_path)
