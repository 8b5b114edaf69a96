"""What the model sees: the opening (system, tools, task), then replies and observations as ids.

The conversation is a list of token ids that only ever grows: a reply is appended as it was sampled,
never re-tokenised, and the engine finds the same prefix at every turn. What a turn adds is its
delta, which is all the record keeps. Everything that decides the opening (prompt, tools, task,
template) is pinned, so a runner that takes over rebuilds the same bytes, and checks that it did.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Self

import jinja2
import jinja2.sandbox
import numpy as np

from runtime.domain import Domain
from runtime.engine.protocol import Completion
from runtime.engine.templates import ChatTemplate
from runtime.errors import StoreError
from runtime.run import ModelCall, PolicyId, Task
from runtime.tools import Tool


def prompt_hash(ids: Sequence[int]) -> str:
    """First 16 hex digits of sha256 over the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:16]


def task_text(domain: Domain, task: Task) -> str:
    """The task as the first user message: the domain's template over the input, nothing private."""
    environment = jinja2.sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(domain.task_prompt)
    return template.render(input=dict(task.input), files=sorted(task.files)).strip()


class Conversation:
    """The ids of one run so far, and where the last turn began. Not shared between runs."""

    def __init__(self, template: ChatTemplate, opening: Iterable[int]) -> None:
        self._template = template
        self.prompt: list[int] = list(opening)
        self._delta_start = 0
        self._sampled: list[int] = []
        self.turns = 0

    @classmethod
    def open(
        cls, template: ChatTemplate, domain: Domain, task: Task, tools: Sequence[Tool]
    ) -> Self:
        user = [("user", task_text(domain, task))]
        return cls(template, template.opening(domain.prompt, tools, user))

    def commit(
        self,
        completion: Completion,
        *,
        policy_id: PolicyId,
        temperature: float,
        trainable: bool = True,
    ) -> ModelCall:
        """The record of this turn's model call; the conversation now ends with the reply."""
        call = ModelCall(
            turn=self.turns,
            parent_turn=self.turns - 1 if self.turns else None,
            prompt_length=len(self.prompt),
            prompt_hash=prompt_hash(self.prompt),
            prompt_delta=self.prompt[self._delta_start :],
            sampled=completion.sampled,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            temperature=temperature,
            policy_id=policy_id,
            template_digest=self._template.digest,
            cached_tokens=completion.cached_tokens,
            trainable=trainable and len(completion.logprobs) == len(completion.sampled),
            seconds=completion.seconds,
        )
        self._append(completion.sampled)
        return call

    def replay(self, call: ModelCall) -> None:
        """Append a recorded turn. Raises StoreError where the rebuilt prompt differs from it."""
        if (len(self.prompt), prompt_hash(self.prompt)) != (call.prompt_length, call.prompt_hash):
            raise StoreError(
                f"turn {call.turn}: the rebuilt prompt ({len(self.prompt)} ids) is not the "
                f"recorded one ({call.prompt_length} ids); domain, template or model changed",
            )
        self._append(call.sampled)

    def _append(self, sampled: Sequence[int]) -> None:
        self.prompt.extend(sampled)
        self._delta_start = len(self.prompt)
        self._sampled = list(sampled)
        self.turns += 1

    def observe(self, observations: Sequence[tuple[str, str]]) -> None:
        """Append what the calls of the last reply returned: (tool name, content) pairs."""
        self.prompt.extend(self._template.after_reply(self._sampled, observations))
