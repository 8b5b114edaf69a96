"""From a run's recorded model calls to rows a trainer can read, and from rewards to advantages.

Turns are stored as deltas. Here each branch is put together again, turn by turn, and every prompt's
length and hash is compared with the recorded one: a row holds the ids that were sampled, or there
is no row. The mask is 1 exactly where the policy chose the token. Pure functions of recorded data,
so any number of workers can build rows beside each other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from flywheel.training.errors import TrajectoryBroken
from flywheel.training.job import Group, TrainingRow
from runtime.context import prompt_hash
from runtime.run import ModelCall

Value = TypeVar("Value")

STD_EPSILON = 1e-4
"""TRL's GRPOTrainer adds the same to the standard deviation."""


def rows_of(
    run_id: str,
    group_id: str,
    calls: Sequence[ModelCall],
    *,
    reward: float | None,
    demonstration: bool,
) -> list[TrainingRow]:
    """One row for every branch of the run that ends in a sampled reply.

    Turns that several branches share have mask 1 in the first of them only. A branch with a call
    that cannot be trained on (greedy, constrained, without logprobs) gives no row, unless the run
    is taken as a demonstration, which needs no logprobs. Raises TrajectoryBroken.
    """
    by_turn = {call.turn: call for call in calls}
    parents = {call.parent_turn for call in calls}
    leaves = [call for call in calls if call.turn not in parents]
    rows: list[TrainingRow] = []
    trained: set[int] = set()
    for leaf in leaves:
        branch = _branch(run_id, leaf, by_turn)
        if demonstration or all(call.trainable for call in branch):
            name = run_id if len(leaves) == 1 else f"{run_id}/{leaf.turn}"
            new = {call.turn for call in branch} - trained
            rows += _row(name, group_id, branch, new, reward, demonstration=demonstration)
            trained |= new
    return rows


def _branch(run_id: str, leaf: ModelCall, by_turn: Mapping[int, ModelCall]) -> list[ModelCall]:
    """The calls from the branch's root to its leaf, each prompt checked."""
    branch = [leaf]
    while (parent := branch[0].parent_turn) is not None:
        if parent not in by_turn or parent >= branch[0].turn:
            raise TrajectoryBroken(
                f"run {run_id}, turn {branch[0].turn}: its parent turn {parent} is not an earlier "
                f"turn of the run (turns: {sorted(by_turn)})"
            )
        branch.insert(0, by_turn[parent])
    prompt: list[int] = []
    for call in branch:
        prompt += call.prompt_delta
        _check(run_id, call, prompt)
        prompt += call.sampled
    return branch


def _check(run_id: str, call: ModelCall, prompt: Sequence[int]) -> None:
    found, expected = (
        (len(prompt), prompt_hash(prompt)),
        (call.prompt_length, call.prompt_hash),
    )
    if found != expected:
        raise TrajectoryBroken(
            f"run {run_id}, turn {call.turn}: the rebuilt prompt has {found[0]} ids with hash "
            f"{found[1]}, the recorded one {expected[0]} with {expected[1]}"
        )
    if call.logprobs and len(call.logprobs) != len(call.sampled):
        raise TrajectoryBroken(
            f"run {run_id}, turn {call.turn}: {len(call.logprobs)} logprobs for "
            f"{len(call.sampled)} sampled ids"
        )


def _row(
    name: str,
    group_id: str,
    branch: Sequence[ModelCall],
    new: set[int],
    reward: float | None,
    *,
    demonstration: bool,
) -> Iterator[TrainingRow]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for call in branch:
        prompt, reply = [0] * len(call.prompt_delta), len(call.sampled)
        trains = call.turn in new
        ids += [*call.prompt_delta, *call.sampled]
        mask += [*prompt, *([int(trains)] * reply)]
        logprobs += [*map(float, prompt), *(call.logprobs if trains else [0.0] * reply)]
    if 1 in mask:
        yield TrainingRow(
            id=name,
            group_id=group_id,
            input_ids=ids,
            mask=mask,
            old_logprobs=[] if demonstration else logprobs,
            temperature=_single(name, "temperature", {call.temperature for call in branch}),
            policy_id=""
            if demonstration
            else _single(name, "policy", {c.policy_id for c in branch}),
            reward=None if demonstration else reward,
        )


def _single(name: str, what: str, found: set[Value]) -> Value:
    if len(found) != 1:
        raise TrajectoryBroken(
            f"run {name}: one {what} was expected, not {sorted(map(str, found))}"
        )
    return next(iter(found))


# ---------------------------------------------------------------- rewards


def advantages(rewards_G: Sequence[float | None]) -> list[float]:
    """Group-relative advantages of G attempts, (r - mean) / (std + 1e-4); None counts for nothing.

    Mean and sample standard deviation are taken over the attempts that have a reward; the others
    get 0.0. So `[1, 0, None, None]` gives what `[1, 0]` gives. Formula: Shao et al. 2024
    (DeepSeekMath), section 4.1.2, with the epsilon of TRL's GRPOTrainer.
    """
    known = [reward for reward in rewards_G if reward is not None]
    if len(known) < 2:
        return [0.0] * len(rewards_G)
    mean, spread = fmean(known), stdev(known) + STD_EPSILON
    return [0.0 if reward is None else (reward - mean) / spread for reward in rewards_G]


def signal(group: Group) -> bool:
    """Whether the group can teach anything: its known rewards differ."""
    known = {row.reward for row in group.rows if row.reward is not None}
    return len(known) > 1 and not math.isclose(min(known), max(known))
