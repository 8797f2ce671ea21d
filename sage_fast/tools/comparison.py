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
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sage_fast import __version__
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.evaluation import REWARD, direction_label, to_error
from sage_fast.run.page import charts, render
from sage_fast.run.plots import Line, draw_lines, new_figure, save_figure, style_axes
from sage_fast.tools.arms import Arm, TrainedRun, final_difference, group_into_arms, last_shared_update, paired_runs
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
    """The content of the files.

    update: of the evaluations that are compared; None where there are none that all runs have. means: arm -> column ->
    mean over seeds and prompts. differences: of every arm but the first. lower_is_better: columns that fall as videos
    get better. notes: what limits the comparison.

    Example: `compare_runs([Path("runs/sage/seed-0"), Path("runs/cps/seed-0")])`
    """

    arms: Sequence[Arm]
    update: int | None
    means: dict[str, dict[str, float]]
    differences: Sequence[Difference]
    lower_is_better: set[str]
    notes: Sequence[str]


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read runs, group them into arms and compare their last shared evaluations.

    Raises:
        ConfigError: fewer than two runs, a folder that holds none, the same run twice, or evaluations of different
            prompts.
        RunDirectoryError: a file of a run is damaged.
    """
    if len(folders) < 2:
        raise ConfigError(f"compare needs at least 2 runs, got {len(folders)}: sage-fast compare runs/one runs/other")
    arms = group_into_arms([TrainedRun(folder) for folder in folders])
    update = last_shared_update(arms)
    means: dict[str, dict[str, float]] = {}
    differences: list[Difference] = []
    lower: set[str] = set()
    if update is not None:
        for arm in arms:
            evaluations = [run.evaluation(update) for run in arm.runs]
            lower.update(*(evaluation.lower_is_better for evaluation in evaluations))
            columns = [evaluation.columns() for evaluation in evaluations]
            shared = [name for name in columns[0] if all(name in other for other in columns)]
            means[arm.name] = {name: fmean(fmean(c[name]) for c in columns) for name in shared}
        for column in means[arms[0].name] if len(arms) > 1 else []:
            if not all(column in found for found in means.values()):
                continue
            effects = [final_difference(arms[0], arm, update, column) for arm in arms[1:]]
            adjusted = holm([effect.p for effect in effects])
            differences += [
                Difference(arm=arm.name, column=column, effect=effect, p=p)
                for arm, effect, p in zip(arms[1:], effects, adjusted, strict=True)
            ]
    return Comparison(
        arms=arms,
        update=update,
        means=means,
        differences=differences,
        lower_is_better=lower,
        notes=_notes(arms, update),
    )


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


def write_comparison(folder: Path, comparison: Comparison) -> list[Path]:
    """Write all files and return their paths. OSError when the folder cannot be written."""
    panels = _panels(comparison.arms)
    figures = {name: _figure(comparison.arms, keys) for name, keys in panels.items()}
    texts = {
        "comparison.html": _html(comparison, [key for keys in panels.values() for key in keys]),
        "comparison.json": json.dumps(_json(comparison), indent=1) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts] + [p for n, f in figures.items() for p in save_figure(folder, n, f)]


def _json(comparison: Comparison) -> dict[str, Any]:
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


def _panels(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Metrics that are shown, by the name of their picture: rewards, their components, KL and gradient norm."""
    keys = {key for arm in arms for run in arm.runs for row in run.rows for key in row}
    wanted = ("kl/position", "kl/velocity", "kl/weight", "kl/grad_share", "grad_norm")
    found: dict[str, list[str]] = {
        "reward": [k for k in ("eval/reward_mean", "reward/mean") if k in keys],
        "components": sorted(k for k in keys - {"eval/reward_mean"} if k.startswith("eval/") and k.endswith("_mean")),
        "kl_and_gradient": [k for k in wanted if k in keys],
    }
    return {name: shown for name, shown in found.items() if shown}


def _lines(arms: Sequence[Arm], key: str) -> list[Line]:
    """A metric of every arm over its updates: the mean over its seeds, in a band of one standard deviation of them."""
    return [
        Line(label=arm.name, x=updates, y=means, spread=spreads, colour=number, dots=len(updates) < 15)
        for number, arm in enumerate(arms)
        for updates, means, spreads in [arm.band(key)]
    ]


def _figure(arms: Sequence[Arm], keys: Sequence[str]) -> "Figure":
    columns = min(len(keys), 3)
    rows = math.ceil(len(keys) / columns)
    figure = new_figure({1: 9.0, 2: 11.0}.get(columns, 12.0), 3.4 * rows + 0.3 * len(arms) / columns)
    for place, key in enumerate(keys):
        axes = figure.add_subplot(rows, columns, place + 1)
        style_axes(axes, key, "optimizer update")
        draw_lines(axes, _lines(arms, key))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(arms)), frameon=False, fontsize=9)
    return figure


def _html(comparison: Comparison, keys: Sequence[str]) -> str:
    """One self-contained page."""
    columns = comparison.means.get(comparison.arms[0].name, {})
    return render(
        "comparison.html",
        "Comparison of runs",
        sentences=_sentences(comparison),
        comparison=comparison,
        labels={name: direction_label(name, name in comparison.lower_is_better) for name in columns},
        charts=charts(*((key, _lines(comparison.arms, key), {}) for key in keys)),
    )


def _sentences(comparison: Comparison) -> list[str]:
    """The finding about the reward of every arm but the first."""
    found = []
    for difference in comparison.differences:
        e, first = difference.effect, comparison.arms[0].name
        mean, low, high = (to_error(value, e.stderr, "+") for value in (e.mean, e.low, e.high))
        size = f"{mean}, 95 % interval {low} to {high}"
        if difference.column != REWARD:
            continue
        if difference.verdict == "not told apart":
            found.append(
                f"{difference.arm} is not told apart from {first} ({size}); a difference of {e.detectable:.3g} would "
                "have been seen in four of five such studies."
            )
        else:
            found.append(f"{difference.arm} is {difference.verdict} than {first}: {size}.")
    return found


def to_text(comparison: Comparison) -> str:
    """The rewards of the arms and their differences, for a terminal."""
    lines = []
    for arm in comparison.arms:
        mean = comparison.means.get(arm.name, {}).get(REWARD)
        seeds = f"{len(arm.runs)} seed{'s' if len(arm.runs) > 1 else ''}"
        lines.append(f"{arm.name}: {seeds}" + ("" if mean is None else f", reward {mean:.4g}"))
    return "\n".join([*lines, *_sentences(comparison), *comparison.notes])
