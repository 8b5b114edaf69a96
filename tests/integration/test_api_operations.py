"""The REST API for operators: health, readiness, metrics, faults, its own description."""

import asyncio
import json

import psycopg
import pytest

from tests.fixtures.api import (
    Api,
    created,
    problem,
)


async def test_health_readiness_and_metrics(api: Api) -> None:
    async with api.client() as http:
        del http.headers["Authorization"]
        assert (await http.get("/healthz")).json() == {"status": "alive"}
        assert (await http.get("/readyz")).json()["parts"] == {
            "database": True,
            "engine": True,
            "process": True,
        }
        api.engine.healthy = False
        missing = problem(await http.get("/readyz"), 503)
        assert [each["field"] for each in missing["errors"]] == ["engine"]
        http.headers["Authorization"] = f"Bearer {api.key}"
        await created(http)
        text = (await http.get("/metrics")).text
    assert 'noria_runs{state="queued"} 1.0' in text
    assert 'route="/v1/runs",status="202"' in text


async def test_a_database_that_is_away_is_503_everywhere(api: Api) -> None:
    async with api.client() as http:
        url = api.database.url
        with psycopg.connect(url, autocommit=True) as admin:
            name = admin.info.dbname
        elsewhere = url.replace(name, "postgres")
        with psycopg.connect(elsewhere, autocommit=True) as admin:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )
            try:
                answer = await http.get("/v1/runs", timeout=30)
                problem(answer, 503)
                assert answer.headers["retry-after"] == "1"
                ready = problem(await http.get("/readyz"), 503)
                assert ready["errors"][0]["field"] == "database"
                assert (await http.get("/healthz")).status_code == 200
                assert (await http.get("/metrics")).status_code == 200
            finally:
                admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        async with asyncio.timeout(10):
            while (await http.get("/v1/runs")).status_code != 200:
                pass


async def test_a_bug_tells_its_number_and_nothing_else(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("secret detail")

    api.app.add_api_route("/broken", broken)
    async with api.client() as http:
        answer = await http.get("/broken")
    told = problem(answer, 500)
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert told["detail"].split()[-1] in caplog.text


async def test_unknown_paths_and_methods_are_problems(api: Api) -> None:
    async with api.client() as http:
        assert "/v1/nothing" in problem(await http.get("/v1/nothing"), 404)["detail"]
        answer = await http.put("/v1/runs", json={})
        assert "PUT" in problem(answer, 405)["detail"]
        assert answer.headers["allow"]
        for run_id in ("run_x", "%00", "run_" + "0" * 28, "..%2f..", "x" * 5000):
            problem(await http.get(f"/v1/runs/{run_id}"), 404)


async def test_openapi_names_every_answer(api: Api) -> None:
    async with api.client() as http:
        document = (await http.get("/v1/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            good = [s for s in operation["responses"] if s.startswith("2")]
            assert good
            for status, response in operation["responses"].items():
                if not status.startswith("2"):
                    assert list(response["content"]) == ["application/problem+json"], (path, status)
            if path.startswith("/v1"):
                assert operation["security"] == [{"ApiKey": []}]
                assert {"401", "403", "503"} <= operation["responses"].keys()
    assert "HTTPValidationError" not in json.dumps(document)
    creating = document["paths"]["/v1/runs"]["post"]
    assert set(creating["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert document["components"]["schemas"]["CreateRun"]["examples"]
