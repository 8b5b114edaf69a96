"""What is kept for reuse: exact under any history, bounded, and never shared across policies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.engine.local.kv_cache import PrefixStore, Slots, common_prefix


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    kv_heads: int = 1
    head_dim: int = 2


TOKEN_BYTES = 2 * 2 * 1 * 2 * 4
"""Keys and values of one token of that shape."""

IDS = st.lists(st.integers(0, 2), max_size=8)


def segment_of(ids: list[int]) -> Callable[[int, int], Tensor]:
    """A reader whose values at each position depend on every token up to it, as real ones do."""
    values = [hash(tuple(ids[: n + 1])) % 1_000_003 for n in range(len(ids))]

    def read(start: int, end: int) -> Tensor:
        row = torch.tensor(values[start:end], dtype=torch.float32)
        return row[None, None, None, :, None].expand(2, 2, 1, -1, 2).contiguous()

    return read


def fill(store: PrefixStore, policy: str, ids: list[int]) -> None:
    store.insert(policy, ids, segment_of(ids))


@settings(deadline=None)
@given(stored=st.lists(IDS, max_size=8), asked=IDS)
def test_the_longest_stored_prefix_is_found_with_its_values(
    stored: list[list[int]], asked: list[int]
) -> None:
    store = PrefixStore(1 << 20)
    for ids in stored:
        fill(store, "p", ids)
    found = store.find("p", asked)
    assert found.length == max((common_prefix(ids, asked) for ids in stored), default=0)
    if found.length:
        values = torch.cat(found.segments, dim=3)
        assert torch.equal(values, segment_of(asked)(0, found.length))


@settings(deadline=None)
@given(stored=st.lists(st.tuples(st.sampled_from("pq"), IDS), max_size=12))
def test_what_is_shared_is_stored_once_and_counted(stored: list[tuple[str, list[int]]]) -> None:
    store = PrefixStore(1 << 20)
    for policy, ids in stored:
        fill(store, policy, ids)
    distinct = {(p, tuple(ids[: n + 1])) for p, ids in stored for n in range(len(ids))}
    assert store.bytes == len(distinct) * TOKEN_BYTES
    store.drop("p")
    assert store.bytes == sum(policy == "q" for policy, _ in distinct) * TOKEN_BYTES
    assert store.find("p", [0, 1, 2]).length == 0


@settings(deadline=None)
@given(stored=st.lists(IDS, max_size=12), bound=st.integers(0, 12))
def test_bytes_are_bounded(stored: list[list[int]], bound: int) -> None:
    store = PrefixStore(bound * TOKEN_BYTES)
    for ids in stored:
        fill(store, "p", ids)
        assert store.bytes <= bound * TOKEN_BYTES


def test_the_leaf_used_longest_ago_goes_first() -> None:
    store = PrefixStore(6 * TOKEN_BYTES)
    fill(store, "p", [1, 1, 1])
    fill(store, "p", [2, 2, 2])
    store.find("p", [1, 1, 1])
    fill(store, "p", [3, 3])
    assert store.find("p", [1, 1, 1]).length == 3
    assert store.find("p", [2, 2, 2]).length == 0


def test_nothing_is_found_across_policies() -> None:
    store = PrefixStore(1 << 20)
    fill(store, "p", [1, 2, 3])
    assert store.find("q", [1, 2, 3]).length == 0


def test_slots_grow_keep_and_shrink() -> None:
    slots = Slots(Shape(), capacity=4)
    segment = torch.rand(2, 2, 1, 3, 2)
    slots.write(0, 0, segment)
    slots.reserve(5, 9)
    assert torch.equal(slots.read(0, 0, 3), segment)
    slots.move(0, 4, 3)
    assert torch.equal(slots.read(4, 0, 3), segment)
    assert slots.keys.shape == (2, 8, 1, 16, 2)
    slots.release()
    assert slots.keys.shape == (2, 1, 1, 4, 2)
    assert not slots.keys.any()
