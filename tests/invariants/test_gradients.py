"""The objective in noise space against explicit Gaussian log-probabilities, value and
gradient, in float64.

The reference side knows nothing of gains: it builds the two normal distributions of a
step, subtracts their log-densities, and takes their KL divergence from
torch.distributions. Autograd does the rest on both sides.
"""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from sage_fast.config.sections import KLMode, ObjectiveConfig, kl_uses
from sage_fast.objective import policy_loss
from sage_fast.sde import sigma_schedule, transition_table

GUIDANCE = 6.0
KL_WEIGHT = 0.3
SHAPE = (8, 4, 3, 5)
STEPS = [0, 3, 7, 9, 10, 12, 13, 14]


def guided(condition: Tensor, uncondition: Tensor) -> Tensor:
    return uncondition + GUIDANCE * (condition - uncondition)


def mean_over_elements(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


class Batch:
    """Eight samples at different steps; some have moved beyond the clip range in either
    direction.
    """

    def __init__(self, sde_type: str) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal() -> Tensor:
            return torch.randn(SHAPE, generator=generator, dtype=torch.float64)

        table = transition_table(sde_type, sigma_schedule(16, 3.0), eta=0.6)
        self.a, self.b, self.std, self.gain, self.scale = (
            column[STEPS]
            for column in (table.a, table.b, table.std, table.gain, table.scale)
        )
        self.size = -table.sigmas.diff()[STEPS]
        self.x = normal()
        self.noise = normal()
        self.anchor = normal()
        old_condition = normal()
        old_uncondition = normal()
        moved = (
            torch.tensor([0.0, 1e-4, 1e-4, 0.05, 0.05, 0.2, 0.2, 0.2])
            .double()
            .view(-1, 1, 1, 1)
        )
        self.condition = (old_condition + moved * normal()).requires_grad_()
        self.uncondition = (old_uncondition + moved * normal()).requires_grad_()
        self.old = guided(old_condition, old_uncondition)
        self.x_next = self.mean(self.old) + self.rows(self.std) * self.noise
        self.advantage = torch.tensor(
            [1.5, -0.5, 1.0, 2.0, -1.0, -0.7, 0.9, 0.0]
        ).double()

    @staticmethod
    def rows(values: Tensor) -> Tensor:
        return values.view(-1, 1, 1, 1)

    def mean(self, velocity: Tensor) -> Tensor:
        return self.rows(self.a) * self.x + self.rows(self.b) * velocity

    def policy(self, velocity: Tensor) -> Normal:
        return Normal(self.mean(velocity), self.rows(self.std).expand(SHAPE))


def explicit_loss(batch: Batch, settings: ObjectiveConfig) -> Tensor:
    new = batch.policy(guided(batch.condition, batch.uncondition))
    old = batch.policy(batch.old)
    anchor = batch.policy(batch.anchor)
    log_ratio = mean_over_elements(
        new.log_prob(batch.x_next) - old.log_prob(batch.x_next)
    )
    used = log_ratio
    if settings.ratio in ("bias_corrected", "ratio_norm"):
        used = log_ratio + mean_over_elements(kl_divergence(old, new))
    if settings.ratio == "ratio_norm":
        used = used * batch.std
    if settings.ratio == "unnormalized":
        used = used * 2 * batch.std**2
    ratio = used.exp()
    clip = settings.clip_range
    pushed = -batch.advantage * ratio
    held = -batch.advantage * ratio.clamp(1 - clip, 1 + clip)
    loss = torch.max(pushed, held)
    if settings.equalizer:
        loss = loss * batch.scale
    if settings.ratio == "ratio_norm":
        loss = loss / batch.size
    uses_position, uses_velocity = kl_uses(settings.kl_mode)
    if uses_position:
        kl = mean_over_elements(kl_divergence(new, anchor))
        loss = loss + KL_WEIGHT * settings.kl_position_weight * kl
    if uses_velocity:
        loss = loss - KL_WEIGHT * settings.kl_velocity_weight * log_ratio
    return loss


def relative(ours: Tensor, reference: Tensor) -> float:
    return float(
        (ours - reference).abs().max().detach() / reference.abs().max().detach()
    )


@pytest.mark.parametrize(
    ("ratio", "equalizer"),
    [
        ("gaussian", True),
        ("gaussian", False),
        ("unnormalized", False),
        ("bias_corrected", True),
        ("ratio_norm", False),
    ],
)
@pytest.mark.parametrize("kl_mode", get_args(KLMode))
@pytest.mark.parametrize(
    "sde_type",
    ["sage_grpo", "sage_exact", "dance_grpo", "flow_grpo", "flow_grpo_wan", "cps"],
)
def test_loss_and_gradients_equal_explicit_log_probabilities(
    sde_type: str, kl_mode: Any, ratio: Any, equalizer: bool
) -> None:
    batch = Batch(sde_type)
    settings = ObjectiveConfig(
        clip_range=2e-3,
        ratio=ratio,
        kl_mode=kl_mode,
        equalizer=equalizer,
    )
    velocity = guided(batch.condition, batch.uncondition)
    terms = policy_loss(
        velocity,
        batch.old,
        batch.anchor if kl_uses(kl_mode)[0] else None,
        batch.noise,
        gain=batch.gain,
        std=batch.std,
        scale=batch.scale,
        size=batch.size,
        advantage=batch.advantage,
        kl_weight=KL_WEIGHT,
        settings=settings,
    )
    assert bool(terms.clipped.any()) and not bool(terms.clipped.all())
    ours = torch.autograd.grad(
        terms.loss.sum(), (batch.condition, batch.uncondition, velocity)
    )
    reference_loss = explicit_loss(batch, settings)
    reference = torch.autograd.grad(
        reference_loss.sum(), (batch.condition, batch.uncondition)
    )

    assert relative(terms.loss, reference_loss) <= 1e-10
    assert relative(ours[0], reference[0]) <= 1e-10
    assert relative(ours[1], reference[1]) <= 1e-10
    torch.testing.assert_close(ours[0], GUIDANCE * ours[2], rtol=1e-12, atol=0)
    torch.testing.assert_close(ours[1], (1 - GUIDANCE) * ours[2], rtol=1e-12, atol=0)
