"""THE loop: think → act → … → finish, the same for production, rollouts and evaluation.

A LangGraph graph without a saver: the run record is the checkpoint. State is what the next node
needs to know and is rebuilt from the record (`fold`); live handles travel in `Session`, the graph's
context, and are never stored. Limits are asked before anything is spent. A call whose effect leaves
the process is announced first (`Intent`) and its result is committed with whatever it changed, so
that a runner which takes over repeats nothing that must happen once.

Scaling out: one process holds hundreds of runs waiting on the engine; more processes are more
runners, on any machine that reaches Postgres and the engine.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol, TypedDict, cast

from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from runtime.context import Conversation
from runtime.engine.protocol import CompletionRequest, Engine
from runtime.engine.templates import ChatTemplate
from runtime.engine.tool_calls import parse_calls
from runtime.errors import EngineGarbage, EngineUnavailable, NoriaError, ToolError
from runtime.journal import Recorder
from runtime.limits import Budget, TaskTimeout
from runtime.run import (
    Effect,
    Intent,
    Json,
    ModelCall,
    Observed,
    Policy,
    RunId,
    Sampling,
    SnapshotId,
    Stopped,
    Task,
    Thought,
    ToolCall,
    ToolResult,
)
from runtime.sandbox.protocol import Sandbox
from runtime.tools import Tool, ToolContext, ToolOutput, ToolRegistry


class ChangedStates(Protocol):
    """Hands over the connector states changed since it was last asked."""

    def take(self) -> Mapping[str, Json]: ...


class NeedsAttention(NoriaError):
    """A consequential call was announced and its result is unknown: a person must look."""

    boundary = ToolError.boundary
    code = "needs_attention"


class LoopState(TypedDict):
    step: int
    """Steps committed so far; the step in progress while `pending` is not empty."""
    pending: list[ToolCall]
    """Calls of the last reply without a committed result."""
    results: list[ToolResult]
    """Committed results of the last reply's calls, in order."""
    announced: list[str]
    """Ids of calls with an Intent and no result: an earlier runner died in between."""
    empty_replies: int
    """Consecutive replies without one usable call."""
    last_call: str
    """Fingerprint of the last usable reply, and how often it came in a row."""
    repeats: int
    stop: Stopped | None


def fresh() -> LoopState:
    """The state of a run that has not begun."""
    return LoopState(
        step=0,
        pending=[],
        results=[],
        announced=[],
        empty_replies=0,
        last_call="",
        repeats=0,
        stop=None,
    )


@dataclass(slots=True)
class Session:
    """The live handles of one run on one runner."""

    run_id: RunId
    policy: Policy
    sampling: Sampling
    engine: Engine
    template: ChatTemplate
    conversation: Conversation
    budget: Budget
    recorder: Recorder
    states: ChangedStates
    sandbox: Sandbox
    finish: str
    tools: ToolRegistry = field(default_factory=lambda: ToolRegistry(()))


# ---------------------------------------------------------------- entry


async def run_agent(
    task: Task,
    tools: ToolRegistry,
    max_steps: int,
    *,
    session: Session,
    state: LoopState | None = None,
) -> Stopped:
    """Run the loop until it answers or a limit ends it.

    `state` continues a folded record. Engine, sandbox and store failures propagate: they are not
    the agent's. Running out of a limit is an outcome (`TaskTimeout` in the `Stopped` it returns).
    """
    limits = session.budget.limits
    session.budget.limits = limits.model_copy(update={"steps": min(max_steps, limits.steps)})
    session.tools = tools
    final = await build_graph().ainvoke(
        state or fresh(),
        context=session,
        config={"recursion_limit": 2 * limits.steps + 8, "run_name": task.id},
    )
    stop = cast(LoopState, final)["stop"]
    assert stop is not None, "the graph ends only through a stop"
    return stop


@cache
def build_graph() -> CompiledStateGraph[LoopState, Session, LoopState, LoopState]:
    graph = StateGraph(LoopState, context_schema=Session)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_conditional_edges(START, route)
    graph.add_conditional_edges("think", route)
    graph.add_conditional_edges("act", route)
    return graph.compile()


def route(state: LoopState) -> Literal["think", "act", "__end__"]:
    if state["stop"] is not None:
        return "__end__"  # langgraph's END
    return "act" if state["pending"] else "think"


# ---------------------------------------------------------------- think


async def think(state: LoopState, runtime: Runtime[Session]) -> dict[str, Any]:
    """One model call, committed with its tokens before anything acts on it."""
    session = runtime.context
    timeout = _out_of_budget(state, session.budget)
    if timeout is not None:
        return {"stop": await _stop(session, timeout)}
    thought, model_call = await _sample(state["step"], session)
    await session.recorder.record(thought, model_call=model_call)
    return {"step": state["step"] + 1, **after_thought(state, thought)}


def _out_of_budget(state: LoopState, budget: Budget) -> TaskTimeout | None:
    if budget.engine_ate_it:
        raise EngineUnavailable(
            f"the engine used {budget.engine_seconds:.0f} of the {budget.limits.seconds:g} seconds "
            "this run may take; add engine capacity or raise limits.seconds"
        )
    if state["empty_replies"] >= budget.limits.empty_replies:
        replies = "a reply" if state["empty_replies"] == 1 else f"{state['empty_replies']} replies"
        return TaskTimeout("no_progress", f"{replies} without a usable call")
    if state["repeats"] >= budget.limits.repeated_calls:
        return TaskTimeout("no_progress", f"the same call {state['repeats']} times in a row")
    return budget.exhausted()


