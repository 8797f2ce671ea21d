"""The page of a study, made from its findings alone: the same findings give the same bytes."""

from collections.abc import Sequence
from statistics import fmean, stdev

from sage_fast.study.claims import PER_PROMPT, Judgement, judge
from sage_fast.study.experiments import EXPERIMENTS, TIERS, Experiment
from sage_fast.study.findings import COST, Findings

IMAGES = "images/reproduction"
"""Folder of the figures beside the page."""

PUBLISHED_RESULTS = "results/reproduction.jsonl"
"""Where the findings are beside the page, when it is one of the documents."""

HEAD = """# The paper's claims, tested

Written by `sage-fast reproduce --publish docs` from [results/reproduction.jsonl](results/reproduction.jsonl). The
claims of the SAGE-GRPO paper (arXiv 2603.21872) about samplers, the gradient equalizer and the KL are measured in the
built-in world of rendered videos, whose data manifold is known: with its base model, a small network; with the exact
policy ([algorithm.md](algorithm.md), section 5); and in the exact testbed, that policy with weights to train. Nothing
here need hold for an 8.3 B model; a refuted claim is refuted as a general statement. On a cluster:
`sage-fast reproduce --tier full --config hv15_480p_lora_8gpu`.

*Confirmed* and *refuted*: the difference is not zero at 5 %, after Holm's adjustment over the claims of its table, or
is computed without uncertainty. *Undetectable*: neither; the last column then has the difference that four of five
such studies would have found. Differences are of the same seeds and noise. Intervals are Student's over the seeds;
scores of trained networks count seeds and prompts as crossed random effects, with Satterthwaite's degrees of freedom.
Figures of the paper are those of its first version on arXiv, read from public transcriptions; the sums of Table 2's
rows agree (Overall = VQ + MQ + TA). The network's trainings below were evaluated on one noise per caption, so their
intervals count trainings and captions, and no other noise. Each line of the results names its commit.

**The exact testbed.** 360 legal videos as a mixture of Gaussians whose velocity is known in closed form. 85 numbers
are trained: the confusions of colour, shape and motion, and eight coordinates that lead off the manifold, all mixed
by one fixed rotation, as a network's weights are. Samplers, advantages and loss are the trainer's; the share of
videos that follow their caption (0.453 before training) and the drift are computed from the weights, without
evaluation noise, so 32 seeds tell apart in minutes what trainings of the network, hours each, do not.

It cannot say: how a network is optimized (Adam on 85 numbers is neither LoRA nor Muon, and every velocity is exact
from the first update to the last), what capacity or forgetting do, how large an effect is elsewhere (without the
rotation the equalizer is worth a fifth, and the rate of learning moves every figure: both are in the table), what
guidance and a learned reward do, or what a drift looks like in a video. Its intervals are over seeds, not over
worlds: four other rotations, three seeds each, moved SAGE's 0.694 to between 0.690 and 0.700, and kept the order of
sage_exact, sage_grpo, flow_grpo and SAGE without equalizer. Take from it the signs and orders that hold in all its
variants.
"""


def render(findings: Findings) -> str:
    """The page. Experiments without findings are listed at its end."""
    done = [e for e in EXPERIMENTS if any(row.experiment == e.key for row in findings.rows)]
    parts = [HEAD, _summary(done, findings)]
    parts += [_section(experiment, findings) for experiment in done]
    if left := [e for e in EXPERIMENTS if e not in done]:
        parts.append(_left_out(left))
    return "\n".join(parts)


