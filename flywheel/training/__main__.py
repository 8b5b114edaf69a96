"""`python -m flywheel.training FOLDER`: train what the folder's job says, leave the result there.

Standard output carries progress, one JSON object a line, and at a failure `{"failed": reason}`; the
log goes to standard error. The result is written last: a folder without one holds an unfinished
job, and nothing in it is used. With `--parent PID` the process ends when that parent does.
"""

import argparse
import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TextIO

from flywheel.training.errors import TrainingFailed
from flywheel.training.job import (
    JOB_FILE,
    RESULT_FILE,
    ROWS_FILE,
    Progress,
    TrainingJob,
    TrainingRow,
)
from flywheel.training.orphan import die_with


def main() -> None:
    parser = argparse.ArgumentParser(prog="flywheel.training", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--nice", type=int, default=0, help="lower this process's priority by so much"
    )
    parser.add_argument("--parent", type=int, help="pid of the process to end with")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with(arguments.parent)
    _give_way(arguments.nice)
    faulthandler.enable()  # a worker that gives up sends SIGABRT: the stacks go to the log
    progress, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints belongs in the log
    try:
        _train(arguments.folder, progress)
    except TrainingFailed as failure:
        print(json.dumps({"failed": failure.reason}), file=progress, flush=True)
        sys.exit(failure.status)


def _give_way(nice: int) -> None:
    """Let serving have the cores first. Linux weighs whole sessions against each other before it
    looks at nice, so this session's weight is lowered as well."""
    os.nice(nice)
    with suppress(OSError):  # a kernel without autogroups needs no more
        Path("/proc/self/autogroup").write_text(str(nice))


def _train(folder: Path, progress: TextIO) -> None:
    for module in ("torch", "transformers", "peft", "trl.trainer.grpo_trainer"):
        print(Progress(phase="loading").model_dump_json(), file=progress, flush=True)
        import_module(module)  # seconds each, more on a busy machine: one sign of life for each
    from flywheel.training.progress import Reporter
    from flywheel.training.train import train

    job = TrainingJob.model_validate_json((folder / JOB_FILE).read_text(encoding="utf-8"))
    result = train(folder, job, list(_rows(folder / ROWS_FILE)), Reporter(progress))
    fresh = folder / f"{RESULT_FILE}.partial"
    fresh.write_text(result.model_dump_json(), encoding="utf-8")
    fresh.rename(folder / RESULT_FILE)


def _rows(path: Path) -> Iterator[TrainingRow]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield TrainingRow.model_validate_json(line)


if __name__ == "__main__":
    main()
