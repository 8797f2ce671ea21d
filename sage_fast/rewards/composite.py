"""The rewards of a run as one: every configured reward is called, every score is checked, none is made up."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.config import ConfigError, RewardConfig
from sage_fast.records import Sample
from sage_fast.registry import REWARDS, resolve
from sage_fast.rewards.base import Reward, RewardError

logger = logging.getLogger(__name__)


class CompositeReward:
    """Calls several rewards on the same videos and collects their named scores."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        self.rewards = dict(rewards)
        self.weights = {name: weight for name, weight in weights.items() if weight}

    @classmethod
    def from_config(cls, config: RewardConfig) -> "CompositeReward":
        rewards = {}
        for name in config.rewards:
            constructor = resolve(name, REWARDS, "reward.rewards")
            options = config.options.get(name, {})
            try:
                rewards[name] = constructor(**options)
            except TypeError as error:
                raise ConfigError(f"reward.options.{name} = {options} does not fit {name}: {error}.") from error
            except (ValueError, OSError, ImportError) as error:
                raise ConfigError(f"reward.rewards: {name!r} cannot be set up: {error}") from error
        return cls(rewards, config.weights)

    def score(self, videos: Tensor, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Scores of one batch.

        Args:
            videos: (B, F, 3, H, W) uint8.
            samples: B records, for the prompts and for naming a culprit.

        Returns:
            name -> (B,) float64, all finite.

        Raises:
            RewardError: a reward raised, gave a wrong shape or name, or a score that is not finite.
        """
        prompts = [s.prompt.text for s in samples]
        scores: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            try:
                result = reward.score(videos, prompts)
            except Exception as error:  # a reward is foreign code: whatever it raises ends in one clear message
                raise RewardError(
                    f"Reward {name!r} raised {type(error).__name__}: {error} on {_describe(samples[0])}"
                    + (f" or one of the {len(samples) - 1} videos scored with it." if len(samples) > 1 else ".")
                ) from error
            for key, value in result.items():
                if key in scores:
                    raise RewardError(f"Two rewards return a score named {key!r}; the second is {name!r}.")
                value = torch.as_tensor(value)
                if value.shape != (len(samples),):
                    raise RewardError(
                        f"Reward {name!r} returned {key!r} of shape {tuple(value.shape)} for {len(samples)} videos; "
                        f"it must be ({len(samples)},)."
                    )
                value = value.detach().cpu().double()
                bad = (~value.isfinite()).nonzero().flatten().tolist()
                if bad:
                    raise RewardError(
                        f"Reward {name!r} returned {key} = {value[bad[0]].item()} for {_describe(samples[bad[0]])}."
                    )
                scores[key] = value
        missing = sorted(set(self.weights) - set(scores))
        if missing:
            raise ConfigError(
                f"reward.weights names {missing}, but the rewards {list(self.rewards)} return {sorted(scores)}."
            )
        return scores

    def score_or_mark(self, videos: Tensor, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], Tensor]:
        """As `score`, but a failure marks its sample instead of raising.

        Returns:
            The scores that could be had (zero where they failed, without a name that failed everywhere), and
            (B,) bool, True where a reward failed.
        """
        try:
            return self.score(videos, samples), torch.zeros(len(samples), dtype=torch.bool)
        except RewardError as error:
            logger.warning("Dropping the group of a video whose reward failed. %s", error)
        # Again one by one, to find out whose fault it was.
        scores: dict[str, Tensor] = {}
        failed = torch.ones(len(samples), dtype=torch.bool)
        for row, sample in enumerate(samples):
            try:
                single = self.score(videos[row : row + 1], [sample])
            except RewardError:
                continue
            failed[row] = False
            for name, value in single.items():
                scores.setdefault(name, torch.zeros(len(samples), dtype=torch.float64))[row] = value[0]
        return scores, failed

    def overall(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the scores, (B,) float64."""
        return torch.stack([w * scores[k] for k, w in self.weights.items()]).sum(0)


def _describe(sample: Sample) -> str:
    return f"prompt {sample.prompt.index} ({sample.prompt.text!r}), sample {sample.member}"
