"""Records as their tenant may see them: without gold, in any form.

A check that compared with an expectation may spell it out in its reason or evidence, and the
reason of a rejected run is made of those. The evidence hash covers the expectation: whoever knows
the possible answers finds the right one by hashing each. Where a run had an expectation, the hash
is withheld, and of words only those of public checks (what the agent itself may be told) are shown.
Which checks passed, and how far, stays visible, as the reward is: it says how right an answer is,
never what would be right. A verdict by rules alone never looked at the expectation, nor does its
hash cover it.
"""

from runtime.api.schemas import EventView, RunView, TaskView
from runtime.run import (
    CheckResult,
    Event,
    Finished,
    Graded,
    Run,
    RunState,
    Verdict,
)

WITHHELD = "withheld: this check may compare with a private expectation"
WITHHELD_REASON = "a required check failed; its words are withheld with the private expectation"


def run_view(run: Run) -> RunView:
    verdict = run.verdict
    golden = verdict is not None and verdict.basis == "rules+expectation"
    return RunView.model_validate(
        {
            **{name: getattr(run, name) for name in _PLAIN},
            "task": TaskView.model_validate(
                run.task.model_dump(include=set(TaskView.model_fields))
            ),
            "verdict": _without_gold(verdict) if verdict is not None and golden else verdict,
            "reason": _reason(run.state, run.reason, golden),
        }
    )


_PLAIN = sorted(set(RunView.model_fields) - {"task", "verdict", "reason"})


def event_view(event: Event, *, has_gold: bool) -> EventView:
    """`has_gold`: whether the run has an expectation."""
    body = event.body
    if has_gold:
        match body:
            case Graded():
                body = Graded(verdict=_without_gold(body.verdict))
            case Finished():
                reason = _reason(body.state, body.reason, golden=True)
                body = body.model_copy(update={"reason": reason})
            case _:
                pass
    return EventView(run_id=event.run_id, seq=event.seq, at=event.at, body=body)


def _reason(state: RunState, reason: str | None, golden: bool) -> str | None:
    return WITHHELD_REASON if golden and reason and state is RunState.REJECTED else reason


def _without_gold(verdict: Verdict) -> Verdict:
    checks = [check if check.public else _withheld(check) for check in verdict.checks]
    return verdict.model_copy(update={"checks": checks, "evidence_hash": None})


def _withheld(check: CheckResult) -> CheckResult:
    return check.model_copy(update={"reason": WITHHELD, "evidence": {}})
