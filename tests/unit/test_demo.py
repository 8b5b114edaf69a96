"""The demo as a client: each correction given once, its own cycle followed, the gate believed.

The API here answers as the test chose; what the real one does is `tests/integration/test_demo.py`.
"""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from deploy.demo.demo import Demo, DemoPlan
from deploy.demo.journal import Journal
from deploy.demo.show import Show
from deploy.demo.tasks import generated
from deploy.home import CannotRun
from flywheel.client import WheelClient
from runtime.domain import Domain
from tests.fixtures.demo_runs import NOW, RunsApi, view_of

SCORE = {"passed": 1, "n": 2, "tasks": 2, "rate": 0.5, "low": 0.0, "high": 1.0}
PLAN = DemoPlan(
    "support_triage", base="tiny", level="easy", seed=1, corrections=3, report_tasks=2,
    members=1, best_of_tasks=1, retried=2,
)  # fmt: skip


def cycle(cycle_id: str, state: str = "done", outcome: str = "promote") -> dict[str, Any]:
    decision = {
        "outcome": outcome,
        "reasons": ["because"],
        "incumbent": SCORE,
        "candidate": SCORE,
        "difference": None,
    }
    return {
        "id": cycle_id,
        "domain": "support_triage",
        "date": "2026-01-01",
        "turn": 0,
        "trigger": "manual",
        "state": state,
        "reason": "out of luck" if state == "failed" else None,
        "created_at": NOW.isoformat(),
        "adapters": {"sft": "adapter-1", "grpo": "adapter-2"} if state == "done" else {},
        "decision": decision if state == "done" else None,
    }


class WheelApi(RunsApi):
    """Runs, feedback and cycles; counts what was asked of it."""

    def __init__(self, *, promoted: bool = True) -> None:
        super().__init__(self._ending)
        self.promoted = promoted
        self.corrected: list[dict[str, Any]] = []
        self.cycles: list[dict[str, Any]] = [cycle("cyc_1", outcome=self._outcome())]
        """What opening a cycle answers, one after the other; the first of two is others'."""
        self.followed: list[str] = []

    def _outcome(self) -> str:
        return "promote" if self.promoted else "hold"

    @staticmethod
    def _ending(key: str, before: int) -> str:
        return "accepted" if "-sft-" in key or "-grpo-" in key else "timed_out"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path
        if (method, path) == ("POST", "/v1/runs"):
            return super().handle_request(request)
        if path.endswith("/feedback"):
            self.corrected.append({"path": path, **json.loads(request.content)})
            return httpx.Response(201, json={"run_id": path.split("/")[3], "seq": 1})
        return self._read(method, path)

    def _read(self, method: str, path: str) -> httpx.Response:
        if (method, path) == ("POST", "/v1/cycles"):
            ours = len(self.cycles) == 1
            opened = self.cycles[0] if ours else self.cycles.pop(0)
            return httpx.Response(202 if ours else 200, json=opened)
        if path.startswith("/v1/cycles/"):
            self.followed.append(path.rpartition("/")[2])
            known = {each["id"]: each for each in [*self.cycles, cycle("cyc_other")]}
            if self.followed[-1] in known:
                return httpx.Response(200, json=known[self.followed[-1]])
            return httpx.Response(404, json={"type": "", "title": "", "status": 404, "detail": ""})
        if path == "/v1/releases":
            return httpx.Response(200, json={"releases": []})
        if path.endswith("/trajectory"):
            run = view_of("any", "accepted").model_dump(mode="json")
            return httpx.Response(200, json={"run": run, "events": [], "model_calls": []})
        assert path == "/v1/runs", path
        return httpx.Response(200, json={"runs": []})


def demo(api: WheelApi, domain: Domain, folder: Path) -> tuple[Demo, io.StringIO]:
    out = io.StringIO()
    tasks = generated(domain, level="easy", seed=1, practice=3, report=2)
    journal = Journal.open(folder, PLAN)
    client = WheelClient("http://noria.test", "key", transport=api)
    return Demo(client, PLAN, domain, tasks, journal, Show(Console(file=out, width=200))), out


