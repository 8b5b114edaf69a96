"""The probe's judgement, which adapter makes room, and what is gone back to: decisions alone."""

import datetime as dt
import math

import pytest

from flywheel.records import Adapter, AdapterStatus, Manifest
from flywheel.release.aliases import earlier
from flywheel.release.hot_load import BF16, EXACT, Resident, least_needed, probe
from flywheel.release.testing import TableEngine, sure_points
from flywheel.schemas import ReleaseView
from flywheel.training.job import ProbePoint
from runtime.run import TenantId

NOON = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def points() -> list[ProbePoint]:
    return sure_points()


@pytest.fixture
async def engine(points: list[ProbePoint]) -> TableEngine:
    """Serves the points as the adapter `new`."""
    made = TableEngine("base")
    made.serve("new", points)
    return made


async def test_an_honest_engine_passes(engine: TableEngine, points: list[ProbePoint]) -> None:
    report = await probe(engine, "new", points)
    assert report.passed
    assert (report.served, report.draws, report.compared) == ("new", 8, 8)
    assert report.worst == 0
    assert report.moved == pytest.approx(math.log(9))


async def test_an_engine_that_serves_the_base_fails(
    engine: TableEngine, points: list[ProbePoint]
) -> None:
    engine.serves = "base"
    report = await probe(engine, "new", points, tolerance=BF16)
    assert any("differ by" in reason for reason in report.reasons)
    generous = BF16.model_copy(update={"mean": 99, "worst": 99})
    report = await probe(engine, "new", points, tolerance=generous)
    assert report.reasons == [
        "the engine's numbers are nearer to the base model's than to the trainer's"
    ]


async def test_an_engine_that_says_another_name_fails(
    engine: TableEngine, points: list[ProbePoint]
) -> None:
    engine.serves = "another name"
    report = await probe(engine, "new", points)
    assert report.reasons == ["the engine served 'base' where 'new' was asked"]
    assert report.served == "base"


async def test_the_engine_says_what_it_is_held_to(
    engine: TableEngine, points: list[ProbePoint]
) -> None:
    engine.noise = -0.05
    assert not (await probe(engine, "new", points)).passed
    engine.exactly = False
    report = await probe(engine, "new", points)
    assert report.passed
    assert report.mean == pytest.approx(0.05)


async def test_an_adapter_that_changes_nothing_fails(engine: TableEngine) -> None:
    same = [p.model_copy(update={"policy": p.base}) for p in sure_points()]
    engine.serve("new", same)
    report = await probe(engine, "new", same, tolerance=EXACT)
    assert any("cannot be told from noise" in reason for reason in report.reasons)


async def test_draws_outside_of_the_tables_speak_against_it(
    engine: TableEngine, points: list[ProbePoint]
) -> None:
    other = [p.model_copy(update={"policy": {1: 0.0}, "base": {1: -5.0}}) for p in points]
    engine.serve("new", other)
    report = await probe(engine, "new", points)
    assert report.reasons == ["none of 8 draws can be compared with the trainer's tables"]
    half = [points[0], other[1]]
    engine.serve("new", half)
    report = await probe(engine, "new", points)
    assert any("4 of 8 draws fell outside" in reason for reason in report.reasons)


async def test_a_table_of_the_likely_tokens_is_enough(engine: TableEngine) -> None:
    """What the table leaves out may be drawn as often as it is likely."""
    whole = sure_points()[0].model_copy(
        update={
            "policy": {t: math.log(0.25) for t in range(4)},
            "base": dict.fromkeys(range(4), -6),
        }
    )
    part = whole.model_copy(update={"policy": {0: math.log(0.25), 1: math.log(0.25)}})
    engine.serve("new", [whole])
    report = await probe(engine, "new", [part])
    assert 0 < report.compared < report.draws
    assert report.passed


# ---------------------------------------------------------------- room


def resident(name: str, age: int, **changes: object) -> Resident:
    values: dict[str, object] = {
        "tenant_id": "default",
        "stage": "grpo",
        "cycle_id": "c1",
        "loaded": True,
        "aliased": False,
        "in_use": False,
        "created_at": NOON - dt.timedelta(hours=age),
    }
    return Resident(name=name, **{**values, **changes})  # type: ignore[arg-type]


def coming(cycle_id: str = "c1", stage: str = "grpo") -> Adapter:
    manifest = Manifest(
        name="new", digest="sha256:n", base="sha256:b", base_name="b", domain="d",
        domain_digest="sha256:d", stage="grpo", rank=4, created_at=NOON,
    )  # fmt: skip
    return Adapter(
        tenant_id=TenantId("default"), name="new", digest="sha256:n", base="sha256:b", domain="d",
        folder="f", stage=stage, cycle_id=cycle_id, status=AdapterStatus.CANDIDATE,  # type: ignore[arg-type]
        loaded=False, manifest=manifest, created_at=NOON,
    )  # fmt: skip


def test_what_is_needed_never_makes_room() -> None:
    needed = [resident("a", 9, aliased=True), resident("b", 8, in_use=True)]
    assert least_needed(needed, coming()) is None
    elsewhere = [resident("a", 9), resident("a", 9, tenant_id="other", aliased=True)]
    assert least_needed(elsewhere, coming()) is None, "another tenant serves the same weights"


def test_the_undesired_goes_first_then_the_superseded_then_the_oldest() -> None:
    sft, first = resident("sft", 5, stage="sft"), resident("g1", 4)
    assert least_needed([sft, first, resident("x", 1, loaded=False)], coming()) == "x"
    assert least_needed([sft, first], coming()) == "g1"
    second = resident("g2", 3)
    assert least_needed([sft, first, second], coming("c2")) == "g1"
    assert least_needed([sft, first], coming("c2")) == "sft"


# ---------------------------------------------------------------- going back


def history(*changes: tuple[str | None, str | None]) -> list[ReleaseView]:
    """(before, after), the oldest first, as the newest-first list that the store gives."""
    views = [
        ReleaseView(
            id=n, domain="d", alias="production", before=before, after=after, changed_by="me",
            reason="r", at=NOON,
        )
        for n, (before, after) in enumerate(changes)
    ]  # fmt: skip
    return list(reversed(views))


def test_going_back_follows_what_was_released() -> None:
    assert earlier(history((None, "a"))) == []
    assert earlier(history((None, "a"), ("a", "b"), ("b", "c"))) == ["b", "a"]


def test_what_was_rolled_back_is_not_gone_back_to() -> None:
    assert earlier(history((None, "a"), ("a", "b"), ("b", "a"))) == []
    assert earlier(history((None, "a"), ("a", "b"), ("b", "a"), ("a", "c"))) == ["a"]
    assert earlier(history((None, "a"), ("a", None), (None, "c"))) == []


def test_a_history_that_begins_in_the_middle() -> None:
    assert earlier(history(("a", "b"))) == ["a"]
    assert earlier([]) == []
