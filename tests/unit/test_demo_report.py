"""The demo's report: numbers as measured, words that do not claim more, a real picture."""

import json
import random
import struct
from pathlib import Path
from typing import Any, Literal

import pytest

from deploy.demo.picture import spread
from deploy.demo.report import write_pooled, write_report
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
    pool_seeds,
)
from flywheel.records import Outcome, Sample
from runtime.errors import InputError
from tests.fixtures.samples import alike, arm_of, drawn, sample

RATES: dict[StageKey, float] = {"base": 0.0, "sft": 0.4, "grpo": 0.65}
ARCHITECTURE = {
    "seed", "level", "model", "splits", "stages", "difference", "baselines", "groups_with_signal",
    "fixed", "gate", "adapter", "sampled_tokens", "seconds", "cost_per_accepted",
}  # fmt: skip


def samples_of(seed: int, tasks: int = 64) -> dict[StageKey, list[Sample]]:
    dice = random.Random(seed)
    members = {"base": 4, "sft": 2, "grpo": 2}
    return {s: drawn(dice, tasks, members[s], rate, s) for s, rate in RATES.items()}


def result(seed: int = 7, **changes: Any) -> DemoResult:
    measured = measure(samples_of(seed))
    whole = DemoResult(
        seed=seed,
        level="easy",
        model="SmolLM2-135M-Instruct",
        splits={"practice": 96, "gate": 24, "report": 64},
        stages=measured.stages,
        difference=measured.difference,
        grpo_difference=measured.grpo_difference,
        baselines=Baselines(no_lookup=0.31, keyword=0.17, best_of_4=measured.best_of_4),
        groups_with_signal=0.75,
        training=[
            GrpoStep(step=n, reward=0.4 + n / 20, groups=6, groups_with_signal=n + 1, ratio=1.01)
            for n in (1, 2, 3, 4)
        ],
        fixed=[Fixed(message="my card | <b>late</b>", before="no answer", after="cards, high")],
        retried=12,
        gate=DemoGate(outcome=Outcome.PROMOTE, reasons=["The candidate is clearly better."]),
        adapter="support_triage-20250501-abcdef012345",
        practice=Practice(submitted=96, accepted=0, corrections=96),
        sampled_tokens=31_234,
        longest_prompt=312,
        seconds={"submit": 65.0, "cycle": 700.0},
        cost_per_accepted=measured.cost_per_accepted,
        spent=measured.spent,
        machine=Machine(cpu="a CPU", cores=2, load=0.4, versions={"python": "3.11"}),
        outcomes=measured.outcomes,
    )
    return whole.model_copy(update=changes)


def page(folder: Path, shown: DemoResult) -> str:
    return write_report(shown, folder)[0].read_text(encoding="utf-8")


def size_of(picture: Path) -> tuple[int, int]:
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:24])


# ---------------------------------------------------------------- measuring


def test_measuring_pairs_the_shared_members_and_keeps_the_others_for_best_of_4():
    base = arm_of({"x": [False, False, True, False], "y": [False] * 4}, "base")
    found = measure({
        "base": base,
        "sft": arm_of({"x": [True, False], "y": [False, False]}, "sft"),
        "grpo": arm_of({"x": [True, True], "y": [True, False]}, "grpo"),
    })  # fmt: skip
    assert {stage: (s.passed, s.n) for stage, s in found.stages.items()} == {
        "base": (0, 4),
        "sft": (1, 4),
        "grpo": (3, 4),
    }
    assert found.best_of_4 == 0.5
    assert found.difference is not None
    assert found.difference.value == 0.75
    assert found.grpo_difference is not None
    assert found.grpo_difference.value == 0.5
    assert found.outcomes["grpo"] == {"x": [True, True], "y": [True, False]}
    assert found.cost_per_accepted == pytest.approx(0.004 / 3)


def test_a_spoilt_run_is_none_in_the_outcomes_and_leaves_its_pair_out():
    new = [sample("x", 0, True, valid=False), sample("x", 1, True)]
    found = measure({"base": alike(1, 0, False), "sft": new})
    assert found.outcomes["sft"] == {"x": [None, True]}
    base = [sample("x", 0, False), sample("x", 1, True)]
    both = measure({"base": base, "sft": new})
    assert both.difference is not None
    assert both.difference.value == 0


def test_stages_that_were_not_reached_are_absent():
    found = measure({"base": alike(16, 4, False)})
    assert set(found.stages) == {"base"}
    assert found.difference is None
    assert found.grpo_difference is None
    assert measure({}).cost_per_accepted is None


# ---------------------------------------------------------------- one report


def test_the_json_has_the_documented_shape_and_reads_back(tmp_path: Path):
    shown = result()
    path = write_report(shown, tmp_path / "new" / "folder")[2]
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data.keys() >= ARCHITECTURE
    assert list(data["stages"]) == ["base", "sft", "grpo"]
    assert data["stages"]["base"].keys() >= {"passed", "n", "rate", "low", "high"}
    assert data["difference"].keys() == {"value", "low", "high"}
    assert data["baselines"].keys() == {"no_lookup", "keyword", "best_of_4"}
    assert data["gate"].keys() == {"outcome", "reasons"}
    assert DemoResult.model_validate_json(path.read_text(encoding="utf-8")) == shown


