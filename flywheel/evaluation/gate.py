"""The gate: whether a candidate may replace the incumbent, from samples alone, with its reasons.

`promote` needs a clear improvement, `reject` is clear harm or a policy that does nothing right,
`hold` is everything that cannot be told apart from no change, and `insufficient_evidence` is
evidence that would not carry any of these: too few tasks, spoilt or contradictory records, a
candidate that is the incumbent. Pairs that infrastructure spoilt count for nobody. Nothing broken
ever promotes.

A pure function of what is stored: any worker decides the same, years later too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flywheel.evaluation.metrics import score
from flywheel.evaluation.statistics import (
    chance_of,
    clustered_interval,
    differences,
    pairs,
)
from flywheel.recipe import GateRecipe
from flywheel.records import Decision, Interval, Outcome, Sample, Score
from runtime.run import RunState

MOST_LOST = 0.5
"""Where more than this share of the pairs has no valid sample, what is left is a selection."""

JUDGED = frozenset({RunState.ACCEPTED, RunState.REJECTED, RunState.TIMED_OUT})
"""States that follow from a verdict; all others say nothing about the policy."""

UNKNOWN = Score(passed=0, n=0, tasks=0, rate=0.0, low=0.0, high=1.0)

Pairs = Mapping[str, Sequence[tuple[Sample, Sample]]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the valid pairs say."""

    pairs: Pairs
    incumbent: Score
    candidate: Score
    difference: Interval
    chance: float
    """p-value of no difference."""


def decide(
    incumbent: Sequence[Sample],
    candidate: Sequence[Sample],
    recipe: GateRecipe,
    *,
    candidate_digest: str | None,
    incumbent_digest: str | None,
) -> Decision:
    """What the samples of both arms say; digests are the adapters', None the base model alone.

    Scores and difference are of the valid pairs; without evidence they are 0 of 0, and None.
    """
    if problems := _unusable(incumbent, candidate, candidate_digest, incumbent_digest):
        return _without_evidence(problems)
    paired = pairs(incumbent, candidate)
    wanted = max(len(incumbent), len(candidate))
    if not paired:
        return _without_evidence(["There is no valid pair of samples to compare."])
    found = _weighed(paired, recipe)
    if short := _shortage(found, wanted, recipe):
        return _decision(Outcome.INSUFFICIENT_EVIDENCE, short, found)
    outcome, reason = _judged(found, recipe)
    return _decision(outcome, [reason, *_remarks(found, wanted)], found)


# ---------------------------------------------------------------- can it be judged at all?


def _unusable(
    incumbent: Sequence[Sample],
    candidate: Sequence[Sample],
    candidate_digest: str | None,
    incumbent_digest: str | None,
) -> list[str]:
    """Why the samples cannot be compared; empty where they can."""
    if candidate_digest == incumbent_digest:
        return ["The candidate is the incumbent: both are the same weights."]
    arms = {"incumbent": incumbent, "candidate": candidate}
    if silent := [name for name, samples in arms.items() if not samples]:
        return [f"There are no samples of the {' and the '.join(silent)}."]
    faults = [fault for name, samples in arms.items() for fault in _faults(name, samples)]
    if {s.policy_id for s in incumbent} & {s.policy_id for s in candidate}:
        faults.append("Both arms were served by the same policy.")
    return faults


def _faults(arm: str, samples: Sequence[Sample]) -> list[str]:
    """What is wrong with the records of one arm, one sentence each kind."""
    kinds: dict[str, Callable[[Sample], bool]] = {
        "say neither passed nor failed": lambda s: not _is_verdict(s),
        "carry numbers that are not finite": lambda s: not _finite(s),
        "count although none of them was judged": lambda s: s.valid and s.state not in JUDGED,
        "passed without having been accepted": _contradictory,
    }
    faults: list[str] = []
    for what, wrong in kinds.items():
        if runs := [sample.run_id for sample in samples if wrong(sample)]:
            faults.append(f"{len(runs)} runs of the {arm} {what}, such as {runs[0]}.")
    if len({(s.task_id, s.member) for s in samples}) < len(samples):
        faults.append(f"The {arm} has several samples of one task and member.")
    if len({s.policy_id for s in samples}) > 1:
        faults.append(f"The {arm}'s samples come from several policies.")
    return faults


