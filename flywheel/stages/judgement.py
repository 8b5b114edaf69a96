"""The last quarter: incumbent against candidate on held-out tasks, the gate, the release."""

from typing import Any

from flywheel.evaluation.gate import decide
from flywheel.evaluation.suites import gate_tasks
from flywheel.lessons.pool import PoolStore
from flywheel.records import Decision, Outcome, Sample, StageName
from flywheel.release.adapters import AdapterStore, policy_of
from flywheel.release.aliases import promote
from flywheel.rollouts import request, runs_progress, samples
from flywheel.stages.practice import runs_over, wanted
from flywheel.stages.turn import Answer, Done, Turn, Waiting
from runtime.run import Policy, RunKind, Task

INCUMBENT = "incumbent"
CANDIDATE = "candidate"


def evaluate(turn: Turn) -> Answer:
    """Both policies on the gate's tasks: same tasks, same seeds, several samples each."""
    if turn.first_time:
        tasks = _gate_tasks(turn)
        members = range(turn.recipe.gate.samples)
        arms = {INCUMBENT: turn.incumbent, CANDIDATE: _candidate(turn)}
        runs = [
            run
            for task in tasks
            for arm, policy in arms.items()
            for run in wanted(task, policy, members, arm, turn.cycle.options.seed)
        ]
        if runs:
            request(turn.wheel, turn.cycle, turn.stage, RunKind.EVALUATION, runs)
            return Waiting(progress=runs_progress(0, len(runs)))
    if (waiting := runs_over(turn)) is not None:
        return waiting
    arms_found = _samples(turn, turn.stage.seq)
    return Done(metrics={arm: _metrics(found) for arm, found in arms_found.items()})


def _gate_tasks(turn: Turn) -> list[Task]:
    with turn.transaction() as connection:
        pool = PoolStore(connection)
        held_out = pool.admitted(turn.tenant_id, turn.cycle.domain, "gate")
        practised = pool.admitted(turn.tenant_id, turn.cycle.domain, "practice")
    return gate_tasks(
        turn.domain, turn.recipe, turn.cycle.options, held_out=held_out, practised=practised
    )


def _candidate(turn: Turn) -> Policy:
    with turn.transaction() as connection:
        return policy_of(AdapterStore(connection).get(turn.tenant_id, str(turn.candidate)))


def _samples(turn: Turn, seq: int) -> dict[str, list[Sample]]:
    stage = next(stage for stage in turn.stages if stage.seq == seq)
    with turn.transaction() as connection:
        found = samples(connection, turn.cycle, stage)
    return {arm: found.get(arm, []) for arm in (INCUMBENT, CANDIDATE)}


def _metrics(found: list[Sample]) -> dict[str, Any]:
    return {
        "runs": len(found),
        "passed": sum(sample.passed for sample in found),
        "sampled_tokens": sum(sample.sampled_tokens for sample in found),
    }


def judge(turn: Turn) -> Answer:
    """The gate: a pure function of the samples."""
    evaluated = turn.last(StageName.EVALUATE)
    assert evaluated is not None
    arms = _samples(turn, evaluated.seq)
    decision = decide(
        arms[INCUMBENT],
        arms[CANDIDATE],
        turn.recipe.gate,
        incumbent_digest=turn.incumbent.adapter,
        candidate_digest=_candidate(turn).adapter,
    )
    with turn.transaction() as connection:
        AdapterStore(connection).set_decision(turn.tenant_id, str(turn.candidate), decision)
    return Done(
        outputs={"decision": decision.model_dump(mode="json")},
        metrics={"outcome": decision.outcome},
        reason=decision.reasons[0],
    )


def release(turn: Turn) -> Answer:
    """Promote what the gate lets through; leave everything as it is otherwise."""
    gate = turn.last(StageName.GATE)
    assert gate is not None
    decision = Decision.model_validate(gate.outputs["decision"])
    name = str(turn.candidate)
    if decision.outcome is Outcome.PROMOTE:
        by, reason = f"cycle {turn.cycle.id}", decision.reasons[0]
        released = promote(turn.wheel, turn.tenant_id, name, by=by, reason=reason)
        return Done(outputs={"adapter": name, "release": released.model_dump(mode="json")})
    return Done(outputs={"adapter": None}, reason="nothing was released")
