"""The transformer over the processes of a run, and the engine that trains it there by
torch itself.

The order of the steps in `parallelize` matters: what replaces a forward comes before
what wraps the module's call.

Which ranks hold what (DESIGN: torch FSDP2 is the default engine):
* training.mode full: every weight is a float32 master, sharded over the dp_shard * sp
  ranks of a replica. A block is gathered in `distributed.param_dtype`, its gradient is
  summed in float32 and scattered back.
* training.mode lora: the frozen weights are sharded likewise, in their own dtype.
  Adapters are small (225 MB at rank 32) and stay whole on every rank, outside FSDP: one
  sum per update replaces one per backward, anchor and EMA exchange them as on one
  process, and the single pass can differentiate with respect to them.
"""

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import check_gathering
from sage_fast.config.sections import (
    DistributedConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainingConfig,
)
from sage_fast.distributed.engine import Engine, Phase, TensorSource, WeightSnapshot
from sage_fast.distributed.world import World
from sage_fast.models.family import family_of, transformer_blocks
from sage_fast.models.stored import StoredWeights, allocate, in_parts
from sage_fast.optim import OptimizerSet
from sage_fast.policy.guidance import vjp_into_grad
from sage_fast.sharding.ulysses import shard_sequence

logger = logging.getLogger(__name__)

KeepGathered = Literal["never", "rollout", "always"]

# FSDP2 warns of in-place writes to the outputs of blocks; nothing here makes any.
warnings.filterwarnings(
    "ignore", message="FSDP2-wrapped module .* returned a view tensor"
)


def parallelize(
    transformer: Any,
    distributed: DistributedConfig,
    model: ModelConfig,
    training: TrainingConfig,
    world: World,
    device: torch.device,
    weights: StoredWeights | None = None,
    *,
    check_steps_agree: Callable[[], None] = lambda: None,
) -> KeepGathered:
    """Spread a transformer, whose adapters and requires_grad are settled, over the
    ranks. Collective.

    Args:
        transformer: in CPU memory; afterwards on `device`, or sharded there.
        distributed, model, training: sections of the run's configuration.
        world: the ranks.
        device: this rank's.
        weights: what the transformer has not been given yet.
        check_steps_agree: of the run's objective; called where ranks must run the
            same passes.

    Returns:
        How long sharded weights stay gathered; `never` where none are.

    Raises:
        ConfigError: settings that exclude each other, or that this model cannot have.
    """
    full = training.mode == "full"
    zero = distributed.zero_stage is not None
    family = family_of(transformer)
    check_gathering(
        distributed,
        model,
        training,
        launched=world.fsdp_mesh is not None,
        shards=world.dp_shard * world.sp,
    )
    keep_gathered = _resolve_keep_gathered(
        transformer, distributed, training.mode, world, device
    )
    # Frozen weights that would stay gathered for good are not sharded in the first
    # place.
    shards = full or (world.dp_shard * world.sp > 1 and keep_gathered != "always")
    sharded = world.fsdp_mesh is not None and shards and not zero
    if (
        world.dp_shard > 1
        and not (sharded or zero)
        and distributed.keep_gathered == "auto"
    ):
        logger.info(
            "distributed.dp_shard %d has no effect: the frozen weights take less than "
            "a third of a GPU, so with keep_gathered auto every rank holds them whole. "
            "Set keep_gathered to rollout to shard them.",
            world.dp_shard,
        )
    if sharded and keep_gathered == "never" and world.dp_shard > 1:
        check_steps_agree()
    if not sharded:
        if weights is not None:
            # From the mapped files straight to the device.
            weights.read_into(transformer, device)
        transformer.to(device)
    if full and not zero:  # DeepSpeed's engine does so itself
        family.always_read(transformer)
    # 1. Activation checkpointing and compile: both are inside the forward of the fused
    # blocks.
    if (sharded or zero) and model.adaln == "auto":
        # `auto` would make a table whenever the weights happen to be gathered.
        model = replace(model, adaln="weights")
    # Weights that will be sharded are still on the CPU, in their masters' type.
    dtype = getattr(torch, distributed.param_dtype) if full else transformer.dtype
    acceleration = family.choose_forward(
        transformer, model, computes_in=(device, dtype)
    )
    # 2. Sequence parallelism, inside the blocks too: the block's input is a share of
    # the tokens.
    if world.sp > 1:
        if acceleration is None:
            raise ConfigError(
                f"distributed.sp is {world.sp}, but sequence parallelism needs the "
                "fused forward and model.forward is stock. Set model.forward to fused, "
                "or distributed.sp to 1."
            )
        assert world.sp_group is not None
        shard_sequence(acceleration, world.sp_group)
    # 3. FSDP2 (or, in its own engine, DeepSpeed) around the calls of the blocks and of
    # the transformer. Last, because it moves the weights.
    if not sharded:
        return "never"
    shard_weights(transformer, distributed, model, world, device, mode=training.mode)
    if weights is not None:
        # Each rank reads its own parts of the files.
        weights.read_into(transformer)
    return keep_gathered


