"""Measurements without training: tables of samplers, the exact policy, the base model,
gradients of steps.

As a program it makes one such measurement in its own process:

    python -m experiments.measures RESULT.jsonl '{"measure": "gradients", "seeds": [0], "overrides": []}' CONFIG ...
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from experiments.exact_policy import ExactWorld
from experiments.findings import (
    COST,
    Finding,
    made_with,
    settings_digest,
    write_findings,
)
from experiments.testbed import measure_testbed
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig, settings_of, to_dict
from sage_fast.noise import NoiseKey
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rollout import initial_latents, rollout_table, sample_trajectory
from sage_fast.run.provenance import describe_environment
from sage_fast.run.run import build_trainer
from sage_fast.sde import (
    SAGE_SIGMA_MARGIN,
    TransitionTable,
    sigma_schedule,
    transition_table,
)

SAMPLERS: tuple[str, ...] = (
    "sage_grpo",
    "sage_exact",
    "flow_grpo",
    "dance_grpo",
    "cps",
)
"""The noisy ones, in the order of every table."""

STEPS = 20
SHIFT = 5.0
ETA = 0.5
"""The reference's rollout."""

HIGH_NOISE = 0.9
"""Noise level from which the variances of steps are summed up as `high_noise_variance`.
"""


TABLES: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "table1": {
        f"{name}, T={steps}": (name, {"steps": steps})
        for steps in (10, 20, 40, 100)
        for name in SAMPLERS
    },
    "fig1a": {name: (name, {}) for name in SAMPLERS},
    "fig9": {
        **{
            f"{name}, shift={shift:g}": (name, {"shift": shift})
            for shift in (1, 3, 5, 7, 9)
            for name in SAMPLERS
        },
        **{
            f"sage_grpo, margin={margin:g}": ("sage_grpo", {"sage_margin": margin})
            for margin in (1e-3, 2e-3, SAGE_SIGMA_MARGIN, 5e-3, 1e-2)
        },
        "sage_grpo, eta=1": ("sage_grpo", {"eta": 1.0}),
        "flow_grpo, eta=1, from 0.997": ("flow_grpo", {"eta": 1.0, "begin": 0.997}),
    },
}
"""Experiments that need no sample: arm -> sampler, and what differs from the
reference's rollout.
"""


def noise_of_steps(experiment: str) -> Iterator[Finding]:
    """Noise of every step of the arms of one of the `TABLES`."""
    for arm, (sampler, options) in TABLES[experiment].items():
        margin = {key: value for key, value in options.items() if key == "sage_margin"}
        schedule = sigma_schedule(
            options.get("steps", STEPS), options.get("shift", SHIFT)
        )
        schedule[0] = options.get("begin", 1.0)
        table = transition_table(sampler, schedule, options.get("eta", ETA), **margin)
        std = tuple(table.std.tolist())
        high = float(table.std[table.sigmas[:-1] >= HIGH_NOISE].square().sum())
        values = {
            "std": max(std),
            "last": std[-1],
            "first": std[0],
            "high_noise_variance": high,
        }
        for quantity, value in values.items():
            parts = std if quantity == "std" else ()
            yield Finding(
                experiment=experiment,
                quantity=quantity,
                arm=arm,
                value=value,
                n=len(std),
                parts=parts,
            )


# --------------------------------------------------------------------------------------
# exact policy


def sample_exactly(
    world: Any, table: TransitionTable, *, seed: int, starts: int, members: int
) -> dict[str, float]:
    """Measures of a sampler on the exact policy: `members` samples from each of
    `starts` initial noises.
    """
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=Prompt(text="", index=start), embeds=embeds, member=member)
        for start in range(starts)
        for member in range(members)
    ]
    keys = [
        NoiseKey(
            seed=seed, update=0, prompt_index=s.prompt.index, sample_index=s.member
        )
        for s in samples
    ]
    initial = initial_latents(keys, world.latent_shape, kind="shared", members=members)
    trajectory = sample_trajectory(world.velocity, samples, keys, table, initial)
    return {
        name: float(value)
        for name, value in asdict(world.measure(trajectory, members)).items()
    }


OF_GROUPS = ("exploration", "group_spread")
"""Measures of the samples of one start; the others are taken from samples with a start
each.
"""


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
    """Samplers on the exact policy: all measures at the reference's settings, and the
    frontier over steps and eta.
    """
    world = ExactWorld(config.video)
    for num_steps in steps:
        for eta in etas:
            for sampler in SAMPLERS if eta != ETA else ("ode", *SAMPLERS):
                table = transition_table(sampler, sigma_schedule(num_steps, SHIFT), eta)
                found = sample_exactly(
                    world, table, seed=seed, starts=groups, members=members
                )
                counts = dict.fromkeys(found, groups * members)
                if (num_steps, eta) == (STEPS, ETA):
                    single = sample_exactly(
                        world, table, seed=seed, starts=starts, members=1
                    )
                    for quantity in single.keys() - set(OF_GROUPS):
                        found[quantity] = single[quantity]
                        counts[quantity] = starts
                for quantity, value in found.items():
                    yield Finding(
                        experiment="fig2",
                        quantity=quantity,
                        arm=f"{sampler}, T={num_steps}, eta={eta:g}",
                        seed=seed,
                        value=value,
                        n=counts[quantity],
                    )


