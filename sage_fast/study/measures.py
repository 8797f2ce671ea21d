"""What a study measures without training: tables of samplers, the exact policy, the base model, gradients of steps.

As a program it makes one such measurement in a process of its own:

    python -m sage_fast.study.measures RESULT.json '{"measure": "gradients", "seed": 0, ...}' CONFIG ...
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing
from sage_fast.config.load import load_config
from sage_fast.config.registry import EXACT_POLICIES, resolve
from sage_fast.config.rollout_sections import SDEType, VideoConfig
from sage_fast.config.schema import RunConfig
from sage_fast.noise import NoiseKey
from sage_fast.records import Prompt, PromptEmbeds, Sample, Trajectory
from sage_fast.rollout import initial_latents, sample_trajectory
from sage_fast.run.provenance import describe_environment
from sage_fast.run.run import build_trainer
from sage_fast.sde import SAGE_SIGMA_MARGIN, TransitionTable, sigma_schedule, transition_table
from sage_fast.study.findings import Finding, made_with

SAMPLERS: tuple[SDEType, ...] = ("sage_grpo", "sage_exact", "flow_grpo", "dance_grpo", "cps")
"""The noisy ones, in the order of every table."""

STEPS, SHIFT, ETA = 20, 5.0, 0.5
"""The reference's rollout."""

HIGH_NOISE = 0.9
"""Noise level from which a step counts to the region of high noise."""


class ExactSampling(Protocol):
    """The perfect policy of a family's data, and what it measures of a sampler."""

    latent_shape: tuple[int, int, int, int]

    def __init__(self, video: VideoConfig) -> None: ...

    def velocity(self, step: int, latents: Tensor, sigma: Tensor) -> Tensor:
        """Velocity (B, C, F, H, W) of B latents at noise levels (B,)."""
        ...

    def measure(self, trajectory: Trajectory, group: int) -> Any:
        """A dataclass of numbers about samples of which each `group` consecutive ones have one start."""
        ...


def exact_sampling(config: RunConfig) -> ExactSampling | None:
    """The perfect policy of a configuration's data, None where nobody knows it."""
    if config.model.family not in EXACT_POLICIES:
        return None
    made: ExactSampling = resolve(config.model.family, EXACT_POLICIES, "model.family")(config.video)
    return made


# ------------------------------------------------------------------------------------------------ tables


def high_noise_variance(table: TransitionTable) -> float:
    """Sum of the variances of the steps that begin at or above `HIGH_NOISE`."""
    return float(table.std[table.sigmas[:-1] >= HIGH_NOISE].square().sum())


def noise_over_steps(experiment: str = "table1") -> Iterator[Finding]:
    """Noise of every step at the reference's shift, for several numbers of steps."""
    for steps in (10, 20, 40, 100):
        for sampler in SAMPLERS:
            table = transition_table(sampler, sigma_schedule(steps, SHIFT), ETA)
            yield from _noise_of(experiment, f"{sampler}, T={steps}", table)


def noise_at_the_reference(experiment: str = "fig1a") -> Iterator[Finding]:
    """Noise of every step at the reference's settings."""
    for sampler in SAMPLERS:
        yield from _noise_of(experiment, sampler, transition_table(sampler, sigma_schedule(STEPS, SHIFT), ETA))


def noise_over_schedules(experiment: str = "fig9") -> Iterator[Finding]:
    """Noise over time shifts, and over the margin at sigma = 1 that only one sampler has."""
    for shift in (1.0, 3.0, 5.0, 7.0, 9.0):
        for sampler in SAMPLERS:
            table = transition_table(sampler, sigma_schedule(STEPS, shift), ETA)
            yield from _noise_of(experiment, f"{sampler}, shift={shift:g}", table)
    for margin in (1e-3, 2e-3, SAGE_SIGMA_MARGIN, 5e-3, 1e-2):
        table = transition_table("sage_grpo", sigma_schedule(STEPS, SHIFT), ETA, sage_margin=margin)
        yield from _noise_of(experiment, f"sage_grpo, margin={margin:g}", table)


