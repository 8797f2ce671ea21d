"""Several trainings beside each other, as one page and its numbers. Those that differ
in their seed alone are one arm.

FOLDER/
    comparison.html     everything in one file: opens offline, light and dark
    comparison.json     every number
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sage_fast import __version__
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.config.schema import RunConfig, tried_settings
from sage_fast.config.sections import FIXED, PAIRS, marked_keys
from sage_fast.evaluation import (
    REWARD,
    Evaluation,
    direction_label,
    mean_interval,
    scored_in_both,
)
from sage_fast.run.directory import RunDirectory
from sage_fast.run.page import charts, render
from sage_fast.run.plots import Line
from sage_fast.tools.effects import LEVEL, Effect, crossed_effect, holm

TITLES = {
    "eval/reward_mean": "reward in evaluations",
    "reward/mean": "reward while training",
    "kl/position": "KL of the positions",
    "kl/velocity": "KL of the velocities",
    "kl/weight": "weight of the KL",
    "kl/grad_share": "KL's share of the gradient",
    "grad_norm": "gradient norm",
}
"""Metric -> what its chart is called."""


EVALUATED = [
    key
    for key, reason in marked_keys(RunConfig, FIXED).items()
    if reason == PAIRS
    and not key.startswith("reward.")
    and key != "evaluation.num_prompts"  # differences are of shared prompts
]
"""Settings that decide how the videos of an evaluation are made."""

USUAL = {
    "evaluation.num_steps": "rollout.num_steps",
    "evaluation.height": "video.height",
    "evaluation.width": "video.width",
}
"""Of these, one that may be null -> the one that it is then."""


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ in nothing but their seed, in the order of their seeds.

    Attributes:
        name: what their folders have in common.
        apart: the settings that set it apart from the other arms.

    Example: `Arm(name="cps", apart="sde_type=cps", runs=[...])` of the folders cps-0 to
    cps-5.
    """

    name: str
    apart: str
    runs: Sequence[RunDirectory]

    def reward(self) -> dict[str, float]:
        """The weights of the scores that are its reward."""
        weights = self.runs[0].settings["reward.weights"]
        return {name: weight for name, weight in weights.items() if weight}

    def evaluated(self) -> dict[str, Any]:
        """How the videos of its evaluations are made, by the key that decides it."""
        settings = self.runs[0].settings
        # The configuration of an older release lacks some.
        kept = {key: settings[key] for key in EVALUATED if key in settings}
        for key, usual in USUAL.items():
            otherwise = kept.pop(usual)
            kept[key] = kept[key] or otherwise
        return kept

    def line(self, key: str, colour: int = 0) -> Line:
        """A metric over the updates that every seed has logged: the mean, in a band of
        one sample deviation (0 for one seed).
        """
        curves = [run.curve(key) for run in self.runs]
        updates = sorted(set.intersection(*map(set, curves)))
        means = []
        spreads = []
        for update in updates:
            values = [curve[update] for curve in curves]
            means.append(fmean(values))
            spreads.append(stdev(values) if len(values) > 1 else 0.0)
        return Line(
            label=self.name,
            x=updates,
            y=means,
            spread=spreads,
            colour=colour,
            dots=len(updates) < 15,
        )


