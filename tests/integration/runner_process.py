"""A runner as its own process, for tests that kill it. Takes its wiring as JSON in argv.

Prints one line per moment that a test waits for: `ready`, and `stalled` when the scripted engine
was asked for the turn it was told never to answer.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from runtime.database import Database, Doorbell
from runtime.domain import load_domain
from runtime.engine.protocol import Completion, CompletionRequest
from runtime.engine.templates import ChatTemplate
from runtime.run_executor import RunExecutor, Workplace
from runtime.runner import Runner
from runtime.sandbox.bubblewrap import BubblewrapBackend, find_bwrap
from runtime.sandbox.tools import sandbox_tools
from runtime.testing import byte_template
from tests.ledger import LedgerFactory

DOMAIN = Path(__file__).parent.parent / "domains" / "ledger"
SCRIPT = (
    'write_file path=note.txt content="paid 5"',
    "post amount=5",
    "read_file path=note.txt",
    'finish note="paid 5"',
)


class ScriptByTurn:
    """A fake engine that knows the turn from the prompt, so that any runner may ask it next."""

    def __init__(self, template: ChatTemplate, stall_at: int | None) -> None:
        self._template = template
        self._stall_at = stall_at

    async def complete(self, request: CompletionRequest) -> Completion:
        turn = self._template.decode(request.prompt_ids).count("assistant\n") - 1
        if turn == self._stall_at:
            print("stalled", flush=True)
            await asyncio.Event().wait()
        sampled = self._template.reply(SCRIPT[turn])
        return Completion(
            sampled=sampled,
            logprobs=[-0.5] * len(sampled),
            finish_reason="stop",
            served_policy=request.policy,
            prompt_tokens=len(request.prompt_ids),
        )

    async def models(self) -> list[str]:
        return ["scripted"]

    async def exact(self) -> bool:
        return False

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
        raise AssertionError("no adapter is loaded here")

    async def unload_adapter(self, name: str) -> None:
        raise AssertionError("no adapter is loaded here")

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing is held open."""


async def serve(wiring: dict[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    template = byte_template()
    connectors = {"ledger": LedgerFactory(Path(wiring["book"]))}
    backend = BubblewrapBackend(state_dir=Path(wiring["state"]), bwrap=find_bwrap(None))
    domain = load_domain(
        DOMAIN,
        known_tools=[*(tool.name for tool in sandbox_tools()), "finish"],
        known_connectors=connectors,
    )
    executor = RunExecutor(
        Workplace(backend, connectors, template), ScriptByTurn(template, wiring["stall_at"])
    )
    async with Database(wiring["url"]) as database, Doorbell(wiring["url"]) as doorbell:
        runner = Runner(
            database,
            doorbell,
            executor,
            {domain.name: domain},
            concurrency=4,
            lease_seconds=wiring["lease_seconds"],
        )
        await runner.run(stop, lambda: print("ready", flush=True))
    await backend.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
