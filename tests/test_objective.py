"""Advantages, log-ratio, KL, surrogate, KL weight; tests/parity compares gradients with log-densities."""

import json
import math
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch

from sage_fast import objective
from sage_fast.objective import (
    KLMode,
    KLWeightConfig,
    KLWeightState,
    ObjectiveConfig,
    anchor_kind,
    group_advantages,
    initial_kl_weight,
    kl_uses,
    next_kl_weight,
    policy_loss,
    weighted_advantages,
)
from sage_fast.sde import sigma_schedule, transition_table
from sage_kernels.reference.policy_loss import clipped_surrogate, gaussian_kl, log_ratio, ratio_norm_log_ratio

# Advantages


def test_advantages_by_hand() -> None:
    # Group 0: mean 2, deviations -1 -1 1 1, std 1. Group 1: mean 4, deviations -3 1 1 1, std sqrt 3.
    rewards = torch.tensor([[1.0, 1.0, 3.0, 3.0], [1.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    advantages, zero_spread = group_advantages(rewards, eps=0.0)
    assert advantages.dtype == torch.float32
    root = math.sqrt(3)
    assert advantages[0].tolist() == pytest.approx([-1, -1, 1, 1])
    assert advantages[1].tolist() == pytest.approx([-root, 1 / root, 1 / root, 1 / root])
    assert zero_spread.tolist() == [False, False]


def test_global_std_keeps_the_group_mean() -> None:
    rewards = torch.tensor([[0.0, 2.0], [10.0, 18.0]])
    # All rewards: mean 7.5, variance (56.25 + 30.25 + 6.25 + 110.25) / 4 = 50.75.
    advantages, _ = group_advantages(rewards, std="global", eps=0.0)
    unit = math.sqrt(50.75)
    assert advantages.flatten().tolist() == pytest.approx([-1 / unit, 1 / unit, -4 / unit, 4 / unit])


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_groups_without_spread_are_counted_not_amplified(std: Any, eps: float) -> None:
    rewards = torch.tensor([[0.7, 0.7, 0.7], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    advantages, zero_spread = group_advantages(rewards, std=std, eps=eps)
    assert zero_spread.tolist() == [True, True, False]
    assert advantages[:2].tolist() == [[0.0] * 3] * 2
    assert float(advantages[2].abs().max()) > 0.5


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 3.6757, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_is_not_spread(dtype: torch.dtype, magnitude: float) -> None:
    """Rewards that differ in the last bits of float32, as two summation orders leave them."""
    steps = torch.tensor([[0, 1, -1, 2]], dtype=torch.float64) * torch.finfo(torch.float32).eps
    rewards = (magnitude * (1 + steps)).to(dtype)
    assert float(rewards.max()) > float(rewards.min())
    advantages, zero_spread = group_advantages(rewards, eps=0.0)
    assert zero_spread.tolist() == [True]
    assert advantages.tolist() == [[0.0] * 4]


def test_a_small_but_real_spread_counts() -> None:
    advantages, zero_spread = group_advantages(torch.tensor([[1.0, 1.0001]]), eps=0.0)
    assert zero_spread.tolist() == [False]
    assert advantages[0].tolist() == pytest.approx([-1, 1], rel=1e-3)


def test_eps_damps_rewards_that_are_all_rounding_around_zero() -> None:
    advantages, _ = group_advantages(torch.tensor([[1e-8, -1e-8]]))
    assert advantages[0].tolist() == pytest.approx([1e-8 / (1e-8 + 1e-6), -1e-8 / (1e-8 + 1e-6)], rel=1e-5)


def test_advantages_are_clipped() -> None:
    rewards = torch.zeros(1, 64)
    rewards[0, 0] = 1.0
    # One of 64: unclipped (63/64) / sqrt(63)/64 = sqrt 63 = 7.94.
    assert float(group_advantages(rewards).advantages.max()) == 5
    assert float(group_advantages(rewards, clip=2.0).advantages.max()) == 2
    assert float(group_advantages(rewards, clip=math.inf).advantages.max()) == pytest.approx(math.sqrt(63), rel=1e-4)


def test_weighted_sum_is_the_advantage_of_the_sum() -> None:
    components = {
        "VQ": torch.tensor([[0.0, 1.0, 2.0]]),
        "MQ": torch.tensor([[4.0, 0.0, 2.0]]),
        "extra": torch.ones(7),
    }
    ours = weighted_advantages(components, {"VQ": 1.0, "MQ": 0.5, "extra": 0.0}, normalization="sum")
    expected = group_advantages(torch.tensor([[2.0, 1.0, 3.0]]))
    assert torch.equal(ours.advantages, expected.advantages)
    assert not bool(ours.zero_spread.any())


def test_per_reward_normalises_before_it_weights() -> None:
    # VQ is a thousand times larger; both have advantages of size 1 within the group.
    components = {
        "VQ": torch.tensor([[0.0, 1000.0], [0.0, 1000.0], [5.0, 5.0]]),
        "MQ": torch.tensor([[1.0, 0.0], [3.0, 3.0], [2.0, 2.0]]),
    }
    advantages, zero_spread = weighted_advantages(
        components, {"VQ": 1.0, "MQ": -3.0}, normalization="per_reward", eps=0.0
    )
    # Group 0: (1 * (-1, 1) - 3 * (1, -1)) / 4 = (-1, 1). Group 1: VQ alone, (-1, 1) / 4.
    assert advantages.tolist() == [[-1.0, 1.0], [-0.25, 0.25], [0.0, 0.0]]
    assert zero_spread.tolist() == [False, False, True]


def test_per_reward_clips_the_sum_only() -> None:
    rewards = torch.zeros(1, 64)
    rewards[0, 0] = 1.0
    opposite = {"a": rewards, "b": 3 * rewards}
    result = weighted_advantages(opposite, {"a": 2.0, "b": -1.0}, normalization="per_reward", eps=0.0)
    assert float(result.advantages[0, 0]) == pytest.approx(math.sqrt(63) / 3, rel=1e-6)
    result = weighted_advantages(opposite, {"a": 2.0, "b": 1.0}, normalization="per_reward")
    assert float(result.advantages[0, 0]) == 5


PAIR = torch.tensor([[0.0, 1.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages(torch.zeros(4)), r"shape \(4,\)"),
        (lambda: group_advantages(torch.zeros(4, 1)), "at least 2 samples"),
        (
            lambda: group_advantages(torch.tensor([[0.0, math.nan]])),
            r"not finite at \(prompt, sample\) \[\[0, 1\]\]",
        ),
        (lambda: group_advantages(PAIR, std="batch"), "allowed are 'group' and 'global'"),  # type: ignore[arg-type]
        (lambda: group_advantages(PAIR, clip=0.0), r"clip is 0\.0"),
        (lambda: group_advantages(PAIR, eps=-1.0), r"eps is -1\.0"),
        (lambda: weighted_advantages({"a": PAIR}, {"b": 1.0}, normalization="sum"), r"weights name \['b'\]"),
        (lambda: weighted_advantages({"a": PAIR}, {"a": 0.0}, normalization="sum"), "non-zero weight"),
        (lambda: weighted_advantages({"a": PAIR}, {"a": math.inf}, normalization="sum"), "must be finite"),
        (lambda: weighted_advantages({"a": PAIR}, {"a": 1.0}, normalization="max"), "'sum' and 'per_reward'"),  # type: ignore[arg-type]
        (
            lambda: weighted_advantages({"a": PAIR}, {"a": 1.0}, normalization="per_reward", clip=-1.0),
            r"clip is -1\.0",
        ),
        (
            lambda: weighted_advantages(
                {"a": PAIR, "b": torch.zeros(2, 2)}, {"a": 1.0, "b": 1.0}, normalization="per_reward"
            ),
            "different shapes",
        ),
        (
            lambda: weighted_advantages({"MQ": PAIR * math.inf}, {"MQ": 1.0}, normalization="sum"),
            "rewards 'MQ' are not finite",
        ),
    ],
)
def test_advantage_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Log-ratio, KL, surrogate


def test_log_ratio_by_hand() -> None:
    gain, noise, delta = torch.tensor([-2.0]), torch.tensor([[1.0, -3.0]]), torch.tensor([[0.5, 1.0]])
    # r dv = -1, -2; r eps dv = -1, 6; (r dv)^2 / 2 = 0.5, 2.
    assert log_ratio(gain, noise, delta).tolist() == [(-1.5 + 4) / 2]
    assert ratio_norm_log_ratio(gain, noise, delta).tolist() == [2.5]
    assert gaussian_kl(gain, delta).tolist() == [1.25]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.0, 1.05, 1.2])
def test_surrogate_is_the_pessimistic_branch_and_stops_the_gradient(ratio: float, advantage: float) -> None:
    value = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate(value, torch.tensor([advantage], dtype=torch.float64), 0.1)
    held_back = (advantage > 0 and ratio > 1.1) or (advantage < 0 and ratio < 0.9)
    bound = 1.1 if advantage > 0 else 0.9
    assert float(loss.detach()) == pytest.approx(-advantage * (bound if held_back else ratio))
    loss.sum().backward()
    assert value.grad is not None
    assert float(value.grad) == pytest.approx(0 if held_back else -advantage * ratio)


def terms_for(settings: ObjectiveConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    new, anchor, noise = (torch.randn(3, 4, 2, 5, generator=generator) for _ in range(3))
    inputs: dict[str, Any] = {
        "velocity_new": new.to(dtype),
        "velocity_old": new.to(dtype).clone(),
        "velocity_anchor": anchor.to(dtype),
        "noise": noise,
        "gain": torch.tensor([-0.02, -0.5, -2.8], dtype=torch.float64),
        "std": torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64),
        "scale": torch.tensor([8.0, 1.0, 0.1], dtype=torch.float64),
        "size": torch.tensor([0.01, 0.05, 0.2], dtype=torch.float64),
        "advantage": torch.tensor([1.0, -1.0, 0.5]),
        "kl_weight": 1e-5,
    }
    inputs.update(changes)
    tensors = [inputs.pop(name) for name in ("velocity_new", "velocity_old", "velocity_anchor", "noise")]
    return policy_loss(*tensors, **inputs, settings=settings)


@pytest.mark.parametrize("logprob", ["gaussian", "unnormalized"])
@pytest.mark.parametrize("ratio", ["gaussian", "bias_corrected"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ratio_is_exactly_one_before_the_policy_moves(dtype: torch.dtype, ratio: Any, logprob: Any) -> None:
    terms = terms_for(ObjectiveConfig(ratio=ratio, logprob=logprob), dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for column in terms[:-1]:
        assert column.dtype == expected and column.shape == (3,)
    assert terms.log_ratio.tolist() == [0.0] * 3
    assert terms.ratio.tolist() == [1.0] * 3
    assert terms.surrogate.tolist() == [-1.0, 1.0, -0.5]
    assert terms.kl_velocity.tolist() == [0.0] * 3
    assert terms.clipped.tolist() == [False] * 3


@pytest.mark.parametrize("mode", get_args(KLMode))
def test_kl_modes_use_their_terms(mode: Any) -> None:
    position, velocity = kl_uses(mode)
    assert (position, velocity, anchor_kind(mode)) == {
        "none": (False, False, "none"),
        "fixed": (True, False, "fixed"),
        "stepwise": (False, True, "none"),
        "fixed_stepwise": (True, True, "fixed"),
        "moving": (True, False, "moving"),
        "dual": (True, True, "moving"),
    }[mode]
    settings = ObjectiveConfig(kl_mode=mode, kl_velocity="exact")
    terms = terms_for(settings, velocity_old=torch.zeros(3, 4, 2, 5), kl_weight=0.7)
    assert bool((terms.kl_position > 0).all()) == position
    assert bool((terms.kl_velocity > 0).all()) == velocity
    scale = torch.tensor([8.0, 1.0, 0.1])
    total = scale * terms.surrogate + 0.7 * (1.0 * terms.kl_position + 0.1 * terms.kl_velocity)
    torch.testing.assert_close(terms.loss, total)
    if position:
        with pytest.raises(ValueError, match="needs velocity_anchor"):
            terms_for(settings, velocity_anchor=None)
    else:
        terms_for(settings, velocity_anchor=None)


def test_equalizer_off_leaves_the_surrogate_alone() -> None:
    terms = terms_for(ObjectiveConfig(equalizer=False, kl_mode="none"), velocity_old=torch.zeros(3, 4, 2, 5))
    assert torch.equal(terms.loss, terms.surrogate)


def test_unnormalized_scales_the_ratio_and_not_the_kl() -> None:
    moved = torch.zeros(3, 4, 2, 5)
    plain = terms_for(ObjectiveConfig(), velocity_old=moved)
    scaled = terms_for(ObjectiveConfig(logprob="unnormalized"), velocity_old=moved)
    torch.testing.assert_close(scaled.log_ratio, plain.log_ratio * 2 * torch.tensor([0.3, 0.2, 0.1]) ** 2)
    assert torch.equal(scaled.kl_velocity, plain.kl_velocity)
    assert torch.equal(scaled.kl_position, plain.kl_position)


def test_ratio_norm_is_what_grpo_guard_publishes() -> None:
    """Its own arithmetic: log-probabilities plus the squared shift of the means, times sqrt(dt) sigma; loss over dt."""
    moved = torch.zeros(3, 4, 2, 5)
    terms = terms_for(ObjectiveConfig(ratio="ratio_norm", equalizer=False, kl_mode="none"), velocity_old=moved)
    generator = torch.Generator().manual_seed(0)
    new, _, noise = (torch.randn(3, 4, 2, 5, generator=generator).double() for _ in range(3))
    dt, std = torch.tensor([0.01, 0.05, 0.2]).double(), torch.tensor([0.3, 0.2, 0.1]).double()
    b, sigma = torch.tensor([-0.02, -0.5, -2.8]).double() * std, std / dt.sqrt()
    rows = (-1, 1, 1, 1)
    mean_old, mean_new = torch.zeros_like(new), b.view(rows) * new
    drawn = mean_old + std.view(rows) * noise
    log_probs = [-(drawn - mean).square().flatten(1).mean(1) / (2 * std**2) for mean in (mean_new, mean_old)]
    bias = (mean_new - mean_old).square().flatten(1).mean(1) / (2 * (dt.sqrt() * sigma) ** 2)
    log_ratio = (log_probs[0] - log_probs[1] + bias) * dt.sqrt() * sigma
    torch.testing.assert_close(terms.log_ratio.double(), log_ratio, rtol=1e-5, atol=1e-7)
    surrogate = clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0, 0.5]).double(), 1e-4)
    torch.testing.assert_close(terms.loss.double(), surrogate / dt, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo"])
def test_ratio_norm_levels_the_steps(sde_type: str) -> None:
    """At dv = 0 a step pulls with |b| / D: a spread below 1.2 over 20 steps, where |r| has 10 and more."""
    table = transition_table(sde_type, sigma_schedule(20, 5.0), 0.5)
    noise = torch.randn(20, 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = {"gain": table.gain, "std": table.std, "scale": table.scale, "size": -table.sigmas.diff()}
    strengths = {}
    for ratio in ("gaussian", "ratio_norm"):
        velocity = torch.zeros_like(noise, requires_grad=True)
        settings = ObjectiveConfig(ratio=ratio, equalizer=False, kl_mode="none")  # type: ignore[arg-type]
        given = {**columns, "advantage": torch.ones(20), "kl_weight": 0.0, "settings": settings}
        loss = policy_loss(velocity, velocity.detach(), None, noise, **given).loss
        (gradient,) = torch.autograd.grad(loss.sum(), velocity)
        strengths[ratio] = (gradient.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)).tolist()
    assert strengths["ratio_norm"] == pytest.approx((table.b / table.sigmas.diff() / 6).tolist())
    assert max(strengths["ratio_norm"]) < 1.2 * min(strengths["ratio_norm"])
    assert max(strengths["gaussian"]) > 10 * min(strengths["gaussian"])


def test_clipped_marks_the_samples_without_gradient() -> None:
    noise = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
    signs = torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1, 1)
    old = torch.zeros(3, 4, 2, 5)
    new = (signs * -1e-3 * noise).requires_grad_()
    # A negative gain: velocity along -noise raises the ratio. Rows: raised with A > 0, lowered with A < 0,
    # lowered with A > 0; the last may still pull back.
    terms = terms_for(
        ObjectiveConfig(kl_mode="none"),
        velocity_new=new,
        velocity_old=old,
        noise=noise,
        gain=torch.full((3,), -1.0),
        advantage=torch.tensor([1.0, -1.0, 1.0]),
    )
    assert (terms.ratio > 1).tolist() == [True, False, False]
    assert terms.clipped.tolist() == [True, True, False]
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    assert gradient.flatten(1).any(dim=1).tolist() == [False, False, True]


def test_gradients_reach_the_new_velocity_only() -> None:
    leaves: dict[str, Any] = {
        name: torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(i)).requires_grad_()
        for i, name in enumerate(("velocity_new", "velocity_old", "velocity_anchor"))
    }
    terms_for(ObjectiveConfig(), **leaves).loss.sum().backward()
    assert leaves["velocity_new"].grad is not None
    assert leaves["velocity_old"].grad is None and leaves["velocity_anchor"].grad is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"velocity_old": torch.zeros(1, 4, 2, 5)}, "velocity_old"),
        ({"noise": torch.zeros(3, 4, 2)}, "one shape"),
        ({"velocity_anchor": torch.zeros(3, 4, 2, 1)}, "velocity_anchor"),
        ({"gain": torch.zeros(1)}, r"gain has shape \(1,\); expected \(3,\)"),
        ({"advantage": torch.zeros(3, 1)}, "advantage has shape"),
        ({"kl_weight": math.nan}, "kl_weight is nan"),
        ({"kl_weight": -1e-6}, "kl_weight is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_policy_loss_refuses_inputs_that_do_not_match(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms_for(ObjectiveConfig(), **changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clip_range", 0.0, "between 0 and 1"),
        ("clip_range", 1.5, "between 0 and 1"),
        ("ratio", "norm", "gaussian, ratio_norm, bias_corrected"),
        ("ratio", "ratio_norm", "set equalizer to false"),
        ("logprob", "mean", "'gaussian' and 'unnormalized'"),
        ("kl_mode", "both", "none, fixed, stepwise, fixed_stepwise, moving, dual"),
        ("kl_position_weight", -1.0, "kl_position_weight is"),
        ("kl_velocity_weight", math.inf, "kl_velocity_weight is"),
        ("kl_velocity", "k3", "'estimator' and 'exact'"),
    ],
)
def test_objective_settings_are_checked(field: str, value: Any, message: str) -> None:
    assert field in {item.name for item in fields(ObjectiveConfig)}
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**{field: value})