def group_into_arms(runs: Sequence[RunDirectory]) -> list[Arm]:
    """Arms in the order in which their first runs are given.

    Raises:
        ConfigError: two runs of an arm have the same seed, so one of them is not needed
            or not what was meant.
    """
    groups: dict[str, list[RunDirectory]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        kept = tried_settings(run.settings)
        # As a text: values may be lists, and a dict takes none for a key.
        identity = repr(sorted(kept.items()))
        groups.setdefault(identity, []).append(run)
        settings[identity] = kept
    for group in groups.values():
        group.sort(key=lambda run: run.seed)
        for one, other in pairwise(group):
            if one.seed == other.seed:
                raise ConfigError(
                    f"{one} and {other} have the same configuration and seed "
                    f"{one.settings['seed']}: leave one out, "
                    "or train another seed."
                )
    names = _arm_names(list(groups.values()))
    keys = sorted({key for tree in settings.values() for key in tree})
    differing = [
        key
        for key in keys
        if len({repr(tree.get(key)) for tree in settings.values()}) > 1
    ]
    arms = []
    for name, (identity, group) in zip(names, groups.items(), strict=True):
        values = [settings[identity].get(key) for key in differing]
        apart = ", ".join(
            f"{key}={value}" for key, value in zip(differing, values, strict=True)
        )
        arms.append(Arm(name=name, apart=apart, runs=group))
    return arms


def _arm_names(groups: Sequence[Sequence[RunDirectory]]) -> list[str]:
    """Names of groups: the common beginning of their folders, with as many folders
    above as tell the groups apart.

    Example: a/sage-0 and a/sage-1 are `sage`, as sage/seed-0 and sage/seed-1 are;
    sage/seed-0 and cps/seed-0, an arm each, are those two paths.
    """
    shared = []
    for group in groups:
        prefix = os.path.commonprefix([run.path.resolve().as_posix() for run in group])  # noqa: RUF071  of texts
        # Of seeds 10 and 11 the first digit is common too.
        shared.append(
            (
                re.sub(r"[-_. /]+(seed[-_. /]*)?\d*$", "", prefix)
                if len(group) > 1
                else prefix
            ).split("/")
        )
    for depth in range(1, max(map(len, shared)) + 1):
        names = ["/".join(parts[-depth:]).rstrip("/") for parts in shared]
        if all(names) and len({*names}) == len(names):
            return names
    return [", ".join(run.path.name for run in group) for group in groups]


def paired_runs(first: Arm, second: Arm) -> list[tuple[RunDirectory, RunDirectory]]:
    """Runs of the seeds that both arms have. Where they share none, in order: such
    pairs gain no precision.
    """
    ours, theirs = ({run.seed: run for run in arm.runs} for arm in (first, second))
    shared = [seed for seed in ours if seed in theirs]
    if shared:
        return [(ours[seed], theirs[seed]) for seed in shared]
    return list(zip(first.runs, second.runs, strict=False))


def final_difference(first: Arm, second: Arm, update: int, column: str) -> Effect:
    """Second minus first of a column of the evaluation (see `Evaluation.columns`), over
    paired seeds and prompts.

    Raises:
        ConfigError: the evaluations are of different prompts, or a column is missing.
    """
    rows: list[list[float]] = []
    prompts: set[tuple[str, ...]] = set()
    try:
        loaded = [
            [Evaluation.load(run.evaluation(update)) for run in pair]
            for pair in paired_runs(first, second)
        ]
        # Every seed needs the same prompts, so one that a reward could not score
        # anywhere is left out of all.
        shared = set.intersection(
            *(set(evaluation.numbers()) for pair in loaded for evaluation in pair)
        )
        for pair in loaded:
            before, after = scored_in_both(
                *(evaluation.only(shared) for evaluation in pair)
            )
            prompts.add(tuple(before.prompts))
            pairs = zip(before.columns()[column], after.columns()[column], strict=True)
            rows.append([b - a for a, b in pairs])
        if len(prompts) > 1:
            raise ValueError("their seeds were evaluated on different prompts")
        return crossed_effect(rows)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{first.name!r} and {second.name!r} cannot be compared in {column}: "
            f"{error}"
        ) from error


# --------------------------------------------------------------------------------------
# comparison


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm against the first one in one column of their last shared evaluation.

    p: of the effect, adjusted by Holm over the arms.

    Example: `Difference(arm="sde_type=cps", column="Reward", effect=Effect(mean=0.07,
    ...), p=0.21)`
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

    Attributes:
        update: of the evaluations that are compared; None where there are none that all
            runs have.
        means: arm -> column -> mean over seeds and prompts.
        differences: of every arm but the first.
        lower_is_better: columns that fall as videos get better.
        notes: what limits the comparison.

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
        ConfigError: fewer than two runs, a folder that holds none, the same run twice,
            or evaluations of different prompts.
        RunDirectoryError: a file of a run is damaged.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"compare needs at least 2 runs, got {len(folders)}: sage-fast compare "
            "runs/one runs/other"
        )
    arms = group_into_arms([RunDirectory(folder) for folder in folders])
    # The base model, which is update 0, is the same in all of them.
    evaluated = set.intersection(
        *(set(run.evaluations()) for arm in arms for run in arm.runs)
    ) - {0}
    update = max(evaluated, default=None)
    means: dict[str, dict[str, float]] = {}
    differences: list[Difference] = []
    lower: set[str] = set()
    if update is not None:
        for arm in arms:
            evaluations = [Evaluation.load(run.evaluation(update)) for run in arm.runs]
            lower.update(*(evaluation.lower_is_better for evaluation in evaluations))
            columns = [evaluation.columns() for evaluation in evaluations]
            shared = [
                name
                for name in columns[0]
                if all(name in other for other in columns)
                and (name != REWARD or _same_reward(arms))
            ]
            means[arm.name] = {
                name: fmean(fmean(c[name]) for c in columns) for name in shared
            }
        for column in means[arms[0].name] if len(arms) > 1 else []:
            if not all(column in found for found in means.values()):
                continue
            effects = [
                final_difference(arms[0], arm, update, column) for arm in arms[1:]
            ]
            # One family of tests a column: every arm against the first one.
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


def _same_reward(arms: Sequence[Arm]) -> bool:
    """Sums with other weights are other quantities."""
    return all(arm.reward() == arms[0].reward() for arm in arms)