def test_the_page_tells_the_numbers_and_embeds_the_picture(tmp_path: Path):
    shown = result()
    text = page(tmp_path, shown)
    final = shown.stages["grpo"]
    assert text.startswith(f"# 96 corrections, one cycle: 0% → {final.rate:.0%}\n")
    assert f"{final.passed} of {final.n}" in text
    assert "(demo-report.png)" in text
    assert "31,234 sampled tokens in all, the longest prompt 312 tokens" in text
    assert "| **all** | **12:45** |" in text
    assert "**promoted** `support_triage-20250501-abcdef012345`" in text
    assert "a CPU, 2 cores, load 0.4" in text


def test_foreign_text_stays_text(tmp_path: Path):
    text = page(tmp_path, result())
    assert "my card \\| &lt;b&gt;late&lt;/b&gt;" in text
    row = next(line for line in text.splitlines() if "my card" in line)
    assert row.replace("\\|", "").count("|") == 4


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.2, "a clear improvement"),
        (-0.1, 0.2, "the interval includes zero, so no clear difference"),
        (0.0, 0.2, "the interval includes zero, so no clear difference"),
        (-0.3, -0.1, "clearly worse"),
    ],
)
def test_a_difference_is_called_what_it_is(tmp_path: Path, low: float, high: float, said: str):
    own_part = {"value": (low + high) / 2, "low": low, "high": high}
    shown = DemoResult.model_validate(result().model_dump() | {"grpo_difference": own_part})
    line = next(x for x in page(tmp_path, shown).splitlines() if "GRPO's own part" in x)
    assert line.endswith(f": {said}.")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.HOLD, "**held** `support_triage-20250501-abcdef012345`: production stays"),
        (Outcome.REJECT, "**rejected**"),
        (Outcome.INSUFFICIENT_EVIDENCE, "**insufficient evidence**: production stays"),
        ("nothing_to_learn", "**nothing to learn**"),
    ],
)
def test_where_the_gate_does_not_promote_the_page_says_so(
    tmp_path: Path, outcome: Outcome | Literal["nothing_to_learn"], said: str
):
    text = page(tmp_path, result(gate=DemoGate(outcome=outcome, reasons=["No _clear_ reason."])))
    assert said in text
    assert "- No \\_clear\\_ reason." in text
    assert "promoted" not in text


def test_a_cycle_that_trained_nothing_has_a_report_too(tmp_path: Path):
    base = measure({"base": samples_of(1)["base"]})
    text = page(
        tmp_path,
        result(stages=base.stages, spent=base.spent, difference=None, grpo_difference=None,
               training=[], groups_with_signal=None, fixed=[], retried=0, adapter=None,
               gate=DemoGate(outcome="nothing_to_learn", reasons=[])),
    )  # fmt: skip
    assert "nothing was trained" in text
    assert "GRPO took no step." in text
    assert "No failure was tried again." in text
    assert "None" not in text
    assert size_of(tmp_path / "demo-report.png") == (1600, 864)


def test_the_picture_is_a_png_that_differs_with_the_data(tmp_path: Path):
    first = write_report(result(), tmp_path / "a")[1]
    again = write_report(result(), tmp_path / "b")[1]
    other = write_report(result(stages=measure(samples_of(8)).stages), tmp_path / "c")[1]
    assert size_of(first) == (1600, 864)
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_labels_are_moved_apart_and_never_down():
    assert spread([0.3, 0.0, 0.31], 0.1) == pytest.approx([0.3, 0.05, 0.4])
    assert spread([], 0.1) == []


# ---------------------------------------------------------------- several seeds


def test_pooling_joins_the_evidence_and_narrows_the_interval():
    results = [result(seed) for seed in (1, 2, 3)]
    pooled = pool_seeds(results)
    assert pooled.stages["grpo"].n == 3 * 128
    assert pooled.stages["grpo"].tasks == 3 * 64
    assert pooled.stages["grpo"].passed == sum(r.stages["grpo"].passed for r in results)
    own, single = pooled.grpo_difference, results[0].grpo_difference
    assert own is not None
    assert single is not None
    assert own.high - own.low < 0.75 * (single.high - single.low)
    assert own.value == pytest.approx(
        pooled.stages["grpo"].rate - pooled.stages["sft"].rate, abs=1e-9
    )
    assert pooled.groups_with_signal == pytest.approx(14 / 24)
    assert pool_seeds(results[::-1]) == pooled


def test_the_pooled_page_has_a_row_of_each_seed_and_the_files_of_a_report(tmp_path: Path):
    results = [result(1), result(2, difference=None, grpo_difference=None), result(3)]
    text_path, picture, data = write_pooled(results, tmp_path)
    text = text_path.read_text(encoding="utf-8")
    assert text.splitlines()[0].endswith(", 3 seeds")
    assert "lies above zero in 2 of 3; the gate promoted 3." in text
    assert [f"| {seed} | 0% |" in text for seed in (1, 2, 3)] == [True] * 3
    assert "None" not in text
    assert size_of(picture) == (1600, 864)
    assert len(json.loads(data.read_text(encoding="utf-8"))["results"]) == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ([], "no demo results"),
        ([{"seed": 1}, {"seed": 1}], "occur twice"),
        ([{"seed": 1}, {"seed": 2, "level": "full"}], "several kinds"),
        ([{"seed": 1}, {"seed": 2, "model": "other"}], "several kinds"),
    ],
)
def test_what_does_not_belong_together_is_not_pooled(changes: list[dict[str, Any]], complaint: str):
    with pytest.raises(InputError, match=complaint):
        pool_seeds([result().model_copy(update=each) for each in changes])
