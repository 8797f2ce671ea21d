"""The evaluation of a trained model against its base model, as files that people read and pass on.

evaluation.json     every number, also per prompt
evaluation.md       the tables, for a README or an issue
evaluation.html     one page with everything, which opens offline, in light and dark; it plays the videos of base/ and
                    trained/ beside it, two at a time
contact_sheet.png   frames of both models, base above trained
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from sage_fast import __version__
from sage_fast.config.files import write_text
from sage_fast.evaluation import (
    ENOUGH_PROMPTS,
    OVERALL,
    REWARD,
    Evaluation,
    PairedTest,
    direction_label,
    format_comparison,
    to_error,
)
from sage_fast.models.video_files import read_video
from sage_fast.rewards.base import Scale
from sage_fast.run import media
from sage_fast.run.page import render
from sage_fast.run.plots import FAINT, GAIN, LOSS, inline_svg, new_figure

TITLE = "Evaluation: base and trained"


@dataclass(frozen=True, kw_only=True)
class ShownVideo:
    """A prompt whose videos are in the report.

    base, trained: paths of the mp4s, in the folders of these names beside the page. difference: of the reward.

    Example: `ShownVideo(prompt="a red circle", base=Path("base/00-a-red-circle.mp4"), ..., difference=0.4)`
    """

    prompt: str
    base: Path
    trained: Path
    difference: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the files.

    scores: paired tests by score, the reward first. weights: score name -> weight in the reward. settings: of both
    evaluations, as JSON values. videos: shown from the largest gain to the largest loss. scales: of the scores that say
    how they compare with published ones.

    Example: `Report(scores=paired_tests(base, trained), base=base, trained=trained, weights={"VQ": 1.0}, ...)`
    """

    scores: Mapping[str, PairedTest]
    base: Evaluation
    trained: Evaluation
    weights: Mapping[str, float]
    resamples: int
    seed: int
    settings: Mapping[str, Any]
    videos: Sequence[ShownVideo]
    scales: Mapping[str, Scale] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{format_comparison(self.scores)}\n{headline(self)}"


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
        "evaluation.md": to_text("evaluation.md", report),
        "evaluation.html": to_text("evaluation.html", report),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    paths = [folder / name for name in texts]
    if report.videos:
        cells = [
            media.Cell(caption=shown.prompt, videos=[read_video(shown.base), read_video(shown.trained)])
            for shown in report.videos
        ]
        paths.append(folder / "contact_sheet.png")
        media.contact_sheet(paths[-1], cells, title="same prompt, same noise: base above trained")
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
        "scores": {name: asdict(test) for name, test in report.scores.items()},
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
    """The finding in a sentence."""
    test = report.scores[REWARD]
    verb = "rises" if test.mean > 0 else "falls" if test.mean < 0 else "stays"
    doubt = ""
    if test.count < ENOUGH_PROMPTS:
        doubt = f", of too few prompts to tell (fewer than {ENOUGH_PROMPTS})"
    elif not test.significant:
        doubt = ", which a difference of zero would explain too"
    mean, low, high = (to_error(value, test.stderr, "+") for value in (test.mean, test.low, test.high))
    return (
        f"{REWARD} {verb} from {test.before:.4g} to {test.after:.4g}: {mean}, 95 % interval {low} to "
        f"{high}{doubt}. The trained model scores higher on {test.wins:.0%} of "
        f"{test.count} prompts."
    )


def to_text(template: str, report: Report) -> str:
    """The report by one of the templates evaluation.md and evaluation.html."""
    rewards = zip(report.base.prompts, report.base.reward, report.trained.reward, strict=True)
    return render(
        template,
        TITLE,
        headline=headline(report),
        rows=[(direction_label(n, t.lower_is_better), _way(t), t) for n, t in report.scores.items()],
        notes=_notes(report),
        scales=[
            (name, scale.here, scale.published, *(f"{scale.factor * mean:.4g}" for mean in (test.before, test.after)))
            for name, test in report.scores.items()
            if (scale := report.scales.get(name)) is not None
        ],
        intervals=_intervals(report) if template.endswith("html") else "",
        videos=report.videos,
        strip=lambda path: base64.b64encode(media.filmstrip(read_video(path))).decode(),
        prompts=sorted(rewards, key=lambda row: row[2] - row[1]),
        settings=report.settings,
    )


def _way(test: PairedTest) -> str:
    """`gain` or `loss` where a difference is significant, else an empty text."""
    if not test.significant:
        return ""
    return "gain" if (test.mean > 0) is not test.lower_is_better else "loss"


def _notes(report: Report) -> list[str]:
    terms = " + ".join(f"{weight:g} {name}" for name, weight in report.weights.items())
    overall = f" {OVERALL} is the plain sum, whatever was trained on." if OVERALL in report.scores else ""
    lower = any(test.lower_is_better for test in report.scores.values())
    count, noises = len(report.base.prompts), report.base.noises
    videos = "one video" if noises == 1 else f"{noises} videos"
    marked = "differences are marked where the interval leaves out zero"
    if count < ENOUGH_PROMPTS:
        marked = f"none is marked, because an interval of fewer than {ENOUGH_PROMPTS} prompts is not to be relied on"
    return [
        f"{count} prompts, {videos} each; both models start from the same noise. {REWARD} = {terms}.{overall} Other "
        f"scores are measured only. Higher is better{', and lower where there is an arrow down' if lower else ''}.",
        f"± is one standard error. 95 %: paired bootstrap over prompts, {report.resamples:,} resamples, seed "
        f"{report.seed}; {marked}. Win rate: prompts on which the trained model scores better.",
    ]


def _intervals(report: Report) -> str:
    """Gains with their intervals on one axis, in standard deviations of the base model; better is to the right."""
    figure = new_figure(4.4, 0.5 + 0.34 * len(report.scores))
    axes = figure.subplots()
    axes.axvline(0, color=FAINT, linestyle="--", linewidth=0.8)
    columns = report.base.columns()
    for place, (name, test) in enumerate(report.scores.items()):
        # A score that is the same for every prompt has no deviation to measure in; it keeps its own unit.
        factor = (-1 if test.lower_is_better else 1) / (stdev(columns[name]) or 1.0)
        colour = {"gain": GAIN, "loss": LOSS}.get(_way(test), FAINT)
        axes.plot([factor * test.low, factor * test.high], [place, place], color=colour, linewidth=2.5)
        axes.plot(factor * test.mean, place, "o", color=colour, markersize=7)
        axes.annotate(
            f"{factor * test.mean:+.2f}", (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
    labels = [direction_label(name, test.lower_is_better) for name, test in report.scores.items()]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(y=0.3 / len(labels))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(left=False, colors=FAINT, labelcolor="black", labelsize=9)
    return inline_svg(figure)
