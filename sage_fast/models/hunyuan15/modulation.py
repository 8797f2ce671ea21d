"""The timestep modulation of frozen AdaLN weights, computed once per noise level.

A block's modulation depends on the timestep alone. If its weights are frozen and a run visits a fixed set of noise
levels, it is a table (53 MB in bfloat16 for 20 levels of the 8.3 B model), and 5.4 GB of weights need not be on the
GPU.

Shapes: B batch, D width, K blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sage_fast.models.transformer import transformer_blocks

MAX_LEVELS = 512
"""Most noise levels in a table; beyond them it is emptied."""


class ModulationTable:
    """Modulation of all blocks by timestep.

    A row is computed from its timestep alone, whichever batch asks for it first, so it has the same bits in every run.
    Rows are dropped when the weights change in place or are replaced. A change through `.data` goes unnoticed: call
    `forget` after one.

    Args:
        blocks: the transformer's blocks, K of them.
        embed: silu of the time embedding (1, D) of a timestep (1,).
        time_embed: the module whose weights `embed` uses.
        offload: hold the AdaLN weights in CPU memory and copy them to the device for new timesteps only.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        embed: Callable[[Tensor], Tensor],
        time_embed: nn.Module,
        *,
        offload: bool,
    ) -> None:
        self.embed = embed
        self.layers: list[Any] = [layer for block in blocks for layer in adaln_layers(block)]
        self.offload = offload
        self._rows: dict[float, Tensor] = {}
        self._version: tuple[Any, ...] | None = None
        self.watched = [time_embed, *self.layers]
        if offload:
            for layer in self.layers:
                _move(layer, torch.device("cpu"))

    @torch.no_grad()
    def lookup(self, timesteps: Sequence[float], device: torch.device) -> Tensor:
        """Modulation of B samples, (2 K, B, 6 D): video and text of block 0, then of block 1, and so on.

        Args:
            timesteps: B numbers.
            device: where the forward runs.
        """
        watched = (p for module in self.watched for p in module.parameters())
        version = (device, *((id(p), p.data_ptr(), p._version) for p in watched))
        if version != self._version or len(self._rows) > MAX_LEVELS:
            self._rows, self._version = {}, version
        for timestep in timesteps:
            if timestep not in self._rows:
                # Rows computed in inference mode, while generating, must serve training as well.
                with torch.inference_mode(False):
                    embedded = self.embed(torch.tensor([timestep], dtype=torch.float32).to(device, non_blocking=True))
                    self._rows[timestep] = torch.stack([_apply(layer, embedded)[0] for layer in self.layers])
        return torch.stack([self._rows[timestep] for timestep in timesteps], dim=1)

    def forget(self) -> None:
        """Drop all rows."""
        self._rows = {}

    def restore(self, device: torch.device) -> None:
        """Bring offloaded weights back to the device."""
        if self.offload:
            for layer in self.layers:
                _move(layer, device)


def adaln_layers(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The AdaLN projections of a block: video, text."""
    modules: Any = block
    return modules.norm1.linear, modules.norm1_context.linear


def can_tabulate(transformer: nn.Module) -> bool:
    """Tell whether the modulation is a function of the timestep that does not change during a run.

    True if the time embedding and the AdaLN layers of all blocks are plain, whole on this device, and frozen.
    """
    modules: Any = transformer
    layers = [layer for block in transformer_blocks(transformer) for layer in adaln_layers(block)]
    return all(isinstance(layer, nn.Linear) for layer in layers) and all(
        type(p.data) is Tensor and not hasattr(p, "ds_id") and not p.requires_grad
        for module in (modules.time_embed, *layers)
        for p in module.parameters()
    )


def _apply(layer: nn.Linear, row: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(row.device, non_blocking=True)
    return F.linear(row, layer.weight.to(row.device, non_blocking=True), bias)


def _move(layer: nn.Module, device: torch.device) -> None:
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(device)
