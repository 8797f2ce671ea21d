"""Rewards for tests of how rewards are called."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.records import Prompt, PromptEmbeds, Sample

GENERATOR = torch.Generator().manual_seed(0)
VIDEOS = torch.randint(0, 256, (3, 4, 3, 8, 8), generator=GENERATOR, dtype=torch.uint8)


def samples(*texts: str) -> list[Sample]:
    """Records of videos of prompt 7, in that order."""
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    return [
        Sample(prompt=Prompt(text=text, index=7), embeds=embeds, member=m)
        for m, text in enumerate(texts)
    ]


def here(name: str) -> str:
    """The entry of `reward.rewards` for a name of this file; one of another file is
    left as it is.
    """
    return name if ":" in name else f"{__name__}:{name}"


def brightness(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """A function as a reward; its sum over many pixels would show another order of
    summation.
    """
    lengths = torch.tensor([0.01 * len(prompt) for prompt in prompts])
    return videos.float().mean((1, 2, 3, 4)) / 255 + lengths


def darkens(videos: Tensor, prompts: list[str]) -> Tensor:
    """A function that changes what it is given."""
    prompts.clear()
    return videos.zero_().float().mean((1, 2, 3, 4))


def both(
    videos: Tensor, prompts: Sequence[str], *, scale: float = 1.0
) -> Mapping[str, Any]:
    """A function that names its scores, one of them a plain list."""
    return {
        "first": scale * brightness(videos, prompts),
        "length": [float(len(p)) for p in prompts],
    }


def timed(videos: Tensor, prompts: Sequence[str], fps: float = 24.0) -> list[float]:
    """A function that takes the rate of the videos."""
    return [fps] * len(prompts)


def falling(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """A function of which less is better."""
    return -brightness(videos, prompts)


falling.LOWER_IS_BETTER = ("falling",)  # type: ignore[attr-defined]


def drowsy(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Waits where the file that NAP names is not there yet, which it writes first."""
    nap = Path(os.environ["NAP"])
    if not nap.exists():
        nap.touch()
        time.sleep(60)
    return brightness(videos, prompts)


def make(scale: float = 1.0) -> "Bright":
    """A function that returns a reward."""
    return Bright(scale=scale)


class Bright:
    """A class as a reward, with an option."""

    def __init__(self, scale: float = 1.0, device: str = "cpu") -> None:
        self.scale = scale
        self.device = device

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {"bright": self.scale * brightness(videos, prompts)}


OBJECT = Bright(3.0)
NEITHER = 5


def trl(
    prompts: Sequence[str], completions: Sequence[str], **kwargs: Any
) -> list[float]:
    """TRL's signature: it would take the videos for prompts, and score them all alike."""
    return [float(len(text)) for text in completions]


def alone(videos: Tensor, *, scale: float = 1.0) -> Tensor:
    """A function without prompts."""
    return scale * brightness(videos, [])


class Swapped:
    """The same as a class."""

    def score(self, prompts: Sequence[str], videos: Tensor) -> dict[str, Tensor]:
        return {"score": torch.ones(len(videos))}


def _threads() -> float:
    return float(torch.get_num_threads())


class Faulty:
    """As `brightness`, until a prompt has a bad word in it, or from the start."""

    def __init__(
        self, fault: str = "crash", when: str = "score", word: str = "bad"
    ) -> None:
        self.fault = fault
        self.word = word
        if when == "build":
            self._fail()

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        if any(self.word in p for p in prompts):
            self._fail()
        return {"score": brightness(videos, prompts)}

    def _fail(self) -> None:
        if self.fault == "crash":
            raise RuntimeError("out of something")
        if self.fault == "sys.exit":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


class Choosy:
    """Refuses prompts about dogs."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            if "dog" in prompt:
                raise RewardError(f"no score for {prompt!r}")

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {"cats": torch.ones(len(videos))}
