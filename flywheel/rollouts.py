"""Rollouts: the runs a cycle asks for, and what came of them.

A cycle never executes a run: it admits runs into the runtime's own queue, where any runner takes
them at the priority of their kind, and asks later how they stand; waiting holds nothing. Each
request has an idempotency key (cycle, stage, arm, task, member, try), and the run and its link to
the cycle are committed together, so that asking again after a crash makes no second run. A run that
infrastructure failed is no result: it is requested anew, twice at most.

Scaling out: rollouts spread over all runners of all machines; rows of one cycle are its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flywheel.records import Cycle, Sample, Stage
from flywheel.store import SQL_FOLDER, Connection, Statements, transaction
from flywheel.wheel import Wheel
from runtime.database import Connection as AsyncConnection
from runtime.database import queries
from runtime.errors import Conflict, DomainError
from runtime.run import (
    Json,
    ModelCall,
    Policy,
    Record,
    RunId,
    RunKind,
    RunState,
    Sampling,
    Task,
    TenantId,
    Usage,
    VerdictStatus,
)
from runtime.run_queue import RunQueue
from runtime.run_store import Admission, RunStore, request_hash

MAX_REPLACEMENTS = 2
AT_ONCE = 64
"""Runs admitted in one transaction."""
JUDGED = frozenset({RunState.ACCEPTED, RunState.REJECTED, RunState.TIMED_OUT})
VALID = frozenset({VerdictStatus.PASS.value, VerdictStatus.FAIL.value})


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run as a stage wants it."""

    arm: str
    task: Task
    """Whole: with files and expectation."""
    member: int
    policy: Policy
    seed: int
    """Of sampling."""


class Standing(Record):
    """How far a stage's runs are."""

    total: int
    """Members wanted, each once, however often it was tried."""
    ended: int
    infra: int
    """Ended without a verdict that counts."""


def runs_progress(ended: int, total: int) -> dict[str, Json]:
    """How far a stage's runs are, as its progress says it."""
    return {"step": ended, "steps": total, "what": "runs"}


@dataclass(frozen=True, slots=True)
class _Try:
    """One attempt to get a member's sample."""

    arm: str
    task: Task
    member: int
    policy: Policy
    sampling: Sampling
    kind: RunKind
    number: int = 0
    replaces: RunId | None = None


# ---------------------------------------------------------------- asking


def request(
    wheel: Wheel, cycle: Cycle, stage: Stage, kind: RunKind, wanted: Sequence[Wanted]
) -> None:
    """Queue the runs; those that were requested before are left as they are.

    Sampled at temperature 1, top_p 1, so that logprobs are exact. Raises DomainError where this
    process lacks the cycle's domain.
    """
    tries = [
        _Try(
            arm=each.arm,
            task=each.task,
            member=each.member,
            policy=each.policy,
            sampling=Sampling(temperature=1.0, top_p=1.0, seed=each.seed),
            kind=kind,
        )
        for each in wanted
    ]
    _admit(wheel, cycle, stage, tries)


def _admit(wheel: Wheel, cycle: Cycle, stage: Stage, tries: Sequence[_Try]) -> None:
    if cycle.domain not in wheel.domains:
        raise DomainError(f"domain {cycle.domain!r} is not installed in this worker")
    for start in range(0, len(tries), AT_ONCE):
        wheel.bridge.call(_admit_together(wheel, cycle, stage, tries[start : start + AT_ONCE]))


async def _admit_together(wheel: Wheel, cycle: Cycle, stage: Stage, tries: Sequence[_Try]) -> None:
    digest = wheel.domains[cycle.domain].digest
    async with wheel.database.transaction() as connection:
        store = RunStore(connection)
        for each in tries:
            run_id, _ = await store.admit(_admission(cycle, stage, each, digest))
            await _link(connection, cycle, stage, each, run_id)


def _admission(cycle: Cycle, stage: Stage, wanted: _Try, digest: str) -> Admission:
    place = (wanted.arm, wanted.task.id, wanted.member, wanted.number)
    return Admission(
        tenant_id=cycle.tenant_id,
        kind=wanted.kind,
        domain_digest=digest,
        task=wanted.task,
        policy=wanted.policy,
        sampling=wanted.sampling,
        idempotency_key="/".join(map(str, ("wheel", cycle.id, stage.seq, *place))),
        request_hash=request_hash(
            {"policy": wanted.policy.id, "seed": wanted.sampling.seed, "kind": wanted.kind.value}
        ),
    )


async def _link(
    connection: AsyncConnection, cycle: Cycle, stage: Stage, wanted: _Try, run_id: RunId
) -> None:
    await connection.execute(
        queries(SQL_FOLDER / "samples.sql")["link"].encode(),
        {
            **_keys(cycle, stage),
            "arm": wanted.arm,
            "task_id": wanted.task.id,
            "member": wanted.member,
            "replaces": wanted.replaces,
            "run_id": run_id,
        },
    )


# ---------------------------------------------------------------- what came of it


