"""What can be wrong with a domain folder beyond its shape, each with what would be right.

Every function reads the raw values, so that one broken key does not hide the others, and yields
`Problem`s with the line they stand on.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from runtime.checks import registry
from runtime.checks.protocol import CheckDeclaration
from runtime.checks.schema import schema_problem
from runtime.domain_file import Problem, Source
from runtime.tools import ConnectorFactory, FinishTool


def source_problems(
    source: Source,
    folder: Path,
    tools: Collection[str],
    connectors: Mapping[str, ConnectorFactory],
) -> Iterator[Problem]:
    """Everything wrong in domain.yaml that its shape allows."""
    yield from name_problems(source, folder)
    yield from tool_problems(source, tools, connectors)
    yield from schema_problems(source)
    yield from check_problems(source)


def link_problems(folder: Path) -> Iterator[Problem]:
    for path in folder.rglob("*"):
        if path.is_symlink():
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            yield Problem(name, 1, "a link, which a digest cannot cover; allowed: regular files")


def name_problems(source: Source, folder: Path) -> Iterator[Problem]:
    name = source.values.get("name")
    if name is not None and name != folder.name:
        what = f"name {name!r} differs from its folder; allowed: {folder.name}"
        yield source.problem(("name",), what)


def _strings(value: object) -> list[str]:
    return (
        [v for v in cast("list[object]", value) if isinstance(v, str)]
        if isinstance(value, list)
        else []
    )


def tool_problems(
    source: Source, tools: Collection[str], connectors: Mapping[str, ConnectorFactory]
) -> Iterator[Problem]:
    values = source.values
    declared = cast("dict[Any, Any]", c) if isinstance(c := values.get("connectors"), dict) else {}
    allowed = {*tools, FinishTool.name}
    for name, mode in declared.items():
        if name not in connectors:
            what = f"unknown connector {name!r}; allowed: {_listed(connectors)}"
            yield source.problem(("connectors", str(name)), what)
            continue
        allowed |= set(connectors[name].tool_names)
        if mode not in connectors[name].modes:
            what = f"connector {name!r} has no mode {mode!r}; allowed: "
            yield source.problem(("connectors", name), what + _listed(connectors[name].modes))
    for index, name in enumerate(names := _strings(values.get("tools"))):
        if name not in allowed:
            what = f"unknown tool {name!r}; allowed: {_listed(allowed)}"
            yield source.problem(("tools", index), what)
        if name in names[:index]:
            yield source.problem(("tools", index), f"tool {name!r} is listed twice")
    finish = values.get("finish")
    if isinstance(finish, str) and finish not in names:
        what = f"finish {finish!r} is not among the tools; allowed: {_listed(names)}"
        yield source.problem(("finish",), what)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def schema_problems(source: Source) -> Iterator[Problem]:
    for key in ("input", "output"):
        schema = source.values.get(key)
        if not isinstance(schema, dict):
            continue
        schema = cast("dict[str, Any]", schema)
        if problem := schema_problem(schema):
            yield source.problem((key,), f"{key}: {problem}")
        elif schema.get("type") != "object":
            yield source.problem((key,), f"{key}: type must be object; allowed: type: object")


def check_problems(source: Source) -> Iterator[Problem]:
    raw = source.values.get("checks")
    entries = cast("list[object]", raw) if isinstance(raw, list) else []
    names: set[str] = set()
    demanding = False
    for index, entry in enumerate(entries):
        try:
            declaration = CheckDeclaration.model_validate(entry)
        except ValidationError:
            continue  # already reported with the file's own shape
        if declaration.name in names:
            what = f"two checks are named {declaration.name!r}; allowed: unique names"
            yield source.problem(("checks", index, "name"), what)
        names.add(declaration.name)
        demanding |= declaration.required and declaration.needs == "none" and not declaration.when
        for where, what in registry.problems(with_schema(declaration, {})):
            yield source.problem(("checks", index, *where), f"{declaration.name}: {what}")
    if entries and not demanding:
        what = "no check judges every run; allowed: a required one, needs: none, without when"
        yield source.problem(("checks",), what)


def with_schema(declaration: CheckDeclaration, output: dict[str, Any]) -> CheckDeclaration:
    """A `schema` check without a schema means the domain's own output schema."""
    if declaration.kind != "schema" or "schema" in declaration.parameters:
        return declaration
    return declaration.model_copy(
        update={"parameters": {**declaration.parameters, "schema": output}}
    )
