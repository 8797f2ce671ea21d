"""Advantages, the terms of each KL mode, the KL weight; invariants/test_gradients.py
holds the loss.
"""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sage_fast import objective
from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import register
from sage_fast.config.sections import KLMode, KLWeightConfig, kl_uses
from sage_fast.objective import (
    KLWeightState,
    anchor_kind,
    group_advantages,
    initial_kl_weight,
    next_kl_weight,
    weighted_advantages,
)

# Advantages


def test_advantages_by_hand() -> None:
    # Group 0: mean 2, deviations -1 -1 1 1, std 1. Group 1: mean 4, deviations -3 1 1
    # 1, std sqrt 3.
    rewards = torch.tensor(
        [[1.0, 1.0, 3.0, 3.0], [1.0, 5.0, 5.0, 5.0]], dtype=torch.float64
    )
    advantages, zero_spread = group_advantages(rewards, eps=0.0)
    assert advantages.dtype == torch.float32
    root = math.sqrt(3)
    assert advantages[0].tolist() == pytest.approx([-1, -1, 1, 1])
    assert advantages[1].tolist() == pytest.approx(
        [-root, 1 / root, 1 / root, 1 / root]
    )
    assert zero_spread.tolist() == [False, False]


def test_global_std_keeps_the_group_mean() -> None:
    rewards = torch.tensor([[0.0, 2.0], [10.0, 18.0]])
    # All rewards: mean 7.5, variance (56.25 + 30.25 + 6.25 + 110.25) / 4 = 50.75.
    advantages, _ = group_advantages(rewards, std="global", eps=0.0)
    unit = math.sqrt(50.75)
    assert advantages.flatten().tolist() == pytest.approx(
        [-1 / unit, 1 / unit, -4 / unit, 4 / unit]
    )


@pytest.mark.parametrize(
    ("std", "eps"), [("group", 0.0), ("group", 1e-6), ("global", 0.0)]
)
def test_groups_without_spread_are_counted_not_amplified(std: Any, eps: float) -> None:
    rewards = torch.tensor(
        [[0.7, 0.7, 0.7], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 1.0001, 1.0002]]
    )
    advantages, zero_spread = group_advantages(rewards, std=std, eps=eps)
    assert zero_spread.tolist() == [True, True, False, False]
    assert advantages[:2].tolist() == [[0.0] * 3] * 2
    assert float(advantages[2].abs().max()) > 0.5


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 3.6757, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_is_not_spread(dtype: torch.dtype, magnitude: float) -> None:
    """Rewards that differ in the last bits of float32, as two summation orders leave
    them.
    """
    steps = (
        torch.tensor([[0, 1, -1, 2]], dtype=torch.float64)
        * torch.finfo(torch.float32).eps
    )
    rewards = (magnitude * (1 + steps)).to(dtype)
    assert float(rewards.max()) > float(rewards.min())
    advantages, zero_spread = group_advantages(rewards, eps=0.0)
    assert zero_spread.tolist() == [True]
    assert advantages.tolist() == [[0.0] * 4]


def test_eps_damps_rewards_that_are_all_rounding_around_zero() -> None:
    advantages, _ = group_advantages(torch.tensor([[1e-8, -1e-8]]))
    assert advantages[0].tolist() == pytest.approx(
        [1e-8 / (1e-8 + 1e-6), -1e-8 / (1e-8 + 1e-6)], rel=1e-5
    )


def test_advantages_are_clipped() -> None:
    rewards = torch.zeros(1, 64)
    rewards[0, 0] = 1.0
    # One of 64: unclipped (63/64) / sqrt(63)/64 = sqrt 63 = 7.94.
    assert float(group_advantages(rewards).advantages.max()) == 5
    assert float(group_advantages(rewards, clip=2.0).advantages.max()) == 2
    assert float(
        group_advantages(rewards, clip=math.inf).advantages.max()
    ) == pytest.approx(math.sqrt(63), rel=1e-4)


