"""Rates and spending: what counts, what does not, and what nothing divided by nothing is."""

import math

import pytest

from flywheel.evaluation.metrics import best_of, score, score_of, spent, together
from tests.fixtures.samples import alike, arm_of, sample


def test_a_score_counts_samples_and_tasks():
    found = score(arm_of({"x": [True, False], "y": [True, True], "z": [False]}))
    assert (found.passed, found.n, found.tasks) == (3, 5, 3)
    assert found.rate == pytest.approx(0.6)
    assert found.low < 0.6 < found.high


def test_what_infrastructure_spoilt_is_in_no_rate():
    good = arm_of({"x": [True, False], "y": [True, True]})
    spoilt = [sample("x", 7, True, valid=False), sample("w", 0, False, valid=False)]
    assert score([*good, *spoilt]) == score(good)
    assert score(spoilt).n == 0


def test_nothing_valid_is_zero_of_zero_and_may_be_anything():
    empty = score([])
    assert (empty.passed, empty.n, empty.rate, empty.low, empty.high) == (0, 0, 0, 0, 1)


def test_scores_from_bare_outcomes_are_the_same():
    outcomes = {"x": [True, False], "y": [False, False]}
    assert score_of(outcomes) == score(arm_of(outcomes))


def test_best_of_takes_the_first_k_by_member_whatever_their_order():
    arm = arm_of({"x": [False, True, False, False], "y": [False, False, False, True]})
    assert [best_of(arm, k).passed for k in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert best_of(arm[::-1], 2) == best_of(arm, 2)
    assert best_of(arm, 4).n == 2


def test_best_of_leaves_tasks_out_that_lack_a_try():
    arm = [*arm_of({"x": [False, True]}), sample("y", 0, True), sample("y", 1, True, valid=False)]
    found = best_of(arm, 2)
    assert (found.passed, found.n) == (1, 1)


def test_spending_counts_every_run_and_divides_by_the_accepted():
    arm = [*arm_of({"x": [True, False], "y": [True]}), sample("z", 0, False, valid=False)]
    found = spent(arm)
    assert (found.runs, found.accepted, found.sampled_tokens) == (4, 2, 80)
    assert found.tokens_per_accepted == 40
    assert found.seconds_per_accepted == pytest.approx(4.0)
    assert found.cost_per_accepted == pytest.approx(0.002)


def test_where_nothing_is_accepted_nothing_has_a_price():
    found = spent(alike(3, 2, passed=False))
    assert found.tokens_per_accepted is None
    assert found.cost_per_accepted is None
    assert math.isclose(found.cost, 0.006)


def test_spendings_add_up():
    first, second = arm_of({"x": [True, False]}), arm_of({"y": [True, True, False]})
    assert together([spent(first), spent(second)]) == spent([*first, *second])
