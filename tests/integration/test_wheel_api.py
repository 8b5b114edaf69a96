"""The wheel's routes and their client, behind a real socket, over a real Postgres."""

import asyncio
import datetime as dt
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from flywheel.client import WheelClient
from flywheel.cycle import Advance, advance
from flywheel.records import Adapter, AdapterStatus, CycleId, Decision, Manifest, Outcome, Score
from flywheel.release.adapters import AdapterStore, policy_of
from flywheel.release.aliases import ReleaseStore
from flywheel.routes import wheel_extension
from flywheel.schemas import ImportedTask
from flywheel.store import MIGRATIONS, as_json, transaction
from runtime.client import ApiProblem
from runtime.database import migrate
from runtime.key_store import ALL_SCOPES
from runtime.run import TenantId
from tests.fixtures.api import DEFAULT, OTHER, LiveApi, live, problem, store_key
from tests.fixtures.wheel import letters_wheel

NIGHT = dt.datetime(2026, 11, 30, 2, tzinfo=dt.UTC)
SCORE = Score(passed=1, n=2, tasks=2, rate=0.5, low=0.1, high=0.9)


@pytest.fixture
def live_wheel(database_url: str, tmp_path: Path) -> Iterator[LiveApi]:
    asyncio.run(migrate(database_url))
    asyncio.run(migrate(database_url, folder=MIGRATIONS, schema="flywheel"))
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO runtime.tenants (tenant_id, name) VALUES ('other', 'B')")
    with live(database_url, wheel_extension(lambda: letters_wheel(database_url, tmp_path))) as api:
        yield api


@pytest.fixture
def client(live_wheel: LiveApi) -> Iterator[WheelClient]:
    with WheelClient(live_wheel.url, live_wheel.key) as opened:
        yield opened


def key_with(api: LiveApi, *scopes: str, tenant: TenantId = DEFAULT) -> str:
    return api.do(store_key(api.services.database, *scopes, tenant=tenant))


def http(api: LiveApi, key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key or api.key}"}
    return httpx.Client(base_url=api.url, headers=headers, timeout=30)


# ---------------------------------------------------------------- cycles


def test_a_cycle_from_its_beginning_to_its_stop(
    live_wheel: LiveApi, client: WheelClient, tmp_path: Path
) -> None:
    begun = client.create_cycle("letters", seed=7)
    assert begun.new
    assert begun.cycle.state == "running"
    assert begun.cycle.stages[0].state == "pending"
    again = client.create_cycle("letters", profile="fast")
    assert (again.new, again.cycle.id) == (False, begun.cycle.id)
    assert client.cycle(begun.cycle.id) == begun.cycle
    assert [(each.id, each.stages) for each in client.cycles("letters")] == [(begun.cycle.id, [])]
    assert client.cycles("other_domain") == []

    assert client.stop_cycle(begun.cycle.id).state == "running", "its worker hears of it"
    with letters_wheel(live_wheel.database_url, tmp_path) as wheel:
        done = advance(wheel, DEFAULT, CycleId(begun.cycle.id), owner="test")
    assert done is Advance.ENDED
    stopped = client.stop_cycle(begun.cycle.id)
    assert stopped.state == "stopped"
    assert {stage.state for stage in stopped.stages} == {"skipped"}
    assert client.create_cycle("letters").new, "the next turn of the same day"


def test_a_profile_changes_the_plan(client: WheelClient) -> None:
    names = [stage.name for stage in client.create_cycle("letters", profile="fast").cycle.stages]
    assert "grpo" not in names
    assert names[-1] == "release"


def test_answers_say_where_the_cycle_is_and_whether_it_is_new(live_wheel: LiveApi) -> None:
    with http(live_wheel) as asking:
        first = asking.post("/v1/cycles", json={"domain": "letters"})
        second = asking.post("/v1/cycles", json={"domain": "letters"})
        assert (first.status_code, second.status_code) == (202, 200)
        assert first.headers["location"] == f"/v1/cycles/{first.json()['id']}"
        assert asking.get(first.headers["location"]).json() == second.json()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"domain": "nothing"}, "domains that turn: letters"),
        ({"profile": "quick"}, "recipe of letters: there is no profile 'quick'; profiles: fast"),
        ({"level": "hard"}, "no level 'hard'; allowed: easy, full"),
        ({"seed": -1}, "seed"),
        ({"domian": "letters"}, "domian"),
    ],
)
def test_what_cannot_turn_is_refused_with_what_can(
    live_wheel: LiveApi, changes: dict[str, Any], words: str
) -> None:
    with http(live_wheel) as asking:
        answer = asking.post("/v1/cycles", json={"domain": "letters", **changes})
        assert words in problem(answer, 422)["detail"]
        assert "/" not in answer.json()["detail"], "no file of ours is named"
        assert asking.get("/v1/cycles").json()["cycles"] == []


