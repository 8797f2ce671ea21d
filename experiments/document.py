"""The page of a study and its tables in other pages, made from findings alone: the same findings, the same bytes."""

import re
from collections import Counter
from collections.abc import Container
from statistics import fmean, stdev

from experiments.claims import EXPERIMENTS, LEAST, VERDICTS, Experiment, Judgement, judge
from experiments.findings import COST, PER_PROMPT, Findings
from experiments.testbed import FASTEST, SLOWEST

IMAGES = "images/reproduction"
"""Folder of the figures beside the page."""

PUBLISHED_RESULTS = "results/reproduction.jsonl"
"""Place of the findings beside the page, where it is one of the documents."""

HEAD = """# The paper's claims, tested

Written by `python -m experiments --publish docs` from [results/reproduction.jsonl](results/reproduction.jsonl), which
has every number with its seed, version and commit. The claims of the SAGE-GRPO paper (arXiv 2603.21872) are measured
in the built-in world of rendered videos, whose data manifold is known: with its base model, a small network; with the
exact policy ([algorithm.md](algorithm.md), section 5); and in the exact testbed, that policy with weights to train.
All of it is a toy: nothing here need hold for an 8.3 B model, and a refuted claim is refuted as a general statement.

*Confirmed* and *refuted*: the difference is not zero at 5 %, after Holm's adjustment over the claims of its table, or
is computed without uncertainty (*exact*). *Negligible*: not zero either, and too small to matter, below {least}.
*Undetectable*: none of these; in brackets the difference that four of five such studies would have found. Differences
are of the same seeds and noise, positive where they support the claim (of a range: how far inside), with 95 %
intervals: Student's over the seeds; for trained networks seeds and prompts are crossed random effects, with
Satterthwaite's degrees of freedom. The paper's figures are from public transcriptions of its first version.

**The network.** Evaluated on 16 noises per caption, on one in *Three samplers* and *Twice as many updates*: intervals
count no other noise. In its pictures a dot is a seed, a bar the mean.

**The exact testbed.** 360 legal videos as a mixture of Gaussians whose velocity is known in closed form. 85 numbers
are trained: the confusions of colour, shape and motion, and eight coordinates that lead off the manifold, all mixed by
one fixed rotation. Samplers, advantages and loss are the trainer's. The share of videos that follow their caption
(*aligned*, 0.453 before training) and the drift are computed from the weights, without evaluation noise.

**Every arm at its own learning rate.** Adam's 0.02, 0.04, 0.08 and 0.16, and half or twice the best while that lies at
an edge (0.005 and 0.64 end the search): four seeds choose the rate with the highest Overall, TA + VQ + MQ without any
flaw of the reward; twelve others judge the arm there. What *ends above* another has a higher Overall, on the network a
higher reward. In the pictures of aligned against drift, small dots are the rates tried; the large one, in the legend,
is the best.

[What it cannot say](objectives.md#what-this-cannot-say). Its intervals are over seeds, not over worlds. Take from it
the signs and orders that hold in all its variants.
"""


