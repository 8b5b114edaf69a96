"""The tree of tokens, and that a forward pass over it says what the plain one says."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from flywheel.training.shared_prefix import score
from flywheel.training.token_tree import ROOT, TokenTree, layout_of

Rows = list[list[int]]
rows_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=6
)


@given(rows_strategy)
def test_a_tree_holds_every_row_and_every_distinct_prefix_once(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    assert [[tree.tokens[node] for node in path] for path in tree.rows] == rows
    assert len(tree) == len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert tree.depths[node] == (0 if parent == ROOT else tree.depths[parent] + 1)


@given(rows_strategy)
def test_a_place_sees_its_ancestors_and_nothing_else(rows: Rows) -> None:
    tree = TokenTree.of(rows)
    layout = layout_of(tree)
    trunk = len(layout.trunk)
    for lane, nodes in enumerate(layout.lanes.tolist()):
        columns = [*layout.trunk, *nodes]
        for place, node in enumerate(nodes):
            seen = {columns[c] for c in layout.visible[lane, place].nonzero()[0]}
            if node >= 0:
                assert seen == ancestors(tree, node)
                assert layout.places[node] == trunk + lane * len(nodes) + place
    on_lanes = {node for lane in layout.lanes.tolist() for node in lane} - {-1}
    assert on_lanes | set(layout.trunk) == set(range(len(tree)))


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """The node itself and everything above it."""
    found = set[int]()
    while node != ROOT:
        found.add(node)
        node = tree.parents[node]
    return found


# ---------------------------------------------------------------- forward pass


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)


SYSTEM = [5, 9, 13, 21, 34]
BATCHES: dict[str, Rows] = {
    "one system prompt": [[*SYSTEM, 1, 2, 3], [*SYSTEM, 4], [*SYSTEM, 6, 7, 8, 9, 10]],
    "groups under it": [
        [*SYSTEM, 1, 2, 3, 4],
        [*SYSTEM, 1, 2, 3, 5, 6],
        [*SYSTEM, 7, 8, 3, 4],
        [*SYSTEM, 7, 8, 9],
    ],
    "equal rows": [[*SYSTEM, 1, 2], [*SYSTEM, 1, 2]],
    "a row that is another's beginning": [[*SYSTEM, 1], [*SYSTEM, 1, 2, 3]],
    "nothing shared": [[1, 2, 3], [4, 5, 6, 7]],
    "one row": [[1, 2, 3]],
}


def plain(model: LlamaForCausalLM, rows: Rows, wanted: Rows, temperature: float) -> list[Tensor]:
    """Each row on its own, through the model as it is."""
    found: list[Tensor] = []
    for row, on in zip(rows, wanted, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1] / temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        found.append(logprobs * torch.tensor(on[1:]))
    return found


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("temperature", "at_once"), [(1.0, 1024), (0.6, 1024), (1.0, 4)])
def test_scores_and_gradients_are_those_of_the_plain_pass(
    model: LlamaForCausalLM, rows: Rows, temperature: float, at_once: int
) -> None:
    """`at_once` 4 takes every lane, and every token of the head, on its own."""
    wanted = [[n % 3 != 1 for n in range(len(row))] for row in rows]
    asked = [list(map(int, on)) for on in wanted]
    scores = score(model, rows, asked, temperature=temperature, at_once=at_once)
    weight = model.model.layers[0].self_attn.v_proj.weight
    expected = plain(model, rows, asked, temperature)
    for row, logprobs in enumerate(expected):
        found = scores.logprobs_B_T[row, 1 : len(logprobs) + 1]
        torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5)
        assert scores.logprobs_B_T[row, len(logprobs) + 1 :].eq(0).all()
    (of_tree,) = torch.autograd.grad(scores.logprobs_B_T.sum(), weight)
    (of_plain,) = torch.autograd.grad(torch.stack([e.sum() for e in expected]).sum(), weight)
    assert of_plain.abs().max() > 1e-3
    torch.testing.assert_close(of_tree, of_plain, atol=1e-4, rtol=1e-4)


def test_entropy_is_that_of_the_next_token(model: LlamaForCausalLM) -> None:
    row = [3, 1, 4, 1]
    scores = score(model, [row], [[0, 1, 1, 1]])
    distribution = torch.distributions.Categorical(
        logits=model(input_ids=torch.tensor([row])).logits[0, :-1]
    )
    torch.testing.assert_close(scores.entropies_B_T[0, 1:], distribution.entropy())
    assert not scores.entropies_B_T.requires_grad
