"""The objective of a trained step: advantages, log-ratio, KL terms, clipped surrogate, KL weight.

Every policy step is  x' ~ N(a x + b v, std^2 I)  (see `sage_fast.sde`), so with the gain r = b / std, the
noise eps that the rollout drew and dv = v_new - v_old, everything is a function of (r, eps, v_new, v_old,
v_anchor):

    log-ratio = mean(r eps dv - r^2 dv^2 / 2)            exactly 0 when v_new = v_old
    KL        = r^2 mean(dv^2) / 2

The difference of two rounded log-probabilities is the same number with 5e-8 to 3.5e-7 of noise on it, against
a clip range of 1e-4; no log-probability is ever formed here. Means run over all dimensions but the batch.

Functions compute in float32 whatever their inputs are, in float64 if a velocity or the noise is float64.
Shapes: B batch, P prompts, G samples of a prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

KL_MODES = ("none", "fixed", "stepwise", "moving", "dual")

# Spread below this share of the group's largest reward is the rounding of float32 rewards, not a preference.
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


def _check_rewards(name: str, rewards: Tensor) -> None:
    if rewards.ndim != 2 or rewards.shape[0] < 1 or rewards.shape[1] < 2:
        raise ValueError(
            f"{name} have shape {tuple(rewards.shape)}; expected (prompts, samples) with at least 2 samples, "
            "because an advantage compares the samples of one prompt"
        )
    bad = (~torch.isfinite(rewards)).nonzero().tolist()
    if bad:
        raise ValueError(f"{name} are not finite at (prompt, sample) {bad[:8]}; drop those groups or fail the run")


def group_advantages(
    rewards: Tensor,
    *,
    std: Literal["group", "global"] = "group",
    clip: float = 5.0,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Group-relative advantages  clamp((r - mean) / (std + eps), -clip, clip).

    The mean is always that of the prompt's group, the standard deviation is the population one. A group
    without spread (standard deviation within float32 rounding of its rewards) gets exactly 0 and is marked,
    never amplified.

    Args:
        rewards: (P, G) finite, float32 or float64; all groups of the update when std is "global".
        std: "group" divides by the deviation of the prompt's group, "global" by that of all rewards given.
        clip: bound of the advantages, positive, may be infinite.
        eps: added to the standard deviation, not negative.

    Raises:
        ValueError: for rewards that are not (P, G >= 2) and finite, or a setting out of range.
    """
    _check_rewards("rewards", rewards)
    if std not in ("group", "global"):
        raise ValueError(f"std is {std!r}; allowed are 'group' and 'global'")
    if math.isnan(clip) or clip <= 0:
        raise ValueError(f"clip is {clip}; it must be positive (5.0 is usual)")
    if not math.isfinite(eps) or eps < 0:
        raise ValueError(f"eps is {eps}; it must be finite and not negative")
    rewards = rewards.detach().double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    group_std = centred.square().mean(dim=1, keepdim=True).sqrt()
    zero_spread = group_std <= ZERO_SPREAD_RELATIVE * rewards.abs().amax(dim=1, keepdim=True)
    divisor = group_std if std == "group" else rewards.std(correction=0)
    # The fill also replaces the 0/0 that eps = 0 leaves in a group without spread.
    advantages = (centred / (divisor + eps)).clamp(-clip, clip).masked_fill(zero_spread, 0.0)
    return GroupAdvantages(advantages.float(), zero_spread[:, 0])


