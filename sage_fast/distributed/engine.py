"""What the trainer knows of how gradients are summed, weights sharded and the optimizer stepped.

`TorchEngine` is torch's own, on one process or over FSDP2; `DeepSpeedEngine` (`deepspeed.py`) is ZeRO. All ranks call
the methods that are collective in the same order; on one process they communicate with nobody.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Phase = Literal["rollout", "anchor", "update", "evaluation"]


class TensorSource(Protocol):
    """A checkpoint's tensors, by group and name; of any number of ranks and any engine."""

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tensors in place, which may be shards; only these groups and names are read. Collective."""
        ...

    def read(self, group: str, name: str) -> Tensor:
        """One whole tensor, in CPU memory."""
        ...


class Snapshot(Protocol):
    """Values of the trained weights at some moment: the KL anchor, or their moving average."""

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
        """The values by the names of the weights, for a checkpoint; as `Engine.tensors`."""
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
    """Whether a forward communicates weights, so that all ranks must run as many of them."""

    def pull(self, output: Tensor, cotangents: Sequence[Tensor]) -> None:
        """Add the product of `output`'s Jacobian with the one cotangent to this rank's gradient."""
        ...

    def last_pull(self, last: bool) -> None:
        """Say before a `pull` whether it is the last one before `clip_gradients`."""
        ...

    def clip_gradients(self) -> float:
        """Sum the gradient over all ranks and scale it to the configured norm; returns the norm before. Collective.

        What every rank contributes is its part of the gradient of the run's whole loss: ranks with other videos
        contribute other terms of the sum, ranks that share a video the parts that go through their tokens.
        """
        ...

    def step(self) -> None:
        """Apply the gradient, advance the learning rate, forget the gradient. Collective."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradient."""
        ...

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        ...

    def snapshot(self) -> Snapshot:
        """The present weights. Collective."""
        ...

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """What lies within is of one phase; the engine may keep weights gathered through it."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Within the context adapters are whole and float32 on every rank, to be saved; the model may not be able to
        compute. Collective.
        """
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds of this engine, by group and by the names of one process: `weights`, and `optimizer`
        with names such as `NAME.exp_avg`.

        Tensors are whole (the same on every rank), DTensors, or on this rank alone. They are the live ones: who writes
        them later must copy them first.
        """
        ...

    def load_tensors(self, source: TensorSource) -> None:
        """Take over weights and optimizer state that `tensors` of any engine on any number of ranks has given.
        Collective.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, fit for JSON: the schedule of the learning rate."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        ...
