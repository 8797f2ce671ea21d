"""The loss of a trained step in plain PyTorch; see sage_kernels.policy_loss.

Every policy step is  x' ~ N(a x + b v, std^2 I), so with the gain r = b / std, the
noise eps that the rollout drew and dv = v - v_old, everything is a function of (r, eps,
v, v_old, v_anchor):

    log-ratio = mean(r eps dv - r^2 dv^2 / 2)            exactly 0 when v = v_old
    KL        = r^2 mean(dv^2) / 2

The difference of two rounded log-probabilities is the same number with some 1e-7 of
noise on it, against a clip range of 1e-4; no log-probability is ever formed here. Means
run over all dimensions but the batch.

Computes in float32, in float64 if a velocity or the noise is float64. Shapes: B batch,
N elements of a sample.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels.reference.precision import compute_dtype
from sage_kernels.reference.sde_step import draw_noise


class StepColumns(NamedTuple):
    """Numbers of each sample's step, (B,) float32 each.

    Example: `StepColumns(gain=table.gain[steps], std=table.std[steps],
    scale=table.scale[steps], advantage=advantages)`
    """

    gain: Tensor
    """r = b / std."""
    std: Tensor
    """Standard deviation of the step's noise; used where `unnormalized`."""
    scale: Tensor
    """Gradient equalizer S; used where `equalizer`."""
    advantage: Tensor
    """A."""


class LossSettings(NamedTuple):
    """Terms of the loss.

    Example: `LossSettings(clip_range=1e-4, position_weight=1e-6, velocity_weight=1e-7)`
    holds position and velocity.
    """

    clip_range: float
    """PPO clip range c of the ratio."""
    position_weight: float | None = None
    """Weight of the KL to the anchor; None leaves it out."""
    velocity_weight: float | None = None
    """Weight of the KL to the rollout policy, at the drawn noise minus the log-ratio;
    None leaves it out.
    """
    ratio_norm: bool = False
    """The bias-corrected log-ratio of GRPO-Guard, mean(r eps dv), instead of the
    Gaussian one. Its RatioNorm also multiplies this by std and divides the surrogate by
    the step's length in sigma: `std` and `scale` of the columns.
    """
    unnormalized: bool = False
    """Multiply the log-ratio by 2 std^2, as the public CPS code does."""
    equalizer: bool = True
    """Multiply the surrogate by the gradient equalizer."""


class PolicyTerms(NamedTuple):
    """The loss of a batch of trained steps and its parts, each (B,). Only `loss` has a
    gradient.

    Example: `policy_loss(...).loss.sum().backward()`
    """

    loss: Tensor
    """The clipped surrogate, times `scale` where the equalizer is on, and the weighted
    KL terms.
    """
    log_ratio: Tensor
    """The log-ratio inside the surrogate, after `ratio_norm` and `unnormalized`."""
    ratio: Tensor
    """exp(log_ratio); exactly 1 where the policy has not moved."""
    kl_position: Tensor
    """KL to the anchor; 0 where it is left out."""
    kl_velocity: Tensor
    """KL to the rollout policy; 0 where it is left out."""
    clipped: Tensor
    """bool: the clip holds this sample back, so its surrogate has no gradient."""


def policy_loss(
    v: Tensor,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise_ids: Tensor,
    columns: StepColumns,
    settings: LossSettings,
) -> PolicyTerms:
    """Loss per sample with the noise of `noise_ids` (B, 3) int64; arguments as
    `policy_loss_of_noise`.
    """
    return policy_loss_of_noise(
        v, v_old, v_anchor, draw_noise(noise_ids, v), columns, settings
    )


def policy_loss_of_noise(
    v: Tensor,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise: Tensor,
    columns: StepColumns,
    settings: LossSettings,
) -> PolicyTerms:
    """Loss per sample of one trained step,  S max(-A rho, -A clamp(rho, 1 - c, 1 + c))
    + weighted KL terms.

    Args:
        v: (B, ...) guided velocity of the current weights; gradients flow into it
            alone.
        v_old: (B, ...) velocity of the rollout.
        v_anchor: (B, ...) velocity of the anchor; None is allowed where
            `position_weight` is None.
        noise: (B, ...) noise that the rollout drew at this step.
        columns: numbers of each sample's step.
        settings: what the loss consists of.

    Raises:
        ValueError: for shapes that do not match or a missing anchor.
    """
    _check_same_shape(velocity_new=v, velocity_old=v_old, noise=noise)
    dtype = compute_dtype(v.dtype, v_old.dtype, noise.dtype)
    v = v.to(dtype)
    noise = noise.to(dtype)
    delta = v - v_old.detach().to(dtype)
    gain, std, scale, advantage = (
        _column(values, delta, name)
        for name, values in zip(StepColumns._fields, columns, strict=True)
    )

    gaussian_log_ratio = log_ratio(gain, noise, delta)
    used = gaussian_log_ratio
    if settings.ratio_norm:
        used = ratio_norm_log_ratio(gain, noise, delta)
    if settings.unnormalized:
        used = used * (2 * std.square())
    surrogate = clipped_surrogate(used, advantage, settings.clip_range)
    loss = surrogate * scale if settings.equalizer else surrogate

    kl_position = kl_velocity = torch.zeros_like(gaussian_log_ratio)
    if settings.position_weight is not None:
        if v_anchor is None:
            raise ValueError(
                "a KL to the anchor needs velocity_anchor, the velocity of the anchor "
                "weights"
            )
        _check_same_shape(velocity_new=v, velocity_anchor=v_anchor)
        kl_position = gaussian_kl(gain, v - v_anchor.detach().to(dtype))
        loss = loss + settings.position_weight * kl_position
    if settings.velocity_weight is not None:
        kl_velocity = -gaussian_log_ratio
        loss = loss + settings.velocity_weight * kl_velocity
    with torch.no_grad():
        ratio = used.exp()
        high = ratio > 1 + settings.clip_range
        low = ratio < 1 - settings.clip_range
        clipped = ((advantage > 0) & high) | ((advantage < 0) & low)
    parts = (used, ratio, kl_position, kl_velocity, clipped)
    return PolicyTerms(loss, *(part.detach() for part in parts))


