"""What goes over the wire about the wheel: shared by the routes and the client.

Views are the records as the ML team may see them: lists are short, expectations stay behind. Pure
pydantic; importing it loads no server.
"""

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from flywheel.records import (
    AdapterStatus,
    CycleState,
    Decision,
    Manifest,
    PoolStatus,
    StageName,
    StageState,
)
from runtime.api.schemas import Name, Request, Seed, View
from runtime.api.uploads import Files
from runtime.run import Json

Reason = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class CreateCycle(Request):
    """Turn the wheel of one domain now."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"domain": "support_triage", "profile": "fast", "seed": 1}]}
    )
    domain: Name
    profile: Name | None = None
    """A profile of the domain's recipe (`fast`)."""
    level: Name | None = None
    """Level of the gate's generated tasks; None means the recipe's."""
    seed: Seed = 0


class StageView(View):
    seq: int
    name: StageName
    round: int = 0
    state: StageState
    attempts: int = 0
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    progress: dict[str, Any] = Field(default_factory=dict[str, Any])
    reason: str | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None


class CycleView(View):
    id: str
    domain: str
    date: dt.date
    turn: int
    trigger: str
    state: CycleState
    outcome: str | None = None
    reason: str | None = None
    created_at: dt.datetime
    finished_at: dt.datetime | None = None
    adapters: dict[str, str] = Field(default_factory=dict[str, str])
    """Stage → name of the adapter it made: `sft`, `grpo` (the last round's)."""
    decision: Decision | None = None
    stages: list[StageView] = Field(default_factory=list[StageView])
    """Empty in lists of cycles."""


class CycleList(View):
    cycles: list[CycleView]
    """Newest first."""


class ImportedTask(Request):
    input: dict[str, Json]
    expectation: dict[str, Json]
    files: Files = Field(default_factory=dict[str, bytes])
    connectors: dict[str, dict[str, Json]] = Field(default_factory=dict[str, dict[str, Json]])
    seed: Seed = 0
    row: int | None = None
    """Where it stood in the file, for errors."""


class ImportTasks(Request):
    """Tasks with known answers, for the pool."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "domain": "support_triage",
                    "tasks": [
                        {
                            "input": {"message": "my card was stolen", "customer_id": "C100"},
                            "expectation": {
                                "queue": "fraud",
                                "priority": "high",
                                "reason": "stolen card",
                            },
                            "row": 2,
                        }
                    ],
                }
            ]
        }
    )
    domain: Name
    split: Literal["practice", "gate", "report"] = "practice"
    tasks: list[ImportedTask] = Field(min_length=1, max_length=5_000)


class Imported(View):
    stored: int
    """New in the pool; the next cycle validates them."""
    known: int
    """The pool had them already."""


class PoolTaskView(View):
    id: str
    domain: str
    origin: str
    source_run: str | None = None
    split: str
    level: str
    input: dict[str, Json]
    status: PoolStatus
    reason: str | None = None
    cycle_id: str | None = None
    fixed_by: str | None = None
    created_at: dt.datetime


class PoolPage(View):
    tasks: list[PoolTaskView]
    counts: dict[str, int]
    """Status → tasks, of the domain asked for or of all."""
    next_cursor: str | None = None


class AdapterView(View):
    name: str
    digest: str
    domain: str
    stage: str
    status: AdapterStatus
    loaded: bool
    cycle_id: str | None = None
    created_at: dt.datetime
    manifest: Manifest | None = None
    """Absent in lists."""
    decision: Decision | None = None


class AdapterList(View):
    adapters: list[AdapterView]
    """Newest first."""


class Promote(Request):
    """Let an adapter serve an alias of its domain."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "adapter": "support_triage-20261130-0c1d2e3f4a5b",
                    "reason": "passed review",
                }
            ]
        }
    )
    adapter: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Its name."""
    alias: Name = "production"
    reason: Reason


class RollBack(Request):
    """Let the alias resolve to what it resolved to before its last change."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"domain": "support_triage", "reason": "wrong queue for card loss"}]
        }
    )
    domain: Name
    alias: Name = "production"
    reason: Reason


class ReleaseView(View):
    id: int
    domain: str
    alias: str
    before: str | None = None
    """Policy id; None means the base model."""
    after: str | None = None
    changed_by: str
    reason: str
    repinned: int = 0
    """Queued runs that were pinned anew."""
    at: dt.datetime


class ReleaseList(View):
    releases: list[ReleaseView]
    """Newest first."""
