"""The gradient of the objective: what all ways of computing it share, and the two-phase way.

`training.update` chooses between `TwoPhaseGradient`, which runs the model again after the rollout, and
`SinglePassGradient` (`single_pass.py`), which takes the gradient during the rollout. Both leave the same sum in `.grad`
and return the same `PolicyTerms`. `ForwardProcessGradient` (`forward_process.py`) takes another objective's at noised
videos. All that the trainer knows of them is their base, `PolicyGradient`.

Shapes: B samples of a micro-batch, N samples of a rollout, K trained steps per sample.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sage_fast.config.sections import TrainingConfig
from sage_fast.data import step_order
from sage_fast.distributed.engine import Engine, Snapshot
from sage_fast.distributed.world import World
from sage_fast.kernels import Kernels, PolicyTerms
from sage_fast.noise import NoiseKey, noise_ids
from sage_fast.objective import ObjectiveConfig, kl_pulls, loss_settings
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt, PromptEmbeds, Sample, ScoredRollout, Trajectory, update_metrics, weighted_kl
from sage_fast.rewards.base import describe_batch
from sage_fast.rollout import Progress, StepVelocity, at_steps, policy_velocity, step_columns, step_sigma
from sage_fast.sde import TransitionTable

Terms = TypeVar("Terms", bound=tuple[Tensor, ...])
"""A NamedTuple of columns, the first of them `loss`: `PolicyTerms`, or those of the forward process."""


def trained_steps(key: NoiseKey, table: TransitionTable, training: TrainingConfig) -> list[int]:
    """The K trained steps of a sample in the order in which they are visited. Known before the rollout."""
    trainable = table.trainable.nonzero().flatten().tolist()
    return step_order(key, trainable, training.timestep_fraction, training.permute_timesteps)


@dataclass(kw_only=True, eq=False)
class PolicyGradient:
    """A way to compute the gradient of a rollout's objective.

    settings, training: their sections.
    """

    policy: GuidedPolicy
    kernels: Kernels
    settings: ObjectiveConfig
    training: TrainingConfig
    _anchor: Snapshot | None = field(default=None, init=False)
    _kl_factors: Sequence[float] = field(default=(), init=False)

    def begin(self, kl_weight: float, anchor: Snapshot | None, kl_factors: Sequence[float]) -> None:
        """A rollout starts.

        Args:
            kl_weight: lambda of its first update.
            anchor: weights that the position KL is measured from; None if the KL mode has no anchor, or if the anchor
                is the policy that makes the rollout.
            kl_factors: K numbers, what the position KL counts at each position of a sample's order.
        """
        self._anchor, self._kl_factors = anchor, kl_factors

    def orders(self, keys: Sequence[NoiseKey], table: TransitionTable) -> list[list[int]]:
        """Lists of K: the trained steps of each sample in the order of its visits, or the numbers of its levels."""
        return [trained_steps(key, table, self.training) for key in keys]

    def velocity(self, samples: Sequence[Sample], keys: Sequence[NoiseKey], table: TransitionTable) -> StepVelocity:
        """Velocities of a micro-batch, for the sampler."""
        return policy_velocity(self.policy, samples)

    def measure_anchor(self, scored: ScoredRollout) -> None:
        """Prepare what `accumulate` needs of the anchor."""
        raise NotImplementedError

    def accumulate(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> Any:
        """Add to `.grad` the gradient of the mean loss over the steps at `positions` of every trained sample's order.

        The loss is a sum over samples and steps divided by their global count, so it depends on neither the
        micro-batch size nor the number of ranks.

        Returns:
            Terms (N len(positions),), detached: micro-batch after micro-batch, step after step, its samples. Where the
            model need not run, they are the terms at the rollout's velocity.
        """
        raise NotImplementedError

    def report(self, terms: Any) -> tuple[dict[str, float], float]:
        """Metrics of an update, and the KL that the controller of its weight watches, from the terms (N K,)."""
        return update_metrics(terms), weighted_kl(terms, self.settings)


@dataclass(frozen=True, kw_only=True)
class VelocityLoss(Generic[Terms]):
    """Loss of a micro-batch at one state of every sample, as a function of the guided velocity there.

    latents: (B, C, F, H, W), the states. sigma: (B,) float32 on the CPU, their noise levels. known_velocity: what the
    velocity is as long as the policy has not moved; None if the model has not been there.
    """

    latents: Tensor
    sigma: Tensor
    known_velocity: Tensor | None = None

    def terms(self, velocity: Tensor) -> Terms:
        """The loss and its parts at a velocity (B, C, F, H, W); each (B,)."""
        raise NotImplementedError

    def unmoved(self) -> Terms:
        """The terms where the loss has no gradient, without the model."""
        raise NotImplementedError

    def cotangent(self, velocity: Tensor, row_weights: Tensor) -> tuple[Tensor, Terms]:
        """d sum_b(row_weights_b loss_b)/dv at a velocity without a graph, and the detached terms at it."""
        with torch.enable_grad():
            leaf = velocity.detach().requires_grad_()
            terms = self.terms(leaf)
            (result,) = torch.autograd.grad(terms[0], leaf, row_weights.to(terms[0], non_blocking=True))
        return result, _like(terms, [term.detach() for term in terms])


@dataclass(frozen=True, kw_only=True)
class StepLoss(VelocityLoss[PolicyTerms]):
    """Loss of one step of every sample of a micro-batch; the steps may differ from sample to sample.

    keys, steps: B of each; they stand for the noise that the rollout drew. velocity_anchor: like the velocity; None if
    the anchor is the rollout policy. advantage: (B,). kl_weight: lambda. position_factor: what the position KL counts.

    Example: a StepLoss of one sample with `advantage=torch.ones(1), kl_weight=0.0` is the surrogate per unit advantage.
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

    def unmoved(self) -> PolicyTerms:
        """As in `VelocityLoss`: those at the rollout's velocity."""
        return self.terms(self.known_velocity)

    def terms(self, velocity: Tensor) -> PolicyTerms:
        """As in `VelocityLoss`. The position KL is times its factor."""
        advantage = self.advantage.to(velocity.device, non_blocking=True)
        terms = self.kernels.policy_loss(
            velocity,
            self.known_velocity,
            self.known_velocity if self.velocity_anchor is None else self.velocity_anchor,
            noise_ids(self.keys, self.steps, velocity.device),
            step_columns(self.settings, self.table, self.steps, advantage),
            loss_settings(self.settings, self.kl_weight, self.position_factor),
        )
        return terms._replace(kl_position=terms.kl_position * self.position_factor)


