"""The page of a study, made from its findings alone: the same findings give the same bytes."""

from collections.abc import Sequence

from sage_fast.study.claims import PER_PROMPT, Judgement, judge
from sage_fast.study.experiments import EXPERIMENTS, TIERS, Experiment
from sage_fast.study.findings import COST, Findings

IMAGES = "images/reproduction"
"""Folder of the figures beside the page."""

PUBLISHED_RESULTS = "results/reproduction.jsonl"
"""Where the findings are beside the page, when it is one of the documents."""

HEAD = """# The paper's claims, tested

Written by `sage-fast reproduce --tier quick --publish docs` from
[results/reproduction.jsonl](results/reproduction.jsonl). The claims of the SAGE-GRPO paper (arXiv 2603.21872) about
samplers, the gradient equalizer and the KL are measured in the built-in world of rendered videos, whose data manifold
is known: with its base model or, for Figure 2, with the exact policy ([algorithm.md](algorithm.md), section 5).
Nothing here need hold for an 8.3 B model; a refuted claim is refuted as a general statement. On a cluster:
`sage-fast reproduce --config hv15_480p_lora_8gpu`.

*Confirmed* and *refuted*: the difference is not zero at 5 %, after Holm's adjustment over the claims of its table, or
is computed without uncertainty. *Undetectable*: neither; the last column then has the difference that four of five
such studies would have found. Differences are of the same seeds and noise. Intervals are Student's over the seeds;
scores of trained networks count seeds and prompts as crossed random effects, with Satterthwaite's degrees of freedom.
"-": no figure of the paper is known here. Each line of the results names its commit.
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
        "| claim | here | difference in its favour, 95 % | the paper reports | verdict | detectable |",
        "|---|---|---|---|---|---|",
        *(_row(judgement) for judgement in judge(experiment.claims, findings)),
        "",
        *_scores(experiment, findings),
        f"{_seeds(experiment, findings)} Cost: {_cost(experiment, findings)}.{_made_with(experiment, findings)}",
        "",
    ]
    return "\n".join(lines)


def _row(judgement: Judgement) -> str:
    claim, evidence = judgement.claim, judgement.evidence
    text = claim.text if claim.by == "paper" else f"{claim.text} *(this project's)*"
    if evidence is None:
        return f"| {text} | | | {claim.reported or '-'} | not run | |"
    effect = evidence.effect
    size = "exact" if effect is None else f"{effect.mean:+.3g} ({effect.low:+.3g} .. {effect.high:+.3g})"
    seen = "" if effect is None else f"{effect.detectable:.2g}"
    return f"| {text} | {evidence.ours} | {size} | {claim.reported or '-'} | **{judgement.verdict}** | {seen} |"


def _scores(experiment: Experiment, findings: Findings) -> list[str]:
    """Final scores of every trained arm, means over the seeds."""
    found = {row.quantity for row in findings.rows if row.experiment == experiment.key}
    names = {quantity.removeprefix(PER_PROMPT) for quantity in found if quantity.startswith(PER_PROMPT)}
    columns = ["reward", *sorted(names - {"reward", "overall"})]
    arms = [arm for arm in experiment.arms if findings.select(experiment.key, PER_PROMPT + "reward", arm)]
    if not arms:
        return []
    rows = [[f"{findings.mean(experiment.key, PER_PROMPT + name, arm):.3g}" for name in columns] for arm in arms]
    return [
        f"| final evaluation | {' | '.join(columns)} |",
        "|" + "---|" * (1 + len(columns)),
        *(f"| {arm} | {' | '.join(row)} |" for arm, row in zip(arms, rows, strict=True)),
        "",
    ]


def _seeds(experiment: Experiment, findings: Findings) -> str:
    if not experiment.seeds:
        return "Computed, not sampled."
    seeds = findings.seeds(experiment.key)
    missing = len(experiment.seeds) - len(seeds)
    part = f" ({missing} of {len(experiment.seeds)} not run yet)" if missing else ""
    return f"Seeds: {', '.join(map(str, seeds))}{part}."


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
