"""Where a demo's tasks come from: splits and seeds apart, real messages chosen once each."""

import csv
from pathlib import Path

import pytest

from deploy.demo.tasks import MessageFiles, from_files, generated, is_right
from flywheel.lessons.compiler import decisive_fields
from runtime.domain import Domain
from runtime.errors import InputError
from tests.fixtures.demo_runs import task_of

MAP = """\
input: text
label: category
labels: {card_arrival: cards, pending_transfer: transfers}
customer: generated
"""


def test_no_two_seeds_and_no_two_splits_share_a_task(triage: Domain) -> None:
    first = generated(triage, level="easy", seed=1, practice=20, report=20)
    other = generated(triage, level="easy", seed=2, practice=20, report=20)
    ids = [t.id for each in (first, other) for t in (*each.practice, *each.report)]
    assert len(ids) == len(set(ids)) == 2 * (60 + 20)
    assert {t.split for t in first.report} == {"report"}
    assert not {t.family for t in first.practice} & {t.family for t in first.report}
    assert first.gate == []


def _csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "category"), *rows])
    return path


@pytest.fixture
def files(tmp_path: Path) -> MessageFiles:
    labels = ["card_arrival", "pending_transfer"]
    train = [(f"where is parcel {n}", labels[n % 2]) for n in range(30)]
    held_out = [(f"what about thing {n}", labels[n % 2]) for n in range(20)]
    (tmp_path / "map.yaml").write_text(MAP)
    return MessageFiles(
        _csv(tmp_path / "train.csv", [*train, train[0]]),
        _csv(tmp_path / "test.csv", [*held_out, train[0]]),
        tmp_path / "map.yaml",
    )


def test_real_messages_are_distinct_and_apart(triage: Domain, files: MessageFiles) -> None:
    found = from_files(triage, files, seed=1, practice=10, gate=8, report=12)
    practice = [t.input["message"] for t in found.practice]
    gate = [t.input["message"] for t in found.gate]
    report = [t.input["message"] for t in found.report]
    assert (len(practice), len(gate), len(report)) == (30, 8, 12)
    everything = [*practice, *gate, *report]
    assert len(set(everything)) == len(everything)
    assert all(m.startswith("what about thing") for m in (*gate, *report))
    assert all(t.expectation and t.expectation["queue"] in ("cards", "transfers")
               for t in found.report)  # fmt: skip


def test_the_choice_is_the_seeds(triage: Domain, files: MessageFiles) -> None:
    first, again, other = (
        from_files(triage, files, seed=seed, practice=3, gate=4, report=6) for seed in (1, 1, 2)
    )
    assert first == again
    assert [t.input for t in first.report] != [t.input for t in other.report]


def test_too_few_messages_are_told_with_their_file(triage: Domain, files: MessageFiles) -> None:
    with pytest.raises(InputError, match=r"test.csv has 20 distinct messages; the demo needs 32"):
        from_files(triage, files, seed=1, practice=10, gate=20, report=12)


def test_right_is_what_decides(triage: Domain) -> None:
    task, fields = task_of("t0"), decisive_fields(triage)
    assert fields == ("queue", "priority")
    assert is_right(task, {"queue": "cards", "priority": "low", "reason": "other"}, fields)
    assert not is_right(task, {"queue": "cards", "priority": "high", "reason": "card"}, fields)
    assert not is_right(task, None, fields)
