"""The first quarter: which runs failed, and what can be learnt from them."""

from typing import Any

from flywheel.lessons.compiler import compile_lessons
from flywheel.lessons.mining import Mined, mine
from flywheel.records import AdapterStatus, StageName
from flywheel.release.adapters import AdapterStore
from flywheel.release.aliases import serving
from flywheel.release.hot_load import unload
from flywheel.stages.turn import Answer, Done, Turn


def mine_runs(turn: Turn) -> Answer:
    """Find what failed since the last cycle, and let go of its unreleased candidates."""
    _unload_old_candidates(turn)
    with turn.transaction() as connection:
        mined = mine(connection, turn.cycle)
        incumbent = serving(connection, turn.tenant_id, turn.cycle.domain) or turn.wheel.base
    return Done(
        outputs={"mined": mined.model_dump(mode="json"), "incumbent": incumbent.model_dump()},
        metrics={"candidates": len(mined.candidates), **mined.counts},
    )


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