def test_what_cannot_exist_is_not_found_and_wrong_queries_are_named(live_wheel: LiveApi) -> None:
    with http(live_wheel) as asking:
        for name in ("x", "%00", "cyc_" + "0" * 20, "..%2f..", "x" * 5000):
            problem(asking.get(f"/v1/cycles/{name}"), 404)
            problem(asking.post(f"/v1/cycles/{name}/stop"), 404)
            problem(asking.get(f"/v1/adapters/{name}"), 404)
        for query in ("domain=../x", "limit=0", "limit=x", "domain=%00"):
            problem(asking.get(f"/v1/cycles?{query}"), 422)
        for query in ("status=odd", "split=odd", "cursor=eA==", "cursor=%00", "cursor=é"):
            assert problem(asking.get(f"/v1/pool/tasks?{query}"), 422)["errors"]


# ---------------------------------------------------------------- who may what

READS = ("/v1/cycles", "/v1/pool/tasks", "/v1/adapters", "/v1/releases")
TURNS: dict[str, dict[str, Any]] = {
    "/v1/cycles": {"domain": "letters"},
    "/v1/pool/tasks": {
        "domain": "letters",
        "tasks": [{"input": {"message": "x"}, "expectation": {"queue": "cards", "priority": 1}}],
    },
}
RELEASES: dict[str, dict[str, Any]] = {
    "/v1/releases": {"adapter": "letters-20261130-0123456789ab", "reason": "tried"},
    "/v1/releases/rollback": {"domain": "letters", "reason": "tried"},
}


def test_scopes_are_enforced_on_every_route(live_wheel: LiveApi) -> None:
    without = [scope for scope in ALL_SCOPES if scope not in ("flywheel", "release")]
    for scopes, allowed in ((without, ()), (["release"], RELEASES), (["flywheel"], TURNS)):
        with http(live_wheel, key_with(live_wheel, *scopes)) as asking:
            for path in READS:
                status = asking.get(path).status_code
                assert status == (200 if "flywheel" in scopes else 403), (scopes, path)
            for path, body in {**TURNS, **RELEASES}.items():
                answer = asking.post(path, json=body)
                assert (answer.status_code != 403) == (path in allowed), (scopes, path)


def test_nobody_sees_or_touches_what_another_tenant_has(
    live_wheel: LiveApi, client: WheelClient
) -> None:
    cycle = client.create_cycle("letters").cycle
    client.import_tasks("letters", [imported("mine")])
    adapter = stored_adapter(live_wheel)
    with WheelClient(live_wheel.url, key_with(live_wheel, tenant=OTHER)) as other:
        assert (other.cycles(), other.pool().tasks, other.adapters()) == ([], [], [])
        assert set(other.pool().counts.values()) == {0}
        for refused in (
            lambda: other.cycle(cycle.id),
            lambda: other.stop_cycle(cycle.id),
            lambda: other.adapter(adapter.name),
            lambda: other.promote(adapter.name, reason="mine now"),
        ):
            with pytest.raises(ApiProblem, match="there is no") as error:
                refused()
            assert error.value.status == 404
        assert other.create_cycle("letters").new, "its own wheel"
    assert client.cycle(cycle.id).state == "running"


# ---------------------------------------------------------------- pool


def imported(message: str, queue: str = "cards", **changes: Any) -> ImportedTask:
    expectation: dict[str, Any] = {"queue": queue, "priority": 1}
    return ImportedTask(input={"message": message}, expectation=expectation, **changes)


def test_imported_tasks_are_stored_once_and_shown_without_their_answers(
    live_wheel: LiveApi, client: WheelClient
) -> None:
    tasks = [imported(f"letter {number}", row=number + 2) for number in range(5)]
    taken = client.import_tasks("letters", tasks)
    assert (taken.stored, taken.known) == (5, 0)
    taken = client.import_tasks("letters", [*tasks, imported("new")], split="gate")
    assert (taken.stored, taken.known) == (1, 5)
    assert client.pool("letters").counts["pending"] == 6
    page = client.pool("letters", limit=2)
    assert len(page.tasks) == 2
    assert page.next_cursor
    seen = [task.input["message"] for task in client.pool_tasks("letters")]
    assert sorted(seen) == sorted([*(f"letter {n}" for n in range(5)), "new"])
    assert [task.split for task in client.pool_tasks(split="gate")] == ["gate"]
    assert list(client.pool_tasks(status="admitted")) == []
    with http(live_wheel) as asking:
        text = asking.get("/v1/pool/tasks").text
    assert "expectation" not in text
    assert "cards" not in text


