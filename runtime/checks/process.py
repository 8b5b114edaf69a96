"""Family `process`: what the agent did on the way, read from its tool calls in order.

A call that could not be parsed or validated is a call: it counts against budgets and as invalid,
never as missing. `process.order` and `process.count` look at calls that succeeded, because a failed
look-up has looked nothing up.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

from pydantic import Field, model_validator

from runtime.checks.protocol import Artefacts, CheckOutcome, CheckParameters
from runtime.run import Json

Expectation = Mapping[str, Json] | None


def _succeeded(artefacts: Artefacts) -> Iterator[str]:
    """Names of the calls that worked, in order."""
    for call, result in artefacts.calls:
        if call.error is None and result is not None and result.ok:
            yield call.name


def _outcome(passed: bool, reason: str, **evidence: Json) -> CheckOutcome:
    return CheckOutcome(passed, float(passed), reason, evidence)


class ProcessValid(CheckParameters):
    """`process.valid`: at most `at_most` calls are invalid: not readable, or never run.

    With `failures_count` so are refused ones (unknown tool, wrong arguments, a failure).
    """

    kind: ClassVar[str] = "process.valid"
    at_most: int = Field(default=0, ge=0)
    failures_count: bool = False

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        invalid = [
            call.error or (result.content if result else "never ran")
            for call, result in artefacts.calls
            if call.error is not None or result is None or (self.failures_count and not result.ok)
        ]
        passed = len(invalid) <= self.at_most
        score = 1.0 if passed else self._share(len(invalid), len(artefacts.calls))
        evidence = {"invalid": [text[:200] for text in invalid[:5]], "calls": len(artefacts.calls)}
        return CheckOutcome(passed, score, f"{len(invalid)} calls were invalid.", evidence)

    def _share(self, invalid: int, calls: int) -> float:
        return 1 - invalid / max(invalid, calls)


class ProcessAllowed(CheckParameters):
    """`process.allowed`: only these tools were called (or asked for)."""

    kind: ClassVar[str] = "process.allowed"
    tools: list[str] = Field(min_length=1)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        others = sorted({call.name for call, _ in artefacts.calls} - set(self.tools))
        reason = f"{others[0]!r} may not be called." if others else "Only allowed tools were used."
        return _outcome(not others, reason, others=cast(Json, others[:20]))


class ProcessForbidden(CheckParameters):
    """`process.forbidden`: none of these tools was called (or asked for)."""

    kind: ClassVar[str] = "process.forbidden"
    tools: list[str] = Field(min_length=1)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        used = sorted({call.name for call, _ in artefacts.calls} & set(self.tools))
        reason = f"{used[0]!r} was called." if used else "No forbidden tool was called."
        return _outcome(not used, reason, used=cast(Json, used))


class ProcessOrder(CheckParameters):
    """`process.order`: a call of each `first` succeeded before the first `then` that did.

    Where `then` was never called the check fails: the work was not done.
    """

    kind: ClassVar[str] = "process.order"
    first: list[str] = Field(min_length=1)
    then: str

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        names = list(_succeeded(artefacts))
        if self.then not in names:
            return _outcome(False, f"{self.then} was never called.", calls=cast(Json, names[:50]))
        before = names[: names.index(self.then)]
        missing = [name for name in self.first if name not in before]
        reason = (
            f"{missing[0]} was not called before {self.then}."
            if missing
            else f"{', '.join(self.first)} came before {self.then}."
        )
        return _outcome(not missing, reason, calls=cast(Json, names[:50]))


class ProcessCount(CheckParameters):
    """`process.count`: a tool succeeded between `at_least` and `at_most` times."""

    kind: ClassVar[str] = "process.count"
    tool: str
    at_least: int = Field(default=0, ge=0)
    at_most: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "ProcessCount":
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most must be at least at_least ({self.at_least})")
        return self

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        count = list(_succeeded(artefacts)).count(self.tool)
        passed = self.at_least <= count and (self.at_most is None or count <= self.at_most)
        return _outcome(passed, f"{self.tool} was called {count} times.", count=count)


class ProcessBudget(CheckParameters):
    """`process.budget`: at most `calls` calls in all, whether they worked or not."""

    kind: ClassVar[str] = "process.budget"
    calls: int = Field(ge=1)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        made = len(artefacts.calls)
        return _outcome(made <= self.calls, f"{made} calls were made.", calls=made)
