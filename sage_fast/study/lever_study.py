"""The study behind `sage-fast efficiency`: signal and cost of combinations of levers, and trainings with the best."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sage_fast.checkpoint import checkpoint_name, list_checkpoints
from sage_fast.evaluation import REWARD
from sage_fast.study.claims import Evidence, larger
from sage_fast.study.combinations import COMBINATIONS, KINDS, REFERENCE, Combination, pflop_per_estimate
from sage_fast.study.findings import Finding, Findings
from sage_fast.study.runner import Job, Outcome, Study, run_jobs
from sage_fast.study.trainings import Training

TABLE, CURVES = "efficiency", "efficiency-training"
"""Experiments of the findings: signal of estimates, and trainings at equal compute."""

SEEDS = (0, 1, 2, 3, 4, 5)
REFERENCES = 4
"""Estimates of the reference for one of each combination: all are compared with its mean."""
BEST = 5
"""Combinations that are trained, beside the reference."""
EVALUATIONS = 4
"""Of each of these trainings, after equal parts of its updates."""

PREPARED = "prepared"
"""The training whose weights and anchor all estimates have."""


class EfficiencyStudy(Study):
    """A folder of estimates and trainings of one configuration.

    Args:
        count: estimates of each combination.
        updates: of the training before them.
        priced: words of the configuration whose model the costs are counted of.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        overrides: Sequence[str],
        *,
        count: int,
        updates: int,
        priced: Sequence[str],
    ) -> None:
        super().__init__(folder, files, overrides)
        self.count, self.updates, self.priced = count, updates, priced
        self.digest = f"{self.digest}-{updates}-{count}"
        self.combinations = {combination.name: combination for combination in COMBINATIONS}
        self.prepared = Training(
            arm=PREPARED,
            overrides=(
                f"--training.num_updates={updates}",
                "--evaluation.every=0",
                f"--checkpoint.every={updates}",
            ),
            seed=self.config.seed,
        )

    def measure(self, processes: int, tell: Callable[[str], None]) -> Outcome:
        """Measure the combinations that are missing; nothing is begun that waits for what did not finish."""
        outcome = Outcome(failed=(), stopped=False)
        todo = [self._job(c) for c in self.combinations.values() if not self.result(_file(c)).is_file()]
        if self._checkpoints / checkpoint_name(self.updates) not in list_checkpoints(self._checkpoints):
            outcome = run_jobs(self.training_jobs([self.prepared]), 1, tell)
        if outcome.complete and todo and not self._estimates.is_file():
            tell(f"{self.count} estimates of the reference")
            first = self._job(next(iter(self.combinations.values())))
            outcome = run_jobs([first], 1, tell)
            todo = [job for job in todo if job.name != first.name]
        if outcome.complete and todo:
            tell(f"{len(todo)} combinations of levers, {self.count} estimates each, {processes} at a time")
            outcome = run_jobs(todo, processes, tell)
        return outcome

    def train(self, processes: int, tell: Callable[[str], None]) -> Outcome:
        """Train with the best combinations of the table, and with the reference, for as many FLOPs each."""
        missing = [t for t in self.curves(self.findings()) if not self.trainings.is_finished(t)]
        tell(f"{len(missing)} trainings, {processes} at a time")
        return run_jobs(self.training_jobs(missing), processes, tell)

    def curves(self, findings: Findings) -> list[Training]:
        """Trainings at equal compute, seed by seed: the reference's has the configuration's number of updates.

        A single pass has the gradient of two phases, video by video, and is slower on a CPU: its trainings are made in
        two phases, of as many updates as its own cost allows.
        """
        total = self.config.training.num_updates * findings.mean(TABLE, "pflop", REFERENCE)
        trainings = []
        for seed in SEEDS:
            for name in (REFERENCE, *ranking(findings)[:BEST]):
                every = max(1, round(total / EVALUATIONS / findings.mean(TABLE, "pflop", name)))
                length = (f"--training.num_updates={EVALUATIONS * every}", f"--evaluation.every={every}")
                words = (*self.combinations[name].overrides(self.config, two_phase=True), *length)
                trainings.append(Training(arm=name.replace(" ", "-"), overrides=words, seed=seed))
        return trainings

    def findings(self) -> Findings:
        """Everything that is there."""
        rows: list[Finding] = []
        for combination in self.combinations.values():
            if found := self.measured(_file(combination), TABLE):
                cost = pflop_per_estimate(combination, priced=self.priced, videos=self.config.rollout.batch_size)
                rows += [replace(row, arm=combination.name) for row in found]
                rows.append(replace(found[0], quantity="pflop", value=cost, stderr=None, n=1))
        rows = [self._with_known_mean(row, Findings(rows)) for row in rows]
        if any(row.arm == REFERENCE for row in rows):
            for training in self.curves(Findings(rows)):
                if self.trainings.is_finished(training):
                    rows += self.trainings.findings(CURVES, training)
                    rows.append(replace(rows[-1], quantity="learning", **self._learning(training)))
        return Findings(rows)

    def _learning(self, training: Training) -> dict[str, Any]:
        """Mean rewards of its evaluations, before the first update and after each part."""
        run = self.trainings.run(training)
        means = [fmean(run.evaluation(update).columns()[REWARD]) for update in sorted(run.evaluations)]
        return {"value": means[-1], "n": len(means), "parts": tuple(means)}

    def _with_known_mean(self, row: Finding, findings: Findings) -> Finding:
        """The signal of a lever that has the reference's mean, of which the reference has the most estimates."""
        if row.quantity != "signal" or row.arm == REFERENCE or self.combinations[row.arm].kind == "biased":
            return row
        (whole,), (kept,) = (findings.select(TABLE, q, name) for q, name in (("signal", REFERENCE), ("kept", row.arm)))
        errors = ((whole.stderr or 0.0) * kept.value, whole.value * (kept.stderr or 0.0))
        return replace(row, value=whole.value * kept.value, stderr=math.hypot(*errors))

    @property
    def _checkpoints(self) -> Path:
        return self.trainings.run(self.prepared).folder / "checkpoints"

    @property
    def _estimates(self) -> Path:
        """File of the reference's estimates."""
        return self.folder / "measures" / "estimates.safetensors"

    def _job(self, combination: Combination) -> Job:
        request: dict[str, Any] = {
            "measure": "estimates",
            "arm": combination.name,
            "same_mean": combination.kind != "biased",
            "checkpoint": str(self._checkpoints),
            "reference": str(self._estimates),
            "count": self.count * (REFERENCES if combination.name == REFERENCE else 1),
            "seed": self.config.seed,
            "overrides": combination.overrides(self.config),
        }
        return self.measurement(_file(combination), request)


