"""The records everything else reads: Run, events, model calls, tool calls, verdict.

A run is one attempt at one task by one policy. What is stored is frozen; what happens during a run
is an append-only list of events with a gap-free `seq`, and the event list is the checkpoint: a
runner that takes over folds it back into the state of the loop. Token ids and logprobs are kept
apart from the events (`ModelCall`), turn by turn and as deltas, so that a record costs what it
says and trainers read exactly what was sampled.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NewType, assert_never

from pydantic import BaseModel, ConfigDict, Field

from runtime.errors import Failure

TenantId = NewType("TenantId", str)
RunId = NewType("RunId", str)
PolicyId = NewType("PolicyId", str)
SnapshotId = NewType("SnapshotId", str)
"""`sha256:<hex>` of a workspace snapshot."""

Json = Any
"""A JSON value. Validated against a schema wherever it enters."""


class Record(BaseModel):
    """Base of everything stored or sent: frozen, nothing undeclared."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )


class RunKind(StrEnum):
    PRODUCTION = "production"
    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    SHADOW = "shadow"

    @property
    def priority(self) -> int:
        """Smaller is served first: production > evaluation > rollout, shadow."""
        match self:
            case RunKind.PRODUCTION:
                return 0
            case RunKind.EVALUATION:
                return 10
            case RunKind.ROLLOUT | RunKind.SHADOW:
                return 20
            case _:
                assert_never(self)


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    WAITING_APPROVAL = "waiting_approval"
    WAITING_INPUT = "waiting_input"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    ERROR = "error"
    NEEDS_ATTENTION = "needs_attention"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset(
    {
        RunState.ACCEPTED,
        RunState.REJECTED,
        RunState.TIMED_OUT,
        RunState.ERROR,
        RunState.NEEDS_ATTENTION,
        RunState.CANCELLED,
    }
)


class Policy(Record):
    """Base model plus adapter, or base alone; what a run is pinned to."""

    id: PolicyId
    """Name the engine serves it under; immutable: a new adapter has a new name."""
    base: str
    """Digest (`sha256:…`) or hub id of the base model."""
    adapter: str | None = None
    """Digest of the adapter, None for the base alone."""


class Sampling(Record):
    """How replies are sampled. Rollouts use temperature 1, top_p 1, so that logprobs are exact."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    """Seed of the run; every turn derives its own from it."""


# ---------------------------------------------------------------- tools


class Effect(StrEnum):
    """What repeating a call would do to the world."""

    NONE = "none"
    WORKSPACE = "workspace"
    """Changes the sandbox's own files; a snapshot is stored before the result is committed."""
    IDEMPOTENT = "idempotent"
    """May be repeated under the same key."""
    CONSEQUENTIAL = "consequential"
    """Happens once or the run says `needs_attention`."""


class ToolCall(Record):
    """One call the policy asked for. `error` is set when it could not be parsed or validated."""

    id: str
    """Unique within the run: `<step>.<index>`."""
    name: str
    arguments: dict[str, Json] = Field(default_factory=dict)
    error: str | None = None
    """What was wrong with the call, in words the policy can act on."""


class ToolResult(Record):
    """What came back. `content` is what the model reads; `data` is what checks read."""

    call_id: str
    name: str
    ok: bool
    content: str
    data: Json = None
    effect: Effect = Effect.NONE
    truncated: bool = False
    seconds: float = 0.0


# ---------------------------------------------------------------- model calls


class ModelCall(Record):
    """One sampled reply, token-exact, as a delta to its parent turn.

    The full prompt of turn t is prompt(parent) + sampled(parent) + prompt_delta; its length and
    hash are stored so that a rebuild is checked, never assumed. A fork (compaction, repair) has
    `parent_turn = None` and carries the whole prompt as its delta.
    """

    turn: int
    parent_turn: int | None
    prompt_length: int
    prompt_hash: str
    """First 16 hex digits of sha256 over the little-endian int32 prompt ids."""
    prompt_delta: list[int]
    sampled: list[int]
    logprobs: list[float]
    """Natural-log probability of each sampled id under the temperature in force; same length as
    `sampled`, or empty where the engine gave none (then `trainable` is False)."""
    finish_reason: Literal["stop", "length", "abort"]
    temperature: float
    policy_id: PolicyId
    template_digest: str
    cached_tokens: int = 0
    """Prompt tokens the engine did not compute again."""
    trainable: bool = True
    seconds: float = 0.0


# ---------------------------------------------------------------- verdict


class CheckStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"
    ERROR = "error"


class CheckResult(Record):
    name: str
    kind: str
    status: CheckStatus
    score: float = Field(ge=0, le=1)
    """Partial credit in [0, 1]; 0 where the status is error or not_applicable."""
    weight: float = 1.0
    required: bool = True
    public: bool = False
    reason: str = ""
    """One sentence a business user understands."""
    evidence: dict[str, Json] = Field(default_factory=dict)
    seconds: float = 0.0


