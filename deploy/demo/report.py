"""The demo's report: `demo-report.json`, `.md` and `.png`, of one seed or of several pooled.

The page is written for someone who has never seen Noria: what was tried, what came out, how sure
that is, and what it took. It says what was measured, also where that is nothing: an interval that
includes zero is called no clear difference, and a gate that held is quoted. Reports are files:
seeds measured on any number of machines are pooled from their JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deploy.demo.picture import NAMES, draw, draw_pooled, headline, mean_baselines
from deploy.demo.result import (
    STAGES,
    Baselines,
    DemoResult,
    Fixed,
    Machine,
    PooledResult,
    StageKey,
    pool_seeds,
)
from flywheel.evaluation.metrics import Spent
from flywheel.records import Interval, Outcome, Score
from runtime.run import Record

NAME = "demo-report"
MESSAGE_LENGTH = 110
"""Characters of a customer's message that a table shows."""
HOW = """\
Every number is sampled at temperature 1 and judged by the domain's own checks, strictly: a run
passes only if everything the domain requires is right and nothing else was changed. {held_out}
Each stage answers the same tasks with the same sampling seeds. Intervals are 95% bootstrap
intervals that resample whole tasks; differences are paired by task and sample."""
HELD_OUT = {
    "generated": "Messages are generated; the report split shares no family of phrasing with what "
    "was practised or gated on.",
    "real": "Messages are real ones, imported; none of the report's was practised or gated on.",
}
BASELINES = {
    "no_lookup": "the best answer that the message alone allows (no look-up, no letter read)",
    "keyword": "keyword classifier (naive Bayes) on the same corrections",
    "best_of_4": "base model, right in any of 4 tries",
}


def write_report(result: DemoResult, folder: Path) -> list[Path]:
    """Page, picture and data of one demo in `folder`, which is made; their paths, page first."""
    json, page, picture = _paths(folder)
    _write_json(result, json)
    draw(result, picture)
    page.write_text(_page(result), encoding="utf-8")
    return [page, picture, json]


def write_pooled(results: Sequence[DemoResult], folder: Path) -> list[Path]:
    """The same of several seeds. Raises InputError where they cannot be pooled."""
    pooled = pool_seeds(results)
    json, page, picture = _paths(folder)
    _write_json(pooled, json)
    draw_pooled(pooled, picture)
    page.write_text(_pooled_page(pooled), encoding="utf-8")
    return [page, picture, json]


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{NAME}.json", folder / f"{NAME}.md", folder / f"{NAME}.png"


def _write_json(record: Record, path: Path) -> None:
    path.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the page of one demo


def _page(result: DemoResult) -> str:
    title = headline(result.stages, result.practice.corrections)
    return _joined(
        f"# {title}",
        _lead(result),
        f"![{title}]({NAME}.png)",
        _stage_table(result.stages, result.spent),
        _differences(result.difference, result.grpo_difference, result.stages),
        "## Beside it",
        _baseline_table(result.baselines),
        "## The gate",
        _gate(result),
        "## GRPO, step by step",
        _training(result),
        "## Failures that are now fixed",
        _fixed(result.fixed, result.retried),
        "## What it took",
        _took(result),
        "## How it was measured",
        _how(result),
        _machine(result.machine),
    )


def _lead(result: DemoResult) -> str:
    practice, base = result.practice, result.stages.get("base")
    said = (
        f"An application submitted {practice.submitted} support messages; {result.model} got "
        f"{practice.accepted} of them right. A support team corrected {practice.corrections}."
    )
    reached: list[StageKey] = [stage for stage in STAGES if stage in result.stages]
    if base is None or len(reached) < 2:
        return f"{said} One cycle trained no policy; the reason stands under *The gate*."
    last = result.stages[reached[-1]]
    return (
        f"{said} One cycle trained on that; on {last.tasks} messages that nothing had seen before, "
        f"sampled pass@1 went from **{_percent(base.rate)}** to **{_percent(last.rate)}** "
        f"(level {result.level}, seed {result.seed}{_profile(result.profile)})."
    )


def _profile(profile: str | None) -> str:
    return f", profile {profile}" if profile else ""


