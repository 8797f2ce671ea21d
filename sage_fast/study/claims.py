"""From measured numbers to a verdict.

A claim is settled by an effect with the sign that it predicts (an `Effect` over seeds, or over seeds and prompts), or
by a number without uncertainty, such as an entry of a table. The p-values of an experiment's claims are adjusted
together (Holm); a difference within its interval is reported with the effect size that such a study would have found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from sage_fast.study.findings import Findings
from sage_fast.tools.effects import LEVEL, Effect, crossed_effect, holm, seed_effect

Verdict = Literal["confirmed", "refuted", "undetectable", "not run"]

PER_PROMPT = "final_"
"""Begins the quantities whose parts are prompts, the same ones for every arm and seed."""

REFERENCE = "T=20, eta=0.5"
"""The reference's rollout, in the names of the arms of Figure 2."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers behind a claim.

    ours: the numbers, for the page. effect: positive where it supports the claim; None where nothing is uncertain, and
    `holds` decides.

    Example: `Evidence(ours="0.888 and 0.990", holds=True)`
    """

    ours: str
    effect: Effect | None = None
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence and the evidence that settles it.

    evidence: name in `EVIDENCE` and its arguments. source: where the paper says so, empty for a claim of this
    project. reported: the paper's figure, or what it shows there.
    """

    experiment: str
    key: str
    text: str
    evidence: Sequence[Any]
    source: str = ""
    reported: str = ""

    def measure(self, findings: Findings) -> Evidence | None:
        """Evidence for or against the claim; None where findings are missing."""
        name, *arguments = self.evidence
        try:
            return EVIDENCE[name](findings, self.experiment, *arguments)
        except KeyError:
            return None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim with its verdict. evidence: None where it was not run. p: adjusted, None where nothing is uncertain."""

    claim: Claim
    verdict: Verdict
    evidence: Evidence | None = None
    p: float | None = None


def judge(claims: Sequence[Claim], findings: Findings) -> list[Judgement]:
    """Verdicts on the claims of one experiment."""
    evidence = [claim.measure(findings) for claim in claims]
    effects = {i: found.effect for i, found in enumerate(evidence) if found is not None and found.effect is not None}
    adjusted = dict(zip(effects, holm([effect.p for effect in effects.values()]), strict=True))
    judged = []
    for i, (claim, found) in enumerate(zip(claims, evidence, strict=True)):
        verdict: Verdict = "not run"
        if i in effects:
            signed: Verdict = "confirmed" if effects[i].mean > 0 else "refuted"
            verdict = "undetectable" if adjusted[i] >= LEVEL else signed
        elif found is not None:
            verdict = "confirmed" if found.holds else "refuted"
        judged.append(Judgement(claim=claim, verdict=verdict, evidence=found, p=adjusted.get(i)))
    return judged


# ------------------------------------------------------------------------------------------------ evidence
#
# Each function takes the findings, the experiment and the arguments of the claim. KeyError where findings are missing.


def larger(findings: Findings, experiment: str, quantity: str, one: str, other: str, digits: int = 3) -> Evidence:
    """A quantity is larger in one arm than in the other, in pairs of seeds (and of prompts, if any)."""
    ours, theirs = findings.by_seed(experiment, quantity, one), findings.by_seed(experiment, quantity, other)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if len(pairs) < 2:
        raise KeyError(f"{one} and {other} share {len(pairs)} seed(s)")
    rows = [[a - b for a, b in zip(first.parts, second.parts, strict=False)] for first, second in pairs]
    counts = {len(row.parts) for pair in pairs for row in pair}
    if quantity.startswith(PER_PROMPT) and len(counts) == 1 and counts != {0}:
        effect = crossed_effect(rows)
    else:
        effect = seed_effect([first.value - second.value for first, second in pairs])
    means = [fmean(row.value for row in column) for column in zip(*pairs, strict=True)]
    return Evidence(ours=f"{means[0]:.{digits}f} and {means[1]:.{digits}f}", effect=effect)


def smaller(findings: Findings, experiment: str, quantity: str, one: str, other: str, digits: int = 3) -> Evidence:
    """A quantity is smaller in one arm than in the other; the numbers stand in the order given."""
    found = larger(findings, experiment, quantity, other, one, digits)
    return Evidence(ours=" and ".join(reversed(found.ours.split(" and "))), effect=found.effect)


def within(findings: Findings, experiment: str, quantity: str, arm: str, low: float, high: float) -> Evidence:
    """A quantity lies between two numbers: over the seeds, its distance inside the nearer one."""
    values = [row.value for row in findings.by_seed(experiment, quantity, arm).values()]
    if len(values) < 2:
        raise KeyError(f"{experiment}: {len(values)} {quantity} of {arm}")
    effect = seed_effect([min(value - low, high - value) for value in values])
    return Evidence(ours=f"{min(values):.2g} to {max(values):.2g}", effect=effect)


def mostly_below_flow(findings: Findings, experiment: str) -> Evidence:
    """SAGE's noise is below FlowGRPO's at most steps, for every number of steps."""
    above: list[str] = []
    total, holds = 0, True
    for arm in findings.arms(experiment, "std", "sage_grpo, "):
        count = arm.removeprefix("sage_grpo, ")
        ours, theirs = (findings.parts(experiment, "std", f"{name}, {count}") for name in ("sage_grpo", "flow_grpo"))
        not_below = [i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one >= other]
        above += [f"step {i + 1} of {count}: {ours[i]:.2f} and {theirs[i]:.2f}" for i in not_below]
        total, holds = total + len(ours), holds and 2 * len(not_below) < len(ours)
    if not total:
        raise KeyError(experiment)
    return Evidence(ours=f"at {total - len(above)} of {total} steps; not at {'; '.join(above)}", holds=holds)


def last_smallest(findings: Findings, experiment: str) -> Evidence:
    """The noise of the last step grows from SAGE over FlowGRPO to DanceGRPO."""
    texts, holds = [], True
    for steps in (20, 100):
        a, b, c = (
            findings.mean(experiment, "last", f"{n}, T={steps}") for n in ("sage_grpo", "flow_grpo", "dance_grpo")
        )
        texts.append(f"T = {steps}: {a:.3f}, {b:.3f}, {c:.3f}")
        holds = holds and a < b < c
    return Evidence(ours="; ".join(texts), holds=holds)


def spread_over(findings: Findings, experiment: str, setting: str) -> Evidence:
    """The variance at high noise varies less for SAGE than for FlowGRPO over a setting of the schedule."""
    (low, high), (flow_low, flow_high) = (
        findings.extremes(experiment, "high_noise_variance", f"{name}, {setting}")
        for name in ("sage_grpo", "flow_grpo")
    )
    text = f"{low:.2f} to {high:.2f} and {flow_low:.2f} to {flow_high:.2f}"
    return Evidence(ours=text, holds=high / low < flow_high / flow_low)


def less_in_high_noise(findings: Findings, experiment: str, arm: str) -> Evidence:
    """SAGE adds less variance than FlowGRPO from sigma 0.9 up; `arm` is SAGE with a margin."""
    ours = findings.mean("fig9", "high_noise_variance", arm)
    theirs = findings.mean(experiment, "high_noise_variance", "flow_grpo")
    return Evidence(ours=f"{ours:.3f} and {theirs:.3f}", holds=ours < theirs)


def margin_decides(findings: Findings, experiment: str) -> Evidence:
    """The variance of the first step changes more than tenfold over the margins."""
    arms = findings.arms(experiment, "first", "sage_grpo, margin=")
    variances = [findings.mean(experiment, "first", arm) ** 2 for arm in arms]
    if not variances:
        raise KeyError(experiment)
    text = ", ".join(f"{v:.2g} ({arm.partition('=')[2]})" for v, arm in zip(variances, arms, strict=True))
    return Evidence(ours=text, holds=max(variances) > 10 * min(variances))


def nearer_at_equal_exploration(findings: Findings, experiment: str) -> Evidence:
    """FlowGRPO's distance, interpolated over eta to SAGE's exploration, is larger than SAGE's."""
    ours, theirs = [], []
    for seed in findings.seeds(experiment):

        def measured(quantity: str, arm: str, seed: int = seed) -> float:
            return findings.by_seed(experiment, quantity, arm)[seed].value

        flow = findings.arms(experiment, "distance", "flow_grpo, T=20")
        points = sorted((measured("exploration", arm), measured("distance", arm)) for arm in flow)
        ours.append(measured("distance", f"sage_grpo, {REFERENCE}"))
        explored, distances = zip(*points, strict=True)
        theirs.append(float(np.interp(measured("exploration", f"sage_grpo, {REFERENCE}"), explored, distances)))
    if len(ours) < 2:
        raise KeyError(experiment)
    effect = seed_effect([b - a for a, b in zip(ours, theirs, strict=True)])
    return Evidence(ours=f"{fmean(ours):.4f} and {fmean(theirs):.4f}", effect=effect)


EVIDENCE: Mapping[str, Callable[..., Evidence]] = {
    function.__name__: function
    for function in (
        *(larger, smaller, within, mostly_below_flow, last_smallest, spread_over),
        *(less_in_high_noise, margin_decides, nearer_at_equal_exploration),
    )
}
