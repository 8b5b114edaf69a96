"""Sampling follows the distribution it reports."""

import math
from collections import Counter

import pytest
import torch

from runtime.engine.local.sampling import SamplingRule, draw

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def drawn(rule: SamplingRule, points: list[float]) -> list[int]:
    rows = LOGITS.expand(len(points), -1)
    return [d.token for d in draw(rows, [rule] * len(points), points)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    grid = [(n + 0.5) / 10_000 for n in range(10_000)]
    counts = Counter(drawn(SamplingRule(temperature, 1.0), grid))
    expected = torch.softmax(LOGITS / temperature, -1).tolist()
    for token, probability in enumerate(expected):
        assert counts[token] / 10_000 == pytest.approx(probability, abs=2e-4)


def test_logprobs_are_those_of_the_temperature() -> None:
    (only,) = draw(LOGITS[None], [SamplingRule(0.5, 0.3, top_logprobs=2)], [0.0])
    expected = torch.log_softmax(LOGITS / 0.5, -1)
    assert only.logprob == pytest.approx(expected[only.token].item())
    assert [token for token, _ in only.alternatives] == [0, 1]


def test_temperature_zero_is_greedy_whatever_the_point() -> None:
    assert drawn(SamplingRule(0.0, 1.0), [0.0, 0.5, 0.999]) == [0, 0, 0]


def test_the_nucleus_is_the_smallest_that_reaches_top_p() -> None:
    grid = [n / 200 for n in range(200)]
    assert set(drawn(SamplingRule(1.0, 0.6), grid)) == {0}
    assert set(drawn(SamplingRule(1.0, 0.7), grid)) == {0, 1}


def test_the_ends_of_the_interval_are_tokens() -> None:
    last = math.nextafter(1.0, 0.0)
    assert drawn(SamplingRule(1.0, 1.0), [0.0, last]) == [0, 3]
