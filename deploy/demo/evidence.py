"""From what a demo saw to its result: the parts of `DemoResult` that are not statistics.

Runs become samples; the cycle's stages tell what training did; what the cycle's own runs cost is
read back from the API. Everything but that reading is a pure function of views.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo.journal import Notes
from deploy.demo.result import (
    Baselines,
    DemoGate,
    DemoResult,
    Fixed,
    GrpoStep,
    Machine,
    Practice,
    StageKey,
    measure,
)
from deploy.demo.runs import Ran
from deploy.demo.tasks import DemoTasks, is_right
from flywheel.client import WheelClient
from flywheel.evaluation.baselines import baselines
from flywheel.lessons.compiler import decisive_fields
from flywheel.records import Outcome, Sample, StageName
from flywheel.schemas import CycleView, StageView
from runtime.api.schemas import RunView
from runtime.domain import Domain
from runtime.run import RunKind, Task

if TYPE_CHECKING:
    from deploy.demo.demo import DemoPlan

PROMPTS_READ = 48
"""Runs whose prompts are measured: those that were given most."""
PACKAGES = ("torch", "transformers", "trl", "peft")
LONGEST_SAID = 300
"""Characters of a message in the report."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything a demo did, as the API answered."""

    practice: Sequence[Ran]
    corrected: Sequence[Ran]
    report: Mapping[StageKey, Sequence[Ran]]
    again: Sequence[Ran]
    """Practice failures submitted once more; empty where nothing was released."""
    cycle: CycleView

    def runs(self) -> list[RunView]:
        return [ran.run for ran in chain(self.practice, *self.report.values(), self.again)]


def result_of(
    client: WheelClient,
    plan: "DemoPlan",
    domain: Domain,
    tasks: DemoTasks,
    notes: Notes,
    seen: Seen,
) -> DemoResult:
    samples: dict[StageKey, list[Sample]] = {
        stage: [sample_of(each) for each in ran] for stage, ran in seen.report.items()
    }
    found = measure(samples, members=plan.members, seed=plan.seed)
    simple = baselines(
        domain, tasks.report, [each.wish.task for each in seen.corrected], seed=plan.seed
    )
    steps = grpo_steps(seen.cycle.stages)
    runs = [*seen.runs(), *cycle_runs(client, seen)]
    fields = decisive_fields(domain)
    return DemoResult(
        seed=plan.seed,
        level=plan.level,
        model=plan.base,
        profile=plan.profile,
        messages="real" if plan.real else "generated",
        splits={
            "practice": len(seen.practice),
            "gate": gate_tasks(seen.cycle),
            "report": len(tasks.report),
        },
        stages=found.stages,
        difference=found.difference,
        grpo_difference=found.grpo_difference,
        baselines=Baselines(
            no_lookup=simple.no_lookup, keyword=simple.keyword, best_of_4=found.best_of_4
        ),
        groups_with_signal=signal_share(seen.cycle.stages),
        training=steps,
        fixed=fixed(seen, fields),
        retried=len(seen.again),
        gate=gate_of(seen.cycle),
        adapter=seen.cycle.adapters.get("grpo") or seen.cycle.adapters.get("sft"),
        practice=Practice(
            submitted=len(seen.practice),
            accepted=sum(is_right(r.wish.task, r.run.answer, fields) for r in seen.practice),
            corrections=len(seen.corrected),
        ),
        sampled_tokens=sum(run.usage.sampled_tokens for run in runs),
        longest_prompt=longest_prompt(client, runs),
        seconds=seconds(notes, seen.cycle.stages),
        cost_per_accepted=found.cost_per_accepted,
        spent=found.spent,
        machine=machine(notes.load),
        outcomes=found.outcomes,
    )


def sample_of(ran: Ran) -> Sample:
    run = ran.run
    return Sample(
        task_id=ran.wish.task.id,
        member=ran.wish.member,
        run_id=run.id,
        policy_id=run.policy.id,
        state=run.state,
        passed=ran.passed,
        valid=ran.valid,
        reward=run.verdict.reward if run.verdict else None,
        prompt_tokens=run.usage.prompt_tokens,
        sampled_tokens=run.usage.sampled_tokens,
        tool_calls=run.usage.tool_calls,
        seconds=run.usage.seconds,
        cost=run.usage.cost,
    )


# ---------------------------------------------------------------- the cycle


def cycle_runs(client: WheelClient, seen: Seen) -> Iterator[RunView]:
    """Runs that the cycle asked for: practice and evaluation within its time that are not ours."""
    ours = {run.id for run in seen.runs()}
    cycle = seen.cycle
    for kind in (RunKind.ROLLOUT, RunKind.EVALUATION):
        for run in client.runs(domain=cycle.domain, kind=kind, page_size=200):
            if run.created_at < cycle.created_at:
                break
            after = cycle.finished_at is not None and run.created_at > cycle.finished_at
            if run.id not in ours and not after:
                yield run


