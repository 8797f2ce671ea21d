"""Reference of `sage_kernels.sde_step`: one step of a sampler with classifier-free guidance, in plain PyTorch.

    v  = v_uncond + g (v_cond - v_uncond)
    x' = a x + b v + std eps              eps from `reference.philox`
    x0 = x - sigma v

Computes in float32, in float64 if an input is float64; the state never passes through a 16-bit type.
Shapes: B batch, N elements of a sample.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels.reference.philox import philox_normal


class SDEStep(NamedTuple):
    """Result of a step; every tensor has the shape of x and is float32 (float64 for float64 inputs).

    Example:
        >>> import torch
        >>> one = torch.ones(1, 4)
        >>> sde_step(one, None, one, a=1.0, b=-0.25, std=0.0, sigma=0.5, return_x0=True).x0
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    x: Tensor
    """(B, ...) next state."""
    x0: Tensor | None
    """(B, ...) data prediction; None unless asked for."""
    velocity: Tensor | None
    """(B, ...) guided velocity, what a rollout stores as v_old; None unless asked for."""


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, float32 otherwise."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def combine_guidance(v_cond: Tensor, v_uncond: Tensor | None, guidance_scale: float, dtype: torch.dtype) -> Tensor:
    """v_uncond + g (v_cond - v_uncond) in `dtype`; v_cond where there is no unconditional branch."""
    v_cond = v_cond.to(dtype)
    if v_uncond is None:
        return v_cond
    v_uncond = v_uncond.to(dtype)
    return v_uncond + guidance_scale * (v_cond - v_uncond)


def _column(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A coefficient that broadcasts against (B, ...): the number itself, or (B,) as (B, 1, ..., 1)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=like.device, dtype=like.dtype).view(-1, *[1] * (like.ndim - 1))


def sde_step(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    x: Tensor,
    *,
    guidance_scale: float = 1.0,
    a: float | Tensor,
    b: float | Tensor,
    std: float | Tensor,
    keys: Tensor | None = None,
    step: int | Tensor = 0,
    sigma: float | Tensor | None = None,
    return_x0: bool = False,
    return_velocity: bool = False,
    element_offset: int = 0,
) -> SDEStep:
    """Arguments and result of `sage_kernels.sde_step`, for any floating-point dtype."""
    dtype = compute_dtype(v_cond, v_uncond, x)
    x = x.to(dtype)
    velocity = combine_guidance(v_cond, v_uncond, guidance_scale, dtype)
    x_next = _column(a, x) * x + _column(b, x) * velocity
    if keys is not None:
        steps = step if isinstance(step, Tensor) else torch.full_like(keys[:, 0], step)
        noise = philox_normal(
            keys, steps.to(keys), x[0].numel() if len(x) else 0, element_offset=element_offset, dtype=dtype
        )
        x_next = x_next + _column(std, x) * noise.view(x.shape)
    x0 = x - _column(sigma, x) * velocity if return_x0 and sigma is not None else None
    return SDEStep(x_next, x0, velocity if return_velocity else None)


def sde_step_backward(
    grad_x_next: Tensor,
    grad_x0: Tensor | None,
    grad_velocity: Tensor | None,
    *,
    guidance_scale: float,
    a: Tensor,
    b: Tensor,
    sigma: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dv_cond, dv_uncond, dx) from those of the three results; a, b, sigma are (B,)."""
    dtype = compute_dtype(grad_x_next)
    grad_x_next = grad_x_next.to(dtype)
    grad_v, grad_x = _column(b, grad_x_next) * grad_x_next, _column(a, grad_x_next) * grad_x_next
    if grad_x0 is not None and sigma is not None:
        grad_v = grad_v - _column(sigma, grad_x_next) * grad_x0.to(dtype)
        grad_x = grad_x + grad_x0.to(dtype)
    if grad_velocity is not None:
        grad_v = grad_v + grad_velocity.to(dtype)
    return guidance_scale * grad_v, (1 - guidance_scale) * grad_v, grad_x