def _stage_table(stages: Mapping[StageKey, Score], spending: Mapping[StageKey, Spent]) -> str:
    heads = ["report split", "passed", "pass@1", "95% interval"]
    heads += ["tokens per accepted", "seconds per accepted", "cost per accepted"]
    rows: list[list[str]] = []
    for stage in STAGES:
        if (score := stages.get(stage)) is not None:
            used = spending.get(stage)
            each = _each(used) if used else ["–"] * 3
            rows.append([NAMES[stage], *_score_cells(score), *each])
    return _table(heads, rows)


def _score_cells(score: Score) -> list[str]:
    interval = f"{_percent(score.low)} to {_percent(score.high)}"
    return [f"{score.passed} of {score.n}", f"**{_percent(score.rate)}**", interval]


def _each(used: Spent) -> list[str]:
    tokens, seconds = used.tokens_per_accepted, used.seconds_per_accepted
    return [
        "–" if tokens is None else f"{tokens:,.0f}",
        "–" if seconds is None else f"{seconds:,.1f}",
        _dollars(used.cost_per_accepted),
    ]


def _dollars(cost: float | None) -> str:
    if cost is None:
        return "–"
    return f"${cost:.4f}" if cost else "$0 (own machine)"


def _differences(
    whole: Interval | None, own_part: Interval | None, stages: Mapping[StageKey, Score]
) -> str:
    last = "grpo" if "grpo" in stages else "sft"
    lines = [f"- {NAMES[last]} minus base model: {_difference(whole)}"] if whole else []
    if own_part:
        lines.append(f"- GRPO's own part, after GRPO minus after SFT: {_difference(own_part)}")
    return "\n".join(lines)


def _difference(interval: Interval) -> str:
    low, high = _points(interval.low), _points(interval.high)
    return (
        f"**{_points(interval.value)} points** (95% interval {low} to {high}): {_word(interval)}."
    )


def _word(interval: Interval) -> str:
    if interval.low > 0:
        return "a clear improvement"
    if interval.high < 0:
        return "clearly worse"
    return "the interval includes zero, so no clear difference"


def _baseline_table(baselines: Baselines) -> str:
    rates = {name: getattr(baselines, name) for name in BASELINES}
    rows = [[BASELINES[name], _percent(rate)] for name, rate in rates.items()]
    return _table(["what simpler means score on the report split", "rate"], rows)


def _gate(result: DemoResult) -> str:
    outcome, adapter = result.gate.outcome, result.adapter
    name = f"`{adapter}`" if adapter else "no adapter"
    said = {
        Outcome.PROMOTE: f"The gate **promoted** {name}; production is served by it.",
        Outcome.HOLD: f"The gate **held** {name}: production stays as it was.",
        Outcome.REJECT: f"The gate **rejected** {name}: production stays as it was.",
        Outcome.INSUFFICIENT_EVIDENCE: "The gate had **insufficient evidence**: production stays "
        "as it was.",
        "nothing_to_learn": "There was **nothing to learn**, so nothing went to the gate.",
    }[outcome]
    return _joined(said, "\n".join(f"- {_cell(reason)}" for reason in result.gate.reasons))


