"""Pictures for people: contact sheets (PNG), film strips (JPEG), animations (GIF) and the reward curve of a run.

Videos are uint8 tensors (F, 3, H, W), RGB. Every file appears whole or not at all. A sheet whose captions cannot all be
drawn, because no font has the script, has a text file of the same name beside it that holds them, numbered.
"""

import io
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from sage_fast.config.files import replacing, write_text
from sage_fast.models.video_files import video_frames
from sage_fast.run.lettering import Lettering, legible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The short side of a sheet's frames: tiny frames grow to at most the first by an integer factor, large ones
# shrink to the second.
SMALL_FRAME_SIDE = 128
LARGE_FRAME_SIDE = 144

SHOWN_FRAMES = 8
"""Of each video of a sheet or strip, spread evenly from the first to the last; a shorter one shows all."""
ANIMATED_FRAMES = 32
"""Of a longer video so many are taken, evenly, and shown the longer."""


def filmstrip(video: Tensor) -> bytes:
    """`SHOWN_FRAMES` of a video side by side, at the size of a contact sheet, as a JPEG file.

    Args:
        video: (F, 3, H, W) uint8 RGB.

    Raises:
        ValueError: another shape or dtype.
    """
    strip = _Strip("", video_frames(video, "video"))
    images = strip.images(_spread(len(strip.frames), SHOWN_FRAMES))
    width, height = strip.cell
    # A thin grey line between frames can be seen on a light page and on a dark one.
    whole = Image.new("RGB", (len(images) * (width + 2) - 2, height), FAINT_INK)
    for column, image in enumerate(images):
        whole.paste(image, (column * (width + 2), 0))
    buffer = io.BytesIO()
    # Full chroma: the colours of a small shape would otherwise run over its edge.
    whole.save(buffer, format="JPEG", quality=90, subsampling=0)
    return buffer.getvalue()


def animation(video: Tensor, fps: float) -> tuple[bytes, tuple[int, int]]:
    """A video as an animated GIF at the size of a contact sheet, for what shows pictures alone.

    Args:
        video: (F, 3, H, W) uint8 RGB. fps: frames per second.

    Returns:
        The file, and its width and height in pixels.
    """
    strip = _Strip("", video_frames(video, "video"))
    images = strip.images(_spread(len(strip.frames), ANIMATED_FRAMES))
    buffer = io.BytesIO()
    duration = 1000 * len(strip.frames) / (fps * len(images))
    images[0].save(buffer, format="GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
    return buffer.getvalue(), strip.cell


def contact_sheet(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Tensor]],
    title: str | None = None,
) -> None:
    """Write a PNG with one row per video: its caption, then `SHOWN_FRAMES`.

    Args:
        path: the file to write; missing folders are created.
        rows: (caption, video (F, 3, H, W) uint8 RGB); sizes and lengths may differ between rows.
        title: a line above the rows.

    Raises:
        ValueError: no rows, or a video of another shape or dtype.
        OSError: the folder cannot be written to.
    """
    groups = [_Group(caption, [_Strip("", video_frames(video, f"video {caption!r}"))]) for caption, video in rows]
    _draw_sheet(path, groups, title)


def before_after_sheet(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Tensor, Tensor]],
    title: str | None = None,
    labels: tuple[str, str] = ("before", "after"),
) -> None:
    """Write a PNG with two strips of frames per prompt, the second under the first.

    Args:
        path: the file to write; missing folders are created.
        rows: (caption, video before, video after), each video (F, 3, H, W) uint8 RGB.
        title: a line above the rows.
        labels: what the two strips are called.

    Raises:
        ValueError: no rows, or a video of another shape or dtype.
        OSError: the folder cannot be written to.
    """
    groups = [
        _Group(
            caption,
            [
                _Strip(label, video_frames(video, f"video {caption!r} ({label})"))
                for label, video in zip(labels, (before, after), strict=True)
            ],
        )
        for caption, before, after in rows
    ]
    _draw_sheet(path, groups, title)


