"""Family `schema`: a value against a JSON Schema, draft 2020-12, with formats checked.

`violations` is also how inputs and corrections are validated, so that a field is wrong in the same
words everywhere. Size, depth and non-finite numbers are judged first: a hostile value never reaches
the validator. Only references within the schema itself are followed; nothing is fetched.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError
from pydantic import ConfigDict, Field, model_validator
from referencing import Registry

from runtime.checks.document import MISSING, Addressed, shown
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
    for reference in _references(schema):
        if not reference.startswith("#"):
            return f"$ref {reference!r} leaves the schema; allowed: references that start with #"
    return None


def _references(node: Json) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in cast("Mapping[str, Json]", node).items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(node, list):
        for each in cast("list[Json]", node):
            yield from _references(each)


def violations(schema: Mapping[str, Any], value: Json) -> list[Violation]:
    """Every way in which the value breaks the schema, in a stable order; empty where it fits."""
    if problem := _unfit(value):
        return [Violation("", problem)]
    validator = Draft202012Validator(
        schema,
        format_checker=Draft202012Validator.FORMAT_CHECKER,
        registry=Registry(),
    )
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
