"""Which runs may teach something: decisions on what the evidence says, without a database."""

from typing import Any

import pytest

from flywheel.lessons.evidence import Asked, Heard
from flywheel.lessons.mining import Candidate, Category, candidates, distinct, judged, message_of
from runtime.run import RunId, RunState

RIGHT = {"queue": "fraud", "priority": "high"}
ONE, TWO, THREE = RunId("run_1"), RunId("run_2"), RunId("run_3")


def heard(run_id: RunId = ONE, seq: int = 9, **changes: Any) -> Heard:
    values: dict[str, Any] = {"by": "Ada", "answer": {"queue": "cards"}, "correction": None}
    return Heard(run_id, seq, **{**values, **changes})


def corrected(run_id: RunId, correction: dict[str, Any] | None = None) -> Candidate:
    return Candidate(
        run_id=run_id, seq=9, category=Category.CORRECTED, correction=correction or RIGHT
    )


def test_the_last_correction_counts_whatever_was_rated_after_it():
    said = [
        heard(seq=7, correction={"queue": "cash"}),
        heard(seq=8, correction=RIGHT, by="Ben"),
        heard(seq=9),
    ]
    found = judged(said)
    assert (found.category, found.seq, found.by) == (Category.CORRECTED, 8, "Ben")
    assert found.correction == RIGHT


def test_without_a_correction_a_bad_rating_is_all_there_is():
    found = judged([heard(seq=7), heard(seq=8, by="Ben")])
    assert (found.category, found.seq, found.correction) == (Category.DOWN_RATED, 8, None)


@pytest.mark.parametrize(
    ("answer", "category"),
    [(RIGHT, Category.CONFIRMED), ({"queue": "fraud"}, "corrected"), (None, "corrected")],
)
def test_an_answer_that_a_person_repeats_is_confirmed(answer: Any, category: str):
    assert judged([heard(answer=answer, correction=RIGHT)]).category == category


def test_a_run_is_one_candidate_and_people_say_more_than_checks():
    found = candidates(
        [heard(TWO, correction=RIGHT), heard(THREE)],
        [(ONE, RunState.TIMED_OUT), (TWO, RunState.REJECTED)],
    )
    assert [(each.run_id, each.category, each.seq) for each in found] == [
        (ONE, "timed_out", 0),
        (TWO, "corrected", 9),
        (THREE, "down_rated", 9),
    ]


# ---------------------------------------------------------------- near-duplicates

SAME = Asked({"message": "My card\u2019s  GONE", "customer_id": "C1"}, ())


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (Asked({"customer_id": "C2", "message": "my card's gone "}, ()), 1),
        (Asked({"customer_id": "C1", "message": "my card is gone"}, ()), 2),
        (Asked({"customer_id": "C1", "message": "my card's gone"}, ("letter.txt 12ab",)), 2),
    ],
)
def test_equal_messages_with_equal_files_are_one_lesson(other: Asked, kept: int):
    found = distinct([corrected(ONE), corrected(TWO)], {ONE: SAME, TWO: other})
    assert [each.run_id for each in found] == [ONE, TWO][:kept], "the oldest stands for both"


def test_equal_messages_with_different_answers_are_two_lessons():
    found = [corrected(ONE), corrected(TWO, {"queue": "cards"})]
    assert distinct(found, {ONE: SAME, TWO: SAME}) == found


def test_candidates_without_a_correction_are_never_merged():
    silent = [Candidate(run_id=run_id, seq=0, category="rejected") for run_id in (ONE, TWO)]
    assert distinct(silent, {ONE: SAME, TWO: SAME}) == silent


def test_an_input_without_text_is_compared_whole():
    assert message_of({"b": 1, "a": [2]}) == message_of({"a": [2], "b": 1})
    assert message_of({"a": 1}) != message_of({"a": 2})
