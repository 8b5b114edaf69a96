"""Keys and values: slots that sequences compute in, and a bounded store of prefixes to reuse.

`Slots` holds the sequences in progress: sequence i lives in slot i, positions from 0, and the
arrays grow by doubling when a longer sequence joins. `PrefixStore` is a tree per policy whose edges
are runs of tokens with their keys and values: a run's next turn finds its whole conversation, a
new run finds the domain's system prompt, and what two sequences share is stored once. Nothing is
ever looked up across policies. Leaves used longest ago are dropped when the byte bound is reached.

Scaling out: both belong to one process; several engines reuse prefixes best when a run's turns
are sent to the same one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class CacheShape(Protocol):
    """The part of a model's configuration that shapes its cache."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Slots:
    """Keys and values of the sequences in progress, [layers, S, K, T, D] each, fp32.

    Fresh memory is zero: attention masks what a slot does not hold, but must never meet NaN.
    """

    def __init__(self, shape: CacheShape, *, capacity: int = 512) -> None:
        self._shape = shape
        self._count = 1
        self._capacity = capacity
        self._initial = capacity
        self._allocate()

    def _allocate(self) -> None:
        s = self._shape
        size = (s.layers, self._count, s.kv_heads, self._capacity, s.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)

    def reserve(self, count: int, length: int) -> None:
        """Room for `count` sequences of `length` tokens, keeping what is stored."""
        if count <= self._count and length <= self._capacity:
            return
        keys, values = self.keys, self.values
        slots, held = self._count, self._capacity
        self._count, self._capacity = _grown(slots, count), _grown(held, length)
        self._allocate()
        self.keys[:, :slots, :, :held] = keys
        self.values[:, :slots, :, :held] = values

    def release(self) -> None:
        """No sequence is left: give back what a burst or a long one made it grow to."""
        if self._count > 1 or self._capacity > self._initial:
            self._count, self._capacity = 1, self._initial
            self._allocate()

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of positions start … end-1, [2, layers, K, end-start, D]."""
        return torch.stack((self.keys[:, slot, :, start:end], self.values[:, slot, :, start:end]))

    def write(self, slot: int, start: int, segment: Tensor) -> None:
        """Put a segment of `read`'s shape at position `start`."""
        end = start + segment.shape[3]
        self.keys[:, slot, :, start:end] = segment[0]
        self.values[:, slot, :, start:end] = segment[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def _grown(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


# ---------------------------------------------------------------- prefixes


@dataclass(slots=True, eq=False)
class _Node:
    """One edge of the tree: tokens, and their keys and values as `Slots.read` gives them."""

    tokens: list[int]
    segment: Tensor
    parent: "_Node | None"
    children: "dict[int, _Node]" = field(default_factory=dict[int, "_Node"])
    used: int = 0

    @property
    def size(self) -> int:
        return self.segment.numel() * self.segment.element_size()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest stored prefix of some tokens."""

    length: int
    segments: list[Tensor]


class PrefixStore:
    """A bounded store of computed prefixes, by policy. Not thread-safe: one thread owns it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[str, _Node] = {}
        self._clock = 0
        self.bytes = 0
        """Bytes held now."""

    def find(self, policy: str, ids: Sequence[int]) -> Prefix:
        """The longest stored prefix of `ids`; its edges count as used now."""
        segments: list[Tensor] = []
        at = 0
        self._clock += 1
        for node, shared in self._walk(policy, ids):
            node.used = self._clock
            segments.append(node.segment[:, :, :, :shared])
            at += shared
        return Prefix(at, segments)

    def insert(self, policy: str, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Store `ids`; `read(start, end)` gives the segment of positions not yet stored."""
        self._clock += 1
        root = self._roots.setdefault(policy, _Node([], torch.empty(0), None))
        last, at = root, 0
        for node, shared in self._walk(policy, ids):
            if shared < len(node.tokens):
                self._split(node, shared)
            node.used = self._clock
            last, at = node, at + shared
        if at < len(ids):
            leaf = _Node(list(ids[at:]), read(at, len(ids)), last, used=self._clock)
            last.children[ids[at]] = leaf
            self.bytes += leaf.size
        self._evict()

    def drop(self, policy: str) -> None:
        """Forget everything computed by a policy."""
        root = self._roots.pop(policy, None)
        if root is not None:
            self.bytes -= sum(node.size for node in _below(root))

    def _walk(self, policy: str, ids: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The edges along `ids`, each with how many of its tokens agree (at least one)."""
        node, at = self._roots.get(policy), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at])
            if node is None:
                return
            shared = common_prefix(node.tokens, ids[at : at + len(node.tokens)])
            complete = shared == len(node.tokens)
            yield node, shared
            at += shared
            if not complete:
                return

    def _split(self, node: _Node, at: int) -> None:
        """Cut an edge in two. Both halves are copies, so that either can be freed."""
        before = node.size
        rest = _Node(
            node.tokens[at:], node.segment[:, :, :, at:].clone(), node, node.children, node.used
        )
        for child in rest.children.values():
            child.parent = rest
        node.children = {rest.tokens[0]: rest}
        node.tokens, node.segment = node.tokens[:at], node.segment[:, :, :, :at].clone()
        self.bytes += node.size + rest.size - before

    def _evict(self) -> None:
        while self.bytes > self._max_bytes:
            leaves = [n for root in self._roots.values() for n in _below(root) if not n.children]
            oldest = min(leaves, key=lambda leaf: leaf.used)
            assert oldest.parent is not None, "only roots have no parent, and roots are no leaves"
            del oldest.parent.children[oldest.tokens[0]]
            self.bytes -= oldest.size


def _below(root: _Node) -> Iterator[_Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree."""
    if a == b:
        return len(a)
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