def log_ratio(gain: Tensor, noise: Tensor, velocity_delta: Tensor) -> Tensor:
    """Mean log-density ratio  mean(log pi_new - log pi_old) = mean(r eps dv - r^2 dv^2
    / 2).

    Args:
        gain: (B,) r = b / std of the step.
        noise: (B, ...) eps = (x' - a x - b v_old) / std, the noise that the rollout
            drew.
        velocity_delta: (B, ...) dv = v_new - v_old.

    Returns:
        (B,), exactly 0 where dv is 0.
    """
    shift, noise = _gained(gain, noise, velocity_delta)
    return _mean(shift * (noise - shift / 2))


def ratio_norm_log_ratio(gain: Tensor, noise: Tensor, velocity_delta: Tensor) -> Tensor:
    """Bias-corrected log-ratio of GRPO-Guard:  mean(r eps dv), the log-ratio less its
    mean under the rollout policy.

    Arguments and result are those of `log_ratio`.
    """
    shift, noise = _gained(gain, noise, velocity_delta)
    return _mean(shift * noise)


def gaussian_kl(gain: Tensor, velocity_delta: Tensor) -> Tensor:
    """KL divergence per element of two steps that differ by dv in their velocity:  r^2
    mean(dv^2) / 2.

    Args:
        gain: (B,) r = b / std of the step.
        velocity_delta: (B, ...) difference of the two velocities.

    Returns:
        (B,), not negative; equal in both directions because the variances are equal.
    """
    shift, _ = _gained(gain, velocity_delta, velocity_delta)
    return _mean(shift.square()) / 2


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_range: float
) -> Tensor:
    """PPO's clipped surrogate as a loss:  max(-A rho, -A clamp(rho, 1 - c, 1 + c)),
    rho = exp(log_ratio).

    Args:
        log_ratio: (B,).
        advantage: (B,).
        clip_range: c.

    Returns:
        (B,).
    """
    ratio = log_ratio.exp()
    return torch.maximum(
        -advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    )


def policy_loss_forward(
    v: Tensor,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise_ids: Tensor,
    columns: StepColumns,
    settings: LossSettings,
) -> tuple[PolicyTerms, Tensor]:
    """The terms, and the three coefficients (B, 3) of  d loss/dv = k_0 eps + k_1 (v -
    v_old) + k_2 (v - v_anchor).
    """
    terms = policy_loss(v.detach(), v_old, v_anchor, noise_ids, columns, settings)
    gain, std, scale, advantage = (values.to(terms.loss) for values in columns)
    slope = torch.where(terms.clipped, 0.0, -advantage * terms.ratio)
    if settings.unnormalized:
        slope = slope * (2 * std.square())
    if settings.equalizer:
        slope = slope * scale
    of_noise = slope
    of_old = torch.zeros_like(slope) if settings.ratio_norm else -slope
    if settings.velocity_weight is not None:
        of_noise = of_noise - settings.velocity_weight
        of_old = of_old + settings.velocity_weight
    of_anchor = torch.full_like(slope, settings.position_weight or 0.0)
    mean_gain = gain / v.shape[1:].numel()
    coefficients = (
        mean_gain * of_noise,
        mean_gain * gain * of_old,
        mean_gain * gain * of_anchor,
    )
    return terms, torch.stack(coefficients, dim=1)


def policy_loss_backward(
    grad_loss: Tensor,
    v: Tensor,
    v_old: Tensor,
    v_anchor: Tensor | None,
    noise_ids: Tensor,
    coefficients: Tensor,
) -> Tensor:
    """Gradient of v, in its dtype, from that of the loss (B,); coefficients (B, 3) are
    `policy_loss_forward`'s.
    """
    dtype = compute_dtype(v.dtype, v_old.dtype)
    wide = v.to(dtype)
    of_noise, of_old, of_anchor = (
        (grad_loss * column).to(dtype).view(-1, *[1] * (v.ndim - 1))
        for column in coefficients.unbind(1)
    )
    grad = of_noise * draw_noise(noise_ids, v) + of_old * (wide - v_old.to(dtype))
    if v_anchor is not None:
        grad = grad + of_anchor * (wide - v_anchor.to(dtype))
    return grad.to(v.dtype)


def _column(values: Tensor, like: Tensor, name: str) -> Tensor:
    """Per-sample numbers (B,) in the type and on the device of `like` (B, ...)."""
    if values.shape != like.shape[:1]:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; expected ({like.shape[0]},), "
            "one number per sample"
        )
    return values.to(device=like.device, dtype=like.dtype)


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    if len(first) < 2 or any(shape != first for shape in shapes.values()):
        raise ValueError(
            f"expected one shape (batch, ...) for all of them; given {shapes}"
        )


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)


def _gained(
    gain: Tensor, noise: Tensor, velocity_delta: Tensor
) -> tuple[Tensor, Tensor]:
    """(r dv, eps) in the computing type."""
    _check_same_shape(noise=noise, velocity_delta=velocity_delta)
    dtype = compute_dtype(noise.dtype, velocity_delta.dtype)
    velocity_delta = velocity_delta.to(dtype)
    rows = _column(gain, velocity_delta, "gain").view(
        -1, *[1] * (velocity_delta.ndim - 1)
    )
    return rows * velocity_delta, noise.to(dtype)
