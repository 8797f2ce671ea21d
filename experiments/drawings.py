"""The figures of a study, drawn from its findings alone, so that committed results give
the same pictures.
"""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from experiments.claims import Experiment
from experiments.findings import Findings
from experiments.measures import SAMPLERS
from sage_fast.run.plots import COLOURS, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR: dict[str, str] = dict(zip((*SAMPLERS, "ode"), COLOURS, strict=False))
"""Of a sampler, the same in all figures."""


def draw_experiment(experiment: Experiment, findings: Findings) -> "Figure":
    """The figure of an experiment that has findings."""
    if experiment.key in SPECIAL:
        return SPECIAL[experiment.key](findings)
    return (_draw_rates if experiment.rates else _draw_arms)(experiment, findings)


def _panels(
    width: float, height: float, *labels: tuple[str, ...], **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure with one panel for each title, label of x and label of y."""
    figure = new_figure(width, height)
    panels = list(figure.subplots(1, len(labels), squeeze=False, **options)[0])
    for axes, label in zip(panels, labels, strict=True):
        style_axes(axes, *label)
    return figure, panels


def _legend(axes: "Axes", **options: Any) -> None:
    axes.legend(frameon=False, fontsize=8, **options)


def _line(axes: "Axes", x: Sequence[float], y: Sequence[float], sampler: str) -> None:
    # Where lines lie on each other, the first sampler of the legend is on top.
    order = 3 - list(COLOUR).index(sampler) / len(COLOUR)
    axes.plot(
        x,
        y,
        label=sampler,
        color=COLOUR[sampler],
        marker="o",
        ms=3.5,
        linewidth=1.5,
        zorder=order,
    )


def _lines_over(
    axes: "Axes", findings: Findings, experiment: str, quantity: str, setting: str
) -> None:
    """One line per sampler: means of a quantity over the settings in `SAMPLER,
    SETTING=VALUE`.
    """
    for sampler in SAMPLERS:
        arms = findings.arms(experiment, quantity, f"{sampler}, {setting}=")
        x = [float(arm.rpartition("=")[2]) for arm in arms]
        _line(
            axes, x, [findings.mean(experiment, quantity, arm) for arm in arms], sampler
        )


def _draw_table1(findings: Findings) -> "Figure":
    figure, (left, right) = _panels(
        9.5,
        3.6,
        ("variance from sigma 0.9 up", "steps T", "variance"),
        ("noise of the last step", "steps T", "standard deviation"),
    )
    for axes, quantity in ((left, "high_noise_variance"), (right, "last")):
        _lines_over(axes, findings, "table1", quantity, "T")
        axes.set_xscale("log")
        axes.set_xticks([10, 20, 40, 100], ["10", "20", "40", "100"])
        axes.minorticks_off()
    left.set_yscale("log")
    _legend(left)
    return figure


def _draw_fig1a(findings: Findings) -> "Figure":
    title = "noise per step: T = 20, shift 5, eta 0.5"
    figure, (axes,) = _panels(7.5, 3.8, (title, "step", "standard deviation"))
    for sampler in SAMPLERS:
        parts = findings.parts("fig1a", "std", sampler)
        _line(axes, range(1, len(parts) + 1), parts, sampler)
    axes.set_xticks(range(1, 21, 2))
    _legend(axes)
    return figure


def _draw_fig9(findings: Findings) -> "Figure":
    figure, (axes,) = _panels(
        6.5, 3.6, ("variance from sigma 0.9 up", "shift", "variance")
    )
    _lines_over(axes, findings, "fig9", "high_noise_variance", "shift")
    axes.set_yscale("log")
    _legend(axes, loc="center right", bbox_to_anchor=(1.0, 0.36))
    return figure


def _draw_fig2(findings: Findings) -> "Figure":
    steps = sorted(
        {
            int(arm.split("T=")[1].split(",")[0])
            for arm in findings.arms("fig2", "distance")
        }
    )
    labels = [
        (f"T = {count}", "distinct videos from one start", "distance")
        for count in steps
    ]
    figure, panels = _panels(9.5, 3.8, *labels)
    for axes, count in zip(panels, steps, strict=True):
        for sampler in SAMPLERS:
            arms = findings.arms("fig2", "distance", f"{sampler}, T={count}, ")
            arms.sort(key=lambda arm: float(arm.rpartition("=")[2]))
            x, y = (
                [findings.mean("fig2", name, arm) for arm in arms]
                for name in ("exploration", "distance")
            )
            _line(axes, x, y, sampler)
        axes.axhline(0.02, color="#66717e", linewidth=1, linestyle="--")
        axes.set_yscale("log")
    _legend(panels[0])
    return figure


def _draw_fig4(findings: Findings) -> "Figure":
    labels = (
        ("no equalizer", "step", "gradient norm over its median"),
        ("equalizer", "step"),
    )
    figure, panels = _panels(10.5, 3.8, *labels, sharey=True)
    for axes, kind in zip(panels, ("plain", "equalizer"), strict=True):
        axes.set_yscale("log")
        for sampler in SAMPLERS:
            rows = findings.select("fig4", "spread", f"{sampler}, {kind}")
            norms = [
                mean(column)
                for column in zip(
                    *(_over_median(row.parts) for row in rows), strict=True
                )
            ]
            _line(axes, range(1, len(norms) + 1), norms, sampler)
            if gains := findings.select("fig4", "slope", f"{sampler}, {kind}"):
                predicted = _over_median(gains[0].parts)
                axes.plot(
                    range(1, len(predicted) + 1),
                    predicted,
                    color=COLOUR[sampler],
                    linestyle=":",
                    linewidth=1.2,
                )
    _legend(panels[0])
    return figure


def _over_median(values: Sequence[float]) -> list[float]:
    middle = sorted(values)[(len(values) - 1) // 2]
    return [value / middle for value in values]


SPECIAL: "dict[str, Callable[[Findings], Figure]]" = {
    "table1": _draw_table1,
    "fig1a": _draw_fig1a,
    "fig9": _draw_fig9,
    "fig2": _draw_fig2,
    "fig4": _draw_fig4,
}
"""Experiment -> what draws it; the others are drawn by their rates or arms."""


def _draw_rates(experiment: Experiment, findings: Findings) -> "Figure":
    """Aligned videos against drift: a line through the rates of an arm, a large dot
    where it is judged.
    """
    figure, (axes,) = _panels(
        10.5,
        1.6 + 0.3 * max(10, len(experiment.runs)),
        (experiment.title, "drift", "aligned"),
    )
    pair = ("final_drift", "final_aligned")
    for number, arm in enumerate(experiment.runs):
        tried = findings.arms(experiment.key, "final_drift", f"{arm} @ ")
        points = [[findings.mean(experiment.key, q, at) for at in tried] for q in pair]
        colour = COLOURS[number % len(COLOURS)]
        dashes = "--" if number >= len(COLOURS) else "-"
        axes.plot(
            *points, color=colour, linestyle=dashes, marker=".", ms=4, linewidth=1
        )
        x, y = (findings.mean(experiment.key, q, arm) for q in pair)
        label = f"{arm} @ {findings.mean(experiment.key, 'rate', arm):g}"
        axes.plot(x, y, "so"[number < len(COLOURS)], color=colour, ms=8, label=label)
    axes.set_xscale("log")
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_arms(experiment: Experiment, findings: Findings) -> "Figure":
    quantity = experiment.drawn
    names = experiment.arms or tuple(experiment.runs) or SAMPLERS
    arms = [
        arm for arm in reversed(names) if findings.select(experiment.key, quantity, arm)
    ]
    label = (experiment.title, quantity.removeprefix("final_").replace("_", " "))
    figure, (axes,) = _panels(8, 0.9 + 0.36 * max(2, len(arms)), label)
    if quantity == "kl_share":
        axes.set_xscale("log")
    for place, arm in enumerate(arms):
        values = [row.value for row in findings.select(experiment.key, quantity, arm)]
        axes.plot(
            values,
            [place] * len(values),
            "o",
            color=COLOURS[0],
            alpha=0.55,
            ms=5,
            markeredgewidth=0,
        )
        axes.plot(
            [mean(values)] * 2, [place - 0.3, place + 0.3], color="#1d232b", linewidth=2
        )
    axes.set_yticks(range(len(arms)), arms, fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#e3e7ec")
    return figure
