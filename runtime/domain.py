"""A domain: one kind of work, as a folder versioned by its content.

`domain.yaml` declares it, `prompt.md` is the system prompt, `tasks.py` (optional) generates tasks
with gold and demonstrates them, `checks:` judge. `load_domain` validates everything at once and
names file and line; a loaded `Domain` is frozen and carries the digest of every byte of its folder.

How the folder is read stands in `domain_file.py`, its templates in `domain_prompts.py`, what can be
wrong with it in `domain_faults.py`. A domain holds no process-wide state: every process of every
machine loads it from the folder, and the digest says that it is the same one.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast, runtime_checkable

from runtime.checks.protocol import CheckDeclaration
from runtime.checks.schema import violations
from runtime.domain_faults import link_problems, source_problems, with_schema
from runtime.domain_file import FILE_NAME, DomainFile, Problem, parse, read_source
from runtime.domain_prompts import render_prompt, task_template_problems
from runtime.errors import DomainError, InputError
from runtime.limits import Limits
from runtime.run import Json, Sampling, Task, ToolCall
from runtime.sandbox.protocol import SandboxSpec
from runtime.tools import ConnectorFactory, ConnectorMode

TASKS_NAME = "tasks.py"
MAX_NAMED = 50
"""Wrong fields told of one value."""
_OF_THE_WHOLE = {
    *(
        "$ref",
        "$dynamicRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "enum",
        "const",
    ),
    *("required", "dependentRequired", "dependentSchemas", "maxProperties", "patternProperties"),
    *("propertyNames", "unevaluatedProperties"),
}
"""What a schema demands of an answer as a whole, and a part of one cannot give."""


class TaskSource(Protocol):
    """What a domain's `tasks.py` provides (as module-level functions)."""

    def generate(self, *, split: str, level: str, count: int, seed: int) -> list[Task]:
        """`count` distinct tasks with gold; equal arguments give equal tasks. No split shares a
        family of phrasing with another."""
        ...

    def demonstrate(self, task: Task, expectation: dict[str, Json]) -> list[list[ToolCall]]:
        """The turns (tool calls per turn) by which an expert reaches the expectation."""
        ...


@runtime_checkable
class ImportSource(Protocol):
    """What `tasks.py` may provide besides: tasks made of text that people wrote elsewhere."""

    def imported(self, text: str, label: str, *, seed: int) -> Task:
        """The task of one text whose right answer follows from its label; equal arguments give
        equal tasks. Raises InputError for a label it does not know, naming those it does."""
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
    """The system prompt, rendered: the same bytes for every run."""
    task_prompt: str
    """jinja2 template of the first user message over `input` and `files` (names, sorted)."""
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
    if found and not source.values:  # unreadable: what it lacks cannot be known
        raise DomainError("\n".join(map(str, found)), problems=[str(each) for each in found])
    declared, broken = parse(source)
    found += broken
    if source.values:
        found += source_problems(source, folder, known_tools, known_connectors)
    found += [*link_problems(folder), *task_template_problems(source)]
    prompt, unrendered = render_prompt(folder, declared)
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
        task_prompt=declared.task,
        input_schema=declared.input,
        output_schema=declared.output,
        tools=tuple(declared.tools),
        finish=declared.finish,
        connectors=dict(declared.connectors),
        sandbox=declared.sandbox,
        limits=declared.limits,
        sampling=declared.sampling,
        checks=tuple(with_schema(each, declared.output) for each in declared.checks),
        reward=declared.reward,
        levels=tuple(declared.levels),
        splits=tuple(declared.splits),
        source=source,
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


# ---------------------------------------------------------------- tasks.py


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
    if what := _not_a_source(module):
        return None, [Problem(file, 1, what)]
    return cast(TaskSource, module), []


def _not_a_source(module: ModuleType) -> str | None:
    """What `tasks.py` lacks, or has in a shape that nobody can call."""
    missing = [n for n in ("generate", "demonstrate") if not callable(getattr(module, n, None))]
    if missing:
        return f"lacks {', '.join(missing)}; allowed: functions generate and demonstrate"
    imported = getattr(module, "imported", None)
    if imported is None:
        return None
    try:
        inspect.signature(imported).bind("text", "label", seed=0)
    except (TypeError, ValueError):
        return "imported cannot be called; allowed: imported(text, label, *, seed)"
    return None


def _line_of(error: BaseException, path: Path) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


# ---------------------------------------------------------------- inputs and answers


def validate_input(domain: Domain, value: Mapping[str, Json]) -> dict[str, Json]:
    """The input, completed by the schema's defaults. Raises InputError naming each wrong field."""
    return _validated("input", domain, domain.input_schema, _completed(domain.input_schema, value))


def validate_answer(domain: Domain, value: Mapping[str, Json]) -> dict[str, Json]:
    """An answer or a person's correction. Raises InputError naming each wrong field."""
    schema = domain.output_schema
    return _validated("answer", domain, schema, _completed(schema, value))


def validate_expectation(domain: Domain, value: Mapping[str, Json]) -> dict[str, Json]:
    """Gold: one field of an answer or more, each as the output schema has it, and nothing else.

    Raises InputError naming each wrong field.
    """
    kept = {k: v for k, v in domain.output_schema.items() if k not in _OF_THE_WHOLE}
    part = {**kept, "type": "object", "additionalProperties": False, "minProperties": 1}
    return _validated("expectation", domain, part, dict(value))


def _completed(schema: dict[str, Any], value: Mapping[str, Json]) -> dict[str, Json]:
    properties = cast("dict[str, dict[str, Any]]", schema.get("properties", {}))
    defaults = {key: p["default"] for key, p in properties.items() if "default" in p}
    return {**defaults, **value}


def _validated(
    what: str, domain: Domain, schema: dict[str, Any], value: dict[str, Json]
) -> dict[str, Json]:
    if wrong := violations(schema, value):
        named = wrong[:MAX_NAMED]
        errors = [{"field": each.field, "message": each.message} for each in named]
        said = "; ".join(map(str, named))
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise InputError(f"{what} of domain {domain.name}: {said}{more}", errors=errors)
    return value
