"""The one bridge from the synchronous flywheel to the asynchronous runtime.

A `Bridge` owns an event loop in a thread; `call` runs a coroutine there and returns its result.
Engines, demonstrations and run stores are reached through it, and nowhere else does the flywheel
meet asyncio. One bridge per process.
"""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class Bridge:
    """Use as a context manager; `call` is safe from any thread but its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bridge", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result; what it raises is raised here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
