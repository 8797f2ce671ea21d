"""The forward-process objective (DiffusionNFT, arXiv 2509.16117; AWM, 2509.25050): the gradient at noised videos.

Nothing of the sampler's path is needed, so a rollout is plain ODE sampling. The final latents x0 of a video are noised
again at K levels s, and the velocity there is pulled towards, or pushed away from, the direction of the video:

    x_t = (1 - s) x0 + s z,     u = z - x0,     dv = v - v_old

    L = w(s) [ 2 A mean((v_old - u) dv) + A_max beta mean(dv^2) ] + lambda w_pos mean((v - v_anchor)^2)

The bracket is DiffusionNFT's loss of two branches less a constant, for every v and |A| <= A_max: its two branches need
no forward beyond v's, and its 1 / beta is the weight of a trust region around the old policy. At v = v_old the
gradient is that of advantage-weighted flow matching, linear in A. `weighting` is w:

    adaptive    s^2 / stopgrad max(1e-5, s mean|u - v|)         x0    s^2         velocity    1

or `branches`, as in the public codes: each branch v_old +- beta dv over its own error, so A and A_max are replaced by
(A_max + A)/2 w(v_old + beta dv) -+ (A_max - A)/2 w(v_old - beta dv).

With `clip` the linear term is AWM's, -min(A rho, clip(rho) A) for rho = exp(-w (mean (v-u)^2 - mean (v_old-u)^2)).

`sampling_guidance` samples x0 by the guided velocity; v, v_old and v_anchor stay the unguided ones.

Shapes: B batch, C F H W latent channels, frames, rows, columns; K levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sage_fast.config.sections import ForwardProcessConfig
from sage_fast.data import uniform
from sage_fast.distributed.engine import Snapshot
from sage_fast.gradient import TwoPhaseGradient, VelocityLoss
from sage_fast.noise import STREAM_FORWARD, NoiseKey, gaussian
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Sample, ScoredRollout, Trajectory
from sage_fast.rollout import StepVelocity, policy_velocity
from sage_fast.sde import TransitionTable

ADAPTIVE_FLOOR = 1e-5
"""Least divisor of the adaptive weighting, as in the public codes."""


class ForwardTerms(NamedTuple):
    """Terms of the loss of B samples at one level each, (B,)."""

    loss: Tensor
    deviation: Tensor
    """mean((v - v_old)^2)."""
    kl_anchor: Tensor
    """mean((v - v_anchor)^2), times what the position counts; 0 where it is not measured."""
    pull: Tensor
    """Norm of dL/dv over sqrt(numel), of the term linear in A."""
    proximal_pull: Tensor
    """The same of the trust region's term."""
    kl_pull: Tensor
    """The same of the KL's term."""