def render(findings: Findings) -> str:
    """The page. Experiments without findings are named at its end."""
    measured = {row.experiment for row in findings.rows}
    done = [e for e in EXPERIMENTS if _has_section(e, measured)]
    left = [e for e in EXPERIMENTS if e not in done]
    least = "; ".join(f"{name.replace('_', ' ')} {size:g}" for name, size in LEAST.items())
    parts = [HEAD.format(least=least)]
    parts.append(_summary(findings))
    parts += [_section(experiment, findings, drawn=experiment.key in measured) for experiment in done]
    if left:
        lines = [
            "## Not run yet",
            "",
            "| table, figure | claims | trainings, or arms of the testbed | core-hours | |",
            "|---|---|---|---|---|",
        ]
        for e in left:
            hours = f"{_core_hours(e, findings):.0f}" if e.arms else "under 1"
            cells = (e.title, len(e.claims), len(e.trainings() or e.runs), hours)
            lines.append(f"| {' | '.join(map(str, cells))} | `python -m experiments --only {e.key}` |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _has_section(experiment: Experiment, measured: Container[str]) -> bool:
    """True where something was measured, or nothing can be."""
    return experiment.key in measured or all(claim.cannot for claim in experiment.claims)


def _core_hours(experiment: Experiment, findings: Findings) -> float:
    """Of an experiment's trainings of the network, at the mean seconds of an update of those that have been made."""
    made: dict[tuple[str, int | None], int] = {
        (t.arm, t.seed): t.num_updates for e in EXPERIMENTS for t in e.trainings()
    }
    seconds = {(r.arm, r.seed): r.value for r in findings.rows if r.quantity == COST and (r.arm, r.seed) in made}
    each = sum(seconds.values()) / (sum(made[training] for training in seconds) or 1)
    return each * sum(training.num_updates for training in experiment.trainings()) / 3600


def _summary(findings: Findings) -> str:
    """Counts of verdicts on the paper's claims, and on those of this project."""
    lines = [
        "Counts: the paper's claims + this project's own.",
        "",
        f"| table, figure | {' | '.join(VERDICTS)} | seeds | core-minutes |",
        "|---" * 9 + "|",
    ]
    measured = {row.experiment for row in findings.rows}
    for experiment in EXPERIMENTS:
        judged = judge(experiment.claims, findings)
        paper = Counter(judgement.verdict for judgement in judged if judgement.claim.source)
        own = Counter(judgement.verdict for judgement in judged if not judgement.claim.source)
        counts = [f"{paper[name]} + {own[name]}" if paper[name] + own[name] else "" for name in VERDICTS]
        anchor = "".join(c for c in experiment.title.lower().replace(" ", "-") if c.isalnum() or c == "-")
        planned, done = len(experiment.seeds), len({*experiment.seeds} & {*findings.seeds(experiment.key)})
        seeds = "-" if not planned else str(done) if done == planned else f"{done} of {planned}"
        minutes = sum(row.value for row in findings.select(experiment.key, COST)) / 60
        cost = f"{minutes:.0f}" if minutes else "-"
        name = f"[{experiment.title}](#{anchor})" if _has_section(experiment, measured) else experiment.title
        lines.append(f"| {' | '.join([name, *counts, seeds, cost])} |")
    return "\n".join([*lines, ""])


def _section(experiment: Experiment, findings: Findings, *, drawn: bool) -> str:
    lines = [
        f"## {experiment.title}",
        "",
        *([f"![Figure]({IMAGES}/{experiment.key}.png)", ""] if drawn else []),
        experiment.caption + _ends(experiment, findings),
        "",
        "| claim | the paper | here | difference | verdict |",
        "|---|---|---|---|---|",
        *(_row(judgement) for judgement in judge(experiment.claims, findings)),
        "",
    ]
    return "\n".join(lines)


def _ends(experiment: Experiment, findings: Findings) -> str:
    """Arms whose best rate is at an end of the search; the picture has all rates."""
    at = {arm: findings.mean(experiment.key, "rate", arm) for arm in experiment.runs} if experiment.rates else {}
    ends = [arm for arm, rate in at.items() if rate in (SLOWEST, FASTEST)]
    return f" At an end of the search: {'; '.join(ends)}." if ends else ""


def _row(judgement: Judgement) -> str:
    claim, evidence = judgement.claim, judgement.evidence
    reported = ": ".join(part for part in (claim.source, claim.reported) if part)
    verdict = f"**{judgement.verdict}**"
    if evidence is None:
        return f"| {claim.text} | {reported} | {claim.cannot} | | {verdict} |"
    effect, size = evidence.effect, "" if evidence.holds is None else "exact"
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
    """Means over the seeds, with standard errors, of what has an entry in `LEAST`, for every trained arm."""
    found = dict.fromkeys(row.quantity for row in findings.rows if row.experiment == experiment.key)
    columns = [name for name in found if name.startswith(PER_PROMPT) and name.removeprefix(PER_PROMPT) in LEAST]
    columns += ["rate"] if experiment.rates else []
    if not found:
        return f"It has not been run: `python -m experiments --only {experiment.key}`.\n"
    lines = [
        f"| training | {' | '.join(name.removeprefix(PER_PROMPT) for name in columns)} |",
        "|" + "---|" * (1 + len(columns)),
    ]
    for arm in experiment.runs or experiment.arms:
        if not findings.select(experiment.key, columns[0], arm):
            continue
        cells = []
        for quantity in columns:
            values = [row.value for row in findings.select(experiment.key, quantity, arm)]
            error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len({*values}) > 1 else ""
            cells.append(f"{fmean(values):.3f}{error}" if values else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