def test_unknown_kl_modes_are_refused_by_the_helpers() -> None:
    for helper in (kl_uses, anchor_kind):
        with pytest.raises(ValueError, match="allowed are none, fixed"):
            helper("frozen")


# KL weight


def weights(settings: KLWeightConfig, values: list[float]) -> list[float]:
    state, result = initial_kl_weight(settings), []
    for value in values:
        result.append(state.weight)
        state = next_kl_weight(state, value, settings)
    return [*result, state.weight]


# Target 1, window 2. Means after the warm-up: 4, 4, 2, 0, 0.5, 1.5, 2, that is high, high, high, low, then
# the two bounds themselves, which leave the weight alone, then high.
KL_VALUES = [4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 1.0, 2.0, 2.0]


def test_kl_weight_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "KL_WINDOW", 2)
    settings = KLWeightConfig(minimum=2.0, maximum=8.0, warmup_updates=2, target=1.0)
    expected = [2, 5, 8, 7.2, 6.48, 5.832, 6.4152, 6.4152, 6.4152, 5.77368]
    assert weights(settings, KL_VALUES) == pytest.approx(expected)


def test_kl_weight_stays_above_its_minimum() -> None:
    path = weights(KLWeightConfig(minimum=2.0, maximum=8.0, warmup_updates=0, target=1.0), [9.0] * 40)
    assert path[0] == 8 and path[-1] == 2.0


