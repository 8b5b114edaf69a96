"""Registering, promoting, rolling back and reconciling on a real Postgres, with a fake engine."""

import datetime as dt
import itertools
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import psycopg
import pytest

from flywheel.bridge import Bridge
from flywheel.records import Adapter, AdapterStatus, Decision, Lineage, Outcome, Score
from flywheel.release import aliases, shelf
from flywheel.release.adapters import AdapterStore, policy_of, register, verify
from flywheel.release.aliases import promote, releases, roll_back
from flywheel.release.holds import hold
from flywheel.release.hot_load import load, unload
from flywheel.release.inspection import WEIGHTS
from flywheel.release.reconciler import reconcile
from flywheel.release.testing import TableEngine, random_adapter, safetensors, sure_points
from flywheel.store import MIGRATIONS, transaction
from flywheel.wheel import Wheel
from runtime.database import Database, migrate
from runtime.errors import (
    AdapterRefused,
    Conflict,
    EngineUnavailable,
    NotFound,
    ProbeFailed,
    StoreError,
)
from runtime.run import Policy, PolicyId, RunId, RunKind, Sampling, Task, TenantId
from runtime.run_executor import Workplace
from runtime.run_queue import RunQueue
from runtime.run_store import Admission, RunStore
from tests.fixtures.api import letters

TENANT = TenantId("default")
BASE = Policy(id=PolicyId("tiny"), base="sha256:tiny")
DAY = dt.datetime(2026, 7, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Place:
    """A wheel over a tiny base, and what tests do with it."""

    wheel: Wheel
    engine: TableEngine
    folder: Path

    def trained(self, seed: int) -> Path:
        folder = self.folder / f"trained-{seed}"
        if folder.exists():
            return folder
        return random_adapter(folder, self.wheel.model_dir, rank=4, seed=seed)

    def register(self, seed: int = 0, **changes: Any) -> Adapter:
        values = {"domain": "letters", "domain_digest": "sha256:d", "stage": "sft"}
        lineage = Lineage.model_validate({**values, **changes})
        return register(self.wheel, TENANT, self.trained(seed), lineage, sure_points(), at=DAY)

    def promote(self, adapter: Adapter, **changes: Any) -> Any:
        how = {"by": "ana", "reason": "better", **changes}
        return promote(self.wheel, TENANT, adapter.name, **how)

    def roll_back(self, **changes: Any) -> Any:
        how = {"by": "bo", "reason": "worse", **changes}
        return roll_back(self.wheel, TENANT, "letters", **how)

    def now(self, adapter: Adapter) -> Adapter:
        with transaction(self.wheel.url) as connection:
            return AdapterStore(connection).get(TENANT, adapter.name)

    def served(self) -> list[str]:
        return self.wheel.bridge.call(self.engine.models())

    def alias(self) -> Policy | None:
        async def read() -> Policy | None:
            async with self.wheel.database.transaction() as connection:
                return await RunStore(connection).alias(TENANT, "letters", "production")

        return self.wheel.bridge.call(read())

    def admit(self, policy: Policy, kind: RunKind = RunKind.PRODUCTION) -> RunId:
        async def store() -> RunId:
            async with self.wheel.database.transaction() as connection:
                admission = Admission(
                    tenant_id=TENANT,
                    kind=kind,
                    domain_digest="sha256:d",
                    task=Task(id="t", domain="letters", input={}),
                    policy=policy,
                    sampling=Sampling(seed=1),
                )
                run_id, _ = await RunStore(connection).admit(admission)
                return run_id

        return self.wheel.bridge.call(store())

    def pinned(self, run_id: RunId) -> str:
        async def read() -> str:
            async with self.wheel.database.transaction() as connection:
                return (await RunStore(connection).get(TENANT, run_id)).policy.id

        return self.wheel.bridge.call(read())

    def claim(self) -> list[RunId]:
        async def take() -> list[RunId]:
            async with self.wheel.database.transaction() as connection:
                leases = await RunQueue(connection).claim("r", limit=9, lease_seconds=60)
            return [lease.run_id for lease in leases]

        return self.wheel.bridge.call(take())


@pytest.fixture
def place(database_url: str, tmp_path: Path) -> Iterator[Place]:
    base = tmp_path / "tiny"
    base.mkdir()
    module = "model.layers.0.self_attn.q_proj.weight"
    (base / "model.safetensors").write_bytes(safetensors({module: np.zeros((8, 8), "<f4")}))
    engine = TableEngine(BASE.id)
    with Bridge() as bridge:
        bridge.call(migrate(database_url))
        bridge.call(migrate(database_url, folder=MIGRATIONS, schema="flywheel"))
        database = bridge.call(opened(database_url))
        wheel = Wheel(
            url=database_url,
            home=tmp_path / "home",
            bridge=bridge,
            database=database,
            engine=engine,
            domains={"letters": letters()},
            recipes={},
            workplace=cast(Workplace, None),  # no run is executed here
            base=BASE,
            model_dir=base,
        )
        yield Place(wheel, engine, tmp_path)
        bridge.call(database.__aexit__(None, None, None))


async def opened(url: str) -> Database:
    return await Database(url, size=4).__aenter__()


# ---------------------------------------------------------------- registering


def test_an_adapter_is_registered_once_with_its_lineage(place: Place) -> None:
    adapter = place.register(1, tasks=["pt_1"], runs=["run_1"], corrections=["run_0"])
    assert adapter.name == f"letters-20260701-{adapter.digest[7:19]}"
    assert (adapter.status, adapter.loaded) == (AdapterStatus.CANDIDATE, False)
    folder = Path(adapter.folder)
    assert folder == place.wheel.adapters / adapter.name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["tasks"], manifest["corrections"]) == (["pt_1"], ["run_0"])
    assert (manifest["digest"], manifest["base"], manifest["rank"]) == (
        adapter.digest,
        BASE.base,
        4,
    )
    verify(adapter)
    assert place.register(1) == adapter, "the same weights are the same adapter"
    assert place.register(2).name != adapter.name
    assert not list(place.wheel.adapters.glob(".part-*"))


