"""The reward for text rendering: quotations, flow_grpo's score, and the real reader."""

import csv
import functools
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.sections import RewardConfig, VideoConfig
from sage_fast.models.hub import local_folder
from sage_fast.rewards import ocr
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.ocr import OcrReward, quoted_text, similarity
from tests.rewards.support import samples
from tests.rewards.test_documentation import (
    test_every_option_is_documented as check_documentation,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = RewardConfig(rewards=["ocr"], weights={"OCR": 1.0})


def draw(*lines: str, size: tuple[int, int] = (96, 192), points: int = 28) -> Tensor:
    """A picture (3, H, W) uint8 of light lines of text on a dark ground."""
    image = Image.new("RGB", (size[1], size[0]), (30, 40, 60))
    font = ImageFont.load_default(points)
    for number, text in enumerate(lines):
        place = (size[1] / 2, size[0] * (2 * number + 1) / (2 * len(lines)))
        ImageDraw.Draw(image).text(place, text, (250, 240, 200), font, anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def reads_colour(picture: NDArray[np.uint8]) -> str:
    """A reader for which a picture's (H, W, BGR) first pixel is the text."""
    assert picture.flags.c_contiguous and picture.shape == (6, 8, 3)
    return {
        (0, 0, 255): "R e D",
        (0, 255, 0): "bed",
        (255, 0, 0): "it is red, is it",
    }.get(tuple(picture[0, 0]), "")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ocr, "load_reader", lambda min_side, threads, search: reads_colour
    )


# ------------------------------------------------------------------------------------------
# without the reader


def test_the_text_is_the_first_that_double_quotes_enclose() -> None:
    asked = {
        'a sign that says "Open Now" and "never"': "opennow",
        "ein Schild “Größe 5”, rot": "größe5",
        'the “first" is no pair, the "second" is': "isnopair,the",
        "it's 'not' quoted": "",
        'nothing "" here': "",
        'blank " " here': "",
        'one " alone': "",
    }
    assert {prompt: quoted_text(prompt) for prompt in asked} == asked


def by_definition(shown: str, wanted: str) -> float:
    """Flow_grpo's `OcrScorer` in its own order of steps, with the textbook recursion of
    the edit distance.
    """

    @functools.cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        change = distance(i - 1, j - 1) + (shown[i - 1] != wanted[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, change)

    shown, wanted = (text.replace(" ", "").lower() for text in (shown, wanted))
    dist = 0 if wanted in shown else distance(len(shown), len(wanted))
    dist = min(dist, len(wanted))
    return 1 - dist / len(wanted)


def test_the_score_is_that_of_flow_grpo() -> None:
    words = [
        "",
        "OPEN",
        "open now",
        "OPFN",
        "the shop is Open today",
        "pen",
        "nepo",
        "o p e",
        "café",
        "a" * 40,
    ]
    pairs = [(shown, wanted) for shown in words for wanted in words[1:]]
    assert [similarity(*pair) for pair in pairs] == [
        by_definition(*pair) for pair in pairs
    ]
    assert similarity("OPFN", "open") == 0.75 and similarity(
        "x" * 9, "open"
    ) == 0 == similarity("", "open")


@pytest.mark.usefixtures("stub")
def test_frames_are_read_and_averaged() -> None:
    videos = torch.zeros(2, 8, 3, 6, 8, dtype=torch.uint8)
    # red, green and blue; frame 7 is black
    for frame, channel in ((1, 0), (3, 1), (5, 2)):
        videos[:, frame, channel] = 255
    videos[:, ::2] = 7  # not read
    prompts = ['a "red" box', 'a "rod" box']
    for over_frames, expected in (
        ("mean", [(1 + 2 / 3 + 1 + 0) / 4, (2 / 3 + 1 / 3) / 4]),
        ("best", [1, 2 / 3]),
    ):
        scores = OcrReward(over_frames=over_frames).score(videos, prompts)  # type: ignore[arg-type]
        assert scores["OCR"].dtype == torch.float32 and scores[
            "OCR"
        ].tolist() == pytest.approx(expected, abs=1e-6)
        assert scores["OCR_right"].tolist() == [float(value == 1) for value in expected]
    assert OcrReward(num_frames=None).score(videos, prompts)[
        "OCR"
    ].tolist() == pytest.approx([1 / 3, 1 / 8], abs=1e-6)


@pytest.mark.usefixtures("stub")
def test_the_reader_sees_each_colour_of_a_video_as_its_own() -> None:
    videos = 255 * torch.eye(3, dtype=torch.uint8)[:, None, :, None, None].expand(
        3, 1, 3, 6, 8
    )
    scores = OcrReward().score(videos, ['"rod"', '"bed"', '"red, is it"'])["OCR"]
    assert scores.tolist() == pytest.approx([2 / 3, 1, 1])


@pytest.mark.usefixtures("stub")
def test_a_prompt_that_quotes_nothing_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError,
        match=r"2 of 3 prompts have no text in quotation marks.* such as 'a dog'",
    ) as raised:
        CompositeReward.from_config(CONFIG, ["a dog", 'a "dog"', "it's"])
    assert "\n" not in str(raised.value)
    with pytest.raises(RewardError, match="1 of 1 prompts"):
        OcrReward().score(torch.zeros(1, 2, 3, 6, 8, dtype=torch.uint8), ["a dog"])


@pytest.mark.usefixtures("stub")
def test_options() -> None:
    check_documentation("ocr")
    for option, value in (
        ("num_frames", 0),
        ("min_side", 0),
        ("threads", 0),
        ("over_frames", "worst"),
    ):
        with pytest.raises(ValueError, match=f"{option} is {value!r}"):
            OcrReward(**{option: value})
    with pytest.raises(ValueError, match="min_side is 240, but only a search"):
        OcrReward(search=False, min_side=240)
    video = VideoConfig(height=240, width=400, num_frames=81)
    assert OcrReward.costs({}, video).seconds == pytest.approx(1e-6 * 4 * 480 * 800 / 4)


def test_without_the_extra_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"reward.rewards: 'ocr' cannot be set up.*pip install 'sage-fast\[ocr\]'",
    ):
        CompositeReward.from_config(CONFIG, ['a "dog"'])
    (needed,) = OcrReward.requirements({})
    assert (
        local_folder(needed.where) is None
        and needed.missing
        and needed.fetch == "pip install 'sage-fast[ocr]'"
    )


