"""Runs what a study is missing, some processes at a time, and collects what is there.

FOLDER/
    study.json              base model of the study
    measures/NAME.jsonl     findings of a measurement
    trainings/ARM/seed-N/   run directories of `sage-fast train`
    logs/                   output of the processes
    results.jsonl  reproduction.md  images/     page and results
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.claims import EXPERIMENTS, Experiment, Training
from experiments.findings import (
    COST,
    PER_PROMPT,
    Finding,
    Findings,
    made_with,
    read_findings,
    settings_digest,
    unsteadiness,
)
from experiments.measures import TABLES, noise_of_steps
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.config.load import load_config
from sage_fast.config.schema import settings_of, to_dict, tried_settings
from sage_fast.evaluation import OVERALL, REWARD, Evaluation
from sage_fast.policy.adapters import load_model, weights_digest
from sage_fast.policy.lora import base_digest
from sage_fast.run.directory import GracefulStop, RunDirectory
from sage_fast.run.provenance import describe_environment

SETTLED = 4
"""Updates before the KL's share is taken: at the first the policy is its own anchor,
and the KL has no gradient.
"""

Tell = Callable[[str], None]


def run_jobs(
    jobs: Mapping[str, Sequence[str]], logs: Path, processes: int, tell: Tell
) -> list[str]:
    """Run commands by name, `processes` at a time, each on one thread, and return the
    names of those that failed.

    A failed job leaves the others running. Ctrl-C and SIGTERM interrupt all of them, so
    that trainings save their state; a second Ctrl-C kills them. KeyboardInterrupt
    follows when they have ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log_of = {name: logs / f"{name.replace('/', '-')}.log" for name in jobs}
    waiting = list(jobs)
    running = dict[str, subprocess.Popen[bytes]]()
    done = 0
    failed = []
    stopping = False
    try:
        # A KeyboardInterrupt while a process starts would lose it.
        with GracefulStop(announce=False) as stop:
            while waiting or running:
                if stop.requested and not stopping:
                    stopping = True
                    waiting.clear()
                    tell(
                        "Stopping: trainings save after the present update. Ctrl-C "
                        "again ends them at once."
                    )
                    _signal_all(running.values(), signal.SIGINT)
                while waiting and len(running) < processes:
                    name = waiting.pop(0)
                    running[name] = _start(jobs[name], log_of[name])
                time.sleep(0.1)
                for name in [n for n, job in running.items() if job.poll() is not None]:
                    status = running.pop(name).returncode
                    done = done + 1
                    if stopping:
                        continue
                    if status:
                        failed.append(name)
                        lines = log_of[name].read_text("utf-8", "replace").splitlines()
                        last = lines[-1] if lines else ""
                        tell(
                            f"{name} failed (status {status}): {last} (all of it: "
                            f"{log_of[name]})"
                        )
                    else:
                        tell(f"{done} of {len(jobs)} done: {name}")
    except KeyboardInterrupt:
        _signal_all(running.values(), signal.SIGKILL)
        for process in running.values():
            process.wait()
        raise
    if stop.requested:
        raise KeyboardInterrupt
    return failed


def _start(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches it once, from above, and not from the terminal too.
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        )


def _signal_all(
    jobs: Iterable["subprocess.Popen[bytes]"], number: signal.Signals
) -> None:
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, number)


