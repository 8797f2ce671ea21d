"""The trainer's view of how gradients are summed, weights sharded and the optimizer stepped.

`TorchEngine` is torch's own, on one process or over FSDP2; `DeepSpeedEngine` (`deepspeed/zero_engine.py`) is ZeRO. All
ranks call the collective methods in the same order; on one process these communicate with nobody.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

Phase = Literal["rollout", "anchor", "update", "evaluation"]


class TensorSource(Protocol):
    """A checkpoint's tensors by group and name, saved by any engine on any number of ranks."""

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tensors, which may be shards, in place; only these groups and names are read. Collective."""
        ...

    def read(self, group: str, name: str) -> Tensor:
        """One whole tensor, in CPU memory."""
        ...


class Snapshot(Protocol):
    """A second set of values of the trained weights: the KL anchor, or their moving average."""

    def refresh(self) -> None:
        """Take the weights as they are now."""
        ...

    def average(self, decay: float) -> None:
        """Move towards the present weights: value <- decay * value + (1 - decay) * weight."""
        ...

    def applied(self) -> AbstractContextManager[None]:
        """Within the context the model computes with these values. Collective."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The values by the names of the weights, for a checkpoint; live or partial as in `Engine.tensors`."""
        ...

    def load_tensors(self, source: TensorSource, group: str) -> None:
        """Take over the values of a checkpoint's group. Collective."""
        ...


class Engine(Protocol):
    """Trained weights, their gradients and their optimizer, over all ranks."""

    parameters: Mapping[str, nn.Parameter]
    """The trained weights by the names they have on one process; possibly shards of them."""
    shapes: Mapping[str, torch.Size]
    """Their whole shapes."""
    sharded: bool
    """Whether a forward communicates weights, so that all ranks must run equally many of them."""
    gathering_group: dist.ProcessGroup | None
    """The ranks that communicate weights in every forward of a rollout, and must run the same blocks in each. None
    where weights stay gathered once they were."""
    lockstep: bool
    """Whether all ranks must make equally many VJPs between two steps, and at least one: the case where `sharded`."""

    def vjp(self, output: Tensor, cotangents: Sequence[Tensor]) -> None:
        """Add the product of the one cotangent with `output`'s Jacobian to this rank's gradient."""
        ...

    def last_vjp(self, last: bool) -> None:
        """Say before a `vjp` whether it is the last one before `clip_gradients`."""
        ...

    def clip_gradients(self) -> float:
        """Sum the gradient over all ranks and clip it to the configured norm; returns the norm before. Collective.

        Every rank contributes its part of the gradient of the run's whole loss: ranks with different videos contribute
        different terms of the sum, ranks that share a video the parts that pass through their tokens.
        """
        ...

    def step(self) -> None:
        """Apply the gradient, advance the learning rate, forget the gradient. Collective."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradient."""
        ...

    def weights_finite(self) -> bool:
        """Whether this rank's weights, or its shards of them, have a finite norm. Waits for the GPU."""
        ...

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        ...

    def snapshot(self) -> Snapshot:
        """The present weights. Collective."""
        ...

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """The context is one phase of an iteration; the engine may keep weights gathered through it."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Within the context adapters are whole and float32 on every rank, ready to be saved; the model need not be
        able to compute. Collective.
        """
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds of this engine, by group and by the names of one process: `weights`, and `optimizer`
        with names such as `NAME.exp_avg`.

        Tensors are whole (the same on every rank), DTensors, or on this rank alone. They may be live: copy them to
        write them later.
        """
        ...

    def load_tensors(self, source: TensorSource) -> None:
        """Take over weights and optimizer state, saved by any engine on any number of ranks. Collective."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, fit for JSON: the position in the learning-rate schedule."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        ...
