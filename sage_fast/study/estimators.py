"""How good an estimate of the gradient is: its signal, noise and bias, from inner products of independent estimates.

An estimate g is the gradient of one rollout. n of a lever, a_1 .. a_n, and N >= n of the reference, r_1 .. r_N, have
common noise where the two draw alike: a_i and r_i may depend on each other, and nothing else does. Then products of
different estimates have no noise of their own: |E a|^2 is the mean of <a_i, a_j> over i != j, E a . E r that of
<a_i, r_j>, and |E a - E r|^2 that of <a_i - r_i, a_j - r_j>. Errors are of the jackknife over i, which also takes the
first order out of what ratios do to a mean.

Shapes: n estimates of a lever, N of the reference, D numbers kept of each.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_fast.checkpoint import newest_checkpoint
from sage_fast.config.files import replacing
from sage_fast.config.schema import RunConfig
from sage_fast.data import PromptSchedule
from sage_fast.run.run import build_trainer
from sage_fast.study.findings import Finding
from sage_fast.trainer import Trainer

KEPT_NUMBERS = 2**20
"""D at most. Longer gradients are summed with random signs into so many sums, which leaves squares and products as they
are but for a relative error of sqrt(2 / D) = 0.1 %."""


@dataclass(frozen=True)
class Grams:
    """Inner products in float64: (n, n) of a lever's estimates, (n, N) of these with the reference's, and (N, N) of the
    reference's. paired: how many of the reference's, its first ones, share their noise with the lever's.
    """

    own: Tensor
    cross: Tensor
    reference: Tensor
    paired: int

    @classmethod
    def of(cls, estimates: Tensor, reference: Tensor) -> "Grams":
        """From estimates (n, D) and (N, D) of the reference."""
        own, other = estimates.double(), reference.double()
        return cls(own @ own.T, own @ other.T, other @ other.T, len(own))

    def without(self, i: int) -> "Grams":
        """Those of the others than a_i and r_i."""
        ours, theirs = (torch.arange(len(gram)) != i for gram in (self.own, self.reference))
        return Grams(
            self.own[ours][:, ours],
            self.cross[ours][:, theirs],
            self.reference[theirs][:, theirs],
            int(ours.sum()),
        )


def mean_product(gram: Tensor) -> float:
    """E a . E b from <a_i, b_j>, i != j; (n, N)."""
    return float(gram.sum() - gram.diagonal().sum()) / (gram.numel() - min(gram.shape))


def noise(gram: Tensor) -> float:
    """tr Var a from <a_i, a_j>."""
    return float(gram.trace()) / len(gram) - mean_product(gram)


def signal(grams: Grams) -> float:
    """|E a|^2 / tr Var a, of one estimate."""
    return mean_product(grams.own) / noise(grams.own)


def bias(grams: Grams) -> float:
    """|E a - E r|^2 / |E r|^2."""
    n = grams.paired
    cross = grams.cross[:, :n]
    difference = grams.own - cross - cross.T + grams.reference[:n, :n]
    return mean_product(difference) / mean_product(grams.reference)


def cosine(grams: Grams) -> float:
    """Between E a and E r; nan where a mean is lost in its noise."""
    square = mean_product(grams.own) * mean_product(grams.reference)
    return mean_product(grams.cross) / square**0.5 if square > 0 else float("nan")


def noise_ratio(grams: Grams) -> float:
    """tr Var a / tr Var r, over the same noise."""
    n = grams.paired
    return noise(grams.own) / noise(grams.reference[:n, :n])


def kept_at_the_same_mean(grams: Grams) -> float:
    """Signal of a lever over the reference's where both have the same mean."""
    return 1 / noise_ratio(grams)


def kept(grams: Grams) -> float:
    """Signal of a lever along the reference's mean over the reference's signal."""
    along = mean_product(grams.cross) / mean_product(grams.reference)
    return along**2 / noise_ratio(grams)


