"""The figures of a study, drawn from its findings alone, so that committed results give the same pictures."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from sage_fast.study.experiments import DISTANCE, Experiment
from sage_fast.study.findings import Findings
from sage_fast.study.measures import SAMPLERS
from sage_fast.tools.curves import COLOURS, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR: dict[str, str] = dict(zip((*SAMPLERS, "ode"), COLOURS, strict=False))
"""Of a sampler, the same in all figures."""


def draw_experiment(experiment: Experiment, findings: Findings) -> "Figure | None":
    """The figure of an experiment; None where nothing was measured yet."""
    if not any(row.experiment == experiment.key for row in findings.rows):
        return None
    special: dict[str, Callable[[Findings], Figure]] = {
        "table1": _draw_table1,
        "fig1a": _draw_fig1a,
        "fig9": _draw_fig9,
        "fig2": _draw_fig2,
        "base": _draw_base,
        "fig4": _draw_fig4,
        "fig3": _draw_fig3,
    }
    if experiment.key in special:
        return special[experiment.key](findings)
    return _draw_arms(experiment, findings)


def _line(axes: "Axes", x: Sequence[float], y: Sequence[float], sampler: str) -> None:
    # Where lines lie on each other, the first sampler of the legend is on top.
    order = 3 - list(COLOUR).index(sampler) / len(COLOUR)
    axes.plot(x, y, label=sampler, color=COLOUR[sampler], marker="o", ms=3.5, linewidth=1.5, zorder=order)


def _over(
    findings: Findings, experiment: str, quantity: str, sampler: str, name: str
) -> tuple[list[float], list[float]]:
    """The settings in `SAMPLER, NAME=VALUE` and the means of a quantity there."""
    prefix = f"{sampler}, {name}="
    arms = [arm for arm in findings.arms(experiment, quantity) if arm.startswith(prefix)]
    return [float(arm.removeprefix(prefix)) for arm in arms], [findings.mean(experiment, quantity, arm) for arm in arms]


def _draw_table1(findings: Findings) -> "Figure":
    figure = new_figure(9.5, 3.6)
    left, right = figure.subplots(1, 2)
    style_axes(left, "variance from sigma 0.9 up", "steps T", "variance")
    style_axes(right, "noise of the last step", "steps T", "standard deviation")
    for sampler in SAMPLERS:
        _line(left, *_over(findings, "table1", "high_noise_variance", sampler, "T"), sampler)
        _line(right, *_over(findings, "table1", "last", sampler, "T"), sampler)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([10, 20, 40, 100], ["10", "20", "40", "100"])
        axes.minorticks_off()
    left.set_yscale("log")
    left.legend(frameon=False, fontsize=8)
    return figure


def _draw_fig1a(findings: Findings) -> "Figure":
    figure = new_figure(7.5, 3.8)
    axes = figure.subplots()
    style_axes(axes, "noise per step: T = 20, shift 5, eta 0.5", "step", "standard deviation")
    for sampler in SAMPLERS:
        (row,) = findings.select("fig1a", "std", sampler)
        _line(axes, range(1, len(row.parts) + 1), row.parts, sampler)
    axes.set_xticks(range(1, 21, 2))
    axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_fig9(findings: Findings) -> "Figure":
    figure = new_figure(9.5, 3.6)
    left, right = figure.subplots(1, 2)
    style_axes(left, "variance from sigma 0.9 up", "shift", "variance")
    style_axes(right, "sage_grpo by the margin at sigma = 1", "step", "standard deviation")
    for sampler in SAMPLERS:
        _line(left, *_over(findings, "fig9", "high_noise_variance", sampler, "shift"), sampler)
    left.set_yscale("log")
    left.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.36))
    margins = [arm for arm in findings.arms("fig9", "std") if "margin=" in arm]
    for number, arm in enumerate(margins):
        (row,) = findings.select("fig9", "std", arm)
        shade = str(0.75 * number / max(1, len(margins) - 1))
        label = f"margin {arm.partition('=')[2]}"
        right.plot(range(1, 9), row.parts[:8], label=label, color=shade, marker="o", ms=3.5, linewidth=1.5)
    right.legend(frameon=False, fontsize=8)
    return figure


def _draw_fig2(findings: Findings) -> "Figure":
    figure = new_figure(12, 3.8)
    panels = figure.subplots(1, 3, width_ratios=(1.1, 1.1, 0.9))
    steps = sorted({int(arm.split("T=")[1].split(",")[0]) for arm in findings.arms("fig2", "distance")})
    for axes, count in zip(panels, steps, strict=False):
        style_axes(axes, f"T = {count}", "distinct videos from one start", "distance" if axes is panels[0] else "")
        for sampler in SAMPLERS:
            prefix = f"{sampler}, T={count}, "
            arms = [arm for arm in findings.arms("fig2", "distance") if arm.startswith(prefix)]
            arms.sort(key=lambda arm: float(arm.rpartition("=")[2]))
            x = [findings.mean("fig2", "exploration", arm) for arm in arms]
            _line(axes, x, [findings.mean("fig2", "distance", arm) for arm in arms], sampler)
        axes.axhline(0.02, color="#66717e", linewidth=1, linestyle="--")
        axes.set_yscale("log")
    panels[0].legend(frameon=False, fontsize=8)
    style_axes(panels[2], f"T = {steps[-1]}, eta 0.5", "distance")
    for place, sampler in enumerate(reversed(("ode", *SAMPLERS))):
        values = [row.value for row in findings.select("fig2", "distance", f"{sampler}, T={steps[-1]}, eta=0.5")]
        if values:
            panels[2].barh(place, mean(values), color=COLOUR[sampler], height=0.65)
            panels[2].text(mean(values), place, f" {mean(values):.4f}", va="center", fontsize=8)
    panels[2].set_yticks(range(len(SAMPLERS) + 1), list(reversed(("ode", *SAMPLERS))), fontsize=8)
    panels[2].margins(x=0.25)
    panels[2].grid(visible=False)
    return figure


def _draw_base(findings: Findings) -> "Figure":
    figure = new_figure(9.5, 3.6)
    left, right = figure.subplots(1, 2)
    style_axes(left, "reward of the rollout", "standard deviation in a group", "mean")
    style_axes(right, "distance")
    for place, sampler in enumerate(reversed(SAMPLERS)):
        dots: dict[str, Any] = {"color": COLOUR[sampler], "ms": 5, "alpha": 0.7, "markeredgewidth": 0}
        spread, reward, distance = (
            [row.value for row in findings.select("base", quantity, sampler)]
            for quantity in ("group_std", "reward", DISTANCE)
        )
        left.plot(spread, reward, "o", label=sampler, **dots)
        right.plot(distance, [place] * len(distance), "o", **dots)
    right.set_yticks(range(len(SAMPLERS)), list(reversed(SAMPLERS)), fontsize=8)
    # Dots lie anywhere in the panel, and those of a legend look like them.
    figure.legend(loc="outside lower center", ncols=len(SAMPLERS), frameon=False, fontsize=8, reverse=True)
    return figure


def _draw_fig4(findings: Findings) -> "Figure":
    figure = new_figure(10.5, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind, title in zip(panels, ("plain", "equalizer"), ("no equalizer", "equalizer"), strict=True):
        style_axes(axes, title, "step", "gradient norm over its median" if kind == "plain" else "")
        axes.set_yscale("log")
        for sampler in SAMPLERS:
            rows = findings.select("fig4", "spread", f"{sampler}, {kind}")
            if not rows:
                continue
            norms = [mean(column) for column in zip(*(_over_median(row.parts) for row in rows), strict=True)]
            _line(axes, range(1, len(norms) + 1), norms, sampler)
            if gains := findings.select("fig4", "slope", f"{sampler}, {kind}"):
                predicted = _over_median(gains[0].parts)
                axes.plot(range(1, len(predicted) + 1), predicted, color=COLOUR[sampler], linestyle=":", linewidth=1.2)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _over_median(values: Sequence[float]) -> list[float]:
    middle = sorted(values)[(len(values) - 1) // 2]
    return [value / middle for value in values]


def _draw_fig3(findings: Findings) -> "Figure":
    samplers = [name for name in SAMPLERS if findings.select("fig3", "area", name)]
    figure = new_figure(3.2 * max(1, len(samplers)), 3.4)
    panels = figure.subplots(1, max(1, len(samplers)), sharey=True, squeeze=False)[0]
    for axes, sampler in zip(panels, samplers, strict=False):
        style_axes(axes, sampler, "update", "reward of the batch" if axes is panels[0] else "")
        for arm, label, colour in (
            (sampler, "equalizer", COLOURS[0]),
            (f"{sampler}-plain", "no equalizer", COLOURS[1]),
        ):
            curves = [row.parts for row in findings.select("fig3", "area", arm)]
            columns = list(zip(*curves, strict=False))
            if not columns:
                continue
            middle = [mean(column) for column in columns]
            spread = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
            x = range(1, len(middle) + 1)
            axes.plot(x, middle, color=colour, label=label, linewidth=1.5)
            low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _draw_arms(experiment: Experiment, findings: Findings) -> "Figure":
    quantity = experiment.drawn
    arms = [arm for arm in experiment.arms if findings.select(experiment.key, quantity, arm)]
    figure = new_figure(8, 0.9 + 0.36 * max(2, len(arms)))
    axes = figure.subplots()
    style_axes(axes, experiment.title, quantity.removeprefix("final_"))
    if quantity == "kl_share":
        axes.set_xscale("log")
    for place, arm in enumerate(reversed(arms)):
        values = [row.value for row in findings.select(experiment.key, quantity, arm)]
        axes.plot(values, [place] * len(values), "o", color=COLOURS[0], alpha=0.55, ms=5, markeredgewidth=0)
        axes.plot([mean(values)] * 2, [place - 0.3, place + 0.3], color="#1d232b", linewidth=2)
    axes.set_yticks(range(len(arms)), list(reversed(arms)), fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#e3e7ec")
    return figure