def gate_tasks(cycle: CycleView) -> int:
    return cycle.decision.candidate.tasks if cycle.decision else 0


def gate_of(cycle: CycleView) -> DemoGate:
    if cycle.decision is not None:
        return DemoGate(outcome=cycle.decision.outcome, reasons=cycle.decision.reasons)
    reasons = [cycle.reason] if cycle.reason else []
    if cycle.outcome == "nothing_to_learn":
        return DemoGate(outcome="nothing_to_learn", reasons=reasons)
    return DemoGate(outcome=Outcome.INSUFFICIENT_EVIDENCE, reasons=reasons)


def grpo_steps(stages: Sequence[StageView]) -> list[GrpoStep]:
    """Every optimiser step of every round, with the groups its round was sampled in."""
    rollouts = {stage.round: stage.metrics for stage in stages if stage.name is StageName.ROLLOUTS}
    steps: list[GrpoStep] = []
    for stage in stages:
        curve = stage.metrics.get("curve", []) if stage.name is StageName.GRPO else []
        sampled = rollouts.get(stage.round, {})
        for trained in curve:
            steps.append(_grpo_step(len(steps) + 1, trained, sampled, len(curve)))
    return steps


def _grpo_step(
    number: int, trained: Mapping[str, Any], sampled: Mapping[str, Any], steps: int
) -> GrpoStep:
    return GrpoStep(
        step=number,
        reward=sampled.get("reward") or 0.0,
        groups=sampled.get("groups", 0) // steps,
        groups_with_signal=sampled.get("groups_with_signal", 0) // steps,
        ratio=trained.get("ratio_mean"),
        kl=trained.get("kl"),
        update_kl=trained.get("update_kl"),
        update_ratio=trained.get("update_ratio_max"),
    )


def signal_share(stages: Sequence[StageView]) -> float | None:
    """Share of all sampled groups whose members did not all earn the same; None without groups."""
    sampled = [stage.metrics for stage in stages if stage.name is StageName.ROLLOUTS]
    groups = sum(metrics.get("groups", 0) for metrics in sampled)
    speaking = sum(metrics.get("groups_with_signal", 0) for metrics in sampled)
    return speaking / groups if groups else None


# ---------------------------------------------------------------- what is fixed


def fixed(seen: Seen, fields: Sequence[str]) -> list[Fixed]:
    """Failures of before that the new policy answers as the support team would."""
    before = {ran.wish.task.id: ran for ran in seen.corrected}
    return [
        Fixed(
            message=_message(ran.wish.task),
            before=_said(before[ran.wish.task.id].run),
            after=_said(ran.run),
            run_before=before[ran.wish.task.id].run.id,
            run_after=ran.run.id,
        )
        for ran in seen.again
        if ran.passed and is_right(ran.wish.task, ran.run.answer, fields)
    ]


def _message(task: Task) -> str:
    """What the customer wrote, with the letter where there is one."""
    texts = [value for value in task.input.values() if isinstance(value, str)]
    letters = [content.decode(errors="replace") for _, content in sorted(task.files.items())]
    said = " ".join(" — ".join([max(texts, key=len, default=""), *letters]).split())
    return said if len(said) <= LONGEST_SAID else f"{said[: LONGEST_SAID - 1]}…"


def _said(run: RunView) -> str:
    if run.answer is None:
        return f"no answer: {run.reason or run.state}"
    return ", ".join(str(value) for value in run.answer.values())


# ---------------------------------------------------------------- what it took


def longest_prompt(client: WheelClient, runs: Sequence[RunView]) -> int | None:
    """Tokens of the longest prompt, looked for in the runs that were given most."""
    given = sorted(runs, key=lambda run: run.usage.prompt_tokens, reverse=True)
    calls = (client.trajectory(run.id).model_calls for run in given[:PROMPTS_READ])
    return max((call.prompt_length for each in calls for call in each), default=None)


def seconds(notes: Notes, stages: Sequence[StageView]) -> dict[str, float]:
    """Step → wall seconds, in order; the cycle by its stages, rounds added up."""
    found: dict[str, float] = {}
    for step in ("practice", "corrections", "report_base"):
        found[step] = notes.seconds.get(step, 0.0)
    for stage in stages:
        if stage.started_at is not None and stage.finished_at is not None:
            took = (stage.finished_at - stage.started_at).total_seconds()
            found[stage.name.value] = found.get(stage.name.value, 0.0) + took
    for step in ("report_sft", "report_grpo", "fixed"):
        if step in notes.seconds:
            found[step] = notes.seconds[step]
    return {step: round(took, 1) for step, took in found.items()}


def machine(load: float) -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        load=round(load, 2),
        versions={"python": platform.python_version(), **dict(_versions())},
    )


def _cpu() -> str:
    """The processor's name as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
