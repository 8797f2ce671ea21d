"""Pictures of videos for people: contact sheets (PNG) and animations (GIF).

Videos are uint8 tensors (F, 3, H, W), RGB. Every file appears whole or not at all.
"""

import io
import math
import os
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from warnings import catch_warnings, simplefilter

import numpy as np
from PIL import Image
from torch import Tensor

from sage_fast.config.files import replacing
from sage_fast.models.video_files import video_frames
from sage_fast.run.plots import GAIN, LOSS

# The short side of a shown frame: tiny frames grow to at most the first by an integer factor, large ones shrink to the
# second.
SMALL_FRAME_SIDE = 128
LARGE_FRAME_SIDE = 144

SHOWN_FRAMES = 8
"""Of each video of a sheet, spread evenly from the first to the last; a shorter one shows all."""
ANIMATED_FRAMES = 32
"""Of a longer video so many are taken, evenly, and shown the longer."""

INK, FAINT = "#1d232b", "#7a8593"
MARGIN, GAP, LABEL_WIDTH, LINE_HEIGHT = 20, 6, 64, 20
DPI = 100

GRID_WIDTH, GRID_GAP, GRID_LINE = 1660, 24, 26
GRID_MARK = 24
"""Pixels for the tick beside a strip of a grid."""
GRID_FRAMES = 3
GRID_COLUMNS = 10
"""Width of a Latin letter of a caption."""

Text = tuple[float, float, str, str, int]
"""x, y of its middle, text, colour, size."""
Place = tuple[int, int, np.ndarray]
"""x, y of its top, picture."""


def animation(video: Tensor, fps: float) -> tuple[bytes, tuple[int, int]]:
    """A video as an animated GIF at the size of a contact sheet, for programs that show pictures alone.

    Args:
        video: (F, 3, H, W) uint8 RGB. fps: frames per second.

    Returns:
        The file, and its width and height in pixels.
    """
    images = [Image.fromarray(frame) for frame in _shown(video, "video", ANIMATED_FRAMES)]
    buffer = io.BytesIO()
    duration = 1000 * len(video) / (fps * len(images))
    images[0].save(buffer, format="GIF", save_all=True, append_images=images[1:], duration=duration, loop=0)
    return buffer.getvalue(), images[0].size


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A prompt of a grid. before, after: (F, 3, H, W) uint8 RGB. marks: whether each shows what was asked, or None.

    Example: `GridCell(caption="a red circle", before=first, after=last, marks=(False, True))`
    """

    caption: str
    before: Tensor
    after: Tensor
    marks: tuple[bool, bool] | None = None


def before_after_grid(path: str | os.PathLike[str], cells: Sequence[GridCell], title: str) -> None:
    """Write a PNG with first, middle and last frame of every prompt, before above after, ticked where it is marked.

    It is twice as wide as a README shows it. ValueError for no cells, or a video of another shape or dtype.
    """
    if not cells:
        raise ValueError("a grid needs at least one prompt, and got none")
    columns = min(6, math.ceil(math.sqrt(len(cells))))
    across = (GRID_WIDTH - 2 * MARGIN + GRID_GAP) // columns
    side = (across - GRID_GAP - GRID_MARK) // GRID_FRAMES - 2
    texts: list[Text] = []
    places: list[Place] = []
    top = MARGIN
    for line in _wrapped(title, GRID_WIDTH - 2 * MARGIN, most=3, columns=GRID_COLUMNS):
        texts.append((MARGIN, top + GRID_LINE / 2, line, INK, 15))
        top += GRID_LINE
    top += GRID_GAP
    for row in range(0, len(cells), columns):
        shown = cells[row : row + columns]
        captions = [_wrapped(c.caption, across - GRID_MARK // 2, most=2, columns=GRID_COLUMNS) for c in shown]
        y = top + GRID_LINE * max(map(len, captions))
        for place, (cell, caption) in enumerate(zip(shown, captions, strict=True)):
            x = MARGIN + place * across
            texts += [(x, top + (n + 0.5) * GRID_LINE, line, INK, 13) for n, line in enumerate(caption)]
            below = y
            for number, video in enumerate((cell.before, cell.after)):
                strip = _beside(_shown(video, f"video {cell.caption!r}", GRID_FRAMES, width=side), gap=2)
                places.append((x, below, strip))
                if cell.marks is not None:
                    sign, colour = ("\N{CHECK MARK}", GAIN) if cell.marks[number] else ("\N{BALLOT X}", LOSS)
                    texts.append((x + strip.shape[1] + 4, below + strip.shape[0] / 2, sign, colour, 18))
                below += strip.shape[0] + 4
        top = max(top_of + strip.shape[0] for _, top_of, strip in places) + GRID_GAP
    _write_sheet(path, GRID_WIDTH, top, texts, places)


def contact_sheet(
    path: str | os.PathLike[str], rows: Sequence[tuple[str, Mapping[str, Tensor]]], title: str = ""
) -> None:
    """Write a PNG with a caption and strips of `SHOWN_FRAMES` for every row, such as before and after.

    Args:
        path: the file to write; missing folders are created.
        rows: (caption, label -> video (F, 3, H, W) uint8 RGB); sizes and lengths may differ.
        title: a line above the rows.

    Raises:
        ValueError: no rows, or a video of another shape or dtype.
        OSError: the folder cannot be written to.
    """
    if not rows:
        raise ValueError("a sheet needs at least one row of videos, and got none")
    groups = [
        (caption, [(label, _shown(video, f"video {caption!r} ({label})", SHOWN_FRAMES)) for label, video in by.items()])
        for caption, by in rows
    ]
    strips = [(label, _beside(frames, gap=GAP)) for _, group in groups for label, frames in group]
    left = MARGIN + (LABEL_WIDTH if any(label for label, _ in strips) else 0)
    width = left + max(strip.shape[1] for _, strip in strips) + MARGIN
    texts: list[Text] = []
    places: list[Place] = []
    y = MARGIN
    if title:
        texts.append((MARGIN, y, _wrapped(title, width - 2 * MARGIN, most=1)[0], INK, 13))
        y += 2 * LINE_HEIGHT
    following = iter(strips)
    for caption, group in groups:
        for line in _wrapped(caption, width - 2 * MARGIN, most=3):
            texts.append((MARGIN, y, line, INK, 11))
            y += LINE_HEIGHT
        for _ in group:
            label, strip = next(following)
            texts.append((MARGIN, y + strip.shape[0] / 2, label, FAINT, 10))
            places.append((left, y, strip))
            y += strip.shape[0] + GAP
        y += MARGIN
    _write_sheet(path, width, y, texts, places)


def _write_sheet(
    path: str | os.PathLike[str], width: int, height: int, texts: Sequence[Text], places: Sequence[Place]
) -> None:
    """Write a PNG of so many pixels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    with rc_context({"font.family": ["DejaVu Sans", *_other_fonts()]}), catch_warnings():
        # A character that no font has is a box; the page of the run and the names of the files have it.
        simplefilter("ignore")
        for x, top, strip in places:
            figure.figimage(strip, xo=x, yo=height - top - strip.shape[0], origin="upper")
        for text_x, middle, text, colour, size in texts:
            # No mathematics: a prompt may hold dollars.
            at = text_x / width, 1 - middle / height
            figure.text(*at, text, color=colour, size=size, va="center", parse_math=False)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


