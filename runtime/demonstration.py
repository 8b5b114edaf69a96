"""A demonstration: fixed turns played through the real loop, tools, sandbox and checks.

The expert here is a domain's `demonstrate(task, expectation)`, not a model: its turns are written
as calls, tokenised once and executed like any policy's. That proves that the reference passes, lets
certification try cheap attempts, and feeds supervised training; having no logprobs, it never feeds
reinforcement learning. When the turns are over the expert says nothing, and the limits end the run.
"""

from collections.abc import Sequence

from runtime.domain import Domain
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.engine.tool_calls import format_call
from runtime.errors import EngineRefused
from runtime.journal import MemoryRecorder
from runtime.run import Policy, PolicyId, RunId, Sampling, Task, ToolCall
from runtime.run_executor import Attempt, Executed, RunExecutor, Workplace

EXPERT = Policy(id=PolicyId("demonstration"), base="demonstration")


class Expert:
    """The engine of a demonstration: replies with the next turn, whatever the prompt."""

    def __init__(self, turns: Sequence[Sequence[ToolCall]], template: ChatTemplate) -> None:
        self._turns = [list(turn) for turn in turns]
        self._template = template
        self._said = 0

    async def complete(self, request: CompletionRequest) -> Completion:
        turn = self._turns[self._said] if self._said < len(self._turns) else []
        self._said += 1
        return Completion(
            sampled=self._template.reply("\n".join(map(format_call, turn))),
            logprobs=[],
            finish_reason="stop",
            served_policy=request.policy,
            prompt_tokens=len(request.prompt_ids),
        )

    async def models(self) -> list[str]:
        return [EXPERT.id]

    async def exact(self) -> bool:
        return False

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        raise EngineRefused("a demonstration has no adapters")

    async def unload_adapter(self, name: str) -> None:
        raise EngineRefused("a demonstration has no adapters")

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing is held open."""


async def play(
    domain: Domain, task: Task, turns: Sequence[Sequence[ToolCall]], workplace: Workplace
) -> Executed:
    """One attempt by the expert, stored nowhere."""
    executed, _ = await play_recorded(domain, task, turns, workplace)
    return executed


async def play_recorded(
    domain: Domain, task: Task, turns: Sequence[Sequence[ToolCall]], workplace: Workplace
) -> tuple[Executed, MemoryRecorder]:
    """The same, with what the attempt left: its events, and its turns as tokens."""
    attempt = Attempt(
        run_id=RunId(f"demonstration_{task.id}"),
        task=task,
        policy=EXPERT,
        sampling=Sampling(temperature=0),
    )
    recorder = MemoryRecorder()
    executor = RunExecutor(workplace, Expert(turns, workplace.template))
    return await executor.execute(attempt, domain, recorder), recorder