def test_equal_registrations_at_once_are_one(place: Place) -> None:
    place.trained(1)
    with ThreadPoolExecutor(4) as pool:
        adapters = list(pool.map(lambda _: place.register(1), range(4)))
    assert len({adapter.name for adapter in adapters}) == 1
    verify(adapters[0])


def test_a_refused_adapter_leaves_nothing(place: Place) -> None:
    folder = place.trained(1)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-4])
    lineage = Lineage(domain="letters", domain_digest="sha256:d", stage="sft")
    with pytest.raises(AdapterRefused) as caught:
        register(place.wheel, TENANT, folder, lineage, sure_points())
    assert caught.value.detail["reason"] == "truncated"
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(AdapterRefused, match="probe point"):
        register(place.wheel, TENANT, folder, lineage, [])
    assert list(place.wheel.adapters.iterdir()) == []
    with transaction(place.wheel.url) as connection:
        assert AdapterStore(connection).page(TENANT) == []


def test_a_registration_that_is_not_committed_is_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, name: str) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(shelf, "place", full)
        with pytest.raises(StoreError, match="No space left on device"):
            place.register(1)
    with transaction(place.wheel.url) as connection:
        assert AdapterStore(connection).page(TENANT) == []
    assert place.register(1).status is AdapterStatus.CANDIDATE


def test_a_decision_is_kept_and_a_rejected_candidate_says_so(place: Place) -> None:
    adapter = place.register(1)
    score = Score(passed=0, n=8, tasks=4, rate=0, low=0, high=0.3)
    decision = Decision(
        outcome=Outcome.REJECT,
        reasons=["it is worse"],
        incumbent=score,
        candidate=score,
        difference=None,
    )
    with transaction(place.wheel.url) as connection:
        AdapterStore(connection).set_decision(TENANT, adapter.name, decision)
    assert place.now(adapter).status is AdapterStatus.REJECTED
    assert place.now(adapter).decision == decision
    with pytest.raises(Conflict, match="the gate rejected letters-"):
        place.promote(adapter)
    assert place.alias() is None


# ---------------------------------------------------------------- loading


def test_loading_pins_and_is_repeatable(place: Place) -> None:
    adapter = place.register(1)
    for _ in range(2):
        report = load(place.wheel, adapter)
        assert (report.passed, report.served) == (True, adapter.name)
    assert place.engine.loads == [(adapter.name, adapter.folder, True)]
    assert place.now(adapter).loaded
    for _ in range(2):
        unload(place.wheel, adapter)
    assert not place.now(adapter).loaded
    assert place.wheel.bridge.call(place.engine.models()) == [BASE.id]


