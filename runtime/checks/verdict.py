"""From artefacts and checks to one verdict.

`run_checks` is pure: equal declarations, artefacts and expectation give a byte-identical verdict
(`Verdict.canonical`, which leaves timings out) in production, rollout and evaluation. A check that
cannot judge makes the verdict `infra_error` (or `invalid_task` where the expectation is at fault):
never a pass, never a zero, never training data.

Grading holds no state, so it scales with the processes that do it.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from runtime.checks.document import ExpectationGap, document_of, shown
from runtime.checks.protocol import Artefacts, CheckDeclaration, CheckOutcome
from runtime.checks.registry import bind, condition_of
from runtime.domain import Domain
from runtime.run import CheckResult, CheckStatus, Json, Verdict, VerdictStatus

RewardMode = Literal["strict", "graded"]
_GAP = "expectation_gap"
_NOT_JUDGING = {"certification.py", "baselines.py"}
"""Files of this package that no verdict depends on."""


def run_checks(
    declarations: Sequence[CheckDeclaration],
    artefacts: Artefacts,
    expectation: Mapping[str, Json] | None,
    *,
    reward: RewardMode,
    verifier_digest: str,
) -> Verdict:
    """Judge the artefacts by every declared check."""
    results = [_judge(each, artefacts, expectation) for each in declarations]
    status = _status(results)
    judged_by_gold = any(
        d.needs == "expectation" and r.status is not CheckStatus.NOT_APPLICABLE
        for d, r in zip(declarations, results, strict=True)
    )
    return Verdict(
        status=status,
        basis="rules+expectation" if judged_by_gold else "rules",
        reward=reward_of(results, status, reward),
        checks=results,
        verifier_digest=verifier_digest,
        evidence_hash=evidence_hash(artefacts, expectation if judged_by_gold else None),
    )


def _judge(
    declaration: CheckDeclaration, artefacts: Artefacts, expectation: Mapping[str, Json] | None
) -> CheckResult:
    started = time.perf_counter()
    if declaration.needs == "expectation" and expectation is None:
        return _result(declaration, CheckStatus.NOT_APPLICABLE, "Nothing to compare with yet.")
    try:
        condition = condition_of(declaration)
        if condition and not condition.holds(document_of(artefacts, expectation)):
            return _result(declaration, CheckStatus.NOT_APPLICABLE, "The rule does not apply here.")
        outcome = bind(declaration).judge(artefacts, expectation)
        return _judged(declaration, outcome, time.perf_counter() - started)
    except ExpectationGap as gap:
        evidence: dict[str, Json] = {"code": _GAP}
        return _result(declaration, CheckStatus.ERROR, str(gap), evidence)
    except Exception as error:  # the boundary: whatever a check raises, the grader failed
        reason = f"The check could not judge: {type(error).__name__}: {error}"
        return _result(declaration, CheckStatus.ERROR, reason)


def _judged(declaration: CheckDeclaration, outcome: CheckOutcome, seconds: float) -> CheckResult:
    score = 1.0 if outcome.passed else outcome.score
    if not (math.isfinite(score) and 0 <= score <= 1):
        raise ValueError(f"score {score} is outside [0, 1]")
    status = CheckStatus.PASSED if outcome.passed else CheckStatus.FAILED
    result = _result(declaration, status, outcome.reason, dict(outcome.evidence))
    return result.model_copy(update={"score": score, "seconds": seconds})


def _result(
    declaration: CheckDeclaration,
    status: CheckStatus,
    reason: str,
    evidence: dict[str, Json] | None = None,
) -> CheckResult:
    return CheckResult(
        name=declaration.name,
        kind=declaration.kind,
        status=status,
        score=0.0,
        weight=declaration.weight,
        required=declaration.required,
        public=declaration.public,
        reason=str(shown(reason)),
        evidence={name: shown(value) for name, value in (evidence or {}).items()},
    )


def _applicable(results: Sequence[CheckResult]) -> list[CheckResult]:
    return [r for r in results if r.status is not CheckStatus.NOT_APPLICABLE]


def _status(results: Sequence[CheckResult]) -> VerdictStatus:
    errors = [r for r in results if r.status is CheckStatus.ERROR]
    if errors:
        gaps_only = all(r.evidence.get("code") == _GAP for r in errors)
        return VerdictStatus.INVALID_TASK if gaps_only else VerdictStatus.INFRA_ERROR
    required = [r for r in _applicable(results) if r.required]
    passed = bool(required) and all(r.status is CheckStatus.PASSED for r in required)
    return VerdictStatus.PASS if passed else VerdictStatus.FAIL


def reward_of(
    results: Sequence[CheckResult], status: VerdictStatus, mode: RewardMode
) -> float | None:
    """What training sees, in [0, 1]; None where the run could not be judged.

    Both modes are the weighted mean score of the applicable checks; `strict` is 0 unless the run
    passed, so that only optional checks can lower it below 1.
    """
    if status in (VerdictStatus.INFRA_ERROR, VerdictStatus.INVALID_TASK):
        return None
    if mode == "strict" and status is not VerdictStatus.PASS:
        return 0.0
    applicable = _applicable(results)
    total = math.fsum(r.weight for r in applicable)
    if total == 0:
        return float(status is VerdictStatus.PASS)
    mean = math.fsum(r.weight * r.score for r in applicable) / total
    return min(1.0, max(0.0, mean))


# ---------------------------------------------------------------- digests


def _digest(value: Json) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def evidence_hash(artefacts: Artefacts, expectation: Mapping[str, Json] | None) -> str:
    """sha256 over what was judged: the time that calls took is no evidence, and neither is an
    expectation that no check looked at."""
    calls = [
        (call.model_dump(), result and result.model_dump(exclude={"seconds"}))
        for call, result in artefacts.calls
    ]
    return _digest(
        {
            "input": dict(artefacts.input),
            "answer": None if artefacts.answer is None else dict(artefacts.answer),
            "calls": calls,
            "files": _hashes(artefacts.files),
            "initial_files": _hashes(artefacts.initial_files),
            "states": dict(artefacts.states),
            "initial_states": dict(artefacts.initial_states),
            "expectation": None if expectation is None else dict(expectation),
        }
    )


def verifier_digest(domain: Domain) -> str:
    """sha256 over the domain's declarations and the code that judges them."""
    declared = [each.model_dump(mode="json") for each in domain.checks]
    return _digest({"checks": declared, "reward": domain.reward, "code": _code_digest()})


@lru_cache(maxsize=1)
def _code_digest() -> str:
    folder = Path(__file__).parent
    sources = {p.name: p.read_bytes() for p in folder.glob("*.py") if p.name not in _NOT_JUDGING}
    return _digest(_hashes(sources))
