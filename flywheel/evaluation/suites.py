"""Suites: on which tasks a candidate meets the incumbent.

The gate's tasks are held-out tasks of the pool where people gave enough of them, else the domain's
own generator draws them; a domain with neither has an empty suite, and the gate says that it
cannot judge. What practice tasks say is never asked at the gate. Pure and seeded, so that a cycle
that is resumed on another machine asks the same questions.
"""

import random
from collections.abc import Iterable, Sequence

from flywheel.recipe import Recipe
from flywheel.records import CycleOptions, PoolTask
from runtime.checks.document import normalised
from runtime.domain import Domain
from runtime.run import Task

GATE = "gate"


def gate_tasks(
    domain: Domain,
    recipe: Recipe,
    options: CycleOptions,
    *,
    held_out: Sequence[PoolTask],
    practised: Sequence[PoolTask],
) -> list[Task]:
    """At most `recipe.gate.tasks` tasks with expectations, none saying what a practice task says.

    `held_out` are the pool's admitted tasks of the gate split, `practised` those of the practice
    split, whole. Raises InputError where the domain cannot generate that many.
    """
    known = {_said(each.task) for each in practised}
    chosen = _distinct((each.task for each in held_out if each.split == GATE), known)
    if len(chosen) >= recipe.gate.minimum_tasks:
        return _drawn(chosen, recipe.gate.tasks, options.seed)
    return _distinct(_generated(domain, recipe, options), known)


def _generated(domain: Domain, recipe: Recipe, options: CycleOptions) -> list[Task]:
    if domain.source is None or GATE not in domain.splits:
        return []
    level = options.level or recipe.level
    count = recipe.gate.tasks
    return domain.source.generate(split=GATE, level=level, count=count, seed=options.seed)


def _drawn(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` of the tasks, in order of id: always the same ones for a seed."""
    ordered = sorted(tasks, key=lambda task: task.id)
    if len(ordered) <= count:
        return ordered
    chosen = random.Random(f"gate/{seed}").sample(range(len(ordered)), count)
    return [ordered[index] for index in sorted(chosen)]


def _distinct(tasks: Iterable[Task], known: set[str]) -> list[Task]:
    """Tasks with gold that say something new, to practice and to each other."""
    said = set(known)
    kept: list[Task] = []
    for task in tasks:
        if task.expectation is not None and (words := _said(task)) not in said:
            said.add(words)
            kept.append(task)
    return kept


def _said(task: Task) -> str:
    """What a person wrote: the longest text of the input, and the files that came with it. Who
    wrote it (an id, a date) does not make it another message."""
    texts = [value for value in task.input.values() if isinstance(value, str)]
    letters = [task.files[name].decode(errors="replace") for name in sorted(task.files)]
    return "\n".join(map(normalised, [max(texts, key=len, default=""), *letters]))
