"""The real engine in its own process: exactness, reuse, adapters, limits, and the openai client."""

import asyncio
import json
import math
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from runtime.engine.openai import OpenAIEngine
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import ContextOverflow, EngineRefused, EngineUnavailable
from runtime.run import PolicyId
from tests.fixtures.model import running_engine

pytestmark = [
    pytest.mark.model,
    # peft asks transformers for an attribute that transformers is renaming
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.fixture
def base(model_dir: Path) -> PolicyId:
    return PolicyId(model_dir.name)


@pytest_asyncio.fixture
async def http(engine_url: str) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine_url, timeout=60) as client:
        yield client


def question(template: ChatTemplate, text: str, system: str = "Answer briefly.") -> list[int]:
    return template.opening(system, [], [("user", text)])


def request(
    policy: PolicyId, prompt: Sequence[int], *, tokens: int = 8, seed: int = 1, t: float = 1.0
) -> CompletionRequest:
    return CompletionRequest(policy, prompt, tokens, temperature=t, seed=seed)


# ---------------------------------------------------------------- exactness


@pytest.fixture(scope="session")
def trainer_model(model_dir: Path) -> Any:
    """The base as a trainer loads it, fp32."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def adapter_dir(trainer_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LoRA over all linear layers, large enough to change what is said."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("adapters") / "random"
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(trainer_model, config)
    for name, tensor in model.named_parameters():
        if "lora_B" in name:
            tensor.data.mul_(0.1)
    model.save_pretrained(folder)
    model.unload()
    return folder


def trainer_logprobs(
    model: Any, prompt: Sequence[int], sampled: Sequence[int], t: float
) -> list[float]:
    """What a trainer computes for the sampled ids: one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / t, dim=-1)
    return logprobs.gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("t", [1.0, 0.7])
async def test_sampled_logprobs_are_a_trainers(
    local_engine: OpenAIEngine,
    base: PolicyId,
    model_template: ChatTemplate,
    trainer_model: Any,
    t: float,
) -> None:
    prompt = question(model_template, "Name three colours.")
    reply = await local_engine.complete(request(base, prompt, tokens=24, t=t))
    assert len(reply.logprobs) == len(reply.sampled)
    assert apart(reply.logprobs, trainer_logprobs(trainer_model, prompt, reply.sampled, t)) < 1e-3


async def test_adapter_logprobs_are_those_of_the_unmerged_adapter(
    local_engine: OpenAIEngine,
    base: PolicyId,
    model_template: ChatTemplate,
    trainer_model: Any,
    adapter_dir: Path,
) -> None:
    prompt = question(model_template, "Name three colours.")
    await local_engine.load_adapter("exact", str(adapter_dir))
    try:
        reply = await local_engine.complete(request(PolicyId("exact"), prompt, tokens=24))
        plain = await local_engine.complete(request(base, prompt, tokens=24))
    finally:
        await local_engine.unload_adapter("exact")
    adapted = PeftModel.from_pretrained(trainer_model, adapter_dir)
    expected = trainer_logprobs(adapted, prompt, reply.sampled, 1.0)
    adapted.unload()
    assert apart(reply.logprobs, expected) < 1e-3
    assert reply.served_policy == "exact"
    assert apart(expected, trainer_logprobs(trainer_model, prompt, reply.sampled, 1.0)) > 0.1
    assert plain.sampled != reply.sampled


async def test_a_seed_reproduces_whoever_shares_the_batch(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate
) -> None:
    prompt = question(model_template, "Tell me a story about a river.")
    alone = await local_engine.complete(request(base, prompt, tokens=16, seed=42))
    crowd = await asyncio.gather(
        *(
            local_engine.complete(request(base, prompt, tokens=16, seed=seed))
            for seed in (42, *range(100, 110))
        )
    )
    assert crowd[0].sampled == alone.sampled
    assert apart(crowd[0].logprobs, alone.logprobs) < 1e-3
    assert len({tuple(reply.sampled) for reply in crowd}) > 8


