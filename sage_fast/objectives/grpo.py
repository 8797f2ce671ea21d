"""GRPO's loss on the steps of the sampler, whichever way its gradient is taken.

`TwoPhase` runs the model again after the rollout, `SinglePass` takes the gradient
during the rollout. Both leave the same sum in `.grad` and return the same
`PolicyTerms`.

Shapes: B samples of a micro-batch, N samples of a rollout, K trained steps per sample.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sage_fast.config.errors import ConfigError, TrainingError
from sage_fast.config.schema import RunConfig, check_needs
from sage_fast.config.sections import ObjectiveConfig, TrainingConfig
from sage_fast.data import num_trained, step_order
from sage_fast.kernels import Kernels, PolicyTerms
from sage_fast.noise import NoiseKey, noise_ids
from sage_fast.objective import loss_settings
from sage_fast.objectives.base import Costs, Objective, VelocityLoss
from sage_fast.rollout import (
    check_trainable_steps,
    rollout_table,
    rollout_tables,
    step_columns,
)
from sage_fast.sde import TransitionTable

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

    keys, steps: B of each; they stand for the noise that the rollout drew.
    velocity_anchor: like the velocity; None if the anchor is the rollout policy.
    advantage: (B,). kl_weight: lambda. position_factor: what the position KL counts.

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
                "sage_exact, dance_grpo, flow_grpo or cps with eta > 0 (rollout.eta = "
                "0.5 is the reference default), or training.update forward_process, "
                "which needs no noise."
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
        deviation = float((terms.ratio - 1).abs().max())
        if self._first_deviation is None:
            self._first_deviation = deviation
        # Only in this process's first update; later ones report it as a metric.
        if self._first_update and self._first_deviation > RATIO_TOLERANCE:
            self.engine.zero_grad()
            raise TrainingError(
                f"Update {update + 1}: the policy that is trained is not the one that "
                f"made the rollout (their ratio differs from 1 by {deviation:.1e}). "
                "The weights were not changed. Compare with model.kernels reference, "
                "model.forward stock and model.attention sdpa, one after the other, "
                "to find the part."
            )
        self._first_update = False

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
