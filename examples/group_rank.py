"""A reward by pairs: how often a video is preferred to the others of its group, as in
Pref-GRPO (arXiv 2508.20751).

`rank.yaml`, laid over a preset by `PYTHONPATH=examples sage-fast train toy_cpu
rank.yaml`:

    reward:
      rewards: ["group_rank:GroupRank"]
      weights: {win_rate: 1.0}
      evaluation: [toy]

The mean of a group's win rates is 0.5 whatever is trained, so an evaluation needs
another reward to tell a gain: `reward.evaluation`. To use a judge, override `prefers`.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np


class GroupRank:
    """Gives the share of the other videos of its group that a video is preferred to, as
    the score `win_rate`, from 0 to 1; a tie counts half.
    """

    WHOLE_GROUPS = True

    def score_samples(self, samples: Sequence[Any]) -> dict[str, list[float]]:
        """{"win_rate": B numbers} of B `RewardSample`s, which are whole groups."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            groups[sample.group].append(row)
        wins = [0.0] * len(samples)
        for rows in groups.values():
            for first, second in combinations(rows, 2):
                share = self.prefers(samples[first], samples[second])
                wins[first] += share / (len(rows) - 1)
                wins[second] += (1 - share) / (len(rows) - 1)
        return {"win_rate": wins}

    def prefers(self, first: Any, second: Any) -> float:
        """1 where the first video is better, 0 where the second one is, 0.5 for a tie.
        Here the one that changes more from frame to frame is better.
        """
        gain = movement(first.video) - movement(second.video)
        return float(np.sign(gain) + 1) / 2


def movement(video: Any) -> float:
    """Mean change of a pixel of (F, 3, H, W) uint8 from one frame to the next."""
    frames = np.asarray(video).astype(np.float64)
    return float(np.abs(np.diff(frames, axis=0)).mean())