def test_pages_hold_every_task_once(client: WheelClient) -> None:
    client.import_tasks("letters", [imported(f"letter {number}") for number in range(7)])
    seen: list[str] = []
    cursor = None
    while True:
        page = client.pool("letters", cursor=cursor, limit=3)
        seen += [task.id for task in page.tasks]
        if (cursor := page.next_cursor) is None:
            break
    assert len(seen) == len(set(seen)) == 7


def test_a_wrong_row_is_named_and_nothing_is_stored(client: WheelClient) -> None:
    tasks = [imported("good", row=2), imported("bad", queue="gold", row=3)]
    with pytest.raises(ApiProblem, match=r"row 3: .*gold") as refused:
        client.import_tasks("letters", tasks)
    assert refused.value.status == 422
    assert client.pool().tasks == []
    with pytest.raises(ApiProblem, match="known: letters"):
        client.import_tasks("nothing", tasks)


def test_a_question_has_one_answer_in_an_import_and_in_the_pool(client: WheelClient) -> None:
    first, other = imported("mine", row=2), imported("mine", "fraud", row=3)
    with pytest.raises(ApiProblem, match=r"rows 2, 3: row 2 says .*cards.*; row 3 says .*fraud"):
        client.import_tasks("letters", [first, other])
    assert client.pool().tasks == []
    client.import_tasks("letters", [first])
    [known] = client.pool().tasks
    with pytest.raises(ApiProblem, match=f"row 3: {known.id} in the pool says .*cards.*fraud"):
        client.import_tasks("letters", [imported("new", row=2), other])
    assert client.pool().tasks == [known], "all of an import or nothing"
    assert client.import_tasks("letters", [imported("new"), first]).known == 1
    elsewhere = other.model_copy(update={"files": {"policy.md": b"lost means stolen"}})
    assert client.import_tasks("letters", [elsewhere]).stored == 1, "another question"


def test_an_id_reaches_nothing_but_what_it_names(client: WheelClient) -> None:
    run = client.create_run("letters", {"message": "hello"})
    for stray in (
        f"../runs/{run.id}/cancel?x=",
        f"../runs/{run.id}/cancel#",
        "..",
        "\udcff",
        "%2E",
    ):
        with pytest.raises(ApiProblem) as refused:
            client.stop_cycle(stray)
        assert refused.value.status == 404, stray
    for asked in (f"../runs/{run.id}", f"{run.id}/trajectory", f"{run.id}?", "."):
        for ask in (client.run, client.cycle, client.adapter, client.domain, client.revoke_key):
            with pytest.raises(ApiProblem) as refused:
                ask(asked)
            assert refused.value.status == 404, (ask, asked)
    assert client.run(run.id).state == "queued"


# ---------------------------------------------------------------- adapters and releases


def stored_adapter(
    api: LiveApi, status: AdapterStatus = AdapterStatus.CANDIDATE, **decided: Any
) -> Adapter:
    """A row, as registering makes it; no engine serves it."""
    digest = f"sha256:{secrets.token_hex(32)}"
    name = f"letters-20261130-{digest[7:19]}"
    manifest = Manifest(
        name=name,
        digest=digest,
        base="sha256:base",
        base_name="base",
        domain="letters",
        domain_digest="sha256:letters",
        stage="sft",
        corrections=["run_1"],
        rank=16,
        created_at=NIGHT,
    )
    adapter = Adapter(
        tenant_id=DEFAULT,
        name=name,
        digest=digest,
        base="sha256:base",
        domain="letters",
        folder=f"/nowhere/{name}",
        stage="sft",
        status=status,
        loaded=False,
        manifest=manifest,
        created_at=NIGHT,
    )
    with transaction(api.database_url) as connection:
        store = AdapterStore(connection)
        store.insert(adapter)
        if decided:
            store.set_decision(DEFAULT, name, Decision.model_validate(decided))
    return adapter


