"""The evaluation of a trained model against its base model, as files that people read and pass on.

evaluation.json     every number, also per prompt
evaluation.md       the tables, for a README or an issue
evaluation.html     one page with everything, which opens offline, in light and dark; it plays the videos of base/ and
                    trained/ beside it, two at a time
contact_sheet.png   frames of both models, side by side
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path, PurePath
from statistics import stdev
from typing import Any

from sage_fast import __version__
from sage_fast.config.files import write_text
from sage_fast.evaluation import ENOUGH_PROMPTS, OVERALL, REWARD, Estimate, Evaluation, ScoreComparison
from sage_fast.models import video_files
from sage_fast.rewards.base import Scale
from sage_fast.run import media, pages


@dataclass(frozen=True, kw_only=True)
class ShownVideo:
    """A prompt whose videos are in the report.

    `base`, `trained`: paths of the mp4s, in the folders of these names beside the page. `difference`: of the reward.

    Example: `ShownVideo(prompt="a red circle", base=Path("base/00-a-red-circle.mp4"), ..., difference=0.4)`
    """

    prompt: str
    base: Path
    trained: Path
    difference: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the files are made of.

    scores: the reward first. weights: score name -> weight in the reward. settings: what was compared and how, as JSON
    values. videos: shown from the largest gain to the largest loss. scales: of the scores that say how they compare
    with published ones.

    Example: `Report(scores=compare(base, trained, weights), base=base, trained=trained, weights={"VQ": 1.0}, ...)`
    """

    scores: Sequence[ScoreComparison]
    base: Evaluation
    trained: Evaluation
    weights: Mapping[str, float]
    resamples: int
    seed: int
    settings: Mapping[str, Any]
    videos: Sequence[ShownVideo]
    scales: Mapping[str, Scale] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{to_text(self)}\n{headline(self)}"


def spread_over_ranks(differences: Sequence[float], count: int) -> list[int]:
    """Positions of `count` values, evenly from the largest to the smallest, so that losses show as well as gains.

    Example: `spread_over_ranks([0.0, 3.0, 1.0], 2)` is `[1, 0]`.
    """
    order = sorted(range(len(differences)), key=lambda i: -differences[i])
    count = min(count, len(order))
    return [order[round(k * (len(order) - 1) / max(1, count - 1))] for k in range(count)]