async def test_temperature_zero_is_the_most_likely_token(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate, trainer_model: Any
) -> None:
    prompt = question(model_template, "What is the capital of France?")
    reply = await local_engine.complete(request(base, prompt, tokens=6, t=0.0))
    with torch.no_grad():
        best = trainer_model(torch.tensor([[*prompt, *reply.sampled]])).logits[0].argmax(-1)
    assert reply.sampled == best[len(prompt) - 1 : -1].tolist()


# ---------------------------------------------------------------- reuse


async def test_four_turns_compute_at_most_two_fifths_of_their_prompts(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate
) -> None:
    prompt = question(model_template, "My card was stolen.", system="Route the mail. " * 40)
    asked, computed = 0, 0
    for turn in range(4):
        reply = await local_engine.complete(request(base, prompt, tokens=16, seed=turn))
        asked += len(prompt)
        computed += len(prompt) - reply.cached_tokens
        prompt += [*reply.sampled]
        prompt += model_template.after_reply(reply.sampled, [("lookup", "plan gold, open")])
    assert computed <= 0.4 * asked


async def test_reuse_changes_nothing_that_was_sampled(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate
) -> None:
    prompt = question(model_template, "Where does the reuse test look?")
    first = await local_engine.complete(request(base, prompt, tokens=12, seed=3))
    again = await local_engine.complete(request(base, prompt, tokens=12, seed=3))
    assert again.cached_tokens == len(prompt) - 1
    assert again.sampled == first.sampled
    assert apart(again.logprobs, first.logprobs) < 1e-3


async def test_nothing_is_reused_across_policies_or_names(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate, adapter_dir: Path
) -> None:
    prompt = question(model_template, "Is this shared?")
    await local_engine.complete(request(base, prompt))
    for _ in range(2):
        await local_engine.load_adapter("apart", str(adapter_dir))
        reply = await local_engine.complete(request(PolicyId("apart"), prompt))
        await local_engine.unload_adapter("apart")
        assert reply.cached_tokens == 0


# ---------------------------------------------------------------- adapters


async def test_adapters_are_listed_replaced_and_protected(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate, adapter_dir: Path
) -> None:
    prompt = question(model_template, "Hello.")
    for name in ("one", "two", "three"):
        await local_engine.load_adapter(name, str(adapter_dir), pinned=name == "two")
    await local_engine.complete(request(PolicyId("one"), prompt))
    await local_engine.load_adapter("four", str(adapter_dir))
    assert await local_engine.models() == [base, "one", "two", "four"]
    impatient = replace(request(PolicyId("three"), prompt), timeout=0.5)
    with pytest.raises(EngineUnavailable):
        await local_engine.complete(impatient)
    with pytest.raises(EngineRefused, match="already served"):
        await local_engine.load_adapter("one", str(adapter_dir))
    for name in ("one", "two", "four"):
        await local_engine.unload_adapter(name)
    with pytest.raises(EngineRefused, match="is the base model"):
        await local_engine.unload_adapter(base)
    assert await local_engine.models() == [base]


