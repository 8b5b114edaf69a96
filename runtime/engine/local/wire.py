"""vLLM's request and response shapes, as far as the embedded engine speaks them.

Requests may carry fields we do not know; those that would change the result and are not computed
here are refused rather than ignored. Responses are plain dictionaries in the order vLLM writes
them, so that the `openai` client and our own read both engines alike.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from runtime.engine.local.generation import Generation
from runtime.engine.local.sampling import Drawn
from runtime.engine.templates import ChatTemplate
from runtime.errors import InputError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
}
"""Fields not computed here, with the values (beside null) that change nothing."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def refuse_unsupported(self) -> None:
        """Raises InputError naming the first field that would change the result."""
        for key, value in (self.model_extra or {}).items():
            if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
                raise InputError(f"{key}={value!r} is not supported by the embedded engine")

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _is_several(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt)


class CompletionBody(_Request):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)

    def prompt_ids(self, template: ChatTemplate) -> list[int]:
        """Raises InputError for more than one prompt."""
        prompts = self.prompt if _is_several(self.prompt) else [self.prompt]
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} prompts in one request; send them one by one")
        (prompt,) = cast(list[str | list[int]], prompts)
        return template.encode(prompt) if isinstance(prompt, str) else list(prompt)

    @property
    def top_logprobs(self) -> int:
        return self.logprobs or 0


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """Raises InputError for parts that are not text."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        if any(part.get("type") != "text" for part in self.content):
            raise InputError("only text parts are supported in message content")
        return "".join(str(part.get("text", "")) for part in self.content)


class ChatBody(_Request):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def prompt_ids(self, template: ChatTemplate) -> list[int]:
        first, *rest = self.messages
        system = first.text if first.role in ("system", "developer") else ""
        turns = rest if system else self.messages
        return template.opening(system, [], [(turn.role, turn.text) for turn in turns])


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter; `pinned` is ours."""

    lora_name: str = Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]*$")
    lora_path: str = Field(min_length=1)
    pinned: bool = False


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter"""

    lora_name: str


# ---------------------------------------------------------------- responses


def models(base: str, names: Sequence[str], context: int) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "noria",
                "root": base,
                "parent": None if name == base else base,
                "max_model_len": context,
            }
            for name in names
        ],
    }


def envelope(kind: str, reply_id: str, model: str) -> dict[str, Any]:
    return {"id": reply_id, "object": kind, "created": int(time.time()), "model": model}


def usage(generation: Generation) -> dict[str, Any]:
    prompt, sampled = len(generation.prompt), len(generation.drawn)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": generation.cached},
    }


def completion_logprobs(drawn: Sequence[Drawn], template: ChatTemplate) -> dict[str, Any]:
    """The `logprobs` object of a text completion."""
    tokens = [template.piece(d.token) for d in drawn]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "text_offset": offsets[: len(tokens)],
        "token_logprobs": [d.logprob for d in drawn],
        "tokens": tokens,
        "top_logprobs": [
            {template.piece(t): p for t, p in [(d.token, d.logprob), *d.alternatives]}
            for d in drawn
        ],
    }


def chat_logprobs(drawn: Sequence[Drawn], template: ChatTemplate) -> dict[str, Any]:
    """The `logprobs` object of a chat completion."""
    return {
        "content": [
            {
                **_chat_token(d.token, d.logprob, template),
                "top_logprobs": [_chat_token(t, p, template) for t, p in d.alternatives],
            }
            for d in drawn
        ]
    }


def _chat_token(token: int, logprob: float, template: ChatTemplate) -> dict[str, Any]:
    piece = template.piece(token)
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
