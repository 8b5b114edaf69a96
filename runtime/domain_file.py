"""`domain.yaml` as a person wrote it: its declared form, and the line of everything in it.

Every problem is found in one pass and reported as `file:line: what; allowed: …`, so that an
author mends a folder in one go. YAML here is plain data: a key written twice, an anchor or an alias
is a problem, not a surprise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.checks.protocol import CheckDeclaration
from runtime.limits import Limits
from runtime.run import Sampling
from runtime.sandbox.protocol import SandboxSpec
from runtime.tools import ConnectorMode

FILE_NAME = "domain.yaml"
MAX_BYTES = 1 << 20

Location = tuple[str | int, ...]


class DomainFile(BaseModel):
    """The keys of domain.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """The folder's own name."""
    title: str = Field(min_length=1, max_length=80)
    description: str = Field(min_length=1, max_length=1_000)
    input: dict[str, Any]
    """JSON Schema (2020-12, an object) of a task's input; defaults in it are filled in."""
    output: dict[str, Any]
    """JSON Schema (2020-12, an object) of the answer: the arguments of `finish`."""
    task: str = "{% for name, value in input.items() %}\n{{ name }}: {{ value }}\n{% endfor %}"
    """jinja2 template of the first user message over `input` and `files`."""
    tools: list[str] = Field(min_length=1)
    finish: str
    connectors: dict[str, ConnectorMode] = Field(default_factory=dict[str, ConnectorMode])
    sandbox: SandboxSpec = SandboxSpec()
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    checks: list[CheckDeclaration] = Field(min_length=1)
    reward: Literal["strict", "graded"] = "strict"
    levels: list[str] = Field(default_factory=lambda: ["full"], min_length=1)
    splits: list[str] = Field(default_factory=list)


SECTIONS: dict[str, type[BaseModel]] = {
    "sandbox": SandboxSpec,
    "limits": Limits,
    "sampling": Sampling,
    "checks": CheckDeclaration,
}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    file: str
    """Relative to the folder that holds the domain: `support_triage/domain.yaml`."""
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed domain.yaml: plain values, and the line where each begins."""

    file: str
    values: dict[str, Any]
    lines: dict[Location, int]

    def problem(self, where: Location, what: str) -> Problem:
        """A problem at the most precise line known for `where`."""
        known = next(w for n in range(len(where), -1, -1) if (w := where[:n]) in self.lines)
        return Problem(self.file, self.lines[known], what)


def read_source(path: Path) -> tuple[Source, list[Problem]]:
    """Parse the file. A file that is not a YAML mapping comes back empty, with the problem."""
    file = f"{path.parent.name}/{path.name}"
    empty = Source(file, {}, {(): 1})
    try:
        content = path.read_bytes()
        if len(content) > MAX_BYTES:
            return empty, [Problem(file, 1, f"larger than {MAX_BYTES} bytes")]
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)  # pyright: ignore[reportUnknownMemberType]
        if aliased := _first_alias(text):
            return empty, [Problem(file, aliased, "YAML anchors and aliases are not allowed")]
        values: Any = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        return empty, [Problem(file, 1, f"cannot be read: {error}; allowed: a UTF-8 file")]
    except yaml.YAMLError as error:
        return empty, [_yaml_problem(file, error)]
    if not isinstance(node, yaml.MappingNode):
        return empty, [Problem(file, 1, f"not a mapping; allowed keys: {_names(DomainFile)}")]
    lines: dict[Location, int] = {(): 1}
    repeated = [Problem(file, line, what) for line, what in _walk(node, (), lines)]
    return Source(file, cast("dict[str, Any]", values), lines), repeated


def _first_alias(text: str) -> int | None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):  # pyright: ignore[reportUnknownMemberType]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            mark = event.start_mark
            return mark.line + 1 if mark else 1
    return None


def _yaml_problem(file: str, error: yaml.YAMLError) -> Problem:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    said = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
    return Problem(file, mark.line + 1 if mark else 1, f"not YAML: {said}")


def _walk(
    node: yaml.Node, where: Location, lines: dict[Location, int]
) -> Iterator[tuple[int, str]]:
    """Note the line of every node; yield keys that occur twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(cast("Sequence[yaml.Node]", node.value)):
            lines[*where, index] = item.start_mark.line + 1
            yield from _walk(item, (*where, index), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in cast("Sequence[tuple[yaml.Node, yaml.Node]]", node.value):
            place = (*where, str(key.value))
            line = key.start_mark.line + 1
            if place in lines:
                yield line, f"key {key.value!r} is written twice"
            lines[place] = line
            yield from _walk(value, place, lines)


def parse(source: Source) -> tuple[DomainFile | None, list[Problem]]:
    """The declared form, or every way in which the values break it."""
    try:
        return DomainFile.model_validate(source.values), []
    except ValidationError as error:
        return None, [
            source.problem(e["loc"], _spell(e["loc"], e["type"], e["msg"])) for e in error.errors()
        ]


def _spell(where: Location, kind: str, message: str) -> str:
    path = ".".join(map(str, where))
    if kind == "extra_forbidden":
        return f"unknown key {path!r}; allowed: {_names(_model_at(where))}"
    if kind == "missing":
        return f"missing key {path!r}; allowed: {_names(_model_at(where))}"
    return f"{path}: {message[:1].lower()}{message[1:]}"


def _model_at(where: Location) -> type[BaseModel]:
    return SECTIONS.get(str(where[0]), DomainFile) if len(where) > 1 else DomainFile


def _names(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
