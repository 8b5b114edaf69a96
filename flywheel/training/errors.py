"""What can go wrong while a policy is trained: each failure with what a person needs to mend it."""

from typing import ClassVar

from runtime.errors import Boundary, NoriaError, StoreError


class TrajectoryBroken(StoreError):
    """A recorded run does not rebuild to the prompts it says it had: nothing of it may train."""

    code = "trajectory_broken"
    retriable = False


class TrainingError(NoriaError):
    boundary = Boundary.TRAINING
    code = "training_error"


class TrainingFailed(TrainingError):
    """The trainer ended without an adapter. `reason` says why, `log_tail` ends its log."""

    code = "training_failed"
    status: ClassVar[int] = 3
    """With which the trainer's process ends where this happened in it."""

    def __init__(self, reason: str, log_tail: str = "") -> None:
        log = f"; the end of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"training failed: {reason}{log}", reason=reason, log_tail=log_tail)
        self.reason = reason
        self.log_tail = log_tail


class TrainingStopped(TrainingError):
    """Training was asked to stop, and did."""

    code = "training_stopped"
    retriable = True


class BreakerTripped(TrainingFailed):
    """The reward stopped meaning what it should, or the policy ran away: no adapter is kept."""

    code = "breaker_tripped"
    status: ClassVar[int] = 4
