"""The experiments of experiments.toml: the paper's tables and figures, their claims,
and verdicts on these.

A claim is settled by an effect with the sign that it predicts (an `Effect` over seeds,
or over seeds and prompts), or by a number without uncertainty, such as an entry of a
table. The p-values of an experiment's claims are adjusted together (Holm); a difference
within its interval is reported with the effect size that such a study would have found,
and one that is certain but below `LEAST` settles nothing.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import numpy as np

from experiments.findings import PER_PROMPT, Findings
from sage_fast.config.errors import ConfigError
from sage_fast.tools.effects import LEVEL, Effect, crossed_effect, holm, seed_effect

Tier = Literal["quick", "standard", "full"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full")
"""Each includes those before it."""

Verdict = Literal[
    "confirmed",
    "refuted",
    "negligible",
    "undetectable",
    "cannot be run here",
    "not run",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

LEAST: Mapping[str, float] = {
    **dict.fromkeys(("aligned", "overall", "area", "group_spread", "group_std"), 0.01),
    **dict.fromkeys(("reward", "drift"), 0.02),
    **dict.fromkeys(("distance", "manifold_distance"), 0.002),
    "unsteadiness": 0.003,
    "exploration": 1.0,
}
"""Of a quantity, the smallest difference that would change what anybody does."""

SEEDS_OF_A_PROCESS = 16
"""Of trainings of the exact policy, which are shorter than the start of a process."""

REFERENCE = "T=20, eta=0.5"
"""The reference's rollout, in the names of the arms of Figure 2."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers behind a claim.

    Attributes:
        ours: the numbers, for the page.
        effect: positive where it supports the claim; None where nothing is uncertain,
            and `holds` decides. With neither, they settle nothing.

    Example: `Evidence(ours="0.888 and 0.990", holds=True)`
    """

    ours: str
    effect: Effect | None = None
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence and the evidence that settles it.

    Attributes:
        evidence: name in `EVIDENCE` and its arguments.
        cannot: why nothing here can settle it.
        source: where the paper says so, empty for a claim of this project.
        reported: the paper's figure, or what it shows there.
    """

    experiment: str
    key: str
    text: str
    evidence: Sequence[Any] = ()
    cannot: str = ""
    source: str = ""
    reported: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim with its verdict. evidence: None where it was not run."""

    claim: Claim
    verdict: Verdict
    evidence: Evidence | None


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of `sage-fast train`.

    Attributes:
        arm: its name, the same for all seeds.
        overrides: of the study's configuration.

    Example: `Training(arm="cps", overrides=("--rollout.sde_type=cps",), seed=3)`
    """

    arm: str
    overrides: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """Arm and seed; the place of the run below the study's folder."""
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper.

    Attributes:
        caption: of its picture.
        seeds: of its measurements; none where nothing is random.
        measure: key of `measures.MEASURES`, for samples without a training.
        runs: trainings of the exact policy by name, as what they change in
            `testbed.ExactTraining`.
        rates: learning rates of which each is judged at its best.
        arms: of the trainings.
        drawn: quantity in the picture of trainings.
        needs_manifold: left out where the data manifold is not known.

    Example: `chosen_experiments("quick", ["fig4"])[0].seeds` is `(0, 1, 2)`.
    """

    key: str
    title: str
    tier: Tier
    caption: str
    claims: Sequence[Claim] = ()
    seeds: tuple[int, ...] = ()
    measure: str | None = None
    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    arms: tuple[str, ...] = ()
    drawn: str = "final_reward"
    needs_manifold: bool = False

    def measurements(self) -> dict[str, tuple[int, ...]]:
        """Seeds of the measurements by name; each is made in its own process."""
        size = SEEDS_OF_A_PROCESS if self.runs else 1
        if not self.measure:
            return {}
        chunks = [
            self.seeds[first : first + size]
            for first in range(0, len(self.seeds), size)
        ]
        return {f"{self.key}-seed-{chunk[0]}": chunk for chunk in chunks}

    def trainings(self) -> list[Training]:
        """Trainings, seed by seed, so that a study that is stopped early has all arms."""
        return [
            Training(arm=arm, overrides=ARMS[arm], seed=seed)
            for seed in self.seeds
            for arm in self.arms
        ]


def _experiment(key: str, tree: dict[str, Any]) -> Experiment:
    claims = tuple(Claim(experiment=key, **claim) for claim in tree["claims"])
    tuples: dict[str, tuple[Any, ...]] = {
        name: tuple(tree.get(name, ())) for name in ("arms", "rates")
    }
    tuples["seeds"] = tuple(tree.get("seeds", range(tree.pop("num_seeds", 0))))
    return Experiment(key=key, **tree | tuples | {"claims": claims})


_TABLE = tomllib.loads((Path(__file__).parent / "experiments.toml").read_text("utf-8"))

_ARMS = _TABLE.pop("arms")


def _words(arm: str) -> dict[str, str]:
    """An arm's overrides by key, over those of the arms that it names."""
    words: dict[str, str] = {}
    for word in _ARMS[arm]:
        words |= {word.partition("=")[0]: f"--{word}"} if "=" in word else _words(word)
    return words


