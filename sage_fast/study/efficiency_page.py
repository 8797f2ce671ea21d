"""The page of `sage-fast efficiency`, made from its findings alone: the same findings give the same bytes."""

from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast.config.files import replacing
from sage_fast.study.claims import PER_PROMPT, final_scores
from sage_fast.study.combinations import KINDS, REFERENCE
from sage_fast.study.findings import COST, Finding, Findings, read_findings, write_findings
from sage_fast.study.lever_study import CURVES, TABLE, at_equal_compute, gain, is_told, ranking
from sage_fast.tools.curves import COLOURS, line_style, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, RESULTS, IMAGES = "efficiency.md", "results/efficiency.jsonl", "images/efficiency"
"""Page, results and figures below the folder of the documents."""

HEADER = (
    *("levers", "gradient", "PFLOP", "relative variance", "noise", "bias", "cosine"),
    *("signal per 1000 PFLOP", "signal kept", "signal per FLOP"),
)

HEAD = """# Signal per FLOP

Written by `sage-fast efficiency` from `results/efficiency.jsonl`; to change a number, run it again:

    sage-fast efficiency --publish docs
    sage-fast efficiency --train --publish docs    # and trainings with the best, on six seeds

A lever that leaves a part of the gradient out makes an update cheaper and its gradient noisier. Here the weights stand
still after a short training, and the gradient is estimated many times with each combination of levers: other prompts
and other noise for each estimate, the same for all combinations. An estimate g is the gradient of one rollout.

* **Relative variance** is tr Var g / |E g|^2, **signal** its inverse, and **signal per PFLOP** the signal over the
  FLOPs of an estimate, counted by `sage-fast plan`: transformer and decoder, not the reward. **Noise** is tr Var g over
  the reference recipe's, tr Var r.
* **Bias** is |E g - E r|^2 / |E r|^2 for that r, **cosine** that between E g and E r. Both are free
  of the estimates' noise on average, so a bias of zero is measured as a small number of either sign.
* **Signal kept** is the signal of an estimate, along E r, over the reference's, that is, (E g . E r)^2 / |E r|^4 times
  tr Var r / tr Var g. Where the gradient is the same, or the same on average, which tests prove, E g is E r: the
  variances alone are measured, and the signal is the reference recipe's times what is kept. **Signal per FLOP** is that
  over what an estimate costs, both in multiples of the reference recipe's.

Products of different estimates carry no noise of their own, and errors are standard errors of the jackknife over the
estimates. A dash is what the estimates do not tell: what a biased lever keeps, where that or half of the reference
recipe's signal is no larger than its error, so that nothing is known of how good the lever is; and a cosine that is
lost in the noise or whose error is above 1.

Each line of the results names the commit that it was measured with; base model and recipe are those of that commit.
"""


def render(findings: Findings) -> str:
    """The page."""
    parts = [HEAD, _estimates(findings)]
    if findings.arms(CURVES, "final_reward"):
        parts.append(_trainings(findings))
    return "\n".join(parts)


def _estimates(findings: Findings) -> str:
    rows = findings.select(TABLE, "signal")
    if not rows:
        return "Nothing was measured yet.\n"
    first, last = rows[0], rows[-1]
    lines = [
        f"![Signal per FLOP]({IMAGES}/table.png)",
        "",
        f"| {' | '.join(HEADER)} |",
        "|" + "---|" * len(HEADER),
        *(_row(findings, name) for name in (REFERENCE, *ranking(findings))),
        "",
        f"{first.n} estimates of the reference recipe, {last.n} of each other. "
        f"Cost: {_seconds(findings, TABLE) / 60:.1f} core-minutes. {_made_with(first)}.",
        "",
    ]
    return "\n".join(lines)


def _row(findings: Findings, name: str) -> str:
    found = {row.quantity: row for row in findings.rows if row.experiment == TABLE and row.arm == name}
    pflop, signal, cosine = found["pflop"].value, found["signal"], found.get("cosine")
    per_pflop = (1000 * signal.value / pflop, 1000 * (signal.stderr or 0.0) / pflop)
    cells = [
        name,
        KINDS.get(name, ""),
        f"{pflop:.0f}",
        _relative_variance(signal),
        _number(found["noise"]),
        _number(found["bias"]),
        _number(cosine) if cosine and (cosine.stderr or 0.0) <= 1 else "–",
        _pair(*per_pflop, 3),
        *_kept_and_gain(findings, name),
    ]
    return f"| {' | '.join(cells)} |"


def _kept_and_gain(findings: Findings, name: str) -> tuple[str, str]:
    """Signal kept and signal per FLOP, where they are resolved."""
    (kept,), (value, error) = findings.select(TABLE, "kept", name), gain(findings, name)
    if KINDS.get(name) == "exact":
        return "1", f"{value:.2f}x"
    return (_number(kept), f"{value:.2f} ± {error:.2f}x") if is_told(findings, name) else ("–", "–")


def _relative_variance(signal: Finding) -> str:
    """Its inverse; a bound where the signal is not told apart from none."""
    value, error = signal.value, signal.stderr or 0.0
    if value > 2 * error:
        return f"{1 / value:.0f} ± {error / value**2:.0f}"
    return f"> {1 / (value + 2 * error):.0f}"