def test_adapters_show_their_lineage_and_nothing_of_the_disk(
    live_wheel: LiveApi, client: WheelClient
) -> None:
    adapter = stored_adapter(live_wheel)
    (listed,) = client.adapters("letters")
    assert (listed.name, listed.status, listed.manifest) == (adapter.name, "candidate", None)
    assert client.adapters("other_domain") == []
    assert client.adapter(adapter.name).manifest == adapter.manifest
    with http(live_wheel) as asking:
        assert "nowhere" not in asking.get(f"/v1/adapters/{adapter.name}").text


def test_what_cannot_be_released_is_refused_with_its_reason(
    live_wheel: LiveApi, client: WheelClient
) -> None:
    rejected = stored_adapter(
        live_wheel,
        outcome=Outcome.REJECT,
        reasons=["it does harm"],
        incumbent=SCORE,
        candidate=SCORE,
        difference=None,
    )
    with pytest.raises(ApiProblem, match=f"there is no adapter 'nix'; the newest: {rejected.name}"):
        client.promote("nix", reason="try")
    with pytest.raises(ApiProblem, match=r"the gate rejected .* it does harm") as refused:
        client.promote(rejected.name, reason="try")
    assert refused.value.status == 409
    gone = stored_adapter(live_wheel)
    with pytest.raises(ApiProblem) as refused:
        client.promote(gone.name, reason="its files are gone")
    assert refused.value.status == 409
    with pytest.raises(ApiProblem, match="nothing to roll back"):
        client.roll_back("letters", reason="try")
    with pytest.raises(ApiProblem, match="there is no domain 'nothing'; known: letters"):
        client.roll_back("nothing", reason="try")
    with pytest.raises(ApiProblem, match="reason"):
        client.promote(gone.name, reason="")
    assert client.releases() == []


def test_a_roll_back_to_the_base_is_recorded_with_who_and_why(
    live_wheel: LiveApi, client: WheelClient
) -> None:
    adapter = stored_adapter(live_wheel)
    with transaction(live_wheel.database_url) as connection:
        ReleaseStore(connection).switch(
            DEFAULT,
            domain="letters",
            alias="production",
            expected=None,
            policy=as_json(policy_of(adapter)),
            fallback=as_json(policy_of(adapter)),
            by="cycle",
            reason="better",
        )
    back = client.roll_back("letters", reason="wrong queues")
    assert (back.before, back.after, back.changed_by) == (adapter.name, None, "test")
    assert [(each.after, each.reason) for each in client.releases("letters")] == [
        (None, back.reason),
        (adapter.name, "better"),
    ]
    assert client.releases("other_domain") == []
    with pytest.raises(ApiProblem, match="nothing to roll back"):
        client.roll_back("letters", reason="again")


# ---------------------------------------------------------------- the description


def test_openapi_names_every_answer_and_shows_examples(live_wheel: LiveApi) -> None:
    with http(live_wheel) as asking:
        document = asking.get("/v1/openapi.json").json()
    wheel = {p: o for p, o in document["paths"].items() if p.startswith((*READS, "/v1/pool"))}
    assert len(wheel) == 8
    for path, operations in wheel.items():
        for method, operation in operations.items():
            assert operation["summary"]
            assert operation["security"] == [{"ApiKey": []}]
            assert {"401", "403", "503"} <= operation["responses"].keys(), (path, method)
            for status, response in operation["responses"].items():
                if not status.startswith("2"):
                    assert list(response["content"]) == ["application/problem+json"], (path, status)
    assert {"200", "202"} <= document["paths"]["/v1/cycles"]["post"]["responses"].keys()
    for name in ("CreateCycle", "ImportTasks", "Promote", "RollBack"):
        assert document["components"]["schemas"][name]["examples"], name
    assert "HTTPValidationError" not in json.dumps(document)


def test_a_database_that_is_away_is_503(live_wheel: LiveApi) -> None:
    with psycopg.connect(live_wheel.database_url, autocommit=True) as admin:
        name = admin.info.dbname
    elsewhere = live_wheel.database_url.replace(name, "postgres")
    with http(live_wheel) as asking, psycopg.connect(elsewhere, autocommit=True) as admin:
        assert asking.get("/v1/cycles").status_code == 200
        admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )
            problem(asking.get("/v1/cycles"), 503)
        finally:
            admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_the_client_loads_neither_server_nor_trainer() -> None:
    import subprocess
    import sys

    script = (
        "import sys, flywheel.client; "
        "print([m for m in ('fastapi', 'psycopg', 'celery', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_process_but_the_trainer_loads_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys, deploy.worker, deploy.composition, deploy.cli, deploy.beat; "
        "print([m for m in ('torch', 'transformers', 'trl', 'peft') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
