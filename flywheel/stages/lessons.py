"""The first quarter: which runs failed, and what can be learnt from them."""

from typing import Any

from flywheel.lessons.compiler import compile_lessons
from flywheel.lessons.mining import Mined, mine
from flywheel.records import AdapterStatus, StageName
from flywheel.release.adapters import AdapterStore, policy_of
from flywheel.release.aliases import PRODUCTION, ReleaseStore
from flywheel.release.hot_load import unload
from flywheel.stages.turn import Answer, Done, Turn
from flywheel.store import Connection
from runtime.run import Policy


def mine_runs(turn: Turn) -> Answer:
    """Find what failed since the last cycle, and let go of its unreleased candidates."""
    _unload_old_candidates(turn)
    with turn.transaction() as connection:
        mined = mine(connection, turn.cycle)
        incumbent = _serving(turn, connection)
    return Done(
        outputs={"mined": mined.model_dump(mode="json"), "incumbent": incumbent.model_dump()},
        metrics={"candidates": len(mined.candidates), **mined.counts},
    )


def _serving(turn: Turn, connection: Connection) -> Policy:
    """What production resolves to now."""
    name = ReleaseStore(connection).current(turn.tenant_id, turn.cycle.domain, PRODUCTION)
    if name is None or name == turn.wheel.base.id:
        return turn.wheel.base
    return policy_of(AdapterStore(connection).get(turn.tenant_id, name))


def _unload_old_candidates(turn: Turn) -> None:
    with turn.transaction() as connection:
        loaded = [a for a in AdapterStore(connection).desired() if a.domain == turn.cycle.domain]
    for adapter in loaded:
        if adapter.tenant_id == turn.tenant_id and adapter.status is not AdapterStatus.SERVING:
            unload(turn.wheel, adapter)


def compile_tasks(turn: Turn) -> Answer:
    """Make pool tasks of the candidates and validate them without a model."""
    mined = turn.last(StageName.MINE)
    assert mined is not None

    def show(done: int, total: int) -> None:
        turn.show({"step": done, "steps": total, "what": "tasks validated"})

    counts: dict[str, Any] = dict(
        compile_lessons(turn.wheel, turn.cycle, Mined.model_validate(mined.outputs["mined"]), show)
    )
    return Done(metrics=counts)