def shard_weights(
    transformer: Any,
    distributed: DistributedConfig,
    model: ModelConfig,
    world: World,
    device: torch.device,
    *,
    mode: Literal["lora", "full"],
) -> None:
    """FSDP2 on every block, and on the rest of the transformer as one more unit."""
    full = mode == "full"
    family = family_of(transformer)
    # Not sharded: adapters, the weights behind a modulation table, and those that stay
    # float32 beside 16-bit ones, since a unit has one type.
    whole: set[nn.Parameter] = set()
    if not full:
        for name, p in transformer.named_parameters():
            if p.requires_grad or in_parts(name, family.in_float32):
                p.data = p.data.to(device)
                whole.add(p)
    if model.adaln in ("table", "offload"):
        layers = family.adaln_layers(transformer)
        if model.adaln == "table":  # with `offload` they are in CPU memory
            nn.ModuleList(layers).to(device)
        embedding = nn.ModuleList(map(transformer.get_submodule, family.time_embedding))
        for module in (*embedding.to(device), *layers):
            whole.update(module.parameters())
    for name, buffer in transformer.named_buffers():
        owner, _, last = name.rpartition(".")
        transformer.get_submodule(owner)._buffers[last] = buffer.to(device)
    offload = OffloadPolicy()
    if distributed.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    settings: dict[str, Any] = {
        # A mesh of two dimensions means replicas of the shards to FSDP2.
        "mesh": world.fsdp_mesh if world.dp_replicate > 1 else world.fsdp_mesh["shard"],  # type: ignore[index]
        # Inputs are not cast: a timestep rounded to bfloat16 is another noise level.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, distributed.param_dtype) if full else None,
            reduce_dtype=torch.float32 if full else None,
            cast_forward_inputs=False,
        ),
        "offload_policy": offload,
        "ignored_params": whole,
        "reshard_after_forward": True,
    }
    # Block after block from CPU memory, so that a GPU never holds more than its shards
    # and one block.
    blocks = transformer_blocks(transformer)
    root: Any = transformer
    for module in (*blocks, root):
        allocate((p for p in module.parameters() if p not in whole), device)
        fully_shard(module, **settings)
        # Every rank, of the same video (sp) or another, contributes its part of the
        # gradient of one whole loss, so the parts are added. FSDP2 would take their
        # mean. (Plain sums, since gloo has no scaled ones.)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The next block's weights travel while this one computes.
    for this, following in itertools.pairwise(blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])