def _summary(experiments: Sequence[Experiment], findings: Findings) -> str:
    lines = [
        "| table, figure | claims confirmed | refuted | undetectable | seeds | cost |",
        "|---|---|---|---|---|---|",
    ]
    for experiment in experiments:
        verdicts = [judgement.verdict for judgement in judge(experiment.claims, findings)]
        seeds = findings.seeds(experiment.key)
        counts = [str(verdicts.count(name)) for name in ("confirmed", "refuted", "undetectable")]
        anchor = "".join(c for c in experiment.title.lower().replace(" ", "-") if c.isalnum() or c == "-")
        cells = [f"[{experiment.title}](#{anchor})", *counts, str(len(seeds) or "-"), _cost(experiment, findings)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _section(experiment: Experiment, findings: Findings) -> str:
    lines = [
        f"## {experiment.title}",
        "",
        f"![{experiment.title}]({IMAGES}/{experiment.key}.png)",
        "",
        experiment.caption,
        "",
        "| claim | the paper | here | difference in its favour, 95 % | verdict | detectable |",
        "|---|---|---|---|---|---|",
        *(_row(judgement) for judgement in judge(experiment.claims, findings)),
        "",
        *score_table(experiment, findings),
        f"{_seeds(experiment, findings)} Cost: {_cost(experiment, findings)}.{_made_with(experiment, findings)}",
        "",
    ]
    return "\n".join(lines)


def _row(judgement: Judgement) -> str:
    claim, evidence = judgement.claim, judgement.evidence
    said = ": ".join(part for part in (claim.source, claim.reported) if part) or "*this project's*"
    if evidence is None:
        return f"| {claim.text} | {said} | | | not run | |"
    effect = evidence.effect
    size = "exact" if effect is None else f"{effect.mean:+.3g} ({effect.low:+.3g} .. {effect.high:+.3g})"
    seen = "" if effect is None else f"{effect.detectable:.2g}"
    return f"| {claim.text} | {said} | {evidence.ours} | {size} | **{judgement.verdict}** | {seen} |"


def score_table(experiment: Experiment, findings: Findings) -> list[str]:
    """Results of every trained arm, means over the seeds, with their standard errors where many were run."""
    found = dict.fromkeys(row.quantity for row in findings.rows if row.experiment == experiment.key)
    columns = [q for q in found if q.startswith(PER_PROMPT) and (experiment.runs or q != PER_PROMPT + "overall")]
    columns += [quantity for quantity in found if experiment.runs and quantity in ("area", "unsteadiness")]
    arms = [arm for arm in experiment.trained if columns and findings.select(experiment.key, columns[0], arm)]
    if not arms:
        return []

    def cell(quantity: str, arm: str) -> str:
        values = [row.value for row in findings.select(experiment.key, quantity, arm)]
        if not experiment.runs or len(values) < 2:
            return f"{fmean(values):.3g}"
        return f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"

    names = [quantity.removeprefix(PER_PROMPT) for quantity in columns]
    return [
        f"| {'training' if experiment.runs else 'final evaluation'} | {' | '.join(names)} |",
        "|" + "---|" * (1 + len(columns)),
        *(f"| {arm} | {' | '.join(cell(quantity, arm) for quantity in columns)} |" for arm in arms),
        "",
    ]


def _seeds(experiment: Experiment, findings: Findings) -> str:
    if not experiment.seeds:
        return "Computed, not sampled."
    seeds = findings.seeds(experiment.key)
    missing = len(experiment.seeds) - len(seeds)
    part = f" ({missing} of {len(experiment.seeds)} not run yet)" if missing else ""
    shown = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 8 else ", ".join(map(str, seeds))
    return f"Seeds: {shown}{part}."


def _cost(experiment: Experiment, findings: Findings) -> str:
    seconds = sum(row.value for row in findings.select(experiment.key, COST))
    if not seconds:
        return "none"
    return f"{seconds / 60:.1f} core-minutes" if seconds < 5400 else f"{seconds / 3600:.1f} core-hours"


def _made_with(experiment: Experiment, findings: Findings) -> str:
    rows = [row for row in findings.rows if row.experiment == experiment.key]
    commits = sorted({row.commit.partition("-")[0][:9] + row.commit[40:] for row in rows if row.commit})
    versions = sorted({f"SAGE-Fast {row.version}, torch {row.torch}" for row in rows if row.version})
    text = "; ".join(versions) + (f", commit {', '.join(commits)}" if commits else "")
    return f" {text}." if text else ""


def _left_out(experiments: Sequence[Experiment]) -> str:
    lines = ["## Not run yet", "", "| table, figure | `--tier` | trainings |", "|---|---|---|"]
    for experiment in sorted(experiments, key=lambda e: TIERS.index(e.tier)):
        lines.append(f"| {experiment.title} | `{experiment.tier}` | {len(experiment.trainings())} |")
    return "\n".join([*lines, ""])
