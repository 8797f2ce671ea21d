"""The timestep modulation of frozen AdaLN weights, computed once per noise level.

A block's modulation depends on the timestep alone. Where its weights are frozen and a run visits a fixed set of noise
levels, it is a table (53 MB in bfloat16 for 20 levels of the 8.3 B model), and 5.4 GB of weights need not be on the
GPU.

Shapes: B batch, D width, K blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_LEVELS = 512
"""Noise levels that are kept; the table starts anew beyond them."""


class ModulationTable:
    """Modulation of all blocks by timestep.

    Args:
        blocks: the transformer's blocks, K of them.
        offload: keep the AdaLN weights in CPU memory and bring them to the device for new timesteps only.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, offload: bool) -> None:
        self.layers: list[Any] = [layer for block in blocks for layer in adaln_layers(block)]
        self.offload = offload
        self._rows: dict[float, Tensor] = {}
        self._version: tuple[Any, ...] | None = None
        if offload:
            for layer in self.layers:
                _move(layer, torch.device("cpu"))

    @torch.no_grad()
    def lookup(self, timesteps: Sequence[float], embedded: Tensor) -> Tensor:
        """Modulation of B samples, (2 K, B, 6 D): video and text of block 0, then of block 1, and so on.

        Args:
            timesteps: B numbers.
            embedded: (B, D), silu of their time embedding.
        """
        version = (embedded.dtype, embedded.device, sum(layer.weight._version for layer in self.layers))
        if version != self._version or len(self._rows) > MAX_LEVELS:
            self._rows, self._version = {}, version
        for timestep, row in zip(timesteps, embedded, strict=True):
            if timestep not in self._rows:
                self._rows[timestep] = torch.stack([_apply(layer, row[None])[0] for layer in self.layers])
        return torch.stack([self._rows[timestep] for timestep in timesteps], dim=1)

    def restore(self, device: torch.device) -> None:
        """Bring offloaded weights back to the device."""
        if self.offload:
            for layer in self.layers:
                _move(layer, device)


def adaln_layers(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The AdaLN projections of a block: video, text."""
    modules: Any = block
    return modules.norm1.linear, modules.norm1_context.linear


def can_tabulate(blocks: Sequence[nn.Module]) -> bool:
    """Whether the AdaLN layers of all blocks are plain and frozen, so that their outputs are a function of the
    timestep that does not change during a run.
    """
    return all(
        isinstance(layer, nn.Linear) and not any(p.requires_grad for p in layer.parameters())
        for block in blocks
        for layer in adaln_layers(block)
    )


def _apply(layer: nn.Linear, row: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(row.device, non_blocking=True)
    return F.linear(row, layer.weight.to(row.device, non_blocking=True), bias)


def _move(layer: nn.Module, device: torch.device) -> None:
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(device)
