"""The gradient of a rollout, taken during the rollout: no second forward of the model.

With one optimizer update per rollout, the policy that is differentiated is the one that
samples: v_new = v_old. There the loss is affine in the advantage A, which is not known
yet,

    dL/dv = A c_1 + c_2,        c_1 = -S r eps / numel,        c_2 = lambda d(w_pos KL_pos + w_vel KL_vel)/dv

(including the factors of `ratio` and the equalizer S). So a rollout step runs the model
with a graph, adds the VJP of c_1 to one accumulator per video and that of c_2 to one
per group, and drops the graph. When the rewards arrive,

    gradient = ( sum_b A_b g_1b + sum over groups g_2 ) / count      over the groups that were not dropped.

This is the two-phase gradient, not an estimate of it. Both cotangents are derivatives
of `policy_loss` itself, at (A = 1, lambda = 0) and at A = 0. The cost of c_2 depends on
the KL:

* no KL: c_2 = 0;
* velocity KL, -lambda w_vel r eps / numel: a multiple of c_1, so one VJP serves both;
* position KL to an anchor that differs from the policy: the anchor's velocity (one
  forward without a graph) and a second VJP through the same graph, at the steps where
  this KL counts (`objective.kl_position_fraction`).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import Need, RunConfig, check_needs
from sage_fast.config.sections import RolloutConfig, kl_uses
from sage_fast.kernels import PolicyTerms, StepColumns
from sage_fast.models.stored import velocity_dtype
from sage_fast.noise import NoiseKey
from sage_fast.objective import loss_settings, surrogate_factor
from sage_fast.objectives.base import Costs, Parts, concatenate_terms
from sage_fast.objectives.grpo import GRPO, StepLoss, trained_steps
from sage_fast.policy.guidance import Cotangents
from sage_fast.policy.lora import PerVideo
from sage_fast.records import Sample, ScoredRollout
from sage_fast.rollout import StepVelocity, step_columns
from sage_fast.sde import TransitionTable


def most_groups(rollout: RolloutConfig) -> int:
    """Groups of which a rank has videos, on the rank that has most: its first video may
    be in a group's middle.
    """
    # The latest place in its group that a rank's first video can have.
    latest = rollout.num_generations - math.gcd(
        rollout.batch_size, rollout.num_generations
    )
    return (latest + rollout.batch_size - 1) // rollout.num_generations + 1


@dataclass
class GradientSum:
    """A weighted sum of gradients, one tensor like each parameter; allocated by the
    first term.

    values: by the number of the parameter.
    """

    values: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, gradients: Mapping[int, Tensor], factor: float = 1.0) -> None:
        """Add factor * gradients, by the number of the parameter; one that is not there
        is zero.
        """
        # A few launches for all parameters, where the smallest models have hundreds for
        # every video.
        seen = [i for i in gradients if i in self.values]
        if seen:
            torch._foreach_add_(
                [self.values[i] for i in seen],
                [gradients[i] for i in seen],
                alpha=factor,
            )
        self.values |= {
            i: gradient * factor
            for i, gradient in gradients.items()
            if i not in self.values
        }


@dataclass(kw_only=True)
class VideoGradient:
    """Record of a video's rollout until its reward is known.

    Attributes:
        kl_factors: of each trained step, what its position KL counts.
        surrogate: sum over these steps of the gradient per unit advantage.
        kl: sum of the KL's gradient, shared by the videos of the group.
        terms: per trained step, the loss per unit advantage without KL, and all terms
            at A = 0 with it, (1,) each.

    Example: with 20 trained steps, `terms` holds 20 pairs.
    """

    sample: Sample
    key: NoiseKey
    table: TransitionTable
    kl_factors: Mapping[int, float]
    surrogate: GradientSum
    kl: GradientSum
    terms: list[tuple[Tensor, PolicyTerms]] = field(default_factory=list)


class SinglePass(GRPO):
    """`training.update: single_pass`; see the head of this file.

    A micro-batch runs at once and each of its videos gets its own gradient
    (`policy/lora.py`). Where its videos differ in whether a step is trained, in
    what the KL counts there, or in the length of their prompts, it runs in parts.

    Memory: on the device, in the parameters' dtype, one copy of the trained weights per
    video of the rollout and, where c_2 is not zero, one per group: 225 MB each for LoRA
    of rank 32 on the default targets of HunyuanVideo-1.5. The backward pass of a
    micro-batch makes as many as it has videos before they are added.
    """

    same_gradient = "two_phase"

    @staticmethod
    def costs(config: RunConfig) -> Costs:
        # A gradient per video, and with a KL one per group for its terms.
        accumulators = config.rollout.batch_size
        if any(kl_uses(config.objective.kl_mode)):
            accumulators += most_groups(config.rollout)
        return replace(GRPO.costs(config), accumulators=accumulators)

    @staticmethod
    def check_steps_agree(config: RunConfig) -> None:
        shares = {
            "objective.kl_position_fraction": config.objective.kl_position_fraction,
            "training.timestep_fraction": config.training.timestep_fraction,
        }
        given = [f"{name} {share:g}" for name, share in shares.items() if share < 1]
        if not given or not config.training.permute_timesteps:
            return
        remedy = "Set keep_gathered to rollout"
        if config.distributed.cpu_offload:
            remedy = "Set cpu_offload to false"
        raise ConfigError(
            "training.update single_pass takes gradients at different steps of every "
            f"video ({', '.join(given)}, permute_timesteps true), but every pass "
            "gathers layers from all ranks (distributed.keep_gathered "
            f"{config.distributed.keep_gathered}, cpu_offload "
            f"{str(config.distributed.cpu_offload).lower()}), so all ranks must run "
            f"the same ones. {remedy}, training.permute_timesteps to false, or "
            "training.update to two_phase."
        )

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        training = config.training
        needs: list[Need] = [
            (
                "training.mode",
                training.mode,
                ("lora",),
                "it keeps a copy of the trained weights per video",
            ),
            (
                "training.updates_per_rollout",
                training.updates_per_rollout,
                (1,),
                "its policy is the rollout's",
            ),
            (
                "training.best_and_worst",
                training.best_and_worst,
                (0,),
                "its gradient is there before an advantage",
            ),
            (
                "training.kl_share_every",
                training.kl_share_every,
                (0,),
                "it makes no passes beside the rollout's",
            ),
            (
                "distributed.zero_stage",
                config.distributed.zero_stage,
                (None,),
                "DeepSpeed sums gradients at once",
            ),
        ]
        check_needs(
            "training.update single_pass", "training.update to two_phase", needs
        )
        GRPO.check_config(config)
        if hasattr(cls, "step_loss"):
            raise ConfigError(
                f"training.update {config.training.update} has a step_loss, which "
                "single_pass would leave out: it needs a loss that is affine in the "
                "advantage. Derive its class from "
                "sage_fast.objectives.grpo.TwoPhase."
            )

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        self.per_video = PerVideo(self.policy.transformer)
        self.first_video = parts.own_videos.start
        """Number of this rank's first video among those of all ranks; it may be in the
        middle of a group.
        """
        self._videos: list[VideoGradient] = []

    def begin(self, update: int, rollouts: int) -> None:
        super().begin(update, rollouts)
        self._videos = []

    def velocity(
        self,
        samples: Sequence[Sample],
        keys: Sequence[NoiseKey],
        table: TransitionTable,
    ) -> StepVelocity:
        """The gradients of the trained steps go to the accumulators
        of the videos.
        """
        for sample, key in zip(samples, keys, strict=True):
            number = self.first_video + len(self._videos)
            # No advantage weighs the KL's gradient, so the videos of a group share a
            # sum.
            new_group = (
                not self._videos or number % self.config.rollout.num_generations == 0
            )
            video = VideoGradient(
                sample=sample,
                key=key,
                table=table,
                kl_factors=dict(
                    zip(
                        trained_steps(key, table, self.training),
                        self.kl_factors,
                        strict=True,
                    )
                ),
                surrogate=GradientSum(),
                kl=GradientSum() if new_group else self._videos[-1].kl,
            )
            self._videos.append(video)
        videos = self._videos[-len(samples) :]

        def velocity(step: int, latents: Tensor, sigma: Tensor) -> Tensor:
            # Rows that run together: not trained here (None), or of one factor and one
            # length of prompt.
            alike: dict[Any, list[int]] = {}
            for row, video in enumerate(videos):
                factor = video.kl_factors.get(step)
                alike.setdefault(
                    None if factor is None else (factor, video.sample.embeds.lengths),
                    [],
                ).append(row)
            parts = []
            for kind, rows in alike.items():
                if len(alike) == 1:
                    at = (latents, sigma)
                else:
                    at = (latents[rows], sigma[rows])
                part = [videos[row] for row in rows]
                if kind is None:
                    parts.append(
                        self.policy.velocity(
                            *at, [video.sample.embeds for video in part]
                        )
                    )
                else:
                    parts.append(self._differentiate(part, step, *at))
            # Back to the order of the micro-batch, by the inverse of this permutation.
            order = [row for rows in alike.values() for row in rows]
            if len(parts) == 1:
                return parts[0]
            return torch.cat(parts)[sorted(range(len(order)), key=order.__getitem__)]

        return velocity

    def accumulate(
        self, scored: ScoredRollout, positions: Sequence[int], update: int
    ) -> PolicyTerms:
        """Uses up the rollout's accumulators."""
        assert len(positions) == len(scored.orders[0])
        videos = self._videos
        self._videos = []
        share = 1.0 / (scored.num_trained * len(positions))
        total = GradientSum()
        group: GradientSum | None = None
        for row, video in enumerate(videos):
            if row == scored.middle:
                self._set_gradient(total)
                self.engine.halve()
            if scored.trained[row]:
                total.add(video.surrogate.values, share * float(scored.advantages[row]))
                # Once per group, whose videos lie side by side.
                if video.kl is not group:
                    total.add(video.kl.values, share)
                    group = video.kl
        self._set_gradient(total)
        if scored.middle == len(videos):
            self.engine.halve()
        terms = []
        for rows, _ in scored.batches():
            batch = list(
                zip(videos[rows], scored.advantages[rows].tolist(), strict=True)
            )
            for position, (video, a) in itertools.product(range(len(positions)), batch):
                per_advantage, others = video.terms[position]
                # The loss is affine in the advantage, see the head of this file.
                terms.append(others._replace(loss=a * per_advantage + others.loss))
        return concatenate_terms(terms)

    def _set_gradient(self, total: GradientSum) -> None:
        """Have `.grad` share the memory of a sum; None where no trained video has a
        gradient.
        """
        for number, weight in enumerate(self.per_video.weights):
            weight.grad = total.values.get(number)

    def _differentiate(
        self, videos: Sequence[VideoGradient], step: int, latents: Tensor, sigma: Tensor
    ) -> Tensor:
        """The velocity of videos at a step that all of them train, with one factor of
        the KL; their gradients go to their accumulators.
        """
        embeds = [video.sample.embeds for video in videos]
        table = videos[0].table
        factor = videos[0].kl_factors[step]
        anchor_velocity: Tensor | None = None
        if self.measured_anchor is not None and factor:
            # Before there is a graph, because the anchor's values replace the weights.
            with self.measured_anchor.applied(), torch.no_grad():
                anchor_velocity = self.policy.velocity(latents, sigma, embeds)
        # Otherwise c_2 is a multiple of c_1 or zero, and one VJP serves both.
        needs_own_vjp = (
            anchor_velocity is not None
            and self.kl_weight.weight * self.settings.kl_position_weight > 0
        )
        one = torch.ones(len(videos))

        def losses(velocity: Tensor) -> tuple[StepLoss, StepLoss]:
            """The loss at a rollout velocity, for A = 1 without KL and for A = 0 with
            it.
            """
            unit = StepLoss(
                kernels=self.kernels,
                settings=self.settings,
                table=table,
                keys=[video.key for video in videos],
                steps=[step] * len(videos),
                latents=latents,
                sigma=sigma,
                known_velocity=velocity,
                velocity_anchor=anchor_velocity,
                advantage=one,
                kl_weight=0.0,
                position_factor=factor,
            )
            return unit, replace(
                unit, advantage=torch.zeros_like(one), kl_weight=self.kl_weight.weight
            )

        def both_cotangents(velocity: Tensor) -> list[Tensor]:
            return [loss.cotangent(velocity, one)[0] for loss in losses(velocity)]

        if needs_own_vjp:
            cotangents: Cotangents = both_cotangents
        else:
            # c_1 is the same at every velocity, so it need not wait for one.
            anywhere = torch.zeros_like(
                latents, dtype=velocity_dtype(self.policy.transformer)
            )
            cotangents = [losses(anywhere)[0].cotangent(anywhere, one)[0]]
        kl_share = 0.0 if needs_own_vjp else self._estimator_share(table, step)
        split = self.training.guidance == "split"
        with self.per_video.copies(len(videos)) as weights:
            # Not into `.grad`: each video's part is weighed by an advantage that is not
            # known yet.
            vjp = partial(self._vjp, videos, weights, kl_share)
            velocity = self.policy.velocity_and_gradient(
                latents, sigma, embeds, cotangents, split=split, vjp=vjp
            )
        with torch.no_grad():
            unit, others = (loss.terms(velocity) for loss in losses(velocity))
        # Of all terms only the loss depends on the advantage.
        for video, per_advantage, *row in zip(
            videos, *(column.split(1) for column in (unit.loss, *others)), strict=True
        ):
            video.terms.append((per_advantage, PolicyTerms(*row)))
        return velocity

    def _vjp(
        self,
        videos: Sequence[VideoGradient],
        weights: Sequence[Tensor],
        kl_share: float,
        output: Tensor,
        cotangents: Sequence[Tensor],
    ) -> None:
        """Add the VJP of c_1, and of c_2 if it is given, to the sums of the videos.

        weights: a copy for each video. kl_share: c_2 / c_1 where the VJP of c_1 serves
        both.
        """
        for i, cotangent in enumerate(cotangents):
            is_last = i + 1 == len(cotangents)
            gradients = torch.autograd.grad(
                output, weights, cotangent, retain_graph=not is_last, allow_unused=True
            )
            # A weight that no prompt here has used has no gradient.
            by_video = {
                number: gradient.view(len(videos), *weight.shape).unbind()
                for number, (gradient, weight) in enumerate(
                    zip(gradients, self.per_video.weights, strict=True)
                )
                if gradient is not None
            }
            for row, video in enumerate(videos):
                own = {number: rows[row] for number, rows in by_video.items()}
                (video.surrogate, video.kl)[i].add(own)
                if kl_share:
                    video.kl.add(own, kl_share)

    def _estimator_share(self, table: TransitionTable, step: int) -> float:
        """c_2 / c_1 of a step with the velocity KL, minus the log-ratio; 0 without it."""
        settings = self.settings
        if not kl_uses(settings.kl_mode)[1]:
            return 0.0
        columns = step_columns(settings, table, [step], torch.zeros(1))
        columns = StepColumns(*(column.double() for column in columns))
        surrogate = float(
            surrogate_factor(columns, loss_settings(settings, self.kl_weight.weight))
        )
        return self.kl_weight.weight * settings.kl_velocity_weight / surrogate
