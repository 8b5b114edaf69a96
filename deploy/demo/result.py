"""What one demo measured: the content of `demo-report.json`, and how samples become it.

`measure` turns the report runs of each stage into scores, paired differences, spending and
outcomes; the demo adds what else it saw and writes the whole as a `DemoResult`. The outcomes of
every task and member stay in it, so that several seeds can be pooled later, on any machine, from
their files alone. Pure: no clock, no database, seeded.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from flywheel.evaluation.metrics import Spent, best_of, score, score_of, spent, together
from flywheel.evaluation.statistics import clustered_interval
from flywheel.records import Interval, Outcome, Sample, Score
from runtime.errors import InputError
from runtime.run import Record

StageKey = Literal["base", "sft", "grpo"]
STAGES: tuple[StageKey, ...] = ("base", "sft", "grpo")
Outcomes = dict[str, list[bool | None]]
"""Task → whether each member passed, in order of members; None where infrastructure failed."""

BEST_OF = 4
"""Tries of the base model that stand beside the trained policy's one."""


class Baselines(Record):
    """Rates in [0, 1] on the report tasks; None where one cannot be measured."""

    no_lookup: float | None = None
    """The best that can be told from the message alone."""
    keyword: float | None = None
    """Naive Bayes on words, trained on the same corrections as the policy."""
    best_of_4: float | None = None
    """The base model, counted right if any of four tries is."""


class GrpoStep(Record):
    """One optimiser step of GRPO."""

    step: int
    """From 1, over all rounds."""
    reward: float
    """Mean reward of the runs it was trained on, zero-variance groups included."""
    groups: int
    """Groups sampled for it."""
    groups_with_signal: int
    """Those whose members did not all earn the same."""
    ratio: float | None = None
    """Mean importance ratio of policy to behaviour; 1 is on-policy."""
    kl: float | None = None
    """Mean estimated KL divergence from the behaviour policy, nats per token; 0 is on-policy."""
    update_kl: float | None = None
    """The same after the step: how far it moved the policy."""
    update_ratio: float | None = None
    """The largest importance ratio of a token after the step."""


class Fixed(Record):
    """A practice failure that the new policy now solves."""

    message: str
    before: str
    """What the run did then: its answer, or why it had none."""
    after: str
    """What the new policy answered."""
    run_before: str | None = None
    run_after: str | None = None


class DemoGate(Record):
    outcome: Outcome | Literal["nothing_to_learn"]
    reasons: list[str]


class Practice(Record):
    """What an application and a support team did before the cycle."""

    submitted: int
    accepted: int
    """By a person's judgement: the run's answer was what the correction says."""
    corrections: int


class Machine(Record):
    cpu: str
    cores: int
    load: float
    """1-minute load average when the demo began."""
    versions: dict[str, str] = Field(default_factory=dict[str, str])


class Measured(Record):
    """What the report runs alone say."""

    stages: dict[StageKey, Score]
    difference: Interval | None
    """Last stage minus base, paired by task and member."""
    grpo_difference: Interval | None
    """GRPO's own part: after GRPO minus after SFT, paired."""
    best_of_4: float | None
    spent: dict[StageKey, Spent]
    cost_per_accepted: float | None
    """US dollars of the last stage's runs per accepted one."""
    outcomes: dict[StageKey, Outcomes]


class DemoResult(Record):
    """One demo, whole."""

    seed: int
    level: str
    model: str
    profile: str | None = None
    """Profile of the recipe (`fast`), None for the recipe as it stands."""
    messages: Literal["generated", "real"] = "generated"
    splits: dict[str, int]
    """Split → tasks used of it."""
    stages: dict[StageKey, Score]
    """Sampled pass@1 on the report split; a stage the cycle did not reach is absent."""
    difference: Interval | None
    grpo_difference: Interval | None = None
    baselines: Baselines
    groups_with_signal: float | None = None
    """Share of GRPO's groups whose members did not all earn the same."""
    training: list[GrpoStep] = Field(default_factory=list[GrpoStep])
    fixed: list[Fixed] = Field(default_factory=list[Fixed])
    retried: int = 0
    """Practice failures that were submitted again; `fixed` are those now accepted."""
    gate: DemoGate
    adapter: str | None = None
    """Name of the adapter that was promoted, or else held back."""
    practice: Practice
    sampled_tokens: int
    """By everything the demo caused."""
    longest_prompt: int | None = None
    """Tokens."""
    seconds: dict[str, float]
    """Stage → wall seconds, in order."""
    cost_per_accepted: float | None = None
    spent: dict[StageKey, Spent] = Field(default_factory=dict[StageKey, Spent])
    machine: Machine
    outcomes: dict[StageKey, Outcomes] = Field(default_factory=dict[StageKey, Outcomes])


