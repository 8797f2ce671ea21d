"""The gradient of the objective: what every way of computing it shares, and the two-phase way.

`training.update` chooses between `TwoPhaseGradient`, which runs the model again after the rollout, and
`SinglePassGradient` (`single_pass.py`), which takes the gradient while the rollout is made. Both leave the same sum in
`.grad` and return the same `PolicyTerms`; `PolicyGradient` is all that the trainer knows of them.

Shapes: B samples of a micro-batch, N samples of a rollout, K trained steps per sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sage_fast.config.schema import TrainingConfig
from sage_fast.data import step_order
from sage_fast.distributed.engine import Engine, Snapshot
from sage_fast.kernels import Kernels, StepColumns
from sage_fast.noise import NoiseKey, noise_ids
from sage_fast.objective import ObjectiveSettings, PolicyTerms, loss_settings
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import PromptEmbeds, Sample, Trajectory
from sage_fast.rewards.base import describe_batch
from sage_fast.rollout import StepVelocity, TrajectoryStep, gather_latents, gather_step
from sage_fast.sde import TransitionTable

Progress = Callable[[str, int, int, str], None]
"""Called as progress(phase, done, total, subject) while an iteration runs; the subject names the videos in work."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """Everything one rollout hands to its optimizer updates on this rank; N samples, K trained steps per sample.

    trajectories: micro-batches that together hold the N samples, group after group.
    advantages: (N,) float32. kept: (N,) bool, False for groups dropped because a reward failed.
    orders: N lists of K step indices, each sample's own order.
    num_kept: samples of the rollout on all ranks that were not dropped.

    Example: 12 prompts x 8 videos in micro-batches of 16 are 6 trajectories, and N = 96. On 2 ranks each has 3 of them
    and N = 48, while `num_kept` stays 96.
    """

    trajectories: Sequence[Trajectory]
    advantages: Tensor
    kept: Tensor
    orders: Sequence[Sequence[int]]
    num_kept: int

    def batches(self) -> Iterator[tuple[slice, Trajectory]]:
        """Each micro-batch with the rows of its samples in the rollout."""
        first = 0
        for trajectory in self.trajectories:
            yield slice(first, first + len(trajectory.samples)), trajectory
            first += len(trajectory.samples)

    def kept_rows(self, num_steps: int) -> Tensor:
        """(N num_steps,) bool: which rows of the terms that `PolicyGradient.accumulate` returns were trained on."""
        return torch.cat([self.kept[rows].repeat(num_steps) for rows, _ in self.batches()])


def trained_steps(key: NoiseKey, table: TransitionTable, training: TrainingConfig) -> list[int]:
    """The K steps of a sample that are trained, in the order in which they are visited. Known before the rollout."""
    trainable = table.trainable.nonzero().flatten().tolist()
    return step_order(key, trainable, training.timestep_fraction, training.permute_timesteps)


class PolicyGradient(Protocol):
    """A way to get the gradient of one rollout's objective."""

    def begin(self, kl_weight: float, anchor: Snapshot | None) -> None:
        """A rollout starts.

        Args:
            kl_weight: lambda of its first update.
            anchor: weights that the position KL is measured from; None where the KL mode has no anchor, or where the
                anchor is the policy that makes the rollout.
        """
        ...

    def sampler(
        self, samples: Sequence[Sample], keys: Sequence[NoiseKey], table: TransitionTable
    ) -> StepVelocity | None:
        """What the sampler calls for the velocities of a micro-batch; None for the policy's plain velocity."""
        ...

    def measure_anchor(self, scored: ScoredRollout) -> None:
        """Make ready what `accumulate` needs of the anchor."""
        ...

    def accumulate(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> PolicyTerms:
        """Add to `.grad` the gradient of the mean loss of the steps at `positions` of every kept sample's order.

        The loss is a sum over samples and steps divided by their global count, so neither the micro-batch size nor the
        number of ranks changes it.

        Returns:
            Terms (N len(positions),), detached: micro-batch after micro-batch, step after step, its samples.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Loss of one step of every sample of a micro-batch as a function of the guided velocity.

    step: the step as the rollout made it. keys: B noise keys. velocity_anchor: like the velocity; None where the
    anchor is the rollout policy. advantage: (B,). kl_weight: lambda.

    Example: a StepLoss of one sample with `advantage=torch.ones(1), kl_weight=0.0` is the surrogate per unit advantage.
    """

    kernels: Kernels
    settings: ObjectiveSettings
    step: TrajectoryStep
    keys: Sequence[NoiseKey]
    velocity_anchor: Tensor | None
    advantage: Tensor
    kl_weight: float

    def terms(self, velocity: Tensor) -> PolicyTerms:
        """The loss and its parts at a velocity (B, C, F, H, W); each (B,)."""
        step = self.step
        return self.kernels.policy_loss(
            velocity,
            step.velocity,
            step.velocity if self.velocity_anchor is None else self.velocity_anchor,
            noise_ids(self.keys, step.steps, velocity.device),
            StepColumns(step.gain, step.std, step.scale, self.advantage.to(velocity.device)),
            loss_settings(self.settings, self.kl_weight),
        )

    def cotangent(self, velocity: Tensor, row_weights: Tensor) -> tuple[Tensor, PolicyTerms]:
        """d sum_b(row_weights_b loss_b)/dv at a velocity without a graph, and the detached terms there."""
        with torch.enable_grad():
            leaf = velocity.detach().requires_grad_()
            terms = self.terms(leaf)
            (result,) = torch.autograd.grad(terms.loss, leaf, row_weights.to(terms.loss))
        return result, PolicyTerms(*(term.detach() for term in terms))


class TwoPhaseGradient:
    """First the rollout, then the model again at every trained step, with a graph.

    Args:
        engine: where the gradient is summed.
        split: differentiate the guidance branches one after the other.
    """

    def __init__(
        self,
        policy: GuidedPolicy,
        engine: Engine,
        kernels: Kernels,
        settings: ObjectiveSettings,
        *,
        split: bool,
        progress: Progress,
    ) -> None:
        self.policy = policy
        self.engine = engine
        self.kernels = kernels
        self.settings = settings
        self.split = split
        self.progress = progress
        self._anchor: Snapshot | None = None
        self._anchor_velocities: list[list[Tensor]] | None = None
        self._on_policy = True

    def begin(self, kl_weight: float, anchor: Snapshot | None) -> None:
        """As in `PolicyGradient`."""
        self._anchor, self._anchor_velocities = anchor, None
        self._on_policy = True

    def sampler(
        self, samples: Sequence[Sample], keys: Sequence[NoiseKey], table: TransitionTable
    ) -> StepVelocity | None:
        """As in `PolicyGradient`."""
        return None

    @torch.no_grad()
    def measure_anchor(self, scored: ScoredRollout) -> None:
        """Velocities of the anchor weights at every trained step: [micro-batch][position] -> (B, C, F, H, W)."""
        if self._anchor is None:
            return
        result = []
        with self._anchor.applied():
            for done, (rows, trajectory) in enumerate(scored.batches()):
                self.progress("anchor", done, len(scored.trajectories), describe_batch(trajectory.samples))
                embeds = [s.embeds for s in trajectory.samples]
                result.append(
                    [
                        self.policy.velocity(*gather_latents(trajectory, steps), embeds)
                        for steps in zip(*scored.orders[rows], strict=True)
                    ]
                )
        self._anchor_velocities = result

    def accumulate(self, scored: ScoredRollout, positions: Sequence[int], kl_weight: float) -> PolicyTerms:
        """As in `PolicyGradient`."""
        count = scored.num_kept * len(positions)
        total = len(scored.trajectories) * len(positions)
        collected: list[PolicyTerms] = []
        for done, (rows, trajectory) in enumerate(scored.batches()):
            row_weights = scored.kept[rows].double() / count
            for position in positions:
                number = done * len(positions) + position - positions[0]
                self.progress("update", number, total, describe_batch(trajectory.samples))
                self.engine.last_pull(number + 1 == total)
                loss = StepLoss(
                    kernels=self.kernels,
                    settings=self.settings,
                    step=gather_step(trajectory, [order[position] for order in scored.orders[rows]]),
                    keys=trajectory.keys,
                    velocity_anchor=self._anchor_velocities[done][position] if self._anchor_velocities else None,
                    advantage=scored.advantages[rows],
                    kl_weight=kl_weight,
                )
                collected.append(self._pull_step(loss, row_weights, [s.embeds for s in trajectory.samples]))
        # The optimizer moves the weights after this call.
        self._on_policy = False
        return concatenate_terms(collected)

    def _pull_step(self, loss: StepLoss, row_weights: Tensor, embeds: Sequence[PromptEmbeds]) -> PolicyTerms:
        """Add the gradient of one step to `.grad`; returns its terms."""
        step = loss.step
        if self.split and self._on_policy:
            # The velocity will be the rollout's, so dL/dv is known without a forward. The terms come from the velocity
            # that was differentiated: should it differ, the ratio says so.
            known, _ = loss.cotangent(step.velocity, row_weights)
            velocity = self.policy.velocity_and_gradient(
                step.latents, step.sigma, embeds, [known], split=True, pull=self.engine.pull
            )
            with torch.no_grad():
                return loss.terms(velocity)
        found: list[PolicyTerms] = []

        def cotangents(velocity: Tensor) -> list[Tensor]:
            cotangent, terms = loss.cotangent(velocity, row_weights)
            found.append(terms)
            return [cotangent]

        self.policy.velocity_and_gradient(
            step.latents, step.sigma, embeds, cotangents, split=self.split, pull=self.engine.pull
        )
        return found[0]


def concatenate_terms(terms: Sequence[PolicyTerms]) -> PolicyTerms:
    """The terms of several batches as those of one."""
    return PolicyTerms(*(torch.cat(column) for column in zip(*terms, strict=True)))
