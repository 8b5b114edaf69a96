"""Who calls: API keys checked against the store, scopes checked per route.

What a key may do is remembered for half a second, so that a busy process asks the database twice a
second per key and a revoked key is refused within a second everywhere, also on open streams.

Scaling out: every process remembers by itself; the keys live in Postgres.
"""

import asyncio
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from runtime.api.problems import Refused
from runtime.api.schemas import Scope
from runtime.database import Database
from runtime.key_store import KeyStore, ParsedKey, StoredKey, parse_key
from runtime.run import TenantId

REMEMBER_SECONDS = 0.5
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """A key that may be used now, and whose it is."""

    tenant_id: TenantId
    key: ParsedKey
    name: str
    scopes: frozenset[str]


class Authenticator:
    """Turns an Authorization header into a Caller."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._remembered: dict[str, tuple[float, StoredKey]] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def caller(self, header: str | None) -> Caller:
        """Raises Refused (401) unless the header carries a key that may be used now."""
        scheme, _, token = (header or "").partition(" ")
        key = parse_key(token.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise _unauthorized("send an API key as Authorization: Bearer noria_<id>_<secret>")
        return await self._verified(key)

    async def still_valid(self, caller: Caller) -> bool:
        """Whether the key of an open stream may still be used."""
        try:
            await self._verified(caller.key)
        except Refused:
            return False
        return True

    def forget(self, key_id: str) -> None:
        self._remembered.pop(key_id, None)

    async def _verified(self, key: ParsedKey) -> Caller:
        stored = await self._stored(key.id)
        if stored is None or not hmac.compare_digest(stored.secret_hash, key.secret_hash):
            raise _unauthorized("this API key is unknown, revoked or expired")
        return Caller(stored.tenant_id, key, stored.name, frozenset(stored.scopes))

    async def _stored(self, key_id: str) -> StoredKey | None:
        if (known := self._fresh(key_id)) is not None:
            return known
        lock = self._asking.setdefault(key_id, asyncio.Lock())
        try:
            async with lock:  # many requests with one key ask once
                return self._fresh(key_id) or await self._ask(key_id)
        finally:
            if not lock.locked():
                self._asking.pop(key_id, None)

    def _fresh(self, key_id: str) -> StoredKey | None:
        at, stored = self._remembered.get(key_id, (0.0, None))
        fresh = stored is not None and self._clock() - at < REMEMBER_SECONDS
        return stored if fresh else None

    async def _ask(self, key_id: str) -> StoredKey | None:
        asked_at = self._clock()
        self.forget(key_id)
        async with self._database.transaction() as connection:
            stored = await KeyStore(connection).use(key_id)
        if stored is not None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key_id] = (asked_at, stored)
        return stored


def _unauthorized(detail: str) -> Refused:
    return Refused(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


# ---------------------------------------------------------------- scopes

_bearer = HTTPBearer(auto_error=False, scheme_name="ApiKey", description="noria_<id>_<secret>")


def demand(caller: Caller, scope: Scope, why: str = "this") -> None:
    """Raises Refused (403) naming the scope that is lacking."""
    if scope not in caller.scopes:
        detail = f"{why} needs the scope {scope}; this key has: {', '.join(sorted(caller.scopes))}"
        raise Refused(403, "forbidden", detail)


def _permitted(scope: Scope) -> Callable[..., Caller]:
    def caller_of(
        request: Request,
        _shown_in_openapi: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        caller: Caller = request.state.caller
        demand(caller, scope)
        return caller

    return caller_of


Writer = Annotated[Caller, Depends(_permitted(Scope.RUNS_WRITE))]
Reader = Annotated[Caller, Depends(_permitted(Scope.RUNS_READ))]
Miller = Annotated[Caller, Depends(_permitted(Scope.FLYWHEEL))]
Releaser = Annotated[Caller, Depends(_permitted(Scope.RELEASE))]
Admin = Annotated[Caller, Depends(_permitted(Scope.ADMIN))]