def test_one_flipped_byte_is_refused(place: Place) -> None:
    adapter = place.register(1)
    path = Path(adapter.folder) / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(AdapterRefused, match="changed after it was registered"):
        load(place.wheel, adapter)
    assert place.engine.loads == []
    assert not place.now(adapter).loaded


def test_another_base_is_refused(place: Place) -> None:
    adapter = place.register(1).model_copy(update={"base": "sha256:other"})
    with pytest.raises(AdapterRefused, match="was trained on the base"):
        load(place.wheel, adapter)
    assert place.engine.loads == []


def test_what_fails_its_probe_is_not_served(place: Place) -> None:
    adapter = place.register(1)
    place.engine.serves = "base"
    with pytest.raises(ProbeFailed, match="is not served as it was trained"):
        load(place.wheel, adapter)
    assert not place.now(adapter).loaded
    assert place.wheel.bridge.call(place.engine.models()) == [BASE.id]


def test_a_full_engine_makes_room_for_what_is_needed(place: Place) -> None:
    serving, first, second, third = (
        place.register(seed, cycle_id="c", stage="grpo") for seed in (1, 2, 3, 4)
    )
    place.promote(serving)
    for adapter in (first, second, third):
        load(place.wheel, adapter)
    served = place.wheel.bridge.call(place.engine.models())
    assert served == [BASE.id, serving.name, second.name, third.name]
    assert not place.now(first).loaded
    for adapter in (second, third):
        place.admit(policy_of(adapter), RunKind.ROLLOUT)
    with pytest.raises(Conflict, match="no room"):
        load(place.wheel, first)
    assert not place.now(first).loaded


def test_what_serves_an_alias_is_not_unloaded(place: Place) -> None:
    adapter = place.register(1)
    place.promote(adapter)
    with pytest.raises(Conflict, match="serves production of letters"):
        unload(place.wheel, adapter)


# ---------------------------------------------------------------- releases


def test_a_promotion_switches_repins_and_is_recorded(place: Place) -> None:
    adapter = place.register(1)
    started = place.admit(BASE)
    assert place.claim() == [started]
    queued, practice = place.admit(BASE), place.admit(BASE, RunKind.EVALUATION)
    change = place.promote(adapter)
    assert (change.before, change.after, change.repinned) == (None, adapter.name, 1)
    assert (change.changed_by, change.reason) == ("ana", "better")
    assert place.alias() == policy_of(adapter)
    assert place.pinned(queued) == adapter.name
    assert place.pinned(started) == place.pinned(practice) == BASE.id
    assert place.now(adapter).status is AdapterStatus.SERVING
    assert place.promote(adapter) == change, "repeating it changes nothing"
    with transaction(place.wheel.url) as connection:
        assert releases(connection, TENANT, "letters") == [change]


