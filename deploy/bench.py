"""`noria bench hotload`: from an adapter's file to the first token of its policy, while others ask.

A real embedded engine runs as a child; clients ask it for completions all the time, of the base and
of the newest adapter. Each round verifies an adapter's files, loads it under a name of its own,
samples its first token and lets an older one go. What counts is the time of that, and that no
request failed. Adapters are random, so that nothing is trained and no two policies say the same.

Scaling past one machine: the same rounds against NORIA_ENGINE_URL would measure any engine.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flywheel.release import shelf
from flywheel.release.testing import random_adapter
from runtime.benchmark import Row, report
from runtime.engine.openai import OpenAIEngine
from runtime.engine.protocol import CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import NoriaError
from runtime.run import PolicyId
from runtime.settings import CLONE, child_environment

FIRST_TOKEN_TARGET = 2.0
"""Seconds."""
CLIENTS = 8
"""Completions asked for at once, all the time."""
ADAPTERS = 4
"""Different files that the rounds go through."""
RESIDENT = 2
"""Adapters left resident beside the base."""
TOKENS = 8
"""Sampled per completion of the load."""


@dataclass(slots=True)
class Load:
    """What the clients saw."""

    newest: PolicyId
    answered: int = 0
    failures: list[str] = field(default_factory=list[str])
    wrongly_served: int = 0


@contextmanager
def engine_process(
    model_dir: Path, port: int = 0
) -> Generator[tuple[str, "subprocess.Popen[str]"]]:
    """The embedded engine as a child that dies with this process; its base URL, once it answers.

    Port 0 picks a free one.
    """
    with socket.create_server(("127.0.0.1", port)) as listener:
        lifeline, hold = os.pipe()
        descriptors = ["--fd", str(listener.fileno()), "--lifeline", str(lifeline)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.engine.local", str(model_dir), *descriptors],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(listener.fileno(), lifeline),
            env=child_environment(
                PYTHONPATH=str(CLONE), OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0"
            ),
        )
        os.close(lifeline)
        port = listener.getsockname()[1]
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise NoriaError("the embedded engine did not start; its words stand above")
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        os.close(hold)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def hotload(model_dir: Path, *, rounds: int = 20) -> dict[str, Any]:
    """Measure; the result is the JSON of `noria bench hotload --json`."""
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        adapters = [
            random_adapter(Path(folder) / f"a{seed}", model_dir, rank=16, seed=seed)
            for seed in range(ADAPTERS)
        ]
        with engine_process(model_dir) as (url, _):
            return asyncio.run(_measured(url, model_dir, adapters, rounds))


async def _measured(
    url: str, model_dir: Path, adapters: Sequence[Path], rounds: int
) -> dict[str, Any]:
    template = ChatTemplate.from_folder(model_dir)
    prompt = template.opening("Answer briefly.", [], [("user", "My card was stolen.")])
    base = PolicyId(model_dir.name)
    async with OpenAIEngine(url) as engine:
        quiet = Load(base)
        idle = await reloads(engine, adapters, prompt, quiet, rounds=3, prefix="idle")
        await engine.unload_adapter(quiet.newest)
        load = Load(base)
        async with clients(engine, base, prompt, load):
            started = time.perf_counter()
            seconds = await reloads(engine, adapters, prompt, load, rounds=rounds)
            elapsed = time.perf_counter() - started
    rows = _rows(idle, seconds, load, elapsed)
    return report("hotload", rounds, rows, ("torch", "safetensors"))


# ---------------------------------------------------------------- the two sides


async def reloads(
    engine: OpenAIEngine,
    adapters: Sequence[Path],
    prompt: Sequence[int],
    load: Load,
    *,
    rounds: int,
    prefix: str = "hot",
) -> list[float]:
    """Seconds from file to first token, per round; every round is a name of its own.

    The last one stays resident, as `load.newest`.
    """
    seconds: list[float] = []
    names: list[str] = []
    for number in range(rounds):
        name, folder = f"{prefix}-{number}", adapters[number % len(adapters)]
        started = time.perf_counter()
        await asyncio.to_thread(shelf.digest_of, folder)
        await engine.load_adapter(name, str(folder), pinned=True)
        reply = await engine.complete(_request(PolicyId(name), prompt, number, tokens=1))
        seconds.append(time.perf_counter() - started)
        load.wrongly_served += reply.served_policy != name
        load.newest = PolicyId(name)
        names.append(name)
        if len(names) > RESIDENT:
            await engine.unload_adapter(names.pop(0))
    for name in names[:-1]:
        await engine.unload_adapter(name)
    return seconds


@asynccontextmanager
async def clients(
    engine: OpenAIEngine, base: PolicyId, prompt: Sequence[int], load: Load
) -> AsyncGenerator[None]:
    """Clients that ask without a pause while the block is open; all have ended after it."""
    over = asyncio.Event()
    asking = [
        asyncio.create_task(_ask(engine, base, prompt, load, over, number))
        for number in range(CLIENTS)
    ]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*asking)


async def _ask(
    engine: OpenAIEngine,
    base: PolicyId,
    prompt: Sequence[int],
    load: Load,
    over: asyncio.Event,
    number: int,
) -> None:
    """Half of the clients ask the base, half whatever was loaded last."""
    asked = 0
    while not over.is_set():
        asked += 1
        policy = base if number % 2 else load.newest
        try:
            reply = await engine.complete(_request(policy, prompt, asked, tokens=TOKENS))
        except NoriaError as error:
            load.failures.append(str(error))
        else:
            load.answered += 1
            load.wrongly_served += reply.served_policy != policy


def _request(
    policy: PolicyId, prompt: Sequence[int], seed: int, *, tokens: int
) -> CompletionRequest:
    return CompletionRequest(policy, prompt, tokens, seed=seed)


# ---------------------------------------------------------------- rows


def _rows(idle: Sequence[float], seconds: Sequence[float], load: Load, elapsed: float) -> list[Row]:
    median, slowest = statistics.median(seconds), max(seconds)
    alone = statistics.median(idle)
    return [
        Row(
            "first_token",
            "adapter file to first token under load, median",
            median,
            "s",
            alone,
            median / alone,
            FIRST_TOKEN_TARGET,
            "value <=",
            median <= FIRST_TOKEN_TARGET,
        ),
        Row("first_token_worst", "the same, slowest round", slowest, "s"),
        Row(
            "failed",
            "requests that failed meanwhile",
            float(len(load.failures)),
            "requests",
            target=0,
            op="value <=",
            holds=not load.failures,
        ),
        Row(
            "wrongly_served",
            "replies by another policy than was asked",
            float(load.wrongly_served),
            "replies",
            target=0,
            op="value <=",
            holds=load.wrongly_served == 0,
        ),
        Row("answered", "requests answered meanwhile", load.answered / elapsed, "requests/s"),
    ]
