"""API keys over REST on a real Postgres: refusals, scopes, revoking, tenants, the first key."""

import asyncio
import json
import stat
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from runtime.errors import InputError
from runtime.key_store import bootstrap_key
from tests.fixtures.api import (
    LETTER,
    OTHER,
    Api,
    created,
    problem,
)

# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic bm9yaWE6eA==",
        "Bearer noria_0000000000000000_" + "0" * 64,
        "Bearer noria_" + "0" * 10_240,
        "Bearer " + "\u00e9" * 20,
    ],
)
async def test_what_is_no_key_is_refused(api: Api, header: str | None) -> None:
    shown = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    async with api.client() as http:
        del http.headers["Authorization"]
        for method, url in (("GET", "/v1/runs"), ("POST", "/v1/runs"), ("GET", "/v1/keys")):
            answer = await http.request(method, url, headers=httpx.Headers(shown))
            problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_truncated_and_foreign_secrets_are_refused(api: Api) -> None:
    for key in (api.key[:-1], api.key[:-1] + ("0" if api.key[-1] != "0" else "1")):
        async with api.client(key) as http:
            problem(await http.get("/v1/runs"), 401)


async def test_an_expired_key_is_refused(api: Api) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    async with api.client(await api.new_key(expires_at=past)) as http:
        problem(await http.get("/v1/runs"), 401)


async def test_scopes_are_enforced_and_named(api: Api) -> None:
    async with api.client() as http:
        run_id = (await created(http))["id"]
    reads = ("/v1/runs", f"/v1/runs/{run_id}", f"/v1/runs/{run_id}/trajectory", "/v1/domains")
    async with api.client(await api.new_key("runs:write")) as http:
        for url in reads:
            assert "runs:read" in problem(await http.get(url), 403)["detail"]
        for practice in ({"kind": "rollout"}, {"expectation": {}}, {"seed": 1}, {"policy": "base"}):
            answer = await http.post("/v1/runs", json={**LETTER, **practice})
            assert "flywheel" in problem(answer, 403)["detail"]
        problem(await http.get("/v1/keys"), 403)
    async with api.client(await api.new_key("runs:read", "flywheel")) as http:
        for url in ("/v1/runs", f"/v1/runs/{run_id}/cancel", f"/v1/runs/{run_id}/feedback"):
            answer = await http.post(url, json={**LETTER, "rating": "up"})
            assert "runs:write" in problem(answer, 403)["detail"]
        problem(await http.post("/v1/keys", json={"name": "x", "scopes": ["admin"]}), 403)


async def test_keys_are_made_listed_and_revoked_within_a_second(api: Api) -> None:
    async with api.client() as http:
        wanted = {"name": "crm", "scopes": ["runs:read"]}
        made = await http.post("/v1/keys", json=wanted)
        assert made.status_code == 201
        key = made.json()["key"]
        listed = (await http.get("/v1/keys")).json()["keys"]
        assert [each["name"] for each in listed] == ["test", "crm"]
        secret = key.rsplit("_", 1)[1]
        assert secret not in json.dumps(listed)
        shown_once = {name: value for name, value in made.json().items() if name != "key"}
        assert listed[1] == shown_once
        async with api.client(key) as crm:
            assert (await crm.get("/v1/runs")).status_code == 200
            url = f"/v1/keys/{made.json()['id']}"
            assert (await http.delete(url)).status_code == 204
            problem(await crm.get("/v1/runs"), 401)
        assert (await http.delete(url)).status_code == 204, "revoking twice is revoking once"
        problem(await http.delete("/v1/keys/0000000000000000"), 404)
        problem(await http.delete("/v1/keys/%00"), 404)


@pytest.mark.parametrize(
    "expires_at",
    [
        "9999-12-31T23:59:59-23:00",  # a year that no datetime in UTC can hold
        "0001-01-01T00:00:00+23:00",
        "2001-01-01T00:00:00Z",
        (datetime.now(UTC) + timedelta(days=11 * 366)).isoformat(),
    ],
    ids=["the last year", "the first year", "the past", "eleven years"],
)
async def test_an_expiry_beyond_reason_is_refused(api: Api, expires_at: str) -> None:
    wanted = {"name": "crm", "scopes": ["runs:read"], "expires_at": expires_at}
    async with api.client() as http:
        told = problem(await http.post("/v1/keys", json=wanted), 422)
        assert told["errors"] == [
            {"field": "expires_at", "message": "must lie in the future, at most 10 years ahead"}
        ]
        assert len((await http.get("/v1/keys")).json()["keys"]) == 1


