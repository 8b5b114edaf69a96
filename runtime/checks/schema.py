"""Family `schema`: a value against a JSON Schema, draft 2020-12, with formats checked.

`violations` is also how inputs and corrections are validated, so that a field is wrong in the same
words everywhere. Size, depth and non-finite numbers are judged first: a hostile value never reaches
the validator. Only references within the schema itself are followed; nothing is fetched.

Patterns are google-re2, as in all checks: linear in the length of a hostile text, and `$` is the
end and not the line before it, as ECMA-262 and therefore JSON Schema has it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError
from jsonschema.validators import extend
from pydantic import ConfigDict, Field, model_validator
from referencing import Registry

from runtime.checks.document import MISSING, Addressed, compiled, shown
from runtime.checks.protocol import Artefacts, CheckOutcome
from runtime.run import Json

MAX_DEPTH = 32
MAX_BYTES = 256 << 10
MAX_MESSAGE = 240


@dataclass(frozen=True, slots=True)
class Violation:
    field: str
    """Dotted path within the value; empty for the value as a whole."""
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a schema, or None."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        return f"not a JSON Schema (draft 2020-12) at {where or 'its root'}: {error.message}"
    return next(_unusable(schema), None)


def _unusable(schema: Json) -> Iterator[str]:
    """What a JSON Schema may hold and this family cannot judge."""
    nodes = list(_objects(schema))
    keywords = {keyword for node in nodes for keyword in node}
    if {"patternProperties", "unevaluatedProperties"} <= keywords:
        yield "unevaluatedProperties with patternProperties; allowed: additionalProperties"
    if any(isinstance(node.get("$schema"), str) for node in nodes[1:]):
        yield "$schema inside the schema; allowed: one dialect, draft 2020-12"
    for node in nodes:
        for key in ("$ref", "$dynamicRef"):
            if isinstance(name := node.get(key), str) and not name.startswith("#"):
                yield f"{key} {name!r} leaves the schema; allowed: references that start with #"
        for pattern in _patterns(node):
            try:
                compiled(pattern)
            except ValueError as error:
                yield str(error)


def _objects(node: Json) -> Iterator[Mapping[str, Json]]:
    if isinstance(node, Mapping):
        node = cast("Mapping[str, Json]", node)
        yield node
    for child in _children(node):
        yield from _objects(child)


def _patterns(node: Mapping[str, Json]) -> list[str]:
    own, of_names = node.get("pattern"), node.get("patternProperties")
    found = [own] if isinstance(own, str) else []
    return (
        [*found, *cast("Mapping[str, Json]", of_names)] if isinstance(of_names, Mapping) else found
    )


# ---------------------------------------------------------------- keywords with patterns


class _Validator(Protocol):
    """What keywords use of the library's validator."""

    def descend(
        self, instance: Json, schema: Json, path: str | None = None, schema_path: str | None = None
    ) -> Iterator[ValidationError]: ...


def _pattern(_: _Validator, pattern: str, text: Json, __: Json) -> Iterator[ValidationError]:
    if isinstance(text, str) and not _matches(pattern, text):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _pattern_properties(
    validator: _Validator, patterns: Mapping[str, Json], value: Json, _: Json
) -> Iterator[ValidationError]:
    for name, each in _members(value):
        for pattern, schema in patterns.items():
            if _matches(pattern, name):
                yield from validator.descend(each, schema, path=name, schema_path=pattern)


def _additional_properties(
    validator: _Validator, allowed: Json, value: Json, schema: Mapping[str, Json]
) -> Iterator[ValidationError]:
    """Of every property that neither `properties` nor `patternProperties` knows."""
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        (name, each)
        for name, each in _members(value)
        if name not in known and not any(_matches(pattern, name) for pattern in patterns)
    ]
    if allowed is False and extras:
        names = ", ".join(sorted(repr(name) for name, _ in extras))
        were = "was" if len(extras) == 1 else "were"
        said = f"Additional properties are not allowed ({names} {were} unexpected)"
        yield ValidationError(said)
        return
    for name, each in extras:
        yield from validator.descend(each, allowed, path=name)


def _members(value: Json) -> list[tuple[str, Json]]:
    return list(cast("dict[str, Json]", value).items()) if isinstance(value, dict) else []


def _matches(pattern: str, text: str) -> bool:
    return compiled(pattern).search(text)


_Draft = extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
)


# ---------------------------------------------------------------- judging


def violations(schema: Mapping[str, Any], value: Json) -> list[Violation]:
    """Every way in which the value breaks the schema, in a stable order; empty where it fits."""
    if problem := _unfit(value):
        return [Violation("", problem)]
    # The library would go back to its own keywords wherever it meets a name of their dialect.
    own = {keyword: each for keyword, each in schema.items() if keyword != "$schema"}
    validator = _Draft(own, format_checker=Draft202012Validator.FORMAT_CHECKER, registry=Registry())
    errors = cast("Iterator[ValidationError]", validator.iter_errors(value))  # pyright: ignore[reportUnknownMemberType]
    return sorted((_violation(e) for e in errors), key=lambda v: (v.field, v.message))


def _violation(error: ValidationError) -> Violation:
    where = [*error.absolute_path, *_missing_property(error)]
    field = ".".join(map(str, where))
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    return Violation(field, message)


def _missing_property(error: ValidationError) -> list[str]:
    """The name of an absent property: the field a person has to fill in."""
    if error.validator != "required":  # pyright: ignore[reportUnknownMemberType]
        return []
    names = cast("list[str]", error.validator_value)
    return [name for name in names if error.message.startswith(f"{name!r} is")]


def _unfit(value: Json) -> str | None:
    """Why a value is not even looked at: too deep, too large, or not JSON."""
    if _depth_exceeds(value, MAX_DEPTH):
        return f"nested deeper than {MAX_DEPTH} levels"
    if not _finite(value):
        return "holds a number that is not finite"
    try:
        size = len(json.dumps(value, default=_plain).encode("utf-8", "surrogatepass"))
    except (TypeError, ValueError) as error:
        return f"not a JSON value: {error}"
    return f"{size} bytes; at most {MAX_BYTES}" if size > MAX_BYTES else None


def _plain(value: object) -> Json:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Json]", value))
    raise TypeError(f"{type(value).__name__} is not JSON")


def _children(value: Json) -> list[Json]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Json]", value).values())
    return list(cast("list[Json]", value)) if isinstance(value, list | tuple) else []


def _depth_exceeds(value: Json, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _finite(value: Json) -> bool:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, float) and not math.isfinite(each):
            return False
        pending.extend(_children(each))
    return True


class SchemaCheck(Addressed):
    """`schema`: the value at `field` conforms to `schema`.

    Without `schema:` the domain's output schema is meant; the loader fills it in.
    """

    kind: ClassVar[str] = "schema"
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    field: str = "answer"
    json_schema: dict[str, Any] = Field(alias="schema")

    @model_validator(mode="after")
    def _schema_is_valid(self) -> "SchemaCheck":
        if problem := schema_problem(self.json_schema):
            raise ValueError(problem)
        return self

    def judge(self, artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> CheckOutcome:
        value = self.found(artefacts, expectation)
        if value is MISSING or (value is None and self.field == "answer"):
            return CheckOutcome(False, 0.0, f"There is no {self.field}.")
        wrong = violations(self.json_schema, value)
        if not wrong:
            return CheckOutcome(True, 1.0, f"The {self.field} is well formed.")
        evidence = {"violations": [str(v) for v in wrong[:10]], "value": shown(value)}
        return CheckOutcome(False, 0.0, f"The {self.field} is malformed: {wrong[0]}.", evidence)
