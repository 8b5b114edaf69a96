"""The proof of a task: what must hold before anything is learnt from it or judged by it.

No model takes part. An agent that does nothing must fail; the domain's demonstration of the
expectation must pass, both through the real loop, tools and sandbox; three gradings of it must
agree byte for byte. A task that fails is refused with its reason; a host that fails says nothing
about the task. A proof holds no state, so any number of them may go on at once, anywhere.
"""

from flywheel.records import PoolTask
from flywheel.wheel import Wheel
from runtime.checks.certification import GRADINGS
from runtime.checks.protocol import Artefacts
from runtime.checks.verdict import run_checks, verifier_digest
from runtime.demonstration import play_recorded
from runtime.domain import Domain, validate_answer, validate_input
from runtime.errors import Boundary, InputError, NoriaError
from runtime.journal import MemoryRecorder
from runtime.run import ModelCall, Record, Started, Task, ToolCall, Verdict, VerdictStatus
from runtime.run_executor import Executed, Workplace

HOST_FAULTS = frozenset({Boundary.SANDBOX, Boundary.ENGINE, Boundary.STORE})
"""Failures that say nothing about the task."""


class Validation(Record):
    """What became of one task."""

    admitted: bool
    reason: str | None = None
    """Why not; one sentence."""
    snapshot: str | None = None
    """The workspace it starts from."""
    demonstration: list[ModelCall] | None = None
    host_failed: bool = False
    """The task was not judged, because this host failed: try it again."""


class TaskRefused(NoriaError):
    """The task is no use for training or judging; the message says why."""

    boundary = Boundary.DOMAIN
    code = "task_refused"


class HostFailed(NoriaError):
    """This host could not play a task."""

    boundary = Boundary.SANDBOX
    code = "host_failed"
    retriable = True


def validate(task: PoolTask, domain: Domain, wheel: Wheel) -> Validation:
    """Prove one task. Never raises for what is wrong with it."""
    return wheel.bridge.call(examine(task, domain, wheel.workplace))


async def examine(task: PoolTask, domain: Domain, workplace: Workplace) -> Validation:
    """Play the task without a model, twice, and judge what came of it."""
    try:
        turns = _demonstration(task, domain)
        await _nothing_fails(task.task, domain, workplace)
        return await _demonstration_passes(task.task, domain, turns, workplace)
    except TaskRefused as refused:
        return Validation(admitted=False, reason=str(refused))
    except HostFailed as failed:
        return Validation(admitted=False, reason=str(failed), host_failed=True)
    except Exception as error:  # the boundary: a domain's or connector's code may raise anything
        return Validation(admitted=False, reason=f"playing it raised {_named(error)}")


def _demonstration(task: PoolTask, domain: Domain) -> list[list[ToolCall]]:
    """The turns that reach the expectation. Raises TaskRefused."""
    if task.domain_digest != domain.digest:
        raise TaskRefused(
            f"it was compiled for {domain.name} at {task.domain_digest}, which is now at "
            f"{domain.digest}; compile it again"
        )
    if domain.source is None:
        raise TaskRefused(f"{domain.name} has no tasks.py, so nothing demonstrates the expectation")
    if task.task.expectation is None:
        raise TaskRefused("nobody said what the right answer is")
    try:
        validate_input(domain, task.task.input)
        validate_answer(domain, task.task.expectation)
    except InputError as error:
        raise TaskRefused(str(error)) from error
    try:
        return domain.source.demonstrate(task.task, task.task.expectation)
    except Exception as error:  # the boundary: a domain's own code may raise anything
        raise TaskRefused(f"demonstrating the expectation raised {_named(error)}") from error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def _nothing_fails(task: Task, domain: Domain, workplace: Workplace) -> None:
    """The initial state must not be right already. Raises TaskRefused."""
    executed, _ = await play_recorded(domain, task, [], workplace)
    _, verdict = _judged(executed, "doing nothing")
    if verdict.status is not VerdictStatus.FAIL:
        raise TaskRefused(_unexpected("doing nothing", VerdictStatus.FAIL, verdict))


async def _demonstration_passes(
    task: Task, domain: Domain, turns: list[list[ToolCall]], workplace: Workplace
) -> Validation:
    """Raises TaskRefused."""
    executed, recorder = await play_recorded(domain, task, turns, workplace)
    artefacts, verdict = _judged(executed, "the demonstration")
    if verdict.status is not VerdictStatus.PASS:
        raise TaskRefused(_unexpected("the demonstration", VerdictStatus.PASS, verdict))
    if not _gradings_agree(domain, task, artefacts, verdict):
        raise TaskRefused(f"{GRADINGS} gradings of the demonstration do not agree")
    return Validation(
        admitted=True, snapshot=_opened_on(recorder), demonstration=recorder.model_calls
    )


def _judged(executed: Executed, what: str) -> tuple[Artefacts, Verdict]:
    """What it came to. Raises TaskRefused where the task cannot be run, HostFailed."""
    if executed.artefacts is not None and executed.verdict is not None:
        return executed.artefacts, executed.verdict
    failure = executed.outcome.failure
    said = f"{what} ended without a verdict: {executed.outcome.reason}"
    if failure is not None and failure.boundary in HOST_FAULTS:
        raise HostFailed(said)
    raise TaskRefused(said)


def _unexpected(what: str, wanted: VerdictStatus, verdict: Verdict) -> str:
    culprits = [
        f"{check.name} ({check.reason})"
        for check in verdict.checks
        if check.status == "error" or (check.required and check.status == "failed")
    ]
    told = f"; {', '.join(culprits)}" if culprits else ""
    return f"{what} should {wanted.value}, but the verdict is {verdict.status.value}{told}"


def _gradings_agree(domain: Domain, task: Task, artefacts: Artefacts, verdict: Verdict) -> bool:
    """The grading that counted and further ones, `GRADINGS` in all."""
    digest = verifier_digest(domain)
    again = (
        run_checks(
            domain.checks,
            artefacts,
            task.expectation,
            reward=domain.reward,
            verifier_digest=digest,
        )
        for _ in range(GRADINGS - 1)
    )
    return {each.canonical() for each in again} == {verdict.canonical()}


def _opened_on(recorder: MemoryRecorder) -> str | None:
    return next((body.snapshot for body in recorder.bodies if isinstance(body, Started)), None)