def _training(result: DemoResult) -> str:
    if not result.training:
        return "GRPO took no step."
    share = result.groups_with_signal
    told = "" if share is None else f"{_percent(share)} of all groups had members that differed. "
    rows = [
        [
            str(s.step),
            f"{s.reward:.2f}",
            f"{s.groups_with_signal} of {s.groups}",
            _number(s.ratio),
            _number(s.update_kl),
            _number(s.update_ratio),
        ]
        for s in result.training
    ]
    return _joined(
        f"{told}Only such groups carry a gradient. A mean ratio of 1 before the step says that the "
        "groups are the policy's own; KL and the largest ratio of a token after it say how far the "
        "step moved the policy.",
        _table(
            [
                "step",
                "mean reward",
                "groups with signal",
                "mean ratio before",
                "KL of the step",
                "largest ratio after",
            ],
            rows,
        ),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _fixed(fixed: Sequence[Fixed], retried: int) -> str:
    if not retried:
        return "No failure was tried again."
    told = f"Solved now: {len(fixed)} of {retried} practice failures that were submitted again."
    if not fixed:
        return told
    rows = [[_cell(f.message, MESSAGE_LENGTH), _cell(f.before), _cell(f.after)] for f in fixed]
    return _joined(told, _table(["message", "before", "now"], rows))


def _took(result: DemoResult) -> str:
    seconds = [[stage, _minutes(spent)] for stage, spent in result.seconds.items()]
    total = [["**all**", f"**{_minutes(sum(result.seconds.values()))}**"]]
    splits = ", ".join(f"{count} {split}" for split, count in result.splits.items())
    longest = (
        f", the longest prompt {result.longest_prompt} tokens" if result.longest_prompt else ""
    )
    return _joined(
        f"{result.sampled_tokens:,} sampled tokens in all{longest}; tasks used: {splits}.",
        _table(["stage", "minutes:seconds"], seconds + total),
    )


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def _how(result: DemoResult) -> str:
    return HOW.format(held_out=HELD_OUT[result.messages])


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    told = f"Machine: {machine.cpu}, {machine.cores} cores, load {machine.load:.1f} at the start"
    return f"{told}; {versions}." if versions else f"{told}."


# ---------------------------------------------------------------- the page of several


def _pooled_page(pooled: PooledResult) -> str:
    results, title = pooled.results, _pooled_title(pooled)
    return _joined(
        f"# {title}",
        _pooled_lead(pooled),
        f"![{title}]({NAME}.png)",
        "## All seeds together",
        _stage_table(pooled.stages, pooled.spent),
        _differences(pooled.difference, pooled.grpo_difference, pooled.stages),
        "## Each seed",
        _seed_table(results),
        _own_part_table(results),
        "## Beside it, mean over the seeds",
        _baseline_table(mean_baselines(results)),
        "## What each cycle taught, and what the gate said",
        "\n".join(map(_seed_line, results)),
        "## How it was measured",
        _how(results[0]),
        "\n".join(f"- seed {result.seed}: {_machine(result.machine)}" for result in results),
    )


def _pooled_title(pooled: PooledResult) -> str:
    corrections = min(result.practice.corrections for result in pooled.results)
    return f"{headline(pooled.stages, corrections)}, {len(pooled.results)} seeds"


def _pooled_lead(pooled: PooledResult) -> str:
    results = pooled.results
    clear = sum(r.difference is not None and r.difference.low > 0 for r in results)
    promoted = sum(r.gate.outcome == Outcome.PROMOTE for r in results)
    seeds = ", ".join(str(result.seed) for result in results)
    return (
        f"{len(results)} demos of {results[0].model}, level {results[0].level}, seeds {seeds}"
        f"{_profile(results[0].profile)}. The paired interval lies above zero in {clear} of "
        f"{len(results)}; the gate promoted {promoted}."
    )


def _seed_table(results: Sequence[DemoResult]) -> str:
    heads = ["seed", *NAMES.values(), "difference (95% interval)", "gate", "tokens", "minutes"]
    rows = [
        [
            str(r.seed),
            *(_percent(r.stages[stage].rate if stage in r.stages else None) for stage in STAGES),
            _short(r.difference),
            str(r.gate.outcome).replace("_", " "),
            f"{r.sampled_tokens:,}",
            _minutes(sum(r.seconds.values())),
        ]
        for r in results
    ]
    return _table(heads, rows)


def _own_part_table(results: Sequence[DemoResult]) -> str:
    heads = [
        "seed",
        "GRPO's own part (95% interval)",
        "groups with signal",
        "fixed",
        "longest prompt",
    ]
    rows = [
        [
            str(r.seed),
            _short(r.grpo_difference),
            _percent(r.groups_with_signal),
            f"{len(r.fixed)} of {r.retried}",
            str(r.longest_prompt or "–"),
        ]
        for r in results
    ]
    return _table(heads, rows)


def _short(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    low, high = _points(interval.low), _points(interval.high)
    return f"{_points(interval.value)} ({low} to {high})"


def _seed_line(result: DemoResult) -> str:
    adapter = f"`{result.adapter}`" if result.adapter else "no adapter"
    reason = _cell(result.gate.reasons[0]) if result.gate.reasons else ""
    return f"- seed {result.seed}, {adapter}: {reason}"


# ---------------------------------------------------------------- Markdown


def _joined(*blocks: str) -> str:
    return "\n\n".join(block.strip("\n") for block in blocks if block) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str, length: int = 300) -> str:
    """Foreign text, harmless in a table: one line, nothing that Markdown or HTML would act on."""
    line = " ".join(text.split())
    line = line if len(line) <= length else line[: length - 1] + "…"
    for character in "\\`*_[]|":
        line = line.replace(character, f"\\{character}")
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"
