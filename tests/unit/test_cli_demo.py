"""`noria demo`: what it refuses before anything starts, and reports pooled from their files."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.__main__ import app
from deploy.home import CannotRun

RUN = CliRunner()


def test_real_messages_need_all_three_files(tmp_path: Path) -> None:
    ended = RUN.invoke(app, ["demo", "--messages", str(tmp_path / "train.csv")])
    assert ended.exit_code == 1
    assert "all of --messages CSV, --held-out CSV and --map YAML" in ended.output


@pytest.mark.parametrize(
    "command", [["demo"], ["tasks", "import", "a.csv", "--domain", "d", "--map", "m.yaml"]]
)
def test_a_seed_that_nothing_stores_is_refused_at_once(command: list[str]) -> None:
    ended = RUN.invoke(app, [*command, "--seed", str(2**63)])
    assert ended.exit_code == 2
    assert f"'--seed': Input should be less than or equal to {2**63 - 1}" in ended.output


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_only_reports_can_be_pooled(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "demo-report.json"
    if content is not None:
        path.write_text(content)
    ended = RUN.invoke(app, ["demo", "--pool", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(ended.exception, CannotRun)
    assert str(path) in str(ended.exception)
    assert not (tmp_path / "out").exists()
