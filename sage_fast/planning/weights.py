"""The weights of a run: how many there are, what each costs beside itself, and how FSDP
holds them on each GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch

from sage_fast.config.schema import RunConfig
from sage_fast.models.family import family_of, transformer_blocks
from sage_fast.planning.layout import Layout
from sage_fast.planning.trace import extended, meta_transformer


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of parameters.

    block: of one transformer block, the last one. trained: of those that get a
    gradient. moments: optimizer state. adaln: of the modulation layers, which may leave
    the GPU. largest: of the largest trained tensor. muon_flops: of making matrices
    orthogonal in one step of Muon. pinned, trained_pinned: of all and of trained ones
    in pinned memory, where torch rounds every tensor up to a power of two.

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


def hashable(transformer: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A transformer's config as a key."""
    return tuple(
        (k, tuple(v) if isinstance(v, list) else v)
        for k, v in sorted(transformer.items())
    )


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

    sharded: whether it does. offloaded: whether the shards are in CPU memory. keep: how
    long weights stay gathered. item: bytes of a number that the transformer computes
    with. share: of what there is once per trained weight (gradients, moments, anchor,
    average), that each GPU holds. resident: bytes of shards, or of whole weights where
    nothing is sharded. whole: bytes of all weights, gathered. flying: bytes of what is
    gathered ahead of the computation, one unit after the other. summed: bytes of
    gradients on their way to their shards.

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
