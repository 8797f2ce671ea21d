"""Reference of `sage_kernels.grpo_objective`: the scalars of a GRPO loss and their cotangents, in plain PyTorch.

For every sample, from the terms of `policy_terms` (A advantage, S equalizer scale, c clip range, lambda KL weight):

    l    = log_ratio | ratio_norm,  times 2 std^2 if the log-probability is unnormalized;   rho = exp(l)
    loss = S max(-A rho, -A clamp(rho, 1 - c, 1 + c)) + lambda_position KL_position + lambda_velocity KL_velocity
    KL_position = kl_anchor,   KL_velocity = -log_ratio (estimator, Eq. 15 of SAGE-GRPO, arXiv 2603.21872) | kl_step

lambda_position and lambda_velocity are lambda times the term's own weight; 0 switches a term off.
Computes in float32, in float64 for float64 terms. Shapes: B batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels.reference.sde_step import compute_dtype


class Objective(NamedTuple):
    """Loss per sample and its parts, each (B,). Only `loss` carries a gradient.

    Example:
        >>> import torch
        >>> terms = torch.zeros(2, 4)
        >>> one = torch.ones(2)
        >>> grpo_objective(terms, torch.tensor([1.0, -2.0]), std=one, scale=one, clip_range=1e-4).loss
        tensor([-1.,  2.])
    """

    loss: Tensor
    """What is summed over samples and steps and divided by their count."""
    log_ratio: Tensor
    """The log-ratio inside the surrogate."""
    ratio: Tensor
    """exp(log_ratio)."""
    surrogate: Tensor
    """Clipped surrogate before the equalizer."""
    kl_position: Tensor
    """KL to the anchor; 0 where its weight is 0."""
    kl_velocity: Tensor
    """KL to the rollout policy; 0 where its weight is 0."""
    clipped: Tensor
    """bool: the clip holds this sample back."""


def grpo_objective(
    terms: Tensor,
    advantage: Tensor,
    *,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool = False,
    unnormalized: bool = False,
    equalizer: bool = True,
    use_kl_position: bool = False,
    position_weight: float = 0.0,
    use_kl_velocity: bool = False,
    velocity_weight: float = 0.0,
    kl_velocity_exact: bool = False,
) -> Objective:
    """Arguments and result of `sage_kernels.grpo_objective`, for any floating-point dtype."""
    terms = terms.to(compute_dtype(terms))
    advantage, std, scale = (values.to(terms) for values in (advantage, std, scale))
    gaussian, guard, kl_anchor, kl_step = terms.unbind(1)
    used = guard if ratio_norm else gaussian
    if unnormalized:
        used = used * (2 * std.square())
    ratio = used.exp()
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))
    loss = surrogate * scale if equalizer else surrogate
    kl_position = kl_velocity = torch.zeros_like(gaussian)
    if use_kl_position:
        kl_position = kl_anchor
        loss = loss + position_weight * kl_position
    if use_kl_velocity:
        kl_velocity = kl_step if kl_velocity_exact else -gaussian
        loss = loss + velocity_weight * kl_velocity
    clipped = ((advantage > 0) & (ratio > 1 + clip_range)) | ((advantage < 0) & (ratio < 1 - clip_range))
    parts = (used, ratio, surrogate, kl_position, kl_velocity, clipped)
    return Objective(loss, *(part.detach() for part in parts))


def grpo_objective_cotangents(
    terms: Tensor,
    advantage: Tensor,
    *,
    std: Tensor,
    scale: Tensor,
    clip_range: float,
    ratio_norm: bool,
    unnormalized: bool,
    equalizer: bool,
    use_kl_position: bool,
    position_weight: float,
    use_kl_velocity: bool,
    velocity_weight: float,
    kl_velocity_exact: bool,
) -> Tensor:
    """d loss / d terms, (B, 4)."""
    terms = terms.to(compute_dtype(terms))
    advantage, std, scale = (values.to(terms) for values in (advantage, std, scale))
    used = terms[:, 1] if ratio_norm else terms[:, 0]
    factor = 2 * std.square() if unnormalized else torch.ones_like(std)
    ratio = (used * factor).exp()
    clipped = ((advantage > 0) & (ratio > 1 + clip_range)) | ((advantage < 0) & (ratio < 1 - clip_range))
    slope = torch.where(clipped, 0.0, -advantage * ratio) * factor
    if equalizer:
        slope = slope * scale
    cotangents = torch.zeros_like(terms)
    cotangents[:, 1 if ratio_norm else 0] = slope
    if use_kl_position:
        cotangents[:, 2] = position_weight
    if use_kl_velocity:
        if kl_velocity_exact:
            cotangents[:, 3] = velocity_weight
        else:
            cotangents[:, 0] -= velocity_weight
    return cotangents