def _noise_of(experiment: str, arm: str, table: TransitionTable) -> Iterator[Finding]:
    std = tuple(table.std.tolist())
    values = {"std": max(std), "last": std[-1], "first": std[0], "high_noise_variance": high_noise_variance(table)}
    for quantity, value in values.items():
        yield Finding(
            experiment=experiment,
            quantity=quantity,
            arm=arm,
            value=value,
            n=table.num_steps,
            parts=std if quantity == "std" else (),
        )


TABLES = {"table1": noise_over_steps, "fig1a": noise_at_the_reference, "fig9": noise_over_schedules}
"""Experiments that need no sample."""


# ------------------------------------------------------------------------------------------------ exact policy


def sample_exactly(
    world: ExactSampling, table: TransitionTable, *, seed: int, starts: int, members: int
) -> dict[str, float]:
    """Measures of a sampler on the exact policy: `members` samples from each of `starts` initial noises."""
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=Prompt(text="", index=start), embeds=embeds, member=member)
        for start in range(starts)
        for member in range(members)
    ]
    keys = [NoiseKey(seed=seed, update=0, prompt_index=s.prompt.index, sample_index=s.member) for s in samples]
    initial = initial_latents(keys, world.latent_shape, group=members)
    trajectory = sample_trajectory(world.velocity, samples, keys, table, initial)
    return {name: float(value) for name, value in asdict(world.measure(trajectory, members)).items()}


OF_GROUPS = ("exploration", "group_spread")
"""Measures of the samples of one start; the others are taken from samples that have each a start of its own."""


def measure_exact_policy(
    config: RunConfig,
    *,
    seed: int,
    starts: int = 96,
    groups: int = 3,
    members: int = 32,
    steps: Sequence[int] = (8, STEPS),
    etas: Sequence[float] = (0.25, ETA, 0.75),
) -> Iterator[Finding]:
    """Samplers on the exact policy: all measures at the reference's settings, and the frontier over steps and eta."""
    world = exact_sampling(config)
    if world is None:
        raise ConfigError(f"model.family {config.model.family!r} has no exact policy: leave fig2 out of --only.")
    for num_steps in steps:
        for eta in etas:
            for sampler in SAMPLERS if eta != ETA else ("ode", *SAMPLERS):
                table = transition_table(sampler, sigma_schedule(num_steps, SHIFT), eta)
                found = sample_exactly(world, table, seed=seed, starts=groups, members=members)
                n = groups * members
                if (num_steps, eta) == (STEPS, ETA):
                    single = sample_exactly(world, table, seed=seed, starts=starts, members=1)
                    found = single | {name: found[name] for name in OF_GROUPS}
                for quantity, value in found.items():
                    count = n if quantity in OF_GROUPS or (num_steps, eta) != (STEPS, ETA) else starts
                    arm = f"{sampler}, T={num_steps}, eta={eta:g}"
                    yield Finding(experiment="fig2", quantity=quantity, arm=arm, seed=seed, value=value, n=count)


# ------------------------------------------------------------------------------------------------ base model


def measure_rollouts(config: RunConfig, *, seed: int, samplers: Sequence[SDEType] = SAMPLERS) -> Iterator[Finding]:
    """Rewards of one rollout of the base model: the mean of each score, and how far those of a group spread."""
    for sampler in samplers:
        trainer = build_trainer(replace(config, seed=seed, rollout=replace(config.rollout, sde_type=sampler)))
        try:
            metrics = trainer.measure_rollout()
        finally:
            trainer.reward.close()
        means = {key: value for key, value in metrics.items() if key.startswith("reward/") and key.endswith("mean")}
        values = {key.removeprefix("reward/").removesuffix("_mean"): value for key, value in means.items()}
        values |= {"reward": values.pop("mean"), "group_std": metrics["advantage/group_std"]}
        for quantity, value in values.items():
            yield Finding(
                experiment="base",
                quantity=quantity,
                arm=sampler,
                seed=seed,
                value=value,
                n=config.rollout.batch_size,
            )


