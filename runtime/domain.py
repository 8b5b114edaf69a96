"""A domain: one kind of work, as a folder versioned by its content.

`domain.yaml` declares it, `prompt.md` is the system prompt, `tasks.py` (optional) generates tasks
with gold and demonstrates them, `checks:` judge. `load_domain` validates everything at once and
names file and line; a loaded `Domain` is frozen and carries the digest of every byte of its folder.

The prompt is rendered once, when the domain loads: every run of a domain starts with the same
bytes, so that an engine computes them once. It is a jinja2 template over the domain itself
(`title`, `finish`, `tools`, `steps`, `output`), never over a task.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import jinja2
import jinja2.meta
import jinja2.sandbox
from pydantic import ValidationError

from runtime.checks import registry
from runtime.checks.protocol import CheckDeclaration
from runtime.checks.schema import schema_problem, violations
from runtime.domain_file import FILE_NAME, DomainFile, Problem, Source, parse, read_source
from runtime.errors import DomainError, InputError
from runtime.limits import Limits
from runtime.run import Json, Sampling, Task, ToolCall
from runtime.sandbox.protocol import SandboxSpec
from runtime.tools import ConnectorFactory, ConnectorMode

PROMPT_NAME = "prompt.md"
TASKS_NAME = "tasks.py"
PROMPT_VARIABLES = ("title", "finish", "tools", "steps", "output")


class TaskSource(Protocol):
    """What a domain's `tasks.py` provides (as module-level functions)."""

    def generate(self, *, split: str, level: str, count: int, seed: int) -> list[Task]:
        """`count` distinct tasks with gold; equal arguments give equal tasks. No split shares a
        family of phrasing with another."""
        ...

    def demonstrate(self, task: Task, expectation: dict[str, Json]) -> list[list[ToolCall]]:
        """The turns (tool calls per turn) by which an expert reaches the expectation."""
        ...


@dataclass(frozen=True, slots=True)
class Domain:
    name: str
    title: str
    """What a business user reads in a list."""
    description: str
    digest: str
    """`sha256:…` over every file of the folder."""
    folder: Path
    prompt: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    tools: Sequence[str]
    """Names of built-in, connector and finishing tools, in prompt order."""
    finish: str
    """The tool whose arguments are the answer: calling it successfully ends the run."""
    connectors: dict[str, ConnectorMode]
    sandbox: SandboxSpec
    limits: Limits
    sampling: Sampling
    checks: Sequence[CheckDeclaration]
    reward: Literal["strict", "graded"]
    repair_attempts: int
    levels: Sequence[str]
    splits: Sequence[str]
    source: TaskSource | None


# ---------------------------------------------------------------- discovering, loading


def discover(
    builtin: Path,
    extra: Path | None,
    *,
    known_tools: Collection[str],
    known_connectors: Mapping[str, ConnectorFactory],
) -> dict[str, Domain]:
    """Every domain folder below `builtin` and `extra`, by name, in order of name.

    Raises DomainError naming every problem of every folder, and a name that exists twice.
    """
    domains: dict[str, Domain] = {}
    wrong: list[str] = []
    for folder in [*_folders(builtin), *(_folders(extra) if extra else ())]:
        try:
            domain = load_domain(folder, known_tools=known_tools, known_connectors=known_connectors)
        except DomainError as error:
            wrong.append(str(error))
            continue
        if domain.name in domains:
            wrong.append(f"{folder}: domain {domain.name!r} is built in; allowed: another name")
        domains.setdefault(domain.name, domain)
    if wrong:
        raise DomainError("\n".join(wrong), problems=wrong)
    return dict(sorted(domains.items()))


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        raise DomainError(f"{parent} is not a folder; allowed: a folder of domain folders")
    return sorted(path.parent for path in parent.glob(f"*/{FILE_NAME}"))


