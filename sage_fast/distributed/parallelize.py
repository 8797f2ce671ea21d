"""The transformer over the processes of a run, and how long its weights stay gathered.

Order matters, and is that of `parallelize`: what replaces a forward comes before what wraps the module's call.

Which ranks hold what (DESIGN: torch FSDP2 is the default engine):
* training.mode full: every weight is a float32 master, sharded over the dp_shard * sp ranks of a replica. A block is
  gathered in `distributed.param_dtype`, its gradient is summed in float32 and scattered back.
* training.mode lora: the frozen weights are sharded likewise, in their own dtype. Adapters are small (225 MB at rank
  32) and stay whole on every rank, outside FSDP: one sum per update replaces one per backward, anchor and average
  exchange them as on one process, and the single pass can differentiate with respect to them.
"""

import itertools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.engine import Phase
from sage_fast.distributed.ulysses import shard_sequence
from sage_fast.distributed.world import World
from sage_fast.models.transformer import adaln_layers, choose_forward
from sage_fast.policy.lora import always_read_glyphs

logger = logging.getLogger(__name__)

# Our callers do not write into the outputs of blocks, which is what FSDP2 warns of.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def parallelize(
    transformer: HunyuanVideo15Transformer3DModel, config: RunConfig, world: World, device: torch.device
) -> "Gathering":
    """Spread a transformer, whose adapters and requires_grad are settled, over the ranks. Collective.

    Args:
        transformer: whole, in CPU memory; afterwards on `device`, or sharded there.
        config: the run.
        world: the ranks.
        device: this rank's.

    Returns:
        What decides when sharded weights are gathered and given back.

    Raises:
        ConfigError: settings that cannot be had together, or on this model.
    """
    section, full = config.distributed, config.training.mode == "full"
    zero = section.engine == "deepspeed"
    _check_section(config, world)
    keep = _keep(transformer, config, world, device)
    # Frozen weights that would stay gathered for good are not sharded in the first place.
    shards = full or (world.dp_shard * world.sp > 1 and keep != "always")
    sharded = world.fsdp_mesh is not None and shards and not zero
    if world.dp_shard > 1 and not (sharded or zero) and section.keep_gathered == "auto":
        logger.info(
            "distributed.dp_shard %d: the frozen weights take less than a third of a GPU, so with keep_gathered auto "
            "every rank holds them whole. Set keep_gathered to rollout to shard them.",
            world.dp_shard,
        )
    if sharded and keep == "never" and world.dp_shard > 1:
        _check_steps_agree(config)
    if not sharded:
        transformer.to(device)
    if full and not zero:  # DeepSpeed's engine does so itself
        always_read_glyphs(transformer)
    # 1. Activation checkpointing and compile: both are inside the forward of the fused blocks.
    model = config.model
    if (sharded or zero) and model.adaln == "auto":
        # Weights that are gathered at one time and not at another would be a table now and then.
        model = replace(model, adaln="weights")
    acceleration = choose_forward(transformer, model)
    # 2. Sequence parallelism, inside the blocks too: the block's input is a share of the tokens.
    if world.sp > 1:
        if acceleration is None:
            raise ConfigError(
                f"distributed.sp is {world.sp}, but sequence parallelism lives in the fused forward and model.forward "
                "is stock. Set model.forward to fused, or distributed.sp to 1."
            )
        assert world.sp_group is not None
        shard_sequence(acceleration, world.sp_group)
    # 3. FSDP2 (or, in an engine of its own, DeepSpeed) around the calls of the blocks and of the
    # transformer, last, because it moves the weights.
    if not sharded:
        return Gathering(transformer, "never")
    shard_weights(transformer, config, world, device)
    return Gathering(transformer, keep)


def shard_weights(
    transformer: HunyuanVideo15Transformer3DModel, config: RunConfig, world: World, device: torch.device
) -> None:
    """FSDP2 on every block, and on the rest of the transformer as one more unit."""
    section, full = config.distributed, config.training.mode == "full"
    adapters = set() if full else {p for p in transformer.parameters() if p.requires_grad}
    for adapter in adapters:
        adapter.data = adapter.data.to(device)
    whole = set(adapters)
    if config.model.adaln in ("table", "offload"):
        # A table is computed from whole weights; with `offload` they are in CPU memory.
        layers = adaln_layers(transformer)
        if config.model.adaln == "table":
            nn.ModuleList(layers).to(device)
        whole |= {p for module in (transformer.time_embed.to(device), *layers) for p in module.parameters()}
    for name, buffer in transformer.named_buffers():
        owner, _, last = name.rpartition(".")
        transformer.get_submodule(owner)._buffers[last] = buffer.to(device)
    offload: OffloadPolicy = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda") if section.cpu_offload else OffloadPolicy()
    )
    settings: dict[str, Any] = {
        "mesh": world.fsdp_mesh if world.dp_replicate > 1 else world.fsdp_mesh["shard"],  # type: ignore[index]
        # Inputs are not cast: a timestep of bfloat16 is another noise level.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, section.param_dtype) if full else None,
            reduce_dtype=torch.float32 if full else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": offload,
        "ignored_params": whole,
        "reshard_after_forward": True,
    }
    # Block after block from CPU memory, so that a GPU never holds more than its shards and one block.
    blocks: list[Any] = list(transformer.transformer_blocks)
    for block in blocks:
        fully_shard(block, **settings)
    root: Any = fully_shard(transformer, **settings)
    for module in fsdp_modules(root):
        # Every rank contributes its part of the gradient of one whole loss, ranks of a video (sp) like those with
        # other videos: parts are added. FSDP2 would take their mean. (Plain sums, since gloo has no scaled ones.)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The next block's weights travel while this one computes.
    for this, following in itertools.pairwise(blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])


