"""Trainings of the exact policy: every sampler, KL and update rule of the project, in
half a second each.

Samples and gradients use the trainer's parts: transitions of `sde.transition_table`,
advantages and loss of `objective`. The trained policy is judged by its weights,
exactly: no evaluation has noise. There is no network to optimize, so nothing here
speaks of capacity, or of how well a velocity is learnt.

An objective that is judged at a learning rate that suits another one is misjudged. So
an arm is tried at several rates, with seeds that take no part in its judgement, and
judged at the best of them.

Shapes: B videos of an update, D coordinates of a video, K attributes of a caption, P
trained numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from experiments.exact_policy import ExactWorld, LearnablePolicy
from experiments.findings import PER_PROMPT, Finding, unsteadiness
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import (
    ForwardProcessConfig,
    KLWeightConfig,
    ObjectiveConfig,
    VideoConfig,
)
from sage_fast.kernels import PolicyTerms
from sage_fast.objective import (
    ADVANTAGE_CLIP,
    anchor_kind,
    group_advantages,
    initial_kl_weight,
    next_kl_weight,
    policy_loss,
)
from sage_fast.objectives.forward_process import forward_loss
from sage_fast.objectives.grpo import weighted_kl
from sage_fast.sde import TransitionTable, sigma_schedule, transition_table

ANCHOR_EVERY = 10
"""Updates after which a moving anchor is refreshed."""
TRIALS = range(1000, 1004)
"""Seeds that choose a learning rate."""
SLOWEST = 0.005
FASTEST = 0.64
"""The learning rates beyond which none is tried."""


@dataclass(frozen=True, kw_only=True)
class ExactTraining:
    """One training. The defaults are the recipe of the paper in miniature; a name says
    what differs.

    Attributes:
        update: `reverse` is the paper's objective, on the steps of the rollout;
            `forward` weighs flow matching on the rollout's videos by their advantage.
        videos: of one caption.
        equalizer, kl_mode: of `ObjectiveConfig`.
        kl_weight: lambda, constant; with kl_warmup it rises from a hundredth of that
            over so many updates, and then follows the trainer's controller.
        quality: what a unit of distance to the nearest legal video costs; a caption
            that is followed earns 1.
        exploit: reward per unit of drift, which a flawed reward pays.
        levels: noise levels per video. This and what follows is of `forward` alone.
        weighting: of `ForwardProcessConfig`.
        spacing: of the levels, as the sampler's shift has them, or uniform in sigma.
        beta: weight of the pull to the old policy.
        old_decay: of the moving average that samples; 0 is the policy itself.
    """

    sampler: str = "sage_grpo"
    num_steps: int = 8
    shift: float = 3.0
    eta: float = 0.5
    captions: int = 4
    videos: int = 16
    num_updates: int = 40
    updates_per_rollout: int = 1
    learning_rate: float = 0.02
    rotated: bool = True
    update: Literal["reverse", "forward"] = "reverse"
    equalizer: bool = True
    clip_range: float = 1e-2
    kl_mode: Literal["none", "fixed", "stepwise", "moving", "dual"] = "none"
    kl_weight: float = 0.0
    kl_warmup: int = 0
    quality: float = 1.0
    exploit: float = 0.0
    levels: int = 4
    weighting: Literal["adaptive", "branches", "velocity"] = "adaptive"
    spacing: Literal["shifted", "uniform"] = "shifted"
    beta: float = 1.0
    old_decay: float = 0.0


class Rollout(NamedTuple):
    """Videos and how they were made: latents, velocities and noises of every step, each
    (B, D), and the results.
    """

    latents: list[Tensor]
    velocities: list[Tensor]
    noises: list[Tensor]
    final: Tensor


@torch.no_grad()
def sample(
    policy: LearnablePolicy,
    psi: Tensor,
    captions: Tensor,
    table: TransitionTable,
    generator: torch.Generator,
) -> Rollout:
    """Sample a video for each of the captions (B, K)."""

    def draw() -> Tensor:
        return torch.randn(
            len(captions),
            policy.atoms.shape[1],
            generator=generator,
            dtype=policy.atoms.dtype,
        )

    x = draw()
    latents = []
    velocities = []
    noises = []
    for step in range(table.num_steps):
        a, b, std = (float(column[step]) for column in (table.a, table.b, table.std))
        velocity = policy.velocity_at(
            psi, captions, x, table.sigmas[step].expand(len(x))
        )
        noise = draw()
        latents.append(x)
        velocities.append(velocity)
        noises.append(noise)
        x = a * x + b * velocity + std * noise
    return Rollout(latents, velocities, noises, x)


def reverse_loss(
    policy: LearnablePolicy,
    psi: Tensor,
    captions: Tensor,
    rollout: Rollout,
    table: TransitionTable,
    advantages: Tensor,
    settings: ObjectiveConfig,
    *,
    kl_weight: float = 0.0,
    anchor: Tensor | None = None,
    steps: Sequence[int] | None = None,
) -> PolicyTerms:
    """Terms of the loss (steps B,) at the trained steps. anchor: numbers psi of the
    anchor.
    """
    chosen = [
        step
        for step in (range(table.num_steps) if steps is None else steps)
        if table.trainable[step]
    ]

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([values[step] for step in chosen])

    x = stacked(rollout.latents)
    asked = captions.repeat(len(chosen), 1)
    each = len(captions)
    sigma = table.sigmas[:-1][chosen].repeat_interleave(each)
    with torch.no_grad():
        held = None if anchor is None else policy.velocity_at(anchor, asked, x, sigma)
    names = {
        "gain": table.gain,
        "std": table.std,
        "scale": table.scale,
        "size": -table.sigmas.diff(),
    }
    columns = {
        name: column[chosen].to(x).repeat_interleave(each)
        for name, column in names.items()
    }
    return policy_loss(
        policy.velocity_at(psi, asked, x, sigma),
        stacked(rollout.velocities),
        held,
        stacked(rollout.noises),
        **columns,
        advantage=advantages.repeat(len(chosen)),
        kl_weight=kl_weight,
        settings=settings,
    )


def noised_loss(
    policy: LearnablePolicy,
    psi: Tensor,
    old: Tensor,
    captions: Tensor,
    final: Tensor,
    advantages: Tensor,
    sigmas: Tensor,
    generator: torch.Generator,
    settings: ForwardProcessConfig,
) -> Tensor:
    """Loss of the forward process at noise levels sigmas (L, B), mean over levels and
    videos.
    """
    levels = len(sigmas)
    sigma = sigmas.flatten().to(final)
    asked = captions.repeat(levels, 1)
    x0 = final.repeat(levels, 1)
    z = torch.randn(x0.shape, generator=generator, dtype=final.dtype)
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * z
    with torch.no_grad():
        v_old = policy.velocity_at(old, asked, x, sigma)
    return forward_loss(
        policy.velocity_at(psi, asked, x, sigma),
        z - x0,
        v_old,
        None,
        sigma=sigma,
        advantage=advantages.repeat(levels),
        anchor_weight=0.0,
        settings=settings,
    ).loss.mean()


def train(
    policy: LearnablePolicy, settings: ExactTraining, seed: int
) -> dict[str, float]:
    """Train from the start with one seed; quantities of the result.

    Those that begin with `final_` are exact. `area`: reward of the rollouts, mean over
    the training; `unsteadiness`: its standard deviation from update to update without
    its trend; `group_spread`: that of the rewards of a caption's videos, mean over the
    second half.
    """
    # Two generators: settings that draw more noise are asked for the same captions.
    asking, drawing = (torch.Generator().manual_seed(2 * seed + i) for i in (0, 1))
    psi = policy.initial().requires_grad_()
    objective = ObjectiveConfig(
        equalizer=settings.equalizer,
        clip_range=settings.clip_range,
        kl_mode=settings.kl_mode,
    )
    process = ForwardProcessConfig(weighting=settings.weighting, beta=settings.beta)
    old = policy.initial()
    anchor = policy.initial()
    optimizer = torch.optim.Adam([psi], lr=settings.learning_rate)
    sampler = settings.sampler if settings.update == "reverse" else "ode"
    table = transition_table(
        sampler, sigma_schedule(settings.num_steps, settings.shift), settings.eta
    )
    kind = anchor_kind(settings.kl_mode)
    least = settings.kl_weight / (100 if settings.kl_warmup else 1)
    weights = KLWeightConfig(
        minimum=least, maximum=settings.kl_weight, warmup_updates=settings.kl_warmup
    )
    weight = initial_kl_weight(weights)
    rewards = list[float]()
    spreads = list[float]()
    done = 0
    while done < settings.num_updates:
        asked = torch.stack(
            [
                torch.randint(n, (settings.captions,), generator=asking)
                for n in policy.sizes
            ],
            1,
        )
        captions = asked.repeat_interleave(settings.videos, 0)
        if kind == "moving" and done % ANCHOR_EVERY == 0:
            anchor = psi.detach().clone()
        sampling = old if settings.old_decay else psi.detach().clone()
        rollout = sample(policy, sampling, captions, table, drawing)
        scores = _reward(policy, captions, rollout.final, settings).view(
            -1, settings.videos
        )
        advantages = group_advantages(scores, clip=ADVANTAGE_CLIP).advantages.flatten()
        rewards.append(float(scores.mean()))
        spreads.append(float(scores.std(1).mean()))
        for part in _parts(settings, table, drawing):
            if settings.update == "forward":
                loss = noised_loss(
                    policy,
                    psi,
                    sampling,
                    captions,
                    rollout.final,
                    advantages,
                    part,
                    drawing,
                    process,
                )
            else:
                terms = reverse_loss(
                    policy,
                    psi,
                    captions,
                    rollout,
                    table,
                    advantages,
                    objective,
                    steps=[int(step) for step in part],
                    kl_weight=weight.weight,
                    anchor=None if kind == "none" else anchor,
                )
                loss = terms.loss.mean()
                weight = next_kl_weight(weight, weighted_kl(terms, objective), weights)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([psi], 1.0)
            optimizer.step()
            done += 1
        old = settings.old_decay * old + (1 - settings.old_decay) * psi.detach()
    psi = psi.detach()
    drift = float(policy.drift(psi))
    # Overall = TA + VQ + MQ; what is seen and how it moves suffer alike from the
    # distance to the legal videos.
    overall = (
        float(policy.followed(psi).mean()) - 2 * drift / policy.atoms.shape[1] ** 0.5
    )
    exact = {"aligned": float(policy.aligned(psi)), "drift": drift, "overall": overall}
    curves = {"area": fmean(rewards), "unsteadiness": unsteadiness(rewards)}
    curves["group_spread"] = fmean(spreads[len(spreads) // 2 :])
    return {PER_PROMPT + name: value for name, value in exact.items()} | curves


def _reward(
    policy: LearnablePolicy, captions: Tensor, final: Tensor, settings: ExactTraining
) -> Tensor:
    """Attributes as asked for, mean; less the distance to the nearest legal video; and
    what a flaw pays.
    """
    rows, distance = policy.nearest(final)
    follows = (policy.attributes[rows] == captions).to(final).mean(1)
    return (
        follows
        - settings.quality * distance
        + settings.exploit * (final @ policy.directions[0])
    )


def _parts(
    settings: ExactTraining, table: TransitionTable, generator: torch.Generator
) -> list[Tensor]:
    """Trained steps of each update of a rollout, or its noise levels (L, B), a stratum
    of each video's.
    """
    if settings.update == "reverse":
        steps = table.trainable.nonzero()[:, 0]
        parts = steps[torch.randperm(len(steps), generator=generator)]
    else:
        shape = (settings.levels, settings.captions * settings.videos)
        stratum = torch.arange(settings.levels)[:, None]
        parts = (stratum + torch.rand(shape, generator=generator)) / settings.levels
        if settings.spacing == "shifted":
            parts = settings.shift * parts / (1 + (settings.shift - 1) * parts)
        parts = parts.clamp(0.02, 0.995)
    each = settings.updates_per_rollout
    return [parts[first::each] for first in range(each)]


def measure_testbed(
    config: RunConfig,
    *,
    seed: int,
    experiment: str,
    runs: Mapping[str, Mapping[str, Any]],
    rates: Sequence[float] = (),
) -> Iterator[Finding]:
    """Trainings of the exact policy with one seed: the arms of an experiment by name,
    each at its best rate if any are given; then seed 0 has those that chose it too, as
    `ARM @ RATE`.
    """
    sizes = (config.video.num_frames, config.video.height, config.video.width)
    for arm, options in runs.items():
        settings = ExactTraining(**options)
        results: list[tuple[str, int, dict[str, float]]] = []
        if rates:
            tried = try_rates(sizes, settings, tuple(rates))
            settings = replace(settings, learning_rate=best_rate(tried))
            if seed == 0:
                results = [
                    (f"{arm} @ {rate:g}", *one)
                    for rate in tried
                    for one in zip(TRIALS, tried[rate], strict=True)
                ]
        result = train(_policy(sizes, settings.rotated), settings, seed)
        for name, of, values in [
            (arm, seed, result | {"rate": settings.learning_rate}),
            *results,
        ]:
            for quantity, value in values.items():
                yield Finding(
                    experiment=experiment,
                    arm=name,
                    seed=of,
                    quantity=quantity,
                    value=value,
                    n=settings.captions * settings.videos,
                )


@lru_cache
def try_rates(
    sizes: tuple[int, int, int], settings: ExactTraining, rates: tuple[float, ...]
) -> dict[float, list[dict[str, float]]]:
    """Results of the `TRIALS` at every learning rate, and at half or twice the best one
    while that lies at an edge.
    """
    tried: dict[float, list[dict[str, float]]] = {}
    while rates:
        for rate in rates:
            at_rate = replace(settings, learning_rate=rate)
            tried[rate] = [
                train(_policy(sizes, settings.rotated), at_rate, seed)
                for seed in TRIALS
            ]
        best = best_rate(tried)
        rates = tuple(
            r
            for r in (best / 2, best * 2)
            if r not in tried and SLOWEST <= r <= FASTEST
        )
    return dict(sorted(tried.items()))


def best_rate(tried: Mapping[float, Sequence[Mapping[str, float]]]) -> float:
    """The rate with the highest overall score, which a flaw of the trained reward does
    not pay.
    """
    return max(
        tried,
        key=lambda rate: fmean(
            result[PER_PROMPT + "overall"] for result in tried[rate]
        ),
    )


@lru_cache
def _policy(sizes: tuple[int, int, int], rotated: bool) -> LearnablePolicy:
    frames, height, width = sizes
    video = VideoConfig(num_frames=frames, height=height, width=width)
    return ExactWorld(video).learnable(rotated=rotated)
