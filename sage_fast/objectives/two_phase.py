"""GRPO in two phases: first the rollout, then the model again at every trained step,
this time with a graph.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.kernels import PolicyTerms
from sage_fast.objective import kl_pulls
from sage_fast.objectives.base import Parts, Place
from sage_fast.objectives.grpo import GRPO, StepLoss
from sage_fast.objectives.replay import Replay, wanted_passes
from sage_fast.records import ScoredRollout, Trajectory
from sage_fast.rollout import at_steps, step_sigma

logger = logging.getLogger(__name__)


class TwoPhase(GRPO):
    """`training.update: two_phase`. It also measures the KL's share of the gradient
    (`training.kl_share_every`).
    """

    same_gradient = "single_pass"

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
            if math.isfinite(share):
                self._kl_share = {"kl/grad_share": share}
            else:
                logger.warning(
                    "Update %d: kl/grad_share is left out, because the rewards leave "
                    "no gradient to compare the KL's with (all advantages are 0).",
                    update + 1,
                )
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
            return StepLoss(
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
