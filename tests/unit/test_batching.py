"""Continuous batching over a tiny random model: sharing, fairness, cancelling, failing, leaving."""

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from runtime.engine.local.batching import EngineLimits, Scheduler
from runtime.engine.local.generation import Generation
from runtime.engine.local.llama import Layer, LlamaConfig, Weights
from runtime.engine.local.sampling import SamplingRule
from runtime.errors import Conflict, EngineUnavailable, NotFound

CONFIG = LlamaConfig(
    vocabulary=64,
    hidden=16,
    intermediate=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    context=256,
    epsilon=1e-5,
    rope_theta=10_000.0,
)


def random_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    layers = tuple(
        Layer(
            attention_norm=torch.ones(16),
            qkv=matrix(32, 16),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(16, 16),
            mlp_norm=torch.ones(16),
            gate_up=matrix(48, 16),
            down=matrix(16, 24),
        )
        for _ in range(CONFIG.layers)
    )
    embedding = matrix(64, 16)
    return Weights(CONFIG, embedding, layers, torch.ones(16), embedding)


@dataclass
class Desk:
    """Submits to a scheduler and waits for events, never for time."""

    scheduler: Scheduler
    changed: threading.Condition = field(default_factory=threading.Condition)

    def submit(
        self, prompt: Sequence[int], *, tokens: int = 6, seed: int = 0, policy: str = "base"
    ) -> Generation:
        rule = SamplingRule(1.0, 1.0)
        generation = Generation(policy, list(prompt), tokens, rule, seed, frozenset(), self.listen)
        self.scheduler.submit(generation)
        return generation

    def listen(self, generation: Generation) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=30)

    def ended(self, *generations: Generation) -> list[Generation]:
        self.until(lambda: all(g.finish or g.failure for g in generations))
        return list(generations)


def desk_with(limits: EngineLimits) -> Generator[Desk]:
    scheduler = Scheduler("base", random_weights(0), limits)
    scheduler.start()
    yield Desk(scheduler)
    scheduler.close()
    assert not scheduler.alive


@pytest.fixture
def desk() -> Generator[Desk]:
    yield from desk_with(EngineLimits(step_tokens=32, adapters=2))


@pytest.fixture
def narrow_desk() -> Generator[Desk]:
    """One sequence at a time, one waiting."""
    yield from desk_with(EngineLimits(sequences=1, waiting=1))


PROMPT = [n * 7 % 64 for n in range(100)]


def test_rollouts_of_one_task_compute_their_prompt_once(desk: Desk) -> None:
    group = desk.ended(*(desk.submit(PROMPT, seed=seed) for seed in range(8)))
    assert len({tuple(g.sampled) for g in group}) > 1
    prompts = desk.scheduler.counters.computed_tokens - 8 * 5
    assert len(PROMPT) <= prompts <= len(PROMPT) + 7


def test_company_and_reuse_change_nothing(desk: Desk) -> None:
    prompts = [PROMPT[: 20 + 9 * n] for n in range(6)]
    alone = [desk.ended(desk.submit(p, seed=n))[0].sampled for n, p in enumerate(prompts)]
    together = desk.ended(*(desk.submit(p, seed=n) for n, p in enumerate(prompts)))
    assert [g.sampled for g in together] == alone
    assert all(g.cached == len(g.prompt) - 1 for g in together)


def test_a_conversation_goes_on_from_what_was_sampled(desk: Desk) -> None:
    (first,) = desk.ended(desk.submit(PROMPT))
    longer = [*PROMPT, *first.sampled, 1, 2, 3]
    (second,) = desk.ended(desk.submit(longer))
    assert second.cached == len(PROMPT) + len(first.sampled) - 1


def test_sequences_join_and_leave_at_any_step(desk: Desk) -> None:
    lengths = [1, 17, 3, 40, 2, 9]
    long = desk.submit([1, 2, 3], tokens=60)
    desk.until(lambda: len(long.drawn) > 3)
    others = desk.ended(*(desk.submit([9, n], tokens=t) for n, t in enumerate(lengths)))
    assert [len(g.drawn) for g in others] == lengths
    desk.ended(long)
    assert [g.finish for g in [long, *others]] == ["length"] * 7


