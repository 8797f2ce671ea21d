"""Reference of `sage_kernels.policy_terms`: what a policy-gradient loss needs of one step, in plain PyTorch.

With v = v_uncond + g (v_cond - v_uncond), the gain r = b / std, the noise eps that the rollout drew, and means over the
elements of a sample:

    log_ratio  = mean(s (eps - s / 2))       s = r (v - v_old)           exactly 0 when v = v_old
    ratio_norm = mean(s eps)                                             GRPO-Guard's log-ratio
    kl_anchor  = mean(t^2) / 2               t = r (v - v_anchor)        KL to the anchor policy
    kl_step    = mean(s^2) / 2                                           KL to the rollout policy

Source: the transition densities N(a x + b v, std^2 I) of both policies; see the derivation in the package's README.
Computes in float32, in float64 if an input is float64. Shapes: B batch, N elements of a sample.
"""

import torch
from torch import Tensor

from sage_kernels.reference.philox import philox_normal
from sage_kernels.reference.sde_step import combine_guidance, compute_dtype

TERMS = ("log_ratio", "ratio_norm", "kl_anchor", "kl_step")
"""Columns of the result."""


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.to(device=like.device, dtype=like.dtype).view(-1, *[1] * (like.ndim - 1))


def draw_noise(
    like: Tensor, noise: Tensor | None, keys: Tensor | None, step: int | Tensor, element_offset: int, dtype: torch.dtype
) -> Tensor:
    """The explicit noise, or the numbers of (keys, step), in `dtype` and the shape of `like`."""
    if noise is not None:
        return noise.to(dtype)
    if keys is None:
        raise ValueError("policy_terms: neither noise nor keys are given; pass one of them")
    steps = step if isinstance(step, Tensor) else torch.full_like(keys[:, 0], step)
    return philox_normal(keys, steps.to(keys), like[0].numel(), element_offset=element_offset, dtype=dtype).view(
        like.shape
    )


def policy_terms(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None = None,
    *,
    guidance_scale: float = 1.0,
    gain: Tensor,
    noise: Tensor | None = None,
    keys: Tensor | None = None,
    step: int | Tensor = 0,
    element_offset: int = 0,
) -> Tensor:
    """Arguments and result of `sage_kernels.policy_terms`, for any floating-point dtype."""
    dtype = compute_dtype(v_cond, v_uncond, v_old, v_anchor, noise)
    velocity = combine_guidance(v_cond, v_uncond, guidance_scale, dtype)
    noise = draw_noise(v_cond, noise, keys, step, element_offset, dtype).detach()
    rows = _rows(gain, velocity).detach()
    shift = (rows * (velocity - v_old.detach().to(dtype))).flatten(1)
    noise = noise.flatten(1)
    kl_anchor = torch.zeros(len(shift), dtype=dtype, device=shift.device)
    if v_anchor is not None:
        kl_anchor = (rows * (velocity - v_anchor.detach().to(dtype))).flatten(1).square().mean(1) / 2
    return torch.stack(
        [
            (shift * (noise - shift / 2)).mean(1),
            (shift * noise).mean(1),
            kl_anchor,
            shift.square().mean(1) / 2,
        ],
        dim=1,
    )


def policy_terms_backward(
    grad_terms: Tensor,
    v_cond: Tensor,
    v_uncond: Tensor | None,
    v_old: Tensor,
    v_anchor: Tensor | None,
    *,
    guidance_scale: float,
    gain: Tensor,
    noise: Tensor | None,
    keys: Tensor | None,
    step: int | Tensor,
    element_offset: int,
) -> tuple[Tensor, Tensor]:
    """(dv_cond, dv_uncond) from the cotangents (B, 4) of the terms, in the computing dtype."""
    dtype = compute_dtype(v_cond, v_uncond, v_old, v_anchor, noise)
    velocity = combine_guidance(v_cond, v_uncond, guidance_scale, dtype)
    noise = draw_noise(v_cond, noise, keys, step, element_offset, dtype)
    rows = _rows(gain, velocity)
    c_log_ratio, c_ratio_norm, c_anchor, c_step = (_rows(column, velocity) for column in grad_terms.unbind(1))
    shift = rows * (velocity - v_old.to(dtype))
    grad = c_log_ratio * (noise - shift) + c_ratio_norm * noise + c_step * shift
    if v_anchor is not None:
        grad = grad + c_anchor * (rows * (velocity - v_anchor.to(dtype)))
    grad = grad * (rows / velocity[0].numel())
    return guidance_scale * grad, (1 - guidance_scale) * grad
