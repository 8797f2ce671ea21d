"""DeepSpeed ZeRO-2 and ZeRO-3 behind the trainer's `Engine`.

DeepSpeed shards gradients, float32 masters and optimizer state (stage 2) and the weights (stage 3) over all ranks, sums
gradients while the backward pass runs, and steps torch's AdamW on flat partitions. Three things differ:

* **Gathering weights (stage 3)**: `gathering.py` says how, and why not as DeepSpeed does.
* **Sum, not mean.** DeepSpeed divides by the number of ranks before it sums, so every cotangent is multiplied by that
  number: exact for a power of two, one rounding otherwise. Ranks that share a video contribute parts of the sum like
  all others.
* **The trainer decides when an update's gradient is complete**, by calling `clip_gradients`. DeepSpeed's counting of
  micro-batches is off (`managed_gradient_accumulation`).

Tested with DeepSpeed 0.19.8. Everything used of it beyond its documented interface is in this file.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from packaging.version import Version
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import AdamW

from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError
from sage_fast.config.training_sections import OptimizerConfig
from sage_fast.distributed.deepspeed.gathering import BlockGathering
from sage_fast.distributed.deepspeed.zero_config import ZeroConfig, read_config
from sage_fast.distributed.engine import Phase, TensorSource
from sage_fast.distributed.world import World
from sage_fast.models.transformer import FusedForward
from sage_fast.optim import norm_is_finite
from sage_fast.policy.lora import always_read_glyphs, cast_weights, trainable_parameters

OLDEST = "0.19.8"
"""DeepSpeed before it lacks `managed_gradient_accumulation` or some of what is used beyond its documented interface."""
STATES = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a weight, besides the number of steps."""
CHUNK = 2**26
"""Elements that are exchanged at a time: 256 MiB."""


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one weight: `numel` elements, from `start` on in the weight and from `offset` on in flat
    partition number `flat`. numel 0: the weight lies on other ranks.

    Example: rank 1 of 2 has of a (3, 3) weight in ZeRO-3 the `Fragment(flat=0, start=5, offset=..., numel=4)`.
    """

    flat: int
    start: int
    offset: int
    numel: int


class DeepSpeedEngine:
    """`Engine` (engine.py) over DeepSpeed ZeRO, which sums over all ranks in every `vjp`.

    Args:
        transformer: on this rank's device, adapters and requires_grad settled, the fused forward installed. It stays
            callable as it is; with bf16 its weights become bfloat16, in stage 3 they are sharded.
        optimizer_config: the run's optimizer section.
        settings: its distributed section.
        world: the ranks, with a process group.
        mode: what is trained.

    Raises:
        ConfigError: DeepSpeed is not installed, its file does not fit the run, or the run was not launched.
    """

    def __init__(
        self,
        transformer: HunyuanVideo15Transformer3DModel,
        optimizer_config: OptimizerConfig,
        settings: DistributedConfig,
        world: World,
        *,
        mode: Literal["lora", "full"],
    ) -> None:
        assert settings.deepspeed_config is not None
        if not dist.is_initialized():
            raise ConfigError(
                "distributed.engine is deepspeed, which needs a process group. Start the run by "
                "`torchrun --nproc_per_node=N -m sage_fast train ...`; N may be 1."
            )
        config = read_config(
            settings.deepspeed_config, optimizer_config, mode=mode, dtype=transformer.dtype, warn=world.is_main
        )
        deepspeed = _import_deepspeed(next(transformer.parameters()).device)
        acceleration: FusedForward | None = transformer.__dict__.get("_acceleration")
        _check_forward(acceleration, config)
        self.config, self.optimizer_config, self.world = config, optimizer_config, world
        self.parameters: Mapping[str, nn.Parameter] = trainable_parameters(transformer)
        self.shapes: Mapping[str, torch.Size] = {name: p.shape for name, p in self.parameters.items()}
        self.sharded = config.stage == 3
        self.gathering_group = dist.group.WORLD if self.sharded else None
        self.lockstep = True

        exact: dict[str, Tensor] = {}
        """Weights that bfloat16 rounds: their masters start from these."""
        if config.bf16:
            exact = {n: p.data for n, p in self.parameters.items() if not torch.equal(p, p.bfloat16().to(p.dtype))}
            if transformer.dtype != torch.bfloat16:
                cast_weights(transformer, torch.bfloat16)
        always_read_glyphs(transformer)
        self._initialize(deepspeed, transformer)
        if acceleration is not None:
            acceleration.forget()
        self.masters: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self.sharded else self._zero.single_partition_of_fp32_groups
        )
        """This rank's float32 partitions of the trained weights."""
        self.fragments = {name: self._fragment(p) for name, p in self.parameters.items()}
        for master in self.masters:
            # What AdamW creates in its first step; a checkpoint may come before.
            self._zero.optimizer.state[master] = {
                "step": torch.tensor(0.0),
                **{key: torch.zeros_like(master, requires_grad=False) for key in STATES},
            }
        for name, value in exact.items():
            self._put(self.masters, name, value)
        self._updates = 0

    def _initialize(self, deepspeed: Any, transformer: HunyuanVideo15Transformer3DModel) -> None:
        """Hand the transformer and its optimizer to DeepSpeed."""
        optimizer = AdamW(
            list(self.parameters.values()),
            lr=self.optimizer_config.learning_rate,
            betas=self.optimizer_config.betas,
            eps=self.optimizer_config.eps,
            weight_decay=self.optimizer_config.weight_decay,
        )
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        with _quiet():
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=transformer, optimizer=optimizer, config=dict(self.config.document), dist_init_required=False
            )
        # They time DeepSpeed's own loop and, in stage 3, visit all modules in every forward to gather what is gathered
        # here.
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._gathering: BlockGathering | None = None
        if self.sharded:
            self._zero.parameter_offload.destroy()
            self._gathering = BlockGathering(transformer)

    # ------------------------------------------------------------------------------------------ gradient and step

    def vjp(self, output: Tensor, cotangents: Sequence[Tensor]) -> None:
        """As in `Engine`. The sum over ranks is taken on the way."""
        (cotangent,) = cotangents
        # As DeepSpeed does before a forward: this adds to the gradient so far instead of replacing it.
        self._zero.clear_backward_seen_flag()
        self._engine.backward((output * (cotangent * self.world.size)).sum(), scale_wrt_gas=False)
        if self._gathering is not None:
            self._gathering.end_backward()

    def last_vjp(self, last: bool) -> None:
        """As in `Engine`; ZeRO sums in every backward."""

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """As in `Engine`. Scaling is left to `step`, with torch's coefficient max_norm / (norm + 1e-6), at most 1."""
        self._zero.finalize_gradient_accumulation_boundary()
        parts = [part for group in self._zero.averaged_gradients.values() if group is not None for part in group]
        squares = torch.stack([part.float().norm().square() for part in parts]).sum()
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def step(self) -> None:
        """As in `Engine`."""
        for group in self._zero.optimizer.param_groups:
            group["lr"] = self.learning_rate
        # Not the engine's step, which would complete the gradient a second time.
        self._zero.step()
        self.zero_grad()
        self._updates += 1

    def zero_grad(self) -> None:
        """As in `Engine`."""
        self._zero.zero_grad(set_to_none=True)
        if not self.sharded:
            self._zero._release_preflattened_grad_buffers()
            for index in range(len(self.masters)):
                self._zero.averaged_gradients[index] = self._zero.all_grad_tensors[index] = None

    def weights_finite(self) -> bool:
        """As in `Engine`, of the float32 masters."""
        return norm_is_finite(self.masters)

    @property
    def learning_rate(self) -> float:
        """As in `Engine`."""
        warmup = self.optimizer_config.warmup_updates
        rise = min(1.0, (self._updates + 1) / warmup) if warmup else 1.0
        return self.optimizer_config.learning_rate * rise

    def snapshot(self) -> "ZeroSnapshot":
        """As in `Engine`: one more set of float32 partitions."""
        return ZeroSnapshot(self)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """As in `Engine`; weights of blocks are gathered for each call in every phase."""
        return nullcontext()

    # ------------------------------------------------------------------------------------------------------ state

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """As in `Engine`: copies in CPU memory, every tensor on one rank, in turn. Collective."""
        state = [self._zero.optimizer.state[master] for master in self.masters]
        optimizer: dict[str, Tensor] = {}
        for key in STATES:
            whole = self.gather_whole([flat[key] for flat in state])
            optimizer |= {f"{name}.{key}": value for name, value in whole.items()}
        for name, owner in self._owners():
            if owner == self.world.rank:
                optimizer[f"{name}.step"] = state[0]["step"].clone()
        return {"weights": self.gather_whole(self.masters), "optimizer": optimizer}

    def load_tensors(self, source: TensorSource) -> None:
        """As in `Engine`."""
        state = [self._zero.optimizer.state[master] for master in self.masters]
        self.load_whole(self.masters, lambda name: source.read("weights", name))
        for key in STATES:
            flats = [flat[key] for flat in state]
            self.load_whole(flats, lambda name, key=key: source.read("optimizer", f"{name}.{key}"))  # type: ignore[misc]
        steps = float(source.read("optimizer", f"{next(iter(self.parameters))}.step"))
        for flat in state:
            flat["step"] = torch.tensor(steps)
        self.weights_changed()

    def state(self) -> dict[str, Any]:
        """As in `Engine`."""
        return {"updates": self._updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As in `Engine`."""
        self._updates = int(state["updates"])

    # ------------------------------------------------------------------------------------------------- partitions

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the context the trained weights are whole and float32 on every rank, as an adapter is saved. The model
        cannot compute then. Collective.
        """
        sharded = {name: p.data for name, p in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                whole = self._spread(self.masters, name)
                dist.all_reduce(whole)
                parameter.data = whole.view(self.shapes[name])
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = sharded[name]

    def gather_whole(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Weights, or what is partitioned like them, whole and in CPU memory, each on one rank. Collective."""
        result = {}
        for name, owner in self._owners():
            whole = self._spread(flats, name)
            dist.reduce(whole, owner)
            if owner == self.world.rank:
                result[name] = whole.view(self.shapes[name]).cpu()
        return result

    def load_whole(self, flats: Sequence[Tensor], read: Callable[[str], Tensor]) -> None:
        """Fill this rank's partitions from whole tensors by the names of the weights; only what lies here is read."""
        for name in self.parameters:
            if self.fragments[name].numel:
                self._put(flats, name, read(name))

    def weights_changed(self) -> None:
        """Give the model the values of the masters. Collective."""
        if self._gathering is None:
            self._zero.update_lp_params()
            return
        for index in range(len(self.masters)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        self._zero.parameter_offload.partition_all_parameters()

    @torch.no_grad()
    def _spread(self, flats: Sequence[Tensor], name: str) -> Tensor:
        """This rank's part of a weight at its place among zeros, flat: the ranks' sum is the weight."""
        fragment = self.fragments[name]
        whole = torch.zeros(self.shapes[name].numel(), device=flats[0].device)
        whole[fragment.start :][: fragment.numel] = flats[fragment.flat][fragment.offset :][: fragment.numel]
        return whole

    @torch.no_grad()
    def _put(self, flats: Sequence[Tensor], name: str, whole: Tensor) -> None:
        fragment = self.fragments[name]
        if whole.shape != self.shapes[name]:
            raise ValueError(f"{name} is of shape {tuple(whole.shape)}, this run's is {tuple(self.shapes[name])}.")
        part = whole.detach().flatten()[fragment.start :][: fragment.numel]
        flats[fragment.flat][fragment.offset :][: fragment.numel].copy_(part)

    def _owners(self) -> Iterator[tuple[str, int]]:
        """Every trained weight's name with the rank that holds it whole for a checkpoint."""
        return ((name, index % self.world.size) for index, name in enumerate(self.parameters))

    def _fragment(self, parameter: Any) -> Fragment:
        if self.sharded:
            flat, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = min(padded * self.world.rank, parameter.ds_numel)
            return Fragment(flat, start, offset, min(padded, parameter.ds_numel - start))
        mapping = parameter._hp_mapping
        if mapping is None:
            return Fragment(0, 0, 0, 0)
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Fragment(mapping.param_group_index, here.start, there.start, there.numel)


class ZeroSnapshot:
    """`Snapshot` (engine.py) in float32, partitioned like the masters."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.values = [master.detach().clone() for master in engine.masters]

    @torch.no_grad()
    def refresh(self) -> None:
        """As in `Snapshot`."""
        for value, master in zip(self.values, self._engine.masters, strict=True):
            value.copy_(master)

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """As in `Snapshot`."""
        for value, master in zip(self.values, self._engine.masters, strict=True):
            value.lerp_(master, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """As in `Snapshot`. Partitions are exchanged with the masters, so that both come back bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for values, masters in zip(self.values, self._engine.masters, strict=True):
            for value, master in zip(values.split(CHUNK), masters.split(CHUNK), strict=True):
                old = master.clone()
                master.copy_(value)
                value.copy_(old)
        self._engine.weights_changed()

    def tensors(self) -> dict[str, Tensor]:
        """As in `Snapshot`: copies in CPU memory, every tensor on one rank, in turn."""
        return self._engine.gather_whole(self.values)

    def load_tensors(self, source: TensorSource, group: str) -> None:
        """As in `Snapshot`."""
        self._engine.load_whole(self.values, lambda name: source.read(group, name))


def _check_forward(acceleration: FusedForward | None, config: ZeroConfig) -> None:
    """ConfigError for options of the fused forward that cannot be had."""
    if acceleration is None:
        return
    allowed = ("auto", "weights") if config.stage == 3 else ("auto", "weights", "table")
    if acceleration.adaln not in allowed:
        raise ConfigError(
            f"model.adaln is {acceleration.adaln!r}, but DeepSpeed ZeRO-{config.stage} "
            + ("shards the AdaLN weights" if config.stage == 3 else "keeps all weights on the GPU")
            + ". Set model.adaln to auto."
        )


def _import_deepspeed(device: torch.device) -> Any:
    """The package, for this kind of device. ConfigError where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cpu":
        # Else it starts `numactl` whenever it sums gradients, to count devices.
        os.environ.setdefault("LOCAL_SIZE", "1")
    try:
        with _quiet():
            deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"distributed.engine is deepspeed, which cannot be imported here ({error}). Run "
            "`pip install 'sage-fast[deepspeed]'`, or set distributed.engine to fsdp."
        ) from error
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise ConfigError(
            f"distributed.engine is deepspeed, and DeepSpeed {deepspeed.__version__} is installed, but {OLDEST} is the "
            "oldest that works. Run `pip install -U 'sage-fast[deepspeed]'`, or set distributed.engine to fsdp."
        )
    # On a CPU it would compile an operator of its own for the communication, at run time, which takes a minute.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's remarks on this machine and on its own start to its errors."""
    log = logging.getLogger("DeepSpeed")
    level = log.level
    log.setLevel(logging.ERROR)
    # Every collective of DeepSpeed 0.19 under torch 2.13.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        yield
    finally:
        log.setLevel(max(level, logging.WARNING))
