"""A run record folded back into where its loop stood: how a runner takes over.

The events say what was decided and done, the model calls say in which tokens. Folding replays both
into a fresh conversation, a budget and a loop state, and refuses a record that disagrees with what
it rebuilds. Nothing is executed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from runtime.agent_loop import LoopState, after_thought, fresh
from runtime.context import Conversation
from runtime.errors import StoreError
from runtime.limits import Budget
from runtime.run import (
    Event,
    EventBody,
    Intent,
    ModelCall,
    Observed,
    SnapshotId,
    Started,
    Stopped,
    Thought,
    ToolResult,
)


def seconds_spent(events: Sequence[Event]) -> float:
    """Wall seconds earlier attempts ran: from each start to the last thing it recorded."""
    spent, started, last = 0.0, cast("datetime | None", None), cast("datetime | None", None)
    for event in events:
        if isinstance(event.body, Started):
            if started is not None and last is not None:
                spent += (last - started).total_seconds()
            started = event.at
        last = event.at
    if started is not None and last is not None:
        spent += (last - started).total_seconds()
    return spent


@dataclass(slots=True)
class Folded:
    """A record folded back into where its loop stood."""

    state: LoopState
    snapshot: SnapshotId | None
    """The last committed workspace, None where no call changed it."""


def fold(
    events: Sequence[Event],
    model_calls: Sequence[ModelCall],
    conversation: Conversation,
    budget: Budget,
) -> Folded:
    """Replay a record into state, conversation and budget. Raises StoreError where it disagrees."""
    folded = Folded(state=fresh(), snapshot=None)
    by_turn = {call.turn: call for call in model_calls}
    for event in events:
        _fold_one(event.body, folded, by_turn, conversation, budget)
    return folded


def _fold_one(
    body: EventBody,
    folded: Folded,
    by_turn: Mapping[int, ModelCall],
    conversation: Conversation,
    budget: Budget,
) -> None:
    state = folded.state
    match body:
        case Thought():
            if body.turn not in by_turn:
                raise StoreError(f"turn {body.turn} has an event and no model call")
            conversation.replay(by_turn[body.turn])
            budget.steps += 1
            budget.tokens += body.sampled_tokens
            state.update(cast(LoopState, after_thought(state, body)))
            state["step"] += 1
        case Intent():
            state["announced"].append(body.call_id)
        case Observed():
            budget.tool_calls += 1
            folded.snapshot = body.snapshot or folded.snapshot
            _fold_result(body.result, state, conversation)
        case Stopped():
            state["stop"] = body
        case _:
            pass


def _fold_result(result: ToolResult, state: LoopState, conversation: Conversation) -> None:
    state["pending"] = [call for call in state["pending"] if call.id != result.call_id]
    state["announced"] = [each for each in state["announced"] if each != result.call_id]
    state["results"].append(result)
    if not state["pending"]:
        conversation.observe([(r.name, r.content) for r in state["results"]])
        state["results"] = []
