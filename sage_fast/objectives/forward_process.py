"""The forward-process objective (DiffusionNFT, arXiv 2509.16117; AWM, 2509.25050): the
gradient at noised videos.

The final latents x0 of a video are noised again at K levels s, and the velocity there
is pulled towards, or pushed away from, the direction of the video:

    x_t = (1 - s) x0 + s z,     u = z - x0,     dv = v - v_old

Nothing of the sampler's path is needed, so a rollout is plain ODE sampling. With
`states: path` x_t are instead states that a noisy sampler visited, u = (x_t - x0) / s,
and v_old is the velocity that it had there. This is GRPO's gradient at these steps with
the drawn noise replaced by its share that the finished video tells, each step at the
weight below (`docs/algorithm.md` says where that is exact).

    L = w(s) [ 2 A mean((v_old - u) dv) + A_max beta mean(dv^2) ] + lambda w_pos mean((v - v_anchor)^2)

The bracket is DiffusionNFT's loss of two branches less a constant, for every v and |A|
<= A_max: its two branches need no forward beyond v's, and its 1 / beta is the weight of
a trust region around the old policy. At v = v_old the gradient is that of
advantage-weighted flow matching, linear in A. `weighting` is w:

    adaptive    s^2 / stopgrad max(1e-5, s mean|u - v|)         x0    s^2         velocity    1

or `branches`, as in the public codes: each branch v_old +- beta dv over its own error,
so A and A_max are replaced by (A_max + A)/2 w(v_old + beta dv) -+ (A_max - A)/2 w(v_old
- beta dv).

With `clip` the linear term is AWM's, -min(A rho, clip(rho) A) for rho = exp(-w (mean
(v-u)^2 - mean (v_old-u)^2)).

`sampling_guidance` samples x0 by the guided velocity; v, v_old and v_anchor stay the
unguided ones.

Shapes: B batch, C F H W latent channels, frames, rows, columns; K levels.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import Need, RunConfig, check_needs
from sage_fast.config.sections import ForwardProcessConfig, first_steps, require
from sage_fast.data import uniform
from sage_fast.noise import STREAM_FORWARD, NoiseKey, gaussian
from sage_fast.objective import ADVANTAGE_CLIP
from sage_fast.objectives.base import Costs, Objective, Parts, Place, VelocityLoss
from sage_fast.objectives.grpo import Replay, wanted_passes
from sage_fast.optim import NFT_RECIPES
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import ScoredRollout, Trajectory
from sage_fast.rollout import at_steps, rollout_tables, step_sigma
from sage_fast.sde import TransitionTable

logger = logging.getLogger(__name__)

ADAPTIVE_FLOOR = 1e-5
"""Least divisor of the adaptive weighting, as in the public codes."""


class ForwardTerms(NamedTuple):
    """Terms of the loss of B samples at one level each, (B,)."""

    loss: Tensor
    deviation: Tensor
    """mean((v - v_old)^2)."""
    kl_anchor: Tensor
    """mean((v - v_anchor)^2), times what the position counts; 0 where it is not
    measured.
    """
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
    anchor_weight: float,
    settings: ForwardProcessConfig,
) -> ForwardTerms:
    """The loss at the head of this file, per sample. Gradients flow into `velocity`
    alone.

    Args:
        velocity: (B, C, F, H, W), of the current weights.
        target: u, like the velocity.
        velocity_old: of the old policy; None if that is the current one.
        velocity_anchor: of the anchor; None leaves its KL out.
        sigma: (B,), the levels s.
        advantage: (B,), A.
        anchor_weight: lambda w_pos.
    """

    def mean(values: Tensor) -> Tensor:
        return values.flatten(1).mean(1)

    def rms(values: Tensor) -> Tensor:
        return mean(values.detach().square()).sqrt()

    # The divisor of the adaptive weighting and the old policy where it is the current
    # one are constants.
    here = velocity.detach()
    old = here if velocity_old is None else velocity_old.to(velocity)
    target, sigma, advantage = (
        value.to(velocity) for value in (target, sigma, advantage)
    )
    weight = (
        torch.ones_like(sigma) if settings.weighting == "velocity" else sigma.square()
    )

    def adaptive(predicted: Tensor) -> Tensor:
        return sigma.square() / (sigma * mean((target - predicted).abs())).clamp(
            min=ADAPTIVE_FLOOR
        )

    if settings.weighting == "adaptive":
        weight = adaptive(here)
    # A_max.
    bound = torch.full_like(sigma, ADVANTAGE_CLIP)
    if settings.weighting == "branches":
        side = settings.beta * (here - old)
        toward = (bound + advantage) / 2 * adaptive(old + side)
        away = (bound - advantage) / 2 * adaptive(old - side)
        advantage = toward - away
        bound = toward + away
        weight = torch.ones_like(sigma)
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
    if velocity_anchor is None:
        from_anchor = torch.zeros_like(velocity)
    else:
        from_anchor = velocity - velocity_anchor.to(velocity)
    kl = mean(from_anchor.square())
    return ForwardTerms(
        loss=linear + proximal * deviation + anchor_weight * kl,
        deviation=deviation,
        kl_anchor=kl,
        pull=2 * advantage.abs() * weight * rms(old - target),
        proximal_pull=2 * proximal * rms(moved),
        kl_pull=2 * anchor_weight * rms(from_anchor),
    )


def allowed_steps(settings: ForwardProcessConfig, table: TransitionTable) -> list[int]:
    """Steps of the sampler at whose noise levels videos may be trained: those of its
    path must have drawn noise.
    """
    steps = range(first_steps(table.num_steps, settings.within))
    return [
        step for step in steps if settings.states == "noised" or table.trainable[step]
    ]


def level_steps(key: NoiseKey, steps: Sequence[int], count: int) -> list[int]:
    """K = count of these steps for a video, one in each of K equal parts of them."""
    parts = (torch.arange(count) + uniform(key, count)) / count
    return [steps[int(part)] for part in parts * len(steps)]


def old_decay(share: float | Literal["rising", "late"], update: int) -> float:
    """Share of itself that the old policy keeps after `update` updates; NVlabs'
    schedules 1 (rising) and 2 (late).
    """
    if share == "rising":
        return min(0.001 * update, 0.5)
    if share == "late":
        return min(0.0075 * max(0, update - 75), 0.999)
    return share


@dataclass(frozen=True, kw_only=True)
class ForwardLoss(VelocityLoss[ForwardTerms]):
    """Loss of one level of every sample of a micro-batch: `forward_loss` of these
    arguments, (B, C, F, H, W) and (B,).

    Attributes:
        anchor_weight: lambda w_pos.
        anchor_factor: what the KL to the anchor counts here.
    """

    target: Tensor
    velocity_old: Tensor | None
    velocity_anchor: Tensor | None
    advantage: Tensor
    anchor_weight: float
    anchor_factor: float
    settings: ForwardProcessConfig

    def terms(self, velocity: Tensor) -> ForwardTerms:
        """The KL is times its factor."""
        terms = forward_loss(
            velocity,
            self.target,
            self.velocity_old,
            self.velocity_anchor,
            sigma=self.sigma,
            advantage=self.advantage,
            anchor_weight=self.anchor_weight * self.anchor_factor,
            settings=self.settings,
        )
        return terms._replace(kl_anchor=terms.kl_anchor * self.anchor_factor)

    def unmoved(self) -> ForwardTerms:
        """A is 0, and v that of the old policy and of the anchor."""
        return ForwardTerms(
            *[torch.zeros(len(self.sigma), device=self.latents.device)]
            * len(ForwardTerms._fields)
        )


def check_path(config: RunConfig) -> None:
    """ConfigError where a rollout's own states cannot be trained at."""
    process = config.forward_process
    rollout = config.rollout
    if config.samples_by_ode:
        raise ConfigError(
            "forward_process.states is path, but rollout.sde_type "
            f"{rollout.sde_type!r} with eta {rollout.eta:g} draws no noise, so that a "
            "state alone decides its video. Set rollout.sde_type to sage_exact, cps "
            "or another noisy sampler with eta > 0, or states to noised."
        )
    guided = (
        "forward_process.sampling_guidance",
        process.sampling_guidance,
        (None,),
        "its path is the sampler's",
    )
    check_needs("forward_process.states path", "states to noised", [guided])
    tables = rollout_tables(rollout)
    fewest = min(len(allowed_steps(process, table)) for table in tables)
    if fewest < process.levels:
        raise ConfigError(
            f"forward_process.levels is {process.levels}, but the sampler draws noise "
            f"in {fewest} of the steps that forward_process.within {process.within:g} "
            "and rollout.sde_window leave. Lower levels, or widen them."
        )


