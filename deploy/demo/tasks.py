"""The tasks of one demo: what is sent as practice, what the report is measured on, and gate tasks.

Generated, they come from the domain's own source, split by split, so that no split shares a family
of phrasing with another, and seeded, so that no two seeds share a task. Real messages come from the
user's own files: practice from one, gate and report from the other, none of them twice.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flywheel.lessons.importing import read_map, read_tasks
from flywheel.schemas import ImportedTask
from runtime.domain import Domain
from runtime.errors import InputError
from runtime.run import Json, Task

SPARE = 3
"""Practice messages at hand for each correction wanted: some are answered right at once."""
REAL_LEVEL = "full"
"""Messages that people wrote are not easy."""


@dataclass(frozen=True, slots=True)
class DemoTasks:
    practice: Sequence[Task]
    """In the order in which they are sent; more than will be needed."""
    report: Sequence[Task]
    """Seen by nothing before the report."""
    gate: Sequence[ImportedTask]
    """Held-out tasks for the cycle's gate; empty where the domain generates its own."""


def generated(domain: Domain, *, level: str, seed: int, practice: int, report: int) -> DemoTasks:
    """`practice` and `report` tasks of the domain's own. Raises InputError where it has no source
    or no such level."""
    if domain.source is None:
        raise InputError(f"{domain.name} generates no tasks; give --messages, --held-out and --map")
    made = {
        split: domain.source.generate(split=split, level=level, count=count, seed=seed)
        for split, count in (("practice", SPARE * practice), ("report", report))
    }
    return DemoTasks(made["practice"], made["report"], [])


@dataclass(frozen=True, slots=True)
class MessageFiles:
    """Real messages with the labels that people gave them."""

    messages: Path
    held_out: Path
    map: Path


def from_files(
    domain: Domain, files: MessageFiles, *, seed: int, practice: int, gate: int, report: int
) -> DemoTasks:
    """A seeded choice of distinct messages. Raises InputError naming what a file lacks."""
    task_map = read_map(files.map)
    train = _distinct(read_tasks(files.messages, task_map, domain, seed))
    known = {_content(each) for each in train}
    held_out = [
        each
        for each in _distinct(read_tasks(files.held_out, task_map, domain, seed))
        if _content(each) not in known
    ]
    for path, found, wanted in (
        (files.messages, len(train), practice),
        (files.held_out, len(held_out), gate + report),
    ):
        if found < wanted:
            raise InputError(f"{path} has {found} distinct messages; the demo needs {wanted}")
    dice = random.Random(f"demo/{seed}")
    sent = dice.sample(train, min(len(train), SPARE * practice))
    measured = dice.sample(held_out, gate + report)
    return DemoTasks(
        practice=list(_tasks(domain, sent, "practice", seed)),
        report=list(_tasks(domain, measured[gate:], "report", seed)),
        gate=measured[:gate],
    )


def _content(each: ImportedTask) -> str:
    return " ".join(str(value) for _, value in sorted(each.input.items())).casefold()


def _distinct(tasks: Sequence[ImportedTask]) -> list[ImportedTask]:
    return list({_content(each): each for each in tasks}.values())


def _tasks(domain: Domain, chosen: Sequence[ImportedTask], split: str, seed: int) -> Iterator[Task]:
    for number, each in enumerate(chosen):
        yield Task(
            id=f"{split}-real-{seed}-{each.row or number}",
            domain=domain.name,
            input=each.input,
            files=each.files,
            seed=each.seed,
            connectors=dict(each.connectors),
            expectation=each.expectation,
            split=split,
            level=REAL_LEVEL,
        )


# ---------------------------------------------------------------- judging


def is_right(task: Task, answer: Mapping[str, Json] | None, fields: Sequence[str]) -> bool:
    """Whether a support team that knows the right answer would leave this one as it is."""
    gold = task.expectation or {}
    return answer is not None and all(answer.get(f) == gold.get(f) for f in fields if f in gold)
