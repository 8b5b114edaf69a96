"""Log-probabilities of a batch of trajectories, with every shared prefix computed once.

The trunk (what all rows share) goes through the model alone; its keys and values, with their
gradients, serve every lane. Then all lanes go through together under a tree mask. Logits exist only
where a token is asked for. The result is that of the plain forward pass up to rounding; rounding
aside, nothing here is an approximation. Works with any decoder of transformers that takes a 4-D
mask, adapter or not, on CPU or an accelerator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from flywheel.training.token_tree import ROOT, Layout, TokenTree, layout_of

Result = TypeVar("Result")

PLACES_AT_ONCE = 1024
"""Places whose activations are held at once: about 4 GB for a 135M model in fp32."""
HEAD_COST = 4
"""A row of logits weighs about as much as so many places in a small model."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says of the tokens asked for."""

    logprobs_B_T: Tensor
    """[rows, longest row] natural log; 0.0 where nothing was asked."""
    entropies_B_T: Tensor
    """Same shape, nats, without gradient."""


def score(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    at_once: int = PLACES_AT_ONCE,
) -> Scores:
    """Score the tokens of `rows` (ids) at the places where `wanted` is 1.

    A row's first token has nothing before it and scores 0.0. More places than `at_once` go through
    the model in several parts, each computed a second time when gradients are wanted: a quarter
    more time for memory that no longer grows with the batch.
    """
    tree = TokenTree.of(rows)
    hidden_N_D = _hidden(model, tree, layout_of(tree), at_once)
    places = [
        (row, position, path[position])
        for row, path in enumerate(tree.rows)
        for position in np.flatnonzero(wanted[row]).tolist()
        if tree.parents[path[position]] != ROOT
    ]
    nodes = sorted({node for _, _, node in places})
    logprobs_M, entropies_M = _head(model, hidden_N_D, tree, nodes, temperature, at_once)
    index = {node: at for at, node in enumerate(nodes)}
    at = torch.tensor([index[node] for _, _, node in places], device=hidden_N_D.device)
    shape = (len(rows), max(len(row) for row in rows))
    where = tuple(torch.tensor([p[axis] for p in places], device=at.device) for axis in (0, 1))
    empty = logprobs_M.new_zeros(shape)
    return Scores(empty.index_put(where, logprobs_M[at]), empty.index_put(where, entropies_M[at]))


# ---------------------------------------------------------------- hidden states


def _hidden(model: PreTrainedModel, tree: TokenTree, layout: Layout, at_once: int) -> Tensor:
    """[N, hidden] last hidden state of every node."""
    backbone: nn.Module = getattr(model, model.base_model_prefix)
    device = next(model.parameters()).device
    tokens, depths = (torch.tensor(x, device=device) for x in (tree.tokens, tree.depths))
    trunk = torch.tensor(layout.trunk, dtype=torch.long, device=device)
    cache = DynamicCache(config=model.config)
    parts: list[Tensor] = []
    if len(trunk):
        out = backbone(
            input_ids=tokens[None, trunk],
            position_ids=depths[None, trunk],
            cache=cache,
            use_cache=True,
        )
        parts.append(out.last_hidden_state[0])

    def through(first: int, last: int) -> Tensor:
        """[places, hidden] of some lanes."""
        nodes = torch.from_numpy(np.maximum(layout.lanes[first:last], 0)).to(device)
        out = backbone(
            input_ids=tokens[nodes],
            position_ids=depths[nodes],
            attention_mask=torch.from_numpy(layout.visible[first:last, None]).to(device),
            cache=_spread(cache, last - first, model) if len(trunk) else None,
            use_cache=len(trunk) > 0,
        )
        return out.last_hidden_state.flatten(0, 1)

    lanes, length = layout.lanes.shape
    parts += _in_parts(through, lanes, max(1, at_once // max(1, length)))
    return torch.cat(parts)[torch.from_numpy(layout.places).to(device)]


def _in_parts(compute: Callable[[int, int], Result], total: int, size: int) -> list[Result]:
    """`compute` over ranges of at most `size`; several of them keep nothing for their gradients."""
    ranges = [(first, min(first + size, total)) for first in range(0, total, size)]
    if len(ranges) == 1 or not torch.is_grad_enabled():
        return [compute(first, last) for first, last in ranges]
    return [
        cast(Result, checkpoint(compute, first, last, use_reentrant=False))
        for first, last in ranges
    ]


def _spread(cache: DynamicCache, lanes: int, model: PreTrainedModel) -> DynamicCache:
    """The trunk's keys and values for every lane; gradients flow back into the one trunk."""
    spread = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, DynamicLayer), "a decoder with attention in every layer"
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        spread.update(keys.expand(lanes, -1, -1, -1), values.expand(lanes, -1, -1, -1), index)
    return spread


# ---------------------------------------------------------------- logits


def _head(
    model: PreTrainedModel,
    hidden_N_D: Tensor,
    tree: TokenTree,
    nodes: Sequence[int],
    temperature: float,
    at_once: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each node after its parent, and the entropy there: [M], [M]."""
    head = cast(nn.Module, model.get_output_embeddings())
    parents = torch.tensor([tree.parents[node] for node in nodes], device=hidden_N_D.device)
    tokens = torch.tensor([tree.tokens[node] for node in nodes], device=hidden_N_D.device)
    hidden_M_D = hidden_N_D[parents]

    def scored(first: int, last: int) -> tuple[Tensor, Tensor]:
        logits_M_V = head(hidden_M_D[first:last]).float()
        if temperature != 1.0:
            logits_M_V = logits_M_V / temperature
        total_M = torch.logsumexp(logits_M_V, dim=-1)
        with torch.no_grad():
            mean_M = (torch.exp(logits_M_V - total_M[:, None]) * logits_M_V).sum(-1)
        chosen_M = logits_M_V.gather(-1, tokens[first:last, None])[:, 0]
        return chosen_M - total_M, (total_M - mean_M).detach()

    parts = _in_parts(scored, len(nodes), max(1, at_once // HEAD_COST))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
