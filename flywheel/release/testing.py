"""What tests and benchmarks of releases need, named as what it is.

`random_adapter` writes a LoRA of random numbers that is valid for a base model, without a tensor
library. `TableEngine` is a fake engine that answers probes from the tables that lie beside an
adapter's weights: exactly, with noise, or with the base's numbers, as a test wants it. It counts
and refuses as the embedded engine does, and computes nothing.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from flywheel.release.inspection import CONFIG, WEIGHTS, base_shapes
from flywheel.training.job import ProbePoint
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.errors import EngineRefused, EngineUnavailable, PolicyNotLoaded
from runtime.run import PolicyId

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_points = TypeAdapter[list[ProbePoint]](list[ProbePoint])


# ---------------------------------------------------------------- weights


def random_tensors(
    model_dir: Path, *, rank: int = 8, seed: int = 0, scale: float = 0.05
) -> dict[str, np.ndarray]:
    """LoRA pairs of normal noise for every linear layer of the base, by PEFT's names.

    `scale`: standard deviation of B's entries; A's is one over the root of its width.
    """
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for module, (out, into) in base_shapes(model_dir).items():
        if module.endswith(TARGETS):
            a = generator.standard_normal((rank, into), np.float32) / math.sqrt(into)
            b = generator.standard_normal((out, rank), np.float32) * scale
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype("<f4")
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype("<f4")
    return tensors


def random_adapter(
    folder: Path, model_dir: Path, *, rank: int = 8, seed: int = 0, scale: float = 0.05
) -> Path:
    """An adapter folder as a trainer leaves one; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(model_dir, rank=rank, seed=seed, scale=scale)
    (folder / WEIGHTS).write_bytes(safetensors(tensors))
    (folder / CONFIG).write_text(json.dumps(lora_config(rank)))
    return folder


def lora_config(rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "/where/it/was/trained",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file of fp32 tensors."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    head = json.dumps(header).encode()
    body = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    return len(head).to_bytes(8, "little") + head + body


# ---------------------------------------------------------------- engine


class TableEngine:
    """A fake engine that serves tables of log-probabilities. Implements `Engine`."""

    def __init__(self, base: str, *, capacity: int = 3) -> None:
        self.base = base
        self.capacity = capacity
        self.away = False
        """True: it answers nothing."""
        self.serves: Literal["adapter", "base", "another name"] = "adapter"
        """What it answers with where an adapter was asked for."""
        self.noise = 0.0
        """Nats added to what the tables say."""
        self.exactly = True
        self.loads: list[tuple[str, str, bool]] = []
        """(name, path, pinned) of every adapter it was told to load."""
        self._tables: dict[str, list[ProbePoint]] = {}

    def serve(self, name: str, points: Sequence[ProbePoint]) -> None:
        """Serve these tables under a name from now on."""
        self._tables[name] = list(points)

    def restart(self) -> None:
        """Forget every adapter, as an engine does that was killed and started again."""
        self._tables.clear()

    async def complete(self, request: CompletionRequest) -> Completion:
        self._answer()
        if request.policy not in self._tables:
            served = ", ".join([self.base, *self._tables])
            raise PolicyNotLoaded(f"no model {request.policy!r} is served; served: {served}")
        tables = self._tables[request.policy]
        point = next(p for p in tables if p.prompt_ids == list(request.prompt_ids))
        table = point.base if self.serves == "base" else point.policy
        weights = [math.exp(logprob) for logprob in table.values()]
        token = random.Random(request.seed).choices(list(table), weights)[0]
        wrong_name = self.serves == "another name"
        return Completion(
            sampled=[token],
            logprobs=[min(0.0, table[token] + self.noise)],
            finish_reason="length",
            served_policy=PolicyId(self.base) if wrong_name else request.policy,
            prompt_tokens=len(request.prompt_ids),
        )

    async def models(self) -> list[str]:
        self._answer()
        return [self.base, *self._tables]

    async def exact(self) -> bool:
        return self.exactly

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Takes the tables from the folder's `probe.json`; no weights are read."""
        self._answer()
        self.loads.append((name, path, pinned))
        if name in self._tables:
            raise EngineRefused(f"{name!r} is already served", status=409)
        if len(self._tables) >= self.capacity:
            raise EngineRefused(f"all {self.capacity} resident adapters are pinned", status=409)
        self.serve(name, _points.validate_json((Path(path) / "probe.json").read_bytes()))

    async def unload_adapter(self, name: str) -> None:
        self._answer()
        if self._tables.pop(name, None) is None:
            raise EngineRefused(f"no adapter {name!r} is loaded", status=404)

    async def healthy(self) -> bool:
        return not self.away

    async def close(self) -> None:
        """Nothing is held open."""

    def _answer(self) -> None:
        if self.away:
            raise EngineUnavailable("this engine is away")


def sure_points(prompts: Sequence[Sequence[int]] = ((1, 2, 3), (4, 5))) -> list[ProbePoint]:
    """Points at which a policy prefers token 7 where the base prefers 8."""
    likely, unlikely = math.log(0.9), math.log(0.1)
    return [
        ProbePoint(
            prompt_ids=list(prompt),
            policy={7: likely, 8: unlikely},
            base={7: unlikely, 8: likely},
        )
        for prompt in prompts
    ]
