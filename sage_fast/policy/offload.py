"""What a block's forward keeps for its backward: on the device, or in CPU memory until it is needed.

Offloading copies on a stream of its own into pinned memory while the next block computes; the backward waits for its
own tensors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Kept:
    """Where the tensors of one block are; `count` of them came first in `save_for_backward`."""

    count: int
    offloaded: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None
    done: torch.cuda.Event | None = None

    def take(self, ctx: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(kept tensors on their device, the others)."""
        saved = list(ctx.saved_tensors)
        if self.device is None:
            return saved[: self.count], saved[self.count :]
        if self.done is not None:
            self.done.synchronize()
        return [tensor.to(self.device, non_blocking=True) for tensor in self.offloaded], saved


_streams: dict[torch.device, torch.cuda.Stream] = {}


def keep(ctx: Any, tensors: Sequence[Tensor], others: Sequence[Tensor], offload: bool) -> Kept:
    """Keep `tensors` (activations) and `others` (weights, never offloaded) for the backward of an autograd function."""
    if not offload:
        ctx.save_for_backward(*tensors, *others)
        return Kept(len(tensors))
    ctx.save_for_backward(*others)
    device = tensors[0].device
    if device.type != "cuda":
        return Kept(0, [tensor.to("cpu", copy=True) for tensor in tensors], device)
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            tensor.record_stream(stream)
    return Kept(0, copies, device, stream.record_event())