def test_the_prompts_that_ship_quote_words_and_share_none() -> None:
    words = []
    for name, count in (("text_train", 500), ("text_eval", 40)):
        with open(ROOT / f"configs/prompts/{name}.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert (
            len(rows)
            == count
            == len({row["prompt"].lower() for row in rows})
            == len({row["index"] for row in rows})
        )
        words.append({quoted_text(row["prompt"]) for row in rows})
        assert all(re.fullmatch("[a-z]{3,12}", word) for word in words[-1])
    assert not words[0] & words[1]


# ------------------------------------------------------------------------------------------
# the reader


@pytest.fixture(scope="module")
def reader() -> OcrReward:
    return OcrReward(num_frames=2, min_side=160, threads=1)


def drawn_batch() -> tuple[Tensor, list[str]]:
    texts = [("HARBOR", "HARBOR"), ("Lemon", "lemon tea"), ("", "")]
    videos = torch.stack([torch.stack([draw(text) for text in pair]) for pair in texts])
    return videos, [f'A sign with "{word}"' for word in ("harbor", "melon", "anything")]


def test_what_is_written_is_read(
    reader: OcrReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: Any) -> None:
        raise AssertionError("the reader wants the network")

    monkeypatch.setattr(socket.socket, "connect", offline)
    clean = torch.stack([draw("HARBOR"), draw("Market day")])[:, None]
    assert OcrReward(min_side=160).score(clean, ['"harbor"', "“Market Day”"])[
        "OCR"
    ].tolist() == [1, 1]
    assert (reader.score(clean, ['"lemon"', '"fox"'])["OCR"] < 0.3).all()
    line = draw("HARBOR", size=(36, 144))[None, None]  # the text fills the frame
    unsearched = OcrReward(search=False)
    assert unsearched.score(line, ['"harbor"'])["OCR"].tolist() == [1]
    two = draw("HARBOR", "LEMON")[None, None]
    assert (
        reader.score(two, ['"harborlemon"'])["OCR"]
        == 1
        > unsearched.score(two, ['"harborlemon"'])["OCR"]
    )
    videos, prompts = drawn_batch()
    scores = reader.score(videos, prompts)["OCR"]
    singles = [
        reader.score(videos[i : i + 1], prompts[i : i + 1])["OCR"] for i in range(3)
    ]
    assert (
        torch.equal(scores, torch.cat(singles))
        and scores[0] == 1
        and 0 < scores[1] < 1
        and scores[2] == 0
    )


def test_a_line_is_read_alike_whatever_stands_below_it(reader: OcrReward) -> None:
    """In one batch with a wider line it would be padded, and lose its space."""
    short, wide = "No 7", "market day in the old town"
    for lines in ((short,), (wide,), (short, wide)):
        picture = (
            draw(*lines, size=(160, 360), points=20)
            .permute(1, 2, 0)
            .contiguous()
            .numpy()
        )
        assert reader.read(picture) == "".join(lines)


@pytest.mark.slow  # the process imports torch, too
def test_another_process_scores_the_same(
    reader: OcrReward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "read_text.py").write_text(
        "from sage_fast.rewards.ocr import OcrReward\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    name = "read_text:OcrReward"
    options = {name: {"num_frames": 2, "min_side": 160, "threads": 2}}
    config = RewardConfig(
        rewards=[name], weights={"OCR": 1.0}, options=options, python=sys.executable
    )
    videos, prompts = drawn_batch()
    composite = CompositeReward.from_config(config, prompts)
    try:
        scores = composite.score(videos, samples(*prompts))
    finally:
        composite.close()
    assert torch.equal(scores["OCR"].float(), reader.score(videos, prompts)["OCR"])


def test_setting_it_up_changes_nothing_of_the_process(
    reader: OcrReward,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    CompositeReward.from_config(CONFIG, ['a "dog"']).score(
        torch.zeros(1, 1, 3, 32, 32, dtype=torch.uint8), samples('"a"')
    )
    assert not caplog.messages and capfd.readouterr() == ("", "")
