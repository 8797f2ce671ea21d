"""The page of a study and its tables in other pages, made from findings alone: the same findings, the same bytes."""

import re
from collections.abc import Sequence
from statistics import fmean, stdev

from experiments.claims import EXPERIMENTS, Experiment, Judgement, judge
from experiments.findings import COST, PER_PROMPT, Findings

IMAGES = "images/reproduction"
"""Folder of the figures beside the page."""

PUBLISHED_RESULTS = "results/reproduction.jsonl"
"""Place of the findings beside the page, where it is one of the documents."""

HEAD = """# The paper's claims, tested

Written by `python -m experiments --publish docs` from [results/reproduction.jsonl](results/reproduction.jsonl), which
has every number with its seed, version and commit. The claims of the SAGE-GRPO paper (arXiv 2603.21872) about samplers,
the gradient equalizer and the KL are measured in the built-in world of rendered videos, whose data manifold is known:
with its base model, a small network; with the exact policy ([algorithm.md](algorithm.md), section 5); and in the exact
testbed, that policy with weights to train. Nothing here need hold for an 8.3 B model; a refuted claim is refuted as a
general statement.

*Confirmed* and *refuted*: the difference is not zero at 5 %, after Holm's adjustment over the claims of its table, or
is computed without uncertainty (*exact*). *Undetectable*: neither; in brackets the difference that four of five such
studies would have found. Differences are of the same seeds and noise, positive where they support the claim (of a
range: how far inside), with 95 % intervals: Student's over the seeds; scores of trained networks count seeds and
prompts as crossed random effects, with Satterthwaite's degrees of freedom. The network was evaluated on one noise per
caption, and on 16 where three updates are compared, so intervals count no other noise. The paper's figures are those of
its first version on arXiv, read from public transcriptions; claims without one are this project's. Core-minutes are
those that passed, other work on the cores included.

**The exact testbed.** 360 legal videos as a mixture of Gaussians whose velocity is known in closed form. 85 numbers
are trained: the confusions of colour, shape and motion, and eight coordinates that lead off the manifold, all mixed
by one fixed rotation, as a network's weights are. Samplers, advantages and loss are the trainer's. The share of videos
that follow their caption (*aligned*, 0.453 before training) and the drift are computed from the weights, without
evaluation noise, so 32 seeds tell apart in minutes what trainings of the network, hours each, do not.

[What it cannot say](objectives.md#what-this-cannot-say). Its intervals are over seeds, not over worlds: four other
rotations, three seeds each, moved SAGE's 0.694 to between 0.690 and 0.700, and kept the order of sage_exact, sage_grpo,
flow_grpo and SAGE without equalizer. Take from it the signs and orders that hold in all its variants.
"""


def render(findings: Findings) -> str:
    """The page. Experiments without findings are named at its end."""
    measured = {row.experiment for row in findings.rows}
    done = [experiment for experiment in EXPERIMENTS if experiment.key in measured]
    left = [experiment for experiment in EXPERIMENTS if experiment.key not in measured]
    parts = [HEAD, _summary(done, findings), *(_section(experiment, findings) for experiment in done)]
    if left:
        named = "; ".join(f"{e.title} (`--only {e.key}`, {len(e.trainings())} trainings)" for e in left)
        parts.append(f"## Not run yet\n\n{named}.\n")
    return "\n".join(parts)


def _summary(experiments: Sequence[Experiment], findings: Findings) -> str:
    lines = [
        "| table, figure | confirmed | refuted | undetectable | seeds | core-minutes |",
        "|---|---|---|---|---|---|",
    ]
    for experiment in experiments:
        verdicts = [judgement.verdict for judgement in judge(experiment.claims, findings)]
        counts = [str(verdicts.count(name)) for name in ("confirmed", "refuted", "undetectable")]
        anchor = "".join(c for c in experiment.title.lower().replace(" ", "-") if c.isalnum() or c == "-")
        planned, done = len(experiment.seeds), len(findings.seeds(experiment.key))
        seeds = "-" if not planned else str(done) if done == planned else f"{done} of {planned}"
        minutes = sum(row.value for row in findings.select(experiment.key, COST)) / 60
        cost = f"{minutes:.0f}" if minutes else "-"
        lines.append(f"| {' | '.join([f'[{experiment.title}](#{anchor})', *counts, seeds, cost])} |")
    return "\n".join([*lines, ""])


def _section(experiment: Experiment, findings: Findings) -> str:
    lines = [
        f"## {experiment.title}",
        "",
        f"![Figure]({IMAGES}/{experiment.key}.png)",
        "",
        experiment.caption,
        "",
        "| claim | the paper | here | difference | verdict |",
        "|---|---|---|---|---|",
        *(_row(judgement) for judgement in judge(experiment.claims, findings)),
        "",
    ]
    return "\n".join(lines)


def _row(judgement: Judgement) -> str:
    claim, evidence = judgement.claim, judgement.evidence
    reported = ": ".join(part for part in (claim.source, claim.reported) if part)
    verdict = f"**{judgement.verdict}**"
    if evidence is None:
        return f"| {claim.text} | {reported} | | | {verdict} |"
    effect, size = evidence.effect, "exact"
    if effect is not None:
        size = f"{effect.mean:+.3g} ± {effect.high - effect.mean:.2g}"
        if judgement.verdict == "undetectable":
            verdict += f" ({effect.detectable:.2g})"
    return f"| {claim.text} | {reported} | {evidence.ours} | {size} | {verdict} |"


PLACE = re.compile(r"(<!-- study (\w+): begin -->\n).*?(<!-- study \2: end -->)", re.DOTALL)
"""Place of an experiment's table in another page; the second group is the key."""


def fill_tables(page: str, findings: Findings) -> str:
    """A page with the table of every experiment that it has a place for."""
    known = {experiment.key: experiment for experiment in EXPERIMENTS}
    return PLACE.sub(lambda place: place[1] + _table(known[place[2]], findings) + place[3], page)


def _table(experiment: Experiment, findings: Findings) -> str:
    """Results of every trained arm: means over the seeds, with their standard errors."""
    found = dict.fromkeys(row.quantity for row in findings.rows if row.experiment == experiment.key)
    columns = [name for name in found if name.startswith(PER_PROMPT)]
    if not columns:
        return f"It has not been run: `python -m experiments --only {experiment.key}`.\n"
    lines = [
        f"| training | {' | '.join(name.removeprefix(PER_PROMPT) for name in columns)} |",
        "|" + "---|" * (1 + len(columns)),
    ]
    for arm in findings.arms(experiment.key, columns[0]):
        cells = []
        for quantity in columns:
            values = [row.value for row in findings.select(experiment.key, quantity, arm)]
            error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.3f}{error}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
