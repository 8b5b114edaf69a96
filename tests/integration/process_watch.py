"""Waiting for processes to be gone, by the kernel's event and never by a guess at time."""

import os
import select
from collections.abc import Iterable
from pathlib import Path


def survivors(pids: Iterable[int], seconds: float = 10.0) -> list[int]:
    """The processes that still run after `seconds`; returns as soon as none does."""
    return [pid for pid in pids if not _gone(pid, seconds)]


def _gone(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def descendants(root: int) -> list[int]:
    """Every process below `root`, however deep."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = list[int](), [root]
    while left:
        left.extend(below := parents.get(left.pop(), []))
        found.extend(below)
    return found
