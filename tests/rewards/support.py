"""Rewards for tests of how rewards are called."""

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_fast.config.errors import RewardError

logger_name = "tests.rewards"


def brightness(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """A function as a reward; its sum over many pixels would show another order of summation."""
    return videos.float().mean((1, 2, 3, 4)) / 255 + torch.tensor([0.01 * len(p) for p in prompts])


def both(videos: Tensor, prompts: Sequence[str], *, scale: float = 1.0) -> Mapping[str, Any]:
    """A function that names its scores, one of them a plain list."""
    return {"first": scale * brightness(videos, prompts), "length": [float(len(p)) for p in prompts]}


def falling(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """A function of which less is better."""
    return -brightness(videos, prompts)


falling.LOWER_IS_BETTER = ("falling",)  # type: ignore[attr-defined]


def make(scale: float = 1.0) -> "Bright":
    """A function that returns a reward."""
    return Bright(scale=scale)


class Bright:
    """A class as a reward, with an option."""

    def __init__(self, scale: float = 1.0, device: str = "cpu") -> None:
        self.scale, self.device = scale, device

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {"bright": self.scale * brightness(videos, prompts), "threads": torch.full((len(videos),), _threads())}


OBJECT = Bright(3.0)
NEITHER = 5


def _threads() -> float:
    return float(torch.get_num_threads())


def fails(fault: str) -> Any:
    """What can go wrong inside foreign code."""
    if fault == "raise":
        raise ValueError("the scoring server is gone")
    if fault == "sys.exit":
        sys.exit(0)
    if fault == "os._exit":
        os._exit(0)
    if fault == "exit":  # in a library's C code, where Python has no say
        ctypes.CDLL(None)._exit(0)
    if fault == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
    if fault == "crash":
        raise RuntimeError("out of something")


class Faulty:
    """As `brightness`, until a prompt has a bad word in it, or from the start."""

    def __init__(self, fault: str = "raise", when: str = "score", word: str = "bad", folder: str = "") -> None:
        self.fault, self.word, self.folder = fault, word, folder
        if when == "build":
            fails(fault)

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        if any(self.word in p for p in prompts):
            if self.folder:
                (Path(self.folder) / "pid").write_text(str(os.getpid()))
            fails(self.fault)
        return {"score": brightness(videos, prompts)}


class Drawing:
    """Random scores from every global generator that a reward may use.

    While there is a file `fatal`, the third batch removes it and kills the trainer.
    """

    def __init__(self, fatal: str = "") -> None:
        self.fatal, self.batches = Path(fatal), 0

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        count = len(videos)
        self.batches += 1
        if self.batches == 3 and self.fatal.is_file():
            self.fatal.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
        return {
            "python": torch.tensor([random.random() for _ in range(count)]),
            "numpy": torch.from_numpy(np.random.rand(count)),
            "torch": torch.rand(count),
        }


class Waiting:
    """Scores 1, a batch at a time, as soon as there is a file `go-N` for batch number N; leaves a file `came-N`."""

    def __init__(self, folder: str, patience: float = 30.0) -> None:
        self.folder, self.patience, self.number = Path(folder), patience, 0

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        number, self.number = self.number, self.number + 1
        (self.folder / f"came-{number}").touch()
        wait_for(self.folder / f"go-{number}", self.patience)
        return {"score": torch.ones(len(videos))}


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """TimeoutError unless the file is there in time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.005)


class Chatty:
    """Logs a warning per batch."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        import logging

        logging.getLogger(logger_name).warning("%d videos", len(videos))
        return {"score": brightness(videos, prompts)}


class Choosy:
    """Refuses prompts about dogs."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            if "dog" in prompt:
                raise RewardError(f"no score for {prompt!r}")

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {"cats": torch.ones(len(videos))}