class Study:
    """A folder of results for one configuration and one base model.

    Args:
        files, overrides: the configuration that all experiments share; the arms are
            laid over it.
    """

    def __init__(
        self, folder: Path, files: Sequence[str], overrides: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.files = list(files)
        self.overrides = list(overrides)
        self.config = load_config(self.files, self.overrides)

    def begin(self) -> None:
        """Note the base model. ConfigError where it cannot be loaded, or the folder has
        results of another.
        """
        try:
            components = load_model(self.config.model, self.config.lora, read=False)
            base = base_digest(components.transformer, components.weights)
            if self.config.model.adapter is not None:
                base += weights_digest(Path(self.config.model.adapter))
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error
        file = self.folder / "study.json"
        begun = [self.folder / name for name in ("trainings", "measures")]
        if not file.is_file() and not any(folder.exists() for folder in begun):
            write_text(file, json.dumps({"base": base}))
        elif not file.is_file() or json.loads(file.read_text("utf-8"))["base"] != base:
            raise ConfigError(
                f"{self.folder} holds results of another base model. Choose another "
                "--output_dir, or move it away."
            )

    def run_missing(
        self, experiments: Sequence[Experiment], processes: int, tell: Tell
    ) -> list[str]:
        """Run the missing measurements, then the missing trainings; the names of those
        that failed.
        """
        for experiment in experiments:
            if not self.fits(experiment):
                tell(
                    f"{experiment.title}: left out, the data manifold of "
                    f"{self.config.model.family!r} is not known"
                )
        train = [sys.executable, "-m", "sage_fast", "train"]
        trainings = {
            t.name: [*train, *self.words(t)]
            for t in self.missing_trainings(experiments)
        }
        for jobs, name in (
            (self.missing_measurements(experiments), "measurements"),
            (trainings, "trainings"),
        ):
            if jobs:
                tell(f"{len(jobs)} {name}, {processes} at a time")
                if failed := run_jobs(jobs, self.folder / "logs", processes, tell):
                    return failed
        return []

    def fits(self, experiment: Experiment) -> bool:
        """Return True if it can be measured with the model's family: the data manifold
        is known of few.
        """
        return not experiment.needs_manifold or self.config.model.family == "toy"

    def missing_measurements(
        self, experiments: Sequence[Experiment]
    ) -> dict[str, list[str]]:
        """Commands of the measurements that are missing, by name."""
        jobs = {}
        for experiment in filter(self.fits, experiments):
            request: dict[str, Any] = {
                "measure": experiment.measure,
                "overrides": self.overrides,
            }
            if experiment.runs:
                runs = {
                    "experiment": experiment.key,
                    "runs": experiment.runs,
                    "rates": experiment.rates,
                }
                request["arguments"] = runs
            for name, seeds in experiment.measurements().items():
                if not self.measured(name):
                    jobs[name] = [
                        sys.executable,
                        "-m",
                        "experiments.measures",
                        str(self._result(name)),
                        json.dumps(request | {"seeds": seeds}),
                        *self.files,
                    ]
        return jobs

    def measured(self, name: str) -> Sequence[Finding]:
        """Findings of a measurement; none where it is missing. ConfigError where
        another configuration made it.
        """
        file = self._result(name)
        rows = read_findings(file).rows if file.is_file() else []
        if rows and rows[0].settings != settings_digest(
            settings_of(to_dict(self.config))
        ):
            raise ConfigError(
                f"{file} is of another configuration. Choose another --output_dir, or "
                "move it away."
            )
        return rows

    def _result(self, name: str) -> Path:
        return self.folder / "measures" / f"{name}.jsonl"

    def _run(self, training: Training) -> Path:
        return self.folder / "trainings" / training.name

    def missing_trainings(self, experiments: Sequence[Experiment]) -> list[Training]:
        """Trainings that are not finished, shared ones once. ConfigError."""
        todo = {
            t.name: t for e in filter(self.fits, experiments) for t in e.trainings()
        }
        return [t for t in todo.values() if not self.is_finished(t)]

    def words(self, training: Training) -> list[str]:
        """Arguments of `sage-fast train`, which begin a training or go on with it."""
        return [*self.files, *self._overrides(training), "--resume=auto"]

    def _overrides(self, training: Training) -> list[str]:
        place = f"--output_dir={self._run(training)}"
        return [place, f"--seed={training.seed}", *self.overrides, *training.overrides]

    def is_finished(self, training: Training) -> bool:
        """Return True if its last update was evaluated.

        Raises:
            ConfigError: there is a run of another configuration.
        """
        run = RunDirectory(self._run(training))
        if not run.is_run:
            return False
        config = load_config(self.files, self._overrides(training))
        expected = settings_of(json.loads(json.dumps(to_dict(config))))
        for key, value in [*tried_settings(expected).items(), ("seed", training.seed)]:
            if key in run.settings and run.settings[key] != value:
                raise ConfigError(
                    f"{run} was trained with {key} {run.settings[key]!r}, and the "
                    f"study now has {value!r}. "
                    "Choose another --output_dir, or move that folder away."
                )
        if not run.result.is_file():
            return False
        done = json.loads(run.result.read_text("utf-8"))["after"]
        return bool(done >= config.training.num_updates)

    def findings(self) -> Findings:
        """Everything that is there, of all experiments: what was measured before
        belongs to the same page.
        """
        rows: list[Finding] = []
        environment: dict[str, Any] = made_with(describe_environment())
        for experiment in filter(self.fits, EXPERIMENTS):
            if experiment.key in TABLES:
                rows += [
                    replace(row, **environment)
                    for row in noise_of_steps(experiment.key)
                ]
            for name in experiment.measurements():
                rows += self.measured(name)
            for training in experiment.trainings():
                if self.is_finished(training):
                    rows += self.trained(training, experiment.key)
        return Findings(rows)

    def trained(self, training: Training, experiment: str) -> Iterator[Finding]:
        """Findings of a finished training."""
        run = RunDirectory(self._run(training))
        common: dict[str, Any] = {
            "experiment": experiment,
            "arm": training.arm,
            "seed": training.seed,
            "settings": settings_digest(run.settings),
        }
        if run.environment.is_file():
            common |= made_with(json.loads(run.environment.read_text("utf-8")))

        def found(
            quantity: str, value: float, parts: Sequence[float] = (), **more: Any
        ) -> Finding:
            numbers = {"n": max(1, len(parts)), "parts": tuple(parts), **more}
            return Finding(quantity=quantity, value=value, **common, **numbers)

        for column, values in (
            Evaluation.load(run.evaluation(max(run.evaluations()))).columns().items()
        ):
            name = {REWARD: "reward", OVERALL: "overall"}.get(column, column)
            yield found(
                PER_PROMPT + name,
                fmean(values),
                values,
                stderr=stdev(values) / len(values) ** 0.5,
            )
        curve = list(run.curve("reward/mean").values())
        yield found("area", fmean(curve), curve)
        yield found("unsteadiness", unsteadiness(curve), n=len(curve))
        if position := list(run.curve("kl/position").values()):
            yield found("kl_position", max(position), position)
        if shares := [
            share
            for update, share in run.curve("kl/grad_share").items()
            if update > SETTLED
        ]:
            yield found("kl_share", fmean(shares), shares)
        times = (run.curve(key) for key in ("time/iteration", "time/evaluation"))
        yield found(COST, sum(sum(seconds.values()) for seconds in times))