def jackknife(statistic: Callable[[Grams], float], grams: Grams) -> tuple[float, float]:
    """A statistic without the first order of its bias, and its standard error. At least 3 estimates."""
    whole = statistic(grams)
    parts = torch.tensor([statistic(grams.without(i)) for i in range(len(grams.reference))], dtype=torch.float64)
    value, variance = whole, 0.0
    # What the lever has noise in common with, and the rest of the reference's, are two samples.
    for sample in (parts[: grams.paired], parts[grams.paired :]):
        if n := len(sample):
            value += (n - 1) * (whole - float(sample.mean()))
            variance += (n - 1) / n * float((sample - sample.mean()).square().sum())
    return value, math.sqrt(variance)


def quantities(grams: Grams, *, same_mean: bool) -> dict[str, tuple[float, float]]:
    """What is reported of a lever, each with its standard error; a cosine only where both means stand out of the noise.

    same_mean: the mean is known to be the reference's.
    """
    statistics: dict[str, Callable[[Grams], float]] = {
        "noise": noise_ratio,
        "signal": signal,
        "bias": bias,
        "cosine": cosine,
        "kept": kept_at_the_same_mean if same_mean else kept,
    }
    found = {name: jackknife(statistic, grams) for name, statistic in statistics.items()}
    return {name: pair for name, pair in found.items() if all(map(math.isfinite, pair))}


# ------------------------------------------------------------------------------------------------ sampling


def flat(gradient: Mapping[str, Tensor], size: int = KEPT_NUMBERS) -> Tensor:
    """A gradient as one float32 vector in CPU memory, of all its numbers or of `size` signed sums of them."""
    column = torch.cat([gradient[name].flatten().float() for name in sorted(gradient)])
    if len(column) <= size:
        return column.cpu()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(size, column.shape, generator=generator).to(column.device)
    signs = torch.randint(2, column.shape, generator=generator, dtype=torch.int8).to(column) * 2 - 1
    return torch.zeros(size, device=column.device).index_add_(0, places, signs * column).cpu()


def sample_estimates(trainer: Trainer, count: int) -> Iterator[Tensor]:
    """`count` independent estimates at the trainer's weights: other prompts and other noise for each.

    The anchor stays where it is, as far behind the policy as it was.
    """
    prompts, first = trainer.schedule.prompts, trainer.update
    fresh = trainer.anchor_update == first
    for number in range(count):
        trainer.schedule = PromptSchedule(prompts, seed=number, shuffle=True)
        trainer.rollouts = number  # moves a sliding window
        trainer.update = first + number  # names the noise and the draws
        trainer.anchor_update = trainer.update if fresh else trainer.update - 1
        yield flat(trainer.estimate_gradient())


def measure_estimates(
    config: RunConfig, *, arm: str, same_mean: bool, checkpoint: str, count: int, reference: str, seed: int
) -> Iterator[Finding]:
    """Sample a lever's estimates and compare them with the reference's.

    Args:
        arm: name of the lever.
        same_mean: see `quantities`.
        checkpoint: folder of checkpoints, of which the newest has the weights and the anchor.
        count: n, or N for the reference.
        reference: file of the reference's estimates; written where it is missing, with these.
        seed: of the run, for the findings.
    """
    trainer = build_trainer(replace(config, seed=seed))
    try:
        state = newest_checkpoint(Path(checkpoint))
        assert state is not None
        trainer.load(state, state.state["trainer"])
        estimates = stack(sample_estimates(trainer, count))
    finally:
        trainer.reward.close()
    file = Path(reference)
    if not file.is_file():
        with replacing(file) as partial:
            save_file({"estimates": estimates}, partial)
    grams = Grams.of(estimates, load_file(file)["estimates"])
    for quantity, (value, error) in quantities(grams, same_mean=same_mean).items():
        yield Finding(
            experiment="efficiency", quantity=quantity, arm=arm, seed=seed, value=value, stderr=error, n=count
        )


def stack(estimates: Iterable[Tensor]) -> Tensor:
    """(n, D) float32."""
    return torch.stack(list(estimates))
