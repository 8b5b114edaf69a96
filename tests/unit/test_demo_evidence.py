"""From views to the result: GRPO's steps, seconds, what is fixed, the gate's word, samples."""

from datetime import timedelta
from typing import Any

from deploy.demo.evidence import (
    Seen,
    fixed,
    gate_of,
    grpo_steps,
    machine,
    sample_of,
    seconds,
    signal_share,
)
from deploy.demo.journal import Notes
from flywheel.records import CycleState, StageName, StageState
from flywheel.schemas import CycleView, StageView
from tests.fixtures.demo_runs import NOW, ran_of, task_of

FIELDS = ("queue", "priority")
RIGHT = {"queue": "cards", "priority": "low", "reason": "card late"}
WRONG = {"queue": "fraud", "priority": "low", "reason": "card late"}


def stage(name: StageName, number: int = 0, took: float = 1.0, **metrics: Any) -> StageView:
    return StageView(
        seq=0,
        name=name,
        round=number,
        state=StageState.DONE,
        metrics=metrics,
        started_at=NOW,
        finished_at=NOW + timedelta(seconds=took),
    )


def cycle(*stages: StageView, **fields: Any) -> CycleView:
    values: dict[str, Any] = {
        "id": "cycle_1",
        "domain": "support_triage",
        "date": NOW.date(),
        "turn": 0,
        "trigger": "manual",
        "state": CycleState.DONE,
        "created_at": NOW,
        "stages": list(stages),
        **fields,
    }
    return CycleView.model_validate(values)


ROUNDS = (
    stage(StageName.ROLLOUTS, 1, 10, reward=0.5, groups=8, groups_with_signal=6),
    stage(StageName.GRPO, 1, 20, curve=[{"ratio_mean": 1.0, "kl": 0.01}]),
    stage(StageName.ROLLOUTS, 2, 11, reward=0.6, groups=6, groups_with_signal=3),
    stage(StageName.GRPO, 2, 21, curve=[{"ratio_mean": 1.1, "kl": 0.02}, {"ratio_mean": 1.2}]),
)


def test_steps_of_grpo_carry_their_rounds_groups() -> None:
    steps = grpo_steps(ROUNDS)
    assert [(s.step, s.reward, s.ratio, s.kl) for s in steps] == [
        (1, 0.5, 1.0, 0.01),
        (2, 0.6, 1.1, 0.02),
        (3, 0.6, 1.2, None),
    ]
    assert [(s.groups, s.groups_with_signal) for s in steps] == [(8, 6), (3, 1), (3, 1)]


def test_the_share_with_signal_is_over_all_groups() -> None:
    assert signal_share(ROUNDS) == 9 / 14
    assert signal_share([]) is None
    assert grpo_steps([]) == []


def test_seconds_are_in_order_with_rounds_added_up() -> None:
    notes = Notes(plan="", demo_id="d", load=0.1, seconds={"practice": 2.04, "report_grpo": 3.0})
    assert list(seconds(notes, ROUNDS).items()) == [
        ("practice", 2.0),
        ("corrections", 0.0),
        ("report_base", 0.0),
        ("rollouts", 21.0),
        ("grpo", 41.0),
        ("report_grpo", 3.0),
    ]


def test_fixed_is_what_failed_before_and_is_right_now() -> None:
    tasks = [task_of(name) for name in ("a", "b", "c")]
    before = [ran_of(task, "timed_out", reason="said nothing") for task in tasks]
    again = [
        ran_of(tasks[0], "accepted", role="fixed", answer=RIGHT),
        ran_of(tasks[1], "accepted", role="fixed", answer=WRONG),
        ran_of(tasks[2], "timed_out", role="fixed"),
    ]
    found = fixed(Seen(before, before, {}, again, cycle()), FIELDS)
    assert [(f.message, f.before, f.after) for f in found] == [
        ("message of a", "no answer: said nothing", "cards, low, card late")
    ]
    assert (found[0].run_before, found[0].run_after) == ("run_practice_a_0", "run_fixed_a_0")


def test_a_letter_is_part_of_what_the_customer_said() -> None:
    task = task_of("a", files={"letter.txt": b"my card\nis lost " + b"x" * 400})
    before, after = ran_of(task, "rejected", answer=WRONG), ran_of(task, "accepted", answer=RIGHT)
    said = fixed(Seen([before], [before], {}, [after], cycle()), FIELDS)[0].message
    assert said.startswith("message of a — my card is lost")
    assert len(said) == 300


def test_without_a_decision_the_cycle_says_why() -> None:
    nothing = gate_of(cycle(outcome="nothing_to_learn", reason="3 rows of 16"))
    assert (nothing.outcome, nothing.reasons) == ("nothing_to_learn", ["3 rows of 16"])
    assert gate_of(cycle()).outcome == "insufficient_evidence"


def test_a_sample_is_its_run() -> None:
    sample = sample_of(ran_of(task_of("a"), "accepted", role="sft", member=1))
    assert (sample.task_id, sample.member, sample.passed, sample.valid) == ("a", 1, True, True)
    assert (sample.sampled_tokens, sample.seconds) == (30, 1.5)
    faulty = sample_of(ran_of(task_of("a"), "error", role="sft"))
    assert (faulty.passed, faulty.valid) == (False, False)


def test_the_machine_is_described() -> None:
    found = machine(0.333)
    assert found.cpu
    assert found.cores >= 1
    assert found.load == 0.33
    assert "python" in found.versions
