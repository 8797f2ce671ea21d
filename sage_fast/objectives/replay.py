"""The model run again after a rollout: with other weights for their velocities, or with
a graph for the gradient.

Shapes: B samples of a micro-batch, V samples of a rollout on all ranks, P positions.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_fast.distributed.engine import WeightSnapshot
from sage_fast.objectives.base import (
    Parts,
    Place,
    Terms,
    VelocityLoss,
    concatenate_terms,
)
from sage_fast.policy.guidance import Cotangents
from sage_fast.records import PromptEmbeds, ScoredRollout, Trajectory
from sage_fast.rewards.base import describe_batch

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
