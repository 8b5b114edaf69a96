"""How sure the numbers are: intervals and tests that resample whole tasks.

Samples of one task resemble each other, so tasks are what is drawn: every interval is a bootstrap
over tasks, every comparison is paired by task and member, and samples that infrastructure spoilt
are left out with their partners. Pure and seeded; the order of samples never matters.

Scaling out: a statistic is one pass over a few numbers per task in bounded memory, a tenth of a
second for thousands of tasks, in whichever worker holds the stage.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from flywheel.records import Interval, Sample
from runtime.errors import InputError

RESAMPLES = 10_000
DRAWS_AT_ONCE = 1 << 20
"""Numbers drawn at a time: bounds memory to some 20 MB, however many tasks there are."""

Floats = NDArray[np.float64]


def clustered_interval(
    values_by_task: Mapping[str, Sequence[float]],
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The mean of all values, with an interval that resamples tasks.

    Expanded percentile bootstrap: percentiles are taken where a t interval with one degree of
    freedom less than there are tasks would have them (T. Hesterberg, What Teachers Should Know
    About the Bootstrap, The American Statistician 69(4), 2015). Where all tasks agree
    a bootstrap has no width, so the share of tasks that may be otherwise is bounded as by
    E. B. Wilson (JASA 22, 1927) and given the worst values within `bounds`: 0 of 24 tasks becomes
    0 to 0.14. Raises InputError for no tasks, a task without values, and values that are not
    finite.
    """
    sums, sizes = _clusters(values_by_task)
    value = float(sums.sum() / sizes.sum())
    means = sums / sizes
    if np.ptp(means) == 0.0:
        return _agreeing(value, len(sums), bounds, confidence)
    tail = expanded_tail(len(sums), confidence)
    resampled = np.concatenate(list(_resampled_means(sums, sizes, resamples, seed)))
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def _clusters(values_by_task: Mapping[str, Sequence[float]]) -> tuple[Floats, Floats]:
    """Sum and number of values of each task, in order of task."""
    if not values_by_task:
        raise InputError("no tasks: an interval needs at least one")
    if empty := sorted(task for task, values in values_by_task.items() if not values):
        raise InputError(f"tasks without values: {', '.join(empty[:5])}; leave them out")
    ordered = [values_by_task[task] for task in sorted(values_by_task)]
    sums = np.array([math.fsum(values) for values in ordered])
    if not np.isfinite(sums).all():
        raise InputError("values must be finite numbers; some are NaN or infinite")
    return sums, np.array([float(len(values)) for values in ordered])


def _agreeing(value: float, tasks: int, bounds: tuple[float, float], confidence: float) -> Interval:
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    seen = tasks / (tasks + z * z)
    low, high = bounds
    return Interval(
        value=value, low=seen * value + (1 - seen) * low, high=seen * value + (1 - seen) * high
    )


def _resampled_means(sums: Floats, sizes: Floats, resamples: int, seed: int) -> Iterator[Floats]:
    dice = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(sums))
    for start in range(0, resamples, at_once):
        shape = (min(at_once, resamples - start), len(sums))
        drawn = dice.integers(0, len(sums), size=shape)
        yield sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)


def expanded_tail(tasks: int, confidence: float) -> float:
    """Probability left out at each end: (1 - confidence) / 2 for many tasks, less for few."""
    quantile = student_quantile(0.5 + confidence / 2, tasks - 1)
    return NormalDist().cdf(-math.sqrt(tasks / (tasks - 1)) * quantile)


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t; exact for 1 and 2 degrees of freedom, else the expansion 26.7.5 of
    Abramowitz and Stegun, Handbook of Mathematical Functions (error below 0.004 at p = 0.975)."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    x = NormalDist().inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92_160,
    )
    return x + sum(term / degrees ** (n + 1) for n, term in enumerate(terms))


# ---------------------------------------------------------------- pairs


def pairs(
    incumbent: Sequence[Sample], candidate: Sequence[Sample]
) -> dict[str, list[tuple[Sample, Sample]]]:
    """Task → its valid pairs (incumbent, candidate) in order of member; tasks without one are left
    out. Raises InputError where an arm has two samples of one task and member."""
    old, new = _by_member(incumbent), _by_member(candidate)
    found: dict[str, list[tuple[Sample, Sample]]] = {}
    for key in sorted(old.keys() & new.keys()):
        if old[key].valid and new[key].valid:
            found.setdefault(key[0], []).append((old[key], new[key]))
    return found


def _by_member(samples: Sequence[Sample]) -> dict[tuple[str, int], Sample]:
    found: dict[tuple[str, int], Sample] = {}
    for sample in samples:
        known = found.setdefault((sample.task_id, sample.member), sample)
        if known is not sample:
            raise InputError(
                f"runs {known.run_id} and {sample.run_id} are both member {sample.member} of task "
                f"{sample.task_id}; an arm has one sample for each"
            )
    return found


def differences(
    paired: Mapping[str, Sequence[tuple[Sample, Sample]]],
) -> dict[str, list[float]]:
    """Task → candidate minus incumbent of each pair: 1, 0 or -1."""
    return {
        task: [float(new.passed) - float(old.passed) for old, new in of_task]
        for task, of_task in paired.items()
    }


def paired_difference(
    incumbent: Sequence[Sample],
    candidate: Sequence[Sample],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Candidate minus incumbent in pass@1, in [-1, 1]; None without a valid pair."""
    found = differences(pairs(incumbent, candidate))
    if not found:
        return None
    return clustered_interval(
        found, bounds=(-1.0, 1.0), confidence=confidence, resamples=resamples, seed=seed
    )


def chance_of(
    differences_by_task: Mapping[str, Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """Two-sided p-value of a mean difference of zero, by flipping the signs of whole tasks.

    Exact in small samples, where few tasks differ and a bootstrap is too sure of itself: four tasks
    better and none worse are p = 0.125. (R. A. Fisher, The Design of Experiments, 1935, section 21;
    counted as by B. Phipson and G. Smyth, Stat. Appl. Genet. Mol. Biol. 9(1), 2010.) Raises
    InputError as `clustered_interval` does.
    """
    sums, _ = _clusters(differences_by_task)
    observed = abs(sums.sum()) - 1e-9
    dice = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(sums))
    as_far = 0
    for start in range(0, resamples, at_once):
        shape = (min(at_once, resamples - start), len(sums))
        signs = dice.integers(0, 2, size=shape) * 2.0 - 1.0
        as_far += int((np.abs(signs @ sums) >= observed).sum())
    return (as_far + 1) / (resamples + 1)