class Gathering:
    """When the sharded weights of a transformer are gathered, and when they are given back."""

    def __init__(self, transformer: nn.Module, keep: Literal["never", "rollout", "always"]) -> None:
        self.modules = fsdp_modules(transformer)
        self.keep = keep
        if keep == "always":
            self._stay_gathered(True)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Keep weights gathered through a phase that changes none of them, where the setting says so."""
        stays = self.keep == "rollout" and name != "update"
        if stays:
            self._stay_gathered(True)
        try:
            yield
        finally:
            if stays:
                self._stay_gathered(False)
                self.give_back()

    def give_back(self) -> None:
        """Free gathered weights, which are stale once the shards have changed."""
        for module in self.modules:
            module.reshard()

    def sum_over_replicas(self, now: bool) -> None:
        """Whether the next backward sums gradients over replicas too, or leaves that to a later one."""
        for module in self.modules:
            module.set_requires_all_reduce(now, recurse=False)

    def _stay_gathered(self, stay: bool) -> None:
        for module in self.modules:
            module.set_reshard_after_forward(not stay, recurse=False)
            module.set_reshard_after_backward(not stay, recurse=False)


def fsdp_modules(transformer: nn.Module) -> list[FSDPModule]:
    """The units of a sharded transformer, itself first; none of a whole one."""
    return [module for module in transformer.modules() if isinstance(module, FSDPModule)]


def _keep(
    transformer: nn.Module, config: RunConfig, world: World, device: torch.device
) -> Literal["never", "rollout", "always"]:
    """What `distributed.keep_gathered` means on these devices: the same on every rank, the smallest GPU decides."""
    section = config.distributed
    if section.keep_gathered != "auto":
        return section.keep_gathered
    if section.cpu_offload:
        return "never"
    if config.training.mode == "full":
        return "rollout"
    size = sum(p.numel() * p.element_size() for p in transformer.parameters())
    room = torch.cuda.get_device_properties(device).total_memory / 3 if device.type == "cuda" else float("inf")
    return "rollout" if world.any(size > room) else "always"


def _check_section(config: RunConfig, world: World) -> None:
    """ConfigError for settings of FSDP2 that would do nothing, or that exclude each other."""
    section = config.distributed
    if section.cpu_offload and section.keep_gathered in ("rollout", "always"):
        raise ConfigError(
            f"distributed.cpu_offload keeps weights off the GPU, but distributed.keep_gathered is "
            f"{section.keep_gathered}, which keeps them there. Set keep_gathered to auto or never."
        )
    if world.fsdp_mesh is None and (section.cpu_offload or section.param_dtype != "float32"):
        name = "cpu_offload" if section.cpu_offload else "param_dtype"
        raise ConfigError(
            f"distributed.{name} is {getattr(section, name)!r}, which FSDP2 does, but this process was not launched as "
            "one of a group. Start it by `torchrun --nproc_per_node=1 -m sage_fast train ...`, one or more per node."
        )
    if section.param_dtype != "float32" and config.model.forward == "stock":
        raise ConfigError(
            f"distributed.param_dtype is {section.param_dtype}, but model.forward stock feeds float32 inputs to the "
            "weights that are gathered in it. Set model.forward to fused, or param_dtype to float32."
        )
    one_holder = world.fsdp_mesh is None or (config.training.mode == "lora" and world.dp_shard * world.sp == 1)
    if one_holder and section.keep_gathered in ("never", "rollout"):
        raise ConfigError(
            f"distributed.keep_gathered is {section.keep_gathered}, but nothing is gathered here: every rank holds the "
            "weights whole. Set it to auto, or with training.mode lora raise distributed.dp_shard."
        )
    if section.cpu_offload and config.training.mode == "lora" and world.dp_shard * world.sp == 1:
        raise ConfigError(
            "distributed.cpu_offload moves shards of the weights, but with training.mode lora they are whole on every "
            "rank unless distributed.dp_shard or sp is more than 1. Raise dp_shard, or leave cpu_offload out."
        )


def _check_steps_agree(config: RunConfig) -> None:
    """ConfigError where a pass over one video is a forward and over another, on another rank, a backward too.

    Each would gather the weights of other layers. Where weights stay gathered through a rollout it does not matter.
    """
    training, section = config.training, config.distributed
    if training.update == "single_pass" and training.permute_timesteps and training.timestep_fraction < 1:
        remedy = "Set cpu_offload to false" if section.cpu_offload else "Set keep_gathered to rollout"
        raise ConfigError(
            f"training.update single_pass takes gradients at other steps of every video (timestep_fraction "
            f"{training.timestep_fraction}, permute_timesteps), but layers are gathered from all ranks for every pass "
            f"(distributed.keep_gathered {section.keep_gathered}, cpu_offload {str(section.cpu_offload).lower()}), so "
            f"that ranks must run the same ones. {remedy}, training.permute_timesteps to false, or training.update to "
            "two_phase."
        )
