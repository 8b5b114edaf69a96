"""A batch of trajectories as one tree of tokens: what they share is there once.

All rows of a job begin with the same system prompt, the members of a group with the same task, and
most of them make the same first calls. A node is one token after everything above it; rows that
agree up to a token share its node, so a forward pass over nodes computes every distinct prefix once
and stays exact: attention reaches a node's ancestors and nothing else.

The nodes that all rows share, the trunk, come first. What hangs below it is cut into branches,
packed side by side into lanes of equal length, so that attention costs lanes x length x (trunk +
length) instead of the square of all nodes. Plain numbers only: `shared_prefix` does the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ROOT = -1


@dataclass(slots=True)
class TokenTree:
    """N nodes in an order in which parents precede children."""

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    """ROOT for a row's first token."""
    depths: list[int] = field(default_factory=list[int])
    """Position of the token in its rows."""
    rows: list[list[int]] = field(default_factory=list[list[int]])
    """Of each row, the node of every position."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "TokenTree":
        tree = cls()
        children: dict[tuple[int, int], int] = {}
        for row in rows:
            node, path = ROOT, list[int]()
            for depth, token in enumerate(row):
                key = (node, token)
                if key not in children:
                    children[key] = len(tree)
                    tree._grow(token, node, depth)
                node = children[key]
                path.append(node)
            tree.rows.append(path)
        return tree

    def _grow(self, token: int, parent: int, depth: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each node is computed: trunk of length P, then L lanes of length T."""

    trunk: list[int]
    """P nodes: the prefix of every row, in order."""
    lanes: npt.NDArray[np.int64]
    """[L, T] nodes; -1 is padding."""
    visible: npt.NDArray[np.bool_]
    """[L, T, P + T]: what a place of a lane attends to, the trunk's columns first."""
    places: npt.NDArray[np.int64]
    """[N] index of a node's hidden state among the P of the trunk and the L x T of the lanes."""


def layout_of(tree: TokenTree) -> Layout:
    trunk = _trunk(tree)
    lanes = _lanes(_branches(tree, len(trunk)))
    places = np.zeros(len(tree), dtype=np.int64)
    places[trunk] = np.arange(len(trunk))
    filled = lanes >= 0
    places[lanes[filled]] = len(trunk) + np.flatnonzero(filled)
    return Layout(trunk, lanes, _visible(tree, lanes, len(trunk)), places)


def _trunk(tree: TokenTree) -> list[int]:
    """Nodes shared by all rows. The first row's nodes are 0, 1, 2 …, so the trunk is a range."""
    shortest = min(len(row) for row in tree.rows)
    length = 0
    while length < shortest and all(row[length] == length for row in tree.rows):
        length += 1
    return list(range(length))


def _branches(tree: TokenTree, trunk: int) -> list[list[int]]:
    """Node lists that share nothing below the trunk, each in order, longest first."""
    branch_of: dict[int, list[int]] = {}
    for node in range(trunk, len(tree)):
        parent = tree.parents[node]
        branch = branch_of[parent] if parent >= trunk else list[int]()
        branch.append(node)
        branch_of[node] = branch
    unique = {id(branch): branch for branch in branch_of.values()}
    return sorted(unique.values(), key=len, reverse=True)


def _lanes(branches: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """First-fit: lanes as long as the longest branch, short branches side by side in one."""
    length = len(branches[0]) if branches else 0
    lanes: list[list[int]] = []
    for branch in branches:
        lane = next((lane for lane in lanes if len(lane) + len(branch) <= length), None)
        if lane is None:
            lane = list[int]()
            lanes.append(lane)
        lane.extend(branch)
    padded = [lane + [-1] * (length - len(lane)) for lane in lanes]
    return np.asarray(padded, dtype=np.int64).reshape(len(lanes), length)


def _visible(tree: TokenTree, lanes: npt.NDArray[np.int64], trunk: int) -> npt.NDArray[np.bool_]:
    count, length = lanes.shape
    visible = np.zeros((count, length, trunk + length), dtype=np.bool_)
    visible[:, :, :trunk] = True
    for lane in range(count):
        seen = visible[lane, :, trunk:]
        place_of: dict[int, int] = {}
        for place, node in enumerate(lanes[lane].tolist()):
            place_of[node] = place
            parent = place_of.get(tree.parents[node]) if node >= 0 else None
            if parent is not None:
                seen[place] = seen[parent]
            seen[place, place] = True
    return visible
