"""A second set of values for the trained weights: the KL anchor, the initial policy, the moving average.

Only what is trained is copied, so with LoRA none of these duplicates the frozen transformer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightSnapshot:
    """Values of a model's trained weights at some moment.

    The tensors live on the parameters' device and in their dtype, and are in the state dict of a checkpoint.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
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
        """Within the context the model computes with these values; storage is exchanged, nothing is copied."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self.values[name] = self.values[name], parameter.data

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a checkpoint. ValueError unless names and shapes agree."""
        check_same_tensors(self.values, state, "snapshot")
        for name, value in state.items():
            self.values[name].copy_(value)


def check_same_tensors(here: Mapping[str, Tensor], there: Mapping[str, Tensor], what: str) -> None:
    """ValueError unless both mappings hold the same names with the same shapes."""
    if missing := sorted(set(here) - set(there)):
        raise ValueError(f"The checkpoint's {what} lacks {len(missing)} of this run's tensors, such as {missing[0]!r}.")
    if extra := sorted(set(there) - set(here)):
        raise ValueError(f"The checkpoint's {what} has {len(extra)} tensors this run lacks, such as {extra[0]!r}.")
    for name, value in here.items():
        if value.shape != there[name].shape:
            raise ValueError(
                f"The checkpoint's {what} has {name!r} of shape {tuple(there[name].shape)}, "
                f"this run's is {tuple(value.shape)}."
            )
