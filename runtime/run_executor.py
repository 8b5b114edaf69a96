"""Task → Run: open, loop, grade, record; whatever was opened is closed.

One execution path for production, rollouts, evaluation and demonstrations: they differ in the
engine that replies, in the recorder that commits, and in whether an expectation is known. Grading
comes after the loop, never as a node of it, on artefacts read from the record, the connectors and
the workspace's last snapshot.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from runtime.agent_loop import NeedsAttention, Session, run_agent
from runtime.checks.protocol import Artefacts
from runtime.checks.verdict import run_checks, verifier_digest
from runtime.context import Conversation
from runtime.domain import Domain
from runtime.engine.protocol import Engine
from runtime.engine.templates import ChatTemplate
from runtime.errors import DomainError, LeaseLost, NoriaError, SandboxError
from runtime.fold import Folded, fold, seconds_spent
from runtime.journal import ConnectorStates, Journal, Recorder
from runtime.limits import Budget
from runtime.run import (
    Event,
    Graded,
    Json,
    ModelCall,
    Policy,
    RunId,
    RunState,
    Sampling,
    Started,
    Stopped,
    Task,
    Usage,
    Verdict,
    VerdictStatus,
)
from runtime.run_store import Outcome
from runtime.sandbox.lazy import LazySandbox
from runtime.sandbox.protocol import SandboxBackend
from runtime.sandbox.tools import sandbox_tools
from runtime.tools import Connector, ConnectorFactory, FinishTool, Tool, ToolRegistry


@dataclass(frozen=True, slots=True)
class Workplace:
    """What every run of a process shares."""

    backend: SandboxBackend
    connectors: Mapping[str, ConnectorFactory]
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is executed: a task under a pinned policy, and what earlier runners recorded of it."""

    run_id: RunId
    task: Task
    policy: Policy
    sampling: Sampling
    runner: str = "local"
    number: int = 1
    events: Sequence[Event] = ()
    model_calls: Sequence[ModelCall] = ()
    connector_states: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Executed:
    """What an attempt came to."""

    outcome: Outcome
    artefacts: Artefacts | None
    """None where the run failed before it could be judged."""

    @property
    def verdict(self) -> Verdict | None:
        return self.outcome.verdict


class RunExecutor:
    """Executes attempts; holds nothing of any single run."""

    def __init__(self, workplace: Workplace, engine: Engine) -> None:
        self._workplace = workplace
        self._engine = engine

    async def execute(self, attempt: Attempt, domain: Domain, recorder: Recorder) -> Executed:
        """Run the attempt to its outcome. Only LeaseLost and cancellation propagate.

        The last event (`Finished`) is the caller's to write, together with the row.
        """
        journal = Journal(recorder, attempt.events)
        budget = Budget(domain.limits, time.monotonic, seconds_before=seconds_spent(attempt.events))
        try:
            async with AsyncExitStack() as stack:
                desk = await self._open(attempt, domain, journal, budget, stack)
                stopped = await desk.loop()
                artefacts = await desk.artefacts(stopped)
                verdict = _grade(domain, artefacts, attempt.task)
                await journal.record(Graded(verdict=verdict))
                return Executed(
                    _outcome(stopped, verdict, journal.usage(budget.seconds)), artefacts
                )
        except LeaseLost:
            raise
        except NeedsAttention as error:
            return Executed(_failed(RunState.NEEDS_ATTENTION, error, journal, budget), None)
        except NoriaError as error:
            return Executed(_failed(RunState.ERROR, error, journal, budget), None)
        except OSError as error:  # this host, not the agent: a full disk, too few descriptors
            return Executed(_failed(RunState.ERROR, _host_failure(error), journal, budget), None)

    async def _open(
        self,
        attempt: Attempt,
        domain: Domain,
        journal: Journal,
        budget: Budget,
        stack: AsyncExitStack,
    ) -> "_Desk":
        states = ConnectorStates(attempt.connector_states)
        connectors = await self._open_connectors(domain, attempt.task, states, stack)
        tools = run_tools(domain, connectors)
        conversation = Conversation.open(
            self._workplace.template, domain, attempt.task, list(tools)
        )
        folded = fold(attempt.events, attempt.model_calls, conversation, budget)
        initial = await self._workplace.backend.store(attempt.task.files)
        workspace = folded.snapshot or initial
        sandbox = LazySandbox(self._workplace.backend, domain.sandbox, workspace)
        stack.push_async_callback(sandbox.close)
        await journal.record(
            Started(attempt=attempt.number, runner=attempt.runner, snapshot=workspace)
        )
        session = Session(
            run_id=attempt.run_id,
            policy=attempt.policy,
            sampling=attempt.sampling,
            engine=self._engine,
            template=self._workplace.template,
            conversation=conversation,
            budget=budget,
            recorder=journal,
            states=states,
            sandbox=sandbox,
            finish=domain.finish,
        )
        return _Desk(
            attempt.task, domain, session, tools, folded, connectors, self._workplace, journal
        )

    async def _open_connectors(
        self, domain: Domain, task: Task, states: ConnectorStates, stack: AsyncExitStack
    ) -> dict[str, Connector]:
        opened: dict[str, Connector] = {}
        for name, mode in domain.connectors.items():
            if name not in self._workplace.connectors:
                known = ", ".join(self._workplace.connectors) or "none"
                raise DomainError(f"unknown connector {name!r}; connectors here: {known}")
            opened[name] = await self._workplace.connectors[name].open(
                mode=mode,
                seed=task.seed,
                initial=task.connectors.get(name),
                state=states.of(name),
            )
            stack.push_async_callback(opened[name].close)
        return opened


