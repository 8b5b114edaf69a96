"""Runs over REST on a real Postgres: create, pin, read, list, cancel, judge; and domains."""

import asyncio
import base64
from typing import Any

from runtime.run import (
    Policy,
    PolicyId,
)
from runtime.run_store import RunStore
from tests.fixtures.api import (
    DEFAULT,
    LETTER,
    OTHER,
    Api,
    claim,
    created,
    finish,
    problem,
)

# ---------------------------------------------------------------- create


async def test_a_background_run_is_pinned_and_comes_back(api: Api) -> None:
    async with api.client() as http:
        answer = await http.post("/v1/runs", json=LETTER)
        run = answer.json()
        assert answer.status_code == 202
        assert answer.headers["location"] == f"/v1/runs/{run['id']}"
        assert (await http.get(answer.headers["location"])).json() == run
    assert run["state"] == "queued"
    assert run["task"]["input"] == {"message": "my card was stolen", "customer_id": "C100"}
    assert run["policy"] == {"id": "base", "base": "sha256:base", "adapter": None}
    assert run["domain_digest"] == api.services.domains["letters"].digest
    assert run["sampling"]["temperature"] == 0.5
    assert isinstance(run["sampling"]["seed"], int)


async def test_files_reach_the_record(api: Api) -> None:
    async with api.client() as http:
        run = await created(http, files={"in/a.bin": base64.b64encode(b"\x00\xff").decode()})
    async with api.database.transaction() as connection:
        stored = await RunStore(connection).get(DEFAULT, run["id"], private=True)
    assert stored.task.files == {"in/a.bin": b"\x00\xff"}


async def test_the_seed_is_fresh_unless_given(api: Api) -> None:
    async with api.client() as http:
        seeds = {(await created(http))["sampling"]["seed"] for _ in range(4)}
        assert len(seeds) == 4
        run = await created(http, sampling={"seed": 7, "top_p": 0.9})
    assert run["sampling"] == {"temperature": 0.5, "top_p": 0.9, "seed": 7}


async def test_fifty_posts_with_one_key_are_one_run(api: Api, idempotency_key: str) -> None:
    headers = {"Idempotency-Key": idempotency_key}
    async with api.client(timeout=60) as http:
        answers = await asyncio.gather(
            *(http.post("/v1/runs", json=LETTER, headers=headers) for _ in range(50))
        )
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["id"] for answer in answers}) == 1
        replayed = [a for a in answers if a.headers.get("idempotent-replayed") == "true"]
        assert len(replayed) == 49
        assert len((await http.get("/v1/runs")).json()["runs"]) == 1
        other = {**LETTER, "input": {"message": "another"}}
        refused = await http.post("/v1/runs", json=other, headers=headers)
        assert problem(refused, 422)["type"].endswith("idempotency_mismatch")
        waited = await http.post(
            "/v1/runs", json={**LETTER, "mode": "wait", "wait_seconds": 0}, headers=headers
        )
        assert waited.json()["id"] == answers[0].json()["id"], "how to answer is not what to run"


async def test_tenants_may_use_the_same_idempotency_key(api: Api, idempotency_key: str) -> None:
    headers = {"Idempotency-Key": idempotency_key}
    other = await api.new_key(tenant=OTHER)
    async with api.client() as ours, api.client(other) as theirs:
        first = await ours.post("/v1/runs", json=LETTER, headers=headers)
        second = await theirs.post("/v1/runs", json=LETTER, headers=headers)
    assert first.json()["id"] != second.json()["id"]


# ---------------------------------------------------------------- policy


async def put_alias(api: Api, alias: str, policy: Policy) -> None:
    async with api.database.transaction() as connection:
        await connection.execute(
            "INSERT INTO runtime.aliases (tenant_id, domain, alias, policy) "
            "VALUES ('default', 'letters', %s, %s)",
            (alias, policy.model_dump_json()),
        )


async def test_a_registered_policy_may_be_asked_for_by_its_id(api: Api) -> None:
    candidate = Policy(id=PolicyId("candidate-1"), base="sha256:base", adapter="sha256:c")
    async with api.database.transaction() as connection:
        await connection.execute(
            "SELECT runtime.register_policy_v1('default', %s)", (candidate.model_dump_json(),)
        )
    stranger = await api.new_key(tenant=OTHER)
    async with api.client() as http, api.client(stranger) as other:
        run = await created(http, policy="candidate-1")
        assert run["policy"] == candidate.model_dump()
        answer = await other.post("/v1/runs", json={**LETTER, "policy": "candidate-1"})
        assert "there is no policy 'candidate-1'" in problem(answer, 422)["detail"]


