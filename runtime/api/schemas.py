"""What goes over the wire: request and response bodies, shared by the server and the client.

Pure pydantic: importing this file loads neither FastAPI nor the server. Requests refuse what they
do not know, so that a misspelt option is an error and never silently ignored; views ignore it, so
that an older client reads a newer server. Nothing here can carry an expectation outwards.
"""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from runtime.api.uploads import Files
from runtime.errors import Failure
from runtime.run import (
    Event,
    Json,
    ModelCall,
    Policy,
    RunId,
    RunKind,
    RunState,
    Sampling,
    Usage,
    Verdict,
)

MAX_SEED = 2**63 - 1
LONGEST_KEY = timedelta(days=3_652)
"""How far ahead a key's expiry may lie: ten years."""


class Request(BaseModel):
    """Base of everything a caller sends."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class View(BaseModel):
    """Base of everything the API answers."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64"
    )


class Scope(StrEnum):
    """What a key may do."""

    RUNS_WRITE = "runs:write"
    RUNS_READ = "runs:read"
    FLYWHEEL = "flywheel"
    RELEASE = "release"
    ADMIN = "admin"


# ---------------------------------------------------------------- problems


class FieldProblem(View):
    field: str
    """Dotted path within the request."""
    message: str


class Problem(View):
    """An error, as RFC 9457 has it (`application/problem+json`)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:noria:problem:invalid_input",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "input.message: Input should be a valid string",
                    "errors": [
                        {"field": "input.message", "message": "Input should be a valid string"}
                    ],
                }
            ]
        }
    )
    type: str
    """`urn:noria:problem:<code>`; the code is stable, for machines."""
    title: str
    status: int
    detail: str
    """What was wrong, where, and what would be right; for people."""
    errors: list[FieldProblem] = Field(default_factory=list[FieldProblem])
    """Each wrong field, where fields were wrong."""


# ---------------------------------------------------------------- runs

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""Of a domain, a level, a split, an alias."""
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class SamplingOptions(Request):
    """What differs from the domain's own sampling."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: Seed | None = None
    """A random one unless given."""


class CreateRun(Request):
    """One task for the agent. Fields from `policy` on need a key with the scope `flywheel`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"domain": "support_triage", "input": {"message": "my card was stolen, help"}},
                {
                    "domain": "support_triage",
                    "input": {"message": "see the letter", "attachment": "letter.txt"},
                    "files": {"letter.txt": "RGVhciBiYW5rLA=="},
                    "mode": "wait",
                    "wait_seconds": 60,
                },
            ]
        }
    )
    PRACTICE: ClassVar[frozenset[str]] = frozenset(
        {"policy", "expectation", "task_id", "level", "split", "family", "seed", "connectors"}
    )
    HOW_TO_ANSWER: ClassVar[frozenset[str]] = frozenset({"mode", "wait_seconds"})
    """Fields that say how to answer, not what to run: no part of an idempotent request."""

    domain: Name
    input: dict[str, Json]
    """As the domain's input schema has it."""
    files: Files = Field(default_factory=dict[str, bytes])
    """Workspace path → content in base64; at most as much as the domain's workspace holds."""
    kind: RunKind = RunKind.PRODUCTION
    """Other kinds than production need a key with the scope `flywheel`."""
    alias: Name = "production"
    """Whose policy the run is pinned to; `production` means the base model until a release."""
    sampling: SamplingOptions = SamplingOptions()
    mode: Literal["wait", "background", "stream"] = "background"
    """`background` answers at once, `wait` once the run is over, `stream` with its events."""
    wait_seconds: float = Field(default=30.0, ge=0, le=600)
    """How long `wait` waits for the end before it answers as `background` does."""
    policy: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Id of the policy, instead of an alias."""
    expectation: dict[str, Json] | None = None
    """Private gold: checks may use it, the agent and every reader of this API never see it."""
    task_id: Annotated[str, StringConstraints(pattern=r"^[\w.:/-]{1,200}$")] | None = None
    level: Name = "full"
    split: Name = "production"
    family: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    seed: Seed = 0
    """Seeds the simulated systems."""
    connectors: dict[str, dict[str, Json]] = Field(default_factory=dict[str, dict[str, Json]])
    """Connector → its initial state, where the task fixes it."""


class TaskView(View):
    id: str
    input: dict[str, Json]
    level: str
    split: str
    family: str | None = None
    seed: int = 0


_RUN_EXAMPLE: dict[str, Any] = {
    "id": "run_0199c0ffee00b1a2c3d4e5f60718",
    "kind": "production",
    "state": "queued",
    "domain": "support_triage",
    "domain_digest": "sha256:5d41…",
    "task": {
        "id": "task_9f8e7d6c5b4a39281706f5e4",
        "input": {"message": "my card was stolen, help", "customer_id": "C100"},
        "level": "full",
        "split": "production",
        "family": None,
        "seed": 0,
    },
    "policy": {"id": "SmolLM2-135M-Instruct", "base": "sha256:77aa…", "adapter": None},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "seed": 1804289383},
    "usage": {"steps": 0, "tool_calls": 0, "prompt_tokens": 0, "sampled_tokens": 0},
    "attempts": 0,
    "cancel_requested": False,
    "created_at": "2026-11-30T07:00:00Z",
}


class RunView(View):
    """A run as its tenant may see it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_RUN_EXAMPLE]})

    id: RunId
    kind: RunKind
    state: RunState
    reason: str | None = None
    """Why the state is what it is, where that is not obvious; one sentence."""
    domain: str
    domain_digest: str
    task: TaskView
    policy: Policy
    sampling: Sampling
    answer: dict[str, Json] | None = None
    verdict: Verdict | None = None
    failure: Failure | None = None
    usage: Usage
    attempts: int
    """How many runners have claimed it."""
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class RunPage(View):
    runs: list[RunView]
    """Newest first."""
    next_cursor: str | None = None
    """Pass as `cursor` for the next page; absent on the last one."""


