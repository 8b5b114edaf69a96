"""The trainer as a child process: started, listened to, stopped, never left behind.

Torch lives and dies in the child; whoever calls this imports none of it. The child has a session of
its own and dies with its parent. It is listened to line by line; silent too long, it is told to
write its stacks to the log and ended, and a wish to stop ends it between two lines. A folder whose
job is already done is not trained again, so a worker that was killed repeats nothing.

Another machine runs the same job by being handed the folder.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flywheel.training.errors import BreakerTripped, TrainingFailed, TrainingStopped
from flywheel.training.job import (
    ADAPTER_FOLDER,
    JOB_FILE,
    RESULT_FILE,
    ROWS_FILE,
    Progress,
    TrainingJob,
    TrainingResult,
    TrainingRow,
)
from runtime.settings import child_environment

LOG_FILE = "log.txt"
GLANCE_SECONDS = 0.5
"""How long a wish to stop may wait for the next look."""
STACKS_SECONDS = 5.0
"""How long a silent trainer may take to write its stacks."""
TAIL_LINES = 40


def run_training(
    folder: Path,
    job: TrainingJob,
    rows: Iterable[TrainingRow],
    *,
    on_progress: Callable[[Progress], None],
    stop: Callable[[], bool],
    silence_seconds: float = 120.0,
    nice: int = 10,
) -> TrainingResult:
    """Train in a child process; `folder` then holds the adapter.

    `on_progress` hears every line, so it is also the heartbeat; `stop` is asked twice a second.
    Raises TrainingFailed, or TrainingStopped where `stop` said so. A folder that holds the result
    of an equal job returns it at once.
    """
    if (done := finished(folder, job)) is not None:
        return done
    _write(folder, job, rows)
    with _trainer(folder, nice) as process:
        failed = _listen(_Lines(process), on_progress, stop, silence_seconds, folder)
        status = process.wait()
    if status != 0 or failed is not None:
        kind = BreakerTripped if status == BreakerTripped.status else TrainingFailed
        raise kind(failed or _ending(status), _tail(folder))
    done = finished(folder, job)
    if done is None:
        raise TrainingFailed("the trainer ended well and left no result", _tail(folder))
    return done


def finished(folder: Path, job: TrainingJob) -> TrainingResult | None:
    """The result the folder holds, if it is this job's and its adapter is there."""
    try:
        same = TrainingJob.model_validate_json((folder / JOB_FILE).read_bytes()) == job
        result = TrainingResult.model_validate_json((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return result if same and (folder / ADAPTER_FOLDER).is_dir() else None


def _write(folder: Path, job: TrainingJob, rows: Iterable[TrainingRow]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    with (folder / ROWS_FILE).open("w", encoding="utf-8") as lines:
        lines.writelines(f"{row.model_dump_json()}\n" for row in rows)
    (folder / JOB_FILE).write_text(job.model_dump_json(), encoding="utf-8")


# ---------------------------------------------------------------- the child


@contextmanager
def _trainer(folder: Path, nice: int) -> Generator[subprocess.Popen[bytes]]:
    """The running child; whatever happens inside, it has ended afterwards."""
    own = [str(folder), "--parent", str(os.getpid()), "--nice", str(nice)]
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flywheel.training", *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )
    with process:  # closes the pipe and waits
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    return child_environment(
        # Idle threads must sleep: the engine and the runners share these cores.
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="0",
        # Everything is on this machine already; nothing is to be asked of a network.
        HF_HUB_OFFLINE="1",
        TRL_EXPERIMENTAL_SILENCE="1",
        TOKENIZERS_PARALLELISM="false",
    )


@dataclass(slots=True)
class _Lines:
    """The lines of a process's standard output, as they come."""

    process: subprocess.Popen[bytes]
    _rest: bytes = b""

    def within(self, seconds: float) -> list[bytes] | None:
        """Lines that have come, [] for none within `seconds`, None at the end of the stream."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return []
        data = os.read(self.process.stdout.fileno(), 65_536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None


def _listen(
    lines: _Lines,
    on_progress: Callable[[Progress], None],
    stop: Callable[[], bool],
    silence_seconds: float,
    folder: Path,
) -> str | None:
    """Pass progress on until the stream ends; returns the reason the trainer gave for failing."""
    failed: str | None = None
    heard = time.monotonic()
    while (said := lines.within(GLANCE_SECONDS)) is not None:
        for line in said:
            failed = _reason(line) or failed
            if failed is None:
                on_progress(Progress.model_validate_json(line))
        if stop():
            raise TrainingStopped("training was asked to stop")
        heard = time.monotonic() if said else heard
        if time.monotonic() - heard > silence_seconds:
            _dump_stacks(lines.process)
            reason = f"the trainer said nothing for {silence_seconds:g} seconds and was ended"
            raise TrainingFailed(reason, _tail(folder))
    return failed


def _reason(line: bytes) -> str | None:
    return json.loads(line).get("failed")


def _dump_stacks(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGABRT)  # the trainer's fault handler writes all stacks
    process.send_signal(signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STACKS_SECONDS)


def _ending(status: int) -> str:
    if status < 0:
        return f"the trainer was ended by {signal.Signals(-status).name}"
    return f"the trainer ended with status {status}"


def _tail(folder: Path) -> str:
    text = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-TAIL_LINES:])