async def test_the_alias_decides_the_policy_and_the_id_overrides_it(api: Api) -> None:
    tuned = Policy(id=PolicyId("tuned-1"), base="sha256:base", adapter="sha256:a")
    await put_alias(api, "production", tuned)
    async with api.client() as http:
        assert (await created(http))["policy"]["id"] == "tuned-1"
        assert (await created(http, policy="base"))["policy"]["id"] == "base"
        assert (await created(http, policy="tuned-1"))["policy"]["adapter"] == "sha256:a"
        for wrong in ({"policy": "nobody"}, {"alias": "canary"}):
            answer = await http.post("/v1/runs", json={**LETTER, **wrong})
            assert problem(answer, 422)["errors"][0]["field"] == next(iter(wrong))


# ---------------------------------------------------------------- read, list


async def test_pages_follow_each_other_without_gap_or_repeat(api: Api) -> None:
    async with api.client() as http:
        made = [(await created(http))["id"] for _ in range(7)]
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 3}
        while True:
            page = (await http.get("/v1/runs", params=query)).json()
            seen += [run["id"] for run in page["runs"]]
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
    assert seen == made[::-1]


async def test_lists_are_filtered(api: Api) -> None:
    async with api.client() as http:
        run = await created(http)
        rollout = await created(http, kind="rollout")
        await http.post(f"/v1/runs/{run['id']}/cancel")

        async def ids(**query: str) -> list[str]:
            page = (await http.get("/v1/runs", params=query)).json()
            return [each["id"] for each in page["runs"]]

        assert await ids(kind="rollout") == [rollout["id"]]
        assert await ids(state="cancelled") == [run["id"]]
        assert await ids(domain="elsewhere") == []
        assert await ids(domain="letters") == [rollout["id"], run["id"]]


# ---------------------------------------------------------------- cancel, feedback


async def test_cancel_ends_a_queued_run_and_refuses_an_ended_one(api: Api) -> None:
    async with api.client() as http:
        run = await created(http)
        cancelled = await http.post(f"/v1/runs/{run['id']}/cancel")
        assert cancelled.json()["state"] == "cancelled"
        problem(await http.post(f"/v1/runs/{run['id']}/cancel"), 409)
        running = await created(http)
        await claim(api.database, running["id"])
        asked = await http.post(f"/v1/runs/{running['id']}/cancel")
        assert asked.json()["state"] == "running"
        assert asked.json()["cancel_requested"] is True


async def test_feedback_is_checked_and_recorded(api: Api) -> None:
    async with api.client() as http:
        run = await created(http)
        url = f"/v1/runs/{run['id']}/feedback"
        problem(await http.post(url, json={"rating": "down"}), 409)
        await finish(api.database, await claim(api.database, run["id"]))
        wrong = await http.post(url, json={"correction": {"queue": "gold", "priority": "high"}})
        fields = {each["field"] for each in problem(wrong, 422)["errors"]}
        assert fields == {"correction.queue", "correction.priority"}
        missing = await http.post(url, json={"correction": {"queue": "fraud"}})
        assert problem(missing, 422)["errors"][0]["field"] == "correction.priority"
        for nothing in ({}, {"rating": None}, {"outcome": None, "comment": None}):
            told = problem(await http.post(url, json=nothing), 422)
            assert "say at least one of rating, outcome, correction, comment" in told["detail"]
        problem(await http.post(url, json={"rating": "sideways"}), 422)
        good = {"rating": "down", "correction": {"queue": "fraud", "priority": 1}, "comment": "no"}
        taken = await http.post(url, json=good)
        assert taken.status_code == 201, taken.text
        events = (
            await http.get(f"/v1/runs/{run['id']}/events", headers={"Accept": "application/json"})
        ).json()
    assert events[-1]["seq"] == taken.json()["seq"]
    assert events[-1]["body"] == {**good, "type": "feedback", "outcome": None, "by": "test"}


# ---------------------------------------------------------------- domains


async def test_domains_show_shapes_and_no_gold(api: Api) -> None:
    async with api.client() as http:
        listed = (await http.get("/v1/domains")).json()["domains"]
        assert [each["name"] for each in listed] == ["letters"]
        one = (await http.get("/v1/domains/letters")).json()
        assert set(one) == {
            "name",
            "title",
            "description",
            "digest",
            "levels",
            "input_schema",
            "output_schema",
        }
        assert "known: letters" in problem(await http.get("/v1/domains/none"), 404)["detail"]
