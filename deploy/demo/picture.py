"""The picture of a demo: how often the policy passes, before, after imitating, after practising.

Left, large: pass@1 of base, SFT and GRPO with their intervals, the simpler means beside them as
lines. Right, small: GRPO's reward and its groups with signal, step by step. Drawn without a display
and with the fonts that come with matplotlib, which is imported only when something is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo.result import STAGES, Baselines, DemoResult, GrpoStep, PooledResult, StageKey
from flywheel.records import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = "#ffffff"
INK = "#1d2a33"
FAINT = "#66757f"
GRID = "#e4e9ec"
OCHRE = "#b9772a"
WATER: dict[StageKey, str] = {"base": "#93a4ae", "sft": "#4f9aa6", "grpo": "#0b5f6b"}
NAMES: dict[StageKey, str] = {"base": "base model", "sft": "after SFT", "grpo": "after GRPO"}
BASELINES = {
    "no_lookup": "no look-up, at best",
    "keyword": "keyword classifier",
    "best_of_4": "base, best of 4 tries",
}

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
LABEL_GAP = 0.045
"""Least distance of two baselines' labels, as a share of the axis."""


def draw(result: DemoResult, path: Path) -> None:
    """The picture of one demo, as a PNG."""
    subtitle = (
        f"sampled pass@1 on the held-out report split, level {result.level}, seed {result.seed}; "
        "bars are 95% intervals"
    )
    _draw(
        path,
        title=headline(result.stages, result.practice.corrections),
        subtitle=subtitle,
        stages=result.stages,
        seeds=[],
        baselines=result.baselines,
        training=[result.training],
    )


def draw_pooled(pooled: PooledResult, path: Path) -> None:
    """The picture of several seeds: each a thin line, all together a thick one."""
    results = pooled.results
    seeds = ", ".join(str(result.seed) for result in results)
    subtitle = (
        f"sampled pass@1 on the held-out report split, level {results[0].level}, seeds {seeds}; "
        "thick: all seeds with 95% intervals"
    )
    _draw(
        path,
        title=headline(pooled.stages, min(r.practice.corrections for r in results)),
        subtitle=subtitle,
        stages=pooled.stages,
        seeds=[result.stages for result in results],
        baselines=mean_baselines(results),
        training=[result.training for result in results],
    )


def headline(stages: Mapping[StageKey, Score], corrections: int) -> str:
    """What a newcomer should remember, in numbers."""
    reached = [stages[stage] for stage in STAGES if stage in stages]
    if len(reached) < 2:
        return f"{corrections} corrections, one cycle: nothing was trained"
    return f"{corrections} corrections, one cycle: {reached[0].rate:.0%} → {reached[-1].rate:.0%}"


def mean_baselines(results: Sequence[DemoResult]) -> Baselines:
    """The mean over the seeds that have each."""
    means: dict[str, float] = {}
    for name in BASELINES:
        rates = [r for r in (getattr(each.baselines, name) for each in results) if r is not None]
        if rates:
            means[name] = sum(rates) / len(rates)
    return Baselines(**means)


def _draw(
    path: Path,
    *,
    title: str,
    subtitle: str,
    stages: Mapping[StageKey, Score],
    seeds: Sequence[Mapping[StageKey, Score]],
    baselines: Baselines,
    training: Sequence[Sequence[GrpoStep]],
) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 5.4), dpi=160)
        canvas = FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            2, 2, width_ratios=(2.25, 1), left=0.06, right=0.975, top=0.8, bottom=0.1,
            wspace=0.16, hspace=0.62,
        )  # fmt: skip
        figure.text(0.06, 0.925, title, size=17, weight="bold")
        figure.text(0.06, 0.872, subtitle, size=10, color=FAINT)
        _stages(figure.add_subplot(grid[:, 0]), stages, seeds, baselines)
        _rewards(figure.add_subplot(grid[0, 1]), training)
        _signal(figure.add_subplot(grid[1, 1]), training)
        canvas.print_png(path, metadata={"Software": None})


# ---------------------------------------------------------------- left: the stages


