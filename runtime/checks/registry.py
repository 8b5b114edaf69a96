"""Every kind of check, by the name a domain writes under `kind:`.

`bind` turns a declaration into a check bound to validated parameters; `problems` is the same at
load time, in words that say what is allowed. A new kind is a class in its family's file and a line
here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from runtime.checks import files, process, schema, state, text
from runtime.checks.document import Condition
from runtime.checks.protocol import Check, CheckDeclaration, CheckParameters
from runtime.errors import CheckError
from runtime.run import Json

_CHECKS: tuple[type[Check], ...] = (
    schema.SchemaCheck,
    text.TextEquals,
    text.TextOneOf,
    text.TextNoneOf,
    text.TextContains,
    text.TextMatches,
    text.TextLength,
    text.TextList,
    text.TextNumber,
    files.FileExists,
    files.FileAbsent,
    files.FileEquals,
    files.FileGlob,
    files.FileHash,
    files.FileJson,
    files.FileCsv,
    files.FilesUnchanged,
    state.StateEquals,
    state.StateUnchanged,
    process.ProcessValid,
    process.ProcessAllowed,
    process.ProcessForbidden,
    process.ProcessOrder,
    process.ProcessCount,
    process.ProcessBudget,
)
CHECK_KINDS: dict[str, type[Check]] = {check.kind: check for check in _CHECKS}


def bind(declaration: CheckDeclaration) -> Check:
    """The declared check, ready to judge. Raises CheckError for an unknown kind or parameters."""
    kind = CHECK_KINDS.get(declaration.kind)
    if kind is None:
        raise CheckError(
            f"unknown check kind {declaration.kind!r}; allowed: {', '.join(CHECK_KINDS)}"
        )
    try:
        return _build(kind, declaration.parameters)
    except ValidationError as error:
        raise CheckError(f"check {declaration.name!r}: {error}") from error


def condition_of(declaration: CheckDeclaration) -> Condition | None:
    if declaration.when is None:
        return None
    try:
        return Condition.model_validate(declaration.when)
    except ValidationError as error:
        raise CheckError(f"check {declaration.name!r}, when: {error}") from error


def _build(kind: type[Check], parameters: Mapping[str, Any]) -> Check:
    model = cast("type[CheckParameters]", kind)
    return cast(Check, model.model_validate(dict(parameters)))


def problems(declaration: CheckDeclaration) -> list[tuple[tuple[str | int, ...], str]]:
    """Everything wrong with a declaration: where within it, and what would be right."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    kind = CHECK_KINDS.get(declaration.kind)
    if kind is None:
        allowed = ", ".join(CHECK_KINDS)
        found.append((("kind",), f"unknown check kind {declaration.kind!r}; allowed: {allowed}"))
    else:
        found += _invalid(cast("type[CheckParameters]", kind), declaration.parameters, "parameters")
    if declaration.when is not None:
        found += _invalid(Condition, declaration.when, "when")
    if declaration.needs == "none" and any(_reads_expectation(declaration)):
        hint = "reads the expectation but needs: none; allowed: needs: expectation"
        found.append((("parameters",), hint))
    return found


def _invalid(
    model: type[CheckParameters], values: Mapping[str, Any], where: str
) -> list[tuple[tuple[str | int, ...], str]]:
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        names = [field.alias or name for name, field in model.model_fields.items()]
        allowed = f"allowed: {', '.join(names)}"
        return [((where, *e["loc"]), f"{_said(e['msg'])}; {allowed}") for e in error.errors()]
    return []


def _said(message: str) -> str:
    return message.removeprefix("Value error, ").replace(
        "Extra inputs are not permitted", "unknown"
    )


def _reads_expectation(declaration: CheckDeclaration) -> Iterator[bool]:
    pending: list[Json] = [declaration.parameters, declaration.when]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            pending.extend(cast("dict[str, Json]", node).values())
        elif isinstance(node, list):
            pending.extend(cast("list[Json]", node))
        else:
            yield isinstance(node, str) and node.split(".")[0] == "expectation"
