"""Pictures of videos for people: contact sheets (PNG).

Videos are uint8 tensors (F, 3, H, W), RGB. Every file appears whole or not at all.
"""

import math
import os
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from warnings import catch_warnings, simplefilter

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from sage_fast.config.files import replacing
from sage_fast.models.picture_files import read_picture
from sage_fast.models.video_files import video_frames
from sage_fast.run.plots import GAIN, LOSS

STRIP_FRAMES = 8
GRID_FRAMES = 3
"""Shown of each video, spread evenly from the first to the last; a shorter one shows
all.
"""

INK = "#1d232b"
MARGIN = 20
GAP = 24
LINE_HEIGHT = 26
WIDTH = 1660
"""Pixels of a sheet: twice as many as a README shows."""
MARK_WIDTH = 24
LETTER_WIDTH = 10
MOST_LINES = 3
"""Of a caption."""
DPI = 100

Text = tuple[float, float, str, str, int]
"""x, y of its middle, text, colour, size."""
Place = tuple[int, int, np.ndarray]
"""x, y of its top, picture."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A prompt of a sheet.

    videos: (F, 3, H, W) uint8 RGB each, one below the other. marks: whether each shows
    what was asked, or none.

    Example: `Cell(caption="a red circle", videos=[before, after], marks=[False, True])`
    """

    caption: str
    videos: Sequence[Tensor]
    marks: Sequence[bool] = ()


def write_picture(path: Path, image: str, size: tuple[int, int]) -> None:
    """Write a picture as a JPEG, scaled and cropped to (width, height) as a video that
    begins with it.

    OSError, and ValueError as `read_picture`.
    """
    picture = ImageOps.fit(read_picture(image), size)
    with replacing(path) as partial:
        picture.save(partial, "JPEG")


def contact_sheet(
    path: str | os.PathLike[str],
    cells: Sequence[Cell],
    title: str = "",
    *,
    grid: bool = False,
) -> None:
    """Write a PNG with the caption of every cell above the frames of its videos, ticked
    where they are marked.

    Args:
        path: the file to write; missing folders are created.
        cells: videos of the same cell have the same size.
        title: above the cells.
        grid: up to 6 cells side by side, with `GRID_FRAMES` of each video; else one a
            row, with `STRIP_FRAMES`.

    Raises:
        ValueError: no cells, or a video of another shape or dtype.
        OSError: the folder cannot be written to.
    """
    if not cells:
        raise ValueError("a contact sheet needs at least one prompt, and got none")
    columns = min(6, math.ceil(math.sqrt(len(cells)))) if grid else 1
    frames = GRID_FRAMES if grid else STRIP_FRAMES
    # Pixels from one cell to the next, and of a frame, which has 2 white ones after it;
    # the mark follows the last.
    across = (WIDTH - 2 * MARGIN + GAP) // columns
    side = (across - GAP - MARK_WIDTH) // frames - 2
    texts: list[Text] = []
    places: list[Place] = []
    top = MARGIN
    if title:
        for line in _wrapped(title, WIDTH - 2 * MARGIN):
            texts.append((MARGIN, top + LINE_HEIGHT / 2, line, INK, 15))
            top += LINE_HEIGHT
        top += GAP
    for row in range(0, len(cells), columns):
        shown = cells[row : row + columns]
        captions = [_wrapped(cell.caption, across - GAP) for cell in shown]
        # The videos of a row begin at one height, below the longest of its captions.
        y = top + LINE_HEIGHT * max(map(len, captions))
        for column, (cell, caption) in enumerate(zip(shown, captions, strict=True)):
            x = MARGIN + column * across
            texts += [
                (x, top + (n + 0.5) * LINE_HEIGHT, line, INK, 13)
                for n, line in enumerate(caption)
            ]
            below = y
            for number, video in enumerate(cell.videos):
                strip = _strip(video, f"video {cell.caption!r}", frames, width=side)
                places.append((x, below, strip))
                if cell.marks:
                    sign, colour = (
                        ("\N{CHECK MARK}", GAIN)
                        if cell.marks[number]
                        else ("\N{BALLOT X}", LOSS)
                    )
                    texts.append(
                        (
                            x + strip.shape[1] + 4,
                            below + strip.shape[0] / 2,
                            sign,
                            colour,
                            18,
                        )
                    )
                below += strip.shape[0] + 4
        # Below the lowest strip, because the cells of a row may differ in the height
        # and number of their videos.
        top = max(top_of + strip.shape[0] for _, top_of, strip in places) + GAP
    _write_sheet(path, top, texts, places)


def _write_sheet(
    path: str | os.PathLike[str],
    height: int,
    texts: Sequence[Text],
    places: Sequence[Place],
) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
    with (
        rc_context({"font.family": ["DejaVu Sans", *_other_fonts()]}),
        catch_warnings(),
    ):
        # A character that no font has is a box; the page of the run and the names of
        # the files have it.
        simplefilter("ignore")
        # A sheet is laid out from the top; matplotlib counts pixels and shares of a
        # figure from the bottom.
        for x, top, strip in places:
            figure.figimage(
                strip, xo=x, yo=height - top - strip.shape[0], origin="upper"
            )
        for text_x, middle, text, colour, size in texts:
            # No mathematics: a prompt may hold dollars.
            at = text_x / WIDTH, 1 - middle / height
            figure.text(
                *at, text, color=colour, size=size, va="center", parse_math=False
            )
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


@cache
def _other_fonts() -> list[str]:
    """Fonts for scripts that matplotlib's own lacks, as far as they are installed."""
    from matplotlib.font_manager import fontManager

    wanted = (
        "Noto Sans CJK",
        "Noto Sans Arabic",
        "Noto Sans",
        "WenQuanYi",
        "Arial Unicode",
        "Microsoft YaHei",
    )
    names = sorted({font.name for font in fontManager.ttflist})
    return [name for start in wanted for name in names if name.startswith(start)]


def _wrapped(text: str, width: int) -> list[str]:
    """The text in at most `MOST_LINES` lines of about `width` pixels."""
    # East Asian characters are as wide as high, Latin ones about half that.
    wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    letters = max(8, width // (2 * LETTER_WIDTH - 2 if wide else LETTER_WIDTH))
    return textwrap.wrap(text, letters, max_lines=MOST_LINES, placeholder="…") or [""]


def _strip(video: Tensor, what: str, most: int, *, width: int) -> np.ndarray:
    """At most so many frames of a video in a row, evenly from the first to the last,
    each `width` wide: (H, W, 3).
    """
    frames = video_frames(video, what)
    height = round(frames.shape[1] * width / frames.shape[2])
    indices = (
        np.linspace(0, len(frames) - 1, min(len(frames), most)).round().astype(int)
    )
    whole = np.full((height, len(indices) * (width + 2) - 2, 3), 255, dtype=np.uint8)
    for place, index in enumerate(indices):
        frame = Image.fromarray(frames[index]).resize(
            (width, height), Image.Resampling.LANCZOS
        )
        whole[:, place * (width + 2) : place * (width + 2) + width] = frame
    return whole
