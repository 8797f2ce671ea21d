"""Text rendering: do the frames show the text that the prompt quotes, as a text reader
reads them?

The score is flow_grpo's (https://github.com/yifan123/flow_grpo, `flow_grpo/ocr.py`),
the reader PP-OCRv6 (Apache-2.0), whose weights the wheel of rapidocr holds.
"""

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.sections import VideoConfig
from sage_fast.models.hub import Requirement, missing_files
from sage_fast.rewards.base import RewardCosts, check_counts, check_videos
from sage_fast.rewards.clip import middle_frames

DETECTOR = "PP-OCRv6_det_small.onnx"
RECOGNISER = "PP-OCRv6_rec_small.onnx"
INSTALL = "pip install 'sage-fast[ocr]'"

QUOTED = re.compile(r'"([^"\n]*)"|“([^”\n]*)”')
"""As the glyph encoder of HunyuanVideo-1.5 finds it; flow_grpo knows straight marks
alone. ' is also an apostrophe.
"""

MIN_SIDE = 480

OverFrames = Literal["mean", "best"]
Reader = Callable[[NDArray[np.uint8]], str]


class OcrReward:
    """Agreement of the text in the frames with the first quotation of the prompt, from
    0 to 1.

    A frame's score is that of `similarity`. Over the frames flow_grpo's reward for
    videos takes the mean of those above 0, so that one readable frame is enough; here
    all of them count, or the best one.

    Args:
        num_frames: frames that are read, the middles of that many equal parts of the
            video; null reads all.
        over_frames: `mean` or `best` of their scores.
        search: false reads each frame as one line that fills it, at a tenth of the
            time.
        min_side: shorter side, in pixels, to which smaller frames are enlarged before
            text is searched in them.
        threads: of each of the two models, which run on the CPU.

    Raises:
        ImportError: the reader is not installed; the message says how to get it.
        ValueError: an option is out of range, or would do nothing.

    Example: `OcrReward().score(videos, ['A sign that says "OPEN"'] * 8)["OCR"]` has
    shape (8,).
    """

    @staticmethod
    def requirements(options: Mapping[str, Any]) -> list[Requirement]:
        folder = _models()
        where = "rapidocr with onnxruntime" if folder is None else str(folder)
        missing = missing_files(folder, [DETECTOR, RECOGNISER])
        return [
            Requirement(name="text reader", where=where, missing=missing, fetch=INSTALL)
        ]

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        """Nothing on a GPU; one core takes a microsecond for a pixel to
        find text, 0.04 s to read it.
        """
        frames = len(middle_frames(video.num_frames, options.get("num_frames", 4)))
        if not options.get("search", True):
            return RewardCosts(seconds=0.04 * frames)
        side = min(video.height, video.width)
        enlarged = max(1.0, options.get("min_side", MIN_SIDE) / side)
        pixels = frames * video.height * video.width * enlarged**2
        return RewardCosts(seconds=1e-6 * pixels / options.get("threads", 4))

    def __init__(
        self,
        num_frames: int | None = 4,
        over_frames: OverFrames = "mean",
        search: bool = True,
        min_side: int = MIN_SIDE,
        threads: int = 4,
    ) -> None:
        check_counts(num_frames=num_frames, min_side=min_side, threads=threads)
        if not search and min_side != MIN_SIDE:
            raise ValueError(
                f"min_side is {min_side}, but only a search for text enlarges frames: "
                "leave it out, or search: true."
            )
        if over_frames not in get_args(OverFrames):
            raise ValueError(
                f"over_frames is {over_frames!r}, but it must be mean or best."
            )
        self.num_frames = num_frames
        self.over_frames = over_frames
        self.read = load_reader(min_side, threads, search)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """RewardError, naming the first one, for prompts that quote no text."""
        if without := [prompt for prompt in prompts if not quoted_text(prompt)]:
            raise RewardError(
                f"{len(without)} of {len(prompts)} prompts have no text in quotation "
                f"marks, which the video should show, such as {without[0]!r}. Write "
                'the text as "TEXT", or remove the prompt.'
            )

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """{"OCR": (B,), "OCR_right": (B,)} float32 of videos (B, F, 3, H, W) uint8 and
        B prompts.

        `OCR_right` is 1 where `OCR` is, else 0. Every frame is read by itself, so the
        score of a video depends on no other one.

        Raises:
            RewardError: a prompt quotes no text. ValueError: another shape or dtype.
        """
        check_videos(videos, prompts)
        self.check_prompts(prompts)
        chosen = videos[:, middle_frames(videos.shape[1], self.num_frames)]
        # the reader takes (H, W, BGR)
        pictures = chosen.flip(2).permute(0, 1, 3, 4, 2).contiguous().cpu().numpy()
        scores = []
        for video, prompt in zip(pictures, prompts, strict=True):
            wanted = quoted_text(prompt)
            frames = [similarity(self.read(picture), wanted) for picture in video]
            best = self.over_frames == "best"
            scores.append(max(frames) if best else sum(frames) / len(frames))
        return {
            "OCR": torch.tensor(scores),
            "OCR_right": torch.tensor(scores).eq(1).float(),
        }