def _file(combination: Combination) -> str:
    return combination.name.replace(" ", "-").replace(",", "")


def gain(findings: Findings, name: str) -> tuple[float, float]:
    """Signal per FLOP over the reference's, and its standard error. KeyError where it was not measured."""
    cheaper = findings.mean(TABLE, "pflop", REFERENCE) / findings.mean(TABLE, "pflop", name)
    (kept,) = findings.select(TABLE, "kept", name)
    return kept.value * cheaper, (kept.stderr or 0.0) * cheaper


def is_told(findings: Findings, name: str) -> bool:
    """Whether the estimates tell what a combination keeps of the signal.

    Where the mean is known to be the reference's they always do. Else what is kept is measured along the reference's
    mean, which has to stand out of the noise, and so has what is kept.
    """
    if KINDS.get(name) != "biased":
        return True
    (whole,), (kept,) = findings.select(TABLE, "signal", REFERENCE), findings.select(TABLE, "kept", name)
    return whole.value > 2 * (whole.stderr or 0.0) and kept.value > (kept.stderr or 0.0)


def ranking(findings: Findings) -> list[str]:
    """Names of the combinations other than the reference, most signal per FLOP first, less a standard error.

    Those of which nothing is told come last.
    """
    gains = {name: gain(findings, name) for name in findings.arms(TABLE, "kept") if name != REFERENCE}
    return sorted(gains, key=lambda name: (not is_told(findings, name), gains[name][1] - gains[name][0]))


def at_equal_compute(findings: Findings, arm: str) -> Evidence:
    """Final reward of a training over the reference's. KeyError for fewer than 2 common seeds."""
    return larger((CURVES, "final_reward", arm), (CURVES, "final_reward", REFERENCE.replace(" ", "-")))(findings)