def weighted_advantages(
    components: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    normalization: Literal["sum", "per_reward"],
    std: Literal["group", "global"] = "group",
    clip: float = 5.0,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Advantages of several rewards.

    "sum" adds the weighted raw rewards and takes `group_advantages` of the sum. "per_reward" takes the
    advantages of every reward first, without clipping, and clips  sum_k w_k A_k / sum_k |w_k|, so that no
    reward dominates by its scale; there a group is without spread if none of its weighted rewards has any.

    Args:
        components: reward name -> (P, G). A reward without a weight takes no part.
        weights: reward name -> weight, every name one of `components`.
        normalization: "sum" or "per_reward".
        std, clip, eps: as in `group_advantages`.

    Raises:
        ValueError: for a weight without a reward, no non-zero weight, or what `group_advantages` refuses.
    """
    if normalization not in ("sum", "per_reward"):
        raise ValueError(f"normalization is {normalization!r}; allowed are 'sum' and 'per_reward'")
    unknown = sorted(set(weights) - set(components))
    if unknown:
        raise ValueError(f"weights name {unknown}, which no reward returned; rewards are {sorted(components)}")
    if not all(math.isfinite(weight) for weight in weights.values()):
        raise ValueError(f"weights are {dict(weights)}; they must be finite")
    active = {name: float(weight) for name, weight in weights.items() if weight != 0}
    if not active:
        raise ValueError(f"no reward has a non-zero weight; weight at least one of {sorted(components)}")
    shapes = {tuple(components[name].shape) for name in active}
    if len(shapes) > 1:
        raise ValueError(f"rewards have different shapes {sorted(shapes)}; each must be (prompts, samples)")
    for name in active:
        _check_rewards(f"rewards {name!r}", components[name])

    if normalization == "sum":
        total = sum((weight * components[name].double() for name, weight in active.items()), torch.zeros(()).double())
        return group_advantages(total, std=std, clip=clip, eps=eps)
    parts = {name: group_advantages(components[name], std=std, clip=math.inf, eps=eps) for name in active}
    total_weight = sum(abs(weight) for weight in active.values())
    advantages = torch.stack([active[name] * part.advantages.double() for name, part in parts.items()]).sum(0)
    zero_spread = torch.stack([part.zero_spread for part in parts.values()]).all(0)
    if math.isnan(clip) or clip <= 0:
        raise ValueError(f"clip is {clip}; it must be positive (5.0 is usual)")
    return GroupAdvantages((advantages / total_weight).clamp(-clip, clip).float(), zero_spread)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _column(values: Tensor, like: Tensor, name: str) -> Tensor:
    """Per-sample numbers (B,) in the type and on the device of `like` (B, ...)."""
    if values.shape != like.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected ({like.shape[0]},), one number per sample")
    return values.to(device=like.device, dtype=like.dtype)


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) < 2 for shape in shapes.values()):
        raise ValueError(f"expected one shape (batch, ...) for all of them; given {shapes}")


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)


def _gained(gain: Tensor, noise: Tensor, velocity_delta: Tensor) -> tuple[Tensor, Tensor]:
    """(r dv, eps) in the computing type."""
    _check_same_shape(noise=noise, velocity_delta=velocity_delta)
    dtype = _compute_dtype(noise, velocity_delta)
    velocity_delta = velocity_delta.to(dtype)
    rows = _column(gain, velocity_delta, "gain").view(-1, *[1] * (velocity_delta.ndim - 1))
    return rows * velocity_delta, noise.to(dtype)


def log_ratio(gain: Tensor, noise: Tensor, velocity_delta: Tensor) -> Tensor:
    """Mean log-density ratio  mean(log pi_new - log pi_old) = mean(r eps dv - r^2 dv^2 / 2).

    Args:
        gain: (B,) r = b / std of the step.
        noise: (B, ...) eps = (x' - a x - b v_old) / std, the noise that the rollout drew.
        velocity_delta: (B, ...) dv = v_new - v_old.

    Returns:
        (B,), exactly 0 where dv is 0.
    """
    shift, noise = _gained(gain, noise, velocity_delta)
    return _mean(shift * (noise - shift / 2))


def ratio_norm_log_ratio(gain: Tensor, noise: Tensor, velocity_delta: Tensor) -> Tensor:
    """RatioNorm of GRPO-Guard:  mean(r eps dv), the log-ratio less its mean under the rollout policy.

    Arguments and result are those of `log_ratio`.
    """
    shift, noise = _gained(gain, noise, velocity_delta)
    return _mean(shift * noise)


def gaussian_kl(gain: Tensor, velocity_delta: Tensor) -> Tensor:
    """KL divergence per element of two steps that differ by dv in their velocity:  r^2 mean(dv^2) / 2.

    Args:
        gain: (B,) r = b / std of the step.
        velocity_delta: (B, ...) difference of the two velocities.

    Returns:
        (B,), not negative; equal in both directions because the variances are equal.
    """
    shift, _ = _gained(gain, velocity_delta, velocity_delta)
    return _mean(shift.square()) / 2


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped surrogate as a loss:  max(-A rho, -A clamp(rho, 1 - c, 1 + c)),  rho = exp(log_ratio).

    Args:
        log_ratio: (B,).
        advantage: (B,).
        clip_range: c.

    Returns:
        (B,).
    """
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def _check_kl_mode(mode: str) -> None:
    if mode not in KL_MODES:
        raise ValueError(f"kl_mode is {mode!r}; allowed are {', '.join(KL_MODES)}")


def kl_uses(mode: str) -> tuple[bool, bool]:
    """(uses the position KL, uses the velocity KL) of a KL mode.

    fixed and moving hold the position, stepwise holds the velocity (the paper's Eq. 15), dual holds both.
    """
    _check_kl_mode(mode)
    return mode in ("fixed", "moving", "dual"), mode in ("stepwise", "dual")


def anchor_kind(mode: str) -> Literal["none", "fixed", "moving"]:
    """Weights the position KL is measured from: the initial ones, ones refreshed every N updates, or none."""
    _check_kl_mode(mode)
    if mode == "fixed":
        return "fixed"
    return "moving" if mode in ("moving", "dual") else "none"


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What the loss of a trained step consists of. The defaults are those of the SAGE-GRPO reference."""

    clip_range: float = 1e-4
    """PPO clip range c of the ratio. The log-ratio is a mean over elements, hence the small number."""
    ratio: Literal["gaussian", "ratio_norm"] = "gaussian"
    """"gaussian" is the true ratio, "ratio_norm" GRPO-Guard's."""
    logprob: Literal["gaussian", "unnormalized"] = "gaussian"
    """"unnormalized" drops 1 / (2 std^2) from the log-probability of the ratio, as the public CPS code does:
    the log-ratio is multiplied by 2 std^2. The KL terms stay those of the Gaussian."""
    equalizer: bool = True
    """Scale a step's surrogate by median(|r|) / |r|, so that all steps pull with the same strength."""
    kl_mode: Literal["none", "fixed", "stepwise", "moving", "dual"] = "dual"
    """One of KL_MODES."""
    kl_position_weight: float = 1.0
    """Weight of the KL to the anchor, inside the KL weight lambda."""
    kl_velocity_weight: float = 0.1
    """Weight of the KL to the rollout policy, inside the KL weight lambda."""
    kl_velocity: Literal["estimator", "exact"] = "estimator"
    """"estimator" is mean(log pi_old - log pi_new) at the drawn noise (Eq. 15), "exact" is `gaussian_kl`."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range is {self.clip_range}; it must be between 0 and 1 (1e-4 is usual)")
        if self.ratio not in ("gaussian", "ratio_norm"):
            raise ValueError(f"ratio is {self.ratio!r}; allowed are 'gaussian' and 'ratio_norm'")
        if self.logprob not in ("gaussian", "unnormalized"):
            raise ValueError(f"logprob is {self.logprob!r}; allowed are 'gaussian' and 'unnormalized'")
        _check_kl_mode(self.kl_mode)
        for name in ("kl_position_weight", "kl_velocity_weight"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}; it must be finite and not negative (0 switches the term off)")
        if self.kl_velocity not in ("estimator", "exact"):
            raise ValueError(f"kl_velocity is {self.kl_velocity!r}; allowed are 'estimator' and 'exact'")


class PolicyTerms(NamedTuple):
    """The loss of a batch of trained steps and its parts, each (B,). Differentiate `loss` only."""

    loss: Tensor
    """scale * surrogate + lambda (w_pos kl_position + w_vel kl_velocity)."""
    log_ratio: Tensor
    """The log-ratio inside the surrogate, after `ratio` and `logprob`."""
    ratio: Tensor
    """exp(log_ratio); exactly 1 where the policy has not moved."""
    surrogate: Tensor
    """Clipped surrogate before the equalizer."""
    kl_position: Tensor
    """KL to the anchor; 0 if the KL mode does not use it."""
    kl_velocity: Tensor
    """KL to the rollout policy; 0 if the KL mode does not use it."""
    clipped: Tensor
    """bool: the clip holds this sample back, so its surrogate has no gradient."""


def policy_loss(
    velocity_new: Tensor,
    velocity_old: Tensor,
    velocity_anchor: Tensor | None,
    noise: Tensor,
    *,
    gain: Tensor,
    std: Tensor,
    scale: Tensor,
    advantage: Tensor,
    kl_weight: float,
    settings: ObjectiveSettings,
) -> PolicyTerms:
    """Loss per sample of one trained step, the paper's Eq. 43 with the reference code's sign of the KL:

        L = S max(-A rho, -A clamp(rho, 1 - c, 1 + c)) + lambda (w_pos KL_pos + w_vel KL_vel)

    The caller sums it over samples and steps and divides by the global count. Velocities are guided ones;
    gradients flow into `velocity_new` alone.

    Args:
        velocity_new: (B, ...) velocity of the current weights.
        velocity_old: (B, ...) velocity of the rollout.
        velocity_anchor: (B, ...) velocity of the anchor; None is allowed where the KL mode does not use it.
        noise: (B, ...) noise that the rollout drew at this step.
        gain, std, scale: (B,) columns of the transition table at each sample's step.
        advantage: (B,).
        kl_weight: lambda of this update, see `next_kl_weight`.
        settings: what the loss consists of.

    Raises:
        ValueError: for shapes that do not match or a missing anchor.
    """
    _check_same_shape(velocity_new=velocity_new, velocity_old=velocity_old, noise=noise)
    if not math.isfinite(kl_weight) or kl_weight < 0:
        raise ValueError(f"kl_weight is {kl_weight}; it must be finite and not negative")
    dtype = _compute_dtype(velocity_new, velocity_old, noise)
    velocity_new, noise = velocity_new.to(dtype), noise.to(dtype)
    velocity_delta = velocity_new - velocity_old.detach().to(dtype)
    gain, std, scale, advantage = (
        _column(values, velocity_delta, name)
        for values, name in ((gain, "gain"), (std, "std"), (scale, "scale"), (advantage, "advantage"))
    )

    gaussian_log_ratio = log_ratio(gain, noise, velocity_delta)
    used = gaussian_log_ratio if settings.ratio == "gaussian" else ratio_norm_log_ratio(gain, noise, velocity_delta)
    if settings.logprob == "unnormalized":
        used = used * (2 * std.square())
    ratio = used.exp()
    surrogate = clipped_surrogate(used, advantage, settings.clip_range)
    loss = surrogate * scale if settings.equalizer else surrogate

    uses_position, uses_velocity = kl_uses(settings.kl_mode)
    kl_position = kl_velocity = torch.zeros_like(gaussian_log_ratio)
    if uses_position:
        if velocity_anchor is None:
            raise ValueError(f"kl_mode {settings.kl_mode!r} needs velocity_anchor, the velocity of the anchor weights")
        _check_same_shape(velocity_new=velocity_new, velocity_anchor=velocity_anchor)
        kl_position = gaussian_kl(gain, velocity_new - velocity_anchor.detach().to(dtype))
        loss = loss + kl_weight * settings.kl_position_weight * kl_position
    if uses_velocity:
        estimator = settings.kl_velocity == "estimator"
        kl_velocity = -gaussian_log_ratio if estimator else gaussian_kl(gain, velocity_delta)
        loss = loss + kl_weight * settings.kl_velocity_weight * kl_velocity
    with torch.no_grad():
        high, low = ratio > 1 + settings.clip_range, ratio < 1 - settings.clip_range
        clipped = ((advantage > 0) & high) | ((advantage < 0) & low)
    return PolicyTerms(loss, used, ratio, surrogate, kl_position, kl_velocity, clipped)


@dataclass(frozen=True, kw_only=True)
class KLWeightSettings:
    """How the KL weight lambda moves: a linear warm-up, then a controller that keeps the KL near a target."""

    minimum: float = 1e-7
    """lambda of the first update and lower bound."""
    maximum: float = 1e-5
    """lambda after the warm-up and upper bound."""
    warmup_updates: int = 100
    """Updates K from minimum to maximum; 0 starts at the maximum."""
    target: float = 1e-4
    """KL value that the controller aims for."""
    window: int = 10
    """Number H of KL values whose mean is compared with the target (fewer where fewer are known)."""
    direction: Literal["paper", "tighten"] = "paper"
    """"paper" lowers lambda when the KL is high, "tighten" raises it (the usual trust region)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.maximum) and 0 <= self.minimum <= self.maximum):
            raise ValueError(f"minimum is {self.minimum} and maximum {self.maximum}; expected 0 <= minimum <= maximum")
        if self.warmup_updates < 0:
            raise ValueError(f"warmup_updates is {self.warmup_updates}; it must not be negative (0 is no warm-up)")
        if not math.isfinite(self.target) or self.target <= 0:
            raise ValueError(f"target is {self.target}; it must be a positive KL value (see kl_* in metrics.jsonl)")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")
        if self.direction not in ("paper", "tighten"):
            raise ValueError(f"direction is {self.direction!r}; allowed are 'paper' and 'tighten'")


