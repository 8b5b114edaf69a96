"""Labelled messages from a file: what becomes of them, and what each mistake says."""

import dataclasses
import os
from collections import Counter
from pathlib import Path

import pytest

from flywheel.lessons import importing
from flywheel.lessons.importing import MAX_MAP_BYTES, MAX_NAMED, TaskMap, read_map, read_tasks
from runtime.domain import Domain, ImportSource, load_domain, validate_answer, validate_input
from runtime.errors import DomainError, InputError

MAP = TaskMap(input="text", label="category", labels={"lost": "fraud", "rate": "exchange"})
BANKING = Path(__file__).parents[1] / "fixtures" / "banking77_map.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mail.csv"


def wrong(file: Path, domain: Domain, content: str | bytes, task_map: TaskMap = MAP) -> str:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        read_tasks(file, task_map, domain, seed=1)
    said = str(caught.value)
    assert said.startswith(f"{file}: ")
    return said.removeprefix(f"{file}: ")


# ---------------------------------------------------------------- what comes of it


def test_rows_become_tasks_whose_priority_and_reason_follow_the_rules(file: Path, triage: Domain):
    file.write_text('category,text,id\nlost,"where is\nmy card?",1\n\nrate,What is the rate?,2\n')
    one, two = read_tasks(file, MAP, triage, seed=1)
    assert (one.row, two.row) == (2, 4), "an empty line counts, a line break in a cell does not"
    assert one.input["message"] == "where is\nmy card?"
    assert one.expectation["queue"] == "fraud"
    assert one.expectation["priority"] == "high"
    desk = two.connectors["support_desk"]
    customer = desk["customers"][two.input["customer_id"]]
    priority = {"basic": "low", "plus": "normal", "gold": "high"}[customer["plan"]]
    assert two.expectation == {
        "queue": "exchange",
        "priority": priority,
        "reason": "exchange question",
    }
    assert desk["ticket"] == {"customer_id": two.input["customer_id"]}


def test_reading_again_in_another_order_makes_the_same_tasks(file: Path, triage: Domain):
    lines = [f"rate,message {number}\n" for number in range(50)]
    file.write_text("category,text\n" + "".join(lines))
    there = read_tasks(file, MAP, triage, seed=1)
    file.write_text("\ufeffcategory,text\n" + "".join(reversed(lines)))
    back = read_tasks(file, MAP, triage, seed=1)
    assert [t.model_copy(update={"row": 0}) for t in there] == [
        t.model_copy(update={"row": 0}) for t in reversed(back)
    ]
    assert read_tasks(file, MAP, triage, seed=2) != back
    drawn = [each.connectors["support_desk"]["customers"] for each in there]
    records = [record for customers in drawn for record in customers.values()]
    assert len({record["plan"] for record in records}) == 3
    assert len({record["status"] for record in records}) == 2


def test_urgent_words_and_closed_accounts_follow_the_rules(triage: Domain):
    source = triage.source
    assert isinstance(source, ImportSource)
    for text in ("I think it is a SCAM", "my card was stolen", "a thief took my card"):
        task = source.imported(text, "payments", seed=0)
        assert task.expectation is not None
        assert (task.expectation["queue"], task.expectation["priority"]) == ("payments", "high")
    plain = [source.imported(f"my card, no {n}", "payments", seed=0) for n in range(40)]
    assert {str((each.expectation or {})["priority"]) for each in plain} == {
        "low",
        "normal",
        "high",
    }
    for number in range(40):
        task = source.imported(f"a loan {number}", "sales", seed=0)
        [record] = task.connectors["support_desk"]["customers"].values()
        queue = "accounts" if record["status"] == "closed" else "sales"
        assert task.expectation
        assert task.expectation["queue"] == queue
        assert validate_input(triage, task.input) == task.input
        validate_answer(triage, task.expectation)


def test_a_file_may_use_the_domains_own_labels(file: Path, triage: Domain):
    file.write_text("text,queue\nhello,human\n")
    [task] = read_tasks(file, TaskMap(input="text", label="queue"), triage, seed=1)
    assert task.expectation["queue"] == "human"


# ---------------------------------------------------------------- what is wrong with it


def test_unknown_labels_are_told_with_their_rows_and_those_that_exist(file: Path, triage: Domain):
    said = wrong(file, triage, "text,category\na,lots\nb,lost\nc,lots\nd,list\n")
    assert said == (
        "rows 2, 4: label 'lots' is not in the map; it has lost, rate; "
        "row 5: label 'list' is not in the map; it has lost, rate"
    )
    to_nowhere = MAP.model_copy(update={"labels": {"lost": "crads"}})
    said = wrong(file, triage, "text,category\na,lost\n", to_nowhere)
    assert said.startswith("row 2: unknown queue 'crads'; queues: access, accounts, cards")