def quoted_text(prompt: str) -> str:
    """The first text that a prompt puts in " " or “ ”, without spaces and in lower
    case; empty where there is none.
    """
    found = QUOTED.search(prompt)
    return _plain(found[1] or found[2] or "") if found else ""


def similarity(shown: str, wanted: str) -> float:
    """1 - d / L of a frame's text and the wanted one of L characters, as flow_grpo
    defines it for pictures.

    d is the edit distance, at most L, of both without spaces and in lower case; 0 where
    the text holds the wanted one.
    """
    shown = _plain(shown)
    wanted = _plain(wanted)
    if wanted in shown:
        return 1.0
    # distances of the characters so far to every beginning of the wanted text
    row = list(range(len(wanted) + 1))
    for count, character in enumerate(shown, start=1):
        before = row
        row = [count]
        for column, other in enumerate(wanted, start=1):
            change = before[column - 1] + (character != other)
            row.append(min(before[column] + 1, row[-1] + 1, change))
    return 1 - min(row[-1], len(wanted)) / len(wanted)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()


def _models() -> Path | None:
    """The folder of weights in the installed rapidocr; None where it or its runtime is
    missing.
    """
    reader = find_spec("rapidocr")
    if reader is None or reader.origin is None or find_spec("onnxruntime") is None:
        return None
    return Path(reader.origin).parent / "models"


def load_reader(min_side: int, threads: int, search: bool = True) -> Reader:
    """The text of a picture (H, W, BGR) uint8, its lines joined from top to bottom; see
    `OcrReward`.
    """
    folder = _models()
    if folder is None or missing_files(folder, [DETECTOR, RECOGNISER]):
        raise ImportError(
            "the text reader, rapidocr 3.10 or newer with onnxruntime, is not "
            f"installed: {INSTALL}"
        )
    options = {
        # Named, so that nothing is downloaded.
        "Det.model_path": str(folder / DETECTOR),
        "Rec.model_path": str(folder / RECOGNISER),
        "Global.use_det": search,
        # The library's 736 takes twice the time, and overlooks small words on a plain
        # background.
        "Det.limit_side_len": min_side,
        # A batch is padded to its widest line, so that a line would be read by the
        # width of its neighbours.
        "Rec.rec_batch_num": 1,
        "Global.use_cls": False,  # as flow_grpo, which turns no line round
        "Global.log_level": "critical",  # it warns of every frame without text
        "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    path = os.environ.get("LD_LIBRARY_PATH")
    engine = importlib.import_module("rapidocr").RapidOCR(params=options)
    # OpenCV adds a folder to it, for windows, which nobody opens here.
    os.environ.pop("LD_LIBRARY_PATH", None)
    if path is not None:
        os.environ["LD_LIBRARY_PATH"] = path
    return lambda picture: "".join(engine(picture).txts or ())
