"""Family `files`: what the agent left in its workspace."""

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest

from runtime.checks.protocol import Artefacts, CheckDeclaration
from runtime.checks.registry import bind, problems

FILES = {
    "report.json": b'{"total": 12, "lines": [{"sum": 3.5}]}',
    "table.csv": b'name,amount\nada,"1,200.00"\nben,5\n',
    "notes/a.txt": b"hello\r\nworld\n",
    "bad.json": b'{"a": 1, "a": 2}',
    "nan.json": b'{"a": NaN}',
    "deep.json": b"[" * 100_000,
    "bytes.txt": b"\xff\xfe",
    "empty.txt": b"",
}


def passes(
    kind: str, parameters: Mapping[str, Any], initial: Mapping[str, bytes] | None = None
) -> bool:
    declaration = CheckDeclaration(name="check", kind=kind, parameters=dict(parameters))
    artefacts = Artefacts(input={}, answer=None, files=FILES, initial_files=initial or {})
    outcome = bind(declaration).judge(artefacts, None)
    assert outcome.reason
    return outcome.passed


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "files.exists",
            [{"path": "bytes.txt"}, {"path": "empty.txt", "at_least_bytes": 0}],
            [{"path": "empty.txt"}, {"path": "notes"}, {"path": "none"}],
        ),
        ("files.absent", [{"path": "none"}], [{"path": "empty.txt"}]),
        (
            "files.equals",
            [{"path": "notes/a.txt", "value": "hello\nworld"}],
            [
                {"path": "notes/a.txt", "value": "hello world"},
                {"path": "bytes.txt", "value": ""},
                {"path": "none", "value": ""},
            ],
        ),
        (
            "files.glob",
            [{"pattern": "notes/*"}, {"pattern": "*.exe", "at_least": 0, "at_most": 0}],
            [{"pattern": "*.exe"}, {"pattern": "*.json", "at_most": 2}],
        ),
        (
            "files.hash",
            [{"path": "empty.txt", "sha256": hashlib.sha256(b"").hexdigest()}],
            [{"path": "notes/a.txt", "sha256": "0" * 64}, {"path": "none", "sha256": "0" * 64}],
        ),
        (
            "files.json",
            [
                {"path": "report.json", "field": "total", "value": 12.0},
                {"path": "report.json", "field": "lines.0.sum", "value": 3.5},
            ],
            [
                {"path": "report.json", "field": "total", "value": "12"},
                {"path": "report.json", "field": "nothing", "value": None},
                {"path": "bad.json", "field": "a", "value": 2},
                {"path": "nan.json", "field": "a", "value": 0},
                {"path": "deep.json", "field": "a", "value": 0},
                {"path": "table.csv", "field": "a", "value": 0},
            ],
        ),
        (
            "files.csv",
            [
                {"path": "table.csv", "row": 0, "column": "amount", "value": 1200},
                {"path": "table.csv", "row": 1, "column": "amount", "value": 6, "tolerance": 1},
                {"path": "table.csv", "row": 1, "column": "name", "value": "ben"},
            ],
            [
                {"path": "table.csv", "row": 1, "column": "amount", "value": 6},
                {"path": "table.csv", "row": 2, "column": "amount", "value": 5},
                {"path": "table.csv", "row": 0, "column": "sum", "value": 1200},
                {"path": "table.csv", "row": 0, "column": "name", "value": 5},
                {"path": "none", "row": 0, "column": "name", "value": "ada"},
            ],
        ),
    ],
)
def test_each_kind_accepts_what_it_should_and_nothing_else(
    kind: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]
):
    assert [p for p in good if not passes(kind, p)] == []
    assert [p for p in bad if passes(kind, p)] == []


def test_unchanged_sees_added_changed_and_removed_files():
    assert passes("files.unchanged", {}, FILES)
    assert passes("files.unchanged", {"outside_of": ["notes/*"]}, {**FILES, "notes/a.txt": b"x"})
    assert not passes("files.unchanged", {"outside_of": ["notes/*"]}, {**FILES, "empty.txt": b"x"})
    assert not passes("files.unchanged", {}, {**FILES, "removed.txt": b""})
    added = {path: content for path, content in FILES.items() if path != "empty.txt"}
    assert not passes("files.unchanged", {}, added)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_paths_out_of_the_workspace_are_refused_when_the_domain_loads(path: str):
    declaration = CheckDeclaration(name="c", kind="files.exists", parameters={"path": path})
    assert "relative to the workspace" in problems(declaration)[0][1]
