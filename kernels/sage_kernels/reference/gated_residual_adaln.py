"""Gated residual and adaptive layer norm in plain PyTorch; see
sage_kernels.gated_residual_adaln.

Shapes: B batch, N tokens, D width.
"""

import torch
from torch import Tensor

from sage_kernels.reference.adaln import (
    adaln,
    adaln_eager,
    layer_norm_backward,
    normalize,
)
from sage_kernels.reference.gated_residual import gated_residual, gated_residual_eager
from sage_kernels.reference.precision import compute_dtype


def gated_residual_adaln(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(r, adaln(r, scale, shift)) with r = x + gate * y as stored in x's dtype."""
    residual = gated_residual(x, y, gate)
    return residual, adaln(residual, scale, shift, eps)


def gated_residual_adaln_backward(
    grad_residual: Tensor,
    grad: Tensor,
    residual: Tensor,
    y: Tensor | None,
    gate: Tensor,
    scale: Tensor,
    y_dtype: torch.dtype,
    shift_dtype: torch.dtype,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y (B, N, D), gate, scale and shift (B, D), each in its input's
    dtype.

    Without y the last three are not wanted and empty.
    """
    dtype = compute_dtype(residual.dtype)
    grad = grad.to(dtype)
    wide = residual.to(dtype)
    normed, mean, rstd = normalize(wide, eps)
    dx = grad_residual.to(dtype) + layer_norm_backward(
        grad * (1 + scale.to(dtype)[:, None]), wide, mean, rstd
    )
    dy = (dx * gate.to(dtype)[:, None]).to(y_dtype)
    if y is None:
        empty = (
            gate.new_empty(0),
            scale.new_empty(0),
            scale.new_empty(0, dtype=shift_dtype),
        )
        return dx.to(residual.dtype), dy, *empty
    return (
        dx.to(residual.dtype),
        dy,
        (dx * y.to(dtype)).sum(1).to(gate.dtype),
        (grad * normed).sum(1).to(scale.dtype),
        grad.sum(1).to(shift_dtype),
    )


def gated_residual_adaln_eager(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """As diffusers writes it (`HunyuanVideo15TransformerBlock.forward`)."""
    residual = gated_residual_eager(x, y, gate)
    return residual, adaln_eager(residual, scale, shift, eps)