def plot_reward(
    path: str | os.PathLike[str], metrics: Sequence[Mapping[str, Any]], lower_is_better: Collection[str] = ()
) -> None:
    """Plot the reward of a run over its optimizer updates as a PNG.

    The large panel shows ``eval/reward_mean`` with a band of one ``eval/reward_stderr``, and ``reward/mean``
    with a band of one ``reward/std``. Every other ``eval/<name>_mean`` gets a small panel with its own scale.

    Args:
        path: the file to write; missing folders are created.
        metrics: records as ``sage_fast.run.metrics.read_metrics`` returns them.
        lower_is_better: names of the scores that fall as videos get better; their panels say so.

    Raises:
        ValueError: no record holds ``eval/reward_mean`` or ``reward/mean``.
        OSError: the folder cannot be written to.
    """
    from matplotlib.figure import Figure

    evaluated = Curve.read(metrics, "eval/reward_mean", "eval/reward_stderr")
    trained = Curve.read(metrics, "reward/mean", "reward/std")
    if not evaluated.updates and not trained.updates:
        raise ValueError(
            f"nothing to plot: none of {len(metrics)} records holds 'eval/reward_mean' or 'reward/mean'; "
            "check that the run has finished its first update"
        )
    names = sorted(
        {key[5:-5] for row in metrics for key in row if key.startswith("eval/") and key.endswith("_mean")} - {"reward"}
    )

    columns = min(len(names), 4) or 1
    small_rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(9, 4.6 + 2.1 * small_rows), dpi=150, layout="constrained")
    grid = figure.add_gridspec(1 + small_rows, columns, height_ratios=[2.2] + [1] * small_rows)

    axes = figure.add_subplot(grid[0, :])
    _style(axes)
    trained.draw(axes, "#8c96a3", "training batch (±1 std)", marker=False)
    evaluated.draw(axes, "#0b6bcb", "evaluation (±1 standard error)", marker=True)
    axes.set_xlabel("optimizer update")
    axes.set_ylabel("reward")
    axes.set_title(_headline(evaluated, trained), loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, loc="best", fontsize=9)

    for position, name in enumerate(names):
        panel = figure.add_subplot(grid[1 + position // columns, position % columns])
        _style(panel, max_ticks=4)
        curve = Curve.read(metrics, f"eval/{name}_mean", f"eval/{name}_stderr")
        curve.draw(panel, "#0b6bcb", None, marker=True)
        title = name.replace("_", " ") + (" ↓" if name in lower_is_better else "")
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_xlabel("update", fontsize=8)
        panel.tick_params(labelsize=8)

    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


@dataclass(frozen=True)
class _Strip:
    label: str
    frames: np.ndarray  # (F, H, W, 3)

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of one frame on the sheet."""
        height, width = self.frames.shape[1:3]
        short = min(height, width)
        if short <= SMALL_FRAME_SIDE:
            factor = SMALL_FRAME_SIDE // short
            return width * factor, height * factor
        scale = min(1.0, LARGE_FRAME_SIDE / short)
        return round(width * scale), round(height * scale)

    def images(self, indices: Sequence[int]) -> list[Image.Image]:
        enlarged = self.cell[1] >= self.frames.shape[1]
        filter_ = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
        return [Image.fromarray(self.frames[index]).resize(self.cell, filter_) for index in indices]


@dataclass(frozen=True)
class _Group:
    caption: str
    strips: list[_Strip]


MARGIN = 20
FRAME_GAP = 6
STRIP_GAP = 6
GROUP_GAP = 18
CAPTION_WIDTH = 220
LABEL_WIDTH = 64
CAPTION, LABEL = Lettering(15), Lettering(14)
INK, FAINT_INK, RULE = "#1d232b", "#7a8593", "#e3e7ec"


def _draw_sheet(path: str | os.PathLike[str], groups: Sequence[_Group], title: str | None) -> None:
    if not groups:
        raise ValueError("a sheet needs at least one row of videos, and got none")

    captions = [_caption(group.caption, number) for number, group in enumerate(groups, 1)]
    strips = [strip for group in groups for strip in group.strips]
    shown = [_spread(len(strip.frames), SHOWN_FRAMES) for strip in strips]
    cell_width = max(strip.cell[0] for strip in strips)
    frames_left = MARGIN + CAPTION_WIDTH + (LABEL_WIDTH if any(strip.label for strip in strips) else 0)
    width = frames_left + max(map(len, shown)) * (cell_width + FRAME_GAP) - FRAME_GAP + MARGIN
    # Frame numbers stand over the columns where they hold for every row.
    numbered = all(indices == shown[0] for indices in shown)
    numbers_height = 20 if numbered else 0
    top = MARGIN + (38 if title else 0)
    heights = [sum(s.cell[1] for s in g.strips) + STRIP_GAP * (len(g.strips) - 1) for g in groups]
    height = top + numbers_height + sum(heights) + GROUP_GAP * (len(groups) - 1) + MARGIN

    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    if title:
        head = Lettering(20, bold=True)
        head.draw(draw, (MARGIN, MARGIN + 9), head.shorten(legible(title), width - 2 * MARGIN), INK)

    if numbered:
        small = Lettering(12)
        for column, index in enumerate(shown[0]):
            text, x = f"frame {index}", frames_left + column * (cell_width + FRAME_GAP)
            small.draw(draw, (x + (cell_width - small.length(text)) / 2, top + 6), text, FAINT_INK)

    y = top + numbers_height
    indices_of = iter(shown)
    for number, (group, group_height) in enumerate(zip(groups, heights, strict=True)):
        if number:
            draw.line((MARGIN, y - GROUP_GAP // 2, width - MARGIN, y - GROUP_GAP // 2), RULE)
        line_height = 20
        lines = CAPTION.wrap(captions[number], CAPTION_WIDTH - MARGIN, max(1, group_height // line_height))
        text_top = y + (group_height - line_height * len(lines)) / 2
        for row, line in enumerate(lines):
            CAPTION.draw(draw, (MARGIN, text_top + line_height * (row + 0.5)), line, INK)
        for strip in group.strips:
            if strip.label:
                LABEL.draw(draw, (MARGIN + CAPTION_WIDTH, y + strip.cell[1] / 2), strip.label, FAINT_INK)
            for column, image in enumerate(strip.images(next(indices_of))):
                left = frames_left + column * (cell_width + FRAME_GAP) + (cell_width - image.width) // 2
                sheet.paste(image, (left, y))
                # A white frame would otherwise have no edge.
                draw.rectangle((left - 1, y - 1, left + image.width, y + image.height), outline=RULE)
            y += strip.cell[1] + STRIP_GAP
        y += GROUP_GAP - STRIP_GAP
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")
    if captions != [group.caption for group in groups]:
        write_text(Path(path).with_suffix(".txt"), "".join(f"{n}. {g.caption}\n" for n, g in enumerate(groups, 1)))


def _caption(text: str, number: int) -> str:
    """What is drawn beside a row. Where no font has all of the text, its number leads to the text file."""
    found = legible(text)
    return found if found == text else f"{number}. {found}"


def _spread(num_frames: int, max_frames: int) -> list[int]:
    """Indices of at most ``max_frames`` frames, evenly from the first to the last."""
    count = min(num_frames, max_frames)
    return [round(i * (num_frames - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]


@dataclass(frozen=True)
class Curve:
    """A metric over updates. ``spread`` is its band's half width, 0 where a record has none."""

    updates: list[int]
    values: list[float]
    spread: list[float]

    @classmethod
    def read(cls, metrics: Sequence[Mapping[str, Any]], key: str, spread_key: str) -> "Curve":
        # The later record of an update wins.
        rows = {row["update"]: row for row in metrics if row.get(key) is not None}
        ordered = [rows[update] for update in sorted(rows)]
        return cls(
            updates=sorted(rows),
            values=[float(row[key]) for row in ordered],
            spread=[float(row.get(spread_key) or 0.0) for row in ordered],
        )

    def draw(self, axes: "Axes", colour: str, label: str | None, *, marker: bool) -> None:
        if not self.updates:
            return
        values, spread = np.array(self.values), np.array(self.spread)
        # Dots vanish into the line where there are many of them.
        dot = "o" if (marker and len(self.updates) <= 60) or len(self.updates) == 1 else None
        axes.fill_between(self.updates, values - spread, values + spread, color=colour, alpha=0.16, linewidth=0)
        axes.plot(
            self.updates,
            values,
            color=colour,
            label=label,
            marker=dot,
            markersize=4,
            linewidth=2 if marker else 1.2,
        )


def _style(axes: "Axes", max_ticks: int = 9) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(max_ticks, integer=True))
    axes.margins(x=0.02)


def _headline(evaluated: Curve, trained: Curve) -> str:
    name, curve = ("Evaluation", evaluated) if evaluated.updates else ("Training", trained)
    first, last = curve.values[0], curve.values[-1]
    if len(curve.values) == 1:
        return f"{name} reward {first:.3f} at update {curve.updates[0]}"
    updates = curve.updates[-1] - curve.updates[0]
    return f"{name} reward {first:.3f} → {last:.3f} ({last - first:+.3f} over {updates} updates)"
