"""The gradient of rollouts that a less exact sampler makes.

    python -m experiments.inexact --seeds 0 1 2 3 4 5 6 7 > docs/results/inexact.jsonl

Each line has one rollout of the toy network. Its products and attention are rounded as
its name says; norms, sums along the residual and the adapters stay in float32. The
gradient is taken by the network in float32, and compared with that of the float32
rollout by the same noise. `other noise` is a float32 rollout too.

Shapes: T steps, N videos, B videos of a micro-batch, n elements of a latent.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig
from sage_fast.kernels import PolicyTerms
from sage_fast.noise import NoiseKey
from sage_fast.objectives.grpo import TwoPhase
from sage_fast.policy.lora import trainable_parameters
from sage_fast.records import Sample, ScoredRollout, Trajectory
from sage_fast.rollout import StepVelocity, policy_velocity, step_sigma
from sage_fast.run.provenance import SOURCE_ROOT, git_commit
from sage_fast.run.run import build_trainer
from sage_fast.sde import TransitionTable

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max

ADAPTED = 0.02
"""Standard deviation of the adapters' second factors, which a new run has at zero."""

WIDE = 0.999
"""Clip range that holds no ratio from 0.001 to 1.999 back."""

SETTINGS: Mapping[str, Any] = {
    "training.update": "experiments.inexact:Compared",
    "training.permute_timesteps": False,
    "model.forward": "stock",
    "objective.kl_mode": "none",
    "evaluation.every": 0,
    # one rollout after the other by the same weights
    "optimizer.learning_rate": 1e-30,
    "optimizer.weight_decay": 0.0,
}


def bfloat16(x: Tensor) -> Tensor:
    """The same numbers to 8 bits of mantissa, in the type of x."""
    return x.bfloat16().to(x.dtype)


