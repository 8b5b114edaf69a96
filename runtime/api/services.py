"""What the API needs from the process it runs in, handed in once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import HTTPConnection

from runtime.api.auth import Authenticator
from runtime.database import Database, Doorbell
from runtime.domain import Domain
from runtime.run import Policy


@dataclass(frozen=True, slots=True)
class ApiServices:
    """Database and doorbell are handed over closed: the app's lifespan opens and closes them."""

    database: Database
    doorbell: Doorbell
    domains: Mapping[str, Domain]
    base_policy: Policy
    """What a run is pinned to where no alias says otherwise."""
    engine_healthy: Callable[[], Awaitable[bool]]
    max_body_bytes: int = 16 << 20
    heartbeat_seconds: float = 15.0
    """How long an event stream may be silent before a comment is sent."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it when the process shall stop: streams end (clients reconnect elsewhere), `/readyz`
    says no."""
    authenticator: Authenticator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "authenticator", Authenticator(self.database))


@dataclass(frozen=True, slots=True)
class Extension:
    """Routes of another part, and what they work with: opened once, held while the app serves."""

    name: str
    routers: Sequence[APIRouter]
    open: Callable[[], AbstractContextManager[object]]


def held_by(connection: HTTPConnection, name: str) -> object:
    """What the extension of that name opened."""
    held: Mapping[str, object] = connection.app.state.held
    return held[name]


def services_of(connection: HTTPConnection) -> ApiServices:
    services: ApiServices = connection.app.state.services
    return services