def test_many_equal_faults_are_one(file: Path, triage: Domain):
    said = wrong(file, triage, "text,category\n" + "a,lots\n" * 5_000)
    assert f" and {5_000 - MAX_NAMED} more: label 'lots'" in said
    assert len(said) < 300
    said = wrong(file, triage, "text,category\n" + "".join(f"a,x{n}\n" for n in range(99)))
    assert said.endswith(f"and {99 - MAX_NAMED} more faults")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "there is no column 'text'; columns: none: the first line is empty"),
        ("\ntext,category\n", "there is no column 'text'; columns: none: the first line is empty"),
        ("text;category\na;lost\n", "there is no column 'text'; columns: text;category"),
        ("text,category,text\n", "there are 2 columns 'text'; keep one"),
        ("text,category\n", "there is no row below the header"),
        ("text,category\na,lost\nb\n", "row 3: 1 cells, the header has 2"),
        ("text,category\na,b,lost\n", "row 2: 3 cells, the header has 2"),
        ("text,category\n,lost\n", "row 2: input of domain support_triage: message"),
        ('text,category\na,lost\n"b"c,lost\n', "after row 2: no CSV: ',' expected after '\"'"),
        (b"text,category\na,lost\n\xff\xfe,lost\n", "line 3: not UTF-8 (byte 0xff); save it as"),
        ("text,category\na\x00b,lost\n", "row 2: a NUL or half a surrogate pair in 'a\\x00b'"),
        ("text,category\n" + "x" * 4001 + ",lost\n", "row 2: input of domain support_triage: mes"),
        (
            "text,category\na,lost\nb,rate\na,rate\na,lost\n",
            'rows 2, 4, 5: row 2 says {"priority": "high", "queue": "fraud"}; row 4 says ',
        ),
        ("text,category\n" + "x" * 200_000 + ",lost\n", "after row 1: no CSV: field larger"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    file: Path, triage: Domain, content: str | bytes, said: str
):
    assert wrong(file, triage, content).startswith(said)


def test_repeated_rows_and_labels_with_one_answer_contradict_nothing(file: Path, triage: Domain):
    file.write_text("text,category\na,lost\na,lost\na,stolen\n")
    task_map = MAP.model_copy(update={"labels": {"lost": "fraud", "stolen": "fraud"}})
    assert len(read_tasks(file, task_map, triage, seed=1)) == 3


def test_a_file_that_is_too_long_or_too_big(
    file: Path, triage: Domain, monkeypatch: pytest.MonkeyPatch
):
    rows = "text,category\n" + "a,lost\n" * 11
    monkeypatch.setattr(importing, "MAX_ROWS", 11)
    file.write_text(rows)
    assert len(read_tasks(file, MAP, triage, seed=1)) == 11
    assert wrong(file, triage, rows + "b,lost\n") == "more than 11 rows; split the file"
    monkeypatch.setattr(importing, "MAX_BYTES", 20)
    assert wrong(file, triage, rows) == "more than 20 bytes; shorten or split it"


def test_a_file_that_is_not_there(file: Path, triage: Domain):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_tasks(file, MAP, triage, seed=1)


def test_what_may_never_end_is_not_read(file: Path, triage: Domain):
    os.mkfifo(file)
    for endless in (file, Path("/dev/zero"), file.parent):
        with pytest.raises(InputError, match=f"^{endless}: no regular file; save it as one$"):
            read_tasks(endless, MAP, triage, seed=1)
        with pytest.raises(InputError, match="no regular file"):
            read_map(endless)


def test_a_domain_that_imports_nothing_says_so(file: Path, triage: Domain):
    with pytest.raises(InputError, match=r"its tasks.py has no imported\(text, label"):
        read_tasks(file, MAP, dataclasses.replace(triage, source=None), seed=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("input: text\nlabels: {a: cards}\n", "label: field required; keys: input, label, labels"),
        ("input: text\nlabel: b\nlables: {}\n", "lables: unknown key; keys: input, label, labels"),
        ("input: text\nlabel: b\ncustomer: real\n", "customer: input should be 'generated'"),
        ("input: text\nlabel: b\nlabels: {a: 1}\n", "labels.a: input should be a valid string"),
        ("input: [text\n", "no YAML: while parsing"),
        ("[" * 3_000, "no YAML: maximum recursion depth exceeded"),
        ("input: 2026-13-45\n", "no YAML: month must be in 1..12"),
        ("input: text # " + "x" * MAX_MAP_BYTES, f"more than {MAX_MAP_BYTES} bytes"),
        ("- input\n", "a map is an object with the keys input, label, labels, customer"),
    ],
)
def test_a_wrong_map_names_each_key(tmp_path: Path, content: str, said: str):
    path = tmp_path / "map.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_map(path)
    assert str(caught.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize("imported", ["imported = 3", "def imported(text): ..."])
def test_a_domain_whose_imported_nobody_can_call_does_not_load(tmp_path: Path, imported: str):
    folder = tmp_path / "memo"
    folder.mkdir()
    (folder / "domain.yaml").write_text(
        "name: memo\ntitle: Memo\ninput: {type: object}\noutput: {type: object}\n"
        "tools: [finish]\nfinish: finish\nchecks: [{name: complete, kind: schema}]\n"
    )
    (folder / "prompt.md").write_text("Write.")
    (folder / "tasks.py").write_text(
        f"def generate(**given): ...\ndef demonstrate(task, expectation): ...\n{imported}\n"
    )
    with pytest.raises(DomainError, match=r"allowed: imported\(text, label, \*, seed\)"):
        load_domain(folder, known_tools=["finish"], known_connectors={})


# ---------------------------------------------------------------- real messages


def test_banking77_becomes_tasks_of_every_queue_it_knows(real_data: Path, triage: Domain):
    folder = real_data / "banking77"
    train, test = (
        read_tasks(folder / f"{part}.csv", read_map(BANKING), triage, seed=1)
        for part in ("train", "test")
    )
    assert (len(train), len(test)) == (10_003, 3_080)
    assert (train[0].row, train[-1].row) == (2, 10_004)
    queues = Counter(str(each.expectation["queue"]) for each in train)
    assert len(queues) == 12
    assert max(queues.values()) < 0.3 * len(train)
    priorities = Counter(str(each.expectation["priority"]) for each in train)
    assert min(priorities.values()) > 0.2 * len(train)
