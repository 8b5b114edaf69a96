"""Intervals and tests over tasks: what they promise on data whose truth is known."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.evaluation.statistics import (
    chance_of,
    clustered_interval,
    differences,
    expanded_tail,
    paired_difference,
    pairs,
    student_quantile,
)
from flywheel.records import Sample
from runtime.errors import InputError
from tests.fixtures.samples import alike, arm_of, drawn, sample

OUTCOMES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)
ARMS = st.tuples(OUTCOMES, OUTCOMES)
few = settings(max_examples=40, deadline=None)


def difference(old: list[Sample], new: list[Sample], **options: int):
    return paired_difference(old, new, **{"resamples": 500, **options})


# ---------------------------------------------------------------- intervals


@given(OUTCOMES)
@few
def test_an_interval_holds_its_value_and_stays_in_bounds(outcomes: dict[str, list[bool]]):
    found = clustered_interval(outcomes, resamples=500)
    everything = [passed for members in outcomes.values() for passed in members]
    assert found.value == pytest.approx(sum(everything) / len(everything))
    assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize(("tasks", "high"), [(16, 0.194), (24, 0.138), (64, 0.057), (1, 0.794)])
def test_a_policy_that_never_passes_has_wilsons_upper_end(tasks: int, high: float):
    found = clustered_interval({str(n): [0.0, 0.0] for n in range(tasks)})
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(high, abs=0.001)


def test_more_samples_of_the_same_tasks_do_not_make_agreement_surer():
    once = clustered_interval({str(n): [1.0] for n in range(20)})
    often = clustered_interval({str(n): [1.0] * 50 for n in range(20)})
    assert (once.low, once.high) == (often.low, often.high)
    assert once.low < 0.9


def test_samples_of_one_task_are_one_piece_of_evidence():
    dice = random.Random(3)
    tasks = {str(n): [dice.random() < 0.5] for n in range(30)}
    copied = {task: passed * 10 for task, passed in tasks.items()}
    one, ten = clustered_interval(tasks), clustered_interval(copied)
    assert ten.high - ten.low == pytest.approx(one.high - one.low, rel=0.01)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("tasks", [16, 64])
def test_intervals_cover_the_truth_about_as_often_as_they_say(rate: float, tasks: int):
    dice = random.Random(f"coverage {rate} {tasks}")
    covered = 0
    for _ in range(300):
        arm = drawn(dice, tasks, 2, rate, "a")
        values: dict[str, list[bool]] = {}
        for each in arm:
            values.setdefault(each.task_id, []).append(each.passed)
        found = clustered_interval(values, resamples=600, seed=dice.randrange(1 << 30))
        covered += found.low <= rate <= found.high
    assert 0.895 <= covered / 300 <= 0.995


def test_paired_intervals_cover_no_difference_about_as_often_as_they_say():
    dice = random.Random("paired coverage")
    wrong = {-1: 0, 1: 0}
    for _ in range(300):
        old, new = (drawn(dice, 24, 4, 0.4, arm) for arm in "ab")
        found = difference(old, new, seed=dice.randrange(1 << 30))
        assert found is not None
        wrong[1] += found.low > 0
        wrong[-1] += found.high < 0
    assert wrong[1] <= 16
    assert wrong[-1] <= 16


def test_ten_thousand_resamples_take_less_than_a_tenth_of_a_second():
    values = {str(n): [0.0, 1.0, float(n % 2), float(n % 3 == 0)] for n in range(64)}
    clustered_interval(values)
    began = time.process_time()
    clustered_interval(values)
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "no tasks"),
        ({"a": [1.0], "b": []}, "tasks without values: b"),
        ({"a": [1.0], "b": [float("nan")]}, "finite"),
        ({"a": [float("inf")]}, "finite"),
    ],
)
def test_what_is_no_data_is_refused(values: dict[str, list[float]], complaint: str):
    with pytest.raises(InputError, match=complaint):
        clustered_interval(values)
    with pytest.raises(InputError, match=complaint):
        chance_of(values)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (15, 2.1314), (63, 1.9983)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, quantile: float):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, abs=0.004)


def test_tails_shrink_for_few_tasks_and_are_nominal_for_many():
    assert expanded_tail(100_000, 0.95) == pytest.approx(0.025, abs=1e-4)
    assert expanded_tail(8, 0.95) < expanded_tail(16, 0.95) < expanded_tail(64, 0.95) < 0.025


# ---------------------------------------------------------------- pairs


@given(OUTCOMES)
@few
def test_an_identical_copy_differs_by_exactly_nothing(outcomes: dict[str, list[bool]]):
    found = difference(arm_of(outcomes, "a"), arm_of(outcomes, "b"))
    assert found is not None
    assert found.value == 0
    assert found.low < 0 < found.high


@given(ARMS)
@few
def test_swapping_the_arms_turns_the_sign(arms: tuple[dict[str, list[bool]], ...]):
    old, new = arm_of(arms[0], "a"), arm_of(arms[1], "b")
    there, back = difference(old, new), difference(new, old)
    if there is None or back is None:
        assert there is back
        return
    assert back.value == -there.value
    assert (back.low, back.high) == (pytest.approx(-there.high), pytest.approx(-there.low))


@given(ARMS, st.randoms(use_true_random=False))
@few
def test_the_order_of_samples_does_not_matter(
    arms: tuple[dict[str, list[bool]], ...], dice: random.Random
):
    old, new = arm_of(arms[0], "a"), arm_of(arms[1], "b")
    before = difference(old, new)
    dice.shuffle(old)
    dice.shuffle(new)
    assert difference(old, new) == before


def test_only_what_both_arms_have_is_compared():
    old = [sample("x", 0, True), sample("x", 1, False), sample("y", 0, True)]
    new = [sample("x", 0, False, arm="b"), sample("z", 0, True, arm="b")]
    assert differences(pairs(old, new)) == {"x": [-1.0]}
    assert paired_difference(old, [sample("z", 0, True, arm="b")]) is None
    assert paired_difference([], []) is None


@pytest.mark.parametrize("spoilt", ["old", "new"])
def test_what_infrastructure_spoilt_takes_its_partner_along(spoilt: str):
    old = [sample("x", 0, True, valid=spoilt != "old"), sample("x", 1, False)]
    new = [sample("x", 0, True, arm="b", valid=spoilt != "new"), sample("x", 1, True, arm="b")]
    assert differences(pairs(old, new)) == {"x": [1.0]}


def test_a_member_that_occurs_twice_is_refused():
    twice = [sample("x", 0, True), sample("x", 0, False)]
    with pytest.raises(InputError, match="both member 0 of task x"):
        paired_difference(twice, alike(1, 1, True, "b"))


# ---------------------------------------------------------------- chance


@pytest.mark.parametrize(
    ("better", "worse", "exact"), [(4, 0, 0.125), (6, 0, 0.03125), (5, 5, 1.0), (0, 0, 1.0)]
)
def test_few_differing_tasks_have_the_sign_tests_chance(better: int, worse: int, exact: float):
    signs = [1.0] * better + [-1.0] * worse + [0.0] * (16 - better - worse)
    found = chance_of({str(n): [sign] for n, sign in enumerate(signs)})
    assert found == pytest.approx(exact, abs=0.015)


def test_chance_is_rarely_small_where_nothing_differs():
    dice = np.random.default_rng(5)
    small = 0
    for seed in range(300):
        values = {str(n): [float(dice.integers(-1, 2)) for _ in range(3)] for n in range(20)}
        small += chance_of(values, resamples=600, seed=seed) <= 0.05
    assert small <= 27
