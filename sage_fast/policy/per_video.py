"""Gradients of LoRA weights by video, from one backward pass of a batch.

Autograd sums a weight's gradient over the batch. A copy of the weight for each video (a
view, without memory) has each video's own: the product of the video's rows alone, as
many FLOPs as the product over all rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PerVideo:
    """The trained LoRA weights of a transformer, of which every video of a batch may
    have a copy.

    Args:
        transformer: with an adapter; nothing else is trained, and the weights are whole
            on this device.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self.layers: list[Any] = [
            module
            for module in transformer.modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        ]
        self.weights: list[Tensor] = [layer.weight for layer in self.layers]

    @contextmanager
    def copies(self, videos: int) -> Iterator[Sequence[Tensor]]:
        """Within the context the model computes a batch of so many videos with a copy
        for each, and only such a batch.

        Backward passes belong into the context too, because checkpointing runs the
        forward again.

        Yields:
            The copies, (B, *shape) each, in the order of `Module.parameters`; for one
            video the weights themselves.
        """
        if videos == 1:
            yield self.weights
            return
        leaves = [
            weight.detach().expand(videos, *weight.shape).requires_grad_()
            for weight in self.weights
        ]
        for layer, leaf in zip(self.layers, leaves, strict=True):
            # The fused forward reads the weight, a stock one calls the layer.
            # Into the dictionary: the attribute takes a Parameter alone.
            layer._parameters["weight"] = leaf
            layer.forward = partial(_Linear.apply, leaf)
        try:
            yield leaves
        finally:
            for layer, weight in zip(self.layers, self.weights, strict=True):
                layer._parameters["weight"] = weight
                del layer.forward


class _Linear(torch.autograd.Function):
    """x W^T of rows x (B ..., K), which lie video after video, with B copies of W (B,
    M, K).
    """

    @staticmethod
    def forward(ctx: Any, copies: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(copies, x)
        return F.linear(x, copies[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        copies, x = ctx.saved_tensors
        rows, columns = (
            tensor.reshape(len(copies), -1, tensor.shape[-1]) for tensor in (x, grad)
        )
        of_x = grad @ copies[0] if ctx.needs_input_grad[1] else None
        return torch.bmm(columns.mT, rows), of_x