def forward_loss(
    velocity: Tensor,
    target: Tensor,
    velocity_old: Tensor | None,
    velocity_anchor: Tensor | None,
    *,
    sigma: Tensor,
    advantage: Tensor,
    advantage_bound: float,
    kl_weight: float,
    settings: ForwardProcessConfig,
) -> ForwardTerms:
    """The loss at the head of this file, per sample. Gradients flow into `velocity` alone.

    Args:
        velocity: (B, C, F, H, W), of the current weights.
        target: u, like the velocity.
        velocity_old: of the old policy; None if that is the current one.
        velocity_anchor: of the anchor; None leaves its KL out.
        sigma: (B,), the levels s. advantage: (B,), A.
        advantage_bound: A_max. kl_weight: lambda w_pos.
    """

    def mean(values: Tensor) -> Tensor:
        return values.flatten(1).mean(1)

    def rms(values: Tensor) -> Tensor:
        return mean(values.detach().square()).sqrt()

    # The divisor of the adaptive weighting and the old policy where it is the current one are constants.
    here = velocity.detach()
    old = here if velocity_old is None else velocity_old.to(velocity)
    target, sigma, advantage = (value.to(velocity) for value in (target, sigma, advantage))
    weight = torch.ones_like(sigma) if settings.weighting == "velocity" else sigma.square()

    def adaptive(predicted: Tensor) -> Tensor:
        return sigma.square() / (sigma * mean((target - predicted).abs())).clamp(min=ADAPTIVE_FLOOR)

    if settings.weighting == "adaptive":
        weight = adaptive(here)
    bound = torch.full_like(sigma, advantage_bound)
    if settings.weighting == "branches":
        side = settings.beta * (here - old)
        toward, away = (bound + advantage) / 2 * adaptive(old + side), (bound - advantage) / 2 * adaptive(old - side)
        advantage, bound, weight = toward - away, toward + away, torch.ones_like(sigma)
    moved = velocity - old
    deviation = mean(moved.square())
    if settings.clip is None:
        linear = 2 * advantage * weight * mean((old - target) * moved)
    else:
        # mean (v-u)^2 - mean (v_old-u)^2, without the difference of two large numbers.
        ratio = torch.exp(-weight * mean(moved * (moved + 2 * (old - target))))
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        linear = -torch.minimum(advantage * ratio, advantage * clipped)
    proximal = bound * settings.beta * weight
    from_anchor = torch.zeros_like(velocity) if velocity_anchor is None else velocity - velocity_anchor.to(velocity)
    kl = mean(from_anchor.square())
    return ForwardTerms(
        loss=linear + proximal * deviation + kl_weight * kl,
        deviation=deviation,
        kl_anchor=kl,
        pull=2 * advantage.abs() * weight * rms(old - target),
        proximal_pull=2 * proximal * rms(moved),
        kl_pull=2 * kl_weight * rms(from_anchor),
    )


def levels(key: NoiseKey, table: TransitionTable, shift: float, settings: ForwardProcessConfig) -> Tensor:
    """Noise levels (K,) float64 in (0, 1] of a video: one in each of K equal parts of the schedule."""
    parts = (torch.arange(settings.levels) + uniform(key, settings.levels)) / settings.levels
    if settings.schedule == "sampler":
        return table.sigmas[(parts * table.num_steps).long()].double()
    times = 1 - parts  # in (0, 1], because a draw is in [0, 1)
    return shift * times / (1 + (shift - 1) * times)


def old_decay(settings: ForwardProcessConfig, update: int) -> float:
    """Share of itself that the old policy keeps after `update` updates; NVlabs' schedules 1 (rising) and 2 (late)."""
    if settings.old_decay == "rising":
        return min(0.001 * update, 0.5)
    if settings.old_decay == "late":
        return min(0.0075 * max(0, update - 75), 0.999)
    return settings.old_decay


@dataclass(frozen=True, kw_only=True)
class ForwardLoss(VelocityLoss[ForwardTerms]):
    """Loss of one level of every sample of a micro-batch: `forward_loss` of these arguments, (B, C, F, H, W) and (B,).

    kl_weight: lambda w_pos. kl_factor: what the KL to the anchor counts.
    """

    target: Tensor
    velocity_old: Tensor | None
    velocity_anchor: Tensor | None
    advantage: Tensor
    advantage_bound: float
    kl_weight: float
    kl_factor: float
    settings: ForwardProcessConfig

    def terms(self, velocity: Tensor) -> ForwardTerms:
        """As in `VelocityLoss`. The KL is times its factor."""
        terms = forward_loss(
            velocity,
            self.target,
            self.velocity_old,
            self.velocity_anchor,
            sigma=self.sigma,
            advantage=self.advantage,
            advantage_bound=self.advantage_bound,
            kl_weight=self.kl_weight * self.kl_factor,
            settings=self.settings,
        )
        return terms._replace(kl_anchor=terms.kl_anchor * self.kl_factor)

    def unmoved(self) -> ForwardTerms:
        """As in `VelocityLoss`: A is 0, and v that of the old policy and of the anchor."""
        return ForwardTerms(*[torch.zeros(len(self.sigma), device=self.latents.device)] * len(ForwardTerms._fields))


