"""The failure vocabulary, one class per boundary.

Every failure belongs to the boundary where it was first seen, is captured once, and is kept as data
(`Failure`) in the run record. An infrastructure failure is never a zero reward and never a pass; a
tool's failure is an observation the agent may react to; bad input is the caller's to mend, so its
message says what was wrong, where, and what would be right.
"""

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Boundary(StrEnum):
    ENGINE = "engine"
    SANDBOX = "sandbox"
    TOOL = "tool"
    CHECK = "check"
    DOMAIN = "domain"
    STORE = "store"
    INPUT = "input"
    TRAINING = "training"


class Failure(BaseModel):
    """A captured failure, as stored in the record and shown to people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boundary: Boundary
    code: str
    message: str
    retriable: bool = False
    detail: dict[str, Any] = Field(default_factory=dict)


class NoriaError(Exception):
    """Base of every failure Noria raises on purpose.

    `code` is a stable snake_case name, `retriable` says whether the same call may succeed later,
    `detail` holds JSON values for machines; the message is for people.
    """

    boundary: ClassVar[Boundary]
    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.detail = detail

    def failure(self) -> Failure:
        return Failure(
            boundary=self.boundary,
            code=self.code,
            message=str(self),
            retriable=self.retriable,
            detail=self.detail,
        )


class EngineError(NoriaError):
    boundary = Boundary.ENGINE
    code = "engine_error"


class EngineUnavailable(EngineError):
    """Unreachable, silent, overloaded or cut off: the same request may succeed later."""

    code = "engine_unavailable"
    retriable = True


class PolicyNotLoaded(EngineUnavailable):
    """The engine does not serve this policy now: it may be loading it again after a restart."""

    code = "policy_not_loaded"


class EngineRefused(EngineError):
    """The engine understood the request and refuses it (4xx): retrying is pointless."""

    code = "engine_refused"


class EngineGarbage(EngineError):
    """The engine answered with something that is not a completion."""

    code = "engine_garbage"


class ContextOverflow(EngineError):
    """Prompt plus the tokens asked for exceed the model's window."""

    code = "context_overflow"


class ProbeFailed(EngineError):
    """What the engine serves under an adapter's name is not what was trained."""

    code = "probe_failed"


class SandboxError(NoriaError):
    """The sandbox itself failed (not the command run in it)."""

    boundary = Boundary.SANDBOX
    code = "sandbox_error"
    retriable = True


class SandboxUnavailable(SandboxError):
    """This host cannot run the asked-for back end; the message says what is missing."""

    code = "sandbox_unavailable"
    retriable = False


class ToolError(NoriaError):
    """A tool's failure: becomes an observation for the agent, never ends the run."""

    boundary = Boundary.TOOL
    code = "tool_error"


class CheckError(NoriaError):
    """A check could not run: the verdict is `infra_error`."""

    boundary = Boundary.CHECK
    code = "check_error"


class DomainError(NoriaError):
    """A domain folder that cannot be used.

    The message reads `file:line: what is wrong; what is allowed`.
    """

    boundary = Boundary.DOMAIN
    code = "domain_invalid"


class StoreError(NoriaError):
    boundary = Boundary.STORE
    code = "store_error"
    retriable = True


class LeaseLost(StoreError):
    """Another runner holds this run now: stop writing, at once."""

    code = "lease_lost"
    retriable = False


class InputError(NoriaError):
    """The caller sent something unusable. Maps to HTTP 422 unless a subclass says otherwise."""

    boundary = Boundary.INPUT
    code = "invalid_input"
    http_status: ClassVar[int] = 422


class NotFound(InputError):
    code = "not_found"
    http_status = 404


class Conflict(InputError):
    """The state does not allow this (for example: cancelling a finished run)."""

    code = "conflict"
    http_status = 409


class AdapterRefused(Conflict):
    """Files that are no adapter of this base, or no longer the one registered.

    `detail["reason"]` is a stable snake_case name of what is wrong.
    """

    code = "adapter_refused"


class IdempotencyMismatch(InputError):
    """The idempotency key was used before with another body."""

    code = "idempotency_mismatch"
    http_status = 422
