"""A connector for tests: a ledger outside the process, one line per effect that happened.

Its `post` is consequential: the book is a file that survives any runner, so a test can count how
often each key really took effect.
"""

from collections.abc import Sequence
from pathlib import Path

from runtime.tools import (
    ConnectorMode,
    ConnectorState,
    Effect,
    Json,
    Tool,
    ToolContext,
    ToolOutput,
    tool,
)


class Ledger:
    def __init__(self, book: Path, state: ConnectorState) -> None:
        self._book = book
        self._state = state

    def tools(self) -> Sequence[Tool]:
        return [tool(self.post, effect=Effect.CONSEQUENTIAL)]

    async def post(self, context: ToolContext, amount: int) -> ToolOutput:
        """Post an amount."""
        with self._book.open("a") as book:
            book.write(f"{context.key} {amount}\n")
        self._state.save({"balance": (self._state.load() or {"balance": 0})["balance"] + amount})
        return ToolOutput(f"posted {amount}", {"amount": amount})

    def snapshot(self) -> dict[str, Json]:
        return self._state.load() or {"balance": 0}

    def effects(self) -> dict[str, int]:
        lines = self._book.read_text().splitlines() if self._book.exists() else []
        keys = [line.split()[0] for line in lines]
        return {key: keys.count(key) for key in keys}

    async def close(self) -> None:
        """Nothing is held open."""


class LedgerFactory:
    name = "ledger"
    modes: frozenset[ConnectorMode] = frozenset({"simulate"})
    tool_names: Sequence[str] = ("post",)

    def __init__(self, book: Path) -> None:
        self._book = book

    async def open(
        self,
        *,
        mode: ConnectorMode,
        seed: int,
        initial: dict[str, Json] | None,
        state: ConnectorState,
    ) -> Ledger:
        return Ledger(self._book, state)
