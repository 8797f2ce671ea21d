"""Whole rows of a picture of captions, before above after, as a picture that fits a
window.

    python -m docs.tools.rows

It writes docs/images/demo_rows.png, the README's picture, from demo_before_after.png:
the middle row of each half, whatever it shows.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = Path(__file__).resolve().parents[1] / "images"
SHOWN = (3, 8)
"""Rows, from 1, of the 10 of the demo."""
DARK = 60
"""A channel's value (of 255) below which a pixel belongs to a frame."""
MARGIN = 12
"""Pixels that are left below a row."""


def rows_of(picture: Image.Image) -> list[Image.Image]:
    """Rows of captions. A row ends where the second of its two lines of dark frames
    does; the first one has the heading too.
    """
    pixels = np.asarray(picture.convert("RGB")).max(axis=2)
    frames = (pixels < DARK).mean(axis=1) > 0.25
    changes = np.flatnonzero(np.diff(np.r_[False, frames, False].astype(int)))
    spans = changes.reshape(-1, 2)
    # Letters of a caption are dark for less than 20 lines.
    ends = [int(end) for begin, end in spans if end - begin > 40][1::2]
    starts = [0, *ends[:-1]]
    return [
        picture.crop((0, start + MARGIN, picture.width, end + MARGIN))
        for start, end in zip(starts, ends, strict=True)
    ]


def rows_shown() -> Image.Image:
    """The picture of the README."""
    found = rows_of(Image.open(IMAGES / "demo_before_after.png").convert("RGB"))
    chosen = [found[number - 1] for number in SHOWN]
    sheet = Image.new(
        "RGB", (chosen[0].width, sum(row.height for row in chosen)), "white"
    )
    top = 0
    for row in chosen:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def main(words: Sequence[str] | None = None) -> int:
    """Write the picture."""
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m docs.tools.rows", description=summary
    )
    parser.parse_args(words)
    rows_shown().save(IMAGES / "demo_rows.png", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