def measure(
    samples: Mapping[StageKey, Sequence[Sample]], *, members: int = 2, seed: int = 0
) -> Measured:
    """Scores, differences and spending of the report runs.

    `members` are the samples of each task that all stages share, 0 to members - 1; further ones
    (of the base) count for best-of-4 and nothing else. Raises InputError where a stage has two
    samples of one task and member.
    """
    reached: list[StageKey] = [stage for stage in STAGES if stage in samples]
    shared: dict[StageKey, list[Sample]] = {
        stage: [sample for sample in samples[stage] if sample.member < members] for stage in reached
    }
    outcomes: dict[StageKey, Outcomes] = {s: outcomes_of(shared[s], members) for s in reached}
    spending: dict[StageKey, Spent] = {s: spent(shared[s]) for s in reached}
    tried = best_of(samples.get("base", ()), BEST_OF, seed=seed)
    last = reached[-1] if reached else "base"
    return Measured(
        stages={stage: score(shared[stage], seed=seed) for stage in reached},
        difference=pooled_difference([outcomes], "base", last, seed=seed),
        grpo_difference=pooled_difference([outcomes], "sft", "grpo", seed=seed),
        best_of_4=tried.rate if tried.n else None,
        spent=spending,
        cost_per_accepted=spending[last].cost_per_accepted if reached else None,
        outcomes=outcomes,
    )


class PooledResult(Record):
    """Several demos of one level, as one experiment."""

    results: list[DemoResult]
    """In order of seed."""
    stages: dict[StageKey, Score]
    difference: Interval | None
    """Last stage minus base, over all seeds."""
    grpo_difference: Interval | None
    groups_with_signal: float | None
    """Over all groups of all seeds."""
    spent: dict[StageKey, Spent]


def pool_seeds(results: Sequence[DemoResult], *, seed: int = 0) -> PooledResult:
    """All seeds together, from their outcomes.

    Raises InputError for no results, a seed that occurs twice, and several levels or models.
    """
    ordered = sorted(results, key=lambda result: result.seed)
    _check_poolable(ordered)
    all_outcomes = [result.outcomes for result in ordered]
    reached: list[StageKey] = [s for s in STAGES if all(s in each for each in all_outcomes)]
    last = reached[-1] if reached else "base"
    steps = [step for result in ordered for step in result.training]
    groups = sum(step.groups for step in steps)
    return PooledResult(
        results=ordered,
        stages={stage: _pooled_score(all_outcomes, stage, seed) for stage in reached},
        difference=pooled_difference(all_outcomes, "base", last, seed=seed),
        grpo_difference=pooled_difference(all_outcomes, "sft", "grpo", seed=seed),
        groups_with_signal=sum(s.groups_with_signal for s in steps) / groups if groups else None,
        spent={s: together([r.spent[s] for r in ordered if s in r.spent]) for s in reached},
    )


def _check_poolable(results: Sequence[DemoResult]) -> None:
    if not results:
        raise InputError("no demo results to pool; give at least one demo-report.json")
    seeds = [result.seed for result in results]
    if len(set(seeds)) < len(seeds):
        raise InputError(f"seeds {seeds} occur twice; pool one result of each seed")
    if len(kinds := {(r.level, r.model, r.messages, r.profile) for r in results}) > 1:
        told = "; ".join(sorted(", ".join(map(str, kind)) for kind in kinds))
        raise InputError(f"results of several kinds ({told}); pool those of one kind")


def _pooled_score(
    all_outcomes: Sequence[Mapping[StageKey, Outcomes]], stage: StageKey, seed: int
) -> Score:
    values = {
        f"{number}/{task}": [bool(passed) for passed in members if passed is not None]
        for number, outcomes in enumerate(all_outcomes)
        for task, members in outcomes[stage].items()
    }
    return score_of({task: known for task, known in values.items() if known}, seed=seed)


def outcomes_of(samples: Sequence[Sample], members: int) -> Outcomes:
    """Every task's members in order, None where there is no valid sample."""
    found: Outcomes = {}
    for sample in samples:
        row = found.setdefault(sample.task_id, [None] * members)
        if sample.valid:
            row[sample.member] = sample.passed
    return dict(sorted(found.items()))


def pooled_difference(
    seeds: Sequence[Mapping[StageKey, Outcomes]],
    before: StageKey,
    after: StageKey,
    *,
    seed: int = 0,
) -> Interval | None:
    """`after` minus `before` in pass@1 over all seeds: paired by seed, task and member, resampled
    by seed and task. None without a pair, and between a stage and itself."""
    if before == after:
        return None
    values: dict[str, list[float]] = {}
    for number, outcomes in enumerate(seeds):
        old, new = outcomes.get(before, {}), outcomes.get(after, {})
        for task in sorted(old.keys() & new.keys()):
            pairs = zip(old[task], new[task], strict=False)
            both = [float(b) - float(a) for a, b in pairs if a is not None and b is not None]
            if both:
                values[f"{number}/{task}"] = both
    return clustered_interval(values, bounds=(-1.0, 1.0), seed=seed) if values else None
