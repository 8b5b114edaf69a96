"""Domain folders: what loads, and what each mistake says about file, line and remedy."""

from pathlib import Path
from typing import Any

import pytest

from connectors.support_desk import SupportDeskFactory
from runtime.domain import (
    Domain,
    digest_of,
    discover,
    load_domain,
    validate_answer,
    validate_expectation,
    validate_input,
)
from runtime.errors import DomainError, InputError, ToolError
from runtime.tools import FinishTool

GOOD = """\
name: memo
title: Memo
description: Write a memo.
input: {type: object, additionalProperties: false, properties: {topic: {default: rain}}}
output:
  type: object
  required: [text, count]
  properties: {text: {type: string}, count: {type: integer}}
tools: [read_file, lookup_customer, finish]
finish: finish
connectors: {support_desk: simulate}
limits: {steps: 4}
checks:
  - name: complete
    kind: schema
  - name: not_empty
    kind: text.length
    parameters: {field: answer.text, at_least: 1}
"""
PROMPT = "Write about the topic, then {{ finish }} within {{ steps }} steps."


def write(parent: Path, yaml: str = GOOD, prompt: str | None = PROMPT, **files: str) -> Path:
    folder = parent / "memo"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "domain.yaml").write_text(yaml)
    if prompt is not None:
        (folder / "prompt.md").write_text(prompt)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def load(folder: Path) -> Domain:
    return load_domain(
        folder, known_tools=["read_file"], known_connectors={"support_desk": SupportDeskFactory()}
    )


def mistakes(folder: Path) -> list[str]:
    with pytest.raises(DomainError) as caught:
        load(folder)
    return str(caught.value).splitlines()


def test_a_good_folder_loads_with_its_prompt_rendered_and_defaults_filled(tmp_path: Path):
    domain = load(write(tmp_path))
    assert domain.prompt == "Write about the topic, then finish within 4 steps."
    assert domain.limits.steps == 4
    assert domain.reward == "strict"
    assert domain.checks[0].parameters["schema"] == domain.output_schema
    assert domain.source is None


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("title: Memo", "titel: Memo", 2, "unknown key 'titel'; allowed: name, title"),
        ("title: Memo", "title: ''", 2, "title: string should have at least 1 character"),
        ("limits: {steps: 4}", "limits: {steps: 0}", 12, "limits.steps: input should be greater"),
        ("limits: {steps: 4}", "limits: {stepz: 4}", 12, "'limits.stepz'; allowed: steps, seconds"),
        ("[read_file,", "[open_file,", 9, "unknown tool 'open_file'; allowed: finish, lookup_cust"),
        ("[read_file,", "[finish,", 9, "tool 'finish' is listed twice"),
        ("finish: finish", "finish: done", 10, "finish 'done' is not among the tools; allowed: f"),
        ("{support_desk: simulate}", "{crm: simulate}", 11, "unknown connector 'crm'; allowed: su"),
        (
            "{support_desk: simulate}",
            "{support_desk: live}",
            11,
            "no mode 'live'; allowed: simulate",
        ),
        (
            "kind: text.length",
            "kind: text.long",
            17,
            "unknown check kind 'text.long'; allowed: sch",
        ),
        ("at_least: 1}", "at_leest: 1}", 18, "not_empty: unknown; allowed: field, unit, at_least"),
        ("field: answer.text", "field: reply.text", 18, "starts with 'reply'; allowed: input, ans"),
        ("name: not_empty", "name: complete", 16, "two checks are named 'complete'"),
        ("type: integer", "type: integre", 5, "output: not a JSON Schema (draft 2020-12) at prop"),
        ("count: {type: integer}", "count: {$ref: 'http://x/y'}", 5, "leaves the schema; allowed:"),
        ("name: memo", "name: note", 1, "name 'note' differs from its folder; allowed: memo"),
        ("name: memo", "name: memo\nname: memo", 2, "key 'name' is written twice"),
        ("limits: {steps: 4}", "limits: &l {steps: 4}", 12, "anchors and aliases are not allowed"),
        ("title: Memo", "title: [Memo", 3, "not YAML"),
        (
            "finish: finish",
            "finish: finish\ntask: '{{ inptu }}'",
            11,
            "variable 'inptu'; allowed: ",
        ),
    ],
)
def test_each_mistake_names_its_line_and_what_is_allowed(
    tmp_path: Path, old: str, new: str, line: int, said: str
):
    assert GOOD.count(old) == 1
    found = mistakes(write(tmp_path, GOOD.replace(old, new)))
    assert any(f"memo/domain.yaml:{line}: " in each and said in each for each in found), found


