"""The `openai` client, unchanged, against the embedded engine."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.model


@pytest.fixture
def base(model_dir: Path) -> str:
    return model_dir.name


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