@pytest.mark.parametrize(("kl", "factor"), [(0.45, 1.1), (0.55, 1.0), (1.45, 1.0), (1.55, 0.9)])
def test_kl_weight_moves_outside_half_and_one_and_a_half_of_the_target(kl: float, factor: float) -> None:
    settings = KLWeightConfig(minimum=1.0, maximum=8.0, warmup_updates=0, target=1.0)
    assert next_kl_weight(KLWeightState(weight=4.0, update=9), kl, settings).weight == pytest.approx(4.0 * factor)


def test_kl_weight_defaults_warm_up_in_a_hundred_updates() -> None:
    path = weights(KLWeightConfig(target=1.0), [1.0] * 120)
    assert path[0] == 1e-7 and path[50] == pytest.approx(5.05e-6) and path[100] == 1e-5
    assert path[101:] == [1e-5] * 20


def test_kl_weight_resumes_from_json() -> None:
    settings = KLWeightConfig(minimum=2.0, maximum=8.0, warmup_updates=2, target=1.0)
    state = initial_kl_weight(settings)
    for value in KL_VALUES[:5]:
        state = next_kl_weight(state, value, settings)
    restored = KLWeightState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert restored == state and len(restored.history) == 5
    assert next_kl_weight(restored, 3.0, settings) == next_kl_weight(state, 3.0, settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minimum": 2.0}, "expected 0 <= minimum <= maximum"),
        ({"minimum": -1.0}, "expected 0 <= minimum <= maximum"),
        ({"maximum": math.inf}, "expected 0 <= minimum <= maximum"),
        ({"warmup_updates": -1}, "warmup_updates is -1"),
        ({"target": 0.0}, "positive KL value"),
        ({"target": math.nan}, "positive KL value"),
    ],
    ids=str,
)
def test_kl_weight_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLWeightConfig(**{"target": 1.0, **changes})


def test_kl_weight_refuses_values_that_are_not_finite() -> None:
    settings = KLWeightConfig(target=1.0)
    with pytest.raises(ValueError, match="KL of update 0 is nan"):
        next_kl_weight(initial_kl_weight(settings), math.nan, settings)
