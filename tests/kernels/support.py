"""Shared by the tests of single ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def assert_backward_is_autograd(
    forward: Callable[..., Any],
    inputs: Sequence[Tensor],
    backward: Callable[[list[Tensor]], Any],
    constants: Sequence[Any] = (),
) -> None:
    """Hold a hand-written backward against autograd through the forward, in float64.

    Args:
        forward: called as forward(*inputs, *constants).
        inputs: float64 tensors, all differentiable.
        backward: from the cotangents of the outputs to the gradients of some leading or all inputs, in order; a
            Tensor or a tuple.
        constants: further arguments without gradient.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = tree_leaves(forward(*leaves, *constants))
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(output.shape, dtype=torch.float64, generator=generator) for output in outputs]
    expected = torch.autograd.grad(outputs, leaves, cotangents)
    given = tree_leaves(backward(cotangents))
    assert len(given) == len(expected)
    for a, b in zip(given, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
