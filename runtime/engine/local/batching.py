"""Continuous batching: sequences join and leave the batch at any step, one policy a step.

One thread owns the model. Each policy has a lane: its weights, its slots, its queue. A step takes
one new token of every sequence that is decoding and, up to a budget, uncomputed tokens of those
whose prompt is not done; the first token of a reply is sampled in the step that completes its
prompt. What is stored of a prompt is copied, not computed; a sequence whose prompt shares more with
one being computed right now waits for that one, so the rollouts of one task compute their prompt
once. Lanes take turns. A lane that is dropped serves what it has begun, and nothing new.

Callers reach the thread through `submit`, `cancel`, `serve` and `withdraw`; it answers through each
generation's listener.

Scaling out: one scheduler per engine process; more engines stand behind a load balancer.
"""

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import torch

from runtime.engine.local.generation import Generation
from runtime.engine.local.kv_cache import PrefixStore, Slots, common_prefix
from runtime.engine.local.llama import Chunk, Llama, Weights
from runtime.engine.local.sampling import draw
from runtime.errors import Conflict, EngineUnavailable, NotFound

log = logging.getLogger(__name__)

_WORTH_WAITING = 16
"""Tokens a sequence must save before it waits for another one's prompt."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    sequences: int = 32
    """Sequences computed at once, over all policies."""
    waiting: int = 512
    """Sequences that may wait; one more is refused (HTTP 429)."""
    step_tokens: int = 256
    """Prompt tokens computed in one step beside decoding: bounds how long decoders wait."""
    prefix_bytes: int = 1 << 30
    """Keys and values kept for reuse, over all policies."""
    adapters: int = 3
    """Adapters resident at once; the one used longest ago makes room unless it is pinned."""
    threads: int = 0
    """CPU threads of one step; 0 leaves the choice to torch."""


@dataclass(slots=True)
class Counters:
    """What was done since the start."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, of prompts and of replies."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were copied."""
    sampled_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict[str, int])
    """Finish reason (or `failed`) → generations."""


@dataclass(slots=True, eq=False)
class Lane:
    """One policy being served."""

    name: str
    key: str
    """Where its prefixes are stored: unique, also when a name is used again."""
    weights: Weights
    slots: Slots
    pinned: bool
    used: float
    """Monotonic time of the last request."""
    waiting: deque[Generation] = field(default_factory=deque[Generation])
    running: list[Generation] = field(default_factory=list[Generation])
    """The generation at index i computes in slot i."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)