ARMS = {arm: tuple(_words(arm).values()) for arm in _ARMS}
"""Overrides of the study's configuration by name of the training."""

EXPERIMENTS = tuple(_experiment(key, tree) for key, tree in _TABLE.items())


def chosen_experiments(tier: Tier, only: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a tier and the tiers below it, or those named. ConfigError for
    an unknown name.
    """
    known = [experiment.key for experiment in EXPERIMENTS]
    if unknown := [key for key in only if key not in known]:
        raise ConfigError(
            f"--only names {', '.join(unknown)}; choose among {', '.join(known)}."
        )
    allowed = TIERS[: TIERS.index(tier) + 1]
    return [e for e in EXPERIMENTS if (e.key in only if only else e.tier in allowed)]


def judge(claims: Sequence[Claim], findings: Findings) -> list[Judgement]:
    """Verdicts on the claims of one experiment."""
    evidence = [_measure(claim, findings) for claim in claims]
    effects = [
        found.effect
        for found in evidence
        if found is not None and found.effect is not None
    ]
    adjusted = iter(holm([effect.p for effect in effects]))
    judged = []
    for claim, found in zip(claims, evidence, strict=True):
        verdict: Verdict
        if claim.cannot:
            verdict = "cannot be run here"
        elif found is None or (found.effect is None and found.holds is None):
            verdict = "not run"
        elif found.effect is None:
            verdict = "confirmed" if found.holds else "refuted"
        elif next(adjusted) >= LEVEL:
            verdict = "undetectable"
        elif abs(found.effect.mean) < LEAST.get(
            "".join(claim.evidence[1:2]).removeprefix(PER_PROMPT), 0.0
        ):
            verdict = "negligible"
        else:
            verdict = "confirmed" if found.effect.mean > 0 else "refuted"
        judged.append(Judgement(claim=claim, verdict=verdict, evidence=found))
    return judged


def _measure(claim: Claim, findings: Findings) -> Evidence | None:
    """Evidence for or against a claim; None where there is none, or findings are
    missing.
    """
    if claim.cannot:
        return None
    name, *arguments = claim.evidence
    try:
        return EVIDENCE[name](findings, claim.experiment, *arguments)
    except KeyError:
        return None


# --------------------------------------------------------------------------------------
# evidence
#
# Each function takes the findings, the experiment and the arguments of the claim.
# KeyError where findings are missing.


def larger(
    findings: Findings,
    experiment: str,
    quantity: str,
    one: str,
    other: str,
    digits: int = 3,
    sign: int = 1,
) -> Evidence:
    """A quantity is larger in one arm than in the other, in pairs of seeds (and of
    prompts, if any); smaller at sign -1.
    """
    ours = findings.by_seed(experiment, quantity, one)
    theirs = findings.by_seed(experiment, quantity, other)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs:
        raise KeyError(f"{one} and {other} share no seed")
    means = [fmean(row.value for row in column) for column in zip(*pairs, strict=True)]
    text = f"{means[0]:.{digits}f} and {means[1]:.{digits}f}"
    if len(pairs) == 1:
        return Evidence(ours=f"{text} (one seed)")
    rows = [
        [sign * (a - b) for a, b in zip(first.parts, second.parts, strict=False)]
        for first, second in pairs
    ]
    if quantity.startswith(PER_PROMPT) and all(rows):
        effect = crossed_effect(rows)
    else:
        effect = seed_effect(
            [sign * (first.value - second.value) for first, second in pairs]
        )
    return Evidence(ours=text, effect=effect)


def within(
    findings: Findings,
    experiment: str,
    quantity: str,
    arm: str,
    low: float,
    high: float,
) -> Evidence:
    """A quantity lies between two numbers: over the seeds, its distance inside the
    nearer one.
    """
    values = [row.value for row in findings.by_seed(experiment, quantity, arm).values()]
    if len(values) < 2:
        raise KeyError(f"{experiment}: {len(values)} {quantity} of {arm}")
    effect = seed_effect([min(value - low, high - value) for value in values])
    return Evidence(ours=f"{min(values):.2g} to {max(values):.2g}", effect=effect)


def about(
    findings: Findings, experiment: str, quantity: str, arm: str, value: float
) -> Evidence:
    """A quantity without uncertainty is a number to a fifth of it: what can be read
    from a figure.
    """
    found = findings.mean(experiment, quantity, arm)
    return Evidence(ours=f"{found:.2f}", holds=abs(found - value) <= value / 5)


def by_construction(
    findings: Findings, experiment: str, ours: str, holds: bool
) -> Evidence:
    """Consequences of the formulas; a test holds them to the code."""
    return Evidence(ours=ours, holds=holds)


def mostly_below_flow(findings: Findings, experiment: str) -> Evidence:
    """SAGE's noise is below FlowGRPO's at most steps, for every number of steps."""
    above: list[str] = []
    total = 0
    holds = True
    for arm in findings.arms(experiment, "std", "sage_grpo, "):
        count = arm.removeprefix("sage_grpo, ")
        ours, theirs = (
            findings.parts(experiment, "std", f"{name}, {count}")
            for name in ("sage_grpo", "flow_grpo")
        )
        not_below = [
            f"step {step} of {count}: {one:.2f} and {other:.2f}"
            for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1)
            if one >= other
        ]
        above += not_below
        total += len(ours)
        holds = holds and 2 * len(not_below) < len(ours)
    if not total:
        raise KeyError(experiment)
    return Evidence(
        ours=f"at {total - len(above)} of {total} steps; not at {'; '.join(above)}",
        holds=holds,
    )


def last_smallest(findings: Findings, experiment: str) -> Evidence:
    """The noise of the last step grows from SAGE over FlowGRPO to DanceGRPO."""
    texts = []
    holds = True
    for steps in (20, 100):
        a, b, c = (
            findings.mean(experiment, "last", f"{n}, T={steps}")
            for n in ("sage_grpo", "flow_grpo", "dance_grpo")
        )
        texts.append(f"T = {steps}: {a:.3f}, {b:.3f}, {c:.3f}")
        holds = holds and a < b < c
    return Evidence(ours="; ".join(texts), holds=holds)


def spread_over(findings: Findings, experiment: str, setting: str) -> Evidence:
    """The variance at high noise varies less for SAGE than for FlowGRPO over a setting
    of the schedule.
    """
    texts = []
    factors = []
    for sampler in ("sage_grpo", "flow_grpo"):
        arms = findings.arms(experiment, "high_noise_variance", f"{sampler}, {setting}")
        values = [findings.mean(experiment, "high_noise_variance", arm) for arm in arms]
        if not values:
            raise KeyError(experiment)
        texts.append(f"{min(values):.2f} to {max(values):.2f}")
        factors.append(max(values) / min(values))
    return Evidence(ours=" and ".join(texts), holds=factors[0] < factors[1])


def less_in_high_noise(findings: Findings, experiment: str, arm: str) -> Evidence:
    """SAGE adds less variance than FlowGRPO from sigma 0.9 up; `arm` is SAGE with a
    margin.
    """
    ours = findings.mean("fig9", "high_noise_variance", arm)
    theirs = findings.mean(experiment, "high_noise_variance", "flow_grpo")
    return Evidence(ours=f"{ours:.3f} and {theirs:.3f}", holds=ours < theirs)


def margin_decides(findings: Findings, experiment: str) -> Evidence:
    """The variance of the first step changes more than tenfold over the margins."""
    arms = findings.arms(experiment, "first", "sage_grpo, margin=")
    variances = [findings.mean(experiment, "first", arm) ** 2 for arm in arms]
    if not variances:
        raise KeyError(experiment)
    text = ", ".join(
        f"{v:.2g} ({arm.partition('=')[2]})"
        for v, arm in zip(variances, arms, strict=True)
    )
    return Evidence(ours=text, holds=max(variances) > 10 * min(variances))


def nearer_at_equal_exploration(findings: Findings, experiment: str) -> Evidence:
    """FlowGRPO's distance, interpolated over eta to SAGE's exploration, is larger than
    SAGE's.
    """
    ours = []
    theirs = []
    for seed in findings.seeds(experiment):

        def measured(quantity: str, arm: str, seed: int = seed) -> float:
            return findings.by_seed(experiment, quantity, arm)[seed].value

        flow = findings.arms(experiment, "distance", "flow_grpo, T=20")
        points = sorted(
            (measured("exploration", arm), measured("distance", arm)) for arm in flow
        )
        ours.append(measured("distance", f"sage_grpo, {REFERENCE}"))
        explored, distances = zip(*points, strict=True)
        theirs.append(
            float(
                np.interp(
                    measured("exploration", f"sage_grpo, {REFERENCE}"),
                    explored,
                    distances,
                )
            )
        )
    if len(ours) < 2:
        raise KeyError(experiment)
    effect = seed_effect([b - a for a, b in zip(ours, theirs, strict=True)])
    return Evidence(ours=f"{fmean(ours):.4f} and {fmean(theirs):.4f}", effect=effect)


EVIDENCE: Mapping[str, Callable[..., Evidence]] = {
    "larger": larger,
    "smaller": partial(larger, sign=-1),
    "within": within,
    "about": about,
    "by_construction": by_construction,
    "mostly_below_flow": mostly_below_flow,
    "last_smallest": last_smallest,
    "spread_over": spread_over,
    "less_in_high_noise": less_in_high_noise,
    "margin_decides": margin_decides,
    "nearer_at_equal_exploration": nearer_at_equal_exploration,
}
