"""Postgres as the flywheel uses it: synchronous connections and named queries.

The flywheel's own tables live in the schema `flywheel` (migrations in `flywheel/sql/migrations`);
the runtime's are read through its versioned views (`runtime.runs_v1` …) and changed through its
versioned functions only. Stores run named queries on a connection that the caller opened; they
never commit.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from pydantic import BaseModel

from runtime.database import queries
from runtime.errors import StoreError
from runtime.run import Json

SQL_FOLDER = Path(__file__).parent / "sql"
MIGRATIONS = SQL_FOLDER / "migrations"
CYCLES_CHANNEL = "noria_cycles"
"""NOTIFY with a cycle's id: something about it changed."""

Connection = psycopg.Connection[dict[str, Any]]


@contextmanager
def transaction(url: str) -> Generator[Connection]:
    """One transaction on one connection. Raises StoreError where the database is away."""
    try:
        with Connection.connect(url, row_factory=dict_row) as connection:
            yield connection
    except psycopg.OperationalError as error:
        raise StoreError(f"the database is away: {error}".strip()) from error


class Statements:
    """Named queries of one file of `flywheel/sql/`, on one open transaction."""

    FILE: str

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queries = queries(SQL_FOLDER / self.FILE)

    def _run(self, query: str, **parameters: Any) -> int:
        """The number of rows touched."""
        return self._connection.execute(self._queries[query].encode(), parameters).rowcount

    def _one(self, query: str, **parameters: Any) -> dict[str, Any] | None:
        return self._connection.execute(self._queries[query].encode(), parameters).fetchone()

    def _all(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        return self._connection.execute(self._queries[query].encode(), parameters).fetchall()


def as_json(value: Json | BaseModel) -> Jsonb | None:
    """A JSON parameter; None stays NULL."""
    if value is None:
        return None
    return Jsonb(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)
