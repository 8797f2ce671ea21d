"""GRPO's loss on the steps of the sampler, and its gradient in two phases: first the
rollout, then the model again at every trained step, this time with a graph.

`SinglePass` takes the gradient during the rollout instead. Both leave the same sum in
`.grad` and return the same `PolicyTerms`. `Replay` runs the model again: with other
weights for their velocities, or with a graph for the gradient.

Shapes: B samples of a micro-batch, N samples of a rollout, V of it on all ranks, P
positions, K trained steps per sample.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, TrainingError
from sage_fast.config.schema import RunConfig, check_needs
from sage_fast.config.sections import ObjectiveConfig, TrainingConfig, kl_uses
from sage_fast.data import num_trained, step_order
from sage_fast.distributed.engine import WeightSnapshot
from sage_fast.kernels import Kernels, PolicyTerms
from sage_fast.noise import NoiseKey, noise_ids
from sage_fast.objective import kl_pulls, loss_settings
from sage_fast.objectives.base import (
    Costs,
    Objective,
    Parts,
    Place,
    Terms,
    VelocityLoss,
    concatenate_terms,
)
from sage_fast.policy.guidance import Cotangents
from sage_fast.records import PromptEmbeds, ScoredRollout, Trajectory
from sage_fast.rewards.base import describe_batch
from sage_fast.rollout import (
    at_steps,
    check_trainable_steps,
    rollout_table,
    rollout_tables,
    step_columns,
    step_sigma,
)
from sage_fast.sde import TransitionTable

StateAt = Callable[[ScoredRollout, slice, Trajectory, int], tuple[Tensor, Tensor]]
"""States (B, C, F, H, W) and noise levels (B,) of a micro-batch, by its rows and
trajectory, at a position.
"""

LossAt = Callable[[ScoredRollout, slice, Trajectory, Place], VelocityLoss[Any]]
"""Loss of a micro-batch at a place."""


def wanted_passes(scored: ScoredRollout, pulls: Sequence[bool]) -> Tensor:
    """Samples and positions (V, P) whose terms are not those at the rollout's velocity,
    bool.

    pulls: P, whether a video without advantage needs the model at a position.
    """
    return scored.all_trained[:, None] & (
        (scored.all_advantages != 0)[:, None] | torch.tensor(pulls)
    )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Runs the policy at micro-batches and positions of a rollout.

    split: the two branches of the guidance one after the other.
    """

    parts: Parts
    split: bool

    @torch.no_grad()
    def velocities(
        self,
        weights: WeightSnapshot,
        scored: ScoredRollout,
        wanted: Tensor,
        positions: Sequence[int],
        state: StateAt,
    ) -> dict[Place, Tensor]:
        """Velocities (B, C, F, H, W) of other weights, for what is wanted (V,
        len(positions)).
        """
        due = self._passes(scored, wanted, positions)
        batches = list(scored.batches())
        found = {}
        with weights.applied():
            for done, (number, position) in enumerate(due):
                rows, trajectory = batches[number]
                self.parts.progress(
                    "anchor", done, len(due), describe_batch(trajectory.samples)
                )
                latents, sigma = state(scored, rows, trajectory, position)
                embeds = [sample.embeds for sample in trajectory.samples]
                found[number, position] = self.parts.policy.velocity(
                    latents, sigma, embeds
                )
        return found

    def anchor_velocities(
        self,
        anchor: WeightSnapshot | None,
        scored: ScoredRollout,
        kl_factors: Sequence[float],
        state: StateAt,
    ) -> dict[Place, Tensor]:
        """Velocities of the anchor, for all trained videos at the positions where the
        KL to it counts.
        """
        if anchor is None:
            return {}
        positions = [position for position, factor in enumerate(kl_factors) if factor]
        wanted = scored.all_trained[:, None].expand(-1, len(positions))
        return self.velocities(anchor, scored, wanted, positions, state)

    def accumulate(
        self,
        scored: ScoredRollout,
        wanted: Tensor,
        positions: Sequence[int],
        loss_at: LossAt,
        *,
        unmoved: bool = False,
    ) -> Any:
        """Add the gradient to `.grad`, and return the terms, as `Objective.accumulate`
        does.

        Args:
            wanted: (V, len(positions)), see `wanted_passes`.
            unmoved: the policy is the one that made the rollout.
        """
        # Of all ranks, so that the sum of their gradients is that of the whole loss.
        count = scored.num_trained * len(positions)
        due = {
            place: done
            for done, place in enumerate(self._passes(scored, wanted, positions))
        }
        collected = []
        for number, (rows, trajectory) in enumerate(scored.batches()):
            if rows.start == scored.middle:
                self.parts.engine.halve()
            for position in positions:
                loss = loss_at(scored, rows, trajectory, (number, position))
                done = due.get((number, position))
                if done is None:
                    # No gradient, and the terms are known without the model.
                    collected.append(loss.unmoved())
                    continue
                self.parts.progress(
                    "update", done, len(due), describe_batch(trajectory.samples)
                )
                self.parts.engine.last_vjp(done + 1 == len(due))
                # Of a micro-batch that runs as a whole, videos that are not trained
                # weigh nothing.
                row_weights = scored.trained[rows].double() / count
                embeds = [sample.embeds for sample in trajectory.samples]
                collected.append(
                    self._differentiate(loss, row_weights, embeds, unmoved)
                )
        if scored.middle == len(scored.trained):
            self.parts.engine.halve()
        return concatenate_terms(collected)

    def _passes(
        self, scored: ScoredRollout, wanted: Tensor, positions: Sequence[int]
    ) -> list[Place]:
        """Places at which this rank runs the model for what is wanted (V,
        len(positions)).

        A micro-batch runs as a whole, because a smaller one rounds otherwise than the
        rollout's. Ranks that keep step make as many passes as the one with most: some
        of theirs are for nothing.
        """
        ranks = len(scored.rows)
        batches = len(scored.trajectories)
        # (data-parallel ranks, micro-batches x positions): whether any sample of the
        # micro-batch is wanted.
        by_rank = (
            wanted[scored.rows]
            .view(ranks, batches, -1, len(positions))
            .any(dim=2)
            .flatten(1)
        )
        own = by_rank[scored.rank]
        if self.parts.engine.lockstep:
            # At least one, since such an engine needs a VJP before each step.
            missing = max(1, int(by_rank.sum(1).max())) - int(own.sum())
            own[(~own).nonzero().flatten()[:missing]] = True
        numbers = range(len(scored.trajectories))
        return [
            place
            for place, runs in zip(
                itertools.product(numbers, positions), own.tolist(), strict=True
            )
            if runs
        ]

    def _differentiate(
        self,
        loss: VelocityLoss[Terms],
        row_weights: Tensor,
        embeds: Sequence[PromptEmbeds],
        unmoved: bool,
    ) -> Terms:
        """Add the gradient of one step to `.grad`; returns its terms."""
        # The cotangent depends on the velocity, which is at hand only in the middle of
        # the call below.
        found: list[Terms] = []

        def at_velocity(velocity: Tensor) -> list[Tensor]:
            cotangent, terms = loss.cotangent(velocity, row_weights)
            found.append(terms)
            return [cotangent]

        cotangents: Cotangents = at_velocity
        if self.split and unmoved and loss.known_velocity is not None:
            # The velocity will be the rollout's, so dL/dv is known without a forward.
            cotangents = [loss.cotangent(loss.known_velocity, row_weights)[0]]
        velocity = self.parts.policy.velocity_and_gradient(
            loss.latents,
            loss.sigma,
            embeds,
            cotangents,
            split=self.split,
            vjp=self.parts.engine.vjp,
        )
        if found:
            return found[0]
        # The terms of the velocity that was differentiated: if it is not the rollout's
        # after all, the ratio shows it.
        with torch.no_grad():
            return loss.terms(velocity)


logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-6
"""How far from 1 the first ratio of a run may be. It is 0 away: rollout and update
compute the same function.
"""


def trained_steps(
    key: NoiseKey, table: TransitionTable, training: TrainingConfig
) -> list[int]:
    """The K trained steps of a sample in the order in which they are visited. Known
    before the rollout.
    """
    trainable = table.trainable.nonzero().flatten().tolist()
    return step_order(
        key, trainable, training.timestep_fraction, training.permute_timesteps
    )


@dataclass(frozen=True, kw_only=True)
class StepLoss(VelocityLoss[PolicyTerms]):
    """Loss of one step of every sample of a micro-batch; the steps may differ from
    sample to sample.

    Attributes:
        keys, steps: B of each; they stand for the noise that the rollout drew.
        velocity_anchor: like the velocity; None if the anchor is the rollout policy.
        advantage: (B,).
        kl_weight: lambda.
        position_factor: what the position KL counts.

    Example: a StepLoss of one sample with `advantage=torch.ones(1), kl_weight=0.0` is
    the surrogate per unit advantage.
    """

    kernels: Kernels
    settings: ObjectiveConfig
    table: TransitionTable
    keys: Sequence[NoiseKey]
    steps: Sequence[int]
    known_velocity: Tensor
    velocity_anchor: Tensor | None
    advantage: Tensor
    kl_weight: float
    position_factor: float

    def terms(self, velocity: Tensor) -> PolicyTerms:
        """The position KL is times its factor."""
        advantage = self.advantage.to(velocity.device, non_blocking=True)
        terms = self.kernels.policy_loss(
            velocity,
            self.known_velocity,
            self.known_velocity
            if self.velocity_anchor is None
            else self.velocity_anchor,
            noise_ids(self.keys, self.steps, velocity.device),
            step_columns(self.settings, self.table, self.steps, advantage),
            loss_settings(self.settings, self.kl_weight, self.position_factor),
        )
        return terms._replace(kl_position=terms.kl_position * self.position_factor)