class EventView(Event):
    """One entry of the run record."""

    @property
    def type(self) -> str:
        return self.body.type


class Trajectory(View):
    """Everything recorded about a run: what happened, and in which tokens."""

    run: RunView
    events: list[EventView]
    model_calls: list[ModelCall]


class GiveFeedback(Request):
    """What a person says about a finished run; at least one field."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "rating": "down",
                    "correction": {"queue": "fraud", "priority": "high", "reason": "stolen card"},
                    "comment": "a stolen card is fraud",
                }
            ]
        }
    )
    rating: Literal["up", "down"] | None = None
    outcome: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """What came of it later, in the words of the application (`reopened`, `refunded`)."""
    correction: dict[str, Json] | None = None
    """The right answer, as the domain's output schema has it."""
    comment: Annotated[str, StringConstraints(min_length=1, max_length=4000)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "GiveFeedback":
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("say at least one of rating, outcome, correction, comment")
        return self


class FeedbackTaken(View):
    run_id: RunId
    seq: int
    """The feedback's number in the run record."""


# ---------------------------------------------------------------- domains


class DomainSummary(View):
    name: str
    title: str
    description: str
    digest: str
    levels: list[str]


class DomainView(DomainSummary):
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]


class DomainList(View):
    domains: list[DomainSummary]


# ---------------------------------------------------------------- keys


def _expiry(at: datetime) -> datetime:
    """In UTC, and in a year that every system on the way can write."""
    now = datetime.now(UTC)
    if not now < at <= now + LONGEST_KEY:
        raise ValueError("must lie in the future, at most 10 years ahead")
    return at.astimezone(UTC)


class CreateKey(Request):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "crm", "scopes": ["runs:write", "runs:read"]}],
        }
    )
    name: Annotated[str, StringConstraints(pattern=r"^[\w .:@/-]{1,80}$")]
    """Whom or what the key is for."""
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope))
    expires_at: Annotated[AwareDatetime, AfterValidator(_expiry)] | None = None
    """At most ten years ahead; without one the key lives until it is revoked."""


class KeyView(View):
    id: str
    name: str
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class KeyCreated(KeyView):
    key: str
    """The whole key, shown this once: send it as `Authorization: Bearer <key>`."""


class KeyList(View):
    keys: list[KeyView]


# ---------------------------------------------------------------- operations


class Alive(View):
    status: Literal["alive"] = "alive"


class Ready(View):
    status: Literal["ready"] = "ready"
    parts: dict[str, bool]
    """Part → whether it answers."""
