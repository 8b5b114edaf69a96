"""From a generation to the HTTP reply of its route, whole or as a stream of events.

The two routes differ in a few shapes only (`Format`). Text is decoded from the ids sampled so far;
while it ends in half a character, or in what may become a stop text, it is held back.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.local import wire
from runtime.engine.local.generation import Generation
from runtime.engine.local.sampling import Drawn
from runtime.engine.templates import ChatTemplate


@dataclass(frozen=True, slots=True)
class Format:
    """The shapes of one route."""

    kind: str
    chunk_kind: str
    body: Callable[[str], dict[str, Any]]
    """The text as a whole choice carries it."""
    delta: Callable[[str, bool], dict[str, Any]]
    """The text as a streamed choice carries it; True for the first one."""
    logprobs: Callable[[Sequence[Drawn], ChatTemplate], dict[str, Any]]


def _chat_delta(text: str, first: bool) -> dict[str, Any]:
    return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}


COMPLETION = Format(
    kind="text_completion",
    chunk_kind="text_completion",
    body=lambda text: {"text": text},
    delta=lambda text, first: {"text": text},
    logprobs=wire.completion_logprobs,
)
CHAT = Format(
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    body=lambda text: {"message": {"role": "assistant", "content": text}},
    delta=_chat_delta,
    logprobs=wire.chat_logprobs,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request wants its generation answered."""

    id: str
    generation: Generation
    template: ChatTemplate
    format: Format
    stops: Sequence[str]
    logprobs: bool
    token_ids: bool
    usage: bool
    """Whether a stream ends with its usage."""

    def whole(self) -> dict[str, Any]:
        """The response of a finished generation."""
        drawn = self.generation.drawn
        choice = {
            "index": 0,
            **self.format.body(self.text(final=True)),
            "logprobs": self.format.logprobs(drawn, self.template) if self.logprobs else None,
            "finish_reason": self.generation.finish,
            "stop_reason": None,
        }
        head = wire.envelope(self.format.kind, self.id, self.generation.policy)
        if self.token_ids:
            choice["token_ids"] = self.generation.sampled
            choice["prompt_token_ids"] = self.generation.prompt
        return {**head, "choices": [choice], "usage": wire.usage(self.generation)}

    async def events(self, progress: AsyncIterator[None]) -> AsyncIterator[str]:
        """Server-sent events, one per sampled token, as `progress` announces them."""
        sent, shown = 0, 0
        async for _ in progress:
            generation = self.generation
            final = generation.finish is not None
            drawn, text = generation.drawn[sent:], self.text(final=final)
            yield _event(self._chunk(drawn, text[shown:], first=sent == 0, final=final))
            sent, shown = sent + len(drawn), max(shown, len(text))
        if self.usage:
            head = wire.envelope(self.format.chunk_kind, self.id, self.generation.policy)
            yield _event({**head, "choices": [], "usage": wire.usage(self.generation)})
        yield "data: [DONE]\n\n"

    def _chunk(
        self, drawn: Sequence[Drawn], text: str, *, first: bool, final: bool
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            **self.format.delta(text, first),
            "logprobs": self.format.logprobs(drawn, self.template) if self.logprobs else None,
            "finish_reason": self.generation.finish if final else None,
        }
        if self.token_ids:
            choice["token_ids"] = [d.token for d in drawn]
            choice["prompt_token_ids"] = self.generation.prompt if first else None
        head = wire.envelope(self.format.chunk_kind, self.id, self.generation.policy)
        return {**head, "choices": [choice]}

    def text(self, *, final: bool) -> str:
        """The text so far, cut at a stop text; while not final, only what cannot change."""
        text = self.template.decode(self.generation.sampled)
        if (cut := first_stop(text, self.stops)) is not None:
            return text[:cut]
        if final:
            return text
        held = max((len(stop) - 1 for stop in self.stops), default=0)
        return text.rstrip("\ufffd")[: len(text) - held]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins, if one is there."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
