"""What a policy could score on a domain without doing the work.

`no_lookup` is the optimal predictor over what the message reveals: for each observable situation
it gives the most frequent right answer, counted on the very tasks it is scored on, which can only
flatter it. `keyword` is a multinomial naive Bayes over the words of the message (add-one
smoothing), trained on the first split and scored on the others. Both are judged strictly on the
decisive fields of the answer. All functions are pure.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from runtime.checks.document import normalised
from runtime.run import Json, Task


@runtime_checkable
class Latent(Protocol):
    """A task source that knows what its generator drew, and the bounds its domain promises."""

    decisive: tuple[str, ...]
    """Fields of the answer that make it right or wrong."""
    at_most: Mapping[str, float]
    at_least: Mapping[str, float]
    """Bounds on the measures, by name."""

    def generate(self, *, split: str, level: str, count: int, seed: int) -> list[Task]: ...
    def demonstrate(self, task: Task, expectation: dict[str, Json]) -> Json: ...
    def observable(self, task: Task) -> str:
        """Everything about the answer that the task's message alone reveals."""
        ...

    def decided_by(self, task: Task) -> Collection[str]:
        """`state`, `attachment`: what the answer cannot be told without."""
        ...


def measures(
    source: Latent, level: str, splits: Sequence[str], count: int, seed: int
) -> dict[str, float]:
    """All measures of one level over `count` tasks of each split; shares are in [0, 1]."""
    tasks = [source.generate(split=s, level=level, count=count, seed=seed) for s in splits]
    everything = [task for of_split in tasks for task in of_split]
    held_out = [task for of_split in tasks[1:] for task in of_split]
    found = {
        "no_lookup": no_lookup(source, everything),
        "decided_by_state": _decided_by(source, everything, "state"),
        "decided_by_attachment": _decided_by(source, everything, "attachment"),
        "distinct_messages": float(len({_message(task) for task in everything})),
    }
    if held_out:
        found["keyword"] = keyword(tasks[0], held_out, source.decisive)
    return found


def shortfalls(source: Latent, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The bounds that do not hold, in words."""
    problems: list[str] = []
    for level, values in found.items():
        for name, bound in source.at_most.items():
            if name in values and values[name] > bound:
                problems.append(f"level {level}: {name} is {values[name]:.3f}, at most {bound:g}")
        for name, bound in source.at_least.items():
            if name in values and values[name] < bound:
                problems.append(f"level {level}: {name} is {values[name]:.3f}, at least {bound:g}")
    return problems


def _label(task: Task, decisive: Sequence[str]) -> str:
    expectation = task.expectation or {}
    return json.dumps([expectation.get(name) for name in decisive])


def _message(task: Task) -> str:
    """The longest text of the input: what the customer wrote."""
    texts = [value for value in task.input.values() if isinstance(value, str)]
    return max(texts, key=len, default="")


def no_lookup(
    source: Latent, tasks: Sequence[Task], *, counted_on: Sequence[Task] | None = None
) -> float:
    """Share right of the best answer for each observable situation: the most frequent one in
    `counted_on`, or in the tasks themselves; wrong where the situation does not occur there."""
    situations: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for task in tasks if counted_on is None else counted_on:
        situations[source.observable(task)][_label(task, source.decisive)] += 1
    best = {situation: labels.most_common(1)[0][0] for situation, labels in situations.items()}
    right = sum(best.get(source.observable(t)) == _label(t, source.decisive) for t in tasks)
    return right / len(tasks)


def _decided_by(source: Latent, tasks: Sequence[Task], what: str) -> float:
    return sum(what in source.decided_by(task) for task in tasks) / len(tasks)


def _words(task: Task) -> list[str]:
    text = normalised(_message(task))
    return "".join(c if c.isalnum() else " " for c in text).split()


def keyword(train: Iterable[Task], test: Sequence[Task], decisive: Sequence[str]) -> float:
    """Share right of naive Bayes on words."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    priors: Counter[str] = Counter()
    for task in train:
        label = _label(task, decisive)
        priors[label] += 1
        counts[label].update(_words(task))
    vocabulary = len({word for words in counts.values() for word in words})
    totals = {label: sum(words.values()) + vocabulary for label, words in counts.items()}

    def score(label: str, words: Sequence[str]) -> float:
        likelihood = sum(math.log((counts[label][w] + 1) / totals[label]) for w in words)
        return math.log(priors[label]) + likelihood

    def predicted(task: Task) -> str:
        words = _words(task)
        return max(sorted(priors), key=lambda label: score(label, words))

    return sum(predicted(task) == _label(task, decisive) for task in test) / len(test)
