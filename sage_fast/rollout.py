"""Sampling: from initial noise to final latents, keeping what the policy update needs.

The noise of a sample is a function of (seed, update, prompt, member, step) and of nothing else, so the same videos
come out of one process or many, in any micro-batch, fresh or resumed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_fast.config.schema import RolloutConfig, SDEWindowConfig
from sage_fast.kernels import REFERENCE, Kernels
from sage_fast.noise import NoiseKey, initial_noise, noise_ids
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Sample, Trajectory
from sage_fast.sde import TransitionTable, sigma_schedule, transition_table

StepVelocity = Callable[[int, Tensor, Tensor], Tensor]
"""Called as velocity(step, latents, sigma) with the state (B, C, F, H, W) and noise levels (B,) of a sampler's step."""


def stochastic_steps(window: SDEWindowConfig, num_steps: int, rollout: int) -> list[int] | None:
    """Steps of rollout number `rollout` (from 0) that draw noise; None means all of them.

    A sliding window wraps around: with 8 steps, size 3 and start 6 it covers steps 6, 7 and 0.
    """
    if window.steps is not None:
        return sorted(window.steps)
    if window.size is None:
        return None
    first = window.start + (rollout // window.interval) * window.stride
    return sorted((first + i) % num_steps for i in range(window.size))


def rollout_table(config: RolloutConfig, rollout: int) -> TransitionTable:
    """Transition table of one rollout: the configured sampler, restricted to its SDE window."""
    table = transition_table(config.sde_type, sigma_schedule(config.num_steps, config.shift), config.eta)
    steps = stochastic_steps(config.sde_window, config.num_steps, rollout)
    return table if steps is None else table.restrict(steps)


def noise_keys(samples: Sequence[Sample], seed: int, update: int) -> list[NoiseKey]:
    """The key of each sample's noise; a prompt's own seed replaces the run's."""
    return [
        NoiseKey(
            seed=seed if s.prompt.seed is None else s.prompt.seed,
            update=update,
            prompt_index=s.prompt.index,
            sample_index=s.member,
        )
        for s in samples
    ]


@torch.no_grad()
def sample_trajectory(
    policy: GuidedPolicy,
    samples: Sequence[Sample],
    table: TransitionTable,
    latent_shape: tuple[int, int, int, int],
    *,
    seed: int,
    update: int,
    initial_noise_group: int = 1,
    device: torch.device | str = "cpu",
    kernels: Kernels = REFERENCE,
    velocity: StepVelocity | None = None,
) -> Trajectory:
    """Generate one micro-batch of latents.

    Args:
        samples: B records.
        table: the sampler; an `ode` table draws no noise after the initial one.
        latent_shape: (C, F, H, W).
        kernels: how the step is computed.
        seed, update: together with each sample's prompt and member they determine all noise.
        initial_noise_group: so many consecutive members of a prompt start from the same noise.
        velocity: called instead of `policy.velocity`, by who wants more of a step than its velocity.

    Returns:
        Trajectory whose tensors are float32 on `device`.
    """
    keys = noise_keys(samples, seed, update)
    start_keys = [replace(k, sample_index=k.sample_index // initial_noise_group * initial_noise_group) for k in keys]
    embeds = [s.embeds for s in samples]
    latents, velocities = [], []
    x = initial_noise(start_keys, latent_shape, device=device)
    for step in range(table.num_steps):
        sigma = step_sigma(table, [step] * len(samples))
        v = velocity(step, x, sigma) if velocity else policy.velocity(x, sigma, embeds)
        latents.append(x)
        velocities.append(v)
        a, b, std = (float(column[step]) for column in (table.a, table.b, table.std))
        x = kernels.sde_step(x, v, noise_ids(keys, [step] * len(keys), x.device) if std else None, a, b, std)
    return Trajectory(samples=list(samples), keys=keys, table=table, latents=latents, velocities=velocities, final=x)


def step_sigma(table: TransitionTable, steps: Sequence[int]) -> Tensor:
    """Noise levels (B,) float32 of the given steps, on the CPU, for the model's time input."""
    return table.sigmas[list(steps)].float()


@dataclass(frozen=True, kw_only=True)
class TrajectoryStep:
    """One step of every sample of a micro-batch; the steps may differ from sample to sample.

    latents, velocity: (B, C, F, H, W) float32. steps: B indices; with the samples' keys they stand for the noise that
    the rollout drew. gain, std, scale: (B,) float32. sigma: (B,) float32 on the CPU.

    Example: with permuted timesteps, sample 0 may be at step 5 (sigma 0.64) while sample 1 is at step 2 (sigma 0.9).
    """

    latents: Tensor
    velocity: Tensor
    steps: Sequence[int]
    sigma: Tensor
    gain: Tensor
    std: Tensor
    scale: Tensor


def gather_latents(trajectory: Trajectory, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """State (B, C, F, H, W) and noise level (B,) of step `steps[b]` of sample b."""
    latents = torch.stack([trajectory.latents[i][b] for b, i in enumerate(steps)])
    return latents, step_sigma(trajectory.table, steps)


def gather_step(trajectory: Trajectory, steps: Sequence[int]) -> TrajectoryStep:
    """Collect step `steps[b]` of sample b."""
    latents, _ = gather_latents(trajectory, steps)
    velocity = torch.stack([trajectory.velocities[i][b] for b, i in enumerate(steps)])
    return trajectory_step(trajectory.table, steps, latents, velocity)


def trajectory_step(table: TransitionTable, steps: Sequence[int], latents: Tensor, velocity: Tensor) -> TrajectoryStep:
    """The record of step `steps[b]` of sample b, whose state and velocity (B, C, F, H, W) are given."""

    def column(values: Tensor) -> Tensor:
        return values[list(steps)].to(device=latents.device, dtype=torch.float32)

    return TrajectoryStep(
        latents=latents,
        velocity=velocity,
        steps=list(steps),
        sigma=step_sigma(table, steps),
        gain=column(table.gain),
        std=column(table.std),
        scale=column(table.scale),
    )


def micro_batches(samples: Sequence[Sample], size: int) -> Iterable[Sequence[Sample]]:
    """Consecutive slices of `size` samples; the last may be shorter."""
    return (samples[i : i + size] for i in range(0, len(samples), size))