class TorchEngine(Engine):
    """torch's optimizers, on one process or over FSDP2.

    Adapters are whole on every rank, so their gradient is summed here, once per update.
    FSDP2 sums the gradient of sharded weights in the backward pass.

    Args:
        parameters: qualified name -> trained weight, a DTensor where it is sharded.
        config: the run's optimizer section.
        world: the ranks.
        transformer: that has them, spread over the ranks.
        keep_gathered: from `parallelize`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        world: World,
        transformer: nn.Module,
        keep_gathered: KeepGathered,
    ) -> None:
        super().__init__(parameters, config, world)
        self.optimizer = OptimizerSet(parameters, config)
        self.modules = [
            module for module in transformer.modules() if isinstance(module, FSDPModule)
        ]
        self.sharded = self.lockstep = bool(self.modules)
        self.shards_trained = any(isinstance(p, DTensor) for p in parameters.values())
        self.keep_gathered = keep_gathered
        self._first_half: list[Tensor] | None = None
        if keep_gathered == "always":
            self._stay_gathered(True)

    vjp = staticmethod(vjp_into_grad)

    def last_vjp(self, last: bool) -> None:
        # FSDP2 leaves the sum over replicas of the weights to the last backward.
        if self.shards_trained and self.world.dp_replicate > 1:
            for module in self.modules:
                module.set_requires_all_reduce(last, recurse=False)

    def halve(self) -> None:
        # one more copy of the gradient, until it is summed
        self._first_half = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.parameters.values()
        ]

    def clip_gradients(self) -> float:
        if not self.shards_trained:
            whole: list[Tensor] = []
            for parameter in self.parameters.values():
                # no video of this rank has one; decay and moments act all the same
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                whole.append(parameter.grad)
            self.world.sum_(whole)
            self.signal = self._compare_halves(whole)
        return self.optimizer.clip_gradients()

    @torch.no_grad()
    def _compare_halves(self, whole: list[Tensor]) -> float | None:
        """Cosine between the gradient of the first half, which is used up, and what it
        lacks of the whole one.

        None where `halve` was not called, or a half has no gradient. Collective.
        """
        first = self._first_half
        self._first_half = None
        if first is None:
            return None
        self.world.sum_(first)
        norms = [nn.utils.get_total_norm(first)]
        torch._foreach_sub_(first, whole)
        norms += [nn.utils.get_total_norm(first), nn.utils.get_total_norm(whole)]
        a, b, c = torch.stack(norms).tolist()
        # |a + b|^2 = |a|^2 + |b|^2 + 2 ab, in float64.
        cosine = (c * c - a * a - b * b) / (2 * a * b) if a and b else math.nan
        return cosine if math.isfinite(cosine) else None

    def step(self) -> None:
        self.optimizer.step(self.learning_rate)
        if not self.shards_trained:
            self.eps_share = self.optimizer.eps_share()
        self.updates += 1
        self._weights_changed()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def snapshot(self) -> WeightSnapshot:
        return WeightSnapshot(self.parameters, self._weights_changed)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Weights stay gathered through a phase that changes none, if `keep_gathered`
        says so.
        """
        stays = self.keep_gathered == "rollout" and name != "update"
        if stays:
            self._stay_gathered(True)
        try:
            yield
        finally:
            if stays:
                self._stay_gathered(False)

    def _stay_gathered(self, stay: bool) -> None:
        """Keep weights once they are gathered; or no longer, and free those that are
        there.
        """
        for module in self.modules:
            # Not recursive: `modules` has every unit, the root too.
            module.set_reshard_after_forward(not stay, recurse=False)
            module.set_reshard_after_backward(not stay, recurse=False)
            if not stay:
                module.reshard()

    def _weights_changed(self) -> None:
        """Free gathered copies of trained weights, which are stale."""
        if self.shards_trained:
            for module in self.modules:
                module.reshard()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.tensors(),
        }

    def load_tensors(self, source: TensorSource) -> None:
        source.load_into(self.tensors())
        self._weights_changed()


def _resolve_keep_gathered(
    transformer: nn.Module,
    distributed: DistributedConfig,
    mode: str,
    world: World,
    device: torch.device,
) -> KeepGathered:
    """Settle `distributed.keep_gathered` for these devices: the same on every rank, the
    smallest GPU decides.
    """
    if distributed.keep_gathered != "auto":
        return distributed.keep_gathered
    if distributed.cpu_offload:
        return "never"
    if mode == "full":
        return "rollout"
    size = sum(p.nbytes for p in transformer.parameters())
    room = math.inf
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory / 3
    return "rollout" if world.any(size > room) else "always"


def check_lockstep(
    rollout: RolloutConfig,
    evaluation: EvaluationConfig,
    train: set[Any],
    scored: set[Any],
) -> None:
    """ConfigError unless all ranks run equally many dense batches, as they must where a
    forward communicates weights.

    A batch of prompts with different numbers of tokens runs as several.

    Args:
        train, scored: the lengths (`PromptEncoder.prepare`) that training and
            evaluation prompts have.
    """
    if rollout.num_generations % rollout.videos_at_once and len(train) > 1:
        raise ConfigError(
            f"rollout.micro_batch_size is {rollout.videos_at_once}, which mixes "
            "prompts of different lengths, but weights are sharded over ranks "
            "(distributed.dp_shard, sp), which must all run equally many forwards. "
            f"Set it to a divisor of rollout.num_generations = {rollout.num_generations}."
        )
    if evaluation.every and evaluation.batch_size > 1 and len(scored) > 1:
        raise ConfigError(
            f"evaluation.batch_size is {evaluation.batch_size}, which mixes prompts "
            "of different lengths, but weights are sharded over ranks "
            "(distributed.dp_shard, sp), which must all run equally many forwards. "
            "Set it to 1."
        )
