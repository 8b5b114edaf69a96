"""Shipped fakes of the model and its tokeniser, named as what they are.

`byte_template` is a real chat template over a tokeniser with one id per byte, built in code.
`ScriptedEngine` is an engine whose replies are written down: it records what it was asked and
counts, refuses and overflows as a real one does. Its logprobs are those of a policy that finds
every token equally likely. Both pass the contract suite of the real ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import CHATML, ChatTemplate
from runtime.engine.tool_calls import format_call
from runtime.errors import ContextOverflow, EngineRefused, PolicyNotLoaded
from runtime.run import ToolCall

Script = Sequence[str] | Callable[[CompletionRequest], str]
"""Replies in order, or a function of the request."""


def byte_template() -> ChatTemplate:
    """ChatML over bytes: every id below 256 is one byte of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return ChatTemplate(tokenizer, CHATML, end_tokens=["<|endoftext|>"])


class ScriptedEngine:
    """A fake engine that says what its script says. Implements `Engine`."""

    def __init__(
        self,
        replies: Script,
        template: ChatTemplate,
        *,
        policies: Sequence[str] | None = None,
        context: int = 1 << 20,
    ) -> None:
        """`policies` are the names it serves, the base first; None serves any name."""
        self.requests: list[CompletionRequest] = []
        """Every request, in order, refused ones included."""
        self._template = template
        self._replies: Iterator[str] | None = None if callable(replies) else iter(replies)
        self._reply = replies if callable(replies) else None
        self._any_policy = policies is None
        self._policies = list(policies or ["scripted"])
        self._context = context
        self._closed = False

    @classmethod
    def of_turns(cls, turns: Sequence[Sequence[ToolCall]], template: ChatTemplate) -> Self:
        """Plays a demonstration: one reply per turn, its calls one a line."""
        return cls(["\n".join(map(format_call, calls)) for calls in turns], template)

    async def complete(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        self._check(request)
        ids = self._template.reply(self._next(request))
        sampled = ids[: request.max_tokens]
        return Completion(
            sampled=sampled,
            logprobs=[-math.log(self._template.vocabulary)] * len(sampled),
            finish_reason="stop" if len(sampled) == len(ids) else "length",
            served_policy=request.policy,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=self._cached(request),
        )

    def _check(self, request: CompletionRequest) -> None:
        if not self._any_policy and request.policy not in self._policies:
            served = ", ".join(self._policies)
            raise PolicyNotLoaded(f"no model {request.policy!r}; served: {served}")
        asked = len(request.prompt_ids) + request.max_tokens
        if asked > self._context:
            raise ContextOverflow(f"{asked} tokens exceed the window of {self._context}")

    def _next(self, request: CompletionRequest) -> str:
        if self._reply is not None:
            return self._reply(request)
        assert self._replies is not None
        reply = next(self._replies, None)
        if reply is None:
            raise EngineRefused(f"the script ended before request {len(self.requests)}")
        return reply

    def _cached(self, request: CompletionRequest) -> int:
        """What an engine with an endless cache of prompts would not compute again."""
        usable = list(request.prompt_ids)[:-1]
        earlier = (list(e.prompt_ids) for e in self.requests[:-1] if e.policy == request.policy)
        return max((_common_prefix(usable, prompt) for prompt in earlier), default=0)

    async def models(self) -> list[str]:
        return list(self._policies)

    async def exact(self) -> bool:
        return False

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """`path` is not read: a script needs no weights."""
        if name in self._policies:
            raise EngineRefused(f"{name!r} is already served")
        self._policies.append(name)

    async def unload_adapter(self, name: str) -> None:
        if name not in self._policies[1:]:
            raise EngineRefused(f"no adapter {name!r} is loaded")
        self._policies.remove(name)

    async def healthy(self) -> bool:
        return not self._closed

    async def close(self) -> None:
        self._closed = True


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
