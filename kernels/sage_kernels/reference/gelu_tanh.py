"""Tanh GELU in plain PyTorch; see sage_kernels.gelu_tanh."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sage_kernels.reference.precision import compute_dtype


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), any shape; result as x."""
    dtype = compute_dtype(x.dtype)
    return F.gelu(x.to(dtype), approximate="tanh").to(x.dtype)


def gelu_tanh_backward(
    grad: Tensor, x: Tensor, output: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradient of x, in x's dtype, and gelu_tanh(x) where `output` asks for it (else
    empty).
    """
    dtype = compute_dtype(x.dtype)
    dx = torch.ops.aten.gelu_backward(grad.to(dtype), x.to(dtype), approximate="tanh")
    return dx.to(x.dtype), gelu_tanh(x) if output else x.new_empty(0)


def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x @ weight.T + bias); x (..., K), weight (M, K), bias (M,) of one
    dtype.
    """
    return gelu_tanh(F.linear(x, weight, bias))


def gelu_tanh_eager(x: Tensor) -> Tensor:
    """As diffusers writes it (`GELU(approximate="tanh")`)."""
    return F.gelu(x, approximate="tanh")
