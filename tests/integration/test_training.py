"""The trainer as a process of its own: what it leaves, what it survives, whom it agrees with."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flywheel.recipe import LoraRecipe, SftRecipe
from flywheel.training.errors import TrainingFailed, TrainingStopped
from flywheel.training.job import Progress, TrainingJob, TrainingResult, TrainingRow
from flywheel.training.process import finished, run_training

ROWS = [
    TrainingRow(
        id=f"demo{n}",
        group_id=f"task{n}",
        input_ids=[5, 6, 7, 8, 10 + n, 11, 2],
        mask=[0, 0, 0, 0, 1, 1, 1],
    )
    for n in range(8)
]


def sft_job(base: Path, steps: int = 2, **changes: Any) -> TrainingJob:
    values: dict[str, Any] = {
        "stage": "sft",
        "base": str(base),
        "seed": 3,
        "lora": LoraRecipe(rank=4, alpha=8),
        "sft": SftRecipe(steps=steps, batch_size=4, learning_rate=1e-2, minimum_rows=4),
        "probe_prompts": [[5, 6, 7, 8]],
        "threads": 1,
    }
    return TrainingJob(**(values | changes))


def trained(
    folder: Path,
    job: TrainingJob,
    rows: list[TrainingRow] = ROWS,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    silence_seconds: float = 120.0,
) -> TrainingResult:
    return run_training(
        folder,
        job,
        rows,
        on_progress=on_progress,
        stop=stop,
        silence_seconds=silence_seconds,
        nice=0,
    )


# ---------------------------------------------------------------- what it leaves


def test_a_job_leaves_an_adapter_a_probe_and_progress(tiny_base: Path, tmp_path: Path) -> None:
    job, heard = sft_job(tiny_base), list[Progress]()
    result = trained(tmp_path, job, on_progress=heard.append)
    assert (result.steps, result.rows, result.trained_tokens) == (2, 8, 24)
    assert [m.step for m in result.metrics] == [1, 2]
    assert {"loss", "grad_norm", "learning_rate"} <= result.metrics[0].metrics.keys()
    (point,) = result.probe
    assert len(point.policy) == len(point.base) == 20
    assert point.policy != pytest.approx(point.base, abs=1e-4)
    assert (heard[0].phase, heard[-1].phase) == ("loading", "saving")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (raw["r"], raw["peft_type"], raw["base_model_name_or_path"]) == (4, "LORA", "tiny")
    assert not list(tmp_path.rglob("*.partial"))

    again = trained(tmp_path, job, on_progress=lambda progress: pytest.fail("it trained again"))
    assert again == result
    assert finished(tmp_path, sft_job(tiny_base, seed=4)) is None


# ---------------------------------------------------------------- what it survives


def test_a_failure_tells_its_reason_and_leaves_no_adapter(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed) as failure:
        trained(tmp_path, sft_job(tiny_base), ROWS[:2])
    assert failure.value.reason.startswith("2 rows to imitate are too few")
    assert not (tmp_path / "adapter").exists()
    assert finished(tmp_path, sft_job(tiny_base)) is None


def test_a_crash_ends_with_the_log(tmp_path: Path) -> None:
    job = sft_job(tmp_path / "nowhere")
    with pytest.raises(TrainingFailed) as failure:
        trained(tmp_path / "job", job)
    assert "ended with status 1" in failure.value.reason
    assert "nowhere" in failure.value.log_tail


def test_stopping_ends_the_process(tiny_base: Path, tmp_path: Path) -> None:
    heard: list[Progress] = []
    with pytest.raises(TrainingStopped):
        trained(
            tmp_path, sft_job(tiny_base, steps=10_000), on_progress=heard.append,
            stop=lambda: any(progress.step >= 1 for progress in heard),
        )  # fmt: skip
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "result.json").exists()


def test_a_silent_trainer_writes_its_stacks_and_is_ended(tiny_base: Path, tmp_path: Path) -> None:
    def freeze(progress: Progress) -> None:
        if progress.step >= 1:
            os.kill(*processes_of(tmp_path), signal.SIGSTOP)

    with pytest.raises(TrainingFailed, match="said nothing for 25 seconds"):
        trained(
            tmp_path, sft_job(tiny_base, steps=10_000), on_progress=freeze, silence_seconds=25
        )  # fmt: skip
    assert "most recent call first" in (tmp_path / "log.txt").read_text()
    assert processes_of(tmp_path) == []


def test_the_trainer_dies_with_its_parent(tiny_base: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from flywheel.training.job import *; "
        "from flywheel.training.process import run_training; folder = Path(sys.argv[1]); "
        "job = TrainingJob.model_validate_json((folder / 'asked.json').read_text()); "
        "lines = (folder / 'asked.jsonl').read_text().splitlines(); "
        "rows = [TrainingRow.model_validate_json(line) for line in lines]; "
        "run_training(folder, job, rows, stop=lambda: False, "
        "on_progress=lambda p: print(p.step, flush=True))"
    )
    (tmp_path / "asked.json").write_text(sft_job(tiny_base, steps=10_000).model_dump_json())
    (tmp_path / "asked.jsonl").write_text("\n".join(row.model_dump_json() for row in ROWS))
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        while parent.stdout.readline().strip() == "0":
            pass
        (trainer,) = processes_of(tmp_path)
        watched = os.pidfd_open(trainer)
        parent.kill()
    assert exited(watched, seconds=20)
    assert not (tmp_path / "result.json").exists()


def processes_of(folder: Path) -> list[int]:
    """Pids of trainers that work on the folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            if b"flywheel.training" in words and os.fsencode(folder) in words:
                found.append(int(entry.name))
    return found


def exited(pidfd: int, *, seconds: float) -> bool:
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)