def load_domain(
    folder: Path,
    *,
    known_tools: Collection[str],
    known_connectors: Mapping[str, ConnectorFactory],
) -> Domain:
    """Load and validate one folder.

    `known_tools` are the tools that need no connector; those of the declared connectors come on
    top. Raises DomainError with one line per problem (`file:line: what; allowed: …`).
    """
    folder = folder.resolve()
    source, found = read_source(folder / FILE_NAME)
    declared, broken = parse(source)
    found += broken
    if source.values:
        found += _name_problems(source, folder)
        found += _tool_problems(source, known_tools, known_connectors)
        found += _schema_problems(source)
        found += _check_problems(source)
    found += _link_problems(folder)
    prompt, unrendered = _prompt(folder, declared)
    digest = digest_of(folder)
    tasks, unimported = _task_source(folder, digest)
    found += [*unrendered, *unimported]
    if found or declared is None:
        lines = [str(problem) for problem in sorted(set(found))]
        raise DomainError("\n".join(lines), problems=lines)
    return _domain(declared, folder, digest, prompt, tasks)


def _domain(
    declared: DomainFile, folder: Path, digest: str, prompt: str, source: TaskSource | None
) -> Domain:
    return Domain(
        name=declared.name,
        title=declared.title,
        description=declared.description.strip(),
        digest=digest,
        folder=folder,
        prompt=prompt,
        input_schema=declared.input,
        output_schema=declared.output,
        tools=tuple(declared.tools),
        finish=declared.finish,
        connectors=dict(declared.connectors),
        sandbox=declared.sandbox,
        limits=declared.limits,
        sampling=declared.sampling,
        checks=tuple(_with_schema(each, declared.output) for each in declared.checks),
        reward=declared.reward,
        repair_attempts=declared.repair_attempts,
        levels=tuple(declared.levels),
        splits=tuple(declared.splits),
        source=source,
    )


def _with_schema(declaration: CheckDeclaration, output: dict[str, Any]) -> CheckDeclaration:
    """A `schema` check without a schema means the domain's own output schema."""
    if declaration.kind != "schema" or "schema" in declaration.parameters:
        return declaration
    return declaration.model_copy(
        update={"parameters": {**declaration.parameters, "schema": output}}
    )


