"""The reward for text rendering: quotations, flow_grpo's score, and the real reader."""

import csv
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.sections import RewardConfig
from sage_fast.models.hub import local_folder
from sage_fast.rewards import ocr
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.ocr import OcrReward, quoted_text, similarity
from tests.rewards.support import samples

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


# --------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("shown", "wanted", "score"),
    [
        ("the shop is Open today", "open", 1),
        ("o p e", "OPEN", 0.75),
        ("OPFN", "open", 0.75),
        ("nepo", "open", 0.0),
        ("open", "open now", 4 / 7),
        ("a" * 40, "open", 0.0),
        ("cafe", "café", 0.75),
        ("", "open", 0.0),
    ],
)
def test_the_score_is_that_of_flow_grpo(shown: str, wanted: str, score: float) -> None:
    """1 - min(edit distance, L) / L, of both without spaces and in lower case."""
    assert similarity(shown, wanted) == pytest.approx(score)


@pytest.mark.usefixtures("stub")
def test_frames_are_read_and_averaged() -> None:
    videos = torch.zeros(2, 8, 3, 6, 8, dtype=torch.uint8)
    # red, green and blue; frame 7 is black
    for frame, channel in ((1, 0), (3, 1), (5, 2)):
        videos[:, frame, channel] = 255
    videos[:, ::2] = 7  # not read
    prompts = ['a "red" box', 'a "rod" box']
    for options, expected in (
        ({}, [(1 + 2 / 3 + 1 + 0) / 4, (2 / 3 + 1 / 3) / 4]),
        ({"over_frames": "best"}, [1, 2 / 3]),
        ({"num_frames": None}, [1 / 3, 1 / 8]),
    ):
        scores = OcrReward(**options).score(videos, prompts)
        assert scores["OCR"].dtype == torch.float32
        assert scores["OCR"].tolist() == pytest.approx(expected, abs=1e-6)
        assert scores["OCR_right"].tolist() == [value == 1 for value in expected]


@pytest.mark.usefixtures("stub")
def test_the_reader_sees_each_colour_of_a_video_as_its_own() -> None:
    colours = 255 * torch.eye(3, dtype=torch.uint8)
    videos = colours[:, None, :, None, None].expand(3, 1, 3, 6, 8)
    scores = OcrReward().score(videos, ['"rod"', '"bed"', '"red, is it"'])["OCR"]
    assert scores.tolist() == pytest.approx([2 / 3, 1, 1])


@pytest.mark.usefixtures("stub")
def test_a_prompt_that_quotes_nothing_is_refused_at_the_start() -> None:
    message = r"2 of 3 prompts have no text in quotation marks.* such as 'a dog'"
    with pytest.raises(ConfigError, match=message):
        CompositeReward.from_config(CONFIG, ["a dog", 'a "dog"', "it's"])
    with pytest.raises(RewardError, match="1 of 1 prompts"):
        OcrReward().score(torch.zeros(1, 2, 3, 6, 8, dtype=torch.uint8), ["a dog"])


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("option", "value"),
    [("num_frames", 0), ("over_frames", "worst")],
)
def test_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}"):
        OcrReward(**{option: value})  # type: ignore[arg-type]


@pytest.mark.usefixtures("stub")
def test_the_size_of_a_search_needs_one() -> None:
    with pytest.raises(ValueError, match="min_side is 240, but only a search"):
        OcrReward(search=False, min_side=240)


def test_without_the_extra_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    message = r"reward.rewards: 'ocr' cannot be set up.*pip install 'sage-fast\[ocr\]'"
    with pytest.raises(ConfigError, match=message):
        CompositeReward.from_config(CONFIG, ['a "dog"'])
    (needed,) = OcrReward.requirements({})
    assert needed.missing and needed.fetch == "pip install 'sage-fast[ocr]'"
    assert local_folder(needed.where) is None


def test_the_prompts_that_ship_quote_words_and_share_none() -> None:
    words = []
    for name, count in (("text_train", 500), ("text_eval", 40)):
        with open(ROOT / f"configs/prompts/{name}.csv", encoding="utf-8") as file:
            prompts = {row["prompt"].lower() for row in csv.DictReader(file)}
        assert len(prompts) == count
        words.append({quoted_text(prompt) for prompt in prompts})
    assert all(re.fullmatch("[a-z]{3,12}", word) for word in words[0] | words[1])
    assert not words[0] & words[1]


# --------------------------------------------------------------------------------------
# the reader


@pytest.fixture(scope="module")
def reader() -> OcrReward:
    return OcrReward(num_frames=2, min_side=160, threads=1)


def test_what_is_written_is_read(
    reader: OcrReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: Any) -> None:
        raise AssertionError("the reader wants the network")

    monkeypatch.setattr(socket.socket, "connect", offline)

    def scores(reward: OcrReward, *prompts: str) -> list[float]:
        return reward.score(clean[: len(prompts)], prompts)["OCR"].tolist()

    clean = torch.stack([draw("HARBOR"), draw("Market day")])[:, None]
    assert scores(reader, '"harbor"', "“Market Day”") == [1, 1]
    assert max(scores(reader, '"lemon"', '"fox"')) < 0.3
    unsearched = OcrReward(search=False)
    clean = draw("HARBOR", size=(36, 144))[None, None]  # the text fills the frame
    assert scores(unsearched, '"harbor"') == [1]
    clean = draw("HARBOR", "LEMON")[None, None]
    assert scores(reader, '"harborlemon"') == [1] > scores(unsearched, '"harborlemon"')


def test_a_line_is_read_alike_whatever_stands_below_it(reader: OcrReward) -> None:
    """In one batch with a wider line it would be padded, and lose its space."""
    wide = "market day in the old town"
    for lines in (("No 7",), (wide,), ("No 7", wide)):
        picture = draw(*lines, size=(160, 360), points=20).permute(1, 2, 0)
        assert reader.read(picture.contiguous().numpy()) == "".join(lines)


def test_setting_it_up_changes_nothing_of_the_process(
    reader: OcrReward,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reward = CompositeReward.from_config(CONFIG, ['a "dog"'])
    reward.score(torch.zeros(1, 1, 3, 32, 32, dtype=torch.uint8), samples('"a"'))
    assert not caplog.messages and capfd.readouterr() == ("", "")
