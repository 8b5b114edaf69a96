"""A domain: one kind of work, as a folder versioned by its content.

`domain.yaml` declares it, `prompt.md` is the system prompt, `tasks.py` generates tasks with gold and
demonstrates them, `checks:` judge. `load_domain` validates everything at once and names file and
line; a loaded `Domain` is frozen and carries the digest of every byte of its folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from runtime.checks.protocol import CheckDeclaration
from runtime.limits import Limits
from runtime.run import Json, Sampling, Task, ToolCall
from runtime.sandbox.protocol import SandboxSpec
from runtime.tools import ConnectorMode


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