def scaled(x: Tensor, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3 and the float32 scale, of each row or of all, that they are to be
    multiplied with.
    """
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = largest.clamp(min=1e-12) / LARGEST
    return (x / scale).to(E4M3), scale


def bfloat16_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, K) times weight (M, K) transposed, summed in float32."""
    return bfloat16(linear(bfloat16(x), bfloat16(weight)))


def eight_bit_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same of operands in e4m3 with a scale for each row, by torch's own product."""
    rows, of_rows = scaled(x, by_row=True)
    columns, of_columns = scaled(weight, by_row=True)
    product = torch._scaled_mm(
        rows,
        columns.t(),
        scale_a=of_rows,
        scale_b=of_columns.t(),
        out_dtype=torch.bfloat16,
    )
    return product.to(x.dtype)


def eight_bit(x: Tensor) -> Tensor:
    """The same numbers rounded to e4m3 with one scale."""
    small, scale = scaled(x, by_row=False)
    return small.to(x.dtype) * scale


class Precision(NamedTuple):
    """Products of linear layers, and what is done to queries, keys and values."""

    product: Callable[[Tensor, Tensor], Tensor]
    inputs: Callable[[Tensor], Tensor]


SAMPLERS: Mapping[str, Precision] = {
    "bfloat16": Precision(bfloat16_product, bfloat16),
    "8-bit attention": Precision(bfloat16_product, eight_bit),
    "8-bit products": Precision(eight_bit_product, bfloat16),
    "8-bit both": Precision(eight_bit_product, eight_bit),
}
OTHER_NOISE = "other noise"


class Rounding(TorchFunctionMode):
    """Within the context the layers of attention and feed-forward compute in another
    precision.
    """

    def __init__(self, transformer: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weights = {
            id(module.weight)
            for block in transformer.transformer_blocks  # type: ignore[union-attr]
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
            and not module.weight.requires_grad
            and "norm" not in name
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is linear and id(args[1]) in self.weights:
            x, weight, *rest = args
            bias = rest[0] if rest else named.get("bias")
            product = self.precision.product(x.flatten(0, -2), weight)
            result = product.view(*x.shape[:-1], -1)
            return result if bias is None else result + bias
        if func is scaled_dot_product_attention:
            named |= dict(zip(("query", "key", "value"), args, strict=False))
            for name in ("query", "key", "value"):
                named[name] = self.precision.inputs(named[name])
            return bfloat16(func(**named))
        return func(*args, **named)


class Compared(TwoPhase):
    """`two_phase` that samples in another precision and takes the gradient of one
    rollout in three ways.

    `correction`: the ratio of the float32 policy to the sampler, clipped. `unclipped`:
    the same without the clip. `straight_through`: the sampler is the policy, its drawn
    noise the noise, and the float32 network gives the Jacobian alone. The last one is
    what is left in `.grad`.
    """

    rounding: AbstractContextManager[Any] = nullcontext()
    gradients: dict[str, Tensor]
    corrected: PolicyTerms
    exact: Sequence[Trajectory]
    sampled: ScoredRollout

    def velocity(
        self,
        samples: Sequence[Sample],
        keys: Sequence[NoiseKey],
        table: TransitionTable,
    ) -> StepVelocity:
        inner = super().velocity(samples, keys, table)

        def rounded(step: int, latents: Tensor, sigma: Tensor) -> Tensor:
            with self.rounding:
                return inner(step, latents, sigma)

        return rounded

    def accumulate(
        self, scored: ScoredRollout, positions: Sequence[int], update: int
    ) -> PolicyTerms:
        self.sampled = replace(scored, second_half=None)
        self.exact = [self._recomputed(each) for each in scored.trajectories]
        straight = replace(self.sampled, trajectories=self.exact)
        clipping = self.settings
        self.gradients = {}
        self.corrected = self._gradient("correction", self.sampled, positions)
        self.settings = replace(clipping, clip_range=WIDE)
        self._gradient("unclipped", self.sampled, positions)
        self.settings = clipping
        return self._gradient("straight_through", straight, positions)

    def _gradient(
        self, name: str, scored: ScoredRollout, positions: Sequence[int]
    ) -> PolicyTerms:
        self.engine.zero_grad()
        terms = self._sum(scored, positions, 0.0)
        trained = trainable_parameters(self.policy.transformer).values()
        parts = [p.grad.flatten() for p in trained if p.grad is not None]
        self.gradients[name] = torch.cat(parts).double()
        return terms

    @torch.no_grad()
    def _recomputed(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the float32 velocities at its states."""
        velocity = policy_velocity(self.policy, trajectory.samples)
        count = len(trajectory.samples)
        velocities = [
            velocity(step, latents, step_sigma(trajectory.table, [step] * count))
            for step, latents in enumerate(trajectory.latents)
        ]
        return replace(trajectory, velocities=velocities)


def by_step(objective: Compared) -> dict[str, list[float]]:
    """Figures of each of the T steps, means over the videos.

    velocity_error: norm of the sampler's error over that of the velocity. mean_square:
    of s, the difference of the two means in standard deviations of the step.
    log_ratio: of the float32 policy to the sampler, at the drawn noise eps. cross:
    standard deviation over the videos of mean(s eps), the log-ratio without
    -mean(s^2) / 2. clipped_negative, clipped_positive: share of the videos with an
    advantage of that sign that the clip stops.
    """
    scored = objective.sampled
    gain = scored.trajectories[0].table.gain
    difference = _by_step(objective.exact) - _by_step(scored.trajectories)
    error = difference.square().sum((1, 2)) / _by_step(objective.exact).square().sum(
        (1, 2)
    )
    mean_square = (gain[:, None, None] * difference).square().mean(2)
    # Terms come micro-batch after micro-batch, step after step.
    per_batch = len(gain) * len(scored.trajectories[0].samples)
    log_ratio, clipped = (
        torch.cat([part.view(len(gain), -1) for part in column.split(per_batch)], 1)
        for column in (
            objective.corrected.log_ratio.double(),
            objective.corrected.clipped.double(),
        )
    )
    found = {
        "velocity_error": error.sqrt(),
        "mean_square": mean_square.mean(1),
        "log_ratio": log_ratio.mean(1),
        "cross": (log_ratio + mean_square / 2).std(1),
        "clipped_negative": clipped[:, scored.advantages < 0].mean(1),
        "clipped_positive": clipped[:, scored.advantages > 0].mean(1),
    }
    return {
        name: [float(f"{x:.4g}") for x in row.tolist()] for name, row in found.items()
    }


def _by_step(trajectories: Sequence[Trajectory]) -> Tensor:
    """Velocities (T, N, n) float64."""
    steps = zip(*(each.velocities for each in trajectories), strict=True)
    return torch.stack([torch.cat(step).flatten(1) for step in steps]).double()


def measure(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Rows of every sampler with the prompts and the noise of one seed."""
    trainer = build_trainer(config)
    # As a program this module is imported once more, by its name.
    objective = cast(Compared, trainer.objective)
    transformer = objective.policy.transformer
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer).items():
            if "lora_B" in name:
                parameter.normal_(0, ADAPTED, generator=generator)

    def roll(update: int, rounding: AbstractContextManager[Any]) -> dict[str, Tensor]:
        # The noise depends on the update, the prompts on the rollout.
        trainer.update = update
        trainer.rollouts = 0
        objective.rounding = rounding
        trainer.iterate()
        return objective.gradients

    exact = roll(0, nullcontext())["correction"]
    for name in (*SAMPLERS, OTHER_NOISE):
        if name == OTHER_NOISE:
            gradients = roll(1, nullcontext())
        else:
            gradients = roll(0, Rounding(transformer, SAMPLERS[name]))
        final = objective.sampled.trajectories[0].final
        yield {
            "sampler": name,
            "seed": config.seed,
            "videos": config.rollout.batch_size,
            "elements": final[0].numel(),
            **by_step(objective),
            "cosine": {
                way: round(float(torch.cosine_similarity(each, exact, dim=0)), 4)
                for way, each in gradients.items()
            },
            "norm": {
                way: round(float(each.norm() / exact.norm()), 4)
                for way, each in gradients.items()
            },
        }


def main(words: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m experiments.inexact")
    parser.add_argument("--config", default="toy_cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--videos", type=int, default=32, help="of a rollout")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    made = {"commit": git_commit(SOURCE_ROOT), "torch": torch.__version__}
    for seed in given.seeds:
        changes = {"seed": seed, "rollout.batch_size": given.videos}
        for row in measure(load_config(given.config, {**SETTINGS, **changes})):
            print(json.dumps(row | made), flush=True)


if __name__ == "__main__":
    main()