async def test_all_pinned_is_a_conflict(
    local_engine: OpenAIEngine, http: httpx.AsyncClient, adapter_dir: Path
) -> None:
    for name in ("p1", "p2", "p3"):
        await local_engine.load_adapter(name, str(adapter_dir), pinned=True)
    body = {"lora_name": "p4", "lora_path": str(adapter_dir)}
    response = await http.post("/load_lora_adapter", json=body)
    for name in ("p1", "p2", "p3"):
        await local_engine.unload_adapter(name)
    assert response.status_code == 409
    assert "pinned" in response.json()["error"]["message"]


Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def _misplace(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for half in "AB":
        key = QUERY.format(half)
        tensors[key.replace("layers.0.", "layers.99.")] = tensors.pop(key)


def _halve(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors[QUERY.format("A")]


def _poison(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY.format("A")][0, 0] = math.nan


def _narrow(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY.format("A")] = tensors[QUERY.format("A")][:, :-1].contiguous()


def _add_foreign(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "rank": (lambda config, tensors: config.update(r=4), "have shapes"),
    "shape": (_narrow, "have shapes"),
    "nan": (_poison, "NaN or infinity"),
    "half": (_halve, "only one of"),
    "layer": (_misplace, "not in the base"),
    "foreign": (_add_foreign, "unknown tensor"),
    "dora": (lambda config, tensors: config.update(use_dora=True), "use_dora is not supported"),
    "no alpha": (lambda config, tensors: config.update(lora_alpha=None), "lora_alpha must be"),
    "not lora": (lambda config, tensors: config.update(peft_type="IA3"), "must be LORA"),
    "empty": (lambda config, tensors: tensors.clear(), "holds no LoRA tensors"),
}


def load_adapter_files(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


async def refusal(http: httpx.AsyncClient, folder: Path) -> str:
    """Why loading the folder is refused."""
    body = {"lora_name": "bad", "lora_path": str(folder)}
    response = await http.post("/load_lora_adapter", json=body)
    assert response.status_code == 400
    return response.json()["error"]["message"]


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_damaged_adapter_is_refused_with_its_reason(
    http: httpx.AsyncClient, adapter_dir: Path, tmp_path: Path, kind: str
) -> None:
    config, tensors = load_adapter_files(adapter_dir)
    damage, words = DAMAGES[kind]
    damage(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert words in await refusal(http, tmp_path)


async def test_only_whole_safetensors_are_read(
    http: httpx.AsyncClient, adapter_dir: Path, tmp_path: Path
) -> None:
    assert "adapter_config.json: missing" in await refusal(http, tmp_path)
    shutil.copy(adapter_dir / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    assert "safetensors only" in await refusal(http, tmp_path)
    whole = (adapter_dir / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(whole[:-64])
    assert "not a whole safetensors file" in await refusal(http, tmp_path)


# ---------------------------------------------------------------- refusals and limits


async def test_too_long_a_request_overflows(local_engine: OpenAIEngine, base: PolicyId) -> None:
    with pytest.raises(ContextOverflow, match="maximum context length is 8192"):
        await local_engine.complete(request(base, [5] * 8190, tokens=16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [999_999]}, "from 0 to 49151"),
        ({"prompt": ["a", "b"]}, "one by one"),
        ({"n": 2}, "n=2 is not supported"),
        ({"echo": True}, "echo=True is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 99}, "logprobs"),
    ],
)
async def test_what_is_not_computed_is_refused(
    http: httpx.AsyncClient, base: PolicyId, change: dict[str, Any], words: str
) -> None:
    body = {"model": base, "prompt": "Hello", **change}
    response = await http.post("/completions", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def metric(http: httpx.AsyncClient, name: str) -> float:
    text = (await http.get(str(http.base_url).removesuffix("v1/") + "metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"noria_engine_{name} ")]
    return float(line.split()[1])


async def test_a_full_queue_answers_429_and_a_hang_up_frees_its_place(model_dir: Path) -> None:
    with running_engine(model_dir, "--sequences", "1", "--waiting", "1") as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = {
                "model": model_dir.name,
                "prompt": "Once",
                "max_tokens": 4000,
                "ignore_eos": True,
            }
            hogs: list[asyncio.Task[httpx.Response]] = []
            for running, waiting in ((1, 0), (1, 1)):
                hogs.append(asyncio.create_task(http.post("/completions", json=body)))
                while (await metric(http, "running"), await metric(http, "waiting")) != (
                    running,
                    waiting,
                ):
                    pass
            refused = await http.post("/completions", json=body)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            for hog in hogs:
                hog.cancel()
            served = {**body, "max_tokens": 2}
            while (response := await http.post("/completions", json=served)).status_code == 429:
                pass
            assert response.json()["usage"]["completion_tokens"] == 2


async def test_a_stream_that_is_left_frees_its_place(
    http: httpx.AsyncClient, base: PolicyId
) -> None:
    body = {"model": base, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/completions", json=body) as response:
        assert (await anext(response.aiter_lines())).startswith("data: {")
        assert await metric(http, "running") == 1
    while await metric(http, "running"):
        pass
    assert (await http.get(str(http.base_url).removesuffix("v1/") + "health")).json() == {
        "status": "ok"
    }


async def test_many_at_once_all_finish(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate
) -> None:
    prompts = [question(model_template, f"Say the number {n}.") for n in range(60)]
    replies: list[Completion] = await asyncio.gather(
        *(local_engine.complete(request(base, prompt, tokens=3)) for prompt in prompts)
    )
    assert all(reply.sampled for reply in replies)
