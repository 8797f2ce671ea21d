"""One step of a sampler in plain PyTorch; see sage_kernels.sde_step.

    x' = a x + b v + std eps              eps from `reference.philox`

The state is float32, float64 if x is; it never passes through a 16-bit type. Shapes: B
batch, N elements of a sample.
"""

import math

import torch
from torch import Tensor

from sage_kernels.reference.philox import philox_normal
from sage_kernels.reference.precision import compute_dtype


def draw_noise(noise_ids: Tensor, like: Tensor) -> Tensor:
    """The noise of every row of `like` (B, ...), float32 whatever the type of `like`."""
    return philox_normal(noise_ids, like.shape[1:].numel()).view(like.shape)


def sde_step(
    x: Tensor, v: Tensor, noise_ids: Tensor | None, a: float, b: float, std: float
) -> Tensor:
    """Next state (B, ...). x, v (B, ...); noise_ids (B, 3) int64, None where std is 0."""
    noise = None if noise_ids is None else draw_noise(noise_ids, x)
    return transition(x, v, noise, a=a, b=b, std=std)


def sde_step_log_prob(
    x: Tensor, v: Tensor, noise_ids: Tensor, a: float, b: float, std: float
) -> tuple[Tensor, Tensor]:
    """Next state (B, ...) and the mean log-density per element (B,) of the noise that
    led there.
    """
    noise = draw_noise(noise_ids, x).to(compute_dtype(x.dtype))
    x_next = transition(x, v, noise, a=a, b=b, std=std)
    return x_next, -noise.square().flatten(1).mean(1) / 2 - math.log(std) - math.log(
        2 * math.pi
    ) / 2


def gaussian_log_prob(
    x_next: Tensor,
    x: Tensor,
    v: Tensor,
    *,
    a: float | Tensor,
    b: float | Tensor,
    std: float | Tensor,
) -> Tensor:
    """Log-density of x' under N(a x + b v, std^2 I), the mean over the elements of a
    sample; differentiable.

    Args:
        x_next: (B, ...) state that was drawn.
        x: (B, ...) state before it.
        v: (B, ...) velocity at x.
        a, b, std: coefficients of the step, numbers or (B,); std is positive.

    Returns:
        (B,) float32 (float64 if x is float64).
    """
    mean = transition(x, v, None, a=a, b=b, std=0.0)
    std = torch.as_tensor(std, dtype=mean.dtype, device=mean.device).expand(len(mean))
    residual = (x_next.to(mean.dtype) - mean).flatten(1) / std.unsqueeze(1)
    return -residual.square().mean(1) / 2 - std.log() - math.log(2 * math.pi) / 2


def transition(
    x: Tensor,
    v: Tensor,
    noise: Tensor | None,
    *,
    a: float | Tensor,
    b: float | Tensor,
    std: float | Tensor,
) -> Tensor:
    """One step  x' = a x + b v + std noise  with explicit noise.

    Args:
        x: (B, ...) state.
        v: (B, ...) guided velocity at x, any floating-point type.
        noise: (B, ...) standard normal numbers; may be None where std is 0.
        a, b, std: coefficients of the step: numbers, or tensors (B,), one per row.

    Returns:
        (B, ...) next state, float32 (float64 if x is float64).

    Raises:
        ValueError: for shapes that do not match, or if noise is missing where std is
            not 0.
    """
    if v.shape != x.shape or (noise is not None and noise.shape != x.shape):
        raise ValueError(
            f"x, v and noise must have one shape; given {tuple(x.shape)}, "
            f"{tuple(v.shape)}, "
            f"{None if noise is None else tuple(noise.shape)}"
        )
    x = x.to(compute_dtype(x.dtype))
    mean = _per_row(a, x) * x + _per_row(b, x) * v.to(x.dtype)
    if noise is None:
        if not bool((torch.as_tensor(std) == 0).all()):
            raise ValueError(
                "noise is None but std is not 0; pass the noise of the step"
            )
        return mean
    if not isinstance(std, Tensor) and std == 0:
        return mean
    return mean + _per_row(std, x) * noise.to(x.dtype)


def _per_row(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A coefficient that broadcasts against `like` (B, ...): a float, or a tensor (B,)
    as (B, 1, ..., 1).
    """
    if not isinstance(value, Tensor):
        return float(value)
    value = value.to(device=like.device, dtype=like.dtype)
    if value.ndim == 0:
        return value
    if value.shape != like.shape[:1]:
        raise ValueError(
            f"a coefficient has shape {tuple(value.shape)} for a batch of "
            f"{like.shape[0]}; give a number or one per row"
        )
    return value.view(-1, *[1] * (like.ndim - 1))
