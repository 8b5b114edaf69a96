"""Postgres: connection pool, migrations, named queries, and the doorbell.

SQL is source code: it lives in `runtime/sql/`, queries by name, migrations by number. Migrations
are forward-only, checksummed, and applied under an advisory lock, so that any number of processes
may start at once. Stores never open connections or commit; callers hand them a connection inside a
transaction. LISTEN/NOTIFY is only a doorbell: whoever waits also polls, so a lost notification
costs latency, never work.

Scaling out: every process has its own pool; any Postgres 14 or newer serves, embedded or managed.
"""

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from runtime.errors import StoreError

SQL_FOLDER = Path(__file__).parent / "sql"
MIGRATIONS = SQL_FOLDER / "migrations"
EVENTS_CHANNEL = "noria_events"
QUEUE_CHANNEL = "noria_queue"

Connection = AsyncConnection[dict[str, Any]]


# ---------------------------------------------------------------- named queries


@cache
def queries(path: Path) -> dict[str, str]:
    """The queries of one file by name: each starts with a line `-- name: the_name`."""
    parts = re.split(r"^-- name: (\w+)\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (q.strip().rstrip(";") for q in parts[2::2]), strict=True))


# ---------------------------------------------------------------- pool


class Database:
    """A pool of connections. Use as an async context manager.

    `timeout`: how many seconds a caller waits for a connection before StoreError.
    """

    def __init__(self, url: str, *, size: int = 8, timeout: float = 10.0) -> None:
        self.url = url
        self._timeout = timeout
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            connection_class=AsyncConnection[dict[str, Any]],
            min_size=1,
            max_size=size,
            open=False,
            timeout=timeout,
            kwargs={"row_factory": dict_row},
            check=_answers,
        )

    async def __aenter__(self) -> Self:
        await self._pool.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Connection]:
        """One transaction on one connection. Raises StoreError where the database is away."""
        try:
            async with self._pool.connection() as connection:
                yield connection
        except PoolTimeout as error:
            waited = f"within {self._timeout:g} s"
            raise StoreError(f"the database did not give a connection {waited}") from error
        except psycopg.OperationalError as error:
            raise StoreError(f"the database is away: {error}".strip()) from error


async def _answers(connection: Connection) -> None:
    """Costs a round trip per checkout; a pool that outlived its server heals without an error."""
    await connection.execute("")


# ---------------------------------------------------------------- migrations


async def migrate(url: str, *, folder: Path = MIGRATIONS, schema: str = "runtime") -> list[str]:
    """Apply what is missing, in order, in one transaction; return the names applied.

    Raises StoreError when an applied migration was edited, or the database is newer than the code.
    """
    async with await AsyncConnection[dict[str, Any]].connect(
        url, row_factory=dict_row
    ) as connection:
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('noria.migrations'))")
        name = sql.Identifier(schema)
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        await connection.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {}.migrations (name text PRIMARY KEY, "
                "checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            ).format(name)
        )
        cursor = await connection.execute(
            sql.SQL("SELECT name, checksum FROM {}.migrations").format(name)
        )
        applied = {row["name"]: row["checksum"] for row in await cursor.fetchall()}
        return await _apply_missing(connection, _numbered(folder), applied, schema)


def _numbered(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("[0-9]*.sql"))}


async def _apply_missing(
    connection: Connection, scripts: dict[str, str], applied: dict[str, str], schema: str
) -> list[str]:
    checksums = {n: hashlib.sha256(s.encode()).hexdigest() for n, s in scripts.items()}
    for name, checksum in applied.items():
        if name not in checksums:
            raise StoreError(
                f"the database has migration {name}, this version of Noria has not; "
                "start the newer version, or restore a backup"
            )
        if checksums[name] != checksum:
            raise StoreError(f"migration {name} was edited after it was applied; add a new one")
    missing = [name for name in scripts if name not in applied]
    for name in missing:
        await connection.execute(scripts[name].encode())
        await connection.execute(
            sql.SQL("INSERT INTO {}.migrations (name, checksum) VALUES (%s, %s)").format(
                sql.Identifier(schema)
            ),
            (name, checksums[name]),
        )
    return missing


# ---------------------------------------------------------------- doorbell


class Doorbell:
    """Wakes waiters when something was committed; losing a ring costs at most `poll` seconds.

    `await bell.wait(channel, key, timeout)` returns when somebody rang for the key or the time is
    over. One connection per process serves any number of waiters, and is reopened when it breaks.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiters: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="doorbell")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None  # it holds the connection it was cancelled with

    @asynccontextmanager
    async def ear(self, channel: str, key: str = "") -> AsyncGenerator[asyncio.Event]:
        """An event set at every ring for the key. Clear it before reading what it announces."""
        event = asyncio.Event()
        self._waiters[channel, key].add(event)
        try:
            yield event
        finally:
            self._waiters[channel, key].discard(event)
            if not self._waiters[channel, key]:
                del self._waiters[channel, key]

    async def _listen(self) -> None:
        while True:
            try:
                async with await AsyncConnection.connect(self._url, autocommit=True) as connection:
                    for channel in (EVENTS_CHANNEL, QUEUE_CHANNEL):
                        await connection.execute(
                            sql.SQL("LISTEN {}").format(sql.Identifier(channel))
                        )
                    self._ring_all()  # whatever was committed while nobody listened
                    async for note in connection.notifies():
                        self._ring(note.channel, note.payload)
            except psycopg.Error:
                await asyncio.sleep(1.0)  # reconnecting to a database that is away: no event exists

    def _ring(self, channel: str, payload: str) -> None:
        for key in {payload, ""}:
            for event in self._waiters.get((channel, key), ()):
                event.set()

    def _ring_all(self) -> None:
        for events in list(self._waiters.values()):
            for event in events:
                event.set()


async def wait_for(event: asyncio.Event, timeout: float) -> bool:
    """True when the event was set within `timeout` seconds."""
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return False
    return True
