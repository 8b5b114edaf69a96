"""API keys: how they look, how they are kept, and the first one.

A key is `noria_<id>_<secret>`: the id is public and finds the row, the secret has 256 random bits
and is shown once. Only its sha256 is stored; that many random bits need no slow hash.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from runtime.database import SQL_FOLDER, Connection, Database, queries
from runtime.errors import InputError, NotFound
from runtime.run import TenantId

QUERIES = queries(SQL_FOLDER / "keys.sql")
BOOTSTRAP_FILE = "api-key"
BOOTSTRAP_TENANT = TenantId("default")
ALL_SCOPES = ("runs:write", "runs:read", "flywheel", "release", "admin")
_KEY = re.compile(r"noria_([0-9a-f]{16})_([0-9a-f]{64})")
_KEY_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key as a caller shows it, its secret already hashed."""

    id: str
    secret_hash: bytes


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key that may be used now."""

    tenant_id: TenantId
    id: str
    name: str
    secret_hash: bytes
    scopes: Sequence[str]


def mint_key() -> str:
    return f"noria_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


def parse_key(text: str) -> ParsedKey | None:
    """None for whatever does not look like a key, however long."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    return ParsedKey(match[1], hashlib.sha256(match[2].encode()).digest())


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None


class KeyStore:
    """The keys, over one open transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def _all(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        cursor = await self._connection.execute(QUERIES[query].encode(), parameters)
        return await cursor.fetchall()

    async def insert(
        self,
        tenant_id: TenantId,
        key: ParsedKey,
        *,
        name: str,
        scopes: Sequence[str],
        expires_at: datetime | None = None,
    ) -> datetime:
        """Store a new key; when it was created."""
        rows = await self._all(
            "insert_key",
            tenant_id=tenant_id,
            id=key.id,
            name=name,
            secret_hash=key.secret_hash,
            scopes=list(dict.fromkeys(scopes)),
            expires_at=expires_at,
        )
        return rows[0]["created_at"]

    async def find(self, key_id: str) -> StoredKey | None:
        """The key, if it is neither revoked nor expired."""
        rows = await self._all("find_key", id=key_id)
        return _stored(rows[0]) if rows else None

    async def use(self, key_id: str) -> StoredKey | None:
        """As `find`, and notes (to the minute) that it was used."""
        if (stored := await self.find(key_id)) is not None:
            await self._connection.execute(QUERIES["touch_key"].encode(), {"id": key_id})
        return stored

    async def known(self, key_id: str) -> bool:
        """Whether there is or was such a key."""
        return bool(await self._all("key_exists", id=key_id))

    async def list(self, tenant_id: TenantId) -> list[dict[str, Any]]:
        """Every key of the tenant, oldest first, without hashes."""
        return await self._all("list_keys", tenant_id=tenant_id)

    async def revoke(self, tenant_id: TenantId, key_id: str) -> None:
        """Revoking twice is the same as once. Raises NotFound."""
        if not await self._all("revoke_key", tenant_id=tenant_id, id=key_id):
            raise NotFound(f"there is no key {key_id!r}")


def _stored(row: dict[str, Any]) -> StoredKey:
    return StoredKey(
        tenant_id=TenantId(row["tenant_id"]),
        id=row["id"],
        name=row["name"],
        secret_hash=bytes(row["secret_hash"]),
        scopes=row["scopes"],
    )


# ---------------------------------------------------------------- the first key


async def bootstrap_key(database: Database, secrets_folder: Path) -> str:
    """The admin key of this home, from its file `api-key` (mode 0600); made if need be.

    A file without a row gets its row back (the database is new). A key that was revoked or has
    expired stays so: a new one takes its place in the file. Raises InputError where the file holds
    something else.
    """
    path = secrets_folder / BOOTSTRAP_FILE
    async with database.transaction() as connection:
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('noria.bootstrap_key'))")
        store = KeyStore(connection)
        key = _read_key(path)
        if key is None or not await _usable(store, key):
            key = mint_key()
            await _insert_admin(store, key)
            _write_key(path, key)
    return key


async def _usable(store: KeyStore, key: str) -> bool:
    """Whether the key of the file can be used, after giving a new database its row."""
    parsed = _parsed(key)
    if not await store.known(parsed.id):
        await _insert_admin(store, key)
        return True
    stored = await store.find(parsed.id)
    return stored is not None and secrets.compare_digest(stored.secret_hash, parsed.secret_hash)


async def _insert_admin(store: KeyStore, key: str) -> None:
    await store.insert(BOOTSTRAP_TENANT, _parsed(key), name="bootstrap", scopes=ALL_SCOPES)


def _parsed(key: str) -> ParsedKey:
    parsed = parse_key(key)
    assert parsed is not None, "read or minted just now"
    return parsed


def _read_key(path: Path) -> str | None:
    try:
        text = path.read_text("ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as an API key: {error}") from error
    if parse_key(text) is None:
        raise InputError(f"{path} does not hold an API key; remove it, and a new one is made")
    path.chmod(0o600)
    return text


def _write_key(path: Path, key: str) -> None:
    """Replace the file in one step, readable by its owner alone from the first byte."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{key}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
