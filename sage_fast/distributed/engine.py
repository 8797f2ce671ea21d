"""The trainer's view of how gradients are summed, weights sharded and the optimizer
stepped.

`TorchEngine` (`parallelize.py`) is torch's own, on one process or over FSDP2;
`DeepSpeedEngine` (`zero.py`) is ZeRO-2. All ranks call the collective methods in the
same order; on one process these communicate with nobody.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from sage_fast.config.sections import OptimizerConfig
from sage_fast.distributed.world import World

Phase = Literal["rollout", "anchor", "update", "evaluation"]


class TensorSource(Protocol):
    """A checkpoint's tensors by group and name, saved by any engine on any number of
    ranks.
    """

    def load_into(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill tensors, which may be shards, in place; only these groups and names are
        read. Collective.
        """
        ...

    def read(self, group: str, name: str) -> Tensor:
        """One whole tensor, in CPU memory."""
        ...


class WeightSnapshot:
    """A second set of values of the trained weights: the KL anchor, the old policy,
    their moving average.

    Only trained weights are copied, so with LoRA none of these duplicates the frozen
    transformer. The tensors live on the parameters' device, in their dtype and sharded
    like them, and are in every checkpoint.

    Args:
        parameters: qualified name -> trained weight.
        changed: called when the weights have taken other values.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = parameters
        self._changed = changed
        self.values: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in parameters.items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights as they are now."""
        for name, parameter in self._parameters.items():
            self.values[name].copy_(parameter)

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """value <- decay * value + (1 - decay) * weight"""
        for name, parameter in self._parameters.items():
            self.values[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the model computes with these values. Collective.

        The storage of whole weights is exchanged, not copied.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # a second, which reading a configuration need not pay
        from torch.distributed.tensor import DTensor

        on_cpu = any(p.device.type == "cpu" for p in self._parameters.values())
        if on_cpu and torch.cuda.is_available():
            # With `cpu_offload` copies to the GPU that are queued still read the pinned
            # shards that change here.
            torch.cuda.synchronize()
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                # FSDP2 gathers from the storage that it made itself.
                here = parameter.detach().to_local()  # type: ignore[attr-defined]
                there = self.values[name].to_local()  # type: ignore[attr-defined]
                old = here.clone()
                here.copy_(there)
                there.copy_(old)
            else:
                # Swapped, so that the same call undoes it.
                old = parameter.data
                parameter.data = self.values[name]
                self.values[name] = old
        self._changed()

    def tensors(self) -> dict[str, Tensor]:
        """The values by the names of the weights, for a checkpoint; live or partial as
        in `Engine.tensors`.
        """
        return dict(self.values)

    def load_tensors(self, source: TensorSource, group: str) -> None:
        """Take over the values of a checkpoint's group. Collective."""
        source.load_into({group: self.values})


class Engine(ABC):
    """Trained weights, their gradients and their optimizer, over all ranks.

    Attributes:
        parameters: the trained weights by the names they have on one process; possibly
            shards of them.
        masters: what the optimizer steps on this rank.
        shapes: whole shapes of the weights.
        updates: steps that were taken.
        signal: cosine between the gradients of the halves of the last update, see
            `halve`; None where it is not known.
        eps_share: of AdamW's denominator in the last step, see
            `OptimizerSet.eps_share`; None where it is not known.
    """

    masters: Sequence[Tensor]

    sharded: bool
    """True where a forward communicates weights, so that all ranks must run equally
    many of them.
    """
    lockstep: bool
    """True where all ranks must make equally many VJPs between two steps, and at least
    one; always where `sharded`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        world: World,
    ) -> None:
        self.parameters = parameters
        self.optimizer_config = config
        self.world = world
        self.masters = list(parameters.values())
        self.shapes: Mapping[str, torch.Size] = shapes_of(parameters)
        self.updates = 0
        self.signal: float | None = None
        self.eps_share: float | None = None

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        warmup = self.optimizer_config.warmup_updates
        # Not from 0 on: the first step would move nothing.
        rise = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0
        return self.optimizer_config.learning_rate * rise

    @abstractmethod
    def vjp(self, output: Tensor, cotangents: Sequence[Tensor]) -> None:
        """Add the product of the one cotangent with `output`'s Jacobian to this rank's
        gradient.
        """

    def last_vjp(self, last: bool) -> None:  # noqa: B027  an engine that sums in every VJP need not know
        """Say before a `vjp` whether it is the last one before `clip_gradients`."""

    def halve(self) -> None:  # noqa: B027  it is asked for where adapters are whole
        """Say that the gradient so far is that of the first half of an update; all
        ranks do so once, or none does.
        """

    @abstractmethod
    def clip_gradients(self) -> float:
        """Sum the gradient over all ranks and clip it to the configured norm; returns
        the norm before. Collective.

        Every rank contributes its part of the gradient of the run's whole loss: ranks
        with different videos contribute different terms of the sum, ranks that share a
        video the parts that pass through their tokens.
        """

    @abstractmethod
    def step(self) -> None:
        """Apply the gradient, advance the learning rate, forget the gradient.
        Collective.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradient."""

    @abstractmethod
    def snapshot(self) -> WeightSnapshot:
        """A copy of the present weights. Collective."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """The context is one phase of an iteration; the engine may keep weights
        gathered through it.
        """
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Within the context adapters are whole and float32 on every rank, ready to be
        saved; the model need not be able to compute. Collective.
        """
        return nullcontext()

    @abstractmethod
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for a checkpoint, by group and by the names of one process:
        `weights`, and `optimizer` with names such as `NAME.exp_avg`.

        Tensors are whole (the same on every rank), DTensors, or on this rank alone.
        They may be live: copy them to write them later.
        """

    @abstractmethod
    def load_tensors(self, source: TensorSource) -> None:
        """Take over weights and optimizer state, saved by any engine on any number of
        ranks. Collective.
        """


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of tensors by name."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_same_shapes(
    here: Mapping[str, Sequence[int]], there: Mapping[str, Sequence[int]], what: str
) -> None:
    """ValueError unless both mappings hold the same names with the same shapes."""
    if missing := sorted(set(here) - set(there)):
        raise ValueError(
            f"The checkpoint's {what} lacks {len(missing)} of this run's tensors, "
            f"such as {missing[0]!r}."
        )
    if extra := sorted(set(there) - set(here)):
        raise ValueError(
            f"The checkpoint's {what} has {len(extra)} tensors this run lacks, such "
            f"as {extra[0]!r}."
        )
    for name, shape in here.items():
        if tuple(shape) != tuple(there[name]):
            raise ValueError(
                f"The checkpoint's {what} has {name!r} of shape {tuple(there[name])}, "
                f"this run's is {tuple(shape)}."
            )
