"""Hot loading on the real engine and a real Postgres: exact, remembered, and without a failure."""

import datetime as dt
import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from deploy.bench import Load, clients, engine_process, reloads
from flywheel.bridge import Bridge
from flywheel.records import Lineage
from flywheel.release.adapters import policy_of, register
from flywheel.release.aliases import promote
from flywheel.release.hot_load import load, probe, unload
from flywheel.release.reconciler import reconcile
from flywheel.release.testing import random_adapter
from flywheel.store import MIGRATIONS
from flywheel.training.job import ProbePoint
from flywheel.wheel import Wheel
from runtime.database import Database, migrate
from runtime.engine.openai import OpenAIEngine
from runtime.engine.protocol import CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.errors import Conflict, ProbeFailed
from runtime.journal import MemoryRecorder
from runtime.run import Policy, PolicyId, RunId, RunState, Sampling, Task, TenantId
from runtime.run_executor import Attempt, Executed, RunExecutor, Workplace
from runtime.sandbox.testing import MemoryBackend
from tests.fixtures.api import letters

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    # peft asks transformers for an attribute that transformers is renaming
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
TENANT = TenantId("default")
QUESTIONS = ("My card was stolen.", "Where is my money?", "I moved to another town.")


@dataclass(frozen=True)
class Reloading:
    """A wheel over a real engine that a test may kill, and adapters of known log-probabilities."""

    wheel: Wheel
    process: "subprocess.Popen[str]"
    port: int
    adapters: Sequence[Path]
    points: Sequence[list[ProbePoint]]
    """Of each adapter, as a trainer computes them."""


def logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1)


def computed(model: Any, adapter: Path, prompts: Sequence[list[int]]) -> list[ProbePoint]:
    """What a trainer computes for the most likely tokens after each prompt."""
    base = [logprobs(model, prompt) for prompt in prompts]
    adapted = PeftModel.from_pretrained(model, adapter)
    points: list[ProbePoint] = []
    for prompt, plain in zip(prompts, base, strict=True):
        values, tokens = logprobs(adapted, prompt).topk(64)
        points.append(
            ProbePoint(
                prompt_ids=prompt,
                policy=dict(zip(tokens.tolist(), values.tolist(), strict=True)),
                base=dict(zip(tokens.tolist(), plain[tokens].tolist(), strict=True)),
            )
        )
    adapted.unload()
    return points