def _stages(
    axes: "Axes",
    stages: Mapping[StageKey, Score],
    seeds: Sequence[Mapping[StageKey, Score]],
    baselines: Baselines,
) -> None:
    _percent_axis(axes)
    axes.set_xlim(-0.35, 3.2)
    axes.set_xticks(range(len(STAGES)), [NAMES[stage] for stage in STAGES], size=11, color=INK)
    axes.tick_params(axis="x", pad=10)
    _baselines(axes, baselines)
    for of_seed in seeds:
        _line(axes, of_seed, color=WATER["base"], width=1.0)
    _line(axes, stages, color=WATER["sft"], width=2.6)
    for x, stage in enumerate(STAGES):
        if stage in stages:
            _point(axes, x, stages[stage], WATER[stage])
        else:
            axes.text(x, 0.02, "not reached", ha="center", color=FAINT, size=9)


def _percent_axis(axes: "Axes") -> None:
    axes.set_ylim(0, 1)
    ticks = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    axes.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks], size=9)


def _line(axes: "Axes", stages: Mapping[StageKey, Score], *, color: str, width: float) -> None:
    reached = [(x, stages[stage].rate) for x, stage in enumerate(STAGES) if stage in stages]
    axes.plot(*zip(*reached, strict=True), color=color, linewidth=width, zorder=2)


def _point(axes: "Axes", x: int, score: Score, color: str) -> None:
    axes.plot([x, x], [score.low, score.high], color=color, linewidth=7, alpha=0.32, zorder=3,
              solid_capstyle="butt")  # fmt: skip
    axes.plot([x], [score.rate], "o", color=color, markersize=11, zorder=4,
              markeredgecolor=PAPER, markeredgewidth=1.5, clip_on=False)  # fmt: skip
    axes.annotate(f"{score.rate:.0%}", (x, score.rate), xytext=(-11, 7), ha="right",
                  textcoords="offset points", size=15, weight="bold", color=color)  # fmt: skip


def _baselines(axes: "Axes", baselines: Baselines) -> None:
    known = {name: rate for name in BASELINES if (rate := getattr(baselines, name)) is not None}
    heights = spread(list(known.values()), LABEL_GAP)
    for (name, rate), height in zip(known.items(), heights, strict=True):
        axes.plot([-0.35, 2.24], [rate, rate], color=OCHRE, linewidth=1, linestyle=(0, (4, 3)),
                  alpha=0.8, zorder=1)  # fmt: skip
        axes.text(2.28, height, f"{rate:.0%} {BASELINES[name]}", color=OCHRE, size=9, va="center",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5})  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The heights moved up as little as keeps each `gap` above the next lower one."""
    moved = list(heights)
    lowest = gap / 2
    for index in sorted(range(len(moved)), key=lambda index: moved[index]):
        moved[index] = max(moved[index], lowest)
        lowest = moved[index] + gap
    return moved


# ---------------------------------------------------------------- right: GRPO, step by step


def _rewards(axes: "Axes", training: Sequence[Sequence[GrpoStep]]) -> None:
    _small(axes, "GRPO: mean reward, step by step", training)
    alpha = 1.0 if len(training) == 1 else 0.6
    for steps in training:
        numbers, rewards = [s.step for s in steps], [s.reward for s in steps]
        axes.plot(numbers, rewards, "o-", color=WATER["grpo"], linewidth=1.6, markersize=4.5,
                  clip_on=False, alpha=alpha)  # fmt: skip


def _signal(axes: "Axes", training: Sequence[Sequence[GrpoStep]]) -> None:
    _small(axes, "Share of groups with signal", training)
    by_step: dict[int, list[GrpoStep]] = {}
    for step in (step for steps in training for step in steps):
        by_step.setdefault(step.step, []).append(step)
    shares = {
        number: sum(s.groups_with_signal for s in steps) / max(1, sum(s.groups for s in steps))
        for number, steps in by_step.items()
    }
    axes.bar(list(shares), list(shares.values()), width=0.62, color=WATER["sft"])


def _small(axes: "Axes", title: str, training: Sequence[Sequence[GrpoStep]]) -> None:
    axes.set_title(title, size=10, loc="left", color=INK, pad=8)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.0, 0.5, 1.0], ["0", "½", "1"], size=9)
    last = max((step.step for steps in training for step in steps), default=0)
    every = max(1, last // 8)
    axes.set_xticks(range(1, last + 1, every), [str(n) for n in range(1, last + 1, every)], size=9)
    axes.set_xlim(0.4, max(last, 1) + 0.6)
    if not last:
        axes.text(0.5, 0.58, "GRPO took no step", transform=axes.transAxes, ha="center",
                  color=FAINT, size=9)  # fmt: skip
