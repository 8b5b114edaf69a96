"""What a training process is given and what it leaves: a folder, read and written by both sides.

A trainer is a process of its own that knows neither the database nor the engine: `job.json` and
`rows.jsonl` go in; lines of progress come out while it works, and at the end `adapter/` and
`result.json`. So a worker can watch it, stop it and start it again, and the same folder can be
handed to a machine with an accelerator. Nothing here imports torch.
"""

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from flywheel.recipe import GrpoRecipe, LoraRecipe, SftRecipe
from runtime.run import Record

JOB_FILE = "job.json"
ROWS_FILE = "rows.jsonl"
RESULT_FILE = "result.json"
ADAPTER_FOLDER = "adapter"
OPTIMIZER_FILE = "optimizer.safetensors"
"""State of the optimiser after the last step, for a later round of the same candidate."""


class TrainingRow(Record):
    """One trajectory, token-exact, ready for a trainer. All lists but the ids have their length."""

    id: str
    """Run id, with `/<branch>` where a run's context forked."""
    group_id: str
    """Pool task the trajectory attempted: the group of the group-relative advantage."""
    input_ids: list[int]
    mask: list[int]
    """1 where a policy (or the demonstrator) wrote the token, 0 for prompt and tool results."""
    old_logprobs: list[float] = Field(default_factory=list[float])
    """Behaviour policy's natural-log probability where the mask is 1, 0.0 elsewhere; empty for a
    demonstration, which no policy sampled."""
    temperature: float = 1.0
    policy_id: str = ""
    """Behaviour policy; empty for a demonstration."""
    reward: float | None = None
    """In [0, 1]; None for a demonstration."""

    @property
    def demonstration(self) -> bool:
        return not self.old_logprobs

    @model_validator(mode="after")
    def _aligned(self) -> "TrainingRow":
        lengths = {len(self.input_ids), len(self.mask), len(self.old_logprobs) or len(self.mask)}
        if len(lengths) != 1:
            raise ValueError(f"row {self.id}: ids, mask and logprobs differ in length: {lengths}")
        if 1 not in self.mask:
            raise ValueError(f"row {self.id}: nothing in it was written by a policy")
        return self


class ProbePoint(Record):
    """One place at which trainer and engine must say the same: the next token after a prompt."""

    prompt_ids: list[int]
    policy: dict[int, float]
    """Token id → natural-log probability under the adapter, temperature 1: the most likely ones."""
    base: dict[int, float]
    """The same ids under the base model."""


class TrainingJob(Record):
    stage: Literal["sft", "grpo"]
    base: str
    """Folder of the fp32 base model."""
    start: str | None = None
    """Adapter folder to go on from; None starts a new adapter."""
    reference: str | None = None
    """Adapter folder that GRPO's KL term (`beta` > 0) measures to; None means `start`."""
    optimizer: str | None = None
    """`optimizer.safetensors` of the round before, where there was one."""
    seed: int
    lora: LoraRecipe
    sft: SftRecipe | None = None
    grpo: GrpoRecipe | None = None
    threads: int | None = None
    """CPU threads; None means all cores."""
    probe_prompts: list[list[int]] = Field(default_factory=list[list[int]])
    """Prompts of the probe points; the trainer fills in what it computes."""


class Progress(Record):
    """One line on the trainer's standard output, also its heartbeat."""

    phase: Literal["loading", "training", "saving"]
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    """loss, grad_norm, learning_rate, entropy; with GRPO also reward, reward_std, kl, ratio_mean,
    ratio_max, clip_share: of the policy before the step to the one that sampled its groups (kl: to
    the reference, where `beta` > 0). A job's last step has the same after its update, measured on
    some of its rows: update_kl, update_ratio_mean, update_ratio_max."""


class TrainingResult(Record):
    adapter: str
    """Folder name within the job's: adapter_model.safetensors and adapter_config.json."""
    steps: int
    rows: int
    """Rows that entered a gradient."""
    trained_tokens: int
    """Tokens with mask 1 that entered a gradient, over all steps."""
    metrics: list[Progress]
    """Every step's."""
    probe: list[ProbePoint]
    seconds: float
    peak_memory_bytes: int


class Group(NamedTuple):
    """G attempts at one task by one policy."""

    group_id: str
    rows: list[TrainingRow]