@dataclass(kw_only=True, eq=False)
class TwoPhaseGradient(PolicyGradient):
    """First the rollout, then the model again at every trained step, this time with a graph.

    engine: sums the gradient.
    """

    engine: Engine
    progress: Progress
    _anchor_velocities: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)
    """By micro-batch and position."""
    _on_policy: bool = field(default=True, init=False)

    def begin(self, kl_weight: float, anchor: Snapshot | None, kl_factors: Sequence[float]) -> None:
        """As in `PolicyGradient`."""
        super().begin(kl_weight, anchor, kl_factors)
        self._anchor_velocities = {}
        self._on_policy = True

    def measure_anchor(self, scored: ScoredRollout) -> None:
        """Velocities (B, C, F, H, W) of the anchor weights at the steps of every micro-batch that the KL counts."""
        if self._anchor is not None:
            positions = [position for position, factor in enumerate(self._kl_factors) if factor]
            wanted = scored.all_trained[:, None].expand(-1, len(positions))
            self._anchor_velocities = self._velocities(self._anchor, scored, wanted, positions)

    @torch.no_grad()
    def _velocities(
        self, weights: Snapshot, scored: ScoredRollout, wanted: Tensor, positions: Sequence[int]
    ) -> dict[tuple[int, int], Tensor]:
        """Velocities of other weights, by micro-batch and position, for what is wanted (V, len(positions))."""
        due = self._passes(scored, wanted, positions)
        batches = list(scored.batches())
        found = {}
        with weights.applied():
            for done, (number, position) in enumerate(due):
                rows, trajectory = batches[number]
                self.progress("anchor", done, len(due), describe_batch(trajectory.samples))
                state = self._state(scored, rows, trajectory, position)
                found[number, position] = self.policy.velocity(*state, [s.embeds for s in trajectory.samples])
        return found

    def _state(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, position: int
    ) -> tuple[Tensor, Tensor]:
        """State (B, C, F, H, W) and noise level (B,) of a micro-batch at a position."""
        steps = [order[position] for order in scored.orders[rows]]
        return at_steps(trajectory.latents, steps), step_sigma(trajectory.table, steps)

    def _loss(
        self, scored: ScoredRollout, rows: slice, trajectory: Trajectory, number: int, position: int, kl_weight: float
    ) -> VelocityLoss[Any]:
        """Loss of micro-batch `number` at a position."""
        steps = [order[position] for order in scored.orders[rows]]
        return StepLoss(
            kernels=self.kernels,
            settings=self.settings,
            table=trajectory.table,
            keys=trajectory.keys,
            steps=steps,
            latents=at_steps(trajectory.latents, steps),
            sigma=step_sigma(trajectory.table, steps),
            known_velocity=at_steps(trajectory.velocities, steps),
            velocity_anchor=self._anchor_velocities.get((number, position)),
            advantage=scored.advantages[rows],
            kl_weight=kl_weight,
            position_factor=self._kl_factors[position],
        )

    def accumulate(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> Any:
        """As in `PolicyGradient`."""
        terms = self._sum(scored, positions, kl_weight)
        # The optimizer moves the weights after this call.
        self._on_policy = False
        return terms

    def _sum(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> Any:
        """Add and return as `accumulate` does; the weights stay as they are."""
        count = scored.num_trained * len(positions)
        wanted = self._has_gradient(scored, positions)
        due = {pair: done for done, pair in enumerate(self._passes(scored, wanted, positions))}
        collected = []
        for number, (rows, trajectory) in enumerate(scored.batches()):
            for position in positions:
                loss = self._loss(scored, rows, trajectory, number, position, kl_weight)
                done = due.get((number, position))
                if done is None:
                    collected.append(loss.unmoved())
                    continue
                self.progress("update", done, len(due), describe_batch(trajectory.samples))
                self.engine.last_vjp(done + 1 == len(due))
                # Of a micro-batch that runs as a whole, videos that are not trained weigh nothing.
                row_weights = scored.trained[rows].double() / count
                collected.append(self._differentiate(loss, row_weights, [s.embeds for s in trajectory.samples]))
        return concatenate_terms(collected)

    def _has_gradient(self, scored: ScoredRollout, positions: Sequence[int]) -> Tensor:
        """Samples and positions (V, len(positions)) whose terms are not those at the rollout's velocity, bool."""
        pulls = torch.tensor([self._pulls(position) for position in positions])
        return scored.all_trained[:, None] & ((scored.all_advantages != 0)[:, None] | pulls)

    def _pulls(self, position: int) -> bool:
        """True if a video without advantage needs the model at a position."""
        # Once the policy has moved, the ratio and the KL of every video have values that only its velocity tells.
        return not self._on_policy or kl_pulls(self.settings, anchor_behind=self._measures(position))

    def _measures(self, position: int) -> bool:
        """True if the KL to the anchor counts at a position."""
        return self._anchor is not None and self._kl_factors[position] > 0

    def _passes(self, scored: ScoredRollout, wanted: Tensor, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Micro-batches and positions at which this rank runs the model for what is wanted (V, len(positions)).

        A micro-batch runs as a whole, because a smaller one rounds otherwise than the rollout's. Ranks that keep step
        make as many passes as the one with most: some of theirs are for nothing.
        """
        by_rank = scored.by_rank(wanted).any(dim=2).flatten(1)
        own = by_rank[scored.rank]
        if self.engine.lockstep:
            missing = max(1, int(by_rank.sum(1).max())) - int(own.sum())
            own[(~own).nonzero().flatten()[:missing]] = True
        numbers = range(len(scored.trajectories))
        return [pair for pair, runs in zip(itertools.product(numbers, positions), own.tolist(), strict=True) if runs]

    def kl_share(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> float:
        """Norm of the KL's part of an update's gradient over that of the surrogate's. Collective; `.grad` stays empty.

        Without advantages only the KL is left of the loss, without lambda only the surrogate: two passes. Infinite if
        the surrogate has no gradient.
        """
        without_advantage = replace(scored, all_advantages=torch.zeros_like(scored.all_advantages))
        norms = []
        for part, weight in ((without_advantage, kl_weight), (scored, 0.0)):
            self._sum(part, positions, weight)
            norms.append(self.engine.clip_gradients())
            self.engine.zero_grad()
        return norms[0] / norms[1] if norms[1] else math.inf

    def _differentiate(self, loss: VelocityLoss[Terms], row_weights: Tensor, embeds: Sequence[PromptEmbeds]) -> Terms:
        """Add the gradient of one step to `.grad`; returns its terms."""
        split = self.training.guidance == "split"
        if split and self._on_policy and loss.known_velocity is not None:
            # The velocity will be the rollout's, so dL/dv is known without a forward. The terms come from the velocity
            # that was differentiated: if it differs after all, the ratio shows it.
            known, _ = loss.cotangent(loss.known_velocity, row_weights)
            velocity = self.policy.velocity_and_gradient(
                loss.latents, loss.sigma, embeds, [known], split=True, vjp=self.engine.vjp
            )
            with torch.no_grad():
                return loss.terms(velocity)
        # The cotangent depends on the velocity, which is at hand only in the middle of the call below.
        found: list[Terms] = []

        def cotangents(velocity: Tensor) -> list[Tensor]:
            cotangent, terms = loss.cotangent(velocity, row_weights)
            found.append(terms)
            return [cotangent]

        self.policy.velocity_and_gradient(
            loss.latents, loss.sigma, embeds, cotangents, split=split, vjp=self.engine.vjp
        )
        return found[0]


def _like(terms: Terms, columns: Sequence[Tensor]) -> Terms:
    """The NamedTuple of `terms` with other columns."""
    return type(terms)(*columns)


def concatenate_terms(terms: Sequence[Terms]) -> Terms:
    """The terms of several batches as those of one."""
    return _like(terms[0], [torch.cat(column) for column in zip(*terms, strict=True)])


def gather_terms(scored: ScoredRollout, own: Terms, positions: Sequence[int], world: World) -> tuple[Terms, str | None]:
    """The terms of all ranks, before the optimizer sees their gradient. Collective.

    Args:
        own: this rank's, from `PolicyGradient.accumulate` with these positions.

    Returns:
        Those of trained videos, (N,) each, in CPU memory and in the order of one process; and a description of a loss
        that is not finite, with its prompts, or None. The same on every rank.
    """
    # The only read of the GPU between the gradient and the optimizer's step, apart from the gradient's norm.
    matrix = torch.stack([column.to(own[0].dtype) for column in own]).cpu()
    bad = ~matrix[0].isfinite()
    names = ""
    if bad.any():
        rows = [s.prompt for t in scored.trajectories for _ in positions for s in t.samples]
        names = name_prompts(prompt for prompt, wrong in zip(rows, bad.tolist(), strict=True) if wrong)
    everywhere = world.gather((matrix[:, scored.trained_rows(len(positions))], names))
    # Ranks that share a video have the same terms.
    terms = _like(own, list(torch.cat([columns for columns, _ in everywhere[:: world.sp]], dim=1)))
    for rank, (_, names) in enumerate(everywhere):
        if names:
            return terms, f"{f'on rank {rank} ' if world.size > 1 else ''}the loss of prompt {names}"
    return terms, None


def name_prompts(prompts: Iterable[Prompt]) -> str:
    """Up to three of the prompts by index and text, for a message."""
    return ", ".join(sorted({f"{prompt.index} ({prompt.text!r})" for prompt in prompts})[:3])
