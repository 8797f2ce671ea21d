"""Work of a configuration: traced costs of its calls of the model, and how often it
makes them per video.

N video tokens, L text tokens, D width. The traced counts (`trace.py`) are what runs;
the closed form of a forward, which the family has, is what the model is, and a test
holds the two together. With P ranks per video each computes n = N / P video tokens and
all text tokens, and attends with 1/P of the heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RolloutConfig, TrainingConfig
from sage_fast.data import best_and_worst, num_trained
from sage_fast.models.family import ModelDescription, family_of
from sage_fast.objective import anchor_kind
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.weights import hashable, targets_of
from sage_fast.rollout import num_first_steps, rollout_tables, shares_first_steps
from sage_fast.sde import TransitionTable
from sage_fast.sharding.ulysses import share_of

DRAWS = 256
"""Rollouts over which the videos that `training.best_and_worst` takes are averaged."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Cost of the calls that a configuration makes of the model, each for one
    micro-batch.

    sampling: a step of the rollout. velocity: of the anchor, at the guidance that is
    trained. gradient: a step of an update, or with single pass a step of the rollout
    that leaves its gradient. evaluation: a step of an evaluation.
    """

    sampling: Cost
    velocity: Cost
    gradient: Cost
    evaluation: Cost


def model_calls(
    config: RunConfig, description: ModelDescription, on_gpu: bool, sp: int = 1
) -> Calls:
    """Trace what the phases are made of on each of a video's `sp` ranks.

    Raises:
        ConfigError: the forward cannot be traced, or the master weights are not
            float32.
    """
    training = config.training
    model = config.model
    if (
        model.forward != "fused"
        and not family_of(name=description.transformer.get("_class_name")).plans_stock
    ):
        raise ConfigError(
            f"model.forward is {model.forward}, and a plan traces the fused forward: "
            "give --model.forward=fused. "
            "Diffusers' own forward needs more memory and time."
        )
    if training.mode == "full" and model.dtype != "float32":
        raise ConfigError(
            "training.mode full needs float32 master weights, but model.dtype is "
            f"{model.dtype}. Set it to float32 "
            "(distributed.param_dtype is what is computed with), or training.mode to "
            "lora."
        )
    velocity = velocity_call(config, description, on_gpu)
    gradient = replace(
        velocity,
        gradient=True,
        guidance=training.guidance,
        on_policy=not policy_moves(training),
        collected=training.update == "single_pass",
    )
    video = config.evaluation_video
    patch = description.patch
    evaluated = description.latent_shape(video.num_frames, video.height, video.width)
    return Calls(
        sampling=_share(
            replace(velocity, guidance_scale=config.sampling_guidance), sp, patch
        ),
        velocity=_share(velocity, sp, patch),
        gradient=_share(gradient, sp, patch),
        evaluation=_share(
            replace(velocity, latent=evaluated, batch=config.evaluation.batch_size),
            sp,
            patch,
        ),
    )


def velocity_call(
    config: RunConfig, description: ModelDescription, on_gpu: bool
) -> Call:
    """A step of the anchor, or of an evaluation of that size; the other calls differ
    from it in a few fields.
    """
    model = config.model
    video = config.video
    kernels = model.kernels
    return Call(
        transformer=hashable(description.transformer),
        latent=description.latent_shape(video.num_frames, video.height, video.width),
        text_tokens=description.text_tokens,
        dtype=config.compute_dtype,
        trained=config.training.mode,
        rank=config.lora.rank,
        target_modules=targets_of(config),
        checkpointing=model.settled_checkpointing,
        kernels=("triton" if on_gpu else "reference") if kernels == "auto" else kernels,
        adaln="weights" if model.adaln == "weights" else "auto",
        forward=model.forward,
        guidance_scale=config.rollout.guidance_scale,
        batch=config.rollout.videos_at_once,
        gradient=False,
    )


def _share(call: Call, sp: int, patch: tuple[int, int, int]) -> Cost:
    """Cost of a call on one of the ranks that share its video tokens, which are patches
    of a latent.
    """
    whole = trace(call)
    if sp == 1:
        return whole
    config = dict(call.transformer)
    frames, rows, columns = patch
    share = share_of(prod(call.latent[1:]) // prod(patch), sp)
    # As many tokens on a line: all but attention is what a rank does. Attention is of
    # all tokens and 1/P of the heads. (The text refiner's, which every rank repeats, is
    # one part in 10^5 of it.)
    part = trace(replace(call, latent=(call.latent[0], frames, rows, columns * share)))
    width = config["num_attention_heads"] * config["attention_head_dim"]
    # Buffers that an all-to-all sends and receives: q, k and v; in the backward also
    # the result and its gradient.
    exchanged = 5 * share + call.text_tokens if call.gradient else 3 * share
    buffers = 2 * call.batch * width * exchanged * getattr(torch, call.dtype).itemsize
    return replace(
        part,
        attention=whole.attention / sp,
        attention_backward=whole.attention_backward / sp,
        working=part.working + buffers,
    )


@dataclass(frozen=True, kw_only=True)
class Visits:
    """How often per video, on average over a run's rollouts; of several ranks the one
    with most.

    rollout: steps sampled without a gradient; one that the members of a group share is
    computed once. pass_steps: steps sampled with one (single pass).
    anchor: steps at which the velocity of the anchor, and of the forward process's old
    policy, is measured. second_products: steps with a second backward pass.
    update: steps differentiated after the rollout.
    repeated: forwards of the unconditional branch without a graph. With split guidance
    a single pass needs the guided velocity of a step before it can differentiate its
    KL.

    Example: the reference recipe has `rollout=20, anchor=18, update=20`, as the anchor
    is fresh in one of ten rollouts.
    """

    rollout: float
    pass_steps: float
    anchor: float
    second_products: float
    update: float
    repeated: float


def visits(
    config: RunConfig, ranks: int | None = None, *, sharded: bool = False
) -> Visits:
    """Calls of the model per video. A forward of fewer rows than a micro-batch counts
    as a part of one.

    Args:
        ranks: that have different videos; None means the mean of any number.
        sharded: see `shares_first_steps`.
    """
    training = config.training
    rollout = config.rollout
    # At every position of the SDE window.
    tables = rollout_tables(rollout)
    trainable = [int(table.trainable.sum()) for table in tables]
    trained = [
        num_trained(training.timestep_fraction, count) for count in trainable if count
    ]
    if training.update == "forward_process":
        trained = [config.forward_process.levels]
    measured = [
        num_trained(config.objective.kl_position_fraction, count) for count in trained
    ]
    drawn = update_share(config, ranks)
    # Means over the positions of the window.
    steps, behind = (
        drawn * sum(counts) / max(1, len(counts)) for counts in (trained, measured)
    )
    behind *= anchor_share(training, config.objective.kl_mode)
    old = steps if measures_old_policy(config) else 0.0
    in_rollout, afterwards = (
        (steps, 0.0) if training.update == "single_pass" else (0.0, steps)
    )
    # Only the KL to an anchor that lies behind needs a second VJP.
    second_products = (
        behind if in_rollout and config.objective.kl_position_weight > 0 else 0.0
    )
    return Visits(
        rollout=rollout.num_steps
        - in_rollout
        - repeated_steps(rollout, tables, ranks, sharded),
        pass_steps=in_rollout,
        anchor=behind + old,
        second_products=second_products,
        update=afterwards,
        repeated=second_products if splits_branches(config) else 0.0,
    )


def policy_moves(training: TrainingConfig) -> bool:
    """True if an update cannot take the rollout's velocities for its own, so split
    guidance needs one more forward.

    The forward process is at states that the sampler has not been to. Of several
    optimizer updates only the later ones need that forward; it is counted in all of
    them.
    """
    return training.update == "forward_process" or training.updates_per_rollout > 1


def splits_branches(config: RunConfig) -> bool:
    """True if the branches of a guided velocity are differentiated one after the other."""
    return config.training.guidance == "split" and config.rollout.guidance_scale != 1.0


def keeps_old_policy(config: RunConfig) -> bool:
    """True if a second copy of the trained weights samples."""
    return (
        config.training.update == "forward_process"
        and config.forward_process.old_decay is not None
    )


def measures_old_policy(config: RunConfig) -> bool:
    """True if that copy runs once more before an update; on its path the rollout has
    left its velocities.
    """
    return keeps_old_policy(config) and config.forward_process.states == "noised"


def most_groups(rollout: RolloutConfig) -> int:
    """Groups of which a rank has videos, on the rank that has most: its first video may
    be in a group's middle.
    """
    # The latest place in its group that a rank's first video can have.
    latest = rollout.num_generations - math.gcd(
        rollout.batch_size, rollout.num_generations
    )
    return (latest + rollout.batch_size - 1) // rollout.num_generations + 1


def repeated_steps(
    rollout: RolloutConfig,
    tables: Sequence[TransitionTable],
    ranks: int | None,
    sharded: bool,
) -> float:
    """Steps per video that another member of its group has computed, see `FirstSteps`.

    Args:
        tables: of the rollouts over which it is averaged. ranks, sharded: as in
            `visits`.
    """
    if not shares_first_steps(rollout, sharded):
        return 0.0
    size = rollout.batch_size
    group = rollout.num_generations
    # A rank's first video may be in a group's middle; after so many ranks one begins a
    # group again.
    cycle = group // math.gcd(size, group)
    groups = [
        (rank * size % group + size - 1) // group + 1
        for rank in range(min(ranks or cycle, cycle))
    ]
    computed = (sum(groups) / len(groups) if ranks is None else max(groups)) / size
    return (
        (1 - computed) * sum(num_first_steps(table) for table in tables) / len(tables)
    )


def update_share(config: RunConfig, ranks: int | None = None) -> float:
    """Share of the micro-batches and steps that run in an update, because a video of
    theirs is trained there.

    Which videos `training.best_and_worst` takes is simulated. Ranks deal out their
    micro-batches evenly (`deal`), and the rank with most counts.

    Args:
        ranks: as in `visits`.
    """
    training = config.training
    rollout = config.rollout
    size = rollout.batch_size
    group = rollout.num_generations
    # After so many ranks one begins with the first video of a group again.
    whole = group // math.gcd(size, group)
    # The choice depends on the order of the scores alone, so uniform ones stand for
    # any.
    scores = torch.rand(
        DRAWS * size * (ranks or whole) // group,
        group,
        generator=torch.Generator().manual_seed(0),
    )
    trained = (
        best_and_worst(scores, training.best_and_worst)
        .view(DRAWS, -1, rollout.videos_at_once)
        .any(-1)
    )
    if ranks is None:
        return float(trained.double().mean())
    return (
        float((trained.sum(1) / ranks).ceil().double().mean())
        * rollout.videos_at_once
        / size
    )


def anchor_share(training: TrainingConfig, kl_mode: str) -> float:
    """Share of the rollouts whose anchor lies behind the policy; the others need no
    forward for it.
    """
    kind = anchor_kind(kl_mode)
    rollouts = training.num_updates // training.updates_per_rollout
    if kind == "none":
        return 0.0
    # Then it is measured in every rollout, even where it is fresh
    # (`fresh_anchor_is_known`).
    if training.update == "forward_process" and training.updates_per_rollout > 1:
        return 1.0
    if kind == "moving":
        rollouts = min(
            rollouts, math.ceil(training.anchor_interval / training.updates_per_rollout)
        )
    # In the first rollout after a refresh the anchor is the policy.
    return 1.0 - 1.0 / rollouts