def roles(api: WheelApi) -> dict[str, int]:
    found: dict[str, int] = {}
    for key in api.asked:
        role = key.split("-")[2]
        found[role] = found.get(role, 0) + 1
    return found


def test_the_whole_of_it(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    started, out = demo(api, triage, tmp_path)
    result = started.run()
    assert roles(api) == {"practice": 3, "base": 5, "sft": 2, "grpo": 2, "fixed": 2}
    assert (result.stages["base"].rate, result.stages["grpo"].rate) == (0.0, 1.0)
    assert result.baselines.best_of_4 == 0.0
    assert result.gate.outcome == "promote"
    assert result.adapter == "adapter-2"
    assert (result.practice.submitted, result.practice.corrections) == (3, 3)
    assert (result.retried, result.fixed) == (2, [])
    assert result.sampled_tokens == 30 * 14
    assert "report split, after GRPO: 2 of 2 passed (100%)" in out.getvalue()


def test_every_stage_samples_with_the_same_seeds(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    demo(api, triage, tmp_path)[0].run()
    seeds: dict[str, set[int]] = {}
    for key, bodies in api.asked.items():
        if bodies[0]["kind"] == "evaluation" and key.endswith("-0-0"):
            seeds.setdefault(key.split("-")[2], set()).add(bodies[0]["sampling"]["seed"])
    assert seeds["base"] == seeds["sft"] == seeds["grpo"]
    assert len(seeds["base"]) == 2


def test_corrections_are_the_gold_and_are_given_once(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    demo(api, triage, tmp_path)[0].run()
    assert len({each["path"] for each in api.corrected}) == len(api.corrected) == 3
    assert all(each["rating"] == "down" for each in api.corrected)
    golds = [task.expectation for task in demo(api, triage, tmp_path)[0].tasks.practice[:3]]
    assert [each["correction"] for each in api.corrected] == golds
    demo(api, triage, tmp_path)[0].run()  # the journal was not closed: as after an interrupt
    assert len(api.corrected) == 3


def test_where_the_gate_holds_nothing_is_sent_again(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi(promoted=False)
    result = demo(api, triage, tmp_path)[0].run()
    assert "fixed" not in roles(api)
    assert (result.gate.outcome, result.retried) == ("hold", 0)


def test_others_cycle_is_let_go_by_first(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    api.cycles.insert(0, cycle("cyc_other"))
    started, out = demo(api, triage, tmp_path)
    started.run()
    assert list(dict.fromkeys(api.followed)) == ["cyc_other", "cyc_1"]
    assert started.journal.notes.cycle_id == "cyc_1"
    assert "cyc_other turns already" in out.getvalue()


def test_an_interrupted_demo_follows_its_own_cycle(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    started, out = demo(api, triage, tmp_path)
    started.journal.note(cycle_id="cyc_other")
    again, out = demo(api, triage, tmp_path)
    again.run()
    assert set(api.followed) == {"cyc_other"}
    assert "goes on where it stopped" in out.getvalue()


def test_a_cycle_of_another_database_is_forgotten(triage: Domain, tmp_path: Path) -> None:
    api = WheelApi()
    started, _ = demo(api, triage, tmp_path)
    started.journal.note(cycle_id="cyc_gone")
    again, _ = demo(api, triage, tmp_path)
    again.run()
    assert again.journal.notes.cycle_id == "cyc_1"


def test_a_failed_cycle_is_told_and_the_next_demo_opens_another(
    triage: Domain, tmp_path: Path
) -> None:
    api = WheelApi()
    api.cycles = [cycle("cyc_1", "failed")]
    started, _ = demo(api, triage, tmp_path)
    with pytest.raises(CannotRun, match="cyc_1 ended failed: out of luck"):
        started.run()
    assert started.journal.notes.cycle_id is None