class ForwardProcess(Objective):
    """`training.update: forward_process`: the gradient of `forward_loss` over K levels
    of every video.
    """

    splits_videos = True
    published = NFT_RECIPES

    @staticmethod
    def costs(config: RunConfig) -> Costs:
        process = config.forward_process
        on_path = process.states == "path"
        keeps_old = process.old_decay is not None
        return Costs(
            positions=[process.levels],
            room=process.levels,
            # It is at states that the sampler has not been to.
            policy_moves=True,
            keeps_steps=on_path,
            # Later updates of a rollout have no velocities at the levels.
            knows_fresh_anchor=config.training.updates_per_rollout == 1,
            keeps_old=keeps_old,
            # On its path the rollout has left its velocities.
            measures_old=keeps_old and not on_path,
        )

    @staticmethod
    def check_config(config: RunConfig) -> None:
        # Settings of the sampler's steps have no meaning at noised videos.
        training = config.training
        rollout = config.rollout
        objective = config.objective
        why = "it trains at forward_process.levels, not at every step of the sampler"
        require(
            rollout.batch_size % training.updates_per_rollout == 0,
            "training.updates_per_rollout",
            training.updates_per_rollout,
            f"a divisor of rollout.batch_size = {rollout.batch_size} with "
            "training.update forward_process, which splits the videos",
        )
        needs: list[Need] = [
            ("training.timestep_fraction", training.timestep_fraction, (1.0,), why),
            ("training.kl_share_every", training.kl_share_every, (0,), why),
            ("objective.kl_mode", objective.kl_mode, ("none", "fixed", "moving"), why),
            ("objective.ratio", objective.ratio, ("gaussian",), why),
        ]
        if training.updates_per_rollout > 1:
            split = "several updates split the videos"
            needs.append(
                ("rollout.micro_batch_size", rollout.videos_at_once, (1,), split)
            )
            needs.append(
                ("training.best_and_worst", training.best_and_worst, (0,), split)
            )
        if config.samples_by_ode:
            starts = "without the sampler's noise one start is one video"
            needs.append(
                (
                    "rollout.initial_noise",
                    rollout.initial_noise,
                    ("own", "fixed"),
                    starts,
                )
            )
        check_needs(
            "training.update forward_process", "training.update to two_phase", needs
        )
        if (scale := config.forward_process.sampling_guidance) is not None:
            trained = config.rollout.guidance_scale
            why = "it is the unguided velocity that is trained"
            check_needs(
                f"forward_process.sampling_guidance {scale:g}",
                "sampling_guidance to null",
                [("rollout.guidance_scale", trained, (1.0,), why)],
            )
        if config.forward_process.states == "path":
            check_path(config)

    @classmethod
    def check_run(cls, config: RunConfig, prompts_per_rollout: int) -> None:
        super().check_run(config, prompts_per_rollout)
        if (
            config.forward_process.states == "path"
            and config.rollout.guidance_scale != 1
        ):
            logger.warning(
                "forward_process.states path with rollout.guidance_scale %g: the "
                "guided velocity is not that of the videos' distribution, and moves "
                "the policy for a reason that is not in the reward. Set "
                "rollout.guidance_scale to 1.",
                config.rollout.guidance_scale,
            )

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        self.process = config.forward_process
        self.on_path = self.process.states == "path"
        self.sampler = GuidedPolicy(
            self.policy.transformer, self.policy.uncond, config.sampling_guidance
        )
        self.replay = Replay(parts=parts, split=config.training.guidance == "split")

    def orders(
        self, keys: Sequence[NoiseKey], table: TransitionTable
    ) -> list[list[int]]:
        return [list(range(self.process.levels)) for _ in keys]

    def mini_batches(
        self, scored: ScoredRollout
    ) -> Iterator[tuple[ScoredRollout, Sequence[int]]]:
        updates = self.training.updates_per_rollout
        positions = range(self.process.levels)
        turns = torch.arange(len(scored.all_trained)) % updates  # as many on every rank
        for turn in range(updates):
            trained = scored.all_trained & (turns == turn)
            # Where a reward has failed for all of a part, its update trains the rest
            # once more.
            yield (
                replace(
                    scored, all_trained=trained if trained.any() else scored.all_trained
                ),
                positions,
            )

    def measure(self, scored: ScoredRollout) -> None:
        anchor = self.measured_anchor
        self.anchor_velocities = self.replay.anchor_velocities(
            anchor, scored, self.kl_factors, self._state
        )
        if self.old is not None and not self.on_path:
            levels = range(self.process.levels)
            # Without an advantage too: the trust region pulls every trained video.
            wanted = wanted_passes(scored, [True] * len(levels))
            self.old_velocities = self.replay.velocities(
                self.old, scored, wanted, levels, self._state
            )

    def _state(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, position: int
    ) -> tuple[Tensor, Tensor]:
        latents, _, sigma = self._trained_at(trajectory, position)
        return latents, sigma

    def _steps(self, trajectory: Trajectory, position: int) -> list[int]:
        """The step of every sample of a micro-batch whose noise level is its level
        number `position`.
        """
        steps = allowed_steps(self.process, trajectory.table)
        return [
            level_steps(key, steps, self.process.levels)[position]
            for key in trajectory.keys
        ]

    def _trained_at(
        self, trajectory: Trajectory, position: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x_t and u (B, C, F, H, W) and s (B,) float32 of a micro-batch, at level
        number `position` of every sample.
        """
        steps = self._steps(trajectory, position)
        x0 = trajectory.final
        sigma = step_sigma(trajectory.table, steps)
        share = sigma.to(x0.device).view(-1, *[1] * (x0.ndim - 1))
        if self.on_path:
            latents = at_steps(trajectory.latents, steps)
            return latents, (latents - x0) / share, sigma
        noise = gaussian(
            trajectory.keys,
            position,
            tuple(x0.shape[1:]),
            stream=STREAM_FORWARD,
            device=x0.device,
        )
        return (1 - share) * x0 + share * noise, noise - x0, sigma

    def accumulate(
        self, scored: ScoredRollout, positions: Sequence[int], update: int
    ) -> ForwardTerms:
        # Where v is that of the old policy and of the anchor, a video without advantage
        # has no gradient.
        wanted = wanted_passes(
            scored,
            [self.old is not None or self.measures(position) for position in positions],
        )
        return self.replay.accumulate(scored, wanted, positions, self._loss)

    def _loss(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, place: Place
    ) -> ForwardLoss:
        latents, target, sigma = self._trained_at(trajectory, place[1])
        velocity_old = self.old_velocities.get(place)
        if self.on_path:
            velocity_old = at_steps(
                trajectory.velocities, self._steps(trajectory, place[1])
            )
        return ForwardLoss(
            latents=latents,
            sigma=sigma,
            target=target,
            velocity_old=velocity_old,
            velocity_anchor=self.anchor_velocities.get(place),
            advantage=scored.advantages[rows],
            anchor_weight=self.kl_weight.weight * self.settings.kl_position_weight,
            anchor_factor=self.kl_factors[place[1]],
            settings=self.process,
        )

    def moved(self, update: int) -> None:
        # After the last update of a rollout the old policy follows.
        share = self.process.old_decay
        if (
            self.old is not None
            and share is not None
            and update % self.training.updates_per_rollout == 0
        ):
            self.old.average(old_decay(share, update))

    def statistics(self, terms: ForwardTerms) -> tuple[dict[str, float], float]:
        pulls = [
            float(column.mean())
            for column in (terms.pull, terms.proximal_pull, terms.kl_pull)
        ]
        # They are all 0 where every advantage is and nothing has moved.
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