class VerdictStatus(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INFRA_ERROR = "infra_error"
    INVALID_TASK = "invalid_task"


class Verdict(Record):
    """The structured result of all checks of one run."""

    status: VerdictStatus
    basis: Literal["rules", "rules+expectation"]
    reward: float | None = Field(default=None, ge=0, le=1)
    """What training sees; None where the status is infra_error or invalid_task."""
    step_rewards: list[float] = Field(default_factory=list)
    checks: list[CheckResult]
    verifier_digest: str
    """sha256 of the check definitions and of the code that judged."""
    evidence_hash: str | None = Field(
        description="sha256 over what was judged: the artefacts and, where the basis says so, the "
        "expectation. Stored always; null where an answer withholds it, because a hash over few "
        "possible expectations tells which one it was."
    )

    def canonical(self) -> str:
        """The verdict as JSON with timings left out: equal artefacts give equal bytes."""
        stripped = self.model_copy(
            update={"checks": [c.model_copy(update={"seconds": 0.0}) for c in self.checks]}
        )
        return stripped.model_dump_json()


class Usage(Record):
    steps: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """US dollars."""
    seconds: float = 0.0
    """Wall seconds spent running, over all attempts to resume it."""


# ---------------------------------------------------------------- task, run, events


class Task(Record):
    """One instance of a domain's work. The expectation is private: it never enters a prompt."""

    id: str
    domain: str
    input: dict[str, Json]
    files: dict[str, bytes] = Field(default_factory=dict)
    """Workspace-relative path → content, written before the first step."""
    seed: int = 0
    """Seeds the simulated connectors."""
    connectors: dict[str, Json] = Field(default_factory=dict)
    """Connector name → its initial state, where the task fixes it."""
    expectation: dict[str, Json] | None = None
    split: str = "production"
    level: str = "full"
    family: str | None = None
    """Family of phrasing the task was generated from; splits share none."""


class Run(Record):
    """One attempt at one task by one policy, as stored."""

    tenant_id: TenantId
    id: RunId
    kind: RunKind
    domain: str
    domain_digest: str
    task: Task
    policy: Policy
    sampling: Sampling
    state: RunState
    reason: str | None = None
    """Why the state is what it is, where that is not obvious; one sentence."""
    answer: dict[str, Json] | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None
    usage: Usage = Usage()
    initial_snapshot: SnapshotId | None = None
    attempts: int = 0
    """How many runners have claimed it."""
    cancel_requested: bool = False
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Admitted(Record):
    type: Literal["admitted"] = "admitted"


class Started(Record):
    """A runner claimed the run (again, after a crash, when `attempt` > 1)."""

    type: Literal["started"] = "started"
    attempt: int
    runner: str
    snapshot: SnapshotId | None = None
    """Workspace the attempt opened on; the first one is the run's initial snapshot."""


class Thought(Record):
    """A model call was committed; its tokens are in the model_calls row of the same turn."""

    type: Literal["thought"] = "thought"
    step: int
    turn: int
    text: str
    """The reply as text, for people and for folding; training reads ids, never this."""
    calls: list[ToolCall]
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0


class Intent(Record):
    """Written before a call whose effect leaves the process; without its result, it is unknown."""

    type: Literal["intent"] = "intent"
    call_id: str
    name: str
    arguments_hash: str
    effect: Effect


class Observed(Record):
    """A tool call's result was committed, with whatever it changed."""

    type: Literal["observed"] = "observed"
    step: int
    result: ToolResult
    snapshot: SnapshotId | None = None
    """Workspace after the call, where the call had a workspace effect."""


class Stopped(Record):
    """The loop ended; grading follows."""

    type: Literal["stopped"] = "stopped"
    outcome: Literal["answered", "timed_out"]
    limit: str | None = None
    """Which limit ended it, where one did."""
    reason: str
    answer: dict[str, Json] | None = None


class Graded(Record):
    type: Literal["graded"] = "graded"
    verdict: Verdict


class Finished(Record):
    """The last event of every run."""

    type: Literal["finished"] = "finished"
    state: RunState
    reason: str | None = None
    failure: Failure | None = None


class Feedback(Record):
    """What a person said about the run; may come after it finished."""

    type: Literal["feedback"] = "feedback"
    rating: Literal["up", "down"] | None = None
    outcome: str | None = None
    correction: dict[str, Json] | None = None
    comment: str | None = None
    by: str = ""


EventBody = Annotated[
    Admitted | Started | Thought | Intent | Observed | Stopped | Graded | Finished | Feedback,
    Field(discriminator="type"),
]


class Event(Record):
    """One entry of the run record. `seq` starts at 1 and has no gaps."""

    run_id: RunId
    seq: int
    at: datetime
    body: EventBody
