"""The records of the wheel: cycles, stages, pool tasks, samples, decisions, adapters.

Frozen, stored as rows, sent as they are. What a stage decides stands in its row (inputs, outputs,
metrics, digests), so that a cycle can be resumed at any stage and explained years later.
"""

from datetime import date, datetime
from enum import StrEnum
from typing import Any, Literal, NewType

from pydantic import Field

from flywheel.recipe import Recipe
from runtime.run import Json, ModelCall, PolicyId, Record, RunId, RunState, Task, TenantId

CycleId = NewType("CycleId", str)
PoolTaskId = NewType("PoolTaskId", str)


class StageName(StrEnum):
    """The stages of a cycle, in order; `rollouts` and `grpo` come once per round of GRPO."""

    MINE = "mine"
    COMPILE = "compile"
    SAMPLE = "sample"
    """Incumbent rollouts on pool tasks."""
    SFT = "sft"
    ROLLOUTS = "rollouts"
    """Groups sampled with the candidate."""
    GRPO = "grpo"
    EVALUATE = "evaluate"
    GATE = "gate"
    RELEASE = "release"


class CycleState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class StageState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    """For runs; no worker is held."""
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not needed, or the cycle ended before it."""


class Outcome(StrEnum):
    """What the gate decides."""

    PROMOTE = "promote"
    HOLD = "hold"
    REJECT = "reject"
    INSUFFICIENT_EVIDENCE = "insufficient_evidence"


class Stage(Record):
    cycle_id: CycleId
    seq: int
    """Order within the cycle, from 0."""
    name: StageName
    round: int = 0
    """Round of GRPO, from 1; 0 for stages that come once."""
    state: StageState = StageState.PENDING
    attempts: int = 0
    inputs: dict[str, Json] = Field(default_factory=dict[str, Any])
    outputs: dict[str, Json] = Field(default_factory=dict[str, Any])
    metrics: dict[str, Json] = Field(default_factory=dict[str, Any])
    progress: dict[str, Json] = Field(default_factory=dict[str, Any])
    """While it runs: step, steps, seconds_left, and a trainer's metrics; runs done of runs."""
    reason: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class CycleOptions(Record):
    """What whoever started the cycle wanted otherwise than the recipe."""

    level: str | None = None
    """Level of the gate's generated tasks."""
    seed: int = 0
    """Seeds training, sampling and the gate's tasks."""
    profile: str | None = None


class Cycle(Record):
    tenant_id: TenantId
    id: CycleId
    domain: str
    date: date
    turn: int = 0
    """The nightly cycle of a date is 0; cycles asked for after it ended count on."""
    trigger: Literal["nightly", "manual"]
    recipe: Recipe
    options: CycleOptions = CycleOptions()
    state: CycleState = CycleState.RUNNING
    outcome: str | None = None
    """The gate's outcome, or `nothing_to_learn`."""
    reason: str | None = None
    stop_requested: bool = False
    created_at: datetime
    finished_at: datetime | None = None


# ---------------------------------------------------------------- pool


class PoolStatus(StrEnum):
    PENDING = "pending"
    """Not validated yet."""
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class PoolTask(Record):
    tenant_id: TenantId
    id: PoolTaskId
    domain: str
    domain_digest: str
    origin: Literal["correction", "import"]
    source_run: RunId | None = None
    source_by: str = ""
    """Who gave the correction."""
    split: Literal["practice", "gate", "report"] = "practice"
    """Only practice is ever trained on."""
    task: Task
    """With files and expectation, where it was read privately."""
    content_digest: str
    """Over domain, input, files, connectors and expectation: duplicates share it."""
    snapshot: str | None = None
    status: PoolStatus = PoolStatus.PENDING
    reason: str | None = None
    """Why it was quarantined; one sentence."""
    demonstration: list[ModelCall] | None = None
    """Token-exact turns of the demonstration that proved it."""
    cycle_id: CycleId | None = None
    fixed_by: str | None = None
    """Adapter with which the failure behind it first passed."""
    created_at: datetime


# ---------------------------------------------------------------- samples


class Sample(Record):
    """One finished run of a task, as statistics see it."""

    task_id: str
    member: int
    """Which of the task's samples; equal members of two arms share their sampling seed."""
    run_id: RunId
    policy_id: PolicyId
    state: RunState
    passed: bool
    valid: bool = True
    """False where infrastructure failed: never a pass, never a fail."""
    reward: float | None = None
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    seconds: float = 0.0
    cost: float = 0.0


class Interval(Record):
    value: float
    low: float
    high: float
    """Ends of the interval at the stated confidence."""


class Score(Record):
    """Sampled pass@1 of one policy."""

    passed: int
    n: int
    tasks: int
    rate: float
    low: float
    high: float


class Decision(Record):
    """The gate's."""

    outcome: Outcome
    reasons: list[str]
    """Sentences for people, the deciding one first."""
    incumbent: Score
    candidate: Score
    difference: Interval | None
    """Candidate minus incumbent in pass@1, paired by task and member."""


# ---------------------------------------------------------------- adapters


class AdapterStatus(StrEnum):
    CANDIDATE = "candidate"
    SERVING = "serving"
    """Some alias resolves to it."""
    RETIRED = "retired"
    """Served once, replaced by a better one."""
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


class Lineage(Record):
    """Where an adapter comes from; everything of its manifest that its files do not say."""

    domain: str
    domain_digest: str
    stage: Literal["sft", "grpo"]
    parent: str | None = None
    """Adapter that training went on from."""
    cycle_id: CycleId | None = None
    recipe: Recipe | None = None
    tasks: list[str] = Field(default_factory=list[str])
    """Pool tasks trained on."""
    runs: list[str] = Field(default_factory=list[str])
    """Sampled runs trained on."""
    corrections: list[str] = Field(default_factory=list[str])
    """Production runs whose corrections were trained on."""
    metrics: dict[str, Json] = Field(default_factory=dict[str, Any])


class Manifest(Lineage):
    """`manifest.json` beside the weights: where an adapter comes from, and how it was found."""

    name: str
    digest: str
    """`sha256:…` over adapter_model.safetensors and adapter_config.json."""
    base: str
    """Digest of the base model."""
    base_name: str
    rank: int
    created_at: datetime


class Adapter(Record):
    tenant_id: TenantId
    name: str
    """Immutable; also the name it is served under."""
    digest: str
    base: str
    domain: str
    folder: str
    stage: Literal["sft", "grpo"]
    cycle_id: CycleId | None = None
    status: AdapterStatus
    loaded: bool
    """Desired: the reconciler keeps it resident in the engine."""
    manifest: Manifest
    decision: Decision | None = None
    created_at: datetime
