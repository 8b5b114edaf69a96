"""The gate: what it lets through, what it holds, and that nothing broken ever promotes."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.evaluation.gate import decide
from flywheel.recipe import GateRecipe
from flywheel.records import Decision, Outcome, Sample
from runtime.run import PolicyId, RunState
from tests.fixtures.samples import alike, arm_of, drawn, sample

RECIPE = GateRecipe(tasks=24, samples=4, minimum_tasks=16, confidence=0.95, harm=0.05)


def decided(old: list[Sample], new: list[Sample]) -> Decision:
    return decide(old, new, RECIPE, candidate_digest="sha256:new", incumbent_digest="sha256:old")


def arms(old_rate: float, new_rate: float, tasks: int = 24, seed: int = 1):
    dice = random.Random(seed)
    return drawn(dice, tasks, 4, old_rate, "old"), drawn(dice, tasks, 4, new_rate, "new")


def changed(samples: list[Sample], index: int, **changes: Any) -> list[Sample]:
    """One record as no validation would let it be."""
    return [s.model_copy(update=changes) if n == index else s for n, s in enumerate(samples)]


# ---------------------------------------------------------------- honest arms


def test_a_clear_improvement_is_promoted_with_its_numbers():
    decision = decided(*arms(0.0, 0.6))
    assert decision.outcome is Outcome.PROMOTE
    assert decision.difference is not None
    assert decision.difference.low > 0.3
    assert decision.incumbent.passed == 0
    reason = decision.reasons[0]
    assert f"{decision.candidate.passed} of 96" in reason
    assert "the incumbent 0 of 96 (0%)" in reason
    assert "95% interval +" in reason


def test_a_perfect_candidate_over_a_hopeless_incumbent_is_promoted():
    decision = decided(alike(16, 1, False, "old"), alike(16, 1, True, "new"))
    assert decision.outcome is Outcome.PROMOTE
    assert decision.difference is not None
    assert decision.difference.value == 1
    assert 0 < decision.difference.low < 1


def test_a_sabotaged_adapter_is_rejected():
    decision = decided(*arms(0.5, 0.0))
    assert decision.outcome is Outcome.REJECT
    assert "clearly worse" in decision.reasons[0]


def test_an_adapter_that_does_harm_is_rejected():
    decision = decided(*arms(0.8, 0.3))
    assert decision.outcome is Outcome.REJECT


def test_a_candidate_that_passes_nothing_is_rejected_even_where_the_incumbent_does_not_either():
    wordy = [s.model_copy(update={"sampled_tokens": 90}) for s in alike(24, 4, False, "new")]
    decision = decided(alike(24, 4, False, "old"), wordy)
    assert decision.outcome is Outcome.REJECT
    assert decision.reasons == ["The candidate passes nothing: 0 of 96 samples on 24 tasks."]


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_an_identical_copy_is_held(rate: float):
    old, _ = arms(rate, rate)
    copy = [s.model_copy(update={"policy_id": PolicyId("new")}) for s in old]
    decision = decided(old, copy)
    assert decision.outcome is Outcome.HOLD
    assert decision.difference is not None
    assert decision.difference.value == 0


@pytest.mark.parametrize("digest", ["sha256:same", None])
def test_the_incumbent_itself_is_no_candidate(digest: str | None):
    old, new = arms(0.0, 0.9)
    decision = decide(old, new, RECIPE, candidate_digest=digest, incumbent_digest=digest)
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert "same weights" in decision.reasons[0]


def test_five_tasks_are_insufficient_however_good():
    decision = decided(alike(5, 4, False, "old"), alike(5, 4, True, "new"))
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert decision.reasons == [
        "Only 5 tasks have a valid pair of samples; at least 16 are needed to judge."
    ]


def test_a_small_difference_is_held_and_says_what_was_seen():
    decision = decided(*arms(0.5, 0.53, seed=4))
    assert decision.outcome is Outcome.HOLD
    assert "no clear improvement" in decision.reasons[0]
    assert "points" in decision.reasons[0]


def test_four_lucky_tasks_of_sixteen_may_be_chance():
    new = arm_of({f"t{n}": [n < 4] * 4 for n in range(16)}, "new")
    decision = decided(alike(16, 4, False, "old"), new)
    assert decision.outcome is Outcome.HOLD
    assert decision.difference is not None
    assert decision.difference.low > 0
    assert decision.reasons[0].startswith("Only 4 tasks differ, which may be chance (p = 0.1")


def test_an_honest_twenty_points_mostly_pass_and_nothing_rarely_does():
    better = [decided(*arms(0.0, 0.2, seed=seed)).outcome for seed in range(40)]
    equal = [decided(*arms(0.4, 0.4, seed=seed)).outcome for seed in range(100)]
    assert better.count(Outcome.PROMOTE) >= 32
    assert equal.count(Outcome.PROMOTE) <= 6
    assert equal.count(Outcome.REJECT) <= 4


# ---------------------------------------------------------------- what infrastructure spoilt


def test_spoilt_pairs_count_for_nobody():
    """A candidate that crashes wherever it would fail gains nothing by it, and it is said."""
    old = alike(24, 2, True, "old")
    new = [sample(f"t{n}", m, m == 0, arm="new", valid=m == 0) for n in range(24) for m in (0, 1)]
    decision = decided(old, new)
    assert decision.outcome is Outcome.HOLD
    assert (decision.incumbent.n, decision.candidate.n) == (24, 24)
    assert decision.reasons[1].startswith("24 of 48 pairs were left out")


def test_where_most_pairs_are_lost_the_rest_is_a_selection():
    old = alike(24, 4, False, "old")
    new = [sample(f"t{n}", m, True, arm="new", valid=m == 0) for n in range(24) for m in range(4)]
    decision = decided(old, new)
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert decision.reasons == ["Only 24 of 96 pairs of samples are valid; most were lost."]


@pytest.mark.parametrize("missing", ["old", "new", "both", "invalid", "elsewhere"])
def test_no_samples_are_no_evidence(missing: str):
    old, new = arms(0.0, 0.9)
    if missing == "invalid":
        new = [sample(s.task_id, s.member, True, arm="new", valid=False) for s in new]
    if missing == "elsewhere":
        new = [s.model_copy(update={"task_id": f"other-{s.task_id}"}) for s in new]
    old = [] if missing in ("old", "both") else old
    new = [] if missing in ("new", "both") else new
    decision = decided(old, new)
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert decision.difference is None
    assert decision.candidate.n == 0
    assert len(decision.reasons) == 1


# ---------------------------------------------------------------- broken records


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reward": float("nan")}, "not finite"),
        ({"seconds": float("inf")}, "not finite"),
        ({"cost": float("nan")}, "not finite"),
        ({"passed": float("nan")}, "neither passed nor failed"),
        ({"passed": None}, "neither passed nor failed"),
        ({"valid": "yes"}, "neither passed nor failed"),
        ({"state": RunState.RUNNING, "passed": False}, "none of them was judged"),
        ({"state": RunState.ERROR, "passed": False}, "none of them was judged"),
        ({"state": RunState.TIMED_OUT, "passed": True}, "without having been accepted"),
        ({"member": 1}, "several samples of one task and member"),
        ({"policy_id": PolicyId("third")}, "several policies"),
    ],
)
@pytest.mark.parametrize("arm", [0, 1])
def test_a_broken_record_never_promotes(arm: int, changes: dict[str, Any], complaint: str):
    both = [alike(24, 4, False, "old"), alike(24, 4, True, "new")]
    assert decided(*both).outcome is Outcome.PROMOTE
    both[arm] = changed(both[arm], 0, **changes)
    decision = decided(*both)
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert any(complaint in reason for reason in decision.reasons)


def test_arms_served_by_one_policy_are_no_comparison():
    decision = decided(alike(24, 4, False, "one"), alike(24, 4, True, "one"))
    assert decision.outcome is Outcome.INSUFFICIENT_EVIDENCE
    assert "same policy" in decision.reasons[0]


BROKEN = st.sampled_from([True, False, None, float("nan"), 1, "yes"])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), BROKEN, BROKEN), max_size=30),
    st.floats(allow_nan=True),
)
@settings(max_examples=60, deadline=None)
def test_whatever_comes_in_the_gate_answers_and_few_tasks_never_promote(
    rows: list[tuple[int, int, Any, Any]], reward: float
):
    def arm(name: str) -> list[Sample]:
        return [
            sample(f"t{task}", member, True, arm=name).model_copy(
                update={"passed": passed, "valid": valid, "reward": reward}
            )
            for task, member, passed, valid in rows
        ]

    assert decided(arm("old"), arm("new")).outcome is Outcome.INSUFFICIENT_EVIDENCE


def test_equal_evidence_gives_equal_decisions_in_any_order():
    old, new = arms(0.3, 0.5)
    assert decided(old[::-1], new[::-1]) == decided(old, new)
