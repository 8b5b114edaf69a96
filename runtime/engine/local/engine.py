"""One base model in this process, the adapters merged into it, and requests made ready for it.

What a request asks is checked here, before it takes a place in the queue: a prompt that does not
fit, ids outside the vocabulary and options that are not computed are refused with their reason.

Scaling out: one per process.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.engine.local import wire
from runtime.engine.local.batching import EngineLimits, Scheduler
from runtime.engine.local.generation import Generation, StopTest
from runtime.engine.local.llama import Weights
from runtime.engine.local.lora import Adapter
from runtime.engine.local.replies import first_stop
from runtime.engine.local.sampling import SamplingRule
from runtime.engine.templates import ChatTemplate
from runtime.errors import InputError


class LocalEngine:
    """The model in this process and the adapters merged into it."""

    def __init__(self, model_dir: Path, limits: EngineLimits) -> None:
        self.template = ChatTemplate.from_folder(model_dir)
        self.base = Weights.from_folder(model_dir)
        self.scheduler = Scheduler(model_dir.resolve().name, self.base, limits)
        self._loading = asyncio.Lock()

    @property
    def context(self) -> int:
        return self.base.config.context

    async def load(self, body: wire.LoadBody) -> str:
        """Merge an adapter and serve it; one at a time, beside the steps that go on."""
        async with self._loading:
            weights = await asyncio.to_thread(self._merge, Path(body.lora_path))
            gone = self.scheduler.serve(body.lora_name, weights, pinned=body.pinned)
        evicted = f" (made room by unloading '{gone}')" if gone else ""
        return f"Success: LoRA adapter '{body.lora_name}' added successfully.{evicted}"

    def _merge(self, folder: Path) -> Weights:
        return Adapter.from_folder(folder, self.base.config).merged(self.base)

    def generation(
        self,
        body: wire.CompletionBody | wire.ChatBody,
        listener: Callable[[Generation], None],
    ) -> Generation:
        """The request as the scheduler takes it. Raises InputError for what cannot be served."""
        body.refuse_unsupported()
        prompt = body.prompt_ids(self.template)
        return Generation(
            policy=body.model,
            prompt=self._checked(prompt),
            max_tokens=self._max_tokens(body, len(prompt)),
            rule=SamplingRule(body.temperature, body.top_p, body.top_logprobs or 0),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop_ids=frozenset(
                [*body.stop_token_ids, *(() if body.ignore_eos else self.template.stop_ids)]
            ),
            listener=listener,
            stopped=self._stop_test(body.stops),
        )

    def _checked(self, prompt: list[int]) -> list[int]:
        vocabulary = self.base.config.vocabulary
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if not all(0 <= token < vocabulary for token in prompt):
            raise InputError(f"prompt ids must be from 0 to {vocabulary - 1}")
        return prompt

    def _max_tokens(self, body: wire.CompletionBody | wire.ChatBody, prompt: int) -> int:
        asked = body.max_tokens
        if isinstance(body, wire.ChatBody):
            asked = body.max_completion_tokens or asked
        asked = asked if asked is not None else max(1, self.context - prompt)
        if prompt + asked > self.context:
            raise InputError(
                f"This model's maximum context length is {self.context} tokens. However, you "
                f"requested {prompt + asked} tokens ({prompt} in the prompt, {asked} for the "
                "completion). Please reduce the length of the messages or completion."
            )
        return asked

    def _stop_test(self, stops: Sequence[str]) -> StopTest | None:
        if not stops:
            return None
        return lambda sampled: first_stop(self.template.decode(sampled), stops) is not None
