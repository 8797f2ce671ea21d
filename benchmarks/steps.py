"""Timed steps of the policy benchmark: one function per step of a run, each given a
contender's velocity.

    v = v_u + g (v_c - v_u)

The cotangent of the velocity is that of the log-probability up to a factor, eps /
numel.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contenders import Velocity
from benchmarks.workload import ETA, GUIDANCE_SCALE, NUM_STEPS, SHIFT, Inputs
from sage_fast.kernels import Kernels
from sage_fast.noise import NoiseKey, noise_ids
from sage_fast.sde import sigma_schedule, transition_table

STEP = 8
"""The sampler's step whose coefficients are used."""


def forward(velocity: Velocity, inputs: Inputs, kernels: Kernels) -> None:
    """One evaluation without a graph."""
    with torch.no_grad():
        velocity(inputs.latents, inputs.sigma, inputs.conditional)


def rollout(velocity: Velocity, inputs: Inputs, kernels: Kernels) -> None:
    """Guided velocity and one step of the sampler."""
    with torch.no_grad():
        step(guided(velocity, inputs), inputs, kernels)


def train(velocity: Velocity, inputs: Inputs, kernels: Kernels) -> None:
    """Guided velocity with both branches alive, and its product with the cotangent of
    the log-probability.
    """
    guided(velocity, inputs).backward(inputs.noise / inputs.noise.numel())


def train_split(velocity: Velocity, inputs: Inputs, kernels: Kernels) -> Tensor:
    """The same gradient with one branch alive at a time; the guided velocity, detached."""
    cotangent = inputs.noise / inputs.noise.numel()
    conditional = velocity(inputs.latents, inputs.sigma, inputs.conditional)
    conditional.backward(GUIDANCE_SCALE * cotangent)
    conditional = conditional.detach()
    uncond = velocity(inputs.latents, inputs.sigma, inputs.unconditional)
    uncond.backward((1.0 - GUIDANCE_SCALE) * cotangent)
    uncond = uncond.detach()
    return uncond + GUIDANCE_SCALE * (conditional - uncond)


def single_pass(velocity: Velocity, inputs: Inputs, kernels: Kernels) -> None:
    """A rollout step that leaves the gradient of its log-probability behind, so that no
    training step follows it.
    """
    step(train_split(velocity, inputs, kernels), inputs, kernels)


STEPS: dict[str, Callable[[Velocity, Inputs, Kernels], object]] = {
    function.__name__: function
    for function in (forward, rollout, train, train_split, single_pass)
}


def guided(velocity: Velocity, inputs: Inputs) -> Tensor:
    """v_u + g (v_c - v_u)."""
    conditional = velocity(inputs.latents, inputs.sigma, inputs.conditional)
    uncond = velocity(inputs.latents, inputs.sigma, inputs.unconditional)
    return uncond + GUIDANCE_SCALE * (conditional - uncond)


def step(velocity: Tensor, inputs: Inputs, kernels: Kernels) -> None:
    """The sampler's step; what follows from its result is not timed."""
    table = transition_table("sage_grpo", sigma_schedule(NUM_STEPS, SHIFT), ETA)
    key = NoiseKey(seed=0, update=0, prompt_index=0, sample_index=0)
    a, b, std = (float(column[STEP]) for column in (table.a, table.b, table.std))
    kernels.sde_step(
        inputs.latents, velocity, noise_ids([key], [STEP], velocity.device), a, b, std
    )
