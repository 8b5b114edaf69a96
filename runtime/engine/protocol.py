"""The engine protocol: token ids in, token ids and logprobs out.

Whatever serves tokens (vLLM, the embedded engine, any OpenAI-compatible endpoint) is reached
through `Engine`. Ids cross this boundary, never text, so that what a trainer reads is what was
sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from runtime.run import PolicyId


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    policy: PolicyId
    """The model name as the engine serves it."""
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    timeout: float = 120.0
    """Seconds until the engine counts as silent."""


@dataclass(frozen=True, slots=True)
class Completion:
    sampled: list[int]
    """Includes the stop token where the policy emitted it."""
    logprobs: list[float]
    """Natural log, one per sampled id; empty where the engine gives none."""
    finish_reason: Literal["stop", "length", "abort"]
    served_policy: PolicyId
    """The name the engine says it served; differs from the asked one only in a faulty engine."""
    prompt_tokens: int
    cached_tokens: int = 0
    seconds: float = 0.0


class Engine(Protocol):
    async def complete(self, request: CompletionRequest) -> Completion:
        """Raises EngineUnavailable (PolicyNotLoaded where it does not serve the policy now),
        EngineRefused, EngineGarbage or ContextOverflow."""
        ...

    async def models(self) -> list[str]:
        """Names served now: the base and the resident adapters."""
        ...

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Serve an adapter under an immutable name. Raises EngineRefused in the engine's words.

        A `pinned` one does not make room for others by itself; engines without limit ignore it.
        """
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def exact(self) -> bool:
        """Whether it computes what an fp32 trainer computes, to the last few digits."""
        ...

    async def healthy(self) -> bool: ...

    async def close(self) -> None: ...
