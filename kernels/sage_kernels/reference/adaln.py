"""Adaptive layer norm in plain PyTorch; see sage_kernels.adaln. Shapes: B batch, N
tokens, D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sage_kernels.reference.precision import compute_dtype


def adaln(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, tail: int = 0
) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift. x (B, N, D); scale, shift (B, D); result as
    x, in rows of `row_length`.
    """
    dtype = compute_dtype(x.dtype)
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps)
    out = (normed * (1 + scale.to(dtype)[:, None]) + shift.to(dtype)[:, None]).to(
        x.dtype
    )
    return F.pad(out, (0, row_length(x.shape[2], tail) - x.shape[2])) if tail else out


def row_length(width: int, tail: int) -> int:
    """Columns of a row with `tail` more behind it: a multiple of 16, of which compilers
    know that it is aligned.
    """
    return -(-(width + tail) // 16) * 16 if tail else width


def adaln_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift_dtype: torch.dtype,
    eps: float = 1e-6,
    modulation: bool = True,
    grad_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (B, N, D), scale and shift (B, D), each in its input's dtype.

    Without `modulation` the last two are not wanted and empty. `grad_residual` (B, N,
    D), the gradient that reaches x past the norm, is added to x's.
    """
    dtype = compute_dtype(x.dtype)
    grad = grad.to(dtype)
    wide = x.to(dtype)
    normed, mean, rstd = normalize(wide, eps)
    dx = layer_norm_backward(grad * (1 + scale.to(dtype)[:, None]), wide, mean, rstd)
    if grad_residual is not None:
        dx = dx + grad_residual.to(dtype)
    if not modulation:
        return dx.to(x.dtype), scale.new_empty(0), scale.new_empty(0, dtype=shift_dtype)
    return (
        dx.to(x.dtype),
        (grad * normed).sum(1).to(scale.dtype),
        grad.sum(1).to(shift_dtype),
    )


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / std over the last dimension, mean, and 1 / std."""
    return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)


def layer_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of x from the gradient g of n = (x - mean) rstd:  rstd (g - mean(g) - n
    mean(g n)).
    """
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(
        grad.contiguous(),
        x.contiguous(),
        x.shape[-1:],
        mean,
        rstd,
        None,
        None,
        [True, False, False],
    )[0]


def adaln_eager(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, tail: int = 0
) -> Tensor:
    """As diffusers writes it (`AdaLayerNormZero.forward`): every step rounded to x's
    dtype, and no room behind rows.
    """
    return (
        F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]
    )