def _notes(arms: Sequence[Arm], update: int | None) -> list[str]:
    if update is None:
        return [
            (
                "The runs have no evaluation after update 0 in common, so their final "
                "scores are not compared."
            )
        ]
    notes = []
    if not _same_reward(arms):
        notes.append(
            "reward.weights differ, so the rewards are not compared: see the scores "
            "in comparison.html."
        )
    trees = [arm.evaluated() for arm in arms]
    differing = [
        key
        for key, value in trees[0].items()
        if any(tree.get(key, value) != value for tree in trees)
    ]
    if differing:
        notes.append(
            f"The evaluations differ in {', '.join(differing)}, so the differences are "
            "not of the training alone."
        )
    runs = [run for arm in arms for run in arm.runs]
    if max(max(run.evaluations(), default=0) for run in runs) > update:
        notes.append(
            f"Some runs were evaluated later than update {update}, the last one that "
            "all of them have."
        )
    evaluations = [Evaluation.load(run.evaluation(update)) for run in runs]
    counts = {len(evaluation.prompts) for evaluation in evaluations}
    if len(counts) > 1 or any(evaluation.left_out for evaluation in evaluations):
        notes.append(
            "Prompts that one of the runs lacks, or could not score, are left out of "
            "the differences alone."
        )
    for arm in arms[1:]:
        pairs = paired_runs(arms[0], arm)
        if all(one.seed != other.seed for one, other in pairs):
            notes.append(
                f"{arm.name} has no seed of {arms[0].name}: their runs are paired in "
                "order."
            )
        elif len(pairs) < max(len(arm.runs), len(arms[0].runs)):
            shared = f"{len(pairs)} seed{'s' if len(pairs) > 1 else ''}"
            notes.append(
                f"{arm.name} and {arms[0].name} share {shared}; nothing else is tested."
            )
        if len(pairs) == 1:
            notes.append(
                f"One seed of {arm.name}: its interval is over prompts and says "
                "nothing of other seeds."
            )
    return notes


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write the page and its numbers. OSError when the folder cannot be written."""
    numbers = {
        "sage_fast": __version__,
        "update": comparison.update,
        "arms": [
            {
                "name": arm.name,
                "apart": arm.apart,
                "runs": [str(run) for run in arm.runs],
            }
            for arm in comparison.arms
        ],
        "means": comparison.means,
        "differences": [
            asdict(d)
            | {
                "low": d.effect.low,
                "high": d.effect.high,
                "detectable": d.effect.detectable,
            }
            for d in comparison.differences
        ],
        "notes": list(comparison.notes),
    }
    write_text(folder / "comparison.html", _html(comparison))
    write_text(folder / "comparison.json", json.dumps(numbers, indent=1) + "\n")


def _html(comparison: Comparison) -> str:
    """One self-contained page."""
    arms = comparison.arms
    logged = {
        key for arm in arms for run in arm.runs for row in run.rows for key in row
    }
    logged -= {"eval/overall_mean"}  # a sum of others
    scores = sorted(
        key for key in logged if key.startswith("eval/") and key.endswith("_mean")
    )
    wanted = ["eval/reward_mean", "reward/mean", *scores, "kl/position", "kl/velocity"]
    if logged & {"kl/position", "kl/velocity"}:
        wanted.append("kl/weight")
    wanted += ["kl/grad_share", "grad_norm"]
    columns = comparison.means.get(arms[0].name, {})
    drawn: list[tuple[str, list[Line], dict[str, Any]]] = []
    for key in dict.fromkeys(wanted):
        if key not in logged:
            continue
        lines = [arm.line(key, number) for number, arm in enumerate(arms)]
        if any(any(line.y) for line in lines):  # a KL may be 0 in all of a run
            name = key.removeprefix("eval/").removesuffix("_mean").replace("_", " ")
            drawn.append((TITLES.get(key, f"{name} in evaluations"), lines, {}))
    return render(
        "comparison.html",
        "Comparison of runs",
        sentences=_sentences(comparison),
        comparison=comparison,
        labels={
            name: direction_label(name, name in comparison.lower_is_better)
            for name in columns
        },
        charts=charts(*drawn),
        bands=any(len(arm.runs) > 1 for arm in arms),
    )


def _sentences(comparison: Comparison) -> list[str]:
    """The finding about the reward of every arm but the first."""
    found = []
    for difference in comparison.differences:
        if difference.column != REWARD:
            continue
        e = difference.effect
        first = comparison.arms[0].name
        size = mean_interval(e.mean, e.stderr, e.low, e.high)
        if e.mean == e.stderr == 0:
            found.append(f"{difference.arm} has the reward of {first} on every prompt.")
        elif difference.verdict == "not told apart":
            found.append(
                f"{difference.arm} is not told apart from {first} ({size}); a "
                f"difference of {e.detectable:.3g} would "
                "have been seen in four of five such studies."
            )
        else:
            found.append(
                f"{difference.arm} is {difference.verdict} than {first}: {size}."
            )
    return found


def to_text(comparison: Comparison) -> str:
    """The rewards of the arms and their differences, for a terminal."""
    lines = []
    for arm in comparison.arms:
        mean = comparison.means.get(arm.name, {}).get(REWARD)
        seeds = f"{len(arm.runs)} seed{'s' if len(arm.runs) > 1 else ''}"
        apart = f" ({arm.apart})" if arm.apart else ""
        lines.append(
            f"{arm.name}{apart}: {seeds}"
            + ("" if mean is None else f", reward {mean:.4g}")
        )
    return "\n".join([*lines, *_sentences(comparison), *comparison.notes])
