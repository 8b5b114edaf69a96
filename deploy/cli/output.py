"""How commands speak: tables and sentences through one console, JSON alone on stdout."""

import json
import sys
from typing import Any, NoReturn

from rich.console import Console

console = Console()


def print_json(value: Any) -> None:
    """One JSON object on stdout, undecorated."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def fail(sentence: str) -> NoReturn:
    """Say what was wrong on stderr and end with status 1."""
    sys.stderr.write(f"noria: {sentence}\n")
    sys.exit(1)