@cache
def _other_fonts() -> list[str]:
    """Fonts for scripts that matplotlib's own lacks, as far as they are installed."""
    from matplotlib.font_manager import fontManager

    wanted = ("Noto Sans CJK", "Noto Sans Arabic", "Noto Sans", "WenQuanYi", "Arial Unicode", "Microsoft YaHei")
    names = sorted({font.name for font in fontManager.ttflist})
    return [name for start in wanted for name in names if name.startswith(start)]


def _wrapped(text: str, width: int, most: int, columns: int = 9) -> list[str]:
    """The text in at most so many lines of about `width` pixels. columns: pixels of a Latin letter."""
    # East Asian characters are as wide as high, Latin ones about half that.
    wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    letters = max(8, width // (2 * columns - 2 if wide else columns))
    return textwrap.wrap(text, letters, max_lines=most, placeholder="…") or [""]


def _shown(video: Tensor, what: str, most: int, width: int | None = None) -> list[np.ndarray]:
    """At most so many frames (H, W, 3) of a video, evenly from the first to the last, at a width or a sheet's size."""
    frames = video_frames(video, what)
    count = min(len(frames), most)
    indices = [round(i * (len(frames) - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]
    height, given = frames.shape[1:3]
    short = min(height, given)
    if width is None and short <= SMALL_FRAME_SIDE:
        factor = SMALL_FRAME_SIDE // short
        return [frames[i].repeat(factor, 0).repeat(factor, 1) for i in indices]
    scale = width / given if width is not None else min(1.0, LARGE_FRAME_SIDE / short)
    size = round(given * scale), round(height * scale)
    return [np.asarray(Image.fromarray(frames[i]).resize(size, Image.Resampling.LANCZOS)) for i in indices]


def _beside(frames: Sequence[np.ndarray], *, gap: int) -> np.ndarray:
    """Frames (H, W, 3) of one size in a row, with white between them."""
    height, width = frames[0].shape[:2]
    whole = np.full((height, len(frames) * (width + gap) - gap, 3), 255, dtype=np.uint8)
    for number, frame in enumerate(frames):
        whole[:, number * (width + gap) : number * (width + gap) + width] = frame
    return whole
