"""Routes of API keys: make, list, revoke; for admins."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from runtime.api.auth import Admin
from runtime.api.body import StrictRoute
from runtime.api.problems import answers
from runtime.api.schemas import CreateKey, KeyCreated, KeyList, KeyView
from runtime.api.services import ApiServices, services_of
from runtime.errors import NotFound
from runtime.key_store import KeyStore, is_key_id, mint_key, parse_key

router = APIRouter(prefix="/v1/keys", tags=["keys"], route_class=StrictRoute)
Services = Annotated[ApiServices, Depends(services_of)]


@router.post(
    "",
    summary="Create a key",
    status_code=201,
    responses=answers(400, 401, 403, 413, 415, 422, 503),
)
async def create_key(services: Services, caller: Admin, body: CreateKey) -> KeyCreated:
    """The whole key is in this answer and nowhere else."""
    key = mint_key()
    parsed = parse_key(key)
    assert parsed is not None, "minted just now"
    async with services.database.transaction() as connection:
        created_at = await KeyStore(connection).insert(
            caller.tenant_id,
            parsed,
            name=body.name,
            scopes=body.scopes,
            expires_at=body.expires_at,
        )
    return KeyCreated(
        id=parsed.id,
        name=body.name,
        scopes=list(dict.fromkeys(body.scopes)),
        created_at=created_at,
        expires_at=body.expires_at,
        key=key,
    )


@router.get("", summary="List keys", responses=answers(401, 403, 503))
async def list_keys(services: Services, caller: Admin) -> KeyList:
    """The tenant's keys, oldest first, without their secrets."""
    async with services.database.transaction() as connection:
        rows = await KeyStore(connection).list(caller.tenant_id)
    return KeyList(keys=[KeyView.model_validate(row) for row in rows])


@router.delete(
    "/{key_id}", summary="Revoke a key", status_code=204, responses=answers(401, 403, 404, 503)
)
async def revoke_key(services: Services, caller: Admin, key_id: str) -> Response:
    """In force within a second everywhere, also on open streams. Repeating it changes nothing."""
    if not is_key_id(key_id):
        raise NotFound(f"there is no key {key_id[:80]!r}")
    async with services.database.transaction() as connection:
        await KeyStore(connection).revoke(caller.tenant_id, key_id)
    services.authenticator.forget(key_id)
    return Response(status_code=204)
