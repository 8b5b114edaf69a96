"""The loop on shipped fakes: what it records, how it ends, and that a record folds back."""

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runtime.context import Conversation, prompt_hash
from runtime.demonstration import Expert, play
from runtime.domain import Domain, load_domain
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import EngineUnavailable, StoreError
from runtime.fold import fold, seconds_spent
from runtime.journal import MemoryRecorder
from runtime.limits import Budget
from runtime.run import (
    Event,
    Intent,
    Observed,
    Policy,
    PolicyId,
    RunId,
    RunState,
    Sampling,
    SnapshotId,
    Started,
    Task,
    Thought,
    ToolCall,
    VerdictStatus,
)
from runtime.run_executor import Attempt, Executed, RunExecutor, Workplace
from runtime.sandbox.testing import MemoryBackend
from runtime.sandbox.tools import sandbox_tools
from runtime.testing import ScriptedEngine, byte_template
from tests.ledger import LedgerFactory

LEDGER = Path(__file__).parent.parent / "domains" / "ledger"
TASK = Task(id="t", domain="ledger", input={"amount": 5})
GOOD = (
    'write_file path=note.txt content="paid 5"',
    "post amount=5",
    "read_file path=note.txt",
    'finish note="paid 5"',
)


@pytest.fixture
def template() -> ChatTemplate:
    return byte_template()


@pytest.fixture
def workplace(tmp_path: Path, memory_sandboxes: MemoryBackend, template: ChatTemplate) -> Workplace:
    return Workplace(memory_sandboxes, {"ledger": LedgerFactory(tmp_path / "book")}, template)


@pytest.fixture
def domain(workplace: Workplace) -> Domain:
    return load_domain(
        LEDGER,
        known_tools=[tool.name for tool in sandbox_tools()],
        known_connectors=workplace.connectors,
    )


async def run(
    workplace: Workplace, domain: Domain, replies: Sequence[str]
) -> tuple[Executed, MemoryRecorder, ScriptedEngine]:
    recorder = MemoryRecorder()
    engine = ScriptedEngine(replies, workplace.template)
    attempt = Attempt(
        run_id=RunId("run_x"),
        task=TASK,
        policy=Policy(id=PolicyId("scripted"), base="scripted"),
        sampling=Sampling(seed=7),
    )
    executed = await RunExecutor(workplace, engine).execute(attempt, domain, recorder)
    return executed, recorder, engine


async def test_a_good_run_is_accepted_and_recorded_in_order(
    workplace: Workplace, domain: Domain
) -> None:
    executed, recorder, _ = await run(workplace, domain, GOOD)
    assert executed.outcome.state is RunState.ACCEPTED
    kinds = [body.type for body in recorder.bodies]
    assert kinds == [
        "started",
        *("thought", "observed"),
        *("thought", "intent", "observed"),
        *("thought", "observed"),
        *("thought", "observed", "stopped"),
        "graded",
    ]
    snapshots = [b.snapshot for b in recorder.bodies if isinstance(b, Observed)]
    assert [s is not None for s in snapshots] == [True, False, False, False]


async def test_every_prompt_is_the_last_one_plus_what_was_sampled_and_observed(
    workplace: Workplace, domain: Domain
) -> None:
    _, recorder, engine = await run(workplace, domain, GOOD)
    for request, call in zip(engine.requests, recorder.model_calls, strict=True):
        assert len(request.prompt_ids) >= call.prompt_length
    rebuilt: list[int] = []
    for call in recorder.model_calls:
        rebuilt += call.prompt_delta
        assert (len(rebuilt), prompt_hash(rebuilt)) == (call.prompt_length, call.prompt_hash)
        rebuilt += call.sampled
        assert len(call.sampled) == len(call.logprobs)
        assert call.trainable


async def test_turns_are_seeded_apart_and_the_same_each_time(
    workplace: Workplace, domain: Domain
) -> None:
    _, _, first = await run(workplace, domain, GOOD)
    _, _, second = await run(workplace, domain, GOOD)
    seeds = [request.seed for request in first.requests]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [request.seed for request in second.requests]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("I would like to help you.", "no tool call found"),
        ("fly_away to=moon", "there is no tool 'fly_away'; tools: write_file, read_file"),
        ("post amount=lots", "amount"),
        ("post()", "amount"),
        ("post amount=1 currency=eur", "currency"),
        ("read_file path=/etc/passwd", "error"),
        ("read_file path=absent.txt", "absent.txt"),
    ],
)
async def test_a_faulty_call_is_an_observation_that_names_the_fault(
    workplace: Workplace, domain: Domain, reply: str, says: str
) -> None:
    executed, recorder, _ = await run(workplace, domain, (reply, *GOOD))
    first = next(body for body in recorder.bodies if isinstance(body, Observed))
    assert not first.result.ok
    assert says in first.result.content
    assert executed.outcome.state is RunState.ACCEPTED, "the agent may mend what it got wrong"