def write_report(folder: Path, report: Report) -> list[Path]:
    """Write the four files and return their paths. OSError when the folder cannot be written."""
    texts = {
        "evaluation.json": json.dumps(to_json(report), indent=1) + "\n",
        "evaluation.md": to_markdown(report),
        "evaluation.html": to_html(report),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    paths = [folder / name for name in texts]
    if report.videos:
        rows = [(v.prompt, video_files.read_video(v.base), video_files.read_video(v.trained)) for v in report.videos]
        sheet = folder / "contact_sheet.png"
        media.before_after_sheet(
            sheet, rows, title="same prompt, same noise: base and trained", labels=("base", "trained")
        )
        paths.append(sheet)
    return paths


def to_json(report: Report) -> dict[str, Any]:
    """All numbers of the report as JSON values."""
    return {
        "sage_fast": __version__,
        "prompts": len(report.base.prompts),
        "confidence": 0.95,
        "resamples": report.resamples,
        "bootstrap_seed": report.seed,
        "weights": dict(report.weights),
        "scores": [asdict(score) for score in report.scores],
        "settings": dict(report.settings),
        "scales": {name: asdict(scale) for name, scale in report.scales.items()},
        "per_prompt": [
            {
                "prompt": prompt,
                "base": {name: column[i] for name, column in report.base.columns().items()},
                "trained": {name: column[i] for name, column in report.trained.columns().items()},
            }
            for i, prompt in enumerate(report.base.prompts)
        ],
    }


def headline(report: Report) -> str:
    """What the evaluation found, in a sentence."""
    reward = report.scores[0]
    d = reward.difference
    verb = "rises" if d.mean > 0 else "falls" if d.mean < 0 else "stays"
    doubt = ""
    if reward.count < ENOUGH_PROMPTS:
        doubt = f", of too few prompts to tell (fewer than {ENOUGH_PROMPTS})"
    elif not reward.significant:
        doubt = ", which a difference of zero would explain too"
    return (
        f"{REWARD} {verb} from {reward.base.mean:.4f} to {reward.trained.mean:.4f}: {d.mean:+.4f}, 95 % interval "
        f"{d.low:+.4f} to {d.high:+.4f}{doubt}. The trained model scores higher on {reward.win_rate:.0%} of "
        f"{len(report.base.prompts)} prompts."
    )


def to_text(report: Report) -> str:
    """The main table for a terminal."""
    width = max(20, *(len(s.label) + 2 for s in report.scores))
    lines = [f"{'':<12}" + "".join(f"{s.label:>{width}}" for s in report.scores)]
    for label, cells in _rows(report):
        lines.append(f"{label:<12}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def to_markdown(report: Report) -> str:
    """The main table with its footnotes."""
    lines = [
        "# Evaluation: base and trained",
        "",
        headline(report),
        "",
        "| | " + " | ".join(s.label for s in report.scores) + " |",
        "|---|" + "---:|" * len(report.scores),
    ]
    for label, cells in _rows(report):
        if label == "difference":
            cells = [f"**{c}**" if s.significant else c for c, s in zip(cells, report.scores, strict=True)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", *_footnotes(report, "**bold**"), ""]
    if rows := _scale_rows(report):
        lines += ["| " + " | ".join(SCALE_HEAD) + " |", "|---|---|---|---:|---:|"]
        lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    return "\n".join(lines)


def _rows(report: Report) -> list[tuple[str, list[str]]]:
    """Label and cells of every line of the main table."""

    def mean(e: Estimate) -> str:
        return f"{e.mean:.4f} ± {e.stderr:.4f}"

    rows = [
        ("base", [mean(s.base) for s in report.scores]),
        ("trained", [mean(s.trained) for s in report.scores]),
        ("difference", [f"{s.difference.mean:+.4f} ± {s.difference.stderr:.4f}" for s in report.scores]),
        ("95 %", [f"{s.difference.low:+.4f} .. {s.difference.high:+.4f}" for s in report.scores]),
        ("win rate", [f"{s.win_rate:.0%}" for s in report.scores]),
    ]
    if any(s.tie_rate for s in report.scores):
        rows.append(("ties", [f"{s.tie_rate:.0%}" for s in report.scores]))
    return rows


SCALE_HEAD = ("score", "here", "Table 2 of the SAGE-GRPO paper", "base there", "trained there")


def _scale_rows(report: Report) -> list[tuple[str, ...]]:
    """Score, its scale here and in the paper, and both models' means in the latter."""
    rows = []
    for score in report.scores:
        if (scale := report.scales.get(score.name)) is not None:
            means = (f"{scale.factor * e.mean:.4f}" for e in (score.base, score.trained))
            rows.append((score.name, scale.here, scale.published, *means))
    return rows


def _footnotes(report: Report, marked: str) -> list[str]:
    terms = " + ".join(f"{w:g} {n}" for n, w in report.weights.items())
    there = any(score.name == OVERALL for score in report.scores)
    overall = f" {OVERALL} is the plain sum, whatever was trained on." if there else ""
    lower = ", and lower where there is an arrow down" if any(s.lower_is_better for s in report.scores) else ""
    clear = f"{marked} where the interval leaves out zero"
    if len(report.base.prompts) < ENOUGH_PROMPTS:
        clear = (
            f"nothing is {marked}, because an interval of fewer than {ENOUGH_PROMPTS} prompts is not to be relied on"
        )
    return [
        f"{len(report.base.prompts)} prompts, one video each; both models start from the same noise. "
        f"{REWARD} = {terms}.{overall} Other scores are measured only. Higher is better{lower}.",
        f"± is one standard error. 95 %: paired bootstrap over prompts, {report.resamples:,} resamples, seed "
        f"{report.seed}; {clear}. Win rate: prompts on which the trained model "
        "scores better.",
    ]


# ------------------------------------------------------------------------------------------------ HTML


def to_html(report: Report) -> str:
    """One page: style, chart and pictures are inside, and nothing is fetched but the videos in base/ and trained/."""
    return pages.page(
        "Evaluation: base and trained",
        [
            "<h1>Evaluation: base and trained</h1>",
            f"<p>{escape(headline(report))}</p>",
            _html_table(report),
            *(f'<p class="faint">{escape(line)}</p>' for line in _footnotes(report, "set off")),
            _html_scales(report),
            "<h2>Gain, score by score</h2>",
            _html_intervals(report),
            _html_videos(report),
            _html_prompts(report),
            pages.details(
                "Settings", f"<pre>{escape(json.dumps(dict(report.settings), indent=1, ensure_ascii=False))}</pre>"
            ),
        ],
    )


def _direction(score: ScoreComparison) -> str:
    """A CSS class where a score is significant, else nothing."""
    if not score.significant:
        return ""
    return "gain" if score.sign * score.difference.mean > 0 else "loss"


def _html_table(report: Report) -> str:
    """The main table with a line for every score, which fits a page better than a column does."""
    found = _rows(report)
    rows: list[list[pages.Cell]] = [
        [s.label, *((cells[i], _direction(s) if label == "difference" else "") for label, cells in found)]
        for i, s in enumerate(report.scores)
    ]
    return pages.table(["score", *(label for label, _ in found)], rows, row_headers=True)


def _html_scales(report: Report) -> str:
    """How the scores compare with published ones."""
    rows = _scale_rows(report)
    return f"<h2>On the scales of the paper</h2>{pages.table(SCALE_HEAD, rows)}" if rows else ""


def _html_intervals(report: Report) -> str:
    """Gains with their intervals on one axis: in standard deviations of the base model; better is to the right."""
    columns = [report.base.columns()[s.name] for s in report.scores]
    # A score that is the same for every prompt has no deviation to measure in; it keeps its own unit.
    units = [stdev(column) or 1.0 for column in columns]
    rows = []
    for score, unit in zip(report.scores, units, strict=True):
        d, factor = score.difference, score.sign / unit
        low, high = sorted((factor * d.low, factor * d.high))
        rows.append((score, low, factor * d.mean, high))
    left, width, height = 10, 320, 44
    reach = max(1e-9, *(max(abs(low), abs(high)) for _, low, _, high in rows)) * 1.08

    def x(value: float) -> float:
        return left + width * (value + reach) / (2 * reach)

    bottom = height * len(rows) + 8
    parts = [f'<line class="axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="4" y2="{bottom}" stroke-dasharray="3 3"/>']
    for number, (score, low, mean, high) in enumerate(rows):
        y = height * number + 32
        way = _direction(score)
        parts.append(
            f'<text x="0" y="{y - 14}">{escape(score.label)}</text>'
            f'<line class="bar {way}" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="dot {way}" cx="{x(mean):.1f}" cy="{y}" r="5"/>'
            f'<text x="{left + width + 12}" y="{y + 4}">{mean:+.2f}</text>'
        )
    text = "; ".join(f"{s.label} {mean:+.2f}, {low:+.2f} to {high:+.2f}" for s, low, mean, high in rows)
    return (
        f'<svg viewBox="0 0 {left + width + 60} {bottom + 8}" style="width: 100%; max-width: 30rem" role="img" '
        f'aria-label="{escape(text)}">{"".join(parts)}</svg>'
        '<p class="faint">Mean gain and 95 % interval, in standard deviations of the base model\'s scores over '
        "prompts; right of the dashed line the trained model scores better.</p>"
    )


def _html_videos(report: Report) -> str:
    """Pairs of videos, and frames of them for a page that was sent on alone."""
    if not report.videos:
        return ""
    pairs = []
    for video in report.videos:
        strips = "".join(
            f'<div class="strip"><span>{label}</span><img alt="{label}: frames of the video for: '
            f'{escape(video.prompt)}" src="data:image/jpeg;base64,{_strip(path)}"></div>'
            for label, path in (("base", video.base), ("trained", video.trained))
        )
        pairs.append(
            pages.video_pair(
                pages.Html(f"{pages.prompt_text(video.prompt)} {pages.gain_text(video.difference)}"),
                PurePath("base", video.base.name),
                PurePath("trained", video.trained.name),
                ("base", "trained"),
                pictures=pages.details("Frames", strips),
            )
        )
    return (
        "<h2>Videos, from the largest gain to the largest loss</h2>"
        f'<p class="faint">Same prompt, same noise. The number is the difference in {REWARD}.</p>'
        f'<div class="pairs">{"".join(pairs)}</div>'
    )


def _strip(path: Path) -> str:
    return base64.b64encode(media.filmstrip(video_files.read_video(path))).decode("ascii")


def _html_prompts(report: Report) -> str:
    """Every prompt with the reward of both models, worst difference first."""
    rows = sorted(
        zip(report.base.prompts, report.base.reward, report.trained.reward, strict=True), key=lambda r: r[2] - r[1]
    )
    body: list[list[pages.Cell]] = [
        [(pages.prompt_text(p), "prompt"), f"{b:.4f}", f"{a:.4f}", pages.gain_text(a - b)] for p, b, a in rows
    ]
    return pages.details(
        f"All {len(rows)} prompts, the largest loss first",
        pages.table(["prompt", "base", "trained", "difference"], body),
    )
