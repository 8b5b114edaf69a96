"""One suite for every engine: the shipped fake, and the real server through the HTTP client.

What the fake leaves out is listed here: `load_adapter` reads no weights, and logprobs are those of
a uniform policy.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.engine.openai import OpenAIEngine, Retries
from runtime.engine.protocol import CompletionRequest, Engine
from runtime.engine.templates import ChatTemplate
from runtime.errors import ContextOverflow, EngineRefused, PolicyNotLoaded
from runtime.run import PolicyId, ToolCall
from runtime.testing import ScriptedEngine, byte_template
from tests.fixtures.vllm import BLOCK


@dataclass(frozen=True)
class Subject:
    engine: Engine
    template: ChatTemplate
    base: PolicyId
    block: int = 1
    """Prefixes are reused in multiples of so many tokens."""

    def request(self, text: str = "Say something.", tokens: int = 8) -> CompletionRequest:
        prompt = self.template.opening("Be brief.", [], [("user", text)])
        return CompletionRequest(
            self.base, prompt, tokens, seed=5, stop_token_ids=self.template.stop_ids
        )


@pytest_asyncio.fixture(
    params=[
        "scripted",
        pytest.param("local", marks=pytest.mark.model),
        # The first test may have to install vLLM.
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(1800)]),
    ]
)
async def subject(request: pytest.FixtureRequest) -> AsyncGenerator[Subject]:
    if request.param == "scripted":
        template = byte_template()
        engine = ScriptedEngine(
            lambda _: "Something short.", template, policies=["base"], context=8192
        )
        yield Subject(engine, template, PolicyId("base"))
    else:
        folder: Path = request.getfixturevalue("model_dir")
        name, block = {"local": ("engine_url", 1), "vllm": ("vllm_url", BLOCK)}[request.param]
        impatient = Retries(not_loaded_seconds=0.1)
        async with OpenAIEngine(request.getfixturevalue(name), retries=impatient) as engine:
            yield Subject(engine, ChatTemplate.from_folder(folder), PolicyId(folder.name), block)


async def test_a_completion_is_ids_with_logprobs(subject: Subject) -> None:
    request = subject.request()
    completion = await subject.engine.complete(request)
    assert 1 <= len(completion.sampled) <= 8
    assert len(completion.logprobs) == len(completion.sampled)
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert completion.served_policy == subject.base
    assert completion.prompt_tokens == len(request.prompt_ids)
    assert completion.finish_reason in ("stop", "length")


async def test_stop_is_sampled_and_length_is_not(subject: Subject) -> None:
    for tokens in (1, 60):
        completion = await subject.engine.complete(subject.request(tokens=tokens))
        stopped = completion.sampled[-1] in subject.template.stop_ids
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.sampled) == tokens


async def test_a_seed_reproduces(subject: Subject) -> None:
    first, second = [await subject.engine.complete(subject.request()) for _ in range(2)]
    assert first.sampled == second.sampled


async def test_a_growing_conversation_is_cached(subject: Subject) -> None:
    request = subject.request("What grows? " * 20)
    reply = await subject.engine.complete(request)
    after = subject.template.after_reply(reply.sampled, [("look", "it does")])
    longer = replace(request, prompt_ids=[*request.prompt_ids, *reply.sampled, *after])
    second = await subject.engine.complete(longer)
    whole_blocks = len(request.prompt_ids) // subject.block * subject.block
    assert 0 < whole_blocks <= second.cached_tokens < len(longer.prompt_ids)


async def test_many_at_once(subject: Subject) -> None:
    requests = [subject.request(f"Number {n}?", tokens=2) for n in range(24)]
    completions = await asyncio.gather(*map(subject.engine.complete, requests))
    assert all(completion.sampled for completion in completions)


async def test_too_long_a_prompt_overflows(subject: Subject) -> None:
    with pytest.raises(ContextOverflow):
        await subject.engine.complete(replace(subject.request(), prompt_ids=[5] * 9000))


async def test_an_unknown_policy_is_not_loaded(subject: Subject) -> None:
    with pytest.raises(PolicyNotLoaded, match="nobody"):
        await subject.engine.complete(replace(subject.request(), policy=PolicyId("nobody")))


async def test_adapters_that_do_not_exist_are_refused(subject: Subject) -> None:
    with pytest.raises(EngineRefused, match="nobody"):
        await subject.engine.unload_adapter("nobody")


async def test_it_says_what_it_serves(subject: Subject) -> None:
    assert await subject.engine.models() == [subject.base]
    assert await subject.engine.healthy()


# ---------------------------------------------------------------- the fake itself


def ask(prompt: Sequence[int] = (1, 2)) -> CompletionRequest:
    return CompletionRequest(PolicyId("any"), prompt, 100)


async def test_a_script_plays_in_order_and_ends() -> None:
    template = byte_template()
    engine = ScriptedEngine(["first", "second"], template)
    replies = [await engine.complete(ask()) for _ in range(2)]
    assert [template.decode(reply.sampled) for reply in replies] == ["first", "second"]
    with pytest.raises(EngineRefused, match="the script ended before request 3"):
        await engine.complete(ask())
    assert len(engine.requests) == 3


async def test_a_demonstration_plays_its_turns() -> None:
    template = byte_template()
    turns = [
        [ToolCall(id="0.0", name="look", arguments={"id": "C1"})],
        [ToolCall(id="1.0", name="say", arguments={"text": "a b"}), ToolCall(id="1.1", name="end")],
    ]
    engine = ScriptedEngine.of_turns(turns, template)
    replies = [await engine.complete(ask()) for _ in turns]
    assert [template.decode(reply.sampled) for reply in replies] == [
        "look id=C1",
        'say text="a b"\nend()',
    ]


async def test_a_fake_adapter_is_served_until_unloaded() -> None:
    engine = ScriptedEngine(lambda _: "x", byte_template(), policies=["base"])
    await engine.load_adapter("lora", "nowhere")
    assert await engine.models() == ["base", "lora"]
    await engine.complete(replace(ask(), policy=PolicyId("lora")))
    await engine.unload_adapter("lora")
    with pytest.raises(PolicyNotLoaded):
        await engine.complete(replace(ask(), policy=PolicyId("lora")))
