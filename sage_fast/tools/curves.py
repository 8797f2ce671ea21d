"""Plots that several commands share: curves of arms with bands over their seeds, written the same way every time."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast.config.files import replacing
from sage_fast.tools.arms import Arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6bcb", "#d1571b", "#2a8a57", "#8a4fbf", "#8c96a3", "#b8902a", "#c43e77", "#3aa3a8", "#5b4636")
"""Of the arms, in their order; after the last one again from the first, dashed."""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def style_axes(axes: "Axes", title: str = "", x: str = "", y: str = "") -> None:
    """The look of every plot: no box, a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the arm with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": "--" if number >= len(COLOURS) else "-"}


def draw_arms(axes: "Axes", arms: Sequence[Arm], key: str) -> None:
    """A metric of every arm over its updates: the mean over its seeds, in a band of one standard deviation of them."""
    for number, arm in enumerate(arms):
        updates, means, spreads = arm.band(key)
        if not updates:
            continue
        style = line_style(number)
        axes.plot(
            updates, means, label=arm.name, linewidth=1.6, marker="o" if len(updates) < 15 else None, ms=3, **style
        )
        low = [m - s for m, s in zip(means, spreads, strict=True)]
        high = [m + s for m, s in zip(means, spreads, strict=True)]
        axes.fill_between(updates, low, high, color=style["color"], alpha=0.15, linewidth=0)


def to_png(figure: "Figure") -> bytes:
    """The figure as a PNG file."""
    return _render(figure, "png", {"Software": None})


def to_svg(figure: "Figure") -> bytes:
    """The figure as an SVG file: the same bytes every time, so without a date and with fixed names inside."""
    return _render(figure, "svg", {"Date": None, "Creator": None})


def save_figure(folder: str | os.PathLike[str], name: str, figure: "Figure") -> list[Path]:
    """Write NAME.png and NAME.svg, and return their paths. OSError when the folder cannot be written."""
    files = [(Path(folder) / f"{name}.png", to_png(figure)), (Path(folder) / f"{name}.svg", to_svg(figure))]
    for path, data in files:
        with replacing(path) as partial:
            partial.write_bytes(data)
    return [path for path, _ in files]


def _render(figure: "Figure", kind: str, metadata: dict[str, None]) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "sage-fast", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
