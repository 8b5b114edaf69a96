"""The journal of a demo: the same command goes on, another one starts anew."""

from pathlib import Path

import pytest

from deploy.demo.journal import NAME, Journal


def test_an_unfinished_demo_goes_on(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, ("easy", 1))
    assert not journal.resumed
    journal.note(corrected=["run_1"], cycle_id="cycle_1")
    again = Journal.open(tmp_path, ("easy", 1))
    assert again.resumed
    assert again.notes == journal.notes


def test_another_plan_and_a_finished_demo_start_anew(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, ("easy", 1))
    journal.note(cycle_id="cycle_1")
    other = Journal.open(tmp_path, ("easy", 2))
    assert (other.resumed, other.notes.cycle_id) == (False, None)
    journal.close()
    again = Journal.open(tmp_path, ("easy", 1))
    assert not again.resumed
    assert again.notes.demo_id != journal.notes.demo_id


def test_a_journal_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{half a journ")
    assert not Journal.open(tmp_path, 1).resumed


def test_time_adds_up_over_interruptions(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), journal.timed("practice"):
        raise KeyboardInterrupt
    first = journal.notes.seconds["practice"]
    assert first > 0
    again = Journal.open(tmp_path, 1)
    with again.timed("practice"):
        pass
    assert again.notes.seconds["practice"] > first
