"""What a block's forward saves for its backward: on the device, or in CPU memory until the backward needs it.

Offloading copies to pinned memory on a stream of its own while the next block computes. The backward of a block copies
its tensors back when it starts; nothing is fetched ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class SavedActivations:
    """Where the activations of one block are: the first `count` tensors of its `save_for_backward`.

    device: where they belong, if they were moved to CPU memory. done: tells that the move is complete.
    """

    count: int
    device: torch.device | None = None
    done: torch.cuda.Event | None = None

    def load(self, ctx: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(activations on their device, weights)."""
        saved = list(ctx.saved_tensors)
        activations, weights = saved[: self.count], saved[self.count :]
        if self.done is not None:
            self.done.synchronize()
        if self.device is not None:
            activations = [tensor.to(self.device, non_blocking=True) for tensor in activations]
        return activations, weights


_streams: dict[torch.device, torch.cuda.Stream] = {}


def save_activations(
    ctx: Any, activations: Sequence[Tensor], weights: Sequence[Tensor], offload: bool
) -> SavedActivations:
    """Save tensors for the backward of an autograd function; with `offload` the activations go to CPU memory."""
    if not offload:
        ctx.save_for_backward(*activations, *weights)
        return SavedActivations(len(activations))
    device = activations[0].device
    if device.type != "cuda":
        ctx.save_for_backward(*(tensor.to("cpu", copy=True) for tensor in activations), *weights)
        return SavedActivations(len(activations), device)
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in activations:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            tensor.record_stream(stream)
    # Through autograd, which drops them as soon as the backward pass is done with them.
    ctx.save_for_backward(*copies, *weights)
    return SavedActivations(len(activations), device, stream.record_event())
