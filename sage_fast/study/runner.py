"""Runs what a study is missing, some processes at a time.

FOLDER/
    study.json              base model and configuration of the study
    measures/NAME.json      findings of a measurement
    trainings/ARM/seed-N/   run directories of `sage-fast train`
    logs/                   output of the processes
    results.jsonl  reproduction.md  images/     page and results
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sage_fast.config.errors import ConfigError, RunDirectoryError
from sage_fast.config.files import write_text
from sage_fast.config.load import load_config
from sage_fast.config.registry import EXACT_POLICIES
from sage_fast.config.schema import by_dotted_key, to_dict
from sage_fast.models.family import open_components
from sage_fast.policy.lora import base_digest
from sage_fast.run.provenance import describe_environment
from sage_fast.study.experiments import EXPERIMENTS, Experiment, Training
from sage_fast.study.findings import COST, Finding, Findings, made_with
from sage_fast.study.measures import TABLES
from sage_fast.study.trainings import Trainings, settings_digest
from sage_fast.tools.comparison import WHOLE

TAIL = 12
"""Lines of the log of a failed job that are shown."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that does a part of a study. saves: SIGINT makes it save its state and end.

    Example: `Job(name="cps/seed-0", command=["sage-fast", "train", ...], log=Path("logs/cps-seed-0.log"), saves=True)`
    """

    name: str
    command: Sequence[str]
    log: Path
    saves: bool = False


def run_jobs(jobs: Sequence[Job], processes: int, tell: Tell) -> list[str]:
    """Run jobs, `processes` at a time, each on one thread, and return the names of those that failed.

    A failed job leaves the others running. Ctrl-C stops all of them: trainings save their state; a second Ctrl-C ends
    them at once. KeyboardInterrupt follows when they have ended.
    """
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}

    def work(job: Job) -> int:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches it once, from `_stop`, and not from the terminal too
                env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
            )
        running[job.name] = (job, process)
        return process.wait()

    failed: list[str] = []
    with ThreadPoolExecutor(processes) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                job = futures[future]
                if status := future.result():
                    failed.append(job.name)
                    tail = "".join(
                        f"\n    {line}" for line in job.log.read_text("utf-8", "replace").splitlines()[-TAIL:]
                    )
                    tell(f"{job.name} failed (status {status}); the end of {job.log}:{tail}")
                else:
                    tell(f"{number} of {len(jobs)} done: {job.name}")
        except KeyboardInterrupt:
            tell("Stopping: trainings save after the present update. Ctrl-C again ends them at once.")
            _stop(list(futures), running)
            raise
    return failed


def _stop(futures: Sequence[Future[int]], running: dict[str, tuple[Job, subprocess.Popen[bytes]]]) -> None:
    """End the running jobs and wait for them."""
    for future in futures:
        future.cancel()
    gently, reached = True, set()
    while not all(future.done() for future in futures):
        try:
            for job, process in list(running.values()):
                # A measurement has nothing to save.
                number = signal.SIGINT if gently and job.saves else signal.SIGKILL
                if process.poll() is None and (job.name, number) not in reached:
                    reached.add((job.name, number))
                    os.killpg(process.pid, number)
            wait(futures, timeout=0.3)
        except KeyboardInterrupt:
            gently = False


class Study:
    """A folder of results for one configuration and one base model.

    Args:
        files, overrides: the configuration that all experiments share.
        launcher: words before the configuration of a training; empty for processes of this machine.
    """

    def __init__(
        self, folder: Path, files: Sequence[str], overrides: Sequence[str] = (), launcher: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.files = list(files)
        self.overrides = list(overrides)
        self.config = load_config(self.files, self.overrides)
        self.digest = settings_digest(by_dotted_key(to_dict(self.config), whole=WHOLE))
        self.trainings = Trainings(
            folder=folder / "trainings",
            files=self.files,
            # A process of this machine has one of its cores.
            overrides=[*self.overrides, *([] if launcher else ["--num_threads=1"])],
            launcher=launcher,
        )

    def begin(self) -> None:
        """Note the base model and the configuration. ConfigError where the folder is of others."""
        components = open_components(self.config.model)
        own = {"base": base_digest(components.transformer, components.weights), "settings": self.digest}
        file = self.folder / "study.json"
        if not file.is_file():
            if (self.folder / "trainings").exists() or (self.folder / "measures").exists():
                raise RunDirectoryError(f"{self.folder} holds results, but no study.json. Choose another --output.")
            write_text(file, json.dumps(own, indent=1))
        found = json.loads(file.read_text("utf-8"))
        for key, name in (("base", "base model"), ("settings", "configuration")):
            if found.get(key) != own[key]:
                raise ConfigError(
                    f"{self.folder} holds results of another {name}. Choose another --output, or move it away."
                )

    def run_missing(self, experiments: Sequence[Experiment], processes: int, tell: Tell) -> list[str]:
        """Run the missing measurements, then the missing trainings; the names of those that failed."""
        for experiment in experiments:
            if not self.fits(experiment):
                tell(f"{experiment.title}: left out, the data manifold of {self.config.model.family!r} is not known")
        failed: list[str] = []
        for make, name in ((self.measurements, "measurements"), (self._training_jobs, "trainings")):
            if not failed and (jobs := make(experiments)):
                tell(f"{len(jobs)} {name}, {processes} at a time")
                failed = run_jobs(jobs, processes, tell)
        return failed

    def measurements(self, experiments: Sequence[Experiment]) -> list[Job]:
        """Jobs of the measurements that are missing."""
        jobs = []
        for experiment in filter(self.fits, experiments):
            runs = {"experiment": experiment.key, "runs": experiment.runs} if experiment.runs else {}
            for name, seeds in experiment.measurements().items():
                tree = {"measure": experiment.measure, "seeds": seeds, "overrides": self.overrides, **runs}
                request, result = json.dumps(tree), self.result(name)
                command = [sys.executable, "-m", "sage_fast.study.measures", str(result), request, *self.files]
                if not result.is_file():
                    jobs.append(Job(name=name, command=command, log=self._log(name)))
        return jobs

    def fits(self, experiment: Experiment) -> bool:
        """Return True if it can be measured with the model's family: the data manifold is known of few."""
        return not experiment.needs_manifold or self.config.model.family in EXACT_POLICIES

    def missing_trainings(self, experiments: Sequence[Experiment]) -> list[Training]:
        """Trainings that are not finished, shared ones once. ConfigError."""
        todo = {t.name: t for e in filter(self.fits, experiments) for t in e.trainings()}
        return [t for t in todo.values() if not self.trainings.is_finished(t)]

    def _training_jobs(self, experiments: Sequence[Experiment]) -> list[Job]:
        trainings = self.missing_trainings(experiments)
        return [
            Job(name=t.name, command=self.trainings.command(t), log=self._log(t.name), saves=True) for t in trainings
        ]

    def findings(self) -> Findings:
        """Everything that is there, of all experiments: what was measured before belongs to the same page."""
        rows: list[Finding] = []
        environment: dict[str, Any] = made_with(describe_environment())
        for experiment in filter(self.fits, EXPERIMENTS):
            if experiment.key in TABLES:
                rows += [replace(row, **environment) for row in TABLES[experiment.key]()]
            for name in experiment.measurements():
                rows += self.measured(name, experiment.key)
            for each in experiment.trainings():
                if self.trainings.is_finished(each):
                    rows += self.trainings.findings(experiment.key, each)
        return Findings(rows)

    def measured(self, name: str, experiment: str) -> list[Finding]:
        """Findings of a measurement, with its cost; none where it is missing."""
        file = self.result(name)
        if not file.is_file():
            return []
        tree = json.loads(file.read_text("utf-8"))
        common = {"settings": self.digest, **tree["made_with"]}
        rows = [Finding(**(row | {"parts": tuple(row["parts"])} | common)) for row in tree["findings"]]
        seed, seconds = rows[0].seed, tree["core_seconds"]
        cost = Finding(experiment=experiment, quantity=COST, arm="all", seed=seed, value=seconds, **common)
        return [*rows, cost]

    def result(self, name: str) -> Path:
        """File of a measurement."""
        return self.folder / "measures" / f"{name}.json"

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name.replace('/', '-')}.log"