def _number(finding: Finding) -> str:
    return _pair(finding.value, finding.stderr or 0.0)


def _pair(value: float, error: float, digits: int = 2) -> str:
    """A number and its error; whole where the error is 10 and more."""
    if error >= 10:
        return f"{value:.0f} ± {error:.0f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _trainings(findings: Findings) -> str:
    scores = final_scores(findings, CURVES)
    lines = [
        "## Reward at equal compute",
        "",
        f"![Reward over counted FLOPs]({IMAGES}/curves.png)",
        "",
        "Whole trainings, each of as many counted FLOPs as the reference recipe's. Reward of the final evaluation by "
        "the ODE; intervals count seeds and prompts as crossed random effects. Those of a single pass are made in two "
        "phases, which have the same gradient, at the single pass's cost.",
        "",
        f"| {' | '.join(('levers', 'updates', 'reward', 'over the reference, 95 %', 'seeds', *scores))} |",
        "|" + "---|" * (5 + len(scores)),
    ]
    for arm in findings.arms(CURVES, "final_reward"):
        rows = findings.select(CURVES, "final_reward", arm)
        effect = ""
        if arm != REFERENCE.replace(" ", "-") and len(rows) > 1:
            found = at_equal_compute(findings, arm).effect
            assert found is not None
            effect = f"{found.mean:+.3g} ({found.low:+.3g} .. {found.high:+.3g})"
        mean = findings.mean(CURVES, "final_reward", arm)
        cells = [arm.replace("-", " "), str(_updates(findings, arm)), f"{mean:.3f}", effect, str(len(rows))]
        cells += [f"{findings.mean(CURVES, PER_PROMPT + name, arm):.3g}" for name in scores]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Cost: {_seconds(findings, CURVES) / 3600:.1f} core-hours.", ""])


def _updates(findings: Findings, arm: str) -> int:
    return len(findings.select(CURVES, "area", arm)[0].parts)


def _seconds(findings: Findings, experiment: str) -> float:
    return sum(row.value for row in findings.select(experiment, COST))


def _made_with(row: Finding) -> str:
    commit = f", commit {row.commit[:9]}{row.commit[40:]}" if row.commit else ""
    return f"SAGE-Fast {row.version}, torch {row.torch}{commit}"


def draw_table(findings: Findings) -> "Figure":
    """Signal per FLOP of every combination for which it is resolved, in multiples of the reference."""
    names = [name for name in ranking(findings)[::-1] if is_told(findings, name)]
    gains = [gain(findings, name) for name in names]
    figure = new_figure(7.5, 1.2 + 0.26 * len(names))
    axes = figure.subplots()
    style_axes(axes, "signal per FLOP over the reference recipe's")
    colour = {"exact": COLOURS[2], "unbiased": COLOURS[0], "biased": COLOURS[1]}
    for kind, shade in colour.items():
        places = [i for i, name in enumerate(names) if KINDS.get(name) == kind]
        if not places:
            continue
        values, errors = zip(*(gains[i] for i in places), strict=True)
        axes.errorbar(values, places, xerr=errors, fmt="o", ms=4, color=shade, label=kind)
    axes.axvline(1.0, color="#8c96a3", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_curves(findings: Findings) -> "Figure":
    """Reward of the evaluations over counted PFLOP, a line per arm, the mean over its seeds."""
    figure = new_figure(7.5, 3.8)
    axes = figure.subplots()
    style_axes(axes, "reward over counted compute", "PFLOP", "mean reward of the evaluations")
    cost = {name.replace(" ", "-"): findings.mean(TABLE, "pflop", name) for name in findings.arms(TABLE, "pflop")}
    for number, arm in enumerate(findings.arms(CURVES, "learning")):
        curves = zip(*(row.parts for row in findings.select(CURVES, "learning", arm)), strict=True)
        means = [sum(values) / len(values) for values in curves]
        every = _updates(findings, arm) / (len(means) - 1)
        places = [cost[arm] * every * i for i in range(len(means))]
        axes.plot(places, means, marker="o", ms=3, label=arm.replace("-", " "), **line_style(number))
    axes.legend(frameon=False, fontsize=8)
    return figure


def write_page(folder: Path, results: str, findings: Findings) -> None:
    """Page, results and figures, made of the numbers as the file has them, which are rounded."""
    write_findings(folder / results, findings.rows)
    kept = read_findings(folder / results)
    with replacing(folder / PAGE) as partial:
        partial.write_text(render(kept), "utf-8")
    if kept.rows:
        save_figure(folder / IMAGES, "table", draw_table(kept))
    if kept.select(CURVES, "learning"):
        save_figure(folder / IMAGES, "curves", draw_curves(kept))


def summary(findings: Findings) -> str:
    """A line per combination, for the terminal."""
    lines = [f"{'levers':38} {'PFLOP':>7} {'signal kept':>14} {'signal per FLOP':>16}"]
    for name in (REFERENCE, *ranking(findings)) if findings.arms(TABLE, "kept") else ():
        kept, times = _kept_and_gain(findings, name)
        lines.append(f"{name:38} {findings.mean(TABLE, 'pflop', name):7.0f} {kept:>14} {times:>16}")
    return "\n".join([*lines, f"Cost: {_seconds(findings, TABLE) / 60:.1f} core-minutes."])
