"""The real engine in its own process: exactness, reuse, adapters, limits, and the openai client."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from runtime.engine.openai import OpenAIEngine
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import ContextOverflow, EngineRefused
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
    with pytest.raises(EngineRefused, match="no model 'three' is served"):
        await local_engine.complete(request(PolicyId("three"), prompt))
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


def broken_adapter(kind: str, source: Path, folder: Path) -> str:
    """Make a damaged copy of an adapter in `folder`; returns the words its refusal must have."""
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    key = next(name for name in tensors if "q_proj.lora_A" in name)
    match kind:
        case "rank":
            config["r"], words = 4, "have shapes"
        case "shape":
            tensors[key], words = tensors[key][:, :-1].contiguous(), "have shapes"
        case "nan":
            tensors[key][0, 0], words = math.nan, "NaN or infinity"
        case "half":
            del tensors[key]
            words = "only one of lora_A and lora_B"
        case "layer":
            for half in ("lora_A", "lora_B"):
                name = key.replace("lora_A", half)
                tensors[name.replace("layers.0.", "layers.99.")] = tensors.pop(name)
            words = "not in the base"
        case "foreign":
            tensors["base_model.model.lm_head.weight"] = tensors[key].clone()
            words = "unknown tensor"
        case "dora":
            config["use_dora"], words = True, "use_dora is not supported"
        case "truncated" | "pickle":
            words = "not a whole safetensors file" if kind == "truncated" else "safetensors only"
        case _:
            raise AssertionError(kind)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights)
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    if kind == "pickle":
        weights.rename(folder / "adapter_model.bin")
    return words


@pytest.mark.parametrize(
    "kind",
    ["rank", "shape", "nan", "half", "layer", "foreign", "dora", "truncated", "pickle"],
)
async def test_a_damaged_adapter_is_refused_with_its_reason(
    http: httpx.AsyncClient, adapter_dir: Path, tmp_path: Path, kind: str
) -> None:
    words = broken_adapter(kind, adapter_dir, tmp_path / kind)
    body = {"lora_name": "bad", "lora_path": str(tmp_path / kind)}
    response = await http.post("/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_a_missing_adapter_is_refused(local_engine: OpenAIEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match=r"adapter_config.json: missing"):
        await local_engine.load_adapter("absent", str(tmp_path))


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


# ---------------------------------------------------------------- the openai client


@pytest_asyncio.fixture
async def client(engine_url: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=engine_url, api_key="none") as client:
        yield client


async def test_the_openai_client_completes(client: openai.AsyncOpenAI, base: str) -> None:
    assert [model.id async for model in client.models.list()] == [base]
    whole = await client.completions.create(
        model=base,
        prompt="The capital of France is",
        max_tokens=6,
        seed=1,
        logprobs=2,
        temperature=0,
    )
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert "Paris" in choice.text
    assert len(choice.logprobs.token_logprobs or []) == whole.usage.completion_tokens  # pyright: ignore[reportOptionalMemberAccess]
    stream = await client.completions.create(
        model=base,
        prompt="The capital of France is",
        max_tokens=6,
        seed=1,
        temperature=0,
        stream=True,
    )
    parts = [chunk async for chunk in stream]
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert parts[-1].choices[0].finish_reason == choice.finish_reason


async def test_the_openai_client_chats(client: openai.AsyncOpenAI, base: str) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    ]
    options: dict[str, Any] = {
        "model": base,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens  # pyright: ignore[reportOptionalMemberAccess]
    stream = await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )  # pyright: ignore[reportOptionalMemberAccess]


async def test_a_stop_text_ends_and_is_cut(client: openai.AsyncOpenAI, base: str) -> None:
    options: dict[str, Any] = {
        "model": base,
        "prompt": "1, 2, 3, 4, 5, 6,",
        "max_tokens": 24,
        "temperature": 0,
    }
    plain = (await client.completions.create(**options)).choices[0].text
    stop = plain[4:7]
    whole = (await client.completions.create(**options, stop=[stop])).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.text == plain[: plain.index(stop)]
    stream = await client.completions.create(**options, stop=[stop], stream=True)
    assert "".join([part.choices[0].text async for part in stream]) == whole.text


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nothing", prompt="a")


async def test_many_at_once_all_finish(
    local_engine: OpenAIEngine, base: PolicyId, model_template: ChatTemplate
) -> None:
    prompts = [question(model_template, f"Say the number {n}.") for n in range(60)]
    replies: list[Completion] = await asyncio.gather(
        *(local_engine.complete(request(base, prompt, tokens=3)) for prompt in prompts)
    )
    assert all(reply.sampled for reply in replies)