def run_tools(domain: Domain, connectors: Mapping[str, Connector]) -> ToolRegistry:
    """The tools a run of the domain may call, in the order the domain lists them."""
    available: list[Tool] = [*sandbox_tools()]
    for connector in connectors.values():
        available.extend(connector.tools())
    if domain.finish == "finish":
        available.append(FinishTool(domain.output_schema))
    return ToolRegistry(available).select(domain.tools)


# ---------------------------------------------------------------- one open run


@dataclass(slots=True)
class _Desk:
    """An opened run: loops, then lays out what is judged."""

    task: Task
    domain: Domain
    session: Session
    tools: ToolRegistry
    folded: Folded
    connectors: Mapping[str, Connector]
    workplace: Workplace
    journal: Journal
    initial_states: dict[str, Json] = field(init=False)

    def __post_init__(self) -> None:
        self.initial_states = {}

    async def loop(self) -> Stopped:
        state = self.folded.state
        self.initial_states = await self._initial_states()
        if state["stop"] is not None:
            return state["stop"]
        limits = self.session.budget.limits
        return await run_agent(
            self.task, self.tools, limits.steps, session=self.session, state=state
        )

    async def _initial_states(self) -> dict[str, Json]:
        """What the systems held before the run: opened anew from the task, touched by nobody."""
        states: dict[str, Json] = {}
        modes = self.domain.connectors
        for name in self.connectors:
            if modes[name] == "live":
                continue  # a live system's past cannot be opened anew
            pristine = await self.workplace.connectors[name].open(
                mode=modes[name],
                seed=self.task.seed,
                initial=self.task.connectors.get(name),
                state=ConnectorStates({}).of(name),
            )
            states[name] = pristine.snapshot()
            await pristine.close()
        return states

    async def artefacts(self, stopped: Stopped) -> Artefacts:
        last = self.journal.last_snapshot
        files = await self.workplace.backend.read_snapshot(last) if last else self.task.files
        return Artefacts(
            input=self.task.input,
            answer=stopped.answer,
            calls=self.journal.calls(),
            files=files,
            initial_files=self.task.files,
            states={name: c.snapshot() for name, c in self.connectors.items()},
            initial_states=self.initial_states,
        )


def _grade(domain: Domain, artefacts: Artefacts, task: Task) -> Verdict:
    return run_checks(
        domain.checks,
        artefacts,
        task.expectation,
        reward=domain.reward,
        verifier_digest=verifier_digest(domain),
    )


def _outcome(stopped: Stopped, verdict: Verdict, usage: Usage) -> Outcome:
    state, reason = _judged(stopped, verdict)
    return Outcome(
        state=state,
        reason=reason,
        answer=stopped.answer,
        verdict=verdict,
        failure=None,
        usage=usage,
    )


def _judged(stopped: Stopped, verdict: Verdict) -> tuple[RunState, str | None]:
    if verdict.status in (VerdictStatus.INFRA_ERROR, VerdictStatus.INVALID_TASK):
        return RunState.ERROR, "a check could not run, so the run is not judged"
    if stopped.outcome == "timed_out":
        return RunState.TIMED_OUT, stopped.reason
    if verdict.status is VerdictStatus.PASS:
        return RunState.ACCEPTED, None
    failed = [c.reason for c in verdict.checks if c.required and c.status == "failed"]
    return RunState.REJECTED, "; ".join(failed) or None


def _host_failure(error: OSError) -> SandboxError:
    what = error.strerror or type(error).__name__
    where = f" at {error.filename}" if error.filename else ""
    return SandboxError(
        f"this host could not keep the workspace: {what}{where}; mend it there (free disk space, "
        "raise limits) and send the run again"
    )


def _failed(state: RunState, error: NoriaError, journal: Journal, budget: Budget) -> Outcome:
    return Outcome(
        state=state,
        reason=str(error),
        answer=None,
        verdict=None,
        failure=error.failure(),
        usage=journal.usage(budget.seconds),
    )
