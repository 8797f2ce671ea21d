"""Adaptive layer norm in plain PyTorch; see sage_kernels.adaln. Shapes: B batch, N tokens, D width."""

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float64 for float64, else float32. Results are rounded once, when they are stored."""
    return torch.promote_types(dtype, torch.float32)


def adaln(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift. x (B, N, D); scale, shift (B, D); result as x."""
    dtype = compute_dtype(x.dtype)
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.to(dtype)[:, None]) + shift.to(dtype)[:, None]).to(x.dtype)


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

    Without `modulation` the last two are not wanted and empty. `grad_residual` (B, N, D), the gradient that reaches x
    past the norm, is added to x's.
    """
    dtype = compute_dtype(x.dtype)
    grad = grad.to(dtype)
    normed, rstd = normalize(x.to(dtype), eps)
    dx = layer_norm_backward(grad * (1 + scale.to(dtype)[:, None]), normed, rstd)
    if grad_residual is not None:
        dx = dx + grad_residual.to(dtype)
    if not modulation:
        return dx.to(x.dtype), scale.new_empty(0), scale.new_empty(0, dtype=shift_dtype)
    return dx.to(x.dtype), (grad * normed).sum(1).to(scale.dtype), grad.sum(1).to(shift_dtype)


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x - mean) / std over the last dimension, and 1 / std."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    return (x - mean) * rstd, rstd


def layer_norm_backward(grad: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of x from the gradient of its normalised value."""
    along = (grad * normed).mean(-1, keepdim=True)
    return rstd * (grad - grad.mean(-1, keepdim=True) - normed * along)


def adaln_eager(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """As diffusers writes it (`AdaLayerNormZero.forward`): every step rounded to x's dtype."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]
