"""DeepSpeed ZeRO-2 behind the trainer's `Engine`.

DeepSpeed shards gradients, float32 masters and optimizer state over all ranks, sums
gradients while the backward pass runs, and steps torch's AdamW on flat partitions. The
weights stay whole; FSDP2 shards them too. Two things differ:

* **Sum, not mean.** DeepSpeed divides by the number of ranks before it sums, so every
  cotangent is multiplied by that number: exact for a power of two, one rounding
  otherwise. Ranks that share a video contribute parts of the sum like all others.
* **The trainer decides when an update's gradient is complete**, by calling
  `clip_gradients`. DeepSpeed's counting of micro-batches is off
  (`managed_gradient_accumulation`).

Tested with DeepSpeed 0.19.8. Everything used of it beyond its documented interface is
in this file.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor
from torch import distributed as dist
from torch.optim import AdamW

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import DistributedConfig, OptimizerConfig
from sage_fast.distributed.engine import Engine, TensorSource, WeightSnapshot
from sage_fast.distributed.world import World
from sage_fast.models.family import family_of
from sage_fast.models.stored import FusedForward
from sage_fast.policy.lora import trainable_parameters

OLDEST = "0.19.8"
"""DeepSpeed before it lacks `managed_gradient_accumulation` or some of what is used
beyond its documented interface.
"""
STATES = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a weight, apart from the number of steps."""
CHUNK = 2**26
"""Elements that are exchanged at a time: 256 MiB."""
REDUCE_BUCKET = 50_000_000
GATHER_BUCKET = 200_000_000
"""Elements that are summed, or gathered after a step, at a time."""


