"""Several trainings beside each other, as one page, its pictures and its numbers.

FOLDER/
    comparison.html     everything in one file: opens offline, light and dark
    comparison.json     every number
    reward.png  components.png  kl_and_gradient.png     with their SVGs
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast import __version__
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.evaluation import REWARD, direction_label
from sage_fast.run import pages
from sage_fast.tools.arms import Arm, TrainedRun, final_difference, group_into_arms, last_shared_update, paired_runs
from sage_fast.tools.curves import draw_arms, new_figure, save_figure, style_axes
from sage_fast.tools.effects import LEVEL, Effect, holm

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm against the first one in one column of their last shared evaluation.

    p: of the effect, adjusted by Holm over the arms.

    Example: `Difference(arm="sde_type=cps", column="Reward", effect=Effect(mean=0.07, ...), p=0.21)`
    """

    arm: str
    column: str
    effect: Effect
    p: float

    @property
    def verdict(self) -> str:
        """`higher`, `lower` or `not told apart`."""
        if self.p >= LEVEL:
            return "not told apart"
        return "higher" if self.effect.mean > 0 else "lower"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that the files are made of.

    update: of the evaluations that are compared; None where there are none that all runs have. means: arm -> column ->
    mean over seeds and prompts. differences: of every arm but the first. notes: what limits the comparison.

    Example: `compare_runs([Path("runs/sage/seed-0"), Path("runs/cps/seed-0")])`
    """

    arms: Sequence[Arm]
    update: int | None
    means: dict[str, dict[str, float]]
    differences: Sequence[Difference]
    notes: Sequence[str]


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read runs, group them into arms and compare their last shared evaluations.

    Raises:
        ConfigError: a folder is no run, two runs are the same, or their evaluations are of different prompts.
        RunDirectoryError: a file of a run is damaged.
    """
    arms = group_into_arms([TrainedRun(folder) for folder in folders])
    update = last_shared_update(arms)
    notes = _notes(arms, update)
    means: dict[str, dict[str, float]] = {}
    differences: list[Difference] = []
    if update is not None:
        means = {arm.name: _means(arm, update) for arm in arms}
        shared = [c for c in means[arms[0].name] if all(c in columns for columns in means.values())]
        for column in shared if len(arms) > 1 else []:
            effects = [final_difference(arms[0], arm, update, column) for arm in arms[1:]]
            adjusted = holm([effect.p for effect in effects])
            differences += [
                Difference(arm=arm.name, column=column, effect=effect, p=p)
                for arm, effect, p in zip(arms[1:], effects, adjusted, strict=True)
            ]
    return Comparison(arms=arms, update=update, means=means, differences=differences, notes=notes)


def _notes(arms: Sequence[Arm], update: int | None) -> list[str]:
    notes = []
    if update is None:
        notes.append("The runs have no evaluation after update 0 in common, so their final scores are not compared.")
    ends = {max(run.evaluations, default=0) for arm in arms for run in arm.runs}
    if update is not None and max(ends) > update:
        notes.append(f"Some runs were evaluated later than update {update}, the last one that all of them have.")
    for arm in arms[1:]:
        pairs = paired_runs(arms[0], arm)
        if all(one.seed != other.seed for one, other in pairs):
            notes.append(f"{arm.name} has no seed of {arms[0].name}: their runs are paired in order.")
        elif len(pairs) < max(len(arm.runs), len(arms[0].runs)):
            notes.append(f"{arm.name} and {arms[0].name} share {len(pairs)} seed(s); only these are tested.")
        if len(pairs) == 1:
            notes.append(f"One seed of {arm.name}: its interval is over prompts and says nothing of other seeds.")
    return notes


def _means(arm: Arm, update: int) -> dict[str, float]:
    columns = [run.evaluation(update).columns() for run in arm.runs]
    shared = [name for name in columns[0] if all(name in other for other in columns)]
    return {name: sum(sum(c[name]) / len(c[name]) for c in columns) / len(columns) for name in shared}