def test_a_cancelled_sequence_leaves_and_its_place_is_taken(narrow_desk: Desk) -> None:
    hog = narrow_desk.submit([1, 2], tokens=250)
    narrow_desk.until(lambda: len(hog.drawn) > 0)
    waiting = narrow_desk.submit([3, 4], tokens=2)
    narrow_desk.scheduler.cancel(hog)
    narrow_desk.ended(hog, waiting)
    assert (hog.finish, waiting.finish) == ("abort", "length")
    assert len(hog.drawn) < 250


def test_a_cancelled_one_that_still_waits_ends_too(narrow_desk: Desk) -> None:
    hog = narrow_desk.submit([1, 2], tokens=250)
    narrow_desk.until(lambda: len(hog.drawn) > 0)
    waiting = narrow_desk.submit([3, 4])
    narrow_desk.scheduler.cancel(waiting)
    narrow_desk.ended(waiting)
    assert waiting.finish == "abort"
    assert not waiting.drawn


def test_a_full_queue_refuses(narrow_desk: Desk) -> None:
    hog = narrow_desk.submit([1, 2], tokens=250)
    narrow_desk.until(lambda: len(hog.drawn) > 0)
    narrow_desk.submit([3, 4])
    with pytest.raises(EngineUnavailable, match="1 requests are waiting"):
        narrow_desk.submit([5, 6])
    assert hog.finish is None


def test_the_context_ends_a_reply(desk: Desk) -> None:
    (full,) = desk.ended(desk.submit(PROMPT, tokens=1_000))
    assert full.finish == "length"
    assert full.length == CONFIG.context


def test_policies_are_apart(desk: Desk) -> None:
    desk.scheduler.serve("other", random_weights(1))
    base, other = desk.ended(desk.submit(PROMPT), desk.submit(PROMPT, policy="other"))
    assert base.sampled != other.sampled
    assert (base.cached, other.cached) == (0, 0)


def test_room_is_made_by_the_least_used_that_is_not_pinned(desk: Desk) -> None:
    weights = random_weights(1)
    scheduler = desk.scheduler
    scheduler.serve("pinned", weights, pinned=True)
    scheduler.serve("loose", weights)
    assert scheduler.serve("next", weights, pinned=True) == "loose"
    with pytest.raises(Conflict, match="all 2 resident adapters are pinned"):
        scheduler.serve("late", weights)
    with pytest.raises(Conflict, match="already served"):
        scheduler.serve("next", weights)
    assert scheduler.names() == ["base", "pinned", "next"]


def test_a_withdrawn_policy_ends_what_it_began(desk: Desk) -> None:
    desk.scheduler.serve("short", random_weights(1))
    begun = desk.submit([1, 2, 3], tokens=100, policy="short")
    desk.until(lambda: len(begun.drawn) > 0)
    desk.scheduler.withdraw("short")
    with pytest.raises(NotFound, match="no model 'short' is served"):
        desk.submit([1], policy="short")
    desk.ended(begun)
    assert len(begun.drawn) == 100
    with pytest.raises(NotFound):
        desk.scheduler.withdraw("short")
    with pytest.raises(Conflict):
        desk.scheduler.withdraw("base")


def test_one_policys_failure_does_not_stop_the_others(desk: Desk) -> None:
    broken = replace(random_weights(1), head=torch.zeros(3, 3))
    desk.scheduler.serve("broken", broken)
    bad, good = desk.submit(PROMPT, policy="broken"), desk.submit(PROMPT)
    desk.ended(bad, good)
    assert isinstance(bad.failure, RuntimeError)
    assert good.finish == "length"
    assert desk.scheduler.alive


def test_closing_fails_what_is_unfinished() -> None:
    for desk in desk_with(EngineLimits()):
        unfinished = desk.submit([1, 2], tokens=250)
        desk.until(lambda g=unfinished: len(g.drawn) > 0)
    desk.ended(unfinished)
    assert isinstance(unfinished.failure, EngineUnavailable)
    with pytest.raises(EngineUnavailable):
        desk.submit([1])
