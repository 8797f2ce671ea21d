"""Gated residual in plain PyTorch; see sage_kernels.gated_residual. Shapes: B batch, N
tokens, D width.
"""

import torch
from torch import Tensor

from sage_kernels.reference.precision import compute_dtype


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate * y. x, y (B, N, D); gate (B, D); result as x."""
    dtype = compute_dtype(x.dtype)
    return (x.to(dtype) + gate.to(dtype)[:, None] * y.to(dtype)).to(x.dtype)


def gated_residual_backward(
    grad: Tensor, y: Tensor | None, gate: Tensor, y_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of y (B, N, D) and gate (B, D); that of x is `grad` itself. Without y
    the gate's is empty.
    """
    dtype = compute_dtype(grad.dtype)
    grad = grad.to(dtype)
    dy = (grad * gate.to(dtype)[:, None]).to(y_dtype)
    if y is None:
        return dy, gate.new_empty(0)
    return dy, (grad * y.to(dtype)).sum(1).to(gate.dtype)


def gated_residual_eager(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """As diffusers writes it (`HunyuanVideo15TransformerBlock.forward`): the product
    rounded before the sum.
    """
    return x + y * gate.unsqueeze(1)
