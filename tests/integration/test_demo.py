"""The demo, fast: the whole loop on the real stack with the real model, judged through the API.

It runs once, as a user would start it; every test looks at another part of what it left behind.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.demo_result import DemoResult
from deploy.up_record import UpRecord
from flywheel.client import WheelClient
from flywheel.records import Manifest, Outcome, StageName
from flywheel.schemas import AdapterView, CycleView, StageView
from runtime.run import Observed, RunKind
from runtime.settings import CLONE, child_environment

SECONDS = 900.0
"""For a machine that does other things as well; idle, it takes less than six minutes."""
pytestmark = [pytest.mark.model, pytest.mark.timeout(SECONDS + 60)]


@dataclass(frozen=True, slots=True)
class Finished:
    result: DemoResult
    said: str
    """On stderr."""
    folder: Path
    cycle: CycleView
    client: WheelClient

    def stages(self, name: StageName) -> list[StageView]:
        return [stage for stage in self.cycle.stages if stage.name is name]

    def adapter(self, stage: str) -> AdapterView:
        return self.client.adapter(self.cycle.adapters[stage])

    def manifest(self, stage: str) -> Manifest:
        manifest = self.adapter(stage).manifest
        assert manifest is not None
        return manifest


@pytest.fixture(scope="module")
def finished(
    stack: tuple[UpRecord, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Finished]:
    record, key = stack
    assert record.api_url is not None
    folder = tmp_path_factory.mktemp("demo")
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.cli", "demo", "--fast", "--json", "--out", folder],
        cwd=CLONE,
        env=child_environment(
            PYTHONPATH=str(CLONE), NORIA_API_URL=record.api_url, NORIA_API_KEY=key
        ),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    print(f"the fast demo took {time.monotonic() - began:.0f} s")
    with WheelClient(record.api_url, key) as client:
        cycle = client.cycle(client.cycles("support_triage", limit=1)[0].id)
        result = DemoResult.model_validate(json.loads(ended.stdout))
        yield Finished(result, ended.stderr, folder, cycle, client)


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
    assert 0 < result.longest_prompt <= 400
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