@dataclass(kw_only=True, eq=False)
class ForwardProcessGradient(TwoPhaseGradient):
    """The gradient of `forward_loss` over K levels of every video.

    shift: of the sampler's schedule. advantage_bound: A_max. old: the old policy where it is not the current one; the
    rollout was sampled with it. sampler: the velocity that samples, guided or as the trained one.
    """

    process: ForwardProcessConfig
    shift: float
    advantage_bound: float
    old: Snapshot | None
    sampler: GuidedPolicy
    _old_velocities: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    def begin(self, kl_weight: float, anchor: Snapshot | None, kl_factors: Sequence[float]) -> None:
        """As in `PolicyGradient`."""
        super().begin(kl_weight, anchor, kl_factors)
        self._old_velocities = {}

    def velocity(self, samples: Sequence[Sample], keys: Sequence[NoiseKey], table: TransitionTable) -> StepVelocity:
        """As in `PolicyGradient`."""
        return policy_velocity(self.sampler, samples)

    def orders(self, keys: Sequence[NoiseKey], table: TransitionTable) -> list[list[int]]:
        """As in `PolicyGradient`: numbers of levels."""
        return [list(range(self.process.levels)) for _ in keys]

    def measure_anchor(self, scored: ScoredRollout) -> None:
        """As in `PolicyGradient`; the old policy's velocities too, wherever the model will run."""
        super().measure_anchor(scored)
        if self.old is not None:
            positions = range(self.process.levels)
            wanted = self._has_gradient(scored, positions)
            self._old_velocities = self._velocities(self.old, scored, wanted, positions)

    def _pulls(self, position: int) -> bool:
        return self.old is not None or self._measures(position)

    def _state(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, position: int
    ) -> tuple[Tensor, Tensor]:
        noised, _, sigma = self._noised(trajectory, position)
        return noised, sigma

    def _noised(self, trajectory: Trajectory, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """x_t and z (B, C, F, H, W) and s (B,) float32 of a micro-batch, at level number `position` of every sample."""
        keys, x0 = trajectory.keys, trajectory.final
        sigma = torch.stack([levels(key, trajectory.table, self.shift, self.process)[position] for key in keys]).float()
        noise = gaussian(keys, position, tuple(x0.shape[1:]), stream=STREAM_FORWARD, device=x0.device)
        share = sigma.to(x0.device).view(-1, *[1] * (x0.ndim - 1))
        return (1 - share) * x0 + share * noise, noise, sigma

    def _loss(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, number: int, position: int, kl_weight: float
    ) -> ForwardLoss:
        latents, noise, sigma = self._noised(trajectory, position)
        return ForwardLoss(
            latents=latents,
            sigma=sigma,
            target=noise - trajectory.final,
            velocity_old=self._old_velocities.get((number, position)),
            velocity_anchor=self._anchor_velocities.get((number, position)),
            advantage=scored.advantages[rows],
            advantage_bound=self.advantage_bound,
            kl_weight=kl_weight * self.settings.kl_position_weight,
            kl_factor=self._kl_factors[position],
            settings=self.process,
        )

    def report(self, terms: ForwardTerms) -> tuple[dict[str, float], float]:
        """As in `PolicyGradient`."""
        pulls = [float(column.mean()) for column in (terms.pull, terms.proximal_pull, terms.kl_pull)]
        total = sum(pulls) or 1.0
        kl = float(terms.kl_anchor.mean())
        metrics = {
            "loss": float(terms.loss.mean()),
            "old/deviation": float(terms.deviation.mean()),
            "old/proximal_share": pulls[1] / total,
            "kl/anchor": kl,
            "kl/share": pulls[2] / total,
            "forward/levels": self.process.levels,
        }
        return metrics, self.settings.kl_position_weight * kl