class DeepSpeedEngine(Engine):
    """DeepSpeed ZeRO, which sums over all ranks in every `vjp`. The weights are whole
    in every phase.

    Args:
        transformer: on this rank's device, adapters and requires_grad settled, the
            fused forward installed. It stays callable as it is; with bf16 its weights
            become bfloat16.
        optimizer_config: the run's optimizer section.
        settings: its distributed section.
        world: the ranks, with a process group.
        mode: what is trained.

    Raises:
        ConfigError: DeepSpeed is not installed or too old, or the run was not launched.
    """

    def __init__(
        self,
        transformer: Any,
        optimizer_config: OptimizerConfig,
        settings: DistributedConfig,
        world: World,
        *,
        mode: Literal["lora", "full"],
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                f"distributed.zero_stage is {settings.zero_stage}, which needs a "
                "process group. Start the run by `torchrun --nproc_per_node=N -m "
                "sage_fast train ...`; N may be 1. One process needs no DeepSpeed: "
                "--distributed.zero_stage=null, also on resume."
            )
        deepspeed = _import_deepspeed(next(transformer.parameters()).device)
        acceleration: FusedForward | None = transformer.__dict__.get("_acceleration")
        super().__init__(trainable_parameters(transformer), optimizer_config, world)
        family = family_of(transformer)
        self.sharded = False
        self.lockstep = True

        bf16 = transformer.dtype == torch.bfloat16
        if mode == "full":
            bf16 = settings.param_dtype == "bfloat16"
        exact: dict[str, Tensor] = {}
        """Weights that bfloat16 rounds: their masters start from these."""
        if bf16:
            exact = {
                n: p.data
                for n, p in self.parameters.items()
                if not torch.equal(p, p.bfloat16().to(p.dtype))
            }
            if transformer.dtype != torch.bfloat16:
                family.cast(transformer, torch.bfloat16)
        family.always_read(transformer)
        self._fragments = importlib.import_module("deepspeed.utils")
        self._initialize(deepspeed, transformer, bf16)
        if acceleration is not None:
            # DeepSpeed has moved the weights into its own buffers through `.data`,
            # which leaves no trace.
            acceleration.forget()
        self.masters = self._zero.single_partition_of_fp32_groups
        # This rank's float32 partitions of the trained weights.
        for master in self.masters:
            # What AdamW creates in its first step; a checkpoint may come before.
            state = {
                key: torch.zeros_like(master, requires_grad=False) for key in STATES
            }
            self._zero.optimizer.state[master] = {"step": torch.tensor(0.0), **state}
        # It lets the `safe_` functions find this state by the weight.
        self._zero._lazy_init_hp_params_optimizer_state()
        # DeepSpeed has made the masters of the rounded weights.
        for name, value in exact.items():
            self.set_master(name, value)

    def _initialize(self, deepspeed: Any, transformer: Any, bf16: bool) -> None:
        """Hand the transformer and its optimizer to DeepSpeed."""
        optimizer = AdamW(
            list(self.parameters.values()),
            lr=self.optimizer_config.learning_rate,
            betas=self.optimizer_config.betas,
            eps=self.optimizer_config.eps,
            weight_decay=self.optimizer_config.weight_decay,
        )
        document = {
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": REDUCE_BUCKET,
                "allgather_bucket_size": GATHER_BUCKET,
            },
            "bf16": {"enabled": bf16},
            # Gradients are summed in float32, as by FSDP2.
            "communication_data_type": "fp32",
            # many small gradients are added per update
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": self.optimizer_config.max_grad_norm,
            # DeepSpeed wants a batch size, and divides by nothing but the number of
            # ranks with these.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,
        }
        with _quiet():
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=transformer,
                optimizer=optimizer,
                config=document,
                dist_init_required=False,
            )
        # They time DeepSpeed's own loop.
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()

    # ----------------------------------------------------------------------------------
    # gradient and step

    def vjp(self, output: Tensor, cotangents: Sequence[Tensor]) -> None:
        (cotangent,) = cotangents
        # As DeepSpeed does before a forward: this adds to the gradient so far instead
        # of replacing it.
        self._zero.clear_backward_seen_flag()
        product = output * (cotangent * self.world.size)
        # It sums over the ranks on the way.
        self._engine.backward(product.sum(), scale_wrt_gas=False)

    @torch.no_grad()
    def clip_gradients(self) -> float:
        # Scaling is left to `step`, with torch's coefficient max_norm / (norm + 1e-6),
        # at most 1.
        self._zero.finalize_gradient_accumulation_boundary()
        # A rank holds the sum for its own partitions, so the squares of all ranks add
        # up to the whole norm.
        squares: list[Tensor] = []
        for group in self._zero.averaged_gradients.values():
            squares += [part.float().norm().square() for part in group or ()]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def step(self) -> None:
        for group in self._zero.optimizer.param_groups:
            group["lr"] = self.learning_rate
        # Not the engine's step, which would complete the gradient a second time.
        self._zero.step()
        self.zero_grad()
        self.updates += 1

    def zero_grad(self) -> None:
        self._zero.zero_grad(set_to_none=True)
        self._zero._release_preflattened_grad_buffers()
        for index in range(len(self.masters)):
            self._zero.averaged_gradients[index] = None
            self._zero.all_grad_tensors[index] = None

    def snapshot(self) -> "ZeroSnapshot":
        """One more set of float32 partitions."""
        return ZeroSnapshot(self, self._zero.update_lp_params)

    # ----------------------------------------------------------------------------------
    # state

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Copies in CPU memory, every tensor on one rank, in turn. Collective."""
        optimizer: dict[str, Tensor] = {}
        for key in STATES:
            for name, value in self.gather_whole(key).items():
                optimizer[f"{name}.{key}"] = value
        weights = self.gather_whole()
        step = self._zero.optimizer.state[self.masters[0]]["step"]
        for name in weights:
            optimizer[f"{name}.step"] = step.clone()
        return {"weights": weights, "optimizer": optimizer}

    def load_tensors(self, source: TensorSource) -> None:
        for name in self.parameters:
            self.set_master(name, source.read("weights", name))
            for key in STATES:
                self.set_master(name, source.read("optimizer", f"{name}.{key}"), key)
        # AdamW counts the steps of a partition, and all weights have taken as many.
        steps = float(source.read("optimizer", f"{next(iter(self.parameters))}.step"))
        for master in self.masters:
            self._zero.optimizer.state[master]["step"] = torch.tensor(steps)
        # The weights of the model follow their masters.
        self._zero.update_lp_params()

    # ----------------------------------------------------------------------------------
    # partitions

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the context the trained weights are whole and float32 on every rank,
        as an adapter is saved. The model cannot compute then. Collective.
        """
        own = {name: p.data for name, p in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self._whole(name)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = own[name]

    def gather_whole(self, key: str | None = None) -> dict[str, Tensor]:
        """The masters, or a part of AdamW's state, whole and in CPU memory, each on one
        rank. Collective.
        """
        result = {}
        for index, name in enumerate(self.parameters):
            whole = self._whole(name, key)
            if index % self.world.size == self.world.rank:
                result[name] = whole.cpu()
        return result

    def _whole(self, name: str, key: str | None = None) -> Tensor:
        """A master, or a part of its AdamW state, whole on every rank. Collective."""
        parameter = self.parameters[name]
        if key is None:
            whole = self._fragments.safe_get_full_fp32_param(parameter)
        else:
            whole = self._fragments.safe_get_full_optimizer_state(parameter, key)
        return whole.view(self.shapes[name])

    @torch.no_grad()
    def set_master(self, name: str, whole: Tensor, key: str | None = None) -> None:
        """Fill this rank's part of a master, or of a part of its AdamW state."""
        parameter = self.parameters[name]
        if key is None:
            self._fragments.safe_set_full_fp32_param(parameter, whole)
        else:
            self._fragments.safe_set_full_optimizer_state(parameter, whole, key)


class ZeroSnapshot(WeightSnapshot):
    """In float32, partitioned like the masters."""

    def __init__(self, engine: DeepSpeedEngine, changed: Callable[[], None]) -> None:
        super().__init__(
            {str(i): master for i, master in enumerate(engine.masters)}, changed
        )
        self._engine = engine

    @torch.no_grad()
    def _exchange(self) -> None:
        # In place, since DeepSpeed's fragments are views of the masters; both come back
        # bit for bit.
        for name, masters in self._parameters.items():
            for value, master in zip(
                self.values[name].split(CHUNK), masters.split(CHUNK), strict=True
            ):
                old = master.clone()
                master.copy_(value)
                value.copy_(old)
        self._changed()

    def tensors(self) -> dict[str, Tensor]:
        """Copies in CPU memory, every tensor on one rank, in turn. Collective."""
        with self.applied():
            return self._engine.gather_whole()

    def load_tensors(self, source: TensorSource, group: str) -> None:
        with self.applied():
            for name in self._engine.parameters:
                self._engine.set_master(name, source.read(group, name))


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
            "distributed.zero_stage needs DeepSpeed, which cannot be imported here "
            f"({error}). Run `pip install 'sage-fast[deepspeed]'`, or set "
            "distributed.zero_stage to null, which is FSDP2."
        ) from error
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise ConfigError(
            f"distributed.zero_stage needs DeepSpeed {OLDEST}, and "
            f"{deepspeed.__version__} is installed. Run `pip install -U "
            "'sage-fast[deepspeed]'`, or set distributed.zero_stage to null, which is "
            "FSDP2."
        )
    # On a CPU it would compile its own operator for the communication, at run time,
    # which takes a minute.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's remarks on this machine and on its own start to its errors."""
    log = logging.getLogger("DeepSpeed")
    level = log.level
    log.setLevel(logging.ERROR)
    # Every collective of DeepSpeed 0.19 under torch 2.13.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )
    try:
        yield
    finally:
        log.setLevel(max(level, logging.WARNING))