@pytest.fixture(scope="module")
def trained(
    model_dir: Path, model_template: ChatTemplate, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, list[ProbePoint]]]:
    """Random adapters, and what a trainer says about them."""
    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = [model_template.opening("Be brief.", [], [("user", text)]) for text in QUESTIONS]
    adapters = [random_adapter(folder / f"a{n}", model_dir, rank=8, seed=n) for n in range(2)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would spin for each other on busy cores
    try:
        return [(adapter, computed(model, adapter, prompts)) for adapter in adapters]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def reloading(
    database_url: str,
    model_dir: Path,
    model_template: ChatTemplate,
    trained: list[tuple[Path, list[ProbePoint]]],
    tmp_path: Path,
) -> Iterator[Reloading]:
    base = json.loads((model_dir / "noria.json").read_text())["base"]
    with Bridge() as bridge, engine_process(model_dir) as (url, engine):
        bridge.call(migrate(database_url))
        bridge.call(migrate(database_url, folder=MIGRATIONS, schema="flywheel"))
        database = bridge.call(opened(database_url))
        client = OpenAIEngine(url)
        wheel = Wheel(
            url=database_url,
            home=tmp_path / "home",
            bridge=bridge,
            database=database,
            engine=client,
            domains={"letters": letters()},
            recipes={},
            workplace=Workplace(MemoryBackend(state_dir=tmp_path / "box"), {}, model_template),
            base=Policy(id=PolicyId(model_dir.name), base=base),
            model_dir=model_dir,
        )
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        yield Reloading(wheel, engine, port, [a for a, _ in trained], [p for _, p in trained])
        engine.kill()
        bridge.call(client.close())
        bridge.call(database.__aexit__(None, None, None))


async def opened(url: str) -> Database:
    return await Database(url, size=2).__aenter__()


def registered(reloading: Reloading, number: int, points: list[ProbePoint] | None = None) -> Any:
    lineage = Lineage(domain="letters", domain_digest="sha256:d", stage="sft")
    return register(
        reloading.wheel,
        TENANT,
        reloading.adapters[number],
        lineage,
        points or reloading.points[number],
        at=dt.datetime(2026, 7, 1, tzinfo=dt.UTC),
    )


async def run(wheel: Wheel, policy: Policy) -> Executed:
    """One short run of the letters domain by the policy, through the real loop."""
    domain = wheel.domains["letters"]
    short = domain.limits.model_copy(update={"steps": 2, "tokens_per_step": 8})
    attempt = Attempt(
        run_id=RunId(f"run_{policy.id}"),
        task=Task(id="t", domain="letters", input={"message": "my card was stolen"}),
        policy=policy,
        sampling=Sampling(seed=1),
    )
    executor = RunExecutor(wheel.workplace, wheel.engine)
    return await executor.execute(attempt, replace(domain, limits=short), MemoryRecorder())


def test_what_is_loaded_is_what_was_trained(reloading: Reloading) -> None:
    wheel = reloading.wheel
    adapter, other = registered(reloading, 0), registered(reloading, 1, reloading.points[0])
    report = load(wheel, adapter)
    assert report.served == adapter.name
    assert report.worst < 1e-3
    assert report.moved > 0.1
    assert report.compared >= report.draws // 2
    as_base = wheel.bridge.call(probe(wheel.engine, wheel.base.id, reloading.points[0]))
    assert not as_base.passed
    with pytest.raises(ProbeFailed, match="engine and trainer differ"):
        load(wheel, other)
    assert wheel.bridge.call(wheel.engine.models()) == [wheel.base.id, adapter.name]
    unload(wheel, adapter)
    assert wheel.bridge.call(wheel.engine.models()) == [wheel.base.id]


def test_a_killed_engine_serves_again_what_it_served(reloading: Reloading, model_dir: Path) -> None:
    wheel = reloading.wheel
    adapter = registered(reloading, 0)
    promote(wheel, TENANT, adapter.name, by="ana", reason="better")
    with pytest.raises(Conflict):
        unload(wheel, adapter)
    assert reconcile(wheel) == []
    reloading.process.kill()
    reloading.process.wait()
    assert reconcile(wheel) == [], "the engine is away: a later call goes on"
    with engine_process(model_dir, reloading.port):
        assert wheel.bridge.call(wheel.engine.models()) == [wheel.base.id]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wheel.bridge.call, run(wheel, policy_of(adapter)))
            assert reconcile(wheel) == [adapter.name]
            outcome = waiting.result(120).outcome
        assert outcome.state is not RunState.ERROR, outcome.reason
        assert outcome.usage.sampled_tokens > 0


def test_reloads_under_load_fail_no_request(reloading: Reloading) -> None:
    wheel = reloading.wheel
    engine = wheel.engine
    assert isinstance(engine, OpenAIEngine)
    prompt = wheel.workplace.template.opening("Be brief.", [], [("user", QUESTIONS[0])])
    seen = Load(wheel.base.id)

    async def reload() -> list[float]:
        async with clients(engine, wheel.base.id, prompt, seen):
            return await reloads(engine, reloading.adapters, prompt, seen, rounds=5)

    assert len(wheel.bridge.call(reload())) == 5
    assert seen.failures == []
    assert seen.wrongly_served == 0
    assert seen.answered >= 5, "others were served meanwhile"
    last = CompletionRequest(seen.newest, prompt, 1, seed=1)
    assert wheel.bridge.call(engine.complete(last)).served_policy == seen.newest
