"""From logits to one token per sequence, with the log-probability it was sampled at.

Tokens are drawn by inverting the cumulative distribution at a number that comes from the request's
own generator, so a seed gives the same draws whoever shares the batch. What can differ is the last
bits of the logits, because the order of fp32 sums depends on the batch: a draw that falls within
about 1e-6 of the border between two tokens may go to the other one.

Axis suffixes: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRule:
    temperature: float
    """0 takes the most likely token; logprobs are then those of temperature 1."""
    top_p: float
    top_logprobs: int = 0
    """How many alternatives to report per token."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token. `logprob` is ln softmax(logits / temperature), before top_p."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]


def draw(logits_B_V: Tensor, rules: Sequence[SamplingRule], points: Sequence[float]) -> list[Drawn]:
    """One token per row; `points` are uniform in [0, 1), one per row."""
    temperatures_B = torch.tensor([r.temperature or 1.0 for r in rules])
    logprobs_B_V = torch.log_softmax(logits_B_V / temperatures_B[:, None], dim=-1)
    tokens_B = _invert(_kept(logprobs_B_V, rules), torch.tensor(points, dtype=torch.float64))
    greedy_B = torch.tensor([r.temperature == 0 for r in rules])
    tokens_B = torch.where(greedy_B, logprobs_B_V.argmax(-1), tokens_B)
    chosen_B = logprobs_B_V.gather(-1, tokens_B[:, None])[:, 0]
    return [
        Drawn(token, logprob, _alternatives(row_V, rule.top_logprobs))
        for token, logprob, row_V, rule in zip(
            tokens_B.tolist(), chosen_B.tolist(), logprobs_B_V, rules, strict=True
        )
    ]


def _kept(logprobs_B_V: Tensor, rules: Sequence[SamplingRule]) -> Tensor:
    """Probabilities (float64); outside the top_p nucleus (Holtzman et al. 2020) they are 0."""
    probabilities_B_V = logprobs_B_V.double().exp_()
    for row_V, rule in zip(probabilities_B_V, rules, strict=True):
        if rule.top_p < 1:
            ordered_V, order_V = row_V.sort(descending=True)
            before_V = ordered_V.cumsum(-1) - ordered_V
            row_V[order_V[before_V >= rule.top_p]] = 0.0
    return probabilities_B_V


def _invert(probabilities_B_V: Tensor, points_B: Tensor) -> Tensor:
    cumulative_B_V = probabilities_B_V.cumsum(-1)
    targets_B = points_B * cumulative_B_V[:, -1]
    tokens_B = torch.searchsorted(cumulative_B_V, targets_B[:, None], right=True)[:, 0]
    return tokens_B.clamp_(max=probabilities_B_V.shape[1] - 1)


def _alternatives(row_V: Tensor, count: int) -> list[tuple[int, float]]:
    if not count:
        return []
    values, tokens = row_V.topk(count)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
