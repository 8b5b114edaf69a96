"""One document that checks address by dotted paths.

`{input, answer, state, initial_state, expectation}` is the whole vocabulary of a rule:
`answer.queue`, `state.support_desk.ticket.queue`, `expectation.total`, `answer.lines.0.amount`. A
segment in braces is itself a path: `initial_state.support_desk.customers.{input.customer_id}.plan`
reads the record of the customer named in the input. `Condition` is the `when:` of a check, so that
a business rule is a row: when this holds, then that must.

All functions here are pure and work on plain JSON values.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Protocol, cast

import re2
from pydantic import Field, model_validator

from runtime.checks.protocol import Artefacts, CheckParameters
from runtime.errors import CheckError
from runtime.run import Json

ROOTS = ("input", "answer", "state", "initial_state", "expectation")
EVIDENCE_CHARACTERS = 300
OPERATORS = ("equals", "in", "contains_any", "matches", "exists")


class ExpectationGap(CheckError):
    """The expectation lacks a value a check compares with: the task is invalid, not the run."""

    code = "expectation_gap"


class Missing(Enum):
    """The absence of a value, told apart from JSON null."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def document_of(artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> dict[str, Json]:
    return {
        "input": artefacts.input,
        "answer": artefacts.answer,
        "state": artefacts.states,
        "initial_state": artefacts.initial_states,
        "expectation": expectation,
    }


def value_at(document: Mapping[str, Json], path: str) -> Json | Missing:
    """The value at a dotted path, or MISSING. Digits index arrays; `{path}` is looked up first."""
    value: Json = document
    for segment in _segments(path):
        key = segment
        if segment.startswith("{"):
            key = value_at(document, segment[1:-1])
        value = _step(value, key)
        if value is MISSING:
            return MISSING
    return value


def _segments(path: str) -> list[str]:
    """Split at the dots that are not inside braces."""
    segments, depth, start = list[str](), 0, 0
    for index, character in enumerate(path):
        depth += (character == "{") - (character == "}")
        if character == "." and depth == 0:
            segments.append(path[start:index])
            start = index + 1
    return [*segments, path[start:]]


def _step(value: Json, key: Json) -> Json | Missing:
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Json]", value).get(key, MISSING)
    if isinstance(value, list | tuple) and str(key).isdecimal():
        items = cast("Sequence[Json]", value)
        return items[int(key)] if int(key) < len(items) else MISSING
    return MISSING


def path_problem(path: str) -> str | None:
    """What is wrong with a path as written, or None."""
    if path.count("{") != path.count("}"):
        return f"path {path!r} has unbalanced braces"
    segments = _segments(path)
    if segments[0] not in ROOTS:
        return f"path {path!r} starts with {segments[0]!r}; allowed: {', '.join(ROOTS)}"
    if not all(segments):
        return f"path {path!r} has an empty segment"
    inner = (path_problem(s[1:-1]) for s in segments if s.startswith("{"))
    return next((problem for problem in inner if problem), None)


