"""Engine and trainer say the same of the same tokens: without that, no importance ratio means much.

Measured: at most 4e-5 apart for an fp32 base with a random adapter, merged in the engine and
unmerged in the trainer; the bound leaves room for other processors.
"""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from flywheel.recipe import LoraRecipe
from flywheel.training.job import TrainingJob
from flywheel.training.lora import inner, load_policy, save_adapter
from flywheel.training.probe import probe
from flywheel.training.shared_prefix import score
from flywheel.training.trajectories import rows_of
from runtime.context import Conversation
from runtime.engine.openai import OpenAIEngine
from runtime.engine.protocol import CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.run import ModelCall, PolicyId

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    # peft asks transformers for an attribute that transformers is renaming
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`:UserWarning"),
]
NAME = PolicyId("agreement")


@pytest.fixture(scope="module")
def job(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """A job that starts from a random adapter, large enough to change what is said."""
    folder = tmp_path_factory.mktemp("agreement") / "adapter"
    job = TrainingJob(stage="sft", base=str(model_dir), seed=5, lora=LoraRecipe(rank=8, alpha=16))
    policy = load_policy(job)
    torch.manual_seed(5)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    save_adapter(policy, folder)
    return job.model_copy(update={"start": str(folder)})


@pytest_asyncio.fixture
async def served(local_engine: OpenAIEngine, job: TrainingJob) -> AsyncGenerator[OpenAIEngine]:
    await local_engine.load_adapter(NAME, str(job.start))
    yield local_engine
    await local_engine.unload_adapter(NAME)


async def attempt(
    engine: OpenAIEngine, template: ChatTemplate, seed: int, question: str
) -> list[ModelCall]:
    """Two sampled turns with something said in between."""
    opening = template.opening("Answer briefly.", [], [("user", question)])
    conversation, calls = Conversation(template, opening), list[ModelCall]()
    for turn in range(2):
        request = CompletionRequest(NAME, conversation.prompt, max_tokens=12, seed=seed + turn)
        reply = await engine.complete(request)
        calls.append(conversation.commit(reply, policy_id=NAME, temperature=1.0))
        conversation.observe([("lookup", "plan: gold")])
    return calls


async def test_recorded_logprobs_are_the_trainers(
    served: OpenAIEngine, model_template: ChatTemplate, job: TrainingJob
) -> None:
    rows = [
        row
        for seed, question in enumerate(["Name a colour.", "Name a colour.", "Name a river."])
        for row in rows_of(
            f"run{seed}",
            question,
            await attempt(served, model_template, 10 * seed, question),
            reward=0.0,
            demonstration=False,
        )
    ]
    policy = load_policy(job)
    with torch.no_grad():
        found = score(inner(policy), [r.input_ids for r in rows], [r.mask for r in rows])
        with policy.disable_adapter():
            base = score(inner(policy), [r.input_ids for r in rows], [r.mask for r in rows])
    recorded = torch.zeros_like(found.logprobs_B_T)
    for at, row in enumerate(rows):
        recorded[at, : len(row.old_logprobs)] = torch.tensor(row.old_logprobs)
    assert (found.logprobs_B_T - recorded).abs().max() < 1e-3
    assert (base.logprobs_B_T - recorded).abs().max() > 0.1


async def test_the_probe_is_what_the_engine_samples_from(
    served: OpenAIEngine, model_template: ChatTemplate, job: TrainingJob
) -> None:
    prompt = model_template.opening("Answer briefly.", [], [("user", "Name a colour.")])
    (point,) = probe(load_policy(job), [prompt])
    request = CompletionRequest(NAME, prompt, max_tokens=1, temperature=1.0, seed=3)
    (token,), (logprob,) = (reply := await served.complete(request)).sampled, reply.logprobs
    assert point.policy[token] == pytest.approx(logprob, abs=1e-3)
    assert point.policy != pytest.approx(point.base, abs=0.05)