class GRPO(Objective):
    """The clipped surrogate of each trained step, with the KL terms of
    `objective.kl_mode`.
    """

    _first_update = True
    """No update of this process has been verified."""
    _model_ran = True
    """Some terms of the present update are the model's, not the rollout's."""
    _first_deviation: float | None = None
    """How far from 1 the ratios of the rollout's first update were."""

    @staticmethod
    def costs(config: RunConfig) -> Costs:
        training = config.training
        return Costs(
            # A moving window may have fewer trainable steps at its ends.
            positions=[
                num_trained(training.timestep_fraction, int(table.trainable.sum()))
                for table in rollout_tables(config.rollout)
            ],
            room=config.rollout.num_steps,
            policy_moves=training.updates_per_rollout > 1,
        )

    @staticmethod
    def check_config(config: RunConfig) -> None:
        process = config.forward_process
        update = config.training.update
        if (scale := process.sampling_guidance) is not None:
            why = "no other update samples another velocity"
            check_needs(
                f"forward_process.sampling_guidance {scale:g}",
                "sampling_guidance to null",
                [("training.update", update, ("forward_process",), why)],
            )
        if process.states == "path":
            why = (
                "two_phase and single_pass train by the drawn noise, and a single "
                "pass before its video is finished"
            )
            check_needs(
                "forward_process.states path",
                "states to noised",
                [("training.update", update, ("forward_process",), why)],
            )
        # Without noise there is no log-probability.
        if config.samples_by_ode:
            raise ConfigError(
                f"rollout.sde_type = {config.rollout.sde_type!r} with eta = "
                f"{config.rollout.eta} draws no noise, so the policy has no "
                "log-probability and nothing can be trained. Choose sage_grpo, "
                "sage_exact, dance_grpo, flow_grpo, flow_grpo_wan or cps with eta > 0 "
                "(rollout.eta = 0.5 is the reference default), or training.update "
                "forward_process, which needs no noise."
            )
        check_trainable_steps(config.rollout, config.training)

    @classmethod
    def check_run(cls, config: RunConfig, prompts_per_rollout: int) -> None:
        super().check_run(config, prompts_per_rollout)
        if degenerate := rollout_table(config.rollout, 0).degenerate:
            logger.warning(
                "Steps %s of %s have no positive variance: they are deterministic and "
                "not trained.",
                list(degenerate),
                config.rollout.sde_type,
            )
        stepwise_alone = kl_uses(config.objective.kl_mode) == (False, True)
        if stepwise_alone and config.training.updates_per_rollout == 1:
            logger.info(
                "objective.kl_mode stepwise holds nothing with "
                "training.updates_per_rollout 1: the policy is still the one that it "
                "is compared with. It acts from the second update of a rollout on."
            )

    def begin(self, update: int, rollouts: int) -> None:
        super().begin(update, rollouts)
        self._first_deviation = None

    def orders(
        self, keys: Sequence[NoiseKey], table: TransitionTable
    ) -> list[list[int]]:
        return [trained_steps(key, table, self.training) for key in keys]

    def verify(self, terms: PolicyTerms, update: int) -> None:
        """At the first update of a rollout the policy is the one that made it: a ratio
        other than 1 is a fault.
        """
        if self._first_deviation is not None:
            return
        deviation = float((terms.ratio - 1).abs().max())
        self._first_deviation = deviation
        # Only in this process's first update with a gradient; later ones report it as a
        # metric.
        if self._first_update and self._first_deviation > RATIO_TOLERANCE:
            self.engine.zero_grad()
            raise TrainingError(
                f"Update {update + 1}: the policy that is trained is not the one that "
                f"made the rollout (their ratio differs from 1 by {deviation:.1e}). "
                "The weights were not changed. Compare with model.kernels reference, "
                "model.forward stock and model.attention sdpa, one after the other, "
                "to find the part."
            )
        self._first_update = self._first_update and not self._model_ran

    def statistics(self, terms: PolicyTerms) -> tuple[dict[str, float], float]:
        assert self._first_deviation is not None
        found = {
            "ratio/first_max_deviation": self._first_deviation,
            "loss": float(terms.loss.mean()),
            "ratio/mean": float(terms.ratio.mean()),
            "ratio/max_deviation": float((terms.ratio - 1).abs().max()),
            "log_ratio/mean": float(terms.log_ratio.mean()),
            "log_ratio/std": float(terms.log_ratio.std(correction=0)),
            "ratio/clip_fraction": float(terms.clipped.float().mean()),
            "kl/position": float(terms.kl_position.mean()),
            "kl/velocity": float(terms.kl_velocity.mean()),
        }
        return found, weighted_kl(terms, self.settings)