async def test_a_faulty_call_has_no_effect(workplace: Workplace, domain: Domain) -> None:
    _, recorder, _ = await run(workplace, domain, ("post amount=lots", *GOOD))
    assert sum(isinstance(body, Intent) for body in recorder.bodies) == 1


@pytest.mark.parametrize(
    ("replies", "limit"),
    [
        (["hm", "hm"], "no_progress"),
        (["read_file path=a"] * 4, "no_progress"),
        ([f"read_file path=f{n}" for n in range(9)], "steps"),
    ],
)
async def test_running_out_of_a_limit_is_graded(
    workplace: Workplace, domain: Domain, replies: list[str], limit: str
) -> None:
    executed, recorder, _ = await run(workplace, domain, replies)
    assert executed.outcome.state is RunState.TIMED_OUT
    assert executed.verdict is not None
    assert executed.verdict.status is VerdictStatus.FAIL
    stopped = next(body for body in recorder.bodies if body.type == "stopped")
    assert stopped.limit == limit
    assert executed.outcome.reason == stopped.reason


async def test_the_token_limit_bounds_the_next_reply(workplace: Workplace, domain: Domain) -> None:
    _, _, engine = await run(workplace, domain, GOOD)
    limits = domain.limits
    assert all(request.max_tokens <= limits.tokens_per_step for request in engine.requests)


async def test_an_engine_failure_is_an_error_and_never_a_verdict(
    workplace: Workplace, domain: Domain
) -> None:
    executed, _, _ = await run(workplace, domain, GOOD[:2])
    assert executed.outcome.state is RunState.ERROR
    assert executed.verdict is None
    assert executed.outcome.failure is not None
    assert executed.outcome.failure.boundary == "engine"
    assert executed.outcome.usage.steps == 2, "what was spent is counted"


class SlowEngine(Expert):
    """A fake engine that takes longer than the run may last."""

    async def complete(self, request: CompletionRequest) -> Completion:
        self.clock[0] += 1_000
        return await super().complete(request)

    clock: list[float]


class _ServesTheBase(ScriptedEngine):
    """Answers every policy with the base, as a server that lost its adapters may."""

    async def complete(self, request: CompletionRequest) -> Completion:
        return replace(await super().complete(request), served_policy=PolicyId("base"))


async def test_another_policy_than_the_pinned_one_ends_the_run_unjudged(
    workplace: Workplace, domain: Domain
) -> None:
    engine = _ServesTheBase(GOOD, workplace.template)
    attempt = Attempt(
        run_id=RunId("run_x"),
        task=TASK,
        policy=Policy(id=PolicyId("adapter"), base="base", adapter="sha256:1"),
        sampling=Sampling(seed=7),
    )
    recorder = MemoryRecorder()
    executed = await RunExecutor(workplace, engine).execute(attempt, domain, recorder)
    assert executed.outcome.state is RunState.ERROR
    assert "served 'base' where 'adapter' was asked" in (executed.outcome.reason or "")
    assert (executed.verdict, recorder.model_calls) == (None, [])


async def test_seconds_the_engine_used_are_not_the_agents_fault(
    workplace: Workplace, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = SlowEngine([[ToolCall(id="0.0", name="list_files")]], workplace.template)
    engine.clock = now
    attempt = Attempt(
        run_id=RunId("run_x"),
        task=TASK,
        policy=Policy(id=PolicyId("p"), base="b"),
        sampling=Sampling(),
    )
    executed = await RunExecutor(workplace, engine).execute(attempt, domain, MemoryRecorder())
    assert executed.outcome.state is RunState.ERROR
    assert executed.outcome.failure is not None
    assert executed.outcome.failure.code == EngineUnavailable.code


class FullDisk(MemoryBackend):
    """A fake back end whose host has no space left."""

    async def store(self, files: Mapping[str, bytes]) -> SnapshotId:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/snapshots")


async def test_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path, domain: Domain, workplace: Workplace
) -> None:
    full = Workplace(FullDisk(state_dir=tmp_path), workplace.connectors, workplace.template)
    executed, _, _ = await run(full, domain, GOOD)
    assert executed.outcome.state is RunState.ERROR
    assert executed.verdict is None
    assert executed.outcome.reason is not None
    assert "No space left on device at /data/snapshots" in executed.outcome.reason


