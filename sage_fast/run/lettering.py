"""Text on pictures, in any script: in fonts of this machine that have its characters, or spelt out where none has.

A caption is first made `legible`, then wrapped and drawn by `Lettering`. Each cluster, a character and the marks on it,
is drawn in DejaVu Sans, or in the first installed font that has all of it. Shaping and the order of right-to-left text
are left to Raqm, the layout engine of Pillow.
"""

import logging
import unicodedata
from bisect import bisect
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import ImageDraw, ImageFont, features

logger = logging.getLogger(__name__)

Color = str | tuple[int, int, int]

_SKIN_TONES = range(0x1F3FB, 0x1F400)
_VARIATION_SELECTORS = (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))


def clusters(text: str) -> list[str]:
    """The text, cut into characters with the marks that belong to them."""
    found: list[str] = []
    for character in text:
        if found and (unicodedata.category(character) in ("Mn", "Mc", "Me") or _is_ignorable(character)):
            found[-1] += character
        else:
            found.append(character)
    return found


def _is_ignorable(character: str) -> bool:
    """Whether it only changes its neighbours: joiners, directions, variation selectors, tones of skin."""
    return unicodedata.category(character) == "Cf" or ord(character) in (*_SKIN_TONES, *_VARIATION_SELECTORS)


def legible(text: str) -> str:
    """The text with everything spelt out that no font of this machine can draw, so that nothing becomes an empty box.

    A symbol becomes its name, such as [fox face], and a stretch of letters their number and script, such as [4 CJK
    characters]; what would help is logged once for every script.
    """
    parts = []
    for script, group in groupby(clusters(text), _missing_script):
        stretch = list(group)
        if script is None:
            parts += stretch
        elif script == "symbol":
            parts += [f"[{unicodedata.name(cluster[0], 'symbol').lower()}]" for cluster in stretch]
        else:
            parts.append(f"[{len(stretch)} {script} character{'s' if len(stretch) > 1 else ''}]")
            _say_missing(script)
    return "".join(parts)


def _missing_script(cluster: str) -> str | None:
    """None for a cluster that can be drawn, else `symbol` or the script of its first character."""
    if cluster.isspace() or _font_file(cluster, False) is not None:
        return None
    if unicodedata.category(cluster[0]).startswith("S"):
        return "symbol"
    word = unicodedata.name(cluster[0], "unknown").split()[0].split("-")[0]
    return word if word == "CJK" else word.capitalize()


@cache
def _say_missing(script: str) -> None:
    logger.warning(
        "No installed font has the %s characters of a caption, so pictures say how many they are. Install one, such as "
        "the package fonts-noto%s.",
        *(script, "-cjk" if script in ("CJK", "Hiragana", "Katakana", "Hangul") else "-core"),
    )


@dataclass(frozen=True)
class Lettering:
    """A size and weight of text. What is not `legible` is left out."""

    size: int
    bold: bool = False

    def length(self, text: str) -> float:
        """Width of a line of text in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, fill: Color) -> None:
        """Draw one line; `place` is the middle of its left edge."""
        runs = self._runs(text)
        # Raqm orders the text of one font; where there are several, the direction of the line orders them.
        x, y = place
        for font, run in reversed(runs) if _is_right_to_left(text) else runs:
            draw.text((x, y), run, fill, font, anchor="lm")
            x += font.getlength(run)

    def wrap(self, text: str, width: int, max_lines: int) -> list[str]:
        """Break the text into lines of at most `width` pixels, inside a word only if it is wider than that."""
        lines = [""]
        for word in text.split():
            candidate = f"{lines[-1]} {word}".strip()
            if self.length(candidate) <= width:
                lines[-1] = candidate
                continue
            if lines[-1]:
                lines.append("")
            for cluster in clusters(word):
                if lines[-1] and self.length(lines[-1] + cluster) > width:
                    lines.append("")
                lines[-1] += cluster
        if len(lines) > max_lines:
            lines = lines[:max_lines]
            lines[-1] = self.shorten(f"{lines[-1]}…", width)
        return lines

    def shorten(self, text: str, width: int) -> str:
        """The text, cut off with an ellipsis where it is wider than `width` pixels."""
        if self.length(text) <= width:
            return text
        parts = clusters(text.removesuffix("…"))
        too_long = bisect(
            range(1, len(parts)), float(width), key=lambda count: self.length(f"{''.join(parts[:count])}…")
        )
        return f"{''.join(parts[:too_long]).rstrip()}…"

    def _runs(self, text: str) -> list[tuple[ImageFont.FreeTypeFont, str]]:
        """Stretches of the text with the font that each is drawn in."""
        runs: list[tuple[str, str]] = []
        for cluster in clusters(text):
            # A space goes with what is before it.
            file = runs[-1][0] if runs and cluster.isspace() else _font_file(cluster, self.bold)
            if file is None:
                continue
            if runs and runs[-1][0] == file:
                runs[-1] = file, runs[-1][1] + cluster
            else:
                runs.append((file, cluster))
        return [(_font(file, self.size), run) for file, run in runs]


def _is_right_to_left(text: str) -> bool:
    """Whether the first letter that has a direction runs to the left (rule P2 of Unicode's algorithm)."""
    strong = (way for way in map(unicodedata.bidirectional, text) if way in ("L", "R", "AL"))
    return next(strong, "L") != "L"


@lru_cache(maxsize=256)
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)


@lru_cache(maxsize=8192)
def _font_file(cluster: str, bold: bool) -> str | None:
    """The first font that can draw a cluster; None where there is none."""
    visible = [c for c in cluster if not c.isspace() and not _is_ignorable(c)]
    if not features.check("raqm") and any(_needs_shaping(c) for c in visible):
        return None
    for file in _fonts(bold):
        if np.isin([ord(c) for c in visible], _coverage(file)).all() and _has_ink(file, cluster):
            return file
    return None


def _needs_shaping(character: str) -> bool:
    """Whether it stands in the wrong place, or unjoined, unless Raqm lays the text out."""
    return unicodedata.bidirectional(character) in ("R", "AL") or unicodedata.category(character) in ("Mn", "Mc")


@cache
def _fonts(bold: bool) -> tuple[str, ...]:
    """Files of fonts, DejaVu Sans first, then upright sans serifs of the weight before others."""
    import matplotlib
    from matplotlib.font_manager import findSystemFonts

    default = Path(matplotlib.get_data_path(), "fonts/ttf", "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")

    def rank(file: str) -> tuple[bool, bool, bool, str]:
        name = Path(file).stem.lower()
        slanted = any(word in name for word in ("italic", "oblique", "mono", "condensed", "narrow"))
        return slanted, "serif" in name, ("bold" in name) is not bold, file

    # Last Resort has a glyph for every character: a box that names its script.
    others = [file for file in findSystemFonts() if "lastresort" not in Path(file).stem.lower()]
    return str(default), *sorted(others, key=rank)


@cache
def _coverage(file: str) -> np.ndarray:
    """The characters of a font, as numbers; of one that cannot be read, none."""
    from matplotlib.ft2font import FT2Font

    try:
        return np.array(list(FT2Font(file).get_charmap()), dtype=np.uint32)
    except (RuntimeError, OSError) as error:
        logger.debug("font %s cannot be read: %s", file, error)
        return np.array([], dtype=np.uint32)


def _has_ink(file: str, cluster: str) -> bool:
    """Whether a font draws a cluster in outlines: fonts of coloured emoji have none, or one size only."""
    try:
        return cluster.isspace() or _font(file, 16).getmask(cluster).getbbox() is not None
    except OSError:
        return False