async def _stop(session: Session, timeout: TaskTimeout) -> Stopped:
    stopped = Stopped(outcome="timed_out", limit=timeout.limit, reason=timeout.reason)
    await session.recorder.record(stopped)
    return stopped


async def _sample(step: int, session: Session) -> tuple[Thought, ModelCall]:
    sampling, budget = session.sampling, session.budget
    started = time.monotonic()
    completion = await session.engine.complete(
        CompletionRequest(
            policy=session.policy.id,
            prompt_ids=session.conversation.prompt,
            max_tokens=budget.tokens_this_step,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=None if sampling.seed is None else turn_seed(sampling.seed, step),
            stop_token_ids=session.template.stop_ids,
        )
    )
    budget.engine_seconds += time.monotonic() - started
    budget.steps += 1
    if completion.served_policy != session.policy.id:
        raise EngineGarbage(
            f"the engine served {completion.served_policy!r} where {session.policy.id!r} was asked"
        )
    budget.tokens += len(completion.sampled)
    text = session.template.decode(completion.sampled)
    model_call = session.conversation.commit(
        completion,
        policy_id=session.policy.id,
        temperature=sampling.temperature,
        trainable=sampling.temperature > 0 and sampling.top_p == 1,
    )
    thought = Thought(
        step=step,
        turn=model_call.turn,
        text=text,
        calls=parse_calls(text, step),
        sampled_tokens=len(completion.sampled),
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        seconds=completion.seconds,
    )
    return thought, model_call


def turn_seed(seed: int, turn: int) -> int:
    """A turn's own 31-bit seed: turns of one run must not repeat each other's randomness."""
    digest = hashlib.sha256(f"{seed}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF


def after_thought(state: LoopState, thought: Thought) -> dict[str, Any]:
    """What a committed reply changes in the state (also used when folding the record)."""
    usable = [call for call in thought.calls if call.error is None]
    fingerprint = json.dumps([[c.name, c.arguments] for c in usable], sort_keys=True)
    repeated = bool(usable) and fingerprint == state["last_call"]
    return {
        "pending": list(thought.calls),
        "results": [],
        "empty_replies": 0 if usable else state["empty_replies"] + 1,
        "last_call": fingerprint if usable else "",
        "repeats": state["repeats"] + 1 if repeated else int(bool(usable)),
    }


# ---------------------------------------------------------------- act


async def act(state: LoopState, runtime: Runtime[Session]) -> dict[str, Any]:
    """Every pending call of the last reply, one after another, each committed on its own."""
    session = runtime.context
    results = list(state["results"])
    step = state["step"] - 1
    for call in state["pending"]:
        announced = call.id in state["announced"]
        result, snapshot = await _perform(call, session, announced=announced)
        results.append(result)
        stopped = _answered(call, result, session)
        await session.recorder.record(
            Observed(step=step, result=result, snapshot=snapshot),
            *([stopped] if stopped else []),
            connector_states=session.states.take(),
        )
        if stopped is not None:
            return {"pending": [], "results": results, "stop": stopped}
    session.conversation.observe([(r.name, r.content) for r in results])
    return {"pending": [], "results": [], "announced": []}


async def _perform(
    call: ToolCall, session: Session, *, announced: bool
) -> tuple[ToolResult, SnapshotId | None]:
    """Execute one call; the workspace after it is stored before its result is committed.

    Whatever the tool, the arguments or an unfit workspace get wrong is an observation.
    """
    started = time.monotonic()
    session.budget.tool_calls += 1
    try:
        if call.error is not None:
            raise ToolError(call.error)
        tool = session.tools.get(call.name)
        arguments = tool.validate(call.arguments)
        await _announce(call, tool, session, announced=announced)
        output = await tool(_tool_context(call, session), arguments)
        changed = tool.effect is Effect.WORKSPACE
        snapshot = await session.sandbox.snapshot() if changed else None
    except ToolError as error:
        said = f"error: {error}"
        return ToolResult(call_id=call.id, name=call.name, ok=False, content=said), None
    return _result(call, tool, output, time.monotonic() - started), snapshot


def _answered(call: ToolCall, result: ToolResult, session: Session) -> Stopped | None:
    if not (result.ok and call.name == session.finish):
        return None
    answer = session.tools.get(call.name).validate(call.arguments)
    return Stopped(outcome="answered", reason="answered", answer=answer)


def _result(call: ToolCall, tool: Tool, output: ToolOutput, seconds: float) -> ToolResult:
    return ToolResult(
        call_id=call.id,
        name=call.name,
        ok=True,
        content=output.content,
        data=output.data,
        effect=tool.effect,
        seconds=seconds,
    )


def _tool_context(call: ToolCall, session: Session) -> ToolContext:
    return ToolContext(
        run_id=session.run_id,
        key=f"{session.run_id}/{call.id}",
        sandbox=session.sandbox,
        seconds_left=max(1.0, session.budget.seconds_left),
    )


async def _announce(call: ToolCall, tool: Tool, session: Session, *, announced: bool) -> None:
    """Commit the intent of an outside effect; refuse to repeat one whose result is unknown."""
    if tool.effect not in (Effect.IDEMPOTENT, Effect.CONSEQUENTIAL):
        return
    if announced:
        if tool.effect is Effect.CONSEQUENTIAL:
            raise NeedsAttention(
                f"{call.name} (call {call.id}) was started before the runner died; "
                "whether it took effect is unknown"
            )
        return
    await session.recorder.record(
        Intent(
            call_id=call.id,
            name=call.name,
            arguments_hash=arguments_hash(call.arguments),
            effect=tool.effect,
        )
    )


def arguments_hash(arguments: Mapping[str, Json]) -> str:
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:16]