class SampleStore(Statements):
    """Which run stands for which member, over one open transaction."""

    FILE = "samples.sql"

    def last_tries(self, cycle: Cycle, stage: Stage) -> list[dict[str, Any]]:
        """The last try of every member: arm, task_id, member, run_id, policy_id, state, verdict
        (its status), reward, usage; in order of arm, task and member."""
        return self._all("last_tries", **_keys(cycle, stage))

    def tries(self, cycle: Cycle, stage: Stage) -> dict[tuple[str, str, int], int]:
        """(arm, task id, member) → how often it was requested."""
        rows = self._all("tries", **_keys(cycle, stage))
        return {_member(row): row["tries"] for row in rows}

    def again(self, tenant_id: TenantId, row: Mapping[str, Any], number: int) -> _Try:
        """The same run once more, as it was requested."""
        keys = {"tenant_id": tenant_id, "run_id": row["run_id"]}
        run = self._one("run_as_requested", **keys)
        assert run is not None, "last_tries joined the run"
        files = {each["path"]: bytes(each["content"]) for each in self._all("run_files", **keys)}
        private = {"files": files, "expectation": run["expectation"]}
        return _Try(
            arm=row["arm"],
            task=Task.model_validate(run["task"]).model_copy(update=private),
            member=row["member"],
            policy=Policy.model_validate(run["policy"]),
            sampling=Sampling.model_validate(run["sampling"]),
            kind=RunKind(run["kind"]),
            number=number,
            replaces=row["run_id"],
        )

    def open_runs(self, cycle: Cycle) -> list[RunId]:
        rows = self._all("open_runs", tenant_id=cycle.tenant_id, cycle_id=cycle.id)
        return [RunId(row["run_id"]) for row in rows]

    def model_calls(
        self, tenant_id: TenantId, run_ids: Sequence[RunId]
    ) -> dict[RunId, list[ModelCall]]:
        found: dict[RunId, list[ModelCall]] = {run_id: [] for run_id in run_ids}
        for row in self._all("model_calls", tenant_id=tenant_id, run_ids=list(run_ids)):
            found[row.pop("run_id")].append(ModelCall.model_validate(row))
        return found


def _keys(cycle: Cycle, stage: Stage) -> dict[str, Any]:
    return {"tenant_id": cycle.tenant_id, "cycle_id": cycle.id, "stage_seq": stage.seq}


def _member(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["arm"], row["task_id"], row["member"]


def _ended(row: Mapping[str, Any]) -> bool:
    return RunState(row["state"]).terminal


def _valid(row: Mapping[str, Any]) -> bool:
    """Whether the run was judged: an infrastructure error is neither a pass nor a fail."""
    return RunState(row["state"]) in JUDGED and row["verdict"] in VALID


def standing(connection: Connection, cycle: Cycle, stage: Stage) -> Standing:
    rows = SampleStore(connection).last_tries(cycle, stage)
    ended = [row for row in rows if _ended(row)]
    infra = sum(not _valid(row) for row in ended)
    return Standing(total=len(rows), ended=len(ended), infra=infra)


def replace_failed(wheel: Wheel, cycle: Cycle, stage: Stage) -> int:
    """Request anew the runs that ended without being judged; how many were.

    The replacement has the same task, policy and seed; its domain is the one of now.
    """
    with transaction(wheel.url) as connection:
        store = SampleStore(connection)
        failed = [row for row in store.last_tries(cycle, stage) if _ended(row) and not _valid(row)]
        tries = store.tries(cycle, stage) if failed else {}
        again = [
            store.again(cycle.tenant_id, row, number)
            for row in failed
            if (number := tries[_member(row)]) <= MAX_REPLACEMENTS
        ]
    _admit(wheel, cycle, stage, again)
    return len(again)


def samples(connection: Connection, cycle: Cycle, stage: Stage) -> dict[str, list[Sample]]:
    """Arm → a sample per member, by task and member. A member whose every try was taken by
    infrastructure has an invalid sample, as has one whose run has not ended."""
    found: dict[str, list[Sample]] = {}
    for row in SampleStore(connection).last_tries(cycle, stage):
        found.setdefault(row["arm"], []).append(_sample(row))
    return found


def _sample(row: Mapping[str, Any]) -> Sample:
    valid, usage = _valid(row), Usage.model_validate(row["usage"])
    return Sample(
        task_id=row["task_id"],
        member=row["member"],
        run_id=row["run_id"],
        policy_id=row["policy_id"],
        state=RunState(row["state"]),
        passed=valid and row["state"] == RunState.ACCEPTED,
        valid=valid,
        reward=row["reward"] if valid else None,
        prompt_tokens=usage.prompt_tokens,
        sampled_tokens=usage.sampled_tokens,
        tool_calls=usage.tool_calls,
        seconds=usage.seconds,
        cost=usage.cost,
    )


def model_calls(
    connection: Connection, tenant_id: TenantId, run_ids: Sequence[RunId]
) -> dict[RunId, list[ModelCall]]:
    """Token-exact turns by run, in order; a run without any has an empty list."""
    return SampleStore(connection).model_calls(tenant_id, run_ids)


# ---------------------------------------------------------------- calling it off


def cancel_open(wheel: Wheel, cycle: Cycle) -> int:
    """Cancel every run of the cycle that has not ended; how many were asked to stop."""
    with transaction(wheel.url) as connection:
        open_runs = SampleStore(connection).open_runs(cycle)
    return wheel.bridge.call(_cancel(wheel, cycle.tenant_id, open_runs)) if open_runs else 0


async def _cancel(wheel: Wheel, tenant_id: TenantId, run_ids: Sequence[RunId]) -> int:
    cancelled = 0
    for run_id in run_ids:
        try:
            async with wheel.database.transaction() as connection:
                await RunQueue(connection).cancel(tenant_id, run_id)
            cancelled += 1
        except Conflict:  # it ended meanwhile
            continue
    return cancelled
