"""Probe points: what the trained policy and its base say next, for an engine to be held to."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor

from flywheel.training.job import ProbePoint

TOP = 20


@torch.no_grad()
def probe(model: PeftModel, prompts: Sequence[Sequence[int]]) -> list[ProbePoint]:
    """The `TOP` most likely next tokens of every prompt, at temperature 1."""
    model.eval()
    points: list[ProbePoint] = []
    for prompt in prompts:
        policy = _next_token(model, prompt)
        with model.disable_adapter():
            base = _next_token(model, prompt)
        ids = torch.topk(policy, TOP).indices.tolist()
        points.append(
            ProbePoint(
                prompt_ids=list(prompt),
                policy={token: policy[token].item() for token in ids},
                base={token: base[token].item() for token in ids},
            )
        )
    return points


def _next_token(model: PeftModel, prompt: Sequence[int]) -> Tensor:
    """[vocabulary] natural-log probabilities."""
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)