# --------------------------------------------------------------------------------------
# base model


def measure_rollouts(
    config: RunConfig, *, seed: int, samplers: Sequence[str] = SAMPLERS
) -> Iterator[Finding]:
    """Rewards of one rollout of the base model: mean of each score, and the standard
    deviation in a group.
    """
    for sampler in samplers:
        rollout = replace(config.rollout, sde_type=sampler)
        # The iteration trains as few steps as it can: its update comes after the
        # metrics of the rollout.
        training = replace(config.training, timestep_fraction=1 / rollout.num_steps)
        metrics = _iterate(
            replace(config, seed=seed, rollout=rollout, training=training)
        )[0]
        values = {
            key.removeprefix("reward/").removesuffix("_mean"): value
            for key, value in metrics.items()
            if key.startswith("reward/") and key.endswith("mean")
        }
        values["reward"] = values.pop("mean")
        values["group_std"] = metrics["advantage/group_std"]
        for quantity, value in values.items():
            yield Finding(
                experiment="base",
                arm=sampler,
                seed=seed,
                n=rollout.batch_size,
                quantity=quantity,
                value=value,
            )


def measure_gradients(
    config: RunConfig, *, seed: int, samplers: Sequence[str] = SAMPLERS
) -> Iterator[Finding]:
    """Gradient norm of every step of one rollout of the base model, with the equalizer
    and without it.
    """
    for sampler in samplers:
        rollout = replace(config.rollout, sde_type=sampler)
        table = rollout_table(rollout, 0)
        steps = [
            step for step, trained in enumerate(table.trainable.tolist()) if trained
        ]
        # One update per step, too small to move the weights, so that each has the
        # gradient of its step at the base.
        training = replace(
            config.training,
            update="two_phase",
            permute_timesteps=False,
            updates_per_rollout=len(steps),
            num_updates=len(steps),
        )
        optimizer = replace(config.optimizer, learning_rate=1e-30)
        for equalizer in (False, True):
            objective = replace(
                config.objective, kl_mode="none", equalizer=equalizer, ratio="gaussian"
            )
            one = replace(
                config,
                seed=seed,
                rollout=rollout,
                training=training,
                optimizer=optimizer,
                objective=objective,
            )
            norms = tuple(_iterate(one)[1])
            gains = tuple(abs(float(table.gain[step])) for step in steps)
            arm = f"{sampler}, {'equalizer' if equalizer else 'plain'}"
            common: dict[str, Any] = {
                "experiment": "fig4",
                "arm": arm,
                "seed": seed,
                "n": rollout.batch_size,
            }
            yield Finding(
                quantity="spread", value=max(norms) / min(norms), parts=norms, **common
            )
            if not equalizer:
                # Of log norm over log gain: 1 where the norm is proportional to the
                # gain.
                slope = linear_regression(
                    [math.log(gain) for gain in gains],
                    [math.log(norm) for norm in norms],
                ).slope
                yield Finding(quantity="slope", value=slope, parts=gains, **common)


def _iterate(config: RunConfig) -> tuple[dict[str, float], list[float]]:
    """Run one iteration of a new run; its metrics, and the gradient norm of every
    update.
    """
    trainer = build_trainer(config)
    norms: list[float] = []
    clip = trainer.engine.clip_gradients

    def noting() -> float:
        norms.append(clip())
        return norms[-1]

    trainer.engine.clip_gradients = noting  # type: ignore[method-assign]
    return trainer.iterate(), norms


MEASURES: Mapping[str, Callable[..., Iterator[Finding]]] = {
    "exact": measure_exact_policy,
    "rollouts": measure_rollouts,
    "gradients": measure_gradients,
    "testbed": measure_testbed,
}


def make_measurement(
    result: Path, request: Mapping[str, Any], files: Sequence[str]
) -> None:
    """Make one measurement and write its findings, with the seconds of one core that it
    took.

    Args:
        request: `measure`, a key of `MEASURES`; `seeds`; `overrides`,
            `--section.key=value` words; `arguments` of the measurement.

    Raises:
        ConfigError: the configuration cannot run.
    """
    torch.set_num_threads(1)
    measure = MEASURES[request["measure"]]
    arguments = request.get("arguments", {})
    config = load_config(list(files), request["overrides"])
    start = time.process_time()
    rows = [
        row
        for seed in request["seeds"]
        for row in measure(config, seed=seed, **arguments)
    ]
    first = rows[0]
    seconds = time.process_time() - start
    rows.append(
        Finding(
            experiment=first.experiment,
            quantity=COST,
            arm="all",
            seed=first.seed,
            value=seconds,
        )
    )
    made: dict[str, Any] = made_with(describe_environment())
    made["settings"] = settings_digest(settings_of(to_dict(config)))
    write_findings(result, [replace(row, **made) for row in rows])


def main(words: Sequence[str] | None = None) -> None:
    """Make the measurement that a command line asks for."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.measures",
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, help="file of the findings")
    parser.add_argument(
        "request",
        type=json.loads,
        help="what is measured, as JSON: see make_measurement",
    )
    parser.add_argument("config", nargs="+", help="the study's configuration")
    options = parser.parse_args(words)
    make_measurement(options.result, options.request, options.config)


if __name__ == "__main__":
    main()
