"""Rows rebuilt from recorded turns, and advantages within a group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.errors import TrajectoryBroken
from flywheel.training.job import Group, TrainingRow
from flywheel.training.trajectories import advantages, rows_of, signal
from runtime.context import prompt_hash
from runtime.run import ModelCall, PolicyId


def call(
    turn: int,
    prompt: list[int],
    sampled: list[int],
    *,
    parent: int | None = None,
    delta: list[int] | None = None,
    trainable: bool = True,
    temperature: float = 1.0,
) -> ModelCall:
    """A turn whose whole prompt is `prompt`, of which `delta` is new."""
    return ModelCall(
        turn=turn,
        parent_turn=parent,
        prompt_length=len(prompt),
        prompt_hash=prompt_hash(prompt),
        prompt_delta=prompt if delta is None else delta,
        sampled=sampled,
        logprobs=[-0.1 * token for token in sampled],
        finish_reason="stop",
        temperature=temperature,
        policy_id=PolicyId("p1"),
        template_digest="sha256:t",
        trainable=trainable,
    )


def two_turns() -> list[ModelCall]:
    return [
        call(0, [1, 2, 3], [4, 5]),
        call(1, [1, 2, 3, 4, 5, 6, 7], [8, 9], parent=0, delta=[6, 7]),
    ]


def built(calls: list[ModelCall], *, demonstration: bool = False) -> list[TrainingRow]:
    return rows_of("run1", "task1", calls, reward=1.0, demonstration=demonstration)


def test_a_row_holds_what_was_sampled_and_masks_the_rest() -> None:
    (row,) = built(two_turns())
    assert row.input_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.mask == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert row.old_logprobs == pytest.approx([0, 0, 0, -0.4, -0.5, 0, 0, -0.8, -0.9])
    assert (row.id, row.group_id, row.reward, row.policy_id) == ("run1", "task1", 1.0, "p1")


def test_a_demonstration_has_no_logprobs_no_policy_and_no_reward() -> None:
    greedy = [turn.model_copy(update={"trainable": False, "logprobs": []}) for turn in two_turns()]
    assert built(greedy) == []
    (row,) = built(greedy, demonstration=True)
    assert row.mask == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert row.demonstration
    assert (row.policy_id, row.reward) == ("", None)


def test_branches_of_one_turn_train_it_once() -> None:
    again = call(2, [1, 2, 3, 4, 5, 10], [11], parent=0, delta=[10])
    first, second = built([*two_turns(), again])
    assert (first.id, second.id) == ("run1/1", "run1/2")
    assert first.mask == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert second.input_ids == [1, 2, 3, 4, 5, 10, 11]
    assert second.mask == [0, 0, 0, 0, 0, 0, 1]
    assert second.old_logprobs[:6] == [0.0] * 6


def test_a_fork_with_a_whole_prompt_is_a_row_of_its_own() -> None:
    compacted = call(2, [1, 20], [21, 22])
    first, second = built([*two_turns(), compacted])
    assert sum(first.mask) == 4
    assert (second.input_ids, second.mask) == ([1, 20, 21, 22], [0, 0, 1, 1])


def test_a_branch_with_an_untrainable_call_gives_no_row() -> None:
    first, second = two_turns()
    assert built([first, second.model_copy(update={"trainable": False})]) == []


def test_a_changed_id_is_found_and_named() -> None:
    first, second = two_turns()
    changed = first.model_copy(update={"sampled": [4, 6]})
    with pytest.raises(TrajectoryBroken, match="run run1, turn 1: the rebuilt prompt has 7 ids"):
        built([changed, second])


def test_a_missing_id_is_found_and_both_lengths_are_told() -> None:
    first, second = two_turns()
    short = second.model_copy(update={"prompt_delta": [6]})
    with pytest.raises(TrajectoryBroken, match=r"turn 1: .* has 6 ids .* the recorded one 7"):
        built([first, short])


def test_a_missing_parent_is_told() -> None:
    with pytest.raises(TrajectoryBroken, match="its parent turn 0 is not an earlier turn"):
        built(two_turns()[1:])


def test_fewer_logprobs_than_ids_are_refused() -> None:
    first, second = two_turns()
    with pytest.raises(TrajectoryBroken, match="turn 1: 1 logprobs for 2 sampled ids"):
        built([first, second.model_copy(update={"logprobs": [-0.1]})])


def test_two_policies_in_one_row_are_refused() -> None:
    first, second = two_turns()
    with pytest.raises(TrajectoryBroken, match="one policy was expected"):
        built([first, second.model_copy(update={"policy_id": "p2"})])


# ---------------------------------------------------------------- advantages


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages([1.0, 0.0]) == pytest.approx([0.70700, -0.70700], abs=1e-4)
    assert advantages([1.0, 1.0, 0.0, 0.0])[0] == pytest.approx(0.8659, abs=1e-4)


def test_attempts_without_a_reward_leave_the_others_as_they_are() -> None:
    assert advantages([1.0, 0.0, None, None]) == [*advantages([1.0, 0.0]), 0.0, 0.0]
    assert advantages([1.0, None]) == [0.0, 0.0]
    assert advantages([]) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12))
def test_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float | None]) -> None:
    relative = advantages(rewards)
    assert sum(relative) == pytest.approx(0, abs=1e-6)
    known = [(r, a) for r, a in zip(rewards, relative, strict=True) if r is not None]
    assert [a for _, a in sorted(known)] == sorted(a for _, a in known)


def group(*rewards: float | None) -> Group:
    return Group(
        "task1",
        [
            TrainingRow(
                id=f"r{n}", group_id="task1", input_ids=[1, 2], mask=[0, 1],
                old_logprobs=[0.0, -1.0], reward=reward,
            )
            for n, reward in enumerate(rewards)
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [((1.0, 0.0), True), ((1.0, 1.0), False), ((1.0, None), False), ((None, None), False)],
)
def test_a_group_teaches_where_its_rewards_differ(
    rewards: tuple[float | None, ...], teaches: bool
) -> None:
    assert signal(group(*rewards)) is teaches
