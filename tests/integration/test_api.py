"""The REST API on a real Postgres: runs, events, keys, tenants, readiness."""

import asyncio
import base64
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from runtime.database import QUEUE_CHANNEL
from runtime.errors import InputError
from runtime.key_store import bootstrap_key
from runtime.run import (
    CheckResult,
    CheckStatus,
    ModelCall,
    Policy,
    PolicyId,
    RunId,
    RunState,
    Thought,
    Verdict,
    VerdictStatus,
)
from runtime.run_store import RunStore
from tests.fixtures.api import DEFAULT, OTHER, Api, claim, finish, record

LETTER = {"domain": "letters", "input": {"message": "my card was stolen"}}
ROLLOUT = {**LETTER, "kind": "rollout"}


async def created(http: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await http.post("/v1/runs", json={**LETTER, **changes})
    assert answer.status_code == 202, answer.text
    return answer.json()


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:noria:problem:")
    assert {"title", "detail"} <= body.keys()
    return body


def thought(step: int) -> Thought:
    return Thought(
        step=step, turn=step, text=f"step {step}", calls=[], sampled_tokens=2, prompt_tokens=3
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


async def test_wait_answers_with_the_finished_run(api: Api) -> None:
    async with api.client() as http, posting(api, http, mode="wait", wait_seconds=20) as posted:
        await finish(api.database, await claim(api.database, posted.run_id))
        answer = await posted.request
    assert answer.status_code == 200
    assert answer.json()["state"] == "accepted"
    assert answer.json()["answer"] == {"queue": "cards"}


@dataclass(frozen=True, slots=True)
class Posting:
    run_id: RunId
    request: asyncio.Task[httpx.Response]


@asynccontextmanager
async def posting(api: Api, http: httpx.AsyncClient, **options: Any) -> AsyncIterator[Posting]:
    """A create request under way, once its run is admitted; ends with the answer."""
    async with api.services.doorbell.ear(QUEUE_CHANNEL) as rung, asyncio.timeout(20):
        request = asyncio.create_task(http.post("/v1/runs", json={**LETTER, **options}))
        while not (runs := (await http.get("/v1/runs")).json()["runs"]):
            await rung.wait()
            rung.clear()
        yield Posting(RunId(runs[0]["id"]), request)


async def test_wait_answers_202_where_the_run_is_not_over_in_time(api: Api) -> None:
    async with api.client() as http:
        answer = await http.post("/v1/runs", json={**LETTER, "mode": "wait", "wait_seconds": 0})
    assert answer.status_code == 202
    assert answer.json()["state"] == "queued"


async def test_stream_answers_with_the_events(api: Api) -> None:
    async with api.client() as http, posting(api, http, mode="stream") as posted:
        lease = await claim(api.database, posted.run_id)
        await record(api.database, lease, thought(0))
        await finish(api.database, lease)
        answer = await posted.request
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["location"] == f"/v1/runs/{posted.run_id}"
    assert [(seq, kind) for seq, kind, _ in frames(answer.text)] == [
        (1, "admitted"),
        (2, "thought"),
        (3, "finished"),
    ]


def frames(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    found: list[tuple[int, str, dict[str, Any]]] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line[1:])
        if "data" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


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


async def test_the_trajectory_is_token_exact(api: Api) -> None:
    call = ModelCall(
        turn=0,
        parent_turn=None,
        prompt_length=3,
        prompt_hash="0" * 16,
        prompt_delta=[1, 2, 3],
        sampled=[4, 5],
        logprobs=[-0.5, -1.25],
        finish_reason="stop",
        temperature=1.0,
        policy_id=PolicyId("base"),
        template_digest="sha256:t",
    )
    async with api.client() as http:
        run = await created(http)
        lease = await claim(api.database, run["id"])
        async with api.database.transaction() as connection:
            await RunStore(connection).record(lease, [thought(0)], model_call=call)
        await finish(api.database, lease)
        trajectory = (await http.get(f"/v1/runs/{run['id']}/trajectory")).json()
    assert trajectory["model_calls"] == [call.model_dump(mode="json")]
    assert [event["seq"] for event in trajectory["events"]] == [1, 2, 3]
    assert trajectory["run"]["state"] == "accepted"


# ---------------------------------------------------------------- events


async def test_events_resume_after_the_last_one_seen(api: Api) -> None:
    async with api.client() as http:
        run_id = (await created(http))["id"]
        lease = await claim(api.database, run_id)
        await record(api.database, lease, *(thought(step) for step in range(250)))
        await finish(api.database, lease)
        url = f"/v1/runs/{run_id}/events"
        whole = frames((await http.get(url)).text)
        assert [seq for seq, _, _ in whole] == list(range(1, 253)), "batches leave no gap"
        assert whole[-1][1] == "finished"
        resumed = await http.get(url, headers={"Last-Event-ID": "250"}, params={"after": 3})
        assert [seq for seq, _, _ in frames(resumed.text)] == [251, 252]
        listed = await http.get(url, headers={"Accept": "application/json"}, params={"after": 250})
        assert [event["seq"] for event in listed.json()] == [251, 252]
        assert listed.json()[-1]["body"]["type"] == "finished"
        over = await http.get(url, headers={"Last-Event-ID": "252"})
        assert over.status_code == 204, "nothing will come: a browser must not reconnect"
        for wrong in ("-1", "x", "1e400", str(2**40)):
            problem(await http.get(url, headers={"Last-Event-ID": wrong}), 422)


async def test_the_list_of_a_running_runs_events_does_not_wait(api: Api) -> None:
    async with api.client() as http:
        run_id = (await created(http))["id"]
        listed = await http.get(f"/v1/runs/{run_id}/events", headers={"Accept": "application/json"})
    assert [event["body"]["type"] for event in listed.json()] == ["admitted"]


# ---------------------------------------------------------------- expectations stay private


GOLDEN = Verdict(
    status=VerdictStatus.FAIL,
    basis="rules+expectation",
    reward=0.0,
    checks=[
        CheckResult(
            name="queue_is_right",
            kind="text.equals",
            status=CheckStatus.FAILED,
            score=0,
            reason="queue should be 'GOLDGOLD'",
            evidence={"wanted": "GOLDGOLD"},
        ),
        CheckResult(
            name="complete",
            kind="schema",
            status=CheckStatus.PASSED,
            score=1,
            public=True,
            reason="complete",
            evidence={"value": "shown"},
        ),
    ],
    verifier_digest="sha256:v",
    evidence_hash="sha256:e",
)


async def test_no_answer_carries_the_expectation(api: Api) -> None:
    async with api.client() as http:
        run = await created(http, kind="evaluation", expectation={"queue": "GOLDGOLD"})
        url = f"/v1/runs/{run['id']}"
        lease = await claim(api.database, run["id"])
        reason = GOLDEN.checks[0].reason
        await finish(api.database, lease, RunState.REJECTED, verdict=GOLDEN, reason=reason)
        answers = [
            await http.get(url),
            await http.get("/v1/runs"),
            await http.get(f"{url}/events"),
            await http.get(f"{url}/events", headers={"Last-Event-ID": "2"}),
            await http.get(f"{url}/events", headers={"Accept": "application/json"}),
            await http.get(f"{url}/trajectory"),
        ]
    for answer in answers:
        assert answer.status_code == 200
        assert "GOLDGOLD" not in answer.text, answer.url
    shown = answers[0].json()["verdict"]["checks"]
    assert [check["status"] for check in shown] == ["failed", "passed"]
    assert shown[1]["evidence"] == {"value": "shown"}, "public checks keep their words"


async def test_a_verdict_by_rules_keeps_its_words(api: Api) -> None:
    verdict = GOLDEN.model_copy(update={"basis": "rules"})
    async with api.client() as http:
        run = await created(http)
        lease = await claim(api.database, run["id"])
        await finish(api.database, lease, RunState.REJECTED, verdict=verdict, reason="because")
        shown = (await http.get(f"/v1/runs/{run['id']}")).json()
    assert shown["reason"] == "because"
    assert shown["verdict"] == verdict.model_dump(mode="json")


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
        problem(await http.post(url, json={}), 422)
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


# ---------------------------------------------------------------- operations


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