async def test_only_the_first_answer_counts(workplace: Workplace, domain: Domain) -> None:
    replies = (*GOOD[:2], 'finish note="one"\nfinish note="two"')
    executed, recorder, _ = await run(workplace, domain, replies)
    assert executed.outcome.answer == {"note": "one"}
    assert recorder.bodies[-1].type == "graded"


# ---------------------------------------------------------------- fold


def as_events(recorder: MemoryRecorder, count: int) -> list[Event]:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        Event(run_id=RunId("run_x"), seq=n, at=at, body=body)
        for n, body in enumerate(recorder.bodies[:count], start=1)
    ]


def posted(events: Sequence[Event]) -> bool:
    bodies = [event.body for event in events]
    return any(isinstance(body, Observed) and body.result.name == "post" for body in bodies)


async def test_a_run_resumed_after_any_event_ends_the_same(
    workplace: Workplace, domain: Domain, tmp_path: Path
) -> None:
    """Cut the record after every event; a fresh runner finishes with equal tokens and effects."""
    whole, complete, _ = await run(workplace, domain, GOOD)
    ids = [(c.prompt_hash, c.sampled) for c in complete.model_calls]
    for cut in range(1, len(complete.bodies) + 1):
        events = as_events(complete, cut)
        if isinstance(events[-1].body, Intent):
            continue  # an effect of unknown result: needs a person, tested with the runner
        if isinstance(events[-1].body, Observed) and events[-1].body.result.name == "finish":
            continue  # committed together with the stop: no record ends here
        turns = sum(isinstance(event.body, Thought) for event in events)
        recorder = MemoryRecorder()
        engine = ScriptedEngine(GOOD[turns:], workplace.template)
        attempt = Attempt(
            run_id=RunId("run_x"),
            task=TASK,
            policy=Policy(id=PolicyId("scripted"), base="scripted"),
            sampling=Sampling(seed=7),
            events=events,
            model_calls=complete.model_calls[:turns],
            connector_states={"ledger": {"balance": 5}} if posted(events) else {},
        )
        executed = await RunExecutor(workplace, engine).execute(attempt, domain, recorder)
        assert executed.outcome.state is RunState.ACCEPTED, cut
        resumed = [*complete.model_calls[:turns], *recorder.model_calls]
        assert [(c.prompt_hash, c.sampled) for c in resumed] == ids, cut
        assert executed.verdict is not None
        assert whole.verdict is not None
        assert executed.verdict.canonical() == whole.verdict.canonical(), cut


async def test_a_record_that_disagrees_with_the_prompt_is_refused(
    workplace: Workplace, domain: Domain, template: ChatTemplate
) -> None:
    _, complete, _ = await run(workplace, domain, GOOD)
    changed = [complete.model_calls[0].model_copy(update={"prompt_hash": "0" * 16})]
    conversation = Conversation.open(template, domain, TASK, [])
    with pytest.raises(StoreError, match="not the recorded one"):
        fold(as_events(complete, 2), changed, conversation, Budget(domain.limits, time.monotonic))


def test_seconds_spent_adds_up_the_attempts() -> None:
    def event(seq: int, second: int, body: Started | Thought) -> Event:
        at = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
        return Event(run_id=RunId("r"), seq=seq, at=at, body=body)

    thought = Thought(step=0, turn=0, text="", calls=[], sampled_tokens=0, prompt_tokens=0)
    events = [
        event(1, 0, Started(attempt=1, runner="a")),
        event(2, 5, thought),
        event(3, 30, Started(attempt=2, runner="b")),
        event(4, 33, thought),
    ]
    assert seconds_spent(events) == 8
    assert seconds_spent([]) == 0


async def test_a_demonstration_is_played_by_the_real_loop(
    workplace: Workplace, domain: Domain
) -> None:
    turns = [
        [
            ToolCall(
                id="0.0", name="write_file", arguments={"path": "note.txt", "content": "paid 5"}
            )
        ],
        [ToolCall(id="1.0", name="finish", arguments={"note": "paid 5"})],
    ]
    executed = await play(domain, TASK, turns, workplace)
    assert executed.outcome.state is RunState.ACCEPTED
    silent = await play(domain, TASK, [], workplace)
    assert silent.outcome.state is RunState.TIMED_OUT


async def test_a_workspace_that_cannot_be_kept_is_the_agents_fault(
    workplace: Workplace, domain: Domain
) -> None:
    deep = "/".join(["d"] * 200)
    executed, recorder, _ = await run(
        workplace, domain, (f"write_file path={deep}/x content=y", *GOOD)
    )
    first = next(body for body in recorder.bodies if isinstance(body, Observed))
    assert not first.result.ok
    assert executed.outcome.state is RunState.ACCEPTED