class Addressed(CheckParameters):
    """Parameters that name the value they judge by a dotted path."""

    field: str

    @model_validator(mode="after")
    def _field_is_a_path(self) -> "Addressed":
        if problem := path_problem(self.field):
            raise ValueError(problem)
        return self

    def found(self, artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> Json | Missing:
        return value_at(document_of(artefacts, expectation), self.field)


class Expected(CheckParameters):
    """What to compare with: a literal `value`, or `value_of` another path."""

    value: Json = None
    value_of: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "Expected":
        if ("value" in self.model_fields_set) == (self.value_of is not None):
            raise ValueError("give exactly one of value, value_of")
        if self.value_of and (problem := path_problem(self.value_of)):
            raise ValueError(problem)
        return self

    def expected(self, artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> Json:
        """Raises ExpectationGap where the expectation lacks it, CheckError where a state does."""
        if self.value_of is None:
            return self.value
        value = value_at(document_of(artefacts, expectation), self.value_of)
        if value is not MISSING:
            return value
        if self.value_of.startswith("expectation"):
            raise ExpectationGap(f"the expectation has no {self.value_of!r}")
        raise CheckError(f"there is no value at {self.value_of!r} to compare with")


class Condition(CheckParameters):
    """One condition: `{field, equals | in | contains_any | matches | exists}`."""

    field: str
    equals: Json = None
    in_: list[Json] | None = Field(default=None, alias="in", min_length=1)
    contains_any: list[str] | None = Field(default=None, min_length=1)
    """Whole words or phrases, compared after normalisation."""
    matches: str | None = None
    """Searched for, as google-re2 syntax."""
    exists: bool | None = None

    @model_validator(mode="after")
    def _one_operator(self) -> "Condition":
        given = {"in" if name == "in_" else name for name in self.model_fields_set} - {"field"}
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(OPERATORS)}")
        if problem := path_problem(self.field):
            raise ValueError(problem)
        if self.matches is not None:
            compiled(self.matches)
        return self

    def holds(self, document: Mapping[str, Json]) -> bool:
        """A missing value satisfies nothing but `exists: false`."""
        value = value_at(document, self.field)
        if self.exists is not None:
            return (value is not MISSING) == self.exists
        if value is MISSING:
            return False
        if self.in_ is not None:
            return any(same_json(value, each) for each in self.in_)
        if self.contains_any is not None:
            return isinstance(value, str) and contains_any(value, self.contains_any)
        if self.matches is not None:
            return isinstance(value, str) and compiled(self.matches).search(value)
        return same_json(value, self.equals)


# ---------------------------------------------------------------- comparing


def same_json(left: Json, right: Json) -> bool:
    """Equality of JSON values: 1 equals 1.0, true does not equal 1, order of arrays matters."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return _same_objects(cast("Mapping[str, Json]", left), cast("Mapping[str, Json]", right))
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return _same_arrays(cast("Sequence[Json]", left), cast("Sequence[Json]", right))
    return type(left) is type(right) and left == right


def _same_objects(left: Mapping[str, Json], right: Mapping[str, Json]) -> bool:
    return left.keys() == right.keys() and all(same_json(left[k], right[k]) for k in left)


def _same_arrays(left: Sequence[Json], right: Sequence[Json]) -> bool:
    return len(left) == len(right) and all(map(same_json, left, right))


_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "−": "-"})


def normalised(text: str) -> str:
    """NFKC, case folded, quotes and dashes made plain, white space collapsed."""
    folded = unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def contains_any(text: str, phrases: Sequence[str]) -> bool:
    """Whether any phrase occurs as whole words, after normalisation."""
    haystack = normalised(text)
    return any(_has_words(haystack, normalised(phrase)) for phrase in phrases)


def _has_words(haystack: str, phrase: str) -> bool:
    start = haystack.find(phrase)
    while start >= 0 and phrase:
        before, after = haystack[start - 1 : start], haystack[start + len(phrase) :][:1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = haystack.find(phrase, start + 1)
    return False


class _Compiled(Protocol):
    """The part of google-re2's pattern that checks use."""

    def search(self, text: str) -> object | None: ...
    def fullmatch(self, text: str) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Pattern:
    """A linear-time pattern, over any text that JSON can spell."""

    compiled: _Compiled

    def search(self, text: str) -> bool:
        return self.compiled.search(_unicode(text)) is not None

    def fullmatch(self, text: str) -> bool:
        return self.compiled.fullmatch(_unicode(text)) is not None


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Pattern:
    """A linear-time pattern. Raises ValueError with re2's words."""
    options = re2.Options()
    options.log_errors = False
    try:
        return Pattern(cast(_Compiled, re2.compile(pattern, options)))
    except re2.error as error:
        raise ValueError(f"pattern {pattern!r} is not google-re2 syntax: {error}") from error


# ---------------------------------------------------------------- evidence


def shown(value: Json | Missing) -> Json:
    """A value as evidence: absent as null, long text and large values cut, valid Unicode."""
    if value is MISSING:
        return None
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, Mapping | list | tuple):
        written = json.dumps(value, ensure_ascii=False, default=dict)
        if len(written) > EVIDENCE_CHARACTERS:
            return _cut(written)
        return json.loads(_unicode(written))
    return value


def _cut(text: str) -> str:
    if len(text) <= EVIDENCE_CHARACTERS:
        return _unicode(text)
    return f"{_unicode(text[:EVIDENCE_CHARACTERS])}… ({len(text)} characters)"


def _unicode(text: str) -> str:
    """Lone surrogates, which no UTF-8 record can hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def quoted(value: Json | Missing) -> str:
    """A value inside a sentence."""
    if value is MISSING:
        return "nothing"
    return repr(shown(value)) if isinstance(value, str) else str(shown(value))