def test_a_better_one_retires_it_and_a_rollback_restores_it(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(second)
    assert place.now(first).status is AdapterStatus.RETIRED
    queued = place.admit(policy_of(second))
    change = place.roll_back()
    assert (change.before, change.after, change.repinned) == (second.name, first.name, 1)
    assert place.pinned(queued) == first.name
    assert place.now(first).status is AdapterStatus.SERVING
    assert place.now(second).status is AdapterStatus.ROLLED_BACK
    change = place.roll_back()
    assert (change.before, change.after) == (first.name, None)
    assert place.alias() is None
    assert place.pinned(queued) == BASE.id
    with pytest.raises(Conflict, match="resolves to the base model"):
        place.roll_back()


def test_an_alias_of_its_own_keeps_an_adapter_serving(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(first, alias="canary")
    place.promote(second)
    assert place.now(first).status is AdapterStatus.SERVING
    assert place.roll_back(alias="canary").after is None
    assert place.now(first).status is AdapterStatus.ROLLED_BACK


def test_a_rollback_passes_over_what_cannot_serve(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(second)
    (Path(first.folder) / WEIGHTS).unlink()
    change = place.roll_back()
    assert change.after is None
    assert f"{first.name} was passed over" in change.reason


def test_a_rollback_does_not_wait_for_the_engine(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(second)
    place.engine.away = True
    assert place.roll_back().after == first.name
    with pytest.raises(EngineUnavailable):
        place.promote(second)
    assert place.alias() == policy_of(first)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "http://else.where/x", "letters-1", "x" * 999]
)
def test_only_registered_names_are_promoted(place: Place, name: str) -> None:
    adapter = place.register(1)
    with pytest.raises(NotFound, match=adapter.name):
        promote(place.wheel, TENANT, name, by="me", reason="r")
    with pytest.raises(NotFound):
        promote(place.wheel, TenantId("other"), adapter.name, by="me", reason="r")
    with pytest.raises(NotFound, match="known: letters"):
        roll_back(place.wheel, TENANT, name, by="me", reason="r")
    assert place.engine.loads == []


def test_a_promotion_that_fails_its_probe_changes_nothing(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.engine.serves = "another name"
    with pytest.raises(ProbeFailed):
        place.promote(second)
    assert place.alias() == policy_of(first)
    assert place.now(second).status is AdapterStatus.CANDIDATE


def damage_probe(adapter: Adapter) -> None:
    probe = Path(adapter.folder) / "probe.json"
    probe.chmod(0o644)
    probe.write_text("[")


def test_a_refused_promotion_leaves_other_aliases_alone(place: Place) -> None:
    adapter = place.register(1)
    place.promote(adapter, alias="staging")
    before = place.now(adapter)
    place.engine.noise = -1.0
    with pytest.raises(ProbeFailed):
        place.promote(adapter)
    damage_probe(adapter)
    with pytest.raises(AdapterRefused, match=r"probe\.json .* is damaged"):
        place.promote(adapter)
    assert place.alias() is None
    assert place.now(adapter) == before
    assert place.served() == [BASE.id, adapter.name]


def test_passing_over_an_adapter_leaves_other_aliases_alone(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(first, alias="staging")
    place.promote(second)
    damage_probe(first)
    assert place.roll_back().after is None
    assert place.now(first).loaded
    assert first.name in place.served()


def test_a_failed_probe_leaves_the_engine_as_it_was(place: Place) -> None:
    adapter = place.register(1)
    place.promote(adapter, alias="staging")
    place.engine.restart()
    place.engine.serves = "base"
    with pytest.raises(ProbeFailed):
        place.promote(adapter)
    assert place.served() == [BASE.id]
    place.engine.serves = "adapter"
    assert reconcile(place.wheel) == [adapter.name]


def test_promoting_again_makes_it_resident_again(place: Place) -> None:
    adapter = place.register(1)
    change = place.promote(adapter)
    place.engine.restart()
    assert place.promote(adapter) == change
    assert place.served() == [BASE.id, adapter.name]


# ---------------------------------------------------------------- stale decisions


def test_rollbacks_at_once_never_lead_to_where_they_began(place: Place) -> None:
    adapters = [place.register(seed) for seed in (1, 2, 3)]
    for adapter in adapters:
        place.promote(adapter)

    def attempt(n: int) -> str:
        try:
            place.roll_back(by=f"b{n}")
        except Conflict as error:
            return str(error)
        return "done"

    with ThreadPoolExecutor(6) as pool:
        ends = list(pool.map(attempt, range(6)))
    with transaction(place.wheel.url) as connection:
        made = releases(connection, TENANT, "letters")
    assert len(made) == len(adapters) + ends.count("done")
    assert all(change.before != change.after for change in made)
    steps = [(older.after, newer.before) for newer, older in itertools.pairwise(made)]
    assert all(left == found for left, found in steps), "each leaves what the one before led to"


@pytest.mark.parametrize("decide", ["promote", "roll_back"])
def test_a_stale_decision_overwrites_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, decide: str
) -> None:
    first, second, third = (place.register(seed) for seed in (1, 2, 3))
    place.promote(first)
    place.promote(second)

    def overtaken(*_: object) -> None:
        with monkeypatch.context() as undone:
            undone.setattr(aliases, "load", load)
            place.promote(third, by="eve", reason="faster")

    monkeypatch.setattr(aliases, "load", overtaken)
    decision = place.roll_back if decide == "roll_back" else lambda: place.promote(first)
    with pytest.raises(Conflict, match=f"switched to {third.name} by eve .faster. meanwhile"):
        decision()
    assert place.alias() == policy_of(third)
    assert place.now(third).status is AdapterStatus.SERVING


def test_promotions_of_one_adapter_at_once_are_one(place: Place) -> None:
    adapter = place.register(1)
    with ThreadPoolExecutor(4) as pool:
        changes = list(pool.map(lambda _: place.promote(adapter), range(4)))
    assert len({change.id for change in changes}) == 1
    with transaction(place.wheel.url) as connection:
        assert releases(connection, TENANT) == [changes[0]]


def test_a_rollback_of_what_serves_no_longer_is_refused(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(second)
    with pytest.raises(Conflict, match=f"resolves to {second.name}, no longer to {first.name}"):
        place.roll_back(leaving=first.name)
    assert place.roll_back(leaving=second.name).after == first.name


# ---------------------------------------------------------------- reconciling


def test_whatever_an_alias_resolves_to_is_wanted(place: Place) -> None:
    adapter = place.register(1)
    place.promote(adapter)
    place.engine.restart()
    with transaction(place.wheel.url) as connection:
        AdapterStore(connection).set_loaded(TENANT, adapter.name, False)
        assert AdapterStore(connection).get(TENANT, adapter.name).loaded
        connection.execute("UPDATE flywheel.adapters SET loaded = false")
    assert reconcile(place.wheel) == [adapter.name]


def test_an_engine_that_forgot_is_told_again(place: Place) -> None:
    loaded, serving, idle = place.register(1), place.register(2), place.register(3)
    load(place.wheel, loaded)
    place.promote(serving)
    assert reconcile(place.wheel) == []
    place.engine.restart()
    assert reconcile(place.wheel) == [serving.name, loaded.name], "what serves comes first"
    assert idle.name not in place.wheel.bridge.call(place.engine.models())
    place.engine.away = True
    place.engine.restart()
    assert reconcile(place.wheel) == []
    place.engine.away = False
    assert reconcile(place.wheel) == [serving.name, loaded.name]


def test_what_cannot_serve_any_more_is_rolled_back(place: Place) -> None:
    first, second = place.register(1), place.register(2)
    place.promote(first)
    place.promote(second)
    (Path(second.folder) / WEIGHTS).unlink()
    place.engine.restart()
    assert reconcile(place.wheel) == [first.name]
    assert place.alias() == policy_of(first)
    assert place.now(second).status is AdapterStatus.ROLLED_BACK
    assert not place.now(second).loaded
    with transaction(place.wheel.url) as connection:
        newest = releases(connection, TENANT)[0]
    assert newest.changed_by == "reconciler"
    assert "missing" in newest.reason


def test_parts_of_dead_processes_are_swept(place: Place) -> None:
    part = place.wheel.adapters / ".part-dead"
    part.mkdir(parents=True)
    reconcile(place.wheel)
    assert part.exists()
    os.utime(part, (0, 0))
    reconcile(place.wheel)
    assert not part.exists()


# ---------------------------------------------------------------- holds


def test_a_hold_lasts_as_long_as_its_block(place: Place) -> None:
    practice, production = place.admit(BASE, RunKind.ROLLOUT), place.admit(BASE)
    with hold(place.wheel, "cyc_1", [RunKind.ROLLOUT], "training"):
        assert place.claim() == [production]
    assert place.claim() == [practice]
    with pytest.raises(ValueError, match="never held"), hold(place.wheel, "x", list(RunKind), "no"):
        pass


def test_a_hold_is_renewed_and_wakes_the_runners(place: Place) -> None:
    def until() -> dt.datetime:
        with transaction(place.wheel.url) as connection:
            row = connection.execute("SELECT until FROM runtime.holds").fetchone()
        assert row is not None
        return row["until"]

    with psycopg.connect(place.wheel.url, autocommit=True) as listening:
        listening.execute("LISTEN noria_queue")
        with hold(place.wheel, "cyc_1", [RunKind.ROLLOUT], "training", seconds=0.3):
            first = until()
            deadline = threading.Event()
            while until() == first:
                assert not deadline.wait(0.02), "nobody sets it: a pause, not an event"
        assert [note.channel for note in listening.notifies(timeout=5, stop_after=1)] == [
            "noria_queue"
        ]
