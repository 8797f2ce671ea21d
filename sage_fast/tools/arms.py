"""Finished or running trainings read back from their directories, those that differ in their seed alone as one arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.config.load import read_config_file
from sage_fast.config.schema import RunConfig, by_dotted_key
from sage_fast.config.sections import FREE, marked_keys
from sage_fast.evaluation import Evaluation, scored_in_both
from sage_fast.run.metrics import read_metrics
from sage_fast.tools.effects import Effect, crossed_effect

WHOLE = ("reward.weights", "reward.options")
TOLD = {"rollout.batch_size", "training.num_updates", "training.update", "model.path"}
"""Keys that a resumed run may change, and that make another experiment all the same."""


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """Content of a run directory. ConfigError and RunDirectoryError from its properties name a file that is missing."""

    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted key."""
        file = self.folder / "config.yaml"
        if not file.is_file():
            raise ConfigError(
                f"{self.folder} has no config.yaml, so it is no run. Give directories of `sage-fast train`."
            )
        return by_dotted_key(read_config_file(file), whole=WHOLE)

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics, one record per update, oldest first."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            raise ConfigError(f"{self.folder} has no metrics.jsonl: the run has not begun yet.")
        merged: dict[int, dict[str, Any]] = {}
        for row in read_metrics(file):
            merged.setdefault(row["update"], {}).update(row)
        return [merged[update] for update in sorted(merged)]

    def curve(self, key: str) -> dict[int, float]:
        """A metric by update, where it was logged."""
        return {row["update"]: float(row[key]) for row in self.rows if isinstance(row.get(key), int | float)}

    @cached_property
    def evaluations(self) -> dict[int, Path]:
        """Files of scores per prompt, by update."""
        files = (self.folder / "evaluation").glob("update-*.json")
        return {int(file.stem.removeprefix("update-")): file for file in sorted(files)}

    def evaluation(self, update: int) -> Evaluation:
        """Scores per prompt after an update. ValueError when the file is damaged."""
        return Evaluation.load(self.evaluations[update])


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ in nothing but their seed, in the order of their seeds.

    Example: `Arm(name="sde_type=cps", runs=[...])` with seeds 0 to 5.
    """

    name: str
    runs: Sequence[TrainedRun]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, ascending."""
        return [run.seed for run in self.runs]

    def band(self, key: str) -> tuple[list[int], list[float], list[float]]:
        """Updates that every seed has logged, and the mean and the sample deviation over the seeds (0 for one)."""
        curves = [run.curve(key) for run in self.runs]
        updates = sorted(set.intersection(*map(set, curves)))
        means, spreads = [], []
        for update in updates:
            values = [curve[update] for curve in curves]
            means.append(fmean(values))
            spreads.append(stdev(values) if len(values) > 1 else 0.0)
        return updates, means, spreads


def group_into_arms(runs: Sequence[TrainedRun]) -> list[Arm]:
    """Arms in the order in which their first runs are given, named by what sets them apart.

    Raises:
        ConfigError: two runs of an arm have the same seed, so one of them is not needed or not what was meant.
    """
    ignored = {*marked_keys(RunConfig, FREE), "seed"} - TOLD
    groups: dict[str, list[TrainedRun]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        kept = {key: value for key, value in run.settings.items() if key not in ignored}
        identity = repr(sorted(kept.items()))
        groups.setdefault(identity, []).append(run)
        settings[identity] = kept
    for group in groups.values():
        group.sort(key=lambda run: run.seed)
        for one, other in pairwise(group):
            if one.seed == other.seed:
                raise ConfigError(
                    f"{one.folder} and {other.folder} have the same configuration and seed {one.seed}: leave one out, "
                    "or train another seed."
                )
    names = _names(list(settings.values()))
    if len(groups) == 1:
        names = [runs[0].folder.name]
    return [Arm(name=name, runs=group) for name, group in zip(names, groups.values(), strict=True)]


def _names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences between the arms, with the last word of each key where that tells them apart."""
    keys = sorted({key for tree in settings for key in tree})
    differing = [key for key in keys if len({repr(tree.get(key)) for tree in settings}) > 1]
    leaves = [key.rpartition(".")[2] for key in differing]
    labels = [leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(differing, leaves, strict=True)]
    return [
        ", ".join(f"{label}={tree.get(key)}" for label, key in zip(labels, differing, strict=True)) for tree in settings
    ]


def last_shared_update(arms: Sequence[Arm]) -> int | None:
    """The last update after 0 at which every run of every arm was evaluated; None where there is none."""
    shared = set.intersection(*(set(run.evaluations) for arm in arms for run in arm.runs)) - {0}
    return max(shared, default=None)


def paired_runs(first: Arm, second: Arm) -> list[tuple[TrainedRun, TrainedRun]]:
    """Runs of the seeds that both arms have. Where they share none, in order: such pairs gain no precision."""
    ours, theirs = ({run.seed: run for run in arm.runs} for arm in (first, second))
    shared = [seed for seed in ours if seed in theirs]
    if shared:
        return [(ours[seed], theirs[seed]) for seed in shared]
    return list(zip(first.runs, second.runs, strict=False))


def final_difference(first: Arm, second: Arm, update: int, column: str) -> Effect:
    """Second minus first of a column of the evaluation (see `Evaluation.columns`), over paired seeds and prompts.

    Raises:
        ConfigError: the evaluations are of different prompts, or a column is missing.
    """
    rows: list[list[float]] = []
    prompts: set[tuple[str, ...]] = set()
    try:
        for one, other in paired_runs(first, second):
            before, after = scored_in_both(one.evaluation(update), other.evaluation(update))
            prompts.add(tuple(before.prompts))
            pairs = zip(before.columns()[column], after.columns()[column], strict=True)
            rows.append([b - a for a, b in pairs])
        if len(prompts) > 1:
            raise ValueError("their seeds were evaluated on different prompts")
        return crossed_effect(rows)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{first.name!r} and {second.name!r} cannot be compared in {column}: {error}") from error
