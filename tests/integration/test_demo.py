"""The demo, fast: the whole loop on the real stack with the real model, judged through the API.

It runs once, as a user would start it; every test looks at another part of what it left behind.
"""

import pytest

from deploy.demo.result import DemoResult
from flywheel.records import Outcome, StageName
from runtime.run import Observed, RunKind
from tests.fixtures.demo import SECONDS, Finished

pytestmark = [pytest.mark.model, pytest.mark.timeout(SECONDS + 60)]


def test_it_reports_what_it_measured(finished: Finished) -> None:
    result = finished.result
    assert {stage: score.n for stage, score in result.stages.items()} == dict.fromkeys(
        ("base", "sft", "grpo"), 16
    )
    assert result.difference is not None
    assert result.gate.outcome in set(Outcome)
    assert result.gate.reasons
    assert result.baselines.no_lookup is not None
    assert result.baselines.keyword is not None
    assert result.baselines.best_of_4 is not None
    assert result.practice.corrections >= 24
    assert 0 < result.sampled_tokens <= 40_000
    assert result.longest_prompt is not None
    assert 0 < result.longest_prompt <= 500, "so little training still takes detours"
    for ending in ("md", "png", "json"):
        assert (finished.folder / f"demo-report.{ending}").stat().st_size > 500
    assert DemoResult.model_validate_json(
        (finished.folder / "demo-report.json").read_bytes()
    ) == result  # fmt: skip


def test_both_trainings_moved_the_weights(finished: Finished) -> None:
    for name in (StageName.SFT, StageName.GRPO):
        curve = [step for stage in finished.stages(name) for step in stage.metrics["curve"]]
        assert curve, f"{name} took no step"
        assert all(step["grad_norm"] > 0 for step in curve), name
    digests = {finished.adapter(stage).digest for stage in ("sft", "grpo")}
    assert len(digests) == 2
    assert all(digest.startswith("sha256:") for digest in digests)


def test_the_engine_served_what_was_asked_for_and_it_differs_from_the_base(
    finished: Finished,
) -> None:
    asked: dict[str, int] = {}
    for run in finished.client.runs(domain="support_triage", kind=RunKind.EVALUATION):
        if run.task.split != "report":
            continue
        calls = finished.client.trajectory(run.id).model_calls
        assert calls
        assert {call.policy_id for call in calls} == {run.policy.id}
        if run.policy.adapter is not None:
            assert run.policy.adapter == finished.client.adapter(run.policy.id).digest
        asked[run.policy.id] = asked.get(run.policy.id, 0) + 1
    assert {asked[finished.cycle.adapters[stage]] for stage in ("sft", "grpo")} == {16}
    moved = [
        stage.metrics["probe_moved"]
        for name in (StageName.SFT, StageName.GRPO)
        for stage in finished.stages(name)
    ]
    assert len(moved) == 2
    assert all(each > 0 for each in moved)


def test_the_lineage_is_complete(finished: Finished) -> None:
    corrected = {
        run.id for run in finished.client.runs(domain="support_triage", kind=RunKind.PRODUCTION)
    }
    for stage in ("sft", "grpo"):
        adapter, manifest = finished.adapter(stage), finished.manifest(stage)
        assert (manifest.name, manifest.digest) == (adapter.name, adapter.digest)
        assert manifest.cycle_id == finished.cycle.id
        assert manifest.recipe is not None
        assert manifest.recipe.domain == "support_triage"
        assert len(manifest.tasks) >= 16
        assert len(manifest.corrections) >= 16
        assert set(manifest.corrections) <= corrected
    assert finished.manifest("grpo").parent == finished.cycle.adapters["sft"]
    rollouts = {
        run.id for run in finished.client.runs(domain="support_triage", kind=RunKind.ROLLOUT)
    }
    trained_on = set(finished.manifest("grpo").runs)
    assert trained_on
    assert trained_on <= rollouts
    decision = finished.adapter("grpo").decision
    assert decision is not None
    assert decision == finished.cycle.decision
    pool = {task.id for task in finished.client.pool_tasks("support_triage", status="admitted")}
    assert set(finished.manifest("sft").tasks) <= pool


def test_some_run_read_a_file_in_its_sandbox(finished: Finished) -> None:
    kinds = (RunKind.ROLLOUT, RunKind.EVALUATION)
    runs = (run for kind in kinds for run in finished.client.runs(kind=kind))
    with_letters = (run for run in runs if "attachment" in run.task.input)
    read = (
        event
        for run in with_letters
        for event in finished.client.trajectory(run.id).events
        if isinstance(event.body, Observed)
        and event.body.result.ok
        and event.body.result.name == "read_file"
    )
    assert next(read, None) is not None


def test_only_json_is_on_stdout_and_the_steps_are_told_elsewhere(finished: Finished) -> None:
    for told in ("customer messages", "corrections", "report split, after GRPO", "gate:"):
        assert told in finished.said
