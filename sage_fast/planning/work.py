"""Closed forms: FLOPs of the packed forward, and how often a configuration calls the model per video.

N video tokens, L text tokens, D width. The traced counts (`trace.py`) are what runs; the closed form of a forward is
what the model is, and a test holds the two together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RolloutConfig, TrainingConfig
from sage_fast.data import best_and_worst, num_trained
from sage_fast.objective import anchor_kind
from sage_fast.rollout import rollout_table
from sage_fast.sde import TransitionTable

DRAWS = 256
"""Rollouts over which the videos that `training.best_and_worst` takes are averaged."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of a call: what must be computed, nothing recomputed, nothing for padding.

    Example: a forward of HunyuanVideo-1.5 at 480x832x81 is `Work(linear=179.5e12, attention=482.0e12)`.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def times(self, linear: float, attention: float) -> "Work":
        return Work(linear=self.linear * linear, attention=self.attention * attention)


def forward_work(config: Mapping[str, Any], video_tokens: int, text_tokens: int) -> Work:
    """One forward with packed tokens: 2 (N + L) 12 D^2 linear and 4 (N + L)^2 D attention per block, plus embedders.

    Args:
        config: of diffusers' transformer.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    n, length = video_tokens, text_tokens
    per_token = 4 + 2 * config["mlp_ratio"]
    block = 2 * (n + length) * per_token * d * d + 2 * 2 * 6 * d * d
    time = 2 * (256 * d + d * d)
    text = config["text_embed_dim"]
    refiner = time + 2 * (text * d + d * d) + 2 * length * text * d
    refiner += config["num_refiner_layers"] * (2 * length * 12 * d * d + 2 * 2 * d * d)
    ends = 2 * n * d * (config["in_channels"] + config["out_channels"]) + 2 * 2 * d * d
    return Work(
        linear=config["num_layers"] * block + time + refiner + ends,
        attention=config["num_layers"] * 4 * (n + length) ** 2 * d + config["num_refiner_layers"] * 4 * length**2 * d,
    )


def unused_work(config: Mapping[str, Any], video_tokens: int, text_tokens: int) -> Work:
    """Parts of `forward_work` outside a text-to-video velocity: the condition channels, and the last block's text
    queries, projections and feed-forward.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    n, length = video_tokens, text_tokens
    per_token = 2 + 2 * config["mlp_ratio"]
    linear = 2 * length * per_token * d * d + 2 * n * d * (config["in_channels"] - config["out_channels"])
    return Work(linear=linear, attention=4 * length * (n + length) * d)


@dataclass(frozen=True, kw_only=True)
class Visits:
    """How often per video, on average over a run's rollouts; of several ranks the one with most.

    rollout: steps sampled without a gradient. pass_steps: steps sampled with one (single pass).
    anchor: steps at which the velocity of the anchor, and of the forward process's old policy, is measured.
    second_products: steps with a second backward pass.
    update, late_updates: steps differentiated after the rollout, at its first and at its later optimizer updates.

    Example: the reference recipe has `rollout=20, anchor=18, update=20`, as the anchor is fresh in one of ten rollouts.
    """

    rollout: float
    pass_steps: float
    anchor: float
    second_products: float
    update: float
    late_updates: float


def visits(config: RunConfig, ranks: int | None = None) -> Visits:
    """Calls of the model per video.

    Args:
        ranks: that have different videos; None is the mean of any number.
    """
    training, rollout = config.training, config.rollout
    trainable = [int(table.trainable.sum()) for table in rollout_tables(rollout)]
    trained = [num_trained(training.timestep_fraction, count) for count in trainable if count]
    if training.update == "forward_process":
        trained = [config.forward_process.levels]
    measured = [num_trained(config.objective.kl_position_fraction, count) for count in trained]
    drawn = update_share(config, ranks)
    steps, behind = (drawn * sum(counts) / max(1, len(counts)) for counts in (trained, measured))
    behind *= anchor_share(training, config.objective.kl_mode)
    old = steps if keeps_old_policy(config) else 0.0
    in_rollout, afterwards = (steps, 0.0) if training.update == "single_pass" else (0.0, steps)
    first = afterwards / training.updates_per_rollout
    return Visits(
        rollout=rollout.num_steps - in_rollout,
        pass_steps=in_rollout,
        anchor=behind + old,
        second_products=behind if in_rollout and config.objective.kl_position_weight > 0 else 0.0,
        update=first,
        late_updates=afterwards - first,
    )


def keeps_old_policy(config: RunConfig) -> bool:
    """True if a second copy of the trained weights samples and is measured in every update."""
    return config.training.update == "forward_process" and config.forward_process.old == "ema"


def rollout_tables(rollout: RolloutConfig) -> list[TransitionTable]:
    """The sampler at every position of the SDE window."""
    window = rollout.sde_window
    return [rollout_table(rollout, number) for number in range(rollout.num_steps if window.size else 1)]


def most_groups(rollout: RolloutConfig) -> int:
    """Groups of which a rank has videos, on the rank that has most: its first video may be in a group's middle."""
    latest = rollout.num_generations - math.gcd(rollout.batch_size, rollout.num_generations)
    return (latest + rollout.batch_size - 1) // rollout.num_generations + 1


def update_share(config: RunConfig, ranks: int | None = None) -> float:
    """Share of the micro-batches and steps that run in an update, because a video of theirs is trained there.

    Which videos `training.best_and_worst` takes is simulated. Where their groups lie on several ranks, the rank with
    most counts.

    Args:
        ranks: as in `visits`.
    """
    training, rollout = config.training, config.rollout
    size, group = rollout.batch_size, rollout.num_generations
    whole = group // math.gcd(size, group)
    scores = torch.rand(DRAWS * size * (ranks or whole) // group, group, generator=torch.Generator().manual_seed(0))
    trained = best_and_worst(scores, training.best_and_worst).view(DRAWS, ranks or whole, -1, rollout.micro_batch_size)
    share = trained.any(-1).double().mean(-1)
    return float(share.mean() if ranks is None else share.amax(1).mean())


def anchor_share(training: TrainingConfig, kl_mode: str) -> float:
    """Share of the rollouts whose anchor lies behind the policy; the others need no forward for it."""
    kind = anchor_kind(kl_mode)
    rollouts = training.num_updates // training.updates_per_rollout
    if kind == "none":
        return 0.0
    if kind == "moving":
        rollouts = min(rollouts, math.ceil(training.anchor_interval / training.updates_per_rollout))
    return 1.0 - 1.0 / rollouts
