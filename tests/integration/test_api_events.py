"""What a run tells over REST: waited for, streamed, listed; and never its gold."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from runtime.database import QUEUE_CHANNEL
from runtime.run import (
    CheckResult,
    CheckStatus,
    ModelCall,
    PolicyId,
    RunId,
    RunState,
    Thought,
    Verdict,
    VerdictStatus,
)
from runtime.run_store import RunStore
from tests.fixtures.api import (
    LETTER,
    Api,
    claim,
    created,
    finish,
    problem,
    record,
)


def thought(step: int) -> Thought:
    return Thought(
        step=step, turn=step, text=f"step {step}", calls=[], sampled_tokens=2, prompt_tokens=3
    )


def frames(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    found: list[tuple[int, str, dict[str, Any]]] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line[1:])
        if "data" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


# ---------------------------------------------------------------- answers that wait or stream


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


async def test_wait_answers_with_the_finished_run(api: Api) -> None:
    async with api.client() as http, posting(api, http, mode="wait", wait_seconds=20) as posted:
        await finish(api.database, await claim(api.database, posted.run_id))
        answer = await posted.request
    assert answer.status_code == 200
    assert answer.json()["state"] == "accepted"
    assert answer.json()["answer"] == {"queue": "cards"}


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


# ---------------------------------------------------------------- events, trajectory


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


# ---------------------------------------------------------------- expectations stay private


GOLD = 731_642_095
"""An expectation that occurs in no answer by chance."""
GOLDEN = Verdict(
    status=VerdictStatus.FAIL,
    basis="rules+expectation",
    reward=0.0,
    checks=[
        CheckResult(
            name="priority_is_right",
            kind="text.equals",
            status=CheckStatus.FAILED,
            score=0,
            reason=f"priority should be {GOLD}",
            evidence={"wanted": GOLD},
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
    evidence_hash="sha256:e71de4ce",
)


async def test_no_answer_carries_the_expectation(api: Api) -> None:
    async with api.client() as http:
        run = await created(http, kind="evaluation", expectation={"priority": GOLD})
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
        assert str(GOLD) not in answer.text, answer.url
        assert GOLDEN.evidence_hash not in answer.text, (
            "a hash over few possible answers tells which"
        )
    shown = answers[0].json()["verdict"]["checks"]
    assert [check["status"] for check in shown] == ["failed", "passed"]
    assert shown[1]["evidence"] == {"value": "shown"}, "public checks keep their words"
    run, events = answers[-1].json()["run"], answers[-1].json()["events"]
    graded = next(each["body"]["verdict"] for each in events if each["body"]["type"] == "graded")
    for verdict in (run["verdict"], graded):
        assert verdict["evidence_hash"] is None
        assert (verdict["status"], verdict["reward"]) == ("fail", 0.0)


async def test_the_description_says_that_the_evidence_hash_may_be_withheld(api: Api) -> None:
    async with api.client() as http:
        schemas = (await http.get("/v1/openapi.json")).json()["components"]["schemas"]
    told = schemas["Verdict"]["properties"]["evidence_hash"]
    assert {"type": "null"} in told["anyOf"]
    assert "null where" in told["description"]


async def test_a_verdict_by_rules_keeps_its_words(api: Api) -> None:
    verdict = GOLDEN.model_copy(update={"basis": "rules"})
    async with api.client() as http:
        run = await created(http)
        lease = await claim(api.database, run["id"])
        await finish(api.database, lease, RunState.REJECTED, verdict=verdict, reason="because")
        shown = (await http.get(f"/v1/runs/{run['id']}")).json()
    assert shown["reason"] == "because"
    assert shown["verdict"] == verdict.model_dump(mode="json")