@dataclass(frozen=True, kw_only=True)
class KLWeightState:
    """State of the KL weight; JSON-able, part of a checkpoint.

    Example:
        >>> initial_kl_weight(KLWeightSettings(target=0.01)).to_dict()
        {'weight': 1e-07, 'update': 0, 'history': []}
    """

    weight: float
    """lambda of the coming update."""
    update: int
    """Updates done so far."""
    history: tuple[float, ...] = ()
    """The last KL values, oldest first, at most `window` of them."""

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON types."""
        return {"weight": self.weight, "update": self.update, "history": list(self.history)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KLWeightState":
        """The state that `to_dict` wrote."""
        return cls(
            weight=float(values["weight"]),
            update=int(values["update"]),
            history=tuple(float(value) for value in values["history"]),
        )


def initial_kl_weight(settings: KLWeightSettings) -> KLWeightState:
    """State before the first update."""
    return KLWeightState(weight=settings.minimum if settings.warmup_updates else settings.maximum, update=0)


def next_kl_weight(state: KLWeightState, kl_value: float, settings: KLWeightSettings) -> KLWeightState:
    """State after an update that measured `kl_value`.

    During the warm-up lambda = minimum + (maximum - minimum) update / K. After it, the mean of the last H
    values above 1.5 target multiplies lambda by 0.9, below 0.5 target by 1.1 (direction "tighten" swaps the
    two); lambda stays within [minimum, maximum].

    Raises:
        ValueError: for a KL value that is not finite.
    """
    if not math.isfinite(kl_value):
        raise ValueError(f"the KL of update {state.update} is {kl_value}; the velocities of that update are not finite")
    update = state.update + 1
    history = (*state.history, float(kl_value))[-settings.window :]
    if update <= settings.warmup_updates:
        weight = settings.minimum + (settings.maximum - settings.minimum) * update / settings.warmup_updates
    else:
        mean = sum(history) / len(history)
        when_high, when_low = (0.9, 1.1) if settings.direction == "paper" else (1.1, 0.9)
        weight = state.weight
        if mean > 1.5 * settings.target:
            weight *= when_high
        elif mean < 0.5 * settings.target:
            weight *= when_low
    return KLWeightState(
        weight=min(max(weight, settings.minimum), settings.maximum),
        update=update,
        history=history,
    )