class Scheduler:
    """Serves generations until closed. Thread-safe."""

    def __init__(self, base: str, weights: Weights, limits: EngineLimits) -> None:
        self.base = base
        self.limits = limits
        self.counters = Counters()
        self._model = Llama(weights.config)
        self._prefixes = PrefixStore(limits.prefix_bytes)
        self._numbers = count()
        self._changed = threading.Condition()
        self._closing = False
        self._lanes: dict[str, Lane] = {base: self._lane(base, weights, pinned=True)}
        self._withdrawn: list[Lane] = []
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the step in progress; whatever is unfinished fails as unavailable."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ------------------------------------------------------------ policies

    def names(self) -> list[str]:
        """What is served now, the base first."""
        with self._changed:
            return list(self._lanes)

    def serve(self, name: str, weights: Weights, *, pinned: bool = False) -> str | None:
        """Serve an adapter's merged weights under a new name; returns the name that made room.

        Raises Conflict where the name is taken or every resident adapter is pinned.
        """
        with self._changed:
            if name in self._lanes:
                raise Conflict(f"{name!r} is already served; every adapter has a name of its own")
            gone = self._make_room()
            self._lanes[name] = self._lane(name, weights, pinned=pinned)
            return gone

    def withdraw(self, name: str) -> None:
        """Serve nothing new under this name. Raises NotFound, or Conflict for the base."""
        with self._changed:
            if name == self.base:
                raise Conflict(f"{name!r} is the base model; only adapters can be unloaded")
            if name not in self._lanes:
                raise NotFound(f"no adapter {name!r} is loaded; served: {', '.join(self._lanes)}")
            self._retire(name)

    def _lane(self, name: str, weights: Weights, *, pinned: bool) -> Lane:
        key = f"{name}#{next(self._numbers)}"
        return Lane(name, key, weights, Slots(weights.config), pinned, time.monotonic())

    def _make_room(self) -> str | None:
        adapters = [lane for lane in self._lanes.values() if lane.name != self.base]
        if len(adapters) < self.limits.adapters:
            return None
        loose = [lane for lane in adapters if not lane.pinned]
        if not loose:
            raise Conflict(f"all {len(adapters)} resident adapters are pinned; unload one first")
        oldest = min(loose, key=lambda lane: lane.used)
        self._retire(oldest.name)
        return oldest.name

    def _retire(self, name: str) -> None:
        self._withdrawn.append(self._lanes.pop(name))
        self._changed.notify()

    # ------------------------------------------------------------ generations

    def submit(self, generation: Generation) -> None:
        """Queue it. Raises NotFound for an unknown policy, EngineUnavailable for a full queue."""
        with self._changed:
            lane = self._lanes.get(generation.policy)
            if lane is None:
                raise NotFound(
                    f"no model {generation.policy!r} is served; served: {', '.join(self._lanes)}"
                )
            if self._closing or self.waiting >= self.limits.waiting:
                raise EngineUnavailable(f"{self.waiting} requests are waiting; try again later")
            lane.used = time.monotonic()
            lane.waiting.append(generation)
            self._changed.notify()

    def cancel(self, generation: Generation) -> None:
        """Give up before the next step."""
        with self._changed:
            generation.cancelled = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._all_lanes())

    @property
    def running(self) -> int:
        return sum(len(lane.running) for lane in self._all_lanes())

    @property
    def prefix_bytes(self) -> int:
        return self._prefixes.bytes

    def _all_lanes(self) -> list[Lane]:
        return [*self._lanes.values(), *self._withdrawn]

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        if self.limits.threads:
            torch.set_num_threads(self.limits.threads)
        while lanes := self._next_lanes():
            for lane in lanes:
                self._advance(lane)
        for lane in self._all_lanes():
            self._fail(lane, EngineUnavailable("the engine is shutting down"))

    def _next_lanes(self) -> list[Lane]:
        """Lanes with work, once there are any; none when closing."""
        with self._changed:
            while not self._closing:
                self._forget_withdrawn()
                if busy := [lane for lane in self._all_lanes() if lane.busy]:
                    return busy
                self._changed.wait()
            return []

    def _forget_withdrawn(self) -> None:
        for lane in [lane for lane in self._withdrawn if not lane.busy]:
            self._withdrawn.remove(lane)
            self._prefixes.drop(lane.key)

    def _advance(self, lane: Lane) -> None:
        try:
            self._admit(lane)
            self._leave(lane, [i for i, each in enumerate(lane.running) if each.cancelled])
            if lane.running:
                self._step(lane)
        except Exception as error:  # one lane's failure must not stop the others
            log.exception("a step of %s failed", lane.name)
            self._fail(lane, error)

    def _fail(self, lane: Lane, error: Exception) -> None:
        with self._changed:
            lost = [*lane.running, *lane.waiting]
            lane.running.clear()
            lane.waiting.clear()
        for generation in lost:
            generation.failure = error
            self._end(generation)

    # ------------------------------------------------------------ joining

    def _admit(self, lane: Lane) -> None:
        for generation in list(lane.waiting):
            if generation.cancelled:
                with self._changed:
                    lane.waiting.remove(generation)
                self._end(generation)
            elif self.running >= self.limits.sequences:
                return
            else:
                self._join(lane, generation)

    def _join(self, lane: Lane, generation: Generation) -> None:
        """Give it a slot with what is stored of its prompt, unless waiting saves more."""
        prefix = self._prefixes.find(lane.key, generation.prompt[:-1])
        if _saves_by_waiting(generation, prefix.length, lane):
            return
        slot, at = len(lane.running), 0
        lane.slots.reserve(slot + 1, generation.length + 1)
        for segment in prefix.segments:
            lane.slots.write(slot, at, segment)
            at += segment.shape[3]
        generation.cached = generation.computed = at
        self.counters.prompt_tokens += len(generation.prompt)
        self.counters.cached_tokens += at
        with self._changed:
            lane.waiting.remove(generation)
            lane.running.append(generation)

    # ------------------------------------------------------------ one step

    def _step(self, lane: Lane) -> None:
        lane.slots.reserve(len(lane.running), max(g.length for g in lane.running))
        chunks = self._chunks(lane)
        ends = [i for i, c in enumerate(chunks) if _completes(c, lane.running[c.slot])]
        logits = self._model.step(lane.weights, lane.slots, chunks, ends)
        for chunk in chunks:
            self._computed(lane, chunk)
        if ends:
            self._sample(lane, [lane.running[chunks[i].slot] for i in ends], logits)
        self.counters.steps += 1
        self.counters.computed_tokens += sum(len(chunk.ids) for chunk in chunks)
        self._leave(lane, [i for i, each in enumerate(lane.running) if each.finish])

    def _chunks(self, lane: Lane) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.limits.step_tokens
        for slot, generation in enumerate(lane.running):
            ids = generation.next_ids(budget)
            budget -= len(ids) if generation.in_prompt else 0
            if ids:
                chunks.append(Chunk(slot, generation.computed, ids))
        return chunks

    def _computed(self, lane: Lane, chunk: Chunk) -> None:
        generation = lane.running[chunk.slot]
        was_in_prompt = generation.in_prompt
        generation.computed += len(chunk.ids)
        if was_in_prompt and not generation.in_prompt:
            self._store(lane, chunk.slot)

    def _sample(self, lane: Lane, generations: list[Generation], logits: torch.Tensor) -> None:
        rules = [generation.rule for generation in generations]
        points = [generation.point() for generation in generations]
        for generation, drawn in zip(generations, draw(logits, rules, points), strict=True):
            generation.accept(drawn)
            self.counters.sampled_tokens += 1
            if generation.finish is None and generation.length >= lane.weights.config.context:
                generation.finish = "length"
            if generation.finish is None:
                _tell(generation)

    # ------------------------------------------------------------ leaving

    def _leave(self, lane: Lane, slots: list[int]) -> None:
        """Free these slots, keeping their prefixes; the last sequence moves into each gap."""
        for slot in reversed(slots):
            self._store(lane, slot)
            gone = lane.running[slot]
            last = lane.running[-1]
            if last is not gone:
                lane.slots.move(len(lane.running) - 1, slot, last.computed)
                lane.running[slot] = last
            lane.running.pop()
            self._end(gone)
        if not lane.running:
            lane.slots.release()

    def _store(self, lane: Lane, slot: int) -> None:
        generation = lane.running[slot]
        ids = [*generation.prompt, *generation.sampled][: generation.computed]
        self._prefixes.insert(lane.key, ids, lambda start, end: lane.slots.read(slot, start, end))

    def _end(self, generation: Generation) -> None:
        if generation.cancelled and generation.finish is None:
            generation.finish = "abort"
        outcome = "failed" if generation.failure else generation.finish or "failed"
        finished = self.counters.finished
        finished[outcome] = finished.get(outcome, 0) + 1
        _tell(generation)


def _completes(chunk: Chunk, generation: Generation) -> bool:
    """The chunk ends with the generation's last token, so the next one can be sampled."""
    return chunk.start + len(chunk.ids) == generation.length


def _saves_by_waiting(generation: Generation, stored: int, lane: Lane) -> bool:
    usable = generation.prompt[:-1]
    return any(
        common_prefix(usable, other.prompt) >= stored + _WORTH_WAITING
        for other in lane.running
        if other.in_prompt
    )


def _tell(generation: Generation) -> None:
    with suppress(RuntimeError):  # the listener's event loop is closed: nobody waits any more
        generation.listener(generation)
