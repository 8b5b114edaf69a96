"""What a check sees and what it answers.

A check is a pure function of the artefacts of a run and, where it needs one, the expectation. It
answers with an outcome, or raises CheckError where it could not judge: then the verdict is
`infra_error`, never a fail. Family, name, `required`, `weight` and `public` are added by
`run_checks` from the domain's declaration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from runtime.run import Json, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class Artefacts:
    """Everything of one finished run that may be judged. Plain JSON values and bytes."""

    input: Mapping[str, Json]
    answer: Mapping[str, Json] | None
    """None where the agent never gave one."""
    calls: Sequence[tuple[ToolCall, ToolResult | None]] = ()
    """Every call the policy asked for, in order; the result is None for an unparsable one."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Regular files of the final workspace."""
    initial_files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    states: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Connector name → end state."""
    initial_states: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    passed: bool
    score: float
    """Partial credit in [0, 1]; 1 where passed."""
    reason: str
    """One sentence a business user understands."""
    evidence: Mapping[str, Json] = field(default_factory=dict[str, Json])


class CheckParameters(BaseModel):
    """Base of every family's parameters: validated when the domain loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckDeclaration(BaseModel):
    """One entry of `checks:` in domain.yaml; `parameters` are the family's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    kind: str
    required: bool = True
    weight: float = Field(default=1.0, ge=0, le=100)
    public: bool = False
    needs: Literal["none", "expectation"] = "none"
    when: dict[str, Any] | None = None
    """Condition under which the check applies; otherwise it is `not_applicable`."""
    parameters: dict[str, Any] = Field(default_factory=dict)


class Check(Protocol):
    """One family member, bound to its parameters."""

    kind: ClassVar[str]

    def judge(
        self, artefacts: Artefacts, expectation: Mapping[str, Json] | None
    ) -> CheckOutcome: ...
