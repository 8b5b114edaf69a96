"""What every benchmark reports: rows with the raw medians of both arms, and the machine it ran on.

A row that has a target says whether it holds, so that a command can end with the right status and a
reader can check the ratio. Pure data; measuring is elsewhere.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    what: str
    value: float
    unit: str
    floor: float | None = None
    """The same without what is measured here."""
    ratio: float | None = None
    """value / floor"""
    target: float | None = None
    op: str | None = None
    holds: bool | None = None
    peer: str | None = None


def report(bench: str, rounds: int, rows: Sequence[Row], packages: Sequence[str]) -> dict[str, Any]:
    """The JSON of `noria bench NAME --json`."""
    return {
        "bench": bench,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "versions": {name: version(name) for name in packages},
        },
        "rounds": rounds,
        "rows": [asdict(row) for row in rows],
    }


def holds(result: dict[str, Any]) -> bool:
    """True where every row that has a target holds."""
    return all(row["holds"] for row in result["rows"] if row["target"] is not None)


def table(result: dict[str, Any]) -> Table:
    """The result as people read it."""
    shown = Table("what", "value", "unit", "without", "ratio", "target", title=result["bench"])
    for row in result["rows"]:
        target = "" if row["target"] is None else f"{row['op']} {row['target']:g}"
        verdict = {None: "", True: " holds", False: " MISSED"}[row["holds"]]
        cells = (_number(row["value"]), row["unit"], _number(row["floor"]), _number(row["ratio"]))
        shown.add_row(row["what"], *cells, f"{target}{verdict}")
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