def test_weighted_sum_is_the_advantage_of_the_sum() -> None:
    components = {
        "VQ": torch.tensor([[0.0, 1.0, 2.0]]),
        "MQ": torch.tensor([[4.0, 0.0, 2.0]]),
        "extra": torch.ones(7),
    }
    ours = weighted_advantages(
        components, {"VQ": 1.0, "MQ": 0.5, "extra": 0.0}, normalization="sum"
    )
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
    # Group 0: (1 * (-1, 1) - 3 * (1, -1)) / 4 = (-1, 1). Group 1: VQ alone, (-1, 1) /
    # 4.
    assert advantages.tolist() == [[-1.0, 1.0], [-0.25, 0.25], [0.0, 0.0]]
    assert zero_spread.tolist() == [False, False, True]


def test_per_reward_clips_the_sum_only() -> None:
    rewards = torch.zeros(1, 64)
    rewards[0, 0] = 1.0
    opposite = {"a": rewards, "b": 3 * rewards}
    result = weighted_advantages(
        opposite, {"a": 2.0, "b": -1.0}, normalization="per_reward", eps=0.0
    )
    assert float(result.advantages[0, 0]) == pytest.approx(math.sqrt(63) / 3, rel=1e-6)
    result = weighted_advantages(
        opposite, {"a": 2.0, "b": 1.0}, normalization="per_reward"
    )
    assert float(result.advantages[0, 0]) == 5


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        # Of 3 prompts with 2 videos each it would be 2 prompts with 3 of each other.
        (torch.zeros(2, 3), r"returned \(2, 3\), .* = \(3, 2\)\."),
        (torch.zeros(3), r"returned \(3,\), but it must"),
        ([[0.0] * 2] * 3, r"returned \[\[0.0, 0.0\], .*, but it must"),
        (None, "returned None, but it must"),
        (torch.tensor([[0.0, 1.0]] * 2 + [[math.nan] * 2]), r"finite at .* \[\[2, 0\]"),
        (torch.tensor([[0.0, 1.0]] * 2 + [[math.inf] * 2]), r"finite at .* \[\[2, 0\]"),
    ],
)
def test_what_an_own_advantage_returns_is_checked(returned: Any, said: str) -> None:
    def mine(*arguments: Any, **options: Any) -> Any:
        return returned

    name = register(mine)
    with pytest.raises(ConfigError, match=f"advantage.normalization {name} .*{said}"):
        weighted_advantages({"VQ": torch.rand(3, 2)}, {"VQ": 1.0}, normalization=name)


def test_an_own_advantage_may_write_into_the_scores_that_it_gets() -> None:
    def centred(scores: dict[str, Tensor], weights: object, *, std: str) -> Tensor:
        scores["VQ"] -= scores["VQ"].mean(1, keepdim=True)
        return scores["VQ"]

    scores = {"VQ": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    found = weighted_advantages(scores, {"VQ": 1.0}, normalization=register(centred))
    assert found.advantages.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]
    assert scores["VQ"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


# KL modes


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


# KL weight


def weights(settings: KLWeightConfig, values: list[float]) -> list[float]:
    state = initial_kl_weight(settings)
    result = []
    for value in values:
        result.append(state.weight)
        state = next_kl_weight(state, value, settings)
    return [*result, state.weight]


# Target 1, window 2. Means after the warm-up: 4, 4, 2, 0, 0.5, 1.5, 2, that is high,
# high, high, low, then the two bounds themselves, which leave the weight alone, then
# high.
KL_VALUES = [4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 1.0, 2.0, 2.0]


def test_kl_weight_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "KL_WINDOW", 2)
    settings = KLWeightConfig(minimum=2.0, maximum=8.0, warmup_updates=2, target=1.0)
    expected = [2, 5, 8, 7.2, 6.48, 5.832, 6.4152, 6.4152, 6.4152, 5.77368]
    assert weights(settings, KL_VALUES) == pytest.approx(expected)


def test_kl_weight_stays_above_its_minimum() -> None:
    path = weights(
        KLWeightConfig(minimum=2.0, maximum=8.0, warmup_updates=0, target=1.0),
        [9.0] * 40,
    )
    assert path[0] == 8 and path[-1] == 2.0


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.45, 1.1), (0.55, 1.0), (1.45, 1.0), (1.55, 0.9)]
)
def test_kl_weight_moves_outside_half_and_one_and_a_half_of_the_target(
    kl: float, factor: float
) -> None:
    settings = KLWeightConfig(minimum=1.0, maximum=8.0, warmup_updates=0, target=1.0)
    assert next_kl_weight(
        KLWeightState(weight=4.0, update=9), kl, settings
    ).weight == pytest.approx(4.0 * factor)
