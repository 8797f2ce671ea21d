"""The page of a study and its tables in other pages, made from findings alone: the same
findings, the same bytes.
"""

import re
from collections import Counter
from collections.abc import Container
from pathlib import Path
from statistics import fmean, stdev

from experiments.claims import (
    EXPERIMENTS,
    LEAST,
    VERDICTS,
    Experiment,
    Judgement,
    judge,
)
from experiments.findings import PER_PROMPT, Findings

IMAGES = "images/reproduction"
"""Folder of the figures beside the page."""

PUBLISHED_RESULTS = "results/reproduction.jsonl"
"""Place of the findings beside the page, where it is one of the documents."""

HEAD = Path(__file__).with_name("head.txt").read_text("utf-8")
"""Text before the tables of the page."""


def render(findings: Findings) -> str:
    """The page. Experiments without findings are named at its end."""
    measured = {row.experiment for row in findings.rows}
    done = [e for e in EXPERIMENTS if _has_section(e, measured)]
    left = [e for e in EXPERIMENTS if e not in done]
    least = "; ".join(
        f"{name.replace('_', ' ')} {size:g}" for name, size in LEAST.items()
    )
    parts = [HEAD.format(least=least), _summary(findings)]
    for experiment in done:
        picture = ""
        if experiment.key in measured:
            picture = f"![Figure]({IMAGES}/{experiment.key}.png)\n\n"
        lines = [
            f"## {experiment.title}\n\n{picture}{experiment.caption}\n",
            "| claim | paper | measured | verdict |",
            "|---|---|---|---|",
        ]
        lines += [
            _row(judged, experiment.title)
            for judged in judge(experiment.claims, findings)
        ]
        parts.append("\n".join([*lines, ""]))
    if left:
        lines = [
            "## Not run yet",
            "",
            "| table, figure | claims | trainings, or arms of the testbed | |",
            "|---|---|---|---|",
        ]
        for e in left:
            trainings = len(e.trainings() or e.runs)
            command = f"`python -m experiments --only {e.key}`"
            lines.append(f"| {e.title} | {len(e.claims)} | {trainings} | {command} |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _has_section(experiment: Experiment, measured: Container[str]) -> bool:
    """True where something was measured, or nothing can be."""
    return experiment.key in measured or all(
        claim.cannot for claim in experiment.claims
    )


def _summary(findings: Findings) -> str:
    """Counts of verdicts on the paper's claims, and on those of this project."""
    lines = [
        "Counts: the paper's claims + this project's own.",
        "",
        f"| table, figure | {' | '.join(VERDICTS)} | seeds |",
        "|---" * 8 + "|",
    ]
    measured = {row.experiment for row in findings.rows}
    for experiment in EXPERIMENTS:
        judged = judge(experiment.claims, findings)
        paper = Counter(one.verdict for one in judged if one.claim.source)
        own = Counter(one.verdict for one in judged if not one.claim.source)
        counts = [
            f"{paper[name]}+{own[name]}" if paper[name] + own[name] else ""
            for name in VERDICTS
        ]
        anchor = "".join(
            c
            for c in experiment.title.lower().replace(" ", "-")
            if c.isalnum() or c == "-"
        )
        planned = len(experiment.seeds)
        done = len({*experiment.seeds} & {*findings.seeds(experiment.key)})
        seeds = "-"
        if planned:
            seeds = str(done) if done == planned else f"{done} of {planned}"
        short = experiment.title.partition(":")[0]
        name = f"[{short}](#{anchor})" if _has_section(experiment, measured) else short
        lines.append(f"| {' | '.join([name, *counts, seeds])} |")
    return "\n".join([*lines, ""])


def _row(judgement: Judgement, title: str) -> str:
    claim = judgement.claim
    evidence = judgement.evidence
    source = "✓" if claim.source and claim.source in title else claim.source
    reported = ": ".join(part for part in (source, claim.reported) if part)
    verdict = f"**{judgement.verdict}**"
    if evidence is None:
        return f"| {claim.text} | {reported} | {claim.cannot} | {verdict} |"
    effect = evidence.effect
    measured = evidence.ours
    if effect is not None:
        measured = f"{effect.mean:+.3g} ± {effect.high - effect.mean:.2g}"
        if judgement.verdict == "undetectable":
            verdict += f" ({effect.detectable:.2g})"
    return f"| {claim.text} | {reported} | {measured} | {verdict} |"


PLACE = re.compile(
    r"(<!-- study (\w+): begin -->\n).*?(<!-- study \2: end -->)", re.DOTALL
)
"""Place of an experiment's table in another page; the second group is the key."""


def fill_tables(page: str, findings: Findings) -> str:
    """A page with the table of every experiment that it has a place for."""
    known = {experiment.key: experiment for experiment in EXPERIMENTS}
    return PLACE.sub(
        lambda place: place[1] + _table(known[place[2]], findings) + place[3], page
    )


def _table(experiment: Experiment, findings: Findings) -> str:
    """Means over the seeds, with standard errors, of what has an entry in `LEAST`, for
    every trained arm.
    """
    found = dict.fromkeys(
        row.quantity for row in findings.rows if row.experiment == experiment.key
    )
    columns = [
        name
        for name in found
        if name.startswith(PER_PROMPT) and name.removeprefix(PER_PROMPT) in LEAST
    ]
    columns += ["rate"] if experiment.rates else []
    if not found:
        return (
            f"It has not been run: `python -m experiments --only {experiment.key}`.\n"
        )
    lines = [
        (
            "| training | "
            f"{' | '.join(name.removeprefix(PER_PROMPT) for name in columns)} |"
        ),
        "|" + "---|" * (1 + len(columns)),
    ]
    for arm in experiment.runs or experiment.arms:
        if not findings.select(experiment.key, columns[0], arm):
            continue
        cells = []
        for quantity in columns:
            values = [
                row.value for row in findings.select(experiment.key, quantity, arm)
            ]
            cell = f"{fmean(values):.3f}" if values else ""
            if len({*values}) > 1:
                cell += f" ± {stdev(values) / len(values) ** 0.5:.3f}"
            cells.append(cell)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
