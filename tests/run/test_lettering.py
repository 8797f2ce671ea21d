"""Captions in any script: drawn in fonts that have them, spelt out where there is none, and never as boxes."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from PIL import Image, ImageDraw, features

from sage_fast.run import lettering
from sage_fast.run.lettering import Lettering, clusters, legible

FONTS = Path(matplotlib.get_data_path(), "fonts/ttf")
DEJAVU, LATIN = str(FONTS / "DejaVuSans.ttf"), str(FONTS / "cmr10.ttf")

CAPTIONS = [
    "a red circle, moving left",
    "一只猫在雪地里奔跑",
    "قطة حمراء تمشي على العشب",
    "قطة 🦊 تمشي 一只猫",
    "नमस्ते दुनिया",
    "แมวสีแดง",
    "👩\u200d🚀 👍🏽 ❤\ufe0f",
    "cat こんにちは 안녕하세요 שלום \U000e0041\ue000",
]


@pytest.fixture
def fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fonts of a machine, DejaVu Sans alone unless a test changes the list."""
    files = [DEJAVU]
    monkeypatch.setattr(lettering, "_fonts", lambda bold: tuple(files))
    lettering._font_file.cache_clear()
    lettering._say_missing.cache_clear()
    yield files
    lettering._font_file.cache_clear()


@pytest.mark.parametrize("text", CAPTIONS)
def test_nothing_is_drawn_as_a_box(text: str) -> None:
    """With the fonts of this machine, whichever those are."""
    drawn = 0
    for font, run in Lettering(15)._runs(legible(text)):
        box = bytes(font.getmask("\U0010fffd"))
        for cluster in clusters(run):
            assert cluster.isspace() or bytes(font.getmask(cluster)) != box, (cluster, font.path)
        drawn += len(run)
    assert drawn == len(legible(text)), "nothing is left out"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cat", "a cat"),
        ("قطة حمراء", "قطة حمراء"),
        ("一只猫 runs", "[3 CJK characters] runs"),
        ("猫", "[1 CJK character]"),
        ("fox 🦊🚀!", "fox [fox face][rocket]!"),
        ("👩\u200d🚀 👍🏽", "[woman][rocket] [thumbs up sign]"),
        ("नमस्ते", "[4 Devanagari characters]"),
        ("a \ue000 b", "a [1 Unknown character] b"),
        ("", ""),
    ],
)
def test_what_no_font_has_is_spelt_out(fonts: list[str], text: str, expected: str) -> None:
    assert legible(text) == expected == legible(expected)


def test_a_missing_script_is_said_once(fonts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for text in ("一只猫", "猫", "नमस्ते"):
        legible(text)
    assert [record.args for record in caplog.records] == [("CJK", "-cjk"), ("Devanagari", "-core")]


def test_without_raqm_right_to_left_text_is_spelt_out(fonts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda feature: feature != "raqm")
    assert legible("red قطة") == "red [3 Arabic characters]"


@pytest.mark.parametrize(
    ("text", "order"),
    [("abc שלום def", ["abc ", "שלום ", "def"]), ("שלום abc נחמד", ["נחמד", "abc ", "שלום "])],
    ids=["left-to-right", "right-to-left"],
)
def test_the_fonts_of_a_line_follow_its_direction(fonts: list[str], text: str, order: list[str]) -> None:
    fonts[:] = [LATIN, DEJAVU]
    drawn: list[tuple[float, str]] = []

    class Recorder(ImageDraw.ImageDraw):
        def text(self, xy: tuple[float, float], text: str, *_: object, **__: object) -> None:  # type: ignore[override]
            drawn.append((xy[0], text))

    style = Lettering(15)
    style.draw(Recorder(Image.new("RGB", (200, 20))), (10, 10), text, "black")
    assert [run for _, run in drawn] == order
    widths = [style.length(run) for run in order]
    assert [x for x, _ in drawn] == pytest.approx([10, 10 + widths[0], 10 + widths[0] + widths[1]])


def test_a_font_without_outlines_is_passed_over(fonts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As fonts of coloured emoji are: they list a character and draw nothing, or not at this size."""
    fonts[:] = [LATIN, DEJAVU]
    monkeypatch.setattr(lettering, "_has_ink", lambda file, cluster: file != LATIN)
    assert lettering._font_file("a", False) == DEJAVU


@pytest.mark.parametrize("text", ["word " * 40, "x" * 300, "猫" * 300, "ab cd", "ก็" * 200])
def test_lines_are_no_wider_than_asked_and_marks_stay_with_their_letter(text: str) -> None:
    style = Lettering(15)
    lines = style.wrap(legible(text), 120, 3)
    assert 1 <= len(lines) <= 3 and all(style.length(line) <= 120 for line in lines)
    assert all(not line.startswith("\u0e47") for line in lines)
    if len(lines) == 3:
        assert lines[-1].endswith("…")
