"""What one run leaves behind while it executes: its journal, and its connectors' states.

The journal commits through a recorder (Postgres in production, memory for attempts nobody stores)
and remembers what grading and usage need, so that neither reads the store again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.run import (
    Event,
    EventBody,
    Json,
    ModelCall,
    Observed,
    SnapshotId,
    Thought,
    ToolCall,
    ToolResult,
    Usage,
)


class Recorder(Protocol):
    """Commits what happened, in order. Raises LeaseLost when another runner took over."""

    async def record(
        self,
        *bodies: EventBody,
        model_call: ModelCall | None = None,
        connector_states: Mapping[str, Json] | None = None,
    ) -> None: ...


class MemoryRecorder:
    """Keeps the events of an attempt that is not stored (certification, demonstrations)."""

    def __init__(self) -> None:
        self.bodies: list[EventBody] = []
        self.model_calls: list[ModelCall] = []

    async def record(
        self,
        *bodies: EventBody,
        model_call: ModelCall | None = None,
        connector_states: Mapping[str, Json] | None = None,
    ) -> None:
        self.bodies.extend(bodies)
        if model_call is not None:
            self.model_calls.append(model_call)


class Journal:
    """Commits through the recorder and remembers what grading and usage need."""

    def __init__(self, recorder: Recorder, events: Sequence[Event]) -> None:
        self._recorder = recorder
        self._bodies: list[EventBody] = [event.body for event in events]

    async def record(
        self,
        *bodies: EventBody,
        model_call: ModelCall | None = None,
        connector_states: Mapping[str, Json] | None = None,
    ) -> None:
        await self._recorder.record(
            *bodies, model_call=model_call, connector_states=connector_states
        )
        self._bodies.extend(bodies)

    @property
    def last_snapshot(self) -> SnapshotId | None:
        """The workspace after the last call that changed it."""
        for body in reversed(self._bodies):
            if isinstance(body, Observed) and body.snapshot is not None:
                return body.snapshot
        return None

    def calls(self) -> list[tuple[ToolCall, ToolResult | None]]:
        """Every call asked for, in order, with its result where there is one."""
        results = {b.result.call_id: b.result for b in self._bodies if isinstance(b, Observed)}
        return [
            (call, results.get(call.id))
            for body in self._bodies
            if isinstance(body, Thought)
            for call in body.calls
        ]

    def usage(self, seconds: float) -> Usage:
        return usage_of(self._bodies, seconds)


def usage_of(bodies: Sequence[EventBody], seconds: float) -> Usage:
    """What a run's events say it used; `seconds` of wall time are measured by the caller."""
    thoughts = [body for body in bodies if isinstance(body, Thought)]
    return Usage(
        steps=len(thoughts),
        tool_calls=sum(isinstance(body, Observed) for body in bodies),
        prompt_tokens=sum(t.prompt_tokens for t in thoughts),
        cached_tokens=sum(t.cached_tokens for t in thoughts),
        sampled_tokens=sum(t.sampled_tokens for t in thoughts),
        cost=sum(t.cost for t in thoughts),
        seconds=round(seconds, 3),
    )


class ConnectorStates:
    """The durable states of one run's connectors; changes are committed with the next result."""

    def __init__(self, recorded: Mapping[str, Json]) -> None:
        self._states = dict(recorded)
        self._changed: set[str] = set()

    def of(self, name: str) -> "_State":
        return _State(name, self._states, self._changed)

    def take(self) -> dict[str, Json]:
        changed = {name: self._states[name] for name in sorted(self._changed)}
        self._changed.clear()
        return changed


@dataclass(frozen=True, slots=True)
class _State:
    name: str
    states: dict[str, Json]
    changed: set[str]

    def load(self) -> dict[str, Json] | None:
        return self.states.get(self.name)

    def save(self, state: dict[str, Json]) -> None:
        self.states[self.name] = state
        self.changed.add(self.name)
