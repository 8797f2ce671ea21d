"""The scores of a rollout or an evaluation, from all ranks to all ranks, in one exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.distributed.world import World
from sage_fast.records import Sample
from sage_fast.rewards.base import OnFailure, PendingScores, ScoredBatch, Scorer


@dataclass(kw_only=True)
class _OwnScores:
    """What one rank tells the others. Example: videos 2 and 3 of 8, of which the second could not be scored."""

    numbers: list[int] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class _Failed:
    """`PendingScores` of a batch for which the reward has already failed."""

    error: RewardError

    def result(self) -> ScoredBatch:
        raise self.error


def submit_scores(
    reward: Scorer, videos: Tensor, samples: Sequence[Sample], on_failure: OnFailure, world: World
) -> PendingScores:
    """`Scorer.submit`, except that among several ranks a RewardError is kept for `gather_scores`.

    Raised here it would leave the others in the next collective, and they could not tell their user why.
    """
    try:
        return reward.submit(videos, samples, on_failure)
    except RewardError as error:
        if world.size == 1:
            raise
        return _Failed(error)


def gather_scores(
    pending: Sequence[tuple[Sequence[int], PendingScores]],
    count: int,
    world: World,
    on_batch: Callable[[int, int, str], None] = lambda done, total, subject: None,
) -> tuple[dict[str, Tensor], Tensor, float]:
    """Wait for this rank's scores, and get everybody's. Collective; every video is scored on one rank.

    Args:
        pending: batches of this rank: the numbers of their videos among all, and their scores.
        count: videos on all ranks.
        on_batch: called as on_batch(batches done, this rank's batches, what is waited for).

    Returns:
        scores: name -> (count,) float64, 0 where a video failed. failed: (count,) bool. seconds: how long the rewards
        of the slowest rank computed.

    Raises:
        RewardError: a reward failed on any rank and was to stop the run, or videos have different scores. The same on
        every rank.
    """
    own = _OwnScores()
    try:
        for done, (numbers, waiting) in enumerate(pending):
            on_batch(done, len(pending), f"videos {numbers[0]} to {numbers[-1]} of the rollout")
            result = waiting.result()
            columns = {name: values.tolist() for name, values in result.scores.items()}
            own.numbers += numbers
            own.failed += result.failed.tolist()
            own.scores += [{name: column[row] for name, column in columns.items()} for row in range(len(numbers))]
            own.seconds += result.seconds
    except RewardError as error:
        if world.size == 1:
            raise
        own.error = str(error)
    ranks = world.gather(own)
    for rank, other in enumerate(ranks):
        if other.error is not None:
            raise RewardError(f"On rank {rank}: {other.error}")
    failed = torch.zeros(count, dtype=torch.bool)
    # A batch that failed as a whole has no scores; its groups are dropped, so the filler is never read.
    names = sorted({name for other in ranks for scores in other.scores for name in scores})
    columns_of = {name: torch.zeros(count, dtype=torch.float64) for name in names}
    for other in ranks:
        for number, lost, scores in zip(other.numbers, other.failed, other.scores, strict=True):
            failed[number] = lost
            if scores and sorted(scores) != names:
                raise RewardError(
                    f"The rewards returned the scores {sorted(scores)} for some videos and {names} in all; every video "
                    "needs the same ones."
                )
            for name, value in scores.items():
                columns_of[name][number] = value
    return columns_of, failed, max(other.seconds for other in ranks)
