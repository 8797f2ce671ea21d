"""A second set of values for the trained weights: the KL anchor, the initial policy, the moving average.

Only what is trained is copied, so with LoRA none of these duplicates the frozen transformer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sage_fast.distributed.engine import TensorSource


class WeightSnapshot:
    """Values of a model's trained weights at some moment.

    The tensors live on the parameters' device, in their dtype and sharded like them, and are in every checkpoint.

    Args:
        parameters: qualified name -> trained weight.
        changed: called when the weights have taken other values.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], changed: Callable[[], None] = lambda: None) -> None:
        self._parameters = parameters
        self._changed = changed
        self.values: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights as they are now."""
        for name, parameter in self._parameters.items():
            self.values[name].copy_(parameter)

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Move towards the present weights: value <- decay * value + (1 - decay) * weight."""
        for name, parameter in self._parameters.items():
            self.values[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the model computes with these values; the storage of whole weights is exchanged, not
        copied.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                # FSDP2 gathers from the storage that it made itself.
                here, there = parameter.detach().to_local(), self.values[name].to_local()  # type: ignore[attr-defined]
                old = here.clone()
                here.copy_(there)
                there.copy_(old)
            else:
                parameter.data, self.values[name] = self.values[name], parameter.data
        self._changed()

    def tensors(self) -> dict[str, Tensor]:
        """The values by name; live, not copies."""
        return dict(self.values)

    def load_tensors(self, source: TensorSource, group: str) -> None:
        """Take the values of a checkpoint's group."""
        source.load_into({group: self.values})


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of tensors by name."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_same_shapes(here: Mapping[str, Sequence[int]], there: Mapping[str, Sequence[int]], what: str) -> None:
    """ValueError unless both mappings hold the same names with the same shapes."""
    if missing := sorted(set(here) - set(there)):
        raise ValueError(f"The checkpoint's {what} lacks {len(missing)} of this run's tensors, such as {missing[0]!r}.")
    if extra := sorted(set(there) - set(here)):
        raise ValueError(f"The checkpoint's {what} has {len(extra)} tensors this run lacks, such as {extra[0]!r}.")
    for name, shape in here.items():
        if tuple(shape) != tuple(there[name]):
            raise ValueError(
                f"The checkpoint's {what} has {name!r} of shape {tuple(there[name])}, this run's is {tuple(shape)}."
            )
