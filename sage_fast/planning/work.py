"""Work of a configuration: traced costs of its calls of the model, and how often it
makes them per video.

N video tokens, L text tokens, D width. The traced counts (`trace.py`) are what runs;
the closed form of a forward, which the family has, is what the model is, and a test
holds the two together. With P ranks per video each computes n = N / P video tokens and
all text tokens, and attends with 1/P of the heads.
"""

import math
from dataclasses import dataclass, replace
from math import prod

import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RolloutConfig
from sage_fast.data import best_and_worst, num_trained
from sage_fast.models.family import ModelDescription, family_of
from sage_fast.objective import anchor_kind
from sage_fast.objectives.base import objective_of
from sage_fast.planning.trace import Call, Cost, trace
from sage_fast.planning.weights import hashable, targets_of
from sage_fast.rollout import num_first_steps, rollout_tables, shares_first_steps
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
            f"{model.dtype}. Set it to float32 (distributed.param_dtype is what is "
            "computed with), or training.mode to lora."
        )
    velocity = velocity_call(config, description, on_gpu)
    costs = objective_of(config).costs(config)
    gradient = replace(
        velocity,
        gradient=True,
        guidance=training.guidance,
        on_policy=not costs.policy_moves,
        collected=costs.in_rollout,
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
    rollout = config.rollout
    costs = objective_of(config).costs(config)
    fraction = config.objective.kl_position_fraction
    measured = [num_trained(fraction, count) for count in costs.positions]
    drawn = update_share(config, ranks)
    # Means over the rollouts.
    steps = drawn * sum(costs.positions) / len(costs.positions)
    behind = drawn * sum(measured) / len(measured)
    behind *= anchor_share(config)
    old = steps if costs.measures_old else 0.0
    in_rollout = steps if costs.in_rollout else 0.0
    # Only the KL to an anchor that lies behind needs a second VJP.
    second_products = (
        behind if in_rollout and config.objective.kl_position_weight > 0 else 0.0
    )
    return Visits(
        rollout=rollout.num_steps
        - in_rollout
        - repeated_steps(rollout, ranks, sharded),
        pass_steps=in_rollout,
        anchor=behind + old,
        second_products=second_products,
        update=steps - in_rollout,
        repeated=second_products if splits_branches(config) else 0.0,
    )


def splits_branches(config: RunConfig) -> bool:
    """True if the branches of a guided velocity are differentiated one after the other."""
    return config.training.guidance == "split" and config.rollout.guidance_scale != 1.0


def repeated_steps(rollout: RolloutConfig, ranks: int | None, sharded: bool) -> float:
    """Steps per video that another member of its group has computed, see `FirstSteps`;
    `ranks` and `sharded` as in `visits`.
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
    most = sum(groups) / len(groups) if ranks is None else max(groups)
    computed = most / size
    counts = [num_first_steps(table) for table in rollout_tables(rollout)]
    return (1 - computed) * sum(counts) / len(counts)


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


def anchor_share(config: RunConfig) -> float:
    """Share of the rollouts whose anchor lies behind the policy; the others need no
    forward for it.
    """
    training = config.training
    kind = anchor_kind(config.objective.kl_mode)
    rollouts = training.num_updates // training.updates_per_rollout
    if kind == "none":
        return 0.0
    if not objective_of(config).costs(config).knows_fresh_anchor:
        return 1.0
    if kind == "moving":
        rollouts = min(
            rollouts, math.ceil(training.anchor_interval / training.updates_per_rollout)
        )
    # In the first rollout after a refresh the anchor is the policy.
    return 1.0 - 1.0 / rollouts