def test_all_mistakes_are_reported_at_once(tmp_path: Path):
    broken = GOOD.replace("title: Memo", "titel: Memo").replace("[read_file", "[open_file")
    found = mistakes(write(tmp_path, broken, prompt=None))
    assert len(found) == 4  # unknown key, missing key, unknown tool, missing prompt
    assert any("memo/prompt.md:1: missing" in each for each in found)


def test_a_check_that_reads_the_expectation_must_say_so(tmp_path: Path):
    broken = GOOD + (
        "  - name: right\n    kind: text.equals\n"
        "    parameters: {field: answer.text, value_of: expectation.text}\n"
    )
    assert "needs: expectation" in mistakes(write(tmp_path, broken))[0]
    load(write(tmp_path, broken + "    needs: expectation\n"))


def test_a_domain_whose_checks_can_all_stand_aside_is_refused(tmp_path: Path):
    optional = GOOD.replace("kind: schema", "kind: schema\n    required: false").replace(
        "kind: text.length", "kind: text.length\n    needs: expectation"
    )
    assert "no check judges every run" in mistakes(write(tmp_path, optional))[0]


@pytest.mark.parametrize(
    ("prompt", "line", "said"),
    [
        ("one\n{{ customer }}", 2, "unknown variable 'customer'; allowed: title, finish"),
        ("one\ntwo\n{% if %}", 3, "not a jinja2 template"),
        ("{{ output.nothing.there }}", 1, "cannot be rendered"),
    ],
)
def test_a_broken_prompt_names_its_line(tmp_path: Path, prompt: str, line: int, said: str):
    found = mistakes(write(tmp_path, prompt=prompt))
    assert f"memo/prompt.md:{line}: " in found[0]
    assert said in found[0]


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("import sys\nraise RuntimeError('no')", 2, "RuntimeError: no"),
        ("def generate(:\n", 1, "SyntaxError"),
        ("x = 1", 1, "lacks generate, demonstrate"),
        ("raise SystemExit(0)", 1, "SystemExit"),
    ],
)
def test_a_task_file_that_does_not_import_is_a_mistake(
    tmp_path: Path, code: str, line: int, said: str
):
    found = mistakes(write(tmp_path, tasks=code))
    assert f"memo/tasks.py:{line}: " in found[0]
    assert said in found[0]


def test_tasks_may_import_their_siblings_and_two_versions_coexist(tmp_path: Path):
    code = "from .words import WORD\ndef generate(**_): return [WORD]\ndef demonstrate(t, e): ..."
    first = load(write(tmp_path / "a", tasks=code, words="WORD = 1"))
    second = load(write(tmp_path / "b", tasks=code, words="WORD = 2"))
    assert first.source
    assert second.source
    drawn = [
        s.generate(split="s", level="l", count=1, seed=0) for s in (first.source, second.source)
    ]
    assert drawn == [[1], [2]]


