"""What samples say about one policy: how often it passes, and what a passed run costs.

A sample that infrastructure spoilt is no evidence: it is left out of every rate, while what it
spent was spent. Pure and seeded; the numbers of any number of machines' runs are counted where the
stage runs.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from flywheel.evaluation.statistics import clustered_interval
from flywheel.records import Sample, Score
from runtime.run import Record


class Spent(Record):
    """What runs cost, all of them, and for each accepted one."""

    runs: int
    accepted: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    """Sum of the runs' own wall seconds; runs overlap."""
    cost: float
    """US dollars."""
    tokens_per_accepted: float | None
    """Sampled tokens; None where nothing was accepted, as for the two below."""
    seconds_per_accepted: float | None
    cost_per_accepted: float | None


def score(samples: Sequence[Sample], *, confidence: float = 0.95, seed: int = 0) -> Score:
    """Sampled pass@1, with an interval that resamples tasks. No valid sample: 0 of 0, where the
    rate may be anything from 0 to 1."""
    by_task: defaultdict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        if sample.valid:
            by_task[sample.task_id].append(sample.passed)
    return score_of(by_task, confidence=confidence, seed=seed)


def best_of(samples: Sequence[Sample], k: int, *, confidence: float = 0.95, seed: int = 0) -> Score:
    """pass@k: a task passes if any of its first `k` members does. A task is counted only where all
    of these are valid, because a missing try would count as a failed one."""
    by_task: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.valid and sample.member < k:
            by_task[sample.task_id].append(sample)
    tries = {
        task: [any(sample.passed for sample in of_task)]
        for task, of_task in by_task.items()
        if len(of_task) == k
    }
    return score_of(tries, confidence=confidence, seed=seed)


def score_of(
    passed_by_task: Mapping[str, Sequence[bool]], *, confidence: float = 0.95, seed: int = 0
) -> Score:
    """The same from bare outcomes. Raises InputError for a task without one."""
    n = sum(map(len, passed_by_task.values()))
    if n == 0:
        return Score(passed=0, n=0, tasks=0, rate=0.0, low=0.0, high=1.0)
    found = clustered_interval(passed_by_task, confidence=confidence, seed=seed)
    return Score(
        passed=sum(map(sum, passed_by_task.values())),
        n=n,
        tasks=len(passed_by_task),
        rate=found.value,
        low=found.low,
        high=found.high,
    )


def spent(samples: Sequence[Sample]) -> Spent:
    """What the samples' runs cost; invalid ones count as spending, never as accepted."""
    return _spent(
        runs=len(samples),
        accepted=sum(sample.valid and sample.passed for sample in samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        sampled_tokens=sum(sample.sampled_tokens for sample in samples),
        seconds=math.fsum(sample.seconds for sample in samples),
        cost=math.fsum(sample.cost for sample in samples),
    )


def together(parts: Sequence[Spent]) -> Spent:
    """Several spendings as one."""
    return _spent(
        runs=sum(part.runs for part in parts),
        accepted=sum(part.accepted for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        sampled_tokens=sum(part.sampled_tokens for part in parts),
        seconds=math.fsum(part.seconds for part in parts),
        cost=math.fsum(part.cost for part in parts),
    )


def _spent(
    *,
    runs: int,
    accepted: int,
    prompt_tokens: int,
    sampled_tokens: int,
    seconds: float,
    cost: float,
) -> Spent:
    def each(total: float) -> float | None:
        return total / accepted if accepted else None

    return Spent(
        runs=runs,
        accepted=accepted,
        prompt_tokens=prompt_tokens,
        sampled_tokens=sampled_tokens,
        seconds=seconds,
        cost=cost,
        tokens_per_accepted=each(sampled_tokens),
        seconds_per_accepted=each(seconds),
        cost_per_accepted=each(cost),
    )
