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


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_only_reports_can_be_pooled(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "demo-report.json"
    if content is not None:
        path.write_text(content)
    ended = RUN.invoke(app, ["demo", "--pool", str(path), "--out", str(tmp_path / "out")])
    assert isinstance(ended.exception, CannotRun)
    assert str(path) in str(ended.exception)
    assert not (tmp_path / "out").exists()
