"""From measured numbers to a verdict.

A claim is settled by an effect with a sign that it predicts (an `Effect` over seeds, or over seeds and prompts), or by
a number without uncertainty, such as an entry of a table. The p-values of an experiment's claims are adjusted together
(Holm), and what is not told apart from zero says how large an effect would have been seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sage_fast.study.findings import Finding, Findings
from sage_fast.tools.effects import LEVEL, Effect, crossed_effect, holm, seed_effect

Verdict = Literal["confirmed", "refuted", "undetectable", "not run"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured about a claim.

    ours: the numbers, for the page. effect: positive where it speaks for the claim; None where nothing is uncertain,
    and `holds` says whether the claim does.

    Example: `Evidence(ours="0.888 and 0.990", holds=True)`
    """

    ours: str
    effect: Effect | None = None
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence and what settles it.

    by: who says it. reported: what the paper gives for it, empty where no figure is known here.
    measure: the evidence, from findings that are all there. Raises KeyError where some are missing.
    unit: of the effect.
    """

    key: str
    text: str
    measure: Callable[[Findings], Evidence]
    by: Literal["paper", "this project"] = "paper"
    reported: str = ""
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim with its verdict. evidence: None where it was not run. p: adjusted, None where nothing is uncertain."""

    claim: Claim
    verdict: Verdict
    evidence: Evidence | None = None
    p: float | None = None


def judge(claims: Sequence[Claim], findings: Findings) -> list[Judgement]:
    """The verdicts on the claims of one experiment."""
    evidence = [_measured(claim, findings) for claim in claims]
    uncertain = [i for i, found in enumerate(evidence) if found is not None and found.effect is not None]
    adjusted = dict(zip(uncertain, holm([_effect(evidence[i]).p for i in uncertain]), strict=True))
    return [
        _judgement(claim, found, adjusted.get(i)) for i, (claim, found) in enumerate(zip(claims, evidence, strict=True))
    ]


def _judgement(claim: Claim, found: Evidence | None, p: float | None) -> Judgement:
    if found is None:
        return Judgement(claim=claim, verdict="not run")
    if p is None:
        return Judgement(claim=claim, verdict="confirmed" if found.holds else "refuted", evidence=found)
    if p >= LEVEL:
        return Judgement(claim=claim, verdict="undetectable", evidence=found, p=p)
    verdict: Verdict = "confirmed" if _effect(found).mean > 0 else "refuted"
    return Judgement(claim=claim, verdict=verdict, evidence=found, p=p)


def _effect(evidence: Evidence | None) -> Effect:
    assert evidence is not None and evidence.effect is not None
    return evidence.effect


def _measured(claim: Claim, findings: Findings) -> Evidence | None:
    try:
        return claim.measure(findings)
    except KeyError:
        return None


# ------------------------------------------------------------------------------------------------ evidence


Key = tuple[str, str, str]
"""Experiment, quantity, arm."""

PER_PROMPT = "final_"
"""Begins the quantities whose parts are prompts, the same ones for every arm and seed."""


def final_scores(findings: Findings, experiment: str) -> list[str]:
    """Names of the scores of final evaluations, beside the reward and the sum of its parts."""
    found = {row.quantity for row in findings.rows if row.experiment == experiment}
    names = {quantity.removeprefix(PER_PROMPT) for quantity in found if quantity.startswith(PER_PROMPT)}
    return sorted(names - {"reward", "overall"})


def larger(one: Key, other: Key, digits: int = 3) -> Callable[[Findings], Evidence]:
    """Evidence that a quantity is larger in one arm than in the other, in pairs of seeds (and of prompts, if any)."""

    def measure(findings: Findings) -> Evidence:
        pairs = paired(findings, one, other)
        effect = _difference(pairs, crossed=one[1].startswith(PER_PROMPT))
        means = [sum(row.value for row in column) / len(column) for column in zip(*pairs, strict=True)]
        return Evidence(ours=f"{means[0]:.{digits}f} and {means[1]:.{digits}f}", effect=effect)

    return measure


def smaller(one: Key, other: Key, digits: int = 3) -> Callable[[Findings], Evidence]:
    """Evidence that a quantity is smaller in one arm than in the other; the numbers stand in the order given."""

    def measure(findings: Findings) -> Evidence:
        found = larger(other, one, digits)(findings)
        first, second = found.ours.split(" and ")
        return Evidence(ours=f"{second} and {first}", effect=found.effect)

    return measure


def within(key: Key, low: float, high: float) -> Callable[[Findings], Evidence]:
    """Evidence that a quantity lies between two numbers: over the seeds, how far inside the nearer one it is."""

    def measure(findings: Findings) -> Evidence:
        values = [row.value for row in findings.by_seed(*key).values()]
        if len(values) < 2:
            raise KeyError(key)
        effect = seed_effect([min(value - low, high - value) for value in values])
        return Evidence(ours=f"{min(values):.2g} to {max(values):.2g}", effect=effect)

    return measure


def paired(findings: Findings, one: Key, other: Key) -> list[tuple[Finding, Finding]]:
    """Findings of the seeds that both arms have. KeyError for fewer than 2."""
    ours, theirs = findings.by_seed(*one), findings.by_seed(*other)
    shared = [seed for seed in ours if seed in theirs]
    if len(shared) < 2:
        raise KeyError(f"{one} and {other} share {len(shared)} seed(s)")
    return [(ours[seed], theirs[seed]) for seed in shared]


def _difference(pairs: Sequence[tuple[Finding, Finding]], *, crossed: bool) -> Effect:
    rows = [[a - b for a, b in zip(one.parts, other.parts, strict=False)] for one, other in pairs]
    if crossed and len({len(row.parts) for pair in pairs for row in pair}) == 1:
        return crossed_effect(rows)
    return seed_effect([one.value - other.value for one, other in pairs])
