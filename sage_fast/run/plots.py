"""Figures of runs and studies: curves with bands, the reward of a run, and the files
and pages that they go into.

A figure in a page is inline SVG whose colours are the page's CSS variables, so that it
follows light and dark.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#0b6bcb",
    "#d1571b",
    "#2a8a57",
    "#8a4fbf",
    "#8c96a3",
    "#b8902a",
    "#c43e77",
    "#3aa3a8",
    "#5b4636",
)
"""Of lines, in their order; after the last one again from the first, dashed."""
GREY = 4
"""Number of the grey among them, for what is context."""

RULE = "#e3e7ec"
FAINT = "#7a8593"
GAIN = "#0a7a4b"
LOSS = "#b3362b"

CSS_NAMES = {
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
    **{
        RULE: "var(--rule)",
        FAINT: "var(--faint)",
        GAIN: "var(--gain)",
        LOSS: "var(--loss)",
    },
}

MAX_POINTS = 500
"""Points of a line; longer ones are averaged, so that a page stays small however long
the run.
"""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a figure.

    Attributes:
        x, y: N numbers each, x ascending.
        spread: N half widths of its band, or none.
        colour: number of its colour.
        dots: mark every point.

    Example: `Line(label="evaluation", x=[0, 10], y=[0.2, 0.3], spread=[0.1, 0.1])`
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    colour: int = 0
    dots: bool = False


def metric_line(
    rows: Rows,
    key: str,
    label: str = "",
    *,
    spread: str = "",
    colour: int = 0,
    dots: bool = False,
) -> Line:
    """A metric over updates, in a band of plus and minus another one where that is
    logged.

    Where two rows of an update have the metric, the later one counts.
    """
    found = {row["update"]: row for row in rows if row.get(key) is not None}
    kept = [found[update] for update in sorted(found)]
    return Line(
        label=label,
        x=sorted(found),
        y=[float(row[key]) for row in kept],
        spread=[float(row.get(spread) or 0.0) for row in kept],
        colour=colour,
        dots=dots,
    )


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    # Not at the top: half a second that most commands do not need.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def style_axes(axes: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    """The look of every plot: no box, a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def draw_lines(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw lines with their bands; empty ones are left out."""
    for line in lines:
        if not line.x:
            continue
        # (3, N): x, y and half width. Neighbours are averaged where there are more than
        # fit.
        points = np.array(
            [line.x, line.y, line.spread or [0.0] * len(line.x)], dtype=np.float64
        )
        parts = np.array_split(points, min(len(line.x), MAX_POINTS), axis=1)
        x, y, spread = np.stack([part.mean(axis=1) for part in parts], axis=1)
        # Dots vanish into the line where there are many of them, and a line of one
        # point is nothing without.
        marker = "o" if len(x) == 1 or (line.dots and len(x) <= 60) else None
        colour = COLOURS[line.colour % len(COLOURS)]
        dashes = "--" if line.colour >= len(COLOURS) else "-"
        axes.plot(
            x,
            y,
            label=line.label,
            marker=marker,
            markersize=3.5,
            linewidth=1.6,
            color=colour,
            linestyle=dashes,
        )
        if any(line.spread):
            axes.fill_between(
                x, y - spread, y + spread, color=colour, alpha=0.16, linewidth=0
            )


def line_chart(
    lines: Sequence[Line],
    *,
    level: float | None = None,
    from_zero: bool = False,
    second_axis: Callable[[float], str] | None = None,
) -> str:
    """Lines over updates as inline SVG; an empty text where no line has a point.

    Args:
        level: a dashed line at this height, such as 1 for a ratio.
        from_zero: begin the axis at 0.
        second_axis: what stands below the number of an update.
    """
    if not any(line.x for line in lines):
        return ""
    figure = _chart_figure(second_axis is not None)
    (axes,) = figure.axes
    # All charts share this figure: what the last one has drawn goes, and so do its
    # limits.
    for artist in (*axes.lines, *axes.collections):
        artist.remove()
    axes.relim()
    axes.autoscale()
    draw_lines(axes, lines)
    if second_axis is not None:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}\n{second_axis(x)}")
    if level is not None:
        axes.axhline(level, color=FAINT, linestyle="--", linewidth=0.8)
    if from_zero and min(min(line.y, default=0.0) for line in lines) >= 0:
        axes.set_ylim(bottom=0.0)
    return inline_svg(figure)


@cache
def _chart_figure(two_axes: bool) -> "Figure":
    """The figure of all charts of a page: to make axes and ticks takes as long as to
    draw them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    width = 3.5
    height = 1.9
    figure = Figure(figsize=(width, height))
    # Fixed margins: a constrained layout would be computed for every chart.
    below = 0.45 if two_axes else 0.3
    axes = figure.add_axes(
        (0.62 / width, below / height, 1 - 0.72 / width, 1 - (below + 0.1) / height)
    )
    style_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(left=False, bottom=False, labelcolor=FAINT, labelsize=8)
    axes.spines[:].set_color(FAINT)
    return figure


def score_lines(rows: Rows, name: str, mean: str) -> list[Line]:
    """A score over the updates, in training, by that metric, and in evaluation."""
    eval_mean = f"eval/{name}_mean"
    stderr = f"eval/{name}_stderr"
    return [
        metric_line(rows, mean, "training batch", colour=GREY),
        metric_line(
            rows, eval_mean, "evaluation ± 1 standard error", spread=stderr, dots=True
        ),
    ]


def reward_figure(rows: Rows) -> "Figure":
    """The reward of a run over its updates, in training and evaluation."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    style_axes(axes, "Reward", "optimizer update", "reward")
    draw_lines(axes, score_lines(rows, "reward", "reward/mean"))
    # there is no half of an update
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9)
    return figure


# --------------------------------------------------------------------------------------
# files


def figure_file(figure: "Figure", kind: str, fonttype: str = "path") -> bytes:
    """The figure as a `png` or `svg` file: the same bytes every time, so without a date
    and with fixed names inside.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with rc_context({"svg.hashsalt": "sage-fast", "svg.fonttype": fonttype}):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def inline_svg(figure: "Figure") -> str:
    """The figure as an element of a page, in the page's colours and font."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = figure_file(figure, "svg", fonttype="none").decode()
    # The page says how large it is and in which font; the XML around the element, its
    # style and metadata say the rest.
    unwanted = r'\A.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;]*;| (width|height)="[^"]*pt"'
    text = re.sub(unwanted, "", text, flags=re.S)
    return re.sub("|".join(CSS_NAMES), lambda found: CSS_NAMES[found[0]], text)
