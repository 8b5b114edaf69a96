"""The two templates of a domain: the system prompt, and how a task is told to the model.

The system prompt is rendered once, when the domain loads: every run starts with the same bytes, so
that an engine computes them once. It may use what the domain says about itself, never a task. The
task template is rendered for each task over its input and the names of its files.
"""

from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.sandbox

from runtime.domain_file import DomainFile, Problem, Source

PROMPT_NAME = "prompt.md"
PROMPT_VARIABLES = ("title", "finish", "tools", "steps", "output")
TASK_VARIABLES = ("input", "files")


def render_prompt(folder: Path, declared: DomainFile | None) -> tuple[str, list[Problem]]:
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


def task_template_problems(source: Source) -> list[Problem]:
    """What is wrong with `task:`, the template of the first user message."""
    text = source.values.get("task")
    if not isinstance(text, str):
        return []
    try:
        tree = jinja2.sandbox.SandboxedEnvironment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        return [source.problem(("task",), f"task: not a jinja2 template: {error.message}")]
    unknown = sorted(jinja2.meta.find_undeclared_variables(tree) - set(TASK_VARIABLES))
    allowed = ", ".join(TASK_VARIABLES)
    return [
        source.problem(("task",), f"task: unknown variable {name!r}; allowed: {allowed}")
        for name in unknown
    ]
