"""Paired evaluation: the same prompts and the same initial noise, by the ODE sampler, before and after training."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.files import replacing
from sage_fast.policy.base import VideoDecoder
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Sample
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import micro_batches, sample_trajectory
from sage_fast.sde import TransitionTable


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of one evaluation.

    prompts: P texts. scores: name -> P floats. reward: P floats, the weighted overall.

    Example: `Evaluation(prompts=["a red circle moving left"], scores={"VQ": [-0.2]}, reward=[-0.2])`
    """

    prompts: list[str]
    scores: dict[str, list[float]]
    reward: list[float]

    def save(self, path: Path) -> None:
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Evaluation":
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Difference of two evaluations of the same prompts and noise.

    mean: mean of (after - before). stderr: its standard error, from the sample std of the differences. wins: share of
    prompts whose score is higher afterwards. count: number of pairs.

    Example: differences 1, 2, 3 give mean 2, stderr 0.577, wins 1.0, count 3.
    """

    before: float
    after: float
    mean: float
    stderr: float
    wins: float
    count: int

    @property
    def standard_errors(self) -> float:
        """How many standard errors the mean difference is away from zero."""
        if self.stderr == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.stderr


def paired_test(before: Sequence[float], after: Sequence[float]) -> PairedTest:
    """Paired comparison of scores of the same samples. ValueError unless both lists have the same length >= 2."""
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(
            f"A paired test needs two equally long lists of at least 2 scores, got {len(before)} and {len(after)}."
        )
    b = torch.tensor(before, dtype=torch.float64)
    a = torch.tensor(after, dtype=torch.float64)
    difference = a - b
    return PairedTest(
        before=float(b.mean()),
        after=float(a.mean()),
        mean=float(difference.mean()),
        stderr=float(difference.std(unbiased=True)) / math.sqrt(len(difference)),
        wins=float((difference > 0).double().mean()),
        count=len(difference),
    )


def evaluate(
    policy: GuidedPolicy,
    decoder: VideoDecoder,
    reward: CompositeReward,
    samples: Sequence[Sample],
    table: TransitionTable,
    latent_shape: tuple[int, int, int, int],
    *,
    seed: int,
    batch_size: int,
    keep_videos: Collection[int] = (),
    device: torch.device | str = "cpu",
    on_batch: Callable[[int, int], None] | None = None,
) -> tuple[Evaluation, dict[int, Tensor]]:
    """Generate and score one video per sample.

    Returns:
        The scores, and the videos of the samples number `keep_videos`, (F, 3, H, W) uint8 each.
    """
    scores: dict[str, list[float]] = {}
    overall: list[float] = []
    videos: dict[int, Tensor] = {}
    batches = list(micro_batches(samples, batch_size))
    for done, batch in enumerate(batches):
        if on_batch is not None:
            on_batch(done, len(batches))
        trajectory = sample_trajectory(policy, batch, table, latent_shape, seed=seed, update=0, device=device)
        decoded = decoder.decode(trajectory.final)
        batch_scores = reward.score(decoded, batch)
        first = len(overall)
        videos |= {first + row: video.cpu() for row, video in enumerate(decoded) if first + row in keep_videos}
        overall += reward.overall(batch_scores).tolist()
        for name, value in batch_scores.items():
            scores.setdefault(name, []).extend(value.tolist())
    return Evaluation(prompts=[s.prompt.text for s in samples], scores=scores, reward=overall), videos


def format_comparison(before: Evaluation, after: Evaluation) -> str:
    """The paired test of the overall reward and of every score, as a small table."""
    rows = [("reward", before.reward, after.reward)]
    rows += [(name, before.scores[name], after.scores[name]) for name in sorted(before.scores)]
    lines = [f"{'score':<18}{'before':>10}{'after':>10}{'difference':>12}{'std. error':>12}{'in s.e.':>9}{'higher':>8}"]
    for name, b, a in rows:
        test = paired_test(b, a)
        lines.append(
            f"{name:<18}{test.before:>10.4f}{test.after:>10.4f}{test.mean:>+12.4f}{test.stderr:>12.4f}"
            f"{test.standard_errors:>+9.1f}{test.wins:>8.0%}"
        )
    return "\n".join(lines)
