"""Family `text`: words, lists and numbers at a dotted path.

Text is compared after Unicode normalisation where the rule says so; patterns run in google-re2, so
no input can make a check slow. Numbers are read with their sign, thousands separators, scale word
and unit; the tolerance belongs to the check and is hashed with it.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, cast

from pydantic import Field, model_validator

from runtime.checks.document import (
    MISSING,
    Addressed,
    Expected,
    Missing,
    compiled,
    contains_any,
    normalised,
    quoted,
    same_json,
    shown,
)
from runtime.checks.numbers import SCALES, Quantity, read_quantity
from runtime.checks.protocol import Artefacts, CheckOutcome
from runtime.run import Json

MAX_TEXT = 1 << 20
"""Characters of one text that a check reads; longer ones fail."""

Expectation = Mapping[str, Json] | None


def _outcome(passed: bool, reason: str, found: Json | Missing, wanted: Json) -> CheckOutcome:
    evidence = {"found": shown(found), "wanted": shown(wanted)}
    return CheckOutcome(passed, float(passed), reason, evidence)


def _alike(left: Json, right: Json, normalise: bool) -> bool:
    if normalise and isinstance(left, str) and isinstance(right, str):
        return normalised(left) == normalised(right)
    return same_json(left, right)


class TextEquals(Addressed, Expected):
    """`text.equals`: the value equals `value` or `value_of`; `normalise` ignores case and form."""

    kind: ClassVar[str] = "text.equals"
    normalise: bool = False

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        wanted = self.expected(artefacts, expectation)
        passed = found is not MISSING and _alike(found, wanted, self.normalise)
        verb = "is" if passed else f"should be {quoted(wanted)} but is"
        return _outcome(passed, f"{self.field} {verb} {quoted(found)}.", found, wanted)


class TextOneOf(Addressed):
    """`text.one_of`: the value is one of `values`."""

    kind: ClassVar[str] = "text.one_of"
    values: list[Json] = Field(min_length=1)
    normalise: bool = False

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        passed = found is not MISSING and self._lists(found)
        verb = "is" if passed else "must be one of the allowed values but is"
        return _outcome(passed, f"{self.field} {verb} {quoted(found)}.", found, self.values)

    def _lists(self, found: Json) -> bool:
        return any(_alike(found, each, self.normalise) for each in self.values)


class TextNoneOf(TextOneOf):
    """`text.none_of`: there is a value, and it is none of `values`."""

    kind: ClassVar[str] = "text.none_of"

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        passed = found is not MISSING and not self._lists(found)
        verb = "is" if passed else "must not be"
        return _outcome(passed, f"{self.field} {verb} {quoted(found)}.", found, self.values)


class TextContains(Addressed):
    """`text.contains`: whole words or phrases that must, may and must not occur."""

    kind: ClassVar[str] = "text.contains"
    all_of: list[str] = Field(default_factory=list)
    any_of: list[str] = Field(default_factory=list)
    none_of: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _asks_something(self) -> "TextContains":
        if not (self.all_of or self.any_of or self.none_of):
            raise ValueError("give at least one of all_of, any_of, none_of")
        return self

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        if not isinstance(found, str) or len(found) > MAX_TEXT:
            return _outcome(False, f"{self.field} holds no text that can be read.", found, None)
        problem = self._problem(found)
        reason = problem or f"{self.field} has the words it should."
        return _outcome(problem is None, reason, found, self.model_dump(exclude={"field"}))

    def _problem(self, text: str) -> str | None:
        absent = [phrase for phrase in self.all_of if not contains_any(text, [phrase])]
        present = [phrase for phrase in self.none_of if contains_any(text, [phrase])]
        if absent:
            return f"{self.field} lacks {absent[0]!r}."
        if present:
            return f"{self.field} must not say {present[0]!r}."
        if self.any_of and not contains_any(text, self.any_of):
            return f"{self.field} says none of: {', '.join(self.any_of)}."
        return None


class TextMatches(Addressed):
    """`text.matches`: the whole text matches `pattern` (google-re2)."""

    kind: ClassVar[str] = "text.matches"
    pattern: str
    anywhere: bool = False
    """Search instead of matching the whole text."""

    @model_validator(mode="after")
    def _pattern_compiles(self) -> "TextMatches":
        compiled(self.pattern)
        return self

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        passed = isinstance(found, str) and len(found) <= MAX_TEXT and self._matches(found)
        verb = "has" if passed else "does not have"
        return _outcome(passed, f"{self.field} {verb} the right form.", found, self.pattern)

    def _matches(self, text: str) -> bool:
        pattern = compiled(self.pattern)
        return pattern.search(text) if self.anywhere else pattern.fullmatch(text)


class TextLength(Addressed):
    """`text.length`: between `at_least` and `at_most` characters or words."""

    kind: ClassVar[str] = "text.length"
    unit: Literal["characters", "words"] = "characters"
    at_least: int = Field(default=0, ge=0)
    at_most: int | None = Field(default=None, ge=0)

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        wanted = {"at_least": self.at_least, "at_most": self.at_most, "unit": self.unit}
        if not isinstance(found, str):
            return _outcome(False, f"{self.field} is no text.", found, wanted)
        length = len(found.split()) if self.unit == "words" else len(found.strip())
        upper = length if self.at_most is None else self.at_most
        passed = self.at_least <= length <= upper
        return _outcome(passed, f"{self.field} has {length} {self.unit}.", found, wanted)


class TextList(Addressed, Expected):
    """`text.list`: the same items; repetitions count, order only where `ordered`.

    Partial credit is the F1 of the items.
    """

    kind: ClassVar[str] = "text.list"
    ordered: bool = False
    normalise: bool = True

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        wanted = self.expected(artefacts, expectation)
        if not isinstance(found, list) or not isinstance(wanted, list):
            return _outcome(False, f"{self.field} is no list.", found, wanted)
        items, targets = cast("list[Json]", found), cast("list[Json]", wanted)
        score = self._score(items, targets)
        reason = f"{self.field} matches {score:.0%} of the expected items."
        passed = score == 1.0
        return CheckOutcome(
            passed, score, reason, {"found": shown(items), "wanted": shown(targets)}
        )

    def _score(self, found: Sequence[Json], wanted: Sequence[Json]) -> float:
        if not found and not wanted:
            return 1.0
        if self.ordered:
            pairs = zip(found, wanted, strict=False)
            hits = sum(_alike(left, right, self.normalise) for left, right in pairs)
        else:
            hits = _overlap(found, wanted, self.normalise)
        return 2 * hits / (len(found) + len(wanted))


def _overlap(found: Sequence[Json], wanted: Sequence[Json], normalise: bool) -> int:
    left = list(wanted)
    for each in found:
        match = next((i for i, w in enumerate(left) if _alike(each, w, normalise)), None)
        if match is not None:
            del left[match]
    return len(wanted) - len(left)


class TextNumber(Addressed, Expected):
    """`text.number`: the quantity equals the expected one within a tolerance.

    `scale` is the scale of a bare number on either side (a report "in millions"); a scale word in
    the text overrides it. `unit` must not be contradicted; with `unit_required` it must be written.
    """

    kind: ClassVar[str] = "text.number"
    absolute: float = Field(default=0.0, ge=0)
    """Allowed absolute difference, in the unscaled unit."""
    relative: float = Field(default=0.0, ge=0, lt=1)
    """Allowed difference as a share of the expected value."""
    unit: str | None = None
    unit_required: bool = False
    scale: str | None = None

    @model_validator(mode="after")
    def _scale_is_known(self) -> "TextNumber":
        if self.scale is not None and self.scale not in SCALES:
            raise ValueError(f"scale {self.scale!r} is unknown; allowed: {', '.join(SCALES)}")
        return self

    def judge(self, artefacts: Artefacts, expectation: Expectation) -> CheckOutcome:
        found = self.found(artefacts, expectation)
        wanted = self.expected(artefacts, expectation)
        target = read_quantity(wanted, self.scale)
        if target is None:
            return _outcome(False, f"the expected {self.field} is no number.", found, wanted)
        given = None if found is MISSING else read_quantity(found, self.scale)
        problem = self._problem(given, target)
        reason = problem or f"{self.field} is right."
        return _outcome(problem is None, reason, found, wanted)

    def _problem(self, given: Quantity | None, target: Quantity) -> str | None:
        if given is None:
            return f"{self.field} is no number."
        unit = self.unit or target.unit
        if unit and given.unit and normalised(given.unit) != normalised(unit):
            return f"{self.field} is in {given.unit}, not in {unit}."
        if self.unit_required and not given.unit:
            return f"{self.field} does not say its unit ({unit})."
        allowed = max(self.absolute, self.relative * abs(target.value))
        if abs(given.value - target.value) > allowed:
            return f"{self.field} is {given.value:g}, not {target.value:g} within {allowed:g}."
        return None
