"""Family `state`: how a connector's system ended, and that nothing else in it changed.

`state.equals` compares the end state with the initial state plus the declared changes: what was to
change must have changed to the right value, whatever else differs is collateral damage and fails.
An agent that does nothing does not pass, unless the check says that nothing may be the right thing
to do.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

from pydantic import Field

from runtime.checks.document import MISSING, Expected, Missing, quoted, same_json, shown, value_at
from runtime.checks.protocol import Artefacts, CheckOutcome, CheckParameters
from runtime.errors import CheckError
from runtime.run import Json

Expectation = Mapping[str, Json] | None
MAX_LISTED = 20


def differences(before: Json, after: Json, path: str = "") -> Iterator[str]:
    """Dotted paths of the smallest values that differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        left, right = cast("Mapping[str, Json]", before), cast("Mapping[str, Json]", after)
        for key in sorted(left.keys() | right.keys()):
            where = f"{path}.{key}" if path else key
            yield from differences(left.get(key, MISSING), right.get(key, MISSING), where)
    elif not same_json(before, after):
        yield path


def _covered(path: str, declared: Mapping[str, object] | list[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in declared)


def _states(artefacts: Artefacts, connector: str) -> tuple[Json, Json]:
    if connector not in artefacts.states or connector not in artefacts.initial_states:
        raise CheckError(f"no state of connector {connector!r} was recorded")
    return artefacts.initial_states[connector], artefacts.states[connector]


class StateEquals(CheckParameters):
    """`state.equals`: each of `changes` has its expected value, and nothing else changed.

    `may_change` lists paths that are not judged (free text, timestamps).
    """

    kind: ClassVar[str] = "state.equals"
    connector: str
    changes: dict[str, Expected] = Field(min_length=1)
    may_change: list[str] = Field(default_factory=list)
    may_do_nothing: bool = False
    """Set where leaving everything as it was can be the right thing to do."""

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        before, after = _states(artefacts, self.connector)
        wanted = {
            path: each.expected(artefacts, expectation) for path, each in self.changes.items()
        }
        touched = list(differences(before, after))
        wrong = {
            path: found
            for path, value in wanted.items()
            if not _equal(found := value_at({"state": after}, f"state.{path}"), value)
        }
        collateral = [p for p in touched if not _covered(p, [*self.changes, *self.may_change])]
        reason = self._problem(touched, wrong, wanted, collateral)
        score = 0.0 if collateral or not touched else 1 - len(wrong) / len(wanted)
        evidence: dict[str, Json] = {
            "wanted": {path: shown(value) for path, value in wanted.items()},
            "wrong": {path: shown(value) for path, value in wrong.items()},
            "collateral": collateral[:MAX_LISTED],
        }
        if reason is None:
            return CheckOutcome(True, 1.0, f"{self.connector} ended as expected.", evidence)
        return CheckOutcome(False, score, reason, evidence)

    def _problem(
        self,
        touched: list[str],
        wrong: Mapping[str, Json | Missing],
        wanted: Mapping[str, Json],
        collateral: list[str],
    ) -> str | None:
        if not touched and not self.may_do_nothing:
            return f"Nothing was done in {self.connector}."
        if wrong:
            path, found = next(iter(wrong.items()))
            return f"{path} should be {quoted(wanted[path])} but is {quoted(found)}."
        if collateral:
            return f"{collateral[0]} was changed but should not have been."
        return None


def _equal(found: Json | Missing, wanted: Json) -> bool:
    return found is not MISSING and same_json(found, wanted)


class StateUnchanged(CheckParameters):
    """`state.unchanged`: nothing outside the paths of `outside_of` changed."""

    kind: ClassVar[str] = "state.unchanged"
    connector: str
    outside_of: list[str] = Field(default_factory=list)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        before, after = _states(artefacts, self.connector)
        touched = [p for p in differences(before, after) if not _covered(p, self.outside_of)]
        reason = f"{touched[0]} was changed." if touched else "Nothing else was changed."
        return CheckOutcome(
            not touched, float(not touched), reason, {"changed": cast(Json, touched[:MAX_LISTED])}
        )