async def test_an_expiry_is_kept_in_utc(api: Api) -> None:
    at = (datetime.now(UTC) + timedelta(days=3_000)).replace(microsecond=0)
    elsewhere = at.astimezone(timezone(timedelta(hours=-9)))
    wanted = {"name": "crm", "scopes": ["runs:read"], "expires_at": elsewhere.isoformat()}
    async with api.client() as http:
        made = (await http.post("/v1/keys", json=wanted)).json()
        listed = (await http.get("/v1/keys")).json()["keys"][1]
    assert made["expires_at"] == listed["expires_at"] == at.isoformat().replace("+00:00", "Z")


async def test_a_key_revoked_elsewhere_is_refused_within_a_second(api: Api) -> None:
    key = await api.new_key("runs:read")
    async with api.client(key) as http:
        assert (await http.get("/v1/runs")).status_code == 200
        async with api.database.transaction() as connection:
            await connection.execute(
                "UPDATE runtime.api_keys SET revoked_at = now() WHERE id = %s", (key.split("_")[1],)
            )
        started = asyncio.get_running_loop().time()
        while (await http.get("/v1/runs")).status_code == 200:
            assert asyncio.get_running_loop().time() - started < 1.0
        problem(await http.get("/v1/runs"), 401)


async def test_another_tenants_runs_do_not_exist(api: Api) -> None:
    async with api.client() as ours:
        run_id = (await created(ours))["id"]
        own_keys = (await ours.get("/v1/keys")).json()["keys"]
    async with api.client(await api.new_key(tenant=OTHER)) as theirs:
        assert (await theirs.get("/v1/runs")).json()["runs"] == []
        for method, path, body in (
            ("GET", "", None),
            ("GET", "/events", None),
            ("GET", "/trajectory", None),
            ("POST", "/cancel", None),
            ("POST", "/feedback", {"rating": "up"}),
        ):
            answer = await theirs.request(method, f"/v1/runs/{run_id}{path}", json=body)
            problem(answer, 404)
        problem(await theirs.delete(f"/v1/keys/{own_keys[0]['id']}"), 404)
        assert len((await theirs.get("/v1/keys")).json()["keys"]) == 1


# ---------------------------------------------------------------- the bootstrap key


async def test_the_bootstrap_key_is_made_once_and_kept_private(api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    first, second = await asyncio.gather(
        bootstrap_key(api.database, folder), bootstrap_key(api.database, folder)
    )
    assert first == second
    assert stat.S_IMODE((folder / "api-key").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["api-key"]
    async with api.client(first) as http:
        assert (await http.get("/v1/keys")).status_code == 200


async def test_a_new_database_learns_the_bootstrap_key(api: Api, tmp_path: Path) -> None:
    key = await bootstrap_key(api.database, tmp_path)
    async with api.database.transaction() as connection:
        await connection.execute("DELETE FROM runtime.api_keys")
    assert await bootstrap_key(api.database, tmp_path) == key
    async with api.client(key) as http:
        assert (await http.get("/v1/keys")).status_code == 200


async def test_a_revoked_bootstrap_key_stays_revoked_and_is_replaced(
    api: Api, tmp_path: Path
) -> None:
    key = await bootstrap_key(api.database, tmp_path)
    async with api.client() as http:
        assert (await http.delete(f"/v1/keys/{key.split('_')[1]}")).status_code == 204
    fresh = await bootstrap_key(api.database, tmp_path)
    assert fresh != key
    async with api.client(key) as http:
        problem(await http.get("/v1/keys"), 401)
    async with api.client(fresh) as http:
        assert (await http.get("/v1/keys")).status_code == 200


async def test_a_file_that_holds_no_key_is_named(api: Api, tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("hunter2\n")
    with pytest.raises(InputError, match="api-key does not hold an API key; remove it"):
        await bootstrap_key(api.database, tmp_path)
