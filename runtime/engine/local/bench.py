"""What the embedded engine does per second on this machine, with and without reuse.

Runs the scheduler in this process, without HTTP. Prompts are random ids, so that nothing is reused
by accident; an arm without reuse gets a prefix store of no bytes. Every row carries the medians of
both arms. A four-turn run is judged by tokens computed, which no load on the machine can change.
"""

import statistics
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from runtime.benchmark import Row, report
from runtime.engine.local.batching import EngineLimits, Scheduler
from runtime.engine.local.generation import Generation
from runtime.engine.local.llama import Weights
from runtime.engine.local.sampling import SamplingRule

PROMPT_TOKENS = 384
DECODED_TOKENS = 24
BATCHES = (1, 8, 16, 32)
TURNS = 4
TURN_TOKENS = 32
FOUR_TURN_TARGET = 0.4


def benchmark(model_dir: Path, *, rounds: int = 3) -> dict[str, Any]:
    """Measure; the result is the JSON of `noria engine bench --json`."""
    weights = Weights.from_folder(model_dir)
    rows = [
        _prefill(weights, rounds),
        *(_decode(weights, batch, rounds) for batch in BATCHES),
        _four_turns(weights),
    ]
    return report("engine", rounds, rows, ("torch", "tokenizers", "safetensors"))


# ---------------------------------------------------------------- rows


def _prefill(weights: Weights, rounds: int) -> Row:
    random = Random(0)
    with _scheduler(weights) as scheduler:
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(rounds):
            prompt = _ids(weights, random, PROMPT_TOKENS)
            cold.append(PROMPT_TOKENS / _seconds(scheduler, [prompt]))
            warm.append(PROMPT_TOKENS / _seconds(scheduler, [prompt]))
    value, floor = statistics.median(warm), statistics.median(cold)
    what = f"prompt of {PROMPT_TOKENS} tokens, seen before"
    return Row("prefill", what, value, "tokens/s", floor, value / floor)


def _decode(weights: Weights, batch: int, rounds: int) -> Row:
    random = Random(batch)
    rates: list[float] = []
    with _scheduler(weights) as scheduler:
        for _ in range(rounds):
            prompts = [_ids(weights, random, TURN_TOKENS) for _ in range(batch)]
            first = _seconds(scheduler, prompts)
            everything = _seconds(scheduler, prompts, tokens=1 + DECODED_TOKENS)
            known = _seconds(scheduler, prompts)
            rates.append(batch * DECODED_TOKENS / (everything - min(first, known)))
    what = f"decoding, {batch} at once"
    return Row(f"decode_{batch}", what, statistics.median(rates), "tokens/s")


def _four_turns(weights: Weights) -> Row:
    """Prompt tokens computed by a run of four turns, with reuse and without."""
    with _scheduler(weights) as scheduler:
        with_reuse = _computed(scheduler, weights)
    with _scheduler(weights, EngineLimits(prefix_bytes=0)) as scheduler:
        without = _computed(scheduler, weights)
    ratio = with_reuse / without
    return Row(
        id="four_turns",
        what=f"prompt tokens a run of {TURNS} turns computes",
        value=with_reuse,
        unit="tokens",
        floor=without,
        ratio=ratio,
        target=FOUR_TURN_TARGET,
        op="ratio <=",
        holds=ratio <= FOUR_TURN_TARGET,
    )


def _computed(scheduler: Scheduler, weights: Weights) -> float:
    random = Random(1)
    prompt = _ids(weights, random, PROMPT_TOKENS)
    computed = 0
    for _ in range(TURNS):
        (turn,) = _generate(scheduler, [prompt], tokens=TURN_TOKENS)
        computed += len(prompt) - turn.cached
        prompt = [*prompt, *turn.sampled, *_ids(weights, random, TURN_TOKENS)]
    return computed


# ---------------------------------------------------------------- running


@contextmanager
def _scheduler(weights: Weights, limits: EngineLimits | None = None) -> Generator[Scheduler]:
    scheduler = Scheduler("base", weights, limits or EngineLimits())
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def _ids(weights: Weights, random: Random, count: int) -> list[int]:
    return [random.randrange(weights.config.vocabulary) for _ in range(count)]


def _seconds(scheduler: Scheduler, prompts: Sequence[list[int]], tokens: int = 1) -> float:
    started = time.perf_counter()
    _generate(scheduler, prompts, tokens=tokens)
    return time.perf_counter() - started


def _generate(
    scheduler: Scheduler, prompts: Sequence[list[int]], *, tokens: int
) -> list[Generation]:
    """Run all of them at once to their last token. Raises the failure of one that failed."""
    ended = threading.Semaphore(0)

    def listen(generation: Generation) -> None:
        if generation.finish or generation.failure:
            ended.release()

    rule = SamplingRule(temperature=1.0, top_p=1.0)
    generations = [
        Generation("base", prompt, tokens, rule, seed, frozenset(), listen)
        for seed, prompt in enumerate(prompts)
    ]
    for generation in generations:
        scheduler.submit(generation)
    for _ in generations:
        ended.acquire()
    for generation in generations:
        if generation.failure is not None:
            raise generation.failure
    return generations