def weighted_kl(terms: PolicyTerms, settings: ObjectiveConfig) -> float:
    """Mean of the weighted KL terms, which the KL weight's controller watches."""
    kl = (
        settings.kl_position_weight * terms.kl_position
        + settings.kl_velocity_weight * terms.kl_velocity
    )
    return float(kl.mean())


class TwoPhase(GRPO):
    """`training.update: two_phase`. It also measures the KL's share of the gradient
    (`training.kl_share_every`).
    """

    same_gradient = "single_pass"
    step_loss: ClassVar[type[StepLoss]] = StepLoss
    """The loss of a step; a subclass may have another one. A video without advantage
    takes no pass where the KL of this one has no gradient.
    """

    @staticmethod
    def check_config(config: RunConfig) -> None:
        GRPO.check_config(config)
        if config.training.kl_share_every and config.objective.kl_mode == "none":
            raise ConfigError(
                f"training.kl_share_every is {config.training.kl_share_every}, but "
                "with objective.kl_mode none there "
                "is no KL. Set it to 0, or choose a KL mode."
            )

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        self.replay = Replay(parts=parts, split=config.training.guidance == "split")
        self._unmoved = True
        self._kl_share: dict[str, float] = {}

    def measure(self, scored: ScoredRollout) -> None:
        self._unmoved = True
        anchor = self.measured_anchor
        self.anchor_velocities = self.replay.anchor_velocities(
            anchor, scored, self.kl_factors, self._state
        )

    def _state(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, position: int
    ) -> tuple[Tensor, Tensor]:
        steps = [order[position] for order in scored.orders[rows]]
        return at_steps(trajectory.latents, steps), step_sigma(trajectory.table, steps)

    def accumulate(
        self, scored: ScoredRollout, positions: Sequence[int], update: int
    ) -> PolicyTerms:
        every = self.training.kl_share_every
        self._kl_share = {}
        if every and (update + 1) % every == 0:
            # Before the update's own sum, because it empties `.grad`.
            share = self.kl_share(scored, positions)
            # Metrics are finite; without any advantage there is none.
            if math.isfinite(share):
                self._kl_share = {"kl/grad_share": share}
        terms = self._sum(scored, positions, self.kl_weight.weight)
        # The optimizer moves the weights after this call.
        self._unmoved = False
        return terms

    def _sum(
        self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float
    ) -> PolicyTerms:
        """Add and return as `accumulate` does; the weights stay as they are."""
        # Once the policy has moved, the ratio and the KL of every video have values
        # that only its velocity tells.
        pulls = [
            not self._unmoved or kl_pulls(self.settings, anchor_behind=self.measures(p))
            for p in positions
        ]

        def loss_at(
            scored: ScoredRollout, rows: slice, trajectory: Trajectory, place: Place
        ) -> StepLoss:
            steps = [order[place[1]] for order in scored.orders[rows]]
            return self.step_loss(
                kernels=self.kernels,
                settings=self.settings,
                table=trajectory.table,
                keys=trajectory.keys,
                steps=steps,
                latents=at_steps(trajectory.latents, steps),
                sigma=step_sigma(trajectory.table, steps),
                known_velocity=at_steps(trajectory.velocities, steps),
                velocity_anchor=self.anchor_velocities.get(place),
                advantage=scored.advantages[rows],
                kl_weight=kl_weight,
                position_factor=self.kl_factors[place[1]],
            )

        wanted = wanted_passes(scored, pulls)
        self._model_ran = bool(wanted.any())
        return self.replay.accumulate(
            scored, wanted, positions, loss_at, unmoved=self._unmoved
        )

    def kl_share(self, scored: ScoredRollout, positions: Sequence[int]) -> float:
        """Norm of the KL's part of an update's gradient over that of the surrogate's.
        Collective; `.grad` stays empty.

        Without advantages only the KL is left of the loss, without lambda only the
        surrogate: two passes. Infinite if the surrogate has no gradient.
        """
        scored = replace(scored, second_half=None)
        without_advantage = replace(
            scored, all_advantages=torch.zeros_like(scored.all_advantages)
        )
        norms = []
        for part, weight in ((without_advantage, self.kl_weight.weight), (scored, 0.0)):
            self._sum(part, positions, weight)
            # Summed over the ranks, and the norm is that before clipping.
            norms.append(self.engine.clip_gradients())
            self.engine.zero_grad()
        return norms[0] / norms[1] if norms[1] else math.inf

    def statistics(self, terms: PolicyTerms) -> tuple[dict[str, float], float]:
        found, kl = super().statistics(terms)
        return self._kl_share | found, kl
