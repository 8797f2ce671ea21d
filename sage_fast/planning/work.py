"""Counts of a plan: how the GPUs share the work, the weights and how FSDP holds them,
and the calls of the model per video.

Ranks are numbered as in `sage_fast.distributed.world`, (replica * shard + position) *
sp + share, and eight are a node.

N video tokens, L text tokens, D width. The traced counts (`trace.py`) are what runs;
the closed form of a forward, which the family has, is what the model is, and a test
holds the two together. With P ranks per video each computes n = N / P video tokens and
all text tokens, and attends with 1/P of the heads.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd, prod
from typing import Any, Literal

import torch

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig, check_batch
from sage_fast.config.sections import DistributedConfig, RolloutConfig, check_heads
from sage_fast.data import best_and_worst, num_trained
from sage_fast.models.family import ModelDescription, family_of, transformer_blocks
from sage_fast.models.hub import hashable
from sage_fast.objective import anchor_kind
from sage_fast.objectives.base import objective_of
from sage_fast.planning.trace import Call, Cost, extended, meta_transformer, trace
from sage_fast.rollout import num_first_steps, rollout_tables, shares_first_steps
from sage_fast.sharding.ulysses import share_of

NODE_SIZE = 8
"""GPUs of a node that NVLink connects."""

CHANNELS = 32
NETWORK_CHANNELS = 2
"""Channels of a communicator, and of an exchange with a rank of another node. NCCL
takes two per NVLink as a power of two: 32 were seen between each two of eight H100s
(NVIDIA/nccl, issue 1685); two per peer is its default over a network. Other GPUs are
assumed to have as many.
"""

CONNECTION = 12 * 2**20
"""Bytes of GPU memory for one peer and channel, to receive and to send: the 10 MiB and
2 MiB that the issue lists. The former is NCCL_BUFFSIZE of 4 MiB, 4.7 MiB of protocol
LL128 and 0.5 MiB of LL (defaults in src/init.cc), rounded up.
"""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that share a video.

    Attributes:
        ranks: how many.
        nodes: most nodes that one such group lies on.
        local: fewest of its ranks on a node that has any, which is the number of
            network adapters that carry what leaves that node.

    Example: three ranks of which some lie on two nodes are `Group(ranks=3, nodes=2,
    local=1)`.
    """

    ranks: int
    nodes: int
    local: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of a run. `Layout()` is one GPU.

    Example: `Layout(replicate=8, shard=4, sp=2)` are 64 GPUs: 32 videos at a time,
    weights shared by 8 ranks.
    """

    replicate: int = 1
    shard: int = 1
    sp: int = 1
    node: int = NODE_SIZE

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.sp

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of `sp` ranks, with different videos."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Ranks over which FSDP shards the weights: the ranks of a video share them
        like others.
        """
        return self.shard * self.sp

    @property
    def videos(self) -> Group:
        """The ranks that share a video, which are neighbours; the worst such group."""
        sp = self.sp
        on_nodes = [
            Counter(rank // self.node for rank in range(first, first + sp)).values()
            for first in range(0, self.gpus, sp)
        ]
        return Group(
            ranks=sp,
            nodes=max(map(len, on_nodes)),
            local=min(min(counts) for counts in on_nodes),
        )

    @property
    def communication_buffers(self) -> float:
        """Bytes that NCCL keeps on each GPU, from the first collective on; assumed,
        from its defaults.

        Each group of several ranks is a communicator, with a ring and a tree: two
        neighbours in both. An all-to-all, within `sp`, has a connection to every peer.
        NVLink SHARP's buffers are not counted.
        """
        shards = self.weight_shards
        # Of a video's ranks, of those that share weights, of replicas, and of all.
        sizes = (self.sp, shards, self.gpus // shards, self.gpus)
        communicators = sum(size > 1 for size in sizes)
        videos = self.videos
        to_peers = CHANNELS * (videos.local - 1) + NETWORK_CHANNELS * (
            videos.ranks - videos.local
        )
        return float(CONNECTION * (2 * CHANNELS * communicators + to_peers))


def least_gpus(section: DistributedConfig, rollout: RolloutConfig) -> int:
    """The fewest GPUs that the degrees of a configuration fit, and on which a rollout
    has complete groups.
    """
    known = (section.dp_replicate or 1) * (section.dp_shard or 1) * section.sp
    if section.dp_replicate is not None and section.dp_shard is not None:
        return known
    # A degree of null takes what is more than that.
    videos = rollout.batch_size * known // section.sp
    # The smallest multiple of `known` whose videos are a multiple of a group.
    return known * rollout.num_generations // gcd(videos, rollout.num_generations)


def plan_layout(config: RunConfig, gpus: int, heads: int, tokens: int) -> Layout:
    """The degrees of a run on `gpus` GPUs.

    Args:
        heads: attention heads of the model.
        tokens: video tokens of a sample.

    Raises:
        ConfigError: the degrees or the batch do not fit the number of GPUs, the heads
            or the tokens.
    """
    section = config.distributed
    rollout = config.rollout
    if section.zero_stage is not None:
        raise ConfigError(
            f"distributed.zero_stage is {section.zero_stage}, and the plan knows how "
            "FSDP2 shards: --distributed.zero_stage=null."
        )
    try:
        replicate, shard, sp = section.degrees(gpus, config.training.mode)
    except ValueError as error:
        raise ConfigError(f"{error} For a plan, --gpus says how many.") from error
    check_heads(sp, heads)
    if tokens < sp:
        raise ConfigError(
            f"distributed.sp is {sp}, but a video has {tokens} tokens, fewer than the "
            "ranks that would share them. Set it to 1, or make the video larger."
        )
    check_batch(rollout.batch_size, replicate * shard, rollout.num_generations)
    return Layout(replicate=replicate, shard=shard, sp=sp)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of parameters.

    Attributes:
        block: of one transformer block, the last one.
        trained: of those that get a gradient.
        moments: optimizer state.
        adaln: of the modulation layers, which may leave the GPU.
        largest: of the largest trained tensor.
        muon_flops: of making matrices orthogonal in one step of Muon.
        pinned, trained_pinned: of all and of trained ones in pinned memory, where torch
            rounds every tensor up to a power of two.

    Example: HunyuanVideo-1.5 with adapters of rank 32 has `total=8_326_608_160`,
    adapters not included.
    """

    total: int
    block: int
    trained: int
    moments: int
    adaln: int
    largest: int
    muon_flops: float
    pinned: int
    trained_pinned: int


def count_weights(config: RunConfig, transformer: Mapping[str, Any]) -> Weights:
    """Parameters of a transformer and of what a config trains of it, counted on the
    meta device.
    """
    layers = transformer["num_layers"]
    modules = targets_of(config) if config.training.mode == "lora" else ()
    count = partial(
        _count, hashable(transformer), modules, config.lora.rank, config.optimizer.name
    )
    if layers <= 3:
        return count(layers)
    return extended(count(2), count(3), layers, ("block", "largest"))


def targets_of(config: RunConfig) -> tuple[str, ...] | None:
    """Layers that get an adapter as a key; None are those of the family."""
    modules = config.lora.target_modules
    return None if modules is None else tuple(modules)


@cache
def _count(
    key: tuple[tuple[str, Any], ...],
    modules: tuple[str, ...] | None,
    rank: int,
    optimizer: str,
    layers: int,
) -> Weights:
    """With the first `layers` blocks. modules: layers that get an adapter; None are
    those of the family, () is none.
    """
    # imports peft and diffusers
    from sage_fast.policy.lora import add_lora, train_all, trainable_parameters

    transformer = meta_transformer(dict(key), torch.float32, layers)
    parameters = list(transformer.parameters())
    block = sum(p.numel() for p in transformer_blocks(transformer)[-1].parameters())
    adaln = sum(
        p.numel()
        for layer in family_of(transformer).adaln_layers(transformer)
        for p in layer.parameters()
    )
    if modules == ():
        train_all(transformer)
    else:
        add_lora(transformer, rank=rank, alpha=None, target_modules=modules, seed=0)
    moments = 0
    flops = 0.0
    trained = trainable_parameters(transformer)
    for name, parameter in trained.items():
        # As `OptimizerSet` divides them.
        if optimizer == "muon" and parameter.ndim == 2 and "embed.weight" not in name:
            moments += parameter.numel()
            short, long = sorted(parameter.shape)
            # Five Newton-Schulz steps: X X^T, its square, and their product with X.
            flops += 5 * (4 * short * short * long + 2 * short**3)
        else:
            moments += 2 * parameter.numel()
    return Weights(
        total=sum(p.numel() for p in parameters),
        block=block,
        trained=sum(p.numel() for p in trained.values()),
        moments=moments,
        adaln=adaln,
        largest=max(p.numel() for p in trained.values()),
        muon_flops=flops,
        pinned=sum(map(_pinned, parameters)),
        trained_pinned=sum(map(_pinned, trained.values())),
    )


def _pinned(tensor: torch.Tensor) -> int:
    """Numbers that pinned memory for a tensor has room for: 74 MiB take 128. A half of
    it takes half as much.
    """
    return 1 << (tensor.numel() - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How FSDP holds the weights on each GPU.

    Attributes:
        sharded: whether it does.
        offloaded: whether the shards are in CPU memory.
        keep: how long weights stay gathered.
        item: bytes of a number that the transformer computes with.
        share: of what there is once per trained weight (gradients, moments, anchor,
            average), that each GPU holds.
        resident: bytes of shards, or of whole weights where nothing is sharded.
        whole: bytes of all weights, gathered.
        flying: bytes of what is gathered ahead of the computation, one unit after the
            other.
        summed: bytes of gradients on their way to their shards.

    Example: with adapters on 2 ranks per video the frozen 16.7 GB are 8.3 `resident`
    and, kept, 16.7 `whole`.
    """

    sharded: bool
    offloaded: bool
    keep: Literal["never", "rollout", "always"]
    item: int
    share: float
    resident: float
    whole: float
    flying: float
    summed: float


def gathered_weights(
    config: RunConfig, weights: Weights, num_layers: int, layout: Layout, memory: float
) -> Gathered:
    """As `sharding/parallelize.py` decides it.

    Args:
        memory: bytes of the GPU.
    """
    section = config.distributed
    full = config.training.mode == "full"
    stored = getattr(torch, config.model.dtype).itemsize
    item = int(getattr(torch, config.compute_dtype).itemsize)
    whole = float(weights.total * item)
    keep: Literal["never", "rollout", "always"]
    if section.keep_gathered != "auto":
        keep = section.keep_gathered
    elif section.cpu_offload:
        keep = "never"
    else:
        # Frozen weights may take a third of the GPU, as in `parallelize`.
        keep = "always" if not full and whole <= memory / 3 else "rollout"
    # Frozen weights that would stay gathered for good are not sharded in the first
    # place.
    over_ranks = layout.weight_shards > 1 and (full or keep != "always")
    # FSDP also casts masters, and moves them from CPU memory, for a rank that shares
    # them with nobody.
    sharded = over_ranks or (full and (item != stored or section.cpu_offload))
    shards = layout.weight_shards if over_ranks else 1
    offloaded = sharded and section.cpu_offload
    # Weights behind a table of the modulation stay whole on every rank.
    kept = weights.adaln if config.model.adaln in ("table", "offload") else 0
    rest = weights.total - num_layers * weights.block
    return Gathered(
        sharded=sharded,
        offloaded=offloaded,
        keep=keep,
        item=item,
        # Adapters are whole on every rank.
        share=1.0 if not full else 0.0 if offloaded else 1 / shards,
        resident=stored
        * (kept + (0.0 if offloaded else (weights.total - kept) / shards)),
        whole=whole - item * kept,
        # A block that computes, the next one, and the buffer it arrives in.
        flying=float(item * (3 * (weights.block - kept // num_layers) + rest))
        if sharded
        else 0.0,
        # In float32: the sum of one block under way, and the next one's gradient laid
        # out for it.
        summed=float(4 * 2 * weights.block) if sharded and full else 0.0,
    )


DRAWS = 256
"""Rollouts over which the videos that `training.best_and_worst` takes are averaged."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Cost of the calls that a configuration makes of the model, each for one
    micro-batch.

    Attributes:
        sampling: a step of the rollout.
        velocity: of the anchor, at the guidance that is trained.
        gradient: a step of an update, or with single pass a step of the rollout that
            leaves its gradient.
        evaluation: a step of an evaluation.
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

    Attributes:
        rollout: steps sampled without a gradient; one that the members of a group share
            is computed once.
        pass_steps: steps sampled with one (single pass).
        anchor: steps at which the velocity of the anchor, and of the forward process's
            old policy, is measured.
        second_products: steps with a second backward pass.
        update: steps differentiated after the rollout.
        repeated: forwards of the unconditional branch without a graph. With split
            guidance a single pass needs the guided velocity of a step before it can
            differentiate its KL.

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
