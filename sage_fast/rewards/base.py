"""The interface of a reward, that of all rewards of a run, and what happens when one fails."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sage_fast.records import Sample

OnFailure = Literal["stop", "drop_group"]


class Reward(Protocol):
    """Scores generated videos. Implementations are frozen: they carry no gradient and no state between calls.

    A reward that cannot score every text may have a method `check_prompts(prompts)` that raises a RewardError; it is
    shown all prompts of a run before anything is generated.
    """

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score a batch.

        Args:
            videos: (B, F, 3, H, W) uint8 RGB.
            prompts: B texts.

        Returns:
            name -> (B,) float32, higher is better. Names not given a weight in the config are logged only.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of B videos.

    scores: name -> (B,) float64, finite, and 0 where `failed`; a name that failed for every video is absent.
    failed: (B,) bool. seconds: how long the rewards computed.

    Example: `ScoredBatch(scores={"VQ": tensor([0.3, 0.0])}, failed=tensor([False, True]), seconds=1.5)`
    """

    scores: Mapping[str, Tensor]
    failed: Tensor
    seconds: float


class PendingScores(Protocol):
    """Scores that may still be under way."""

    def result(self) -> ScoredBatch:
        """Wait for the scores. RewardError when a reward failed and was to stop the run."""
        ...


class Scorer(ABC):
    """All rewards of a run as the trainer sees them: videos in, named scores out, wherever they are computed.

    weights: score name -> weight, without those that are 0.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = {name: weight for name, weight in weights.items() if weight}

    @abstractmethod
    def submit(self, videos: Tensor, samples: Sequence[Sample], on_failure: OnFailure = "stop") -> PendingScores:
        """Have one batch scored.

        Args:
            videos: (B, F, 3, H, W) uint8.
            samples: B records, for the prompts and for naming a culprit.
            on_failure: whether a reward that fails raises RewardError, here or in `result`, or marks its videos.
        """

    def overall(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the scores, (B,) float64."""
        return torch.stack([weight * scores[name] for name, weight in self.weights.items()]).sum(0)

    def state(self) -> Mapping[str, Any] | None:
        """The random generators of rewards that do not share this process's, fit for JSON; asked for by checkpoints."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Rewards that now share this process's generators have no use for it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give back what the rewards hold besides memory. Calling it again does nothing."""


def describe_batch(samples: Sequence[Sample]) -> str:
    """The prompts of a batch, for a message: the first one, and how many more there are."""
    others = len(samples) - 1
    more = f" or one of the {others} videos scored with it" if others > 1 else " or the video scored with it"
    return describe(samples[0]) + (more if others else "")


def describe(sample: Sample) -> str:
    """One video, for a message: its prompt and its place in the prompt's group."""
    return f"prompt {sample.prompt.index} ({sample.prompt.text!r}), sample {sample.member}"
