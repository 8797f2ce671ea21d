"""The table of experiments, in the paper's numbering: what is claimed, what is measured, and what settles it.

What the paper reports stands here only where a figure of it is known; the order that it claims is in the sentences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sage_fast.config.errors import ConfigError
from sage_fast.study.claims import Claim, Key, larger, smaller, within
from sage_fast.study.evidence import (
    REFERENCE,
    below_flow,
    last_smallest,
    less_in_high_noise,
    margin_decides,
    nearer_at_equal_exploration,
    slope_is_one,
    spread_over,
    steadier,
)
from sage_fast.study.measures import SAMPLERS
from sage_fast.study.training_arms import ANCHORED, ARMS, PLAIN, SHARES, TWICE, WEIGHTS, kl_arm, weight_arm
from sage_fast.study.trainings import Training

Tier = Literal["quick", "standard", "full"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full")
"""Each includes those before it."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper.

    caption: of its picture. seeds: of what it measures; none where nothing is random. measure: key of
    `measures.MEASURES`, for what needs samples but no training. seconds: of one core that it takes per seed in the toy
    world, for the order of the measurements and the time left. arms: of `ARMS`. drawn: what the picture of trainings
    shows. needs_manifold: left out where the data manifold is not known.

    Example: `experiment("fig4").seeds` is `(0, 1, 2)`.
    """

    key: str
    title: str
    tier: Tier
    caption: str
    claims: Sequence[Claim]
    seeds: tuple[int, ...] = ()
    measure: str | None = None
    seconds: float = 0.0
    arms: tuple[str, ...] = ()
    drawn: str = "final_reward"
    needs_manifold: bool = False

    def requests(self) -> dict[str, dict[str, Any]]:
        """Measurements by name; each is made in a process of its own."""
        if self.measure is None:
            return {}
        return {f"{self.key}-seed-{seed}": {"measure": self.measure, "seed": seed} for seed in self.seeds}

    def trainings(self) -> list[Training]:
        """Trainings, seed by seed, so that a study that is stopped early has all arms."""
        return [ARMS[arm](seed) for seed in self.seeds for arm in self.arms]


# ------------------------------------------------------------------------------------------------ the table

DISTANCE = "manifold_distance"
"""The score of `rewards.toy` that tells how far a video is from the data."""


def _at(name: str) -> str:
    return f"{name}, {REFERENCE}"


def _fig2_distance(name: str) -> Key:
    """The distance of a sampler's samples with the exact policy."""
    return "fig2", "distance", _at(name)


def _base_distance(name: str) -> Key:
    """And with the base model."""
    return "base", DISTANCE, name


def _ordered(experiment: str, quantity: str, prefix: str, digits: int = 3) -> list[Claim]:
    """SAGE against each of the others, in the order of the paper's Table 2."""
    names = {"cps": "CPS", "flow_grpo": "FlowGRPO", "dance_grpo": "DanceGRPO"}
    return [
        Claim(
            key=f"beats_{name}",
            text=f"SAGE reaches a higher score than {label} at equal eta.",
            measure=larger((experiment, quantity, f"{prefix}sage_grpo"), (experiment, quantity, prefix + name), digits),
            reported="the order; Overall of one row: 0.8067",
        )
        for name, label in names.items()
    ]


def _sage_nearer_than(other: str, label: str, distance: Callable[[str], Key]) -> Claim:
    return Claim(
        key=f"nearer_than_{other}",
        text=f"SAGE's samples lie nearer to the manifold than {label}'s.",
        measure=smaller(distance("sage_grpo"), distance(other), 4),
    )