def _is_verdict(sample: Sample) -> bool:
    flags: list[object] = [sample.passed, sample.valid]
    return all(isinstance(flag, bool) for flag in flags)  # a record may be built unvalidated


def _finite(sample: Sample) -> bool:
    return all(map(math.isfinite, (sample.reward or 0.0, sample.seconds, sample.cost)))


def _contradictory(sample: Sample) -> bool:
    return sample.valid and sample.passed and sample.state is not RunState.ACCEPTED


# ---------------------------------------------------------------- weighing


def _weighed(paired: Pairs, recipe: GateRecipe) -> Evidence:
    by_task = differences(paired)
    both = [pair for of_task in paired.values() for pair in of_task]
    return Evidence(
        pairs=paired,
        incumbent=score([old for old, _ in both], confidence=recipe.confidence),
        candidate=score([new for _, new in both], confidence=recipe.confidence),
        difference=clustered_interval(by_task, bounds=(-1.0, 1.0), confidence=recipe.confidence),
        chance=chance_of(by_task),
    )


def _shortage(found: Evidence, wanted: int, recipe: GateRecipe) -> list[str]:
    tasks, n = len(found.pairs), found.candidate.n
    if tasks < recipe.minimum_tasks:
        return [
            f"Only {tasks} tasks have a valid pair of samples; "
            f"at least {recipe.minimum_tasks} are needed to judge."
        ]
    if n < (1 - MOST_LOST) * wanted:
        return [f"Only {n} of {wanted} pairs of samples are valid; most were lost."]
    return []


def _judged(found: Evidence, recipe: GateRecipe) -> tuple[Outcome, str]:
    """The outcome and its deciding reason, where there is evidence enough."""
    seen = _seen(found, recipe)
    if found.difference.high < -recipe.harm:
        return Outcome.REJECT, f"The candidate is clearly worse: {seen}."
    if found.candidate.passed == 0 and not _indistinguishable(found):
        n, tasks = found.candidate.n, found.candidate.tasks
        return Outcome.REJECT, f"The candidate passes nothing: 0 of {n} samples on {tasks} tasks."
    if found.difference.low <= 0:
        return Outcome.HOLD, f"There is no clear improvement: {seen}."
    if found.chance > 1 - recipe.confidence:
        differ = sum(any(old.passed != new.passed for old, new in p) for p in found.pairs.values())
        return Outcome.HOLD, (
            f"Only {differ} tasks differ, which may be chance (p = {found.chance:.2f}): {seen}."
        )
    return Outcome.PROMOTE, f"The candidate is clearly better: {seen}."


def _indistinguishable(found: Evidence) -> bool:
    """Every pair ended alike after equally many tokens and calls, as copies do on equal seeds."""
    return all(_trace(old) == _trace(new) for p in found.pairs.values() for old, new in p)


def _trace(sample: Sample) -> tuple[RunState, bool, int, int]:
    return sample.state, sample.passed, sample.sampled_tokens, sample.tool_calls


# ---------------------------------------------------------------- saying so


def _seen(found: Evidence, recipe: GateRecipe) -> str:
    interval = found.difference
    return (
        f"it passes {_of(found.candidate)}, the incumbent {_of(found.incumbent)}, a difference of "
        f"{_points(interval.value)} points ({recipe.confidence:.0%} interval "
        f"{_points(interval.low)} to {_points(interval.high)}, "
        f"{found.candidate.n} pairs on {len(found.pairs)} tasks)"
    )


def _of(score: Score) -> str:
    return f"{score.passed} of {score.n} ({score.rate:.0%})"


def _points(share: float) -> str:
    """In percentage points, with its sign; no minus before zero."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def _remarks(found: Evidence, wanted: int) -> list[str]:
    lost = wanted - found.candidate.n
    if not lost:
        return []
    return [f"{lost} of {wanted} pairs were left out because infrastructure failed in them."]


def _without_evidence(problems: list[str]) -> Decision:
    return _decision(Outcome.INSUFFICIENT_EVIDENCE, problems, None)


def _decision(outcome: Outcome, reasons: list[str], found: Evidence | None) -> Decision:
    return Decision(
        outcome=outcome,
        reasons=reasons,
        incumbent=found.incumbent if found else UNKNOWN,
        candidate=found.candidate if found else UNKNOWN,
        difference=found.difference if found else None,
    )
