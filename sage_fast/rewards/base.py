"""The interface of a reward, and what happens when one fails."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Reward(Protocol):
    """Scores generated videos. Implementations are frozen: they carry no gradient and no state between calls."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score a batch.

        Args:
            videos: (B, F, 3, H, W) uint8 RGB.
            prompts: B texts.

        Returns:
            name -> (B,) float32, higher is better. Names not given a weight in the config are logged only.
        """
        ...


class RewardError(RuntimeError):
    """A reward raised, or returned something that is not one finite number per video."""
