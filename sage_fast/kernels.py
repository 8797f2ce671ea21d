"""The one place where sage_fast meets sage_kernels: the sampler's step and the policy loss, plain or fused.

`model.kernels` chooses. `REFERENCE` is the code of `sde.py`, `noise.py` and `objective.py`; `FusedKernels` computes the
same numbers by Triton kernels, to float32 rounding, without ever storing a noise tensor. Both draw the noise of a
sample from its key, so a run may change sides between two checkpoints.

Shapes: B batch, C channels, F frames, H, W.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.noise import NoiseKey, gaussian, key_words
from sage_fast.objective import ObjectiveSettings, PolicyTerms, kl_uses, policy_loss
from sage_fast.sde import transition

Choice = Literal["auto", "reference", "triton"]


class StepKernels(Protocol):
    """What a rollout and an update compute on latents besides the model."""

    def transition(
        self, x: Tensor, velocity: Tensor, keys: Sequence[NoiseKey], step: int, *, a: float, b: float, std: float
    ) -> Tensor:
        """Next state  a x + b v + std eps  of a sampler's step, (B, C, F, H, W) float32.

        Args:
            x, velocity: (B, C, F, H, W).
            keys: B keys; eps is the noise of (key, step).
            step: index of the step.
            a, b, std: its coefficients; std = 0 draws no noise.
        """
        ...

    def policy_loss(
        self,
        velocity_new: Tensor,
        velocity_old: Tensor,
        velocity_anchor: Tensor | None,
        keys: Sequence[NoiseKey],
        steps: Sequence[int],
        *,
        gain: Tensor,
        std: Tensor,
        scale: Tensor,
        advantage: Tensor,
        kl_weight: float,
        settings: ObjectiveSettings,
    ) -> PolicyTerms:
        """`sage_fast.objective.policy_loss` with the noise of (keys[b], steps[b]) instead of a tensor."""
        ...


class ReferenceKernels:
    """Plain PyTorch."""

    def transition(
        self, x: Tensor, velocity: Tensor, keys: Sequence[NoiseKey], step: int, *, a: float, b: float, std: float
    ) -> Tensor:
        """As in `StepKernels`."""
        noise = gaussian(keys, step, tuple(x.shape[1:]), device=x.device) if std > 0 else None
        return transition(x, velocity, noise, a=a, b=b, std=std)

    def policy_loss(
        self,
        velocity_new: Tensor,
        velocity_old: Tensor,
        velocity_anchor: Tensor | None,
        keys: Sequence[NoiseKey],
        steps: Sequence[int],
        *,
        gain: Tensor,
        std: Tensor,
        scale: Tensor,
        advantage: Tensor,
        kl_weight: float,
        settings: ObjectiveSettings,
    ) -> PolicyTerms:
        """As in `StepKernels`."""
        noise = gaussian(keys, steps, tuple(velocity_new.shape[1:]), device=velocity_new.device)
        return policy_loss(
            velocity_new,
            velocity_old,
            velocity_anchor,
            noise,
            gain=gain,
            std=std,
            scale=scale,
            advantage=advantage,
            kl_weight=kl_weight,
            settings=settings,
        )


REFERENCE = ReferenceKernels()


class FusedKernels:
    """The kernels of sage_kernels; build it through `select_kernels`, which checks that they can run."""

    def transition(
        self, x: Tensor, velocity: Tensor, keys: Sequence[NoiseKey], step: int, *, a: float, b: float, std: float
    ) -> Tensor:
        """As in `StepKernels`."""
        from sage_kernels.sde_step import sde_step

        words = key_words(keys, x.device) if std > 0 else None
        return sde_step(velocity, None, x, a=a, b=b, std=std, keys=words, step=step).x

    def policy_loss(
        self,
        velocity_new: Tensor,
        velocity_old: Tensor,
        velocity_anchor: Tensor | None,
        keys: Sequence[NoiseKey],
        steps: Sequence[int],
        *,
        gain: Tensor,
        std: Tensor,
        scale: Tensor,
        advantage: Tensor,
        kl_weight: float,
        settings: ObjectiveSettings,
    ) -> PolicyTerms:
        """As in `StepKernels`."""
        from sage_kernels.grpo_objective import grpo_objective
        from sage_kernels.policy_terms import policy_terms

        uses_position, uses_velocity = kl_uses(settings.kl_mode)
        if uses_position and velocity_anchor is None:
            raise ValueError(f"kl_mode {settings.kl_mode!r} needs velocity_anchor, the velocity of the anchor weights")
        device = velocity_new.device
        terms = policy_terms(
            velocity_new,
            None,
            velocity_old,
            velocity_anchor if uses_position else None,
            gain=gain,
            keys=key_words(keys, device),
            step=torch.tensor(list(steps), dtype=torch.int64, device=device),
        )
        objective = grpo_objective(
            terms,
            advantage,
            std=std,
            scale=scale,
            clip_range=settings.clip_range,
            ratio_norm=settings.ratio == "ratio_norm",
            unnormalized=settings.logprob == "unnormalized",
            equalizer=settings.equalizer,
            use_kl_position=uses_position,
            position_weight=kl_weight * settings.kl_position_weight,
            use_kl_velocity=uses_velocity,
            velocity_weight=kl_weight * settings.kl_velocity_weight,
            kl_velocity_exact=settings.kl_velocity == "exact",
        )
        return PolicyTerms(**objective._asdict())


def select_kernels(choice: Choice, device: torch.device) -> StepKernels:
    """The implementation that `model.kernels` names on a device.

    `auto` is Triton on a GPU where Triton is installed and the reference elsewhere. `triton` on a CPU runs the kernels
    in Triton's interpreter, which is for tests and needs TRITON_INTERPRET=1 from the start of the process.

    Raises:
        ConfigError: `triton` was asked for and cannot run.
    """
    if choice == "reference":
        return REFERENCE
    installed = importlib.util.find_spec("triton") is not None
    if choice == "auto":
        return FusedKernels() if installed and device.type == "cuda" else REFERENCE
    if not installed:
        raise ConfigError(
            "model.kernels is 'triton', but Triton is not installed here. "
            "Install it (pip install triton) or set model.kernels to auto."
        )
    from sage_kernels.common import INTERPRETED

    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            f"model.kernels is 'triton', but model.device is {device.type!r} and Triton kernels need a GPU. Set "
            "model.kernels to auto, or TRITON_INTERPRET=1 in the environment to run them slowly in the interpreter."
        )
    return FusedKernels()


def bytes_moved(function: Callable[[], object]) -> int:
    """Bytes that PyTorch operators read and write in a call, on any device; an op of sage_kernels is one operator."""
    from sage_kernels.tracer import count

    return count(function).total