def digest_of(folder: Path) -> str:
    """sha256 over the sorted relative paths and bytes of every file; caches are left out."""
    total = hashlib.sha256()
    for path in sorted(_files(folder), key=lambda p: p.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix().encode()
        content = path.read_bytes()
        total.update(b"%d %b %d " % (len(name), name, len(content)))
        total.update(content)
    return f"sha256:{total.hexdigest()}"


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        cached = "__pycache__" in path.relative_to(folder).parts
        if not cached and path.is_file() and not path.is_symlink():
            yield path


# ---------------------------------------------------------------- what can be wrong


def _link_problems(folder: Path) -> Iterator[Problem]:
    for path in folder.rglob("*"):
        if path.is_symlink():
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            yield Problem(name, 1, "a link, which a digest cannot cover; allowed: regular files")


def _name_problems(source: Source, folder: Path) -> Iterator[Problem]:
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


def _tool_problems(
    source: Source, tools: Collection[str], connectors: Mapping[str, ConnectorFactory]
) -> Iterator[Problem]:
    values = source.values
    declared = cast("dict[Any, Any]", c) if isinstance(c := values.get("connectors"), dict) else {}
    allowed = set(tools)
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


def _schema_problems(source: Source) -> Iterator[Problem]:
    for key in ("input", "output"):
        schema = source.values.get(key)
        if not isinstance(schema, dict):
            continue
        schema = cast("dict[str, Any]", schema)
        if problem := schema_problem(schema):
            yield source.problem((key,), f"{key}: {problem}")
        elif schema.get("type") != "object":
            yield source.problem((key,), f"{key}: type must be object; allowed: type: object")


def _check_problems(source: Source) -> Iterator[Problem]:
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
        for where, what in registry.problems(_with_schema(declaration, {})):
            yield source.problem(("checks", index, *where), f"{declaration.name}: {what}")
    if entries and not demanding:
        what = "no check judges every run; allowed: a required one, needs: none, without when"
        yield source.problem(("checks",), what)


def _prompt(folder: Path, declared: DomainFile | None) -> tuple[str, list[Problem]]:
    file = f"{folder.name}/{PROMPT_NAME}"
    try:
        text = (folder / PROMPT_NAME).read_text("utf-8")
    except FileNotFoundError:
        return "", [Problem(file, 1, f"missing; allowed: a system prompt in {PROMPT_NAME}")]
    except (OSError, UnicodeDecodeError) as error:
        return "", [Problem(file, 1, f"cannot be read: {error}; allowed: UTF-8 text")]
    environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        unknown = jinja2.meta.find_undeclared_variables(environment.parse(text))
        if unknown := unknown - set(PROMPT_VARIABLES):
            return "", [_unknown_variable(file, text, name) for name in sorted(unknown)]
        return _rendered(environment, text, declared), []
    except jinja2.TemplateSyntaxError as error:
        return "", [Problem(file, error.lineno, f"not a jinja2 template: {error.message}")]
    except jinja2.TemplateError as error:
        return "", [Problem(file, 1, f"cannot be rendered: {error.message}")]


def _rendered(environment: jinja2.Environment, text: str, declared: DomainFile | None) -> str:
    if declared is None:  # its problems are reported; there is nothing to render with
        return ""
    variables = {
        "title": declared.title,
        "finish": declared.finish,
        "tools": declared.tools,
        "steps": declared.limits.steps,
        "output": declared.output,
    }
    return environment.from_string(text).render(variables).strip()


def _unknown_variable(file: str, text: str, name: str) -> Problem:
    lines = text.splitlines()
    line = next((n for n, each in enumerate(lines, 1) if name in each), 1)
    allowed = ", ".join(PROMPT_VARIABLES)
    return Problem(file, line, f"unknown variable {name!r}; allowed: {allowed}")


def _task_source(folder: Path, digest: str) -> tuple[TaskSource | None, list[Problem]]:
    """Import tasks.py as part of a package of its own, named by the digest of its code."""
    file = f"{folder.name}/{TASKS_NAME}"
    if not (folder / TASKS_NAME).is_file():
        return None, []
    package = f"noria_domain_{folder.name}_{digest[-16:]}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        module = importlib.import_module(f"{package}.tasks")
    except (Exception, SystemExit) as error:  # the boundary: an author's code may raise anything
        del sys.modules[package]
        what = f"cannot be imported: {type(error).__name__}: {error}"
        return None, [Problem(file, _line_of(error, folder / TASKS_NAME), what)]
    missing = [n for n in ("generate", "demonstrate") if not callable(getattr(module, n, None))]
    if missing:
        what = f"lacks {', '.join(missing)}; allowed: functions generate and demonstrate"
        return None, [Problem(file, 1, what)]
    return cast(TaskSource, module), []


def _line_of(error: BaseException, path: Path) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


# ---------------------------------------------------------------- inputs and answers


def validate_input(domain: Domain, value: Mapping[str, Json]) -> dict[str, Json]:
    """The input, completed by the schema's defaults. Raises InputError naming each wrong field."""
    return _validated("input", domain.name, domain.input_schema, value)


def validate_answer(domain: Domain, value: Mapping[str, Json]) -> dict[str, Json]:
    """An answer or a person's correction. Raises InputError naming each wrong field."""
    return _validated("answer", domain.name, domain.output_schema, value)


def _validated(
    what: str, name: str, schema: dict[str, Any], value: Mapping[str, Json]
) -> dict[str, Json]:
    properties = cast("dict[str, dict[str, Any]]", schema.get("properties", {}))
    defaults = {key: p["default"] for key, p in properties.items() if "default" in p}
    complete = {**defaults, **value}
    if wrong := violations(schema, complete):
        errors = [{"field": each.field, "message": each.message} for each in wrong]
        said = "; ".join(map(str, wrong))
        raise InputError(f"{what} of domain {name}: {said}", errors=errors)
    return complete