def test_the_digest_covers_every_byte_and_name_but_no_caches(tmp_path: Path):
    folder = write(tmp_path)
    before = digest_of(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert digest_of(folder) == before
    (folder / "extra.txt").write_text("")
    named = digest_of(folder)
    assert named != before
    (folder / "extra.txt").rename(folder / "other.txt")
    assert digest_of(folder) not in (before, named)


def test_links_are_refused(tmp_path: Path):
    folder = write(tmp_path)
    (folder / "leak").symlink_to("/etc/hostname")
    assert "memo/leak:1: a link" in mistakes(folder)[0]


def test_discover_finds_every_folder_and_refuses_a_second_of_the_same_name(tmp_path: Path):
    write(tmp_path / "builtin")
    write(tmp_path / "extra")
    known = {"support_desk": SupportDeskFactory()}
    found = discover(tmp_path / "builtin", None, known_tools=["read_file"], known_connectors=known)
    assert list(found) == ["memo"]
    with pytest.raises(DomainError, match="'memo' is built in"):
        discover(
            tmp_path / "builtin",
            tmp_path / "extra",
            known_tools=["read_file"],
            known_connectors=known,
        )
    with pytest.raises(DomainError, match="is not a folder"):
        discover(tmp_path / "nowhere", None, known_tools=[], known_connectors={})


def test_inputs_are_completed_and_each_wrong_field_is_named(tmp_path: Path):
    domain = load(write(tmp_path))
    assert validate_input(domain, {}) == {"topic": "rain"}
    with pytest.raises(InputError) as caught:
        validate_answer(domain, {"text": 3})
    fields = [each["field"] for each in caught.value.detail["errors"]]
    assert fields == ["count", "text"]
    with pytest.raises(InputError, match="not finite"):
        validate_answer(domain, {"text": "x", "count": float("nan")})


@pytest.mark.parametrize(
    ("expectation", "field"),
    [
        ({}, ""),
        ({"text": 3}, "text"),
        ({"text": "x", "tone": "kind"}, ""),
        ({"count": None}, "count"),
    ],
)
def test_an_expectation_is_a_part_of_an_answer(
    tmp_path: Path, expectation: dict[str, Any], field: str
):
    domain = load(write(tmp_path))
    with pytest.raises(InputError, match="expectation of domain memo") as caught:
        validate_expectation(domain, expectation)
    assert [each["field"] for each in caught.value.detail["errors"]] == [field]
    for part in ({"text": "x"}, {"count": 1}, {"text": "x", "count": 1}):
        assert validate_expectation(domain, part) == part


def test_an_expectation_follows_references_and_gets_no_defaults(tmp_path: Path):
    shared = (
        "  properties: {text: {$ref: '#/definitions/words'}, count: {type: integer, default: 1}}\n"
        "  definitions: {words: {type: string, maxLength: 5}}\n"
        "  anyOf: [{required: [count]}, {minProperties: 2}]"
    )
    plain = "  properties: {text: {type: string}, count: {type: integer}}"
    domain = load(write(tmp_path, GOOD.replace(plain, shared)))
    assert validate_expectation(domain, {"text": "x"}) == {"text": "x"}
    with pytest.raises(InputError, match="too long"):
        validate_expectation(domain, {"text": "x" * 6})


def test_a_thousand_wrong_fields_are_not_told_one_by_one(tmp_path: Path):
    many = GOOD.replace(
        "properties: {topic: {default: rain}}", "properties: {topics: {items: {type: string}}}"
    )
    domain = load(write(tmp_path, many))
    with pytest.raises(InputError) as caught:
        validate_input(domain, {"topics": list(range(1_000))})
    assert len(caught.value.detail["errors"]) == 50
    assert str(caught.value).endswith("; and 950 more")


def test_answers_end_where_their_pattern_ends(tmp_path: Path):
    """For a person's correction and for the finishing tool alike."""
    strict = GOOD.replace("{text: {type: string}", "{text: {type: string, pattern: '^[a-z]+$'}")
    domain = load(write(tmp_path, strict))
    good, wrong = {"text": "a", "count": 1}, {"text": "a\n", "count": 1}
    assert validate_answer(domain, good) == FinishTool(domain.output_schema).validate(good)
    with pytest.raises(InputError, match="does not match"):
        validate_answer(domain, wrong)
    with pytest.raises(ToolError, match="does not match"):
        FinishTool(domain.output_schema).validate(wrong)


def test_a_pattern_that_cannot_be_judged_is_named_when_the_domain_loads(tmp_path: Path):
    broken = GOOD.replace("{text: {type: string}", "{text: {type: string, pattern: '(?=x)'}")
    assert (
        "output: pattern '(?=x)' is not google-re2 syntax" in mistakes(write(tmp_path, broken))[0]
    )