def _exact_nearer(distance: Callable[[str], Key]) -> Claim:
    return Claim(
        key="exact_nearer",
        text="`sage_exact` lies nearer to the manifold than SAGE.",
        measure=smaller(distance("sage_exact"), distance("sage_grpo"), 4),
        by="this project",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        key="table1",
        title="Table 1: noise per step over the number of steps",
        tier="quick",
        caption="Shift 5, eta 0.5. Left: variance of all steps from sigma 0.9 up. Right: noise of the last step, which "
        "stays in the sample.",
        claims=(
            Claim(
                key="first",
                text="SAGE's first step has a smaller standard deviation than FlowGRPO's (T = 10, 20, 40, 100).",
                measure=below_flow(first=True),
            ),
            Claim(key="later", text="So has every later step.", measure=below_flow(first=False)),
            Claim(
                key="last",
                text="SAGE's last step, whose noise stays in the sample, has a smaller standard deviation than "
                "FlowGRPO's, and that than DanceGRPO's.",
                measure=last_smallest,
            ),
            Claim(
                key="stable",
                text="The variance that SAGE adds at high noise depends less on the number of steps than FlowGRPO's.",
                measure=spread_over("table1", "T="),
            ),
        ),
    ),
    Experiment(
        key="fig1a",
        title="Figure 1a: noise per step at the reference's settings",
        tier="quick",
        caption="Standard deviation of the noise of every step; T = 20, shift 5, eta 0.5.",
        claims=(
            Claim(
                key="high_noise",
                text="From sigma 0.9 up SAGE adds less variance than FlowGRPO.",
                measure=less_in_high_noise,
            ),
            Claim(
                key="steady",
                text="Within a rollout SAGE's noise is steadier (largest over smallest step) than FlowGRPO's and "
                "DanceGRPO's.",
                measure=steadier,
            ),
        ),
    ),
    Experiment(
        key="fig9",
        title="Figure 9: noise over the time shift and the margin",
        tier="quick",
        caption="T = 20, eta 0.5. Left: variance of all steps from sigma 0.9 up. Right: SAGE's steps by the margin at "
        "sigma = 1.",
        claims=(
            Claim(
                key="stable",
                text="The variance that SAGE adds at high noise depends less on the shift than FlowGRPO's.",
                measure=spread_over("fig9", "shift="),
            ),
            Claim(
                key="margin",
                text="The margin that keeps SAGE's first step finite decides its variance, which changes more than "
                "tenfold from margin 0.001 to 0.01.",
                measure=margin_decides,
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="fig2",
        title="Figure 2: exploration near the manifold, with the exact policy",
        tier="quick",
        seeds=(0, 1, 2, 3, 4),
        measure="exact",
        seconds=80,
        needs_manifold=True,
        caption="Left and middle: distance from the nearest legal video (in latents; dashed: the data's own 0.02) "
        "against the number of distinct videos that 32 samples from one start reach, for eta 0.25, 0.5 and 0.75. "
        "Right: distance at T = 20 and eta 0.5. `sage_exact` draws nearly all its noise anew in its first step; "
        "samples of one start share little of it.",
        claims=(
            _sage_nearer_than("flow_grpo", "FlowGRPO", _fig2_distance),
            _sage_nearer_than("dance_grpo", "DanceGRPO", _fig2_distance),
            _sage_nearer_than("cps", "CPS", _fig2_distance),
            Claim(
                key="explores",
                text="From one start SAGE reaches more distinct videos than FlowGRPO at equal eta.",
                measure=larger(("fig2", "exploration", _at("sage_grpo")), ("fig2", "exploration", _at("flow_grpo")), 1),
            ),
            Claim(
                key="frontier",
                text="Where both reach as many videos from one start (T = 20), SAGE lies nearer to the manifold than "
                "FlowGRPO.",
                measure=nearer_at_equal_exploration,
            ),
            _exact_nearer(_fig2_distance),
            Claim(
                key="exact_explores",
                text="`sage_exact` reaches more distinct videos from one start than SAGE.",
                measure=larger(
                    ("fig2", "exploration", _at("sage_exact")), ("fig2", "exploration", _at("sage_grpo")), 1
                ),
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="base",
        title="Five samplers on the base model, before training",
        tier="quick",
        seeds=(0, 1, 2, 3, 4),
        measure="rollouts",
        seconds=25,
        caption="One rollout of the base model by each sampler at equal eta and steps, the same prompts and initial "
        "noise: one dot per seed. Left: mean reward against the standard deviation of the rewards of a group, which "
        "is what the gradient learns from. Right: distance from the nearest legal video (in latents).",
        claims=(
            _sage_nearer_than("flow_grpo", "FlowGRPO", _base_distance),
            _exact_nearer(_base_distance),
            Claim(
                key="exact_reward",
                text="`sage_exact`'s samples have a higher reward than SAGE's.",
                measure=larger(("base", "reward", "sage_exact"), ("base", "reward", "sage_grpo")),
                by="this project",
            ),
            Claim(
                key="exact_spread",
                text="The rewards of a group spread more with `sage_exact` than with SAGE.",
                measure=larger(("base", "group_std", "sage_exact"), ("base", "group_std", "sage_grpo")),
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="fig4",
        title="Figure 4: gradient norm of the steps",
        tier="quick",
        seeds=(0, 1, 2),
        measure="gradients",
        seconds=150,
        caption="Norm of the gradient of each step of one rollout of the base model, over its median; mean of the "
        "seeds. Dotted: the gain |b|/std, which predicts it.",
        claims=(
            Claim(
                key="law",
                text="Without the equalizer the gradient norm of a step is proportional to its gain b/std (slope "
                "between their logarithms 1 ± 0.25).",
                measure=slope_is_one,
            ),
            Claim(
                key="equalizer",
                text="With the equalizer the steps pull more evenly (largest over smallest norm).",
                measure=smaller(("fig4", "spread", "sage_grpo, equalizer"), ("fig4", "spread", "sage_grpo, plain"), 2),
            ),
        ),
    ),
    Experiment(
        key="fig3",
        title="Figure 3: training with the equalizer and without",
        tier="standard",
        seeds=(0, 1, 2, 3, 4, 5),
        arms=(*PLAIN, *(f"{name}-plain" for name in PLAIN)),
        caption="Mean reward of the training batches, mean and standard deviation over the seeds.",
        claims=(
            Claim(
                key="area",
                text="With the equalizer SAGE's reward is higher on average over the training.",
                measure=larger(("fig3", "area", "sage_grpo"), ("fig3", "area", "sage_grpo-plain")),
            ),
            Claim(
                key="final",
                text="With the equalizer SAGE ends at a higher reward.",
                measure=larger(("fig3", "final_reward", "sage_grpo"), ("fig3", "final_reward", "sage_grpo-plain")),
            ),
            Claim(
                key="steadier",
                text="With the equalizer SAGE's reward is steadier from update to update.",
                measure=smaller(("fig3", "unsteadiness", "sage_grpo"), ("fig3", "unsteadiness", "sage_grpo-plain")),
            ),
        ),
    ),
    Experiment(
        key="samplers",
        title="Three samplers, trained",
        tier="standard",
        seeds=(0, 1, 2, 3, 4, 5),
        arms=("sage_grpo", "sage_exact", "cps"),
        caption="Final evaluation by the ODE: one dot per seed, bar: mean.",
        claims=(
            Claim(
                key="exact",
                text="Trained with `sage_exact`, the model ends at a higher reward than with SAGE.",
                measure=larger(("samplers", "final_reward", "sage_exact"), ("samplers", "final_reward", "sage_grpo")),
                by="this project",
            ),
            Claim(
                key="cps",
                text="Trained with SAGE, the model ends at a higher reward than with CPS.",
                measure=larger(("samplers", "final_reward", "sage_grpo"), ("samplers", "final_reward", "cps")),
            ),
        ),
    ),
    Experiment(
        key="longer",
        title="The demo's recipe for twice as many updates",
        tier="standard",
        seeds=(0, 1, 2, 3, 4, 5),
        arms=("sage_grpo", TWICE),
        drawn=f"final_{DISTANCE}",
        needs_manifold=True,
        caption="Distance from the nearest legal video (in latents) in the final evaluation, after 20 updates and "
        "after 40: one dot per seed, bar: mean.",
        claims=(
            Claim(
                key="aligned",
                text="After 40 updates more videos show what was asked than after 20.",
                measure=larger(("longer", "final_aligned", TWICE), ("longer", "final_aligned", "sage_grpo")),
                by="this project",
            ),
            Claim(
                key="reward",
                text="After 40 updates the reward is higher than after 20.",
                measure=larger(("longer", "final_reward", TWICE), ("longer", "final_reward", "sage_grpo")),
                by="this project",
            ),
            Claim(
                key="further",
                text="After 40 updates the videos lie further from the manifold than after 20.",
                measure=larger(("longer", f"final_{DISTANCE}", TWICE), ("longer", f"final_{DISTANCE}", "sage_grpo"), 4),
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="kl_share",
        title="How hard the KL pulls",
        tier="standard",
        seeds=(0, 1, 2),
        arms=tuple(weight_arm(weight) for weight in WEIGHTS),
        drawn="kl_share",
        caption="Norm of the gradient of the KL to the initial weights over that of the surrogate, at a constant "
        "lambda; mean of the updates 5 to 8: one dot per seed, bar: mean.",
        claims=(
            Claim(
                key="published",
                text="At the largest published lambda, 1e-5, it is below a thousandth.",
                measure=within(("kl_share", "kl_share", weight_arm(WEIGHTS[0])), 0.0, 1e-3),
                by="this project",
            ),
            Claim(
                key="strong",
                text="At a lambda of 0.03 it is between a tenth and one.",
                measure=within(("kl_share", "kl_share", weight_arm(WEIGHTS[1])), 0.1, 1.0),
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="fig8",
        title="Figure 8: what the KL holds on to",
        tier="standard",
        seeds=(0, 1, 2, 3),
        arms=("kl-none", *(kl_arm(mode, share) for share in (None, *SHARES) for mode in ANCHORED)),
        caption="Final evaluation by the ODE, for lambda as published and for lambdas that give the KL to the initial "
        "weights a tenth of the policy's gradient, and as much as it: one dot per seed, bar: mean.",
        claims=tuple(
            Claim(
                key=f"dual_over_{mode}_{'published' if share is None else f'{share:g}'}",
                text=f"Dual KL ends at a higher reward than {label}"
                + (", lambda as published." if share is None else f", at a gradient share of {share:g}."),
                measure=larger(
                    ("fig8", "final_reward", kl_arm("dual", share)),
                    ("fig8", "final_reward", "kl-none" if mode == "none" else kl_arm(mode, share)),
                ),
            )
            for share in (None, *SHARES)
            for mode, label in (("none", "no KL"), ("fixed", "the KL to the initial weights"))
        ),
    ),
    Experiment(
        key="table2",
        title="Table 2, Setting B: five samplers",
        tier="standard",
        seeds=(0, 1, 2, 3, 4, 5),
        arms=tuple(f"B-{name}" for name in SAMPLERS),
        drawn="final_overall",
        caption="Overall (VQ + MQ + TA, unweighted) of the final evaluation: one dot per seed, bar: mean.",
        claims=(
            *_ordered("table2", "final_overall", "B-"),
            Claim(
                key="exact",
                text="`sage_exact` reaches a higher score than SAGE.",
                measure=larger(("table2", "final_overall", "B-sage_exact"), ("table2", "final_overall", "B-sage_grpo")),
                by="this project",
            ),
        ),
    ),
    Experiment(
        key="table2a",
        title="Table 2, Setting A: five samplers",
        tier="full",
        seeds=(0, 1, 2, 3, 4, 5),
        arms=tuple(f"A-{name}" for name in SAMPLERS),
        drawn="final_overall",
        caption="Overall (VQ + MQ + TA, unweighted) of the final evaluation: one dot per seed, bar: mean.",
        claims=_ordered("table2a", "final_overall", "A-"),
    ),
    Experiment(
        key="fig7",
        title="Figure 7: how lambda moves",
        tier="full",
        seeds=(0, 1, 2, 3),
        arms=("kl-dual-published", "lambda-constant", "lambda-tighten"),
        caption="Final evaluation by the ODE, dual KL, lambda as published, constant at its maximum, and moved the "
        "other way: one dot per seed, bar: mean.",
        claims=(
            Claim(
                key="schedule",
                text="The paper's schedule of lambda ends at a higher reward than a constant lambda.",
                measure=larger(
                    ("fig7", "final_reward", "kl-dual-published"), ("fig7", "final_reward", "lambda-constant")
                ),
            ),
        ),
    ),
)


def chosen_experiments(tier: Tier, only: Sequence[str] = ()) -> list[Experiment]:
    """Those of a tier and the tiers below it, or those named, whatever their tier. ConfigError for an unknown name."""
    by_key = {experiment.key: experiment for experiment in EXPERIMENTS}
    if unknown := [key for key in only if key not in by_key]:
        raise ConfigError(f"--only names {', '.join(unknown)}; choose among {', '.join(by_key)}.")
    if only:
        return [experiment for experiment in EXPERIMENTS if experiment.key in only]
    allowed = TIERS[: TIERS.index(tier) + 1]
    return [experiment for experiment in EXPERIMENTS if experiment.tier in allowed]


def needs_probe(experiments: Sequence[Experiment]) -> bool:
    """Whether a training among them gets the weight of its KL from the probe."""
    return any(training.kl_share is not None for e in experiments for training in e.trainings())