def write_comparison(folder: Path, comparison: Comparison) -> list[Path]:
    """Write all files and return their paths. OSError when the folder cannot be written."""
    figures = draw_comparison(comparison)
    texts = {
        "comparison.html": to_html(comparison),
        "comparison.json": json.dumps(to_json(comparison), indent=1) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts] + [p for n, f in figures.items() for p in save_figure(folder, n, f)]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All numbers as JSON values."""
    return {
        "sage_fast": __version__,
        "update": comparison.update,
        "arms": [{"name": arm.name, "runs": [str(r.folder) for r in arm.runs]} for arm in comparison.arms],
        "means": comparison.means,
        "differences": [
            asdict(d) | {"low": d.effect.low, "high": d.effect.high, "detectable": d.effect.detectable}
            for d in comparison.differences
        ],
        "notes": list(comparison.notes),
    }


def sentence(difference: Difference, first: str) -> str:
    """What was found of an arm, in a sentence."""
    e = difference.effect
    size = f"{e.mean:+.4f}, 95 % interval {e.low:+.4f} to {e.high:+.4f}"
    if difference.verdict == "not told apart":
        return (
            f"{difference.arm} is not told apart from {first} ({size}); a difference of {e.detectable:.4f} would have "
            "been seen in four of five such studies."
        )
    return f"{difference.arm} is {difference.verdict} than {first}: {size}."


# ------------------------------------------------------------------------------------------------ pictures


def panels(comparison: Comparison) -> dict[str, list[str]]:
    """Metrics that are shown, by the name of their picture: rewards, their components, KL and gradient norm."""
    keys = {key for arm in comparison.arms for run in arm.runs for row in run.rows for key in row}
    components = sorted(k for k in keys if k.startswith("eval/") and k.endswith("_mean") and k != "eval/reward_mean")
    wanted = ("kl/position", "kl/velocity", "kl/weight", "kl/grad_share", "grad_norm")
    found: dict[str, list[str]] = {
        "reward": [k for k in ("eval/reward_mean", "reward/mean") if k in keys],
        "components": components,
        "kl_and_gradient": [k for k in wanted if k in keys],
    }
    return {name: shown for name, shown in found.items() if shown}


def draw_comparison(comparison: Comparison) -> dict[str, "Figure"]:
    """Figures by file name."""
    return {name: _panels(comparison.arms, shown) for name, shown in panels(comparison).items()}


def _panels(arms: Sequence[Arm], keys: Sequence[str]) -> "Figure":
    columns = min(len(keys), 3)
    rows = math.ceil(len(keys) / columns)
    width = {1: 9.0, 2: 11.0}.get(columns, 12.0)
    figure = new_figure(width, 3.4 * rows + 0.3 * len(arms) / columns)
    for place, key in enumerate(keys):
        axes = figure.add_subplot(rows, columns, place + 1)
        style_axes(axes, key, "optimizer update")
        draw_arms(axes, arms, key)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(arms)), frameon=False, fontsize=9)
    return figure


# ------------------------------------------------------------------------------------------------ page


def to_html(comparison: Comparison) -> str:
    """One self-contained page."""
    first = comparison.arms[0].name
    rewards = [d for d in comparison.differences if d.column == REWARD]
    of_update = "" if comparison.update is None else f" after update {comparison.update}"
    drawn = [
        pages.line_chart(key, [_series(arm, number, key) for number, arm in enumerate(comparison.arms)])
        for keys in panels(comparison).values()
        for key in keys
    ]
    sections = [
        "<h1>Comparison of runs</h1>",
        *(f"<p>{escape(sentence(d, first))}</p>" for d in rewards),
        *(f'<p class="faint">{escape(note)}</p>' for note in comparison.notes),
        f"<h2>Arms{escape(of_update)}</h2>",
        pages.table(*_arm_rows(comparison), row_headers=True),
        f"<h2>Differences to {escape(first)}</h2>" if comparison.differences else "",
        pages.table(*_difference_rows(comparison), row_headers=True) if comparison.differences else "",
        '<p class="faint">Runs that differ in their seed alone are one arm. Differences are of the same prompts, noise '
        "and seeds; their intervals are for other seeds and prompts (crossed random effects, Student's t over the "
        "seeds). p is adjusted by Holm over the arms. Detectable: the smallest difference that four of five such "
        "studies would find.</p>",
        "<h2>Over the updates</h2>",
        '<p class="faint">Mean over the seeds; the band is one standard deviation of the seeds.</p>',
        pages.charts(drawn),
    ]
    return pages.page("Comparison of runs", sections)


def _series(arm: Arm, number: int, key: str) -> pages.Series:
    updates, means, spreads = arm.band(key)
    banded = len(arm.runs) > 1
    return pages.Series(
        label=arm.name,
        x=updates,
        y=means,
        low=[m - s for m, s in zip(means, spreads, strict=True)] if banded else None,
        high=[m + s for m, s in zip(means, spreads, strict=True)] if banded else None,
        colour=number % pages.NUM_COLOURS,
    )


def _arm_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    columns = list(comparison.means.get(comparison.arms[0].name, {}))
    rows = []
    for arm in comparison.arms:
        found = comparison.means.get(arm.name, {})
        cells = [f"{found[c]:.4f}" if c in found else "" for c in columns]
        rows.append([arm.name, ", ".join(map(str, arm.seeds)), *cells])
    lower = _lower_is_better(comparison)
    return ["arm", "seeds", *(direction_label(name, name in lower) for name in columns)], rows


def _lower_is_better(comparison: Comparison) -> set[str]:
    if comparison.update is None:
        return set()
    runs = [run for arm in comparison.arms for run in arm.runs]
    return {name for run in runs for name in run.evaluation(comparison.update).lower_is_better}


def _difference_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    lower = _lower_is_better(comparison)
    rows = [
        [
            d.arm,
            direction_label(d.column, d.column in lower),
            f"{d.effect.mean:+.4f} ± {d.effect.stderr:.4f}",
            f"{d.effect.low:+.4f} .. {d.effect.high:+.4f}",
            f"{d.p:.3f}",
            f"{d.effect.detectable:.4f}",
            d.verdict,
        ]
        for d in comparison.differences
    ]
    return ["arm", "score", "difference", "95 %", "p", "detectable", ""], rows


def to_text(comparison: Comparison) -> str:
    """The rewards of the arms and their differences, for a terminal."""
    lines = []
    for arm in comparison.arms:
        mean = comparison.means.get(arm.name, {}).get(REWARD)
        seeds = f"{len(arm.runs)} seed{'s' if len(arm.runs) > 1 else ''}"
        lines.append(f"{arm.name}: {seeds}" + ("" if mean is None else f", reward {mean:.4f}"))
    first = comparison.arms[0].name
    lines += [sentence(d, first) for d in comparison.differences if d.column == REWARD]
    return "\n".join([*lines, *comparison.notes])


def check_several(folders: Sequence[Path]) -> None:
    """ConfigError for fewer than two runs."""
    if len(folders) < 2:
        raise ConfigError(f"compare needs at least 2 runs, got {len(folders)}: sage-fast compare runs/one runs/other")
