"""What a block's forward keeps for its backward: on the device, or in CPU memory until it is needed.

Offloading copies on a stream of its own into pinned memory while the next block computes. The backward of a block
copies its tensors back when it starts; nothing is fetched ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Kept:
    """How the tensors of one block were kept: `count` of them came first in `save_for_backward`.

    `device` is where they belong if they were moved to CPU memory, which `done` tells to be complete.
    """

    count: int
    device: torch.device | None = None
    done: torch.cuda.Event | None = None

    def take(self, ctx: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(kept tensors on their device, the others)."""
        saved = list(ctx.saved_tensors)
        kept, others = saved[: self.count], saved[self.count :]
        if self.done is not None:
            self.done.synchronize()
        if self.device is not None:
            kept = [tensor.to(self.device, non_blocking=True) for tensor in kept]
        return kept, others


_streams: dict[torch.device, torch.cuda.Stream] = {}


def keep(ctx: Any, tensors: Sequence[Tensor], others: Sequence[Tensor], offload: bool) -> Kept:
    """Keep `tensors` (activations) and `others` (weights, never offloaded) for the backward of an autograd function."""
    if not offload:
        ctx.save_for_backward(*tensors, *others)
        return Kept(len(tensors))
    device = tensors[0].device
    if device.type != "cuda":
        ctx.save_for_backward(*(tensor.to("cpu", copy=True) for tensor in tensors), *others)
        return Kept(len(tensors), device)
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            tensor.record_stream(stream)
    # Through autograd, which lets go of them as soon as the backward pass has.
    ctx.save_for_backward(*copies, *others)
    return Kept(len(tensors), device, stream.record_event())
