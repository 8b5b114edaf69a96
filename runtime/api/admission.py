"""From a request to what is pinned: scope, domain, input, files, policy, sampling.

Everything a run depends on is decided here, once, and never looked up again while it runs.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.api.auth import Caller, demand
from runtime.api.problems import MAX_ERRORS, MAX_TEXT
from runtime.api.schemas import CreateRun, SamplingOptions, Scope
from runtime.api.services import ApiServices
from runtime.database import Connection
from runtime.domain import Domain, validate_expectation, validate_input
from runtime.errors import InputError
from runtime.run import Json, Policy, PolicyId, RunKind, Sampling, Task
from runtime.run_store import Admission, RunStore, Statements, request_hash

PRODUCTION = "production"


def check_scopes(caller: Caller, request: CreateRun) -> None:
    """Raises Refused (403): practice is the flywheel's business."""
    if request.kind is not RunKind.PRODUCTION:
        demand(caller, Scope.FLYWHEEL, f"a run of kind {request.kind}")
    if practice := sorted(request.PRACTICE & request.model_fields_set):
        demand(caller, Scope.FLYWHEEL, f"setting {', '.join(practice)}")


def known_domain(services: ApiServices, name: str, field: str = "domain") -> Domain:
    """Raises InputError naming what exists."""
    if (domain := services.domains.get(name)) is not None:
        return domain
    known = ", ".join(services.domains) or "none"
    message = f"there is no domain {name!r}; known: {known}"
    raise InputError(message, errors=[{"field": field, "message": message}])


async def admission(
    services: ApiServices,
    connection: Connection,
    caller: Caller,
    request: CreateRun,
    idempotency_key: str | None,
) -> Admission:
    """What the run is pinned to. Raises InputError naming each wrong field."""
    domain = known_domain(services, request.domain)
    task = _task(domain, request)
    return Admission(
        tenant_id=caller.tenant_id,
        kind=request.kind,
        domain_digest=domain.digest,
        task=task,
        policy=await _policy(services, connection, caller, request),
        sampling=_sampling(domain.sampling, request.sampling),
        idempotency_key=idempotency_key,
        request_hash=_hash(request) if idempotency_key is not None else None,
    )


def _hash(request: CreateRun) -> str:
    return request_hash(request.model_dump(mode="json", exclude=set(request.HOW_TO_ANSWER)))


def _task(domain: Domain, request: CreateRun) -> Task:
    _check_choice("level", request.level, domain.levels)
    _check_size(domain, request.files)
    _check_connectors(domain, request.connectors)
    return Task(
        id=request.task_id or f"task_{secrets.token_hex(12)}",
        domain=domain.name,
        input=prefixed("input", validate_input, domain, request.input),
        files=request.files,
        seed=request.seed,
        connectors=request.connectors,
        expectation=_expectation(domain, request.expectation),
        split=request.split,
        level=request.level,
        family=request.family,
    )


Validate = Callable[[Domain, Mapping[str, Json]], dict[str, Json]]


def prefixed(
    prefix: str, validate: Validate, domain: Domain, value: dict[str, Json]
) -> dict[str, Json]:
    """The validated value. Raises InputError naming the wrong fields as the caller wrote them."""
    try:
        return validate(domain, value)
    except InputError as error:
        errors = [
            {**each, "field": f"{prefix}.{each['field']}".rstrip(".")}
            for each in error.detail.get("errors", [])
        ]
        raise InputError(str(error), errors=errors) from error


def _check_choice(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        message = f"{value!r} is unknown; allowed: {', '.join(allowed)}"
        raise InputError(f"{field}: {message}", errors=[{"field": field, "message": message}])


def _check_size(domain: Domain, files: dict[str, bytes]) -> None:
    size, room = sum(map(len, files.values())), domain.sandbox.disk_bytes
    if size > room:
        message = f"{size} bytes together; the workspace of {domain.name} holds {room}"
        raise InputError(f"files: {message}", errors=[{"field": "files", "message": message}])


def _check_connectors(domain: Domain, states: Mapping[str, Json]) -> None:
    known = ", ".join(domain.connectors) or "none"
    wrong = [
        {
            "field": f"connectors.{name}"[:MAX_TEXT],
            "message": f"{domain.name} has no such connector; its connectors: {known}",
        }
        for name in states
        if name not in domain.connectors
    ][:MAX_ERRORS]
    if wrong:
        raise InputError(
            "; ".join(f"{e['field']}: {e['message']}" for e in wrong[:5]), errors=wrong
        )


def _expectation(domain: Domain, value: dict[str, Json] | None) -> dict[str, Json] | None:
    return None if value is None else prefixed("expectation", validate_expectation, domain, value)


def _sampling(default: Sampling, wanted: SamplingOptions) -> Sampling:
    """The domain's sampling with what the caller changed; the seed is fresh unless given."""
    changes: dict[str, Any] = wanted.model_dump(exclude_none=True)
    return default.model_copy(update={"seed": secrets.randbelow(2**31), **changes})


# ---------------------------------------------------------------- policy


class _Policies(Statements):
    async def find(self, caller: Caller, policy_id: str) -> Policy | None:
        """A registered policy, or one that an alias serves though nobody registered it."""
        keys = {"tenant_id": caller.tenant_id, "policy_id": policy_id}
        row = await self._one("find_policy", **keys)
        row = row or await self._one("find_aliased_policy", **keys)
        return None if row is None else Policy.model_validate(row["policy"])


async def _policy(
    services: ApiServices, connection: Connection, caller: Caller, request: CreateRun
) -> Policy:
    """By id, else by alias, else the base model."""
    base = services.base_policy
    if request.policy is not None:
        return await _policy_by_id(base, connection, caller, request.policy)
    store = RunStore(connection)
    policy = await store.alias(caller.tenant_id, request.domain, request.alias)
    if policy is None and request.alias != PRODUCTION:
        message = f"{request.domain} has no alias {request.alias!r}; {PRODUCTION} always exists"
        raise InputError(message, errors=[{"field": "alias", "message": message}])
    return policy or base


async def _policy_by_id(
    base: Policy, connection: Connection, caller: Caller, policy_id: str
) -> Policy:
    if base.id == PolicyId(policy_id):
        return base
    policy = await _Policies(connection).find(caller, policy_id)
    if policy is None:
        message = f"there is no policy {policy_id!r}; the base model is {base.id!r}"
        raise InputError(message, errors=[{"field": "policy", "message": message}])
    return policy