# ------------------------------------------------------------------------------------------------ gradients


def measure_gradients(config: RunConfig, *, seed: int, samplers: Sequence[SDEType] = SAMPLERS) -> Iterator[Finding]:
    """Gradient norm of every step of one rollout of the base model, with the equalizer and without it."""
    config = replace(
        config,
        seed=seed,
        training=replace(config.training, permute_timesteps=False, update="two_phase"),
    )
    for sampler in samplers:
        for equalizer in (False, True):
            one = replace(
                config,
                rollout=replace(config.rollout, sde_type=sampler),
                objective=replace(
                    config.objective, kl_mode="none", equalizer=equalizer, ratio="gaussian", logprob="gaussian"
                ),
            )
            trainer = build_trainer(one)
            try:
                norms = trainer.step_gradient_norms()
            finally:
                trainer.reward.close()
            table = transition_table(sampler, sigma_schedule(one.rollout.num_steps, one.rollout.shift), one.rollout.eta)
            gains = [abs(float(table.gain[step])) for step in norms]
            common: dict[str, Any] = {
                "experiment": "fig4",
                "arm": f"{sampler}, {'equalizer' if equalizer else 'plain'}",
                "seed": seed,
                "n": one.rollout.batch_size,
            }
            values = tuple(norms.values())
            yield Finding(quantity="spread", value=max(values) / min(values), parts=values, **common)
            if not equalizer:
                yield Finding(quantity="slope", value=log_slope(gains, values), parts=tuple(gains), **common)


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x: 1 where y is proportional to x."""
    u, v = ([math.log(value) for value in column] for column in (x, y))
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    above = sum((p - mean_u) * (q - mean_v) for p, q in zip(u, v, strict=True))
    return above / sum((p - mean_u) ** 2 for p in u)


# ------------------------------------------------------------------------------------------------ time


def measure_speed(config: RunConfig, *, seed: int) -> Iterator[Finding]:
    """Seconds of one core for a rollout with its updates, and for an evaluation: what an estimate needs."""
    trainer = build_trainer(replace(config, seed=seed))
    try:
        start = time.process_time()
        trainer.iterate()
        middle = time.process_time()
        trainer.evaluate()
        end = time.process_time()
    finally:
        trainer.reward.close()
    for quantity, value in (("rollout", middle - start), ("evaluation", end - middle)):
        yield Finding(experiment="speed", quantity=quantity, arm="base", seed=seed, value=value)


MEASURES: Mapping[str, Callable[..., Iterator[Finding]]] = {
    "exact": measure_exact_policy,
    "rollouts": measure_rollouts,
    "gradients": measure_gradients,
    "speed": measure_speed,
}


def make_measurement(result: Path, request: Mapping[str, Any], files: Sequence[str]) -> None:
    """Make one measurement and write its findings, with the seconds of one core that it took.

    Args:
        request: `measure`, a key of `MEASURES`; `overrides`, `--section.key=value` words; the rest are its arguments.

    Raises:
        ConfigError: the configuration cannot run, or the measurement needs what its model family does not have.
    """
    torch.set_num_threads(1)
    arguments = dict(request)
    measure, overrides = MEASURES[arguments.pop("measure")], arguments.pop("overrides", [])
    config = replace(load_config(list(files), overrides), num_threads=1)
    start = time.process_time()
    rows = [asdict(row) for row in measure(config, **arguments)]
    seconds = time.process_time() - start
    tree = {"core_seconds": seconds, "made_with": made_with(describe_environment()), "findings": rows}
    with replacing(result) as partial:
        partial.write_text(json.dumps(tree), "utf-8")


def main(words: Sequence[str]) -> int:
    """The program: RESULT.json REQUEST CONFIG ..."""
    logging.basicConfig(level=logging.WARNING)
    try:
        make_measurement(Path(words[0]), json.loads(words[1]), words[2:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
