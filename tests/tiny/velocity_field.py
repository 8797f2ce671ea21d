"""A smooth velocity field in float64 instead of the transformer.

diffusers' model passes through float32 inside (rotary embedding, RMS norm), whatever
its weights are, so two exact ways to a gradient agree to 1e-7 there. With this field
they must agree to rounding in float64.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from sage_fast.distributed.engine import WeightSnapshot
from sage_fast.policy import guidance
from sage_fast.records import PromptEmbeds
from sage_fast.trainer import Trainer


def smooth_velocity(
    parameters: Sequence[nn.Parameter], latents: Tensor, sigma: Tensor, text: Tensor
) -> Tensor:
    """A nonlinear function of everything a velocity depends on; every parameter has its
    own influence.
    """
    generator = torch.Generator().manual_seed(5)
    weights = torch.zeros(8, dtype=torch.float64)
    for parameter in parameters:
        mixing = (
            torch.randn(8, parameter.numel(), generator=generator, dtype=torch.float64)
            / parameter.numel() ** 0.5
        )
        weights = weights + mixing @ torch.sin(3 * parameter.flatten())
    w = torch.tanh(weights)
    x = latents.double()
    s = sigma.double().view(-1, 1, 1, 1, 1)
    t = text.double().view(-1, 1, 1, 1, 1)
    inner = torch.sin(x * (1 + w[0]) + w[1] * t + w[2] * s) * w[3] + w[4] * x.roll(
        1, -1
    ) * torch.cos(w[5] * t)
    return torch.tanh(inner + w[6] * s) + w[7] * x


def use_smooth_velocity(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the trainer's policy is the field, over its own trained weights in
    float64.
    """
    parameters = list(trainer.parameters.values())

    def velocity(
        transformer: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
        *_: object,
    ) -> Tensor:
        return smooth_velocity(
            parameters,
            latents,
            sigma,
            torch.stack([p.text.mean() + len(p.text) for p in prompts]),
        )

    monkeypatch.setattr(guidance, "model_velocity", velocity)
    trainer.policy.transformer.double()
    if trainer.objective.anchor is not None:
        trainer.objective.anchor = WeightSnapshot(trainer.parameters)


def move_weights(trainer: Trainer, size: float = 0.1) -> None:
    """Move the policy away from its anchor, as updates would. Adapters start as the
    identity, with half a gradient.
    """
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in trainer.parameters.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    trainer.objective.anchor_update = -1


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())
