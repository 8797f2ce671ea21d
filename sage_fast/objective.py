"""The objective of a trained step: advantages, what the loss consists of, KL weight.

The loss itself, log-ratio, KL terms and clipped surrogate, is written down once in
plain PyTorch, in `sage_kernels.reference.policy_loss`, and once as Triton kernels;
`sage_fast.kernels` chooses.

Shapes: B batch, P prompts, G samples of a prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, shown
from sage_fast.config.registry import ADVANTAGES, resolve
from sage_fast.config.sections import KLWeightConfig, ObjectiveConfig, kl_uses
from sage_fast.kernels import (
    LossSettings,
    PolicyTerms,
    StepColumns,
    policy_loss_of_noise,
)

ADVANTAGE_CLIP = 5.0
"""Bound of an advantage."""

# Spread below this share of the group's largest reward is the rounding of float32
# rewards, not a preference.
ZERO_SPREAD_RELATIVE = 8 * torch.finfo(torch.float32).eps


class GroupAdvantages(NamedTuple):
    """Advantages of a batch of groups.

    Example:
        >>> group_advantages(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        GroupAdvantages(advantages=tensor([[-1.0000,  1.0000], [0., 0.]]), zero_spread=tensor([False,  True]))
    """

    advantages: Tensor
    """(P, G) float32, clipped."""
    zero_spread: Tensor
    """(P,) bool, groups whose rewards do not differ; their advantages are exactly 0."""


def group_advantages(
    rewards: Tensor,
    *,
    std: Literal["group", "global"] = "group",
    clip: float = ADVANTAGE_CLIP,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Group-relative advantages  clamp((r - mean) / (std + eps), -clip, clip).

    The mean is always that of the prompt's group, the standard deviation is the
    population one. A group without spread (standard deviation within float32 rounding
    of its rewards) gets exactly 0 and is marked, never amplified.

    Args:
        rewards: (P, G) finite, float32 or float64; all groups of the update when std is
            "global".
        std: "group" divides by the deviation of the prompt's group, "global" by that of
            all rewards given.
        clip: bound of the advantages, positive, may be infinite.
        eps: added to the standard deviation, not negative.

    Raises:
        ValueError: for rewards that are not (P, G >= 2) and finite.
    """
    if rewards.ndim != 2 or rewards.shape[0] < 1 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; expected (prompts, samples) "
            "with at least 2 samples, "
            "because an advantage compares the samples of one prompt"
        )
    bad = (~torch.isfinite(rewards)).nonzero().tolist()
    if bad:
        raise ValueError(
            f"rewards are not finite at (prompt, sample) {bad[:8]}; drop those groups "
            "or fail the run"
        )
    # In float64, so that only the rounding of the rewards themselves can pass for a
    # spread.
    rewards = rewards.detach().double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    group_std = centred.square().mean(dim=1, keepdim=True).sqrt()
    zero_spread = group_std <= ZERO_SPREAD_RELATIVE * rewards.abs().amax(
        dim=1, keepdim=True
    )
    divisor = group_std if std == "group" else rewards.std(correction=0)
    # The fill also replaces the 0/0 that eps = 0 leaves in a group without spread.
    advantages = (
        (centred / (divisor + eps)).clamp(-clip, clip).masked_fill(zero_spread, 0.0)
    )
    return GroupAdvantages(advantages.float(), zero_spread[:, 0])


