"""`noria test`: linters, formatting, import contracts, types, then every test.

All of them run, whatever fails, so that one run tells everything; pytest comes last, so that its
closing line is the last one. With arguments, pytest runs alone with these.

Scaling past one machine: CI runs this command and nothing of its own; pytest's `-k` and `-m` split
the tests over machines.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.home import CannotRun
from runtime.settings import CLONE

LINTERS: dict[str, tuple[str, ...]] = {
    "ruff check": ("ruff", "check", ".", "noria"),
    "ruff format": ("ruff", "format", "--check", ".", "noria"),
    "import contracts": ("lint-imports",),
    "types": ("basedpyright", "--pythonpath", sys.executable),
}


def run_quality(arguments: Sequence[str]) -> int:
    """The exit status: 0 only if everything held. Raises CannotRun where a tool is missing."""
    failed = [] if arguments else [name for name in LINTERS if _run(name, LINTERS[name]) != 0]
    if failed:
        print(f"\nFAILED before the tests: {', '.join(failed)}", flush=True)
    status = _run("pytest", ("pytest", *arguments))
    return status or int(bool(failed))


def _run(name: str, command: Sequence[str]) -> int:
    print(f"\n== {name}", flush=True)
    program = Path(sys.executable).with_name(command[0])
    if not program.exists():
        raise CannotRun(f"{program} is not installed; `./noria test` installs it")
    return subprocess.run([program, *command[1:]], cwd=CLONE, check=False).returncode