def weighted_advantages(
    components: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    normalization: str,
    std: Literal["group", "global"] = "group",
    clip: float = ADVANTAGE_CLIP,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Advantages of several rewards.

    "sum" adds the weighted raw rewards and takes `group_advantages` of the sum.
    "per_reward" takes the advantages of every reward first, without clipping, and clips
    sum_k w_k A_k / sum_k |w_k|, so that no reward dominates by its scale; there a group
    is without spread if none of its weighted rewards has any.

    Args:
        components: reward name -> (P, G). A reward without a weight takes no part.
        weights: reward name -> weight, every name one of `components`, and not all of
            them 0.
        normalization: "sum" or "per_reward", or `package.module:function` of the user's
            own, which is called as f(components, weights, std=std) and returns (P, G),
            higher is better. They are clipped, and a group of zeros is without spread.
        std, clip, eps: as in `group_advantages`, and so are the errors.

    Raises:
        ConfigError: the user's own returned another shape, or what is not finite.
    """
    if normalization not in ADVANTAGES:
        own = resolve(normalization, ADVANTAGES, "advantage.normalization")
        # The scores themselves are logged, and a function may write into its arguments.
        scores = {name: values.clone() for name, values in components.items()}
        given = own(scores, weights, std=std)
        shape = tuple(next(iter(components.values())).shape)
        found = tuple(given.shape) if isinstance(given, Tensor) else shown(given)
        if found != shape:
            raise ConfigError(
                f"advantage.normalization {normalization} returned {found}, but it "
                f"must return a tensor (prompts, videos) = {shape}."
            )
        if bad := (~given.isfinite()).nonzero().tolist():
            raise ConfigError(
                f"advantage.normalization {normalization} returned what is not finite "
                f"at (prompt, video) {bad[:8]}. A group whose rewards are equal has "
                "deviation 0, so return 0 there."
            )
        advantages = given.detach().clamp(-clip, clip).float()
        return GroupAdvantages(advantages, (advantages == 0).all(1))
    active = {name: float(weight) for name, weight in weights.items() if weight != 0}
    if normalization == "sum":
        total = sum(
            (weight * components[name].double() for name, weight in active.items()),
            torch.zeros(()).double(),
        )
        return group_advantages(total, std=std, clip=clip, eps=eps)
    parts = {
        name: group_advantages(components[name], std=std, clip=math.inf, eps=eps)
        for name in active
    }
    total_weight = sum(abs(weight) for weight in active.values())
    advantages = torch.stack(
        [active[name] * part.advantages.double() for name, part in parts.items()]
    ).sum(0)
    zero_spread = torch.stack([part.zero_spread for part in parts.values()]).all(0)
    return GroupAdvantages(
        (advantages / total_weight).clamp(-clip, clip).float(), zero_spread
    )


def anchor_kind(mode: str) -> Literal["none", "fixed", "moving"]:
    """Weights the position KL is measured from: the initial ones, ones refreshed every
    N updates, or none.
    """
    if mode in ("fixed", "fixed_stepwise"):
        return "fixed"
    return "moving" if mode in ("moving", "dual") else "none"


def kl_pulls(settings: ObjectiveConfig, *, anchor_behind: bool) -> bool:
    """Tell whether the KL terms of a step have a gradient at the policy that made the
    rollout.

    Args:
        anchor_behind: the anchor's velocity is at hand, and differs from the rollout's.
    """
    uses_position, uses_velocity = kl_uses(settings.kl_mode)
    position = uses_position and anchor_behind and settings.kl_position_weight > 0
    # The estimate at the drawn noise has the gradient of a log-ratio, though the KL
    # itself is at its minimum here.
    return position or (uses_velocity and settings.kl_velocity_weight > 0)


def loss_settings(
    settings: ObjectiveConfig, kl_weight: float, position_factor: float = 1.0
) -> LossSettings:
    """Settings of the loss of an update.

    Args:
        settings: of the run.
        kl_weight: lambda of the update, see `next_kl_weight`.
        position_factor: what the KL to the anchor counts at this step, see
            `kl_position_fraction`; 0 leaves it out.

    Raises:
        ValueError: for a KL weight that is negative or not finite.
    """
    if not math.isfinite(kl_weight) or kl_weight < 0:
        raise ValueError(
            f"kl_weight is {kl_weight}; it must be finite and not negative"
        )
    uses_position, uses_velocity = kl_uses(settings.kl_mode)
    position = kl_weight * settings.kl_position_weight * position_factor
    velocity = kl_weight * settings.kl_velocity_weight
    return LossSettings(
        clip_range=settings.clip_range,
        position_weight=position if uses_position and position_factor else None,
        velocity_weight=velocity if uses_velocity else None,
        ratio_norm=settings.ratio in ("bias_corrected", "ratio_norm"),
        # RatioNorm's two factors travel in the columns of these two, see
        # `loss_columns`.
        unnormalized=settings.ratio in ("unnormalized", "ratio_norm"),
        equalizer=settings.ratio == "ratio_norm" or settings.equalizer,
    )


def surrogate_factor(columns: StepColumns, settings: LossSettings) -> Tensor:
    """Factor of -A r eps / numel in the surrogate's gradient at the rollout's policy,
    (B,).
    """
    factor = torch.ones_like(columns.scale)
    if settings.equalizer:
        factor = factor * columns.scale
    if settings.unnormalized:
        factor = factor * (2 * columns.std.square())
    return factor


def loss_columns(
    settings: ObjectiveConfig,
    *,
    gain: Tensor,
    std: Tensor,
    scale: Tensor,
    size: Tensor,
    advantage: Tensor,
) -> StepColumns:
    """Columns of each sample's step for the loss, (B,) each; `size` is the length of
    the step in sigma.

    For RatioNorm the log-ratio's factor 2 std^2 becomes std, and the surrogate's scale
    1 / size.
    """
    if settings.ratio == "ratio_norm":
        std = (std / 2).sqrt()
        scale = 1 / size
    return StepColumns(gain=gain, std=std, scale=scale, advantage=advantage)


def policy_loss(
    velocity_new: Tensor,
    velocity_old: Tensor,
    velocity_anchor: Tensor | None,
    noise: Tensor,
    *,
    gain: Tensor,
    std: Tensor,
    scale: Tensor,
    size: Tensor,
    advantage: Tensor,
    kl_weight: float,
    settings: ObjectiveConfig,
) -> PolicyTerms:
    """Loss per sample of one trained step, the paper's Eq. 43 with the reference code's
    sign of the KL:

        L = S max(-A rho, -A clamp(rho, 1 - c, 1 + c)) + lambda (w_pos KL_pos + w_vel KL_vel)

    The caller sums it over samples and steps and divides by the global count.
    Velocities are guided ones; gradients flow into `velocity_new` alone.
    Training has the same terms from `kernels.policy_loss`, which draws the noise again
    instead of keeping it (`StepLoss` in objectives/grpo.py).

    Args:
        velocity_new: (B, ...) velocity of the current weights.
        velocity_old: (B, ...) velocity of the rollout.
        velocity_anchor: (B, ...) velocity of the anchor; None is allowed where the KL
            mode does not use it.
        noise: (B, ...) noise that the rollout drew at this step.
        gain, std, scale, size: (B,) columns of the transition table at each sample's
            step.
        advantage: (B,).
        kl_weight: lambda of this update, see `next_kl_weight`.
        settings: what the loss consists of.

    Raises:
        ValueError: for shapes that do not match or a missing anchor.
    """
    if velocity_anchor is None and kl_uses(settings.kl_mode)[0]:
        raise ValueError(
            f"kl_mode {settings.kl_mode!r} needs velocity_anchor, the velocity of the "
            "anchor weights"
        )
    columns = loss_columns(
        settings, gain=gain, std=std, scale=scale, size=size, advantage=advantage
    )
    resolved = loss_settings(settings, kl_weight)
    return policy_loss_of_noise(
        velocity_new, velocity_old, velocity_anchor, noise, columns, resolved
    )


KL_WINDOW = 10
"""KL values whose mean the controller compares with its target (fewer where fewer are
known).
"""


@dataclass(frozen=True, kw_only=True)
class KLWeightState:
    """State of the KL weight, part of a checkpoint.

    Example:
        >>> initial_kl_weight(KLWeightConfig(target=0.01))
        KLWeightState(weight=1e-07, update=0, history=())
    """

    weight: float
    """lambda of the coming update."""
    update: int
    """Times that the controller has moved."""
    history: tuple[float, ...] = ()
    """The last KL values, oldest first, at most `KL_WINDOW` of them."""


def initial_kl_weight(settings: KLWeightConfig) -> KLWeightState:
    """State before the first update."""
    return KLWeightState(
        weight=settings.minimum if settings.warmup_updates else settings.maximum,
        update=0,
    )


def next_kl_weight(
    state: KLWeightState, kl_value: float, settings: KLWeightConfig
) -> KLWeightState:
    """State after an update that measured `kl_value`.

    During the warm-up lambda = minimum + (maximum - minimum) update / K. After it, the
    mean of the last `KL_WINDOW` values above 1.5 target multiplies lambda by 0.9, below
    0.5 target by 1.1, as in the paper (a trust region would do the opposite); lambda
    stays within [minimum, maximum].

    Raises:
        ValueError: for a KL value that is not finite.
    """
    if not math.isfinite(kl_value):
        raise ValueError(
            f"the KL of update {state.update} is {kl_value}; the velocities of that "
            "update are not finite"
        )
    update = state.update + 1
    history = (*state.history, float(kl_value))[-KL_WINDOW:]
    if update <= settings.warmup_updates:
        weight = (
            settings.minimum
            + (settings.maximum - settings.minimum) * update / settings.warmup_updates
        )
    else:
        mean = sum(history) / len(history)
        weight = state.weight
        if mean > 1.5 * settings.target:
            weight *= 0.9
        elif mean < 0.5 * settings.target:
            weight *= 1.1
    return KLWeightState(
        weight=min(max(weight, settings.minimum), settings.maximum),
        update=update,
        history=history,
    )
