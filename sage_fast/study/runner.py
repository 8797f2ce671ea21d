"""Runs what a study is missing: some processes at a time, each a job that can be stopped and gone on with.

FOLDER/
    study.json              which base model and configuration it is of
    measures/NAME.json      findings of a measurement
    trainings/ARM/seed-N/   run directories of `sage-fast train`
    logs/                   what the processes said
    results.jsonl  reproduction.md  images/     what was found
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from sage_fast.config.errors import ConfigError, RunDirectoryError
from sage_fast.config.files import replacing
from sage_fast.config.load import load_config
from sage_fast.config.registry import EXACT_POLICIES
from sage_fast.config.schema import by_dotted_key, to_dict
from sage_fast.models.family import open_components
from sage_fast.policy.lora import base_digest
from sage_fast.run.progress import format_seconds
from sage_fast.run.provenance import describe_environment
from sage_fast.study.experiments import EXPERIMENTS, Experiment, needs_probe
from sage_fast.study.findings import COST, Finding, Findings, made_with
from sage_fast.study.measures import TABLES
from sage_fast.study.training_arms import probe
from sage_fast.study.trainings import PROBE, Training, Trainings, settings_digest
from sage_fast.tools.arms import WHOLE

POLL = 0.3
REPORT_EVERY = 60.0
"""Seconds between two lines about a study that goes on."""
TAIL = 12
"""Lines of the log of a failed job that are shown."""

SPEED = "speed"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that does a part of a study, and that does nothing again what is done.

    seconds: of one core, as far as known; 0 where not. progress: updates done and all, for trainings.

    Example: `Job(name="cps/seed-0", command=["sage-fast", "train", ...], log=Path("logs/cps-seed-0.log"))`
    """

    name: str
    command: Sequence[str]
    log: Path
    seconds: float = 0.0
    progress: Callable[[], tuple[int, int]] | None = None

    def share_done(self) -> float:
        """From 0 to 1."""
        if self.progress is None:
            return 0.0
        done, total = self.progress()
        return done / max(1, total)

    def describe(self) -> str:
        """Name, and how far it is."""
        return self.name if self.progress is None else "{} {}/{}".format(self.name, *self.progress())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a batch of jobs ended: names of those that failed, and whether it was asked to stop."""

    failed: Sequence[str]
    stopped: bool

    @property
    def complete(self) -> bool:
        """Whether all of them were finished."""
        return not self.failed and not self.stopped


def run_jobs(jobs: Sequence[Job], processes: int, tell: Callable[[str], None]) -> Outcome:
    """Run jobs, `processes` at a time. A failed job leaves the others running; Ctrl-C stops all of them.

    Each computes on one thread and in a session of its own, so that Ctrl-C reaches it once, from here. Trainings then
    save their state; a second Ctrl-C ends them at once.
    """
    waiting, failed = list(jobs), []
    running: dict[subprocess.Popen[bytes], Job] = {}
    pace, said = _Pace(), time.monotonic()
    with _Interrupts() as interrupts:
        while waiting or running:
            if interrupts.count:
                waiting.clear()
                interrupts.pass_on(running)
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running[_start(job)] = job
            time.sleep(POLL)
            for process in [p for p in running if p.poll() is not None]:
                job = running.pop(process)
                if process.returncode and not interrupts.count:
                    failed.append(job.name)
                    tell(f"{job.name} failed (status {process.returncode}); the end of {job.log}:\n{_tail(job.log)}")
                elif not interrupts.count:
                    pace.finished(job)
            if time.monotonic() - said > REPORT_EVERY and running and not interrupts.count:
                said = time.monotonic()
                done = len(jobs) - len(waiting) - len(running)
                left = pace.left([*running.values(), *waiting], processes)
                tell(f"{done} of {len(jobs)} done; {', '.join(j.describe() for j in running.values())}{left}")
        return Outcome(failed=failed, stopped=bool(interrupts.count))


class _Pace:
    """Wall seconds per estimated second of a core, from the jobs that have finished since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.estimated = 0.0

    def finished(self, job: Job) -> None:
        self.estimated += job.seconds

    def left(self, jobs: Sequence[Job], processes: int) -> str:
        todo = sum(job.seconds * (1 - job.share_done()) for job in jobs)
        if not todo:
            return ""
        done = self.estimated + sum(job.seconds * job.share_done() for job in jobs)
        elapsed = time.monotonic() - self.began
        seconds = todo * elapsed / done if done and elapsed > REPORT_EVERY else todo / processes
        return f"; about {format_seconds(seconds)} left"


class _Interrupts:
    """Counts SIGINT and SIGTERM within the context, and passes the first two on to processes."""

    def __init__(self) -> None:
        self.count = 0
        self._passed = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the host program keeps its own handlers
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            os.write(2, b"\nStopping: trainings save after the present update. Ctrl-C again ends them at once.\n")

    def pass_on(self, processes: Mapping[subprocess.Popen[bytes], Job]) -> None:
        """SIGINT for the first request, SIGKILL for the second."""
        while self._passed < min(2, self.count):
            self._passed += 1
            for process, job in processes.items():
                # What is no training has nothing to save.
                gently = self._passed == 1 and job.progress is not None
                os.killpg(process.pid, signal.SIGINT if gently else signal.SIGKILL)


def _start(job: Job) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        )


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in log.read_text("utf-8", errors="replace").splitlines()[-TAIL:])


# ------------------------------------------------------------------------------------------------ a study


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
        self.local = not launcher
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
        if file.is_file():
            found = json.loads(file.read_text("utf-8"))
            for key, what in (("base", "base model"), ("settings", "configuration")):
                if found.get(key) != own[key]:
                    raise ConfigError(
                        f"{self.folder} holds results of another {what}. Choose another --output, or move it away."
                    )
            return
        if (self.folder / "trainings").exists() or (self.folder / "measures").exists():
            raise RunDirectoryError(f"{self.folder} holds results, but no study.json. Choose another --output.")
        with replacing(file) as partial:
            partial.write_text(json.dumps(own, indent=1), "utf-8")

    def run_missing(self, experiments: Sequence[Experiment], processes: int, tell: Callable[[str], None]) -> Outcome:
        """Run what is missing: measurements, then trainings; nothing is begun that waits for what did not finish."""

        def run(jobs: Sequence[Job], what: str) -> Outcome:
            if jobs:
                tell(f"{what}, {processes} at a time")
            return run_jobs(jobs, processes, tell)

        for experiment in experiments:
            if not self.fits(experiment):
                tell(f"{experiment.title}: left out, the data manifold of {self.config.model.family!r} is not known")
        missing = self.missing_trainings(experiments)
        jobs = self.measurements(experiments)
        if missing and self.local and self.speed() is None:
            jobs.append(self.speed_job())
        outcome = run(jobs, f"{len(jobs)} measurements")
        if outcome.complete and missing and missing[0].arm == PROBE:
            outcome = run(self.training_jobs(missing[:1]), f"{PROBE}, the training that other trainings wait for")
            missing = missing[1:]
        if not outcome.complete:
            return outcome
        trainings = self.training_jobs(missing)
        seconds = sum(job.seconds * (1 - job.share_done()) for job in trainings) / processes
        estimate = f" (about {format_seconds(seconds)} by the measured speed)" if seconds else ""
        return run(trainings, f"{len(trainings)} trainings{estimate}")

    def measurements(self, experiments: Sequence[Experiment]) -> list[Job]:
        """Jobs of the measurements that are missing, the longest first, so that none is left to run alone."""
        wanted = [experiment for experiment in experiments if self.fits(experiment)]
        return [
            self.measurement(name, request, seconds=experiment.seconds)
            for experiment in sorted(wanted, key=lambda experiment: -experiment.seconds)
            for name, request in experiment.requests().items()
            if not self.result(name).is_file()
        ]

    def fits(self, experiment: Experiment) -> bool:
        """Whether it can be measured with the model's family: the data manifold is known of few."""
        return not experiment.needs_manifold or self.config.model.family in EXACT_POLICIES

    def speed(self) -> dict[str, float] | None:
        """Seconds of one core per rollout and evaluation; None before they were measured."""
        file = self.result(SPEED)
        if not file.is_file():
            return None
        return {row["quantity"]: row["value"] for row in json.loads(file.read_text("utf-8"))["findings"]}

    def speed_job(self) -> Job:
        """The job that measures `speed`."""
        return self.measurement(SPEED, {"measure": SPEED, "seed": 0})

    def missing_trainings(self, experiments: Sequence[Experiment]) -> list[Training]:
        """Trainings that are not finished, those that experiments share once, the probe first. ConfigError."""
        todo: dict[str, Training] = {}
        for training in [t for e in experiments if self.fits(e) for t in e.trainings()]:
            todo.setdefault(training.name, training)
        found = [t for t in todo.values() if not self._finished(t)]
        if needs_probe(experiments) and not self._finished(probe()):
            return [probe(), *found]
        return found

    def training_jobs(self, trainings: Sequence[Training]) -> list[Job]:
        """Their jobs, with estimates where the speed is known."""
        speed = self.speed()
        return [
            Job(
                name=training.name,
                command=self.trainings.command(training),
                log=self._log(training.name),
                seconds=self.trainings.estimate(training, speed) if speed else 0.0,
                progress=lambda training=training: self.trainings.progress(training),  # type: ignore[misc]
            )
            for training in trainings
        ]

    def findings(self) -> Findings:
        """Everything that is there, of all experiments: what was measured before belongs to the same page."""
        rows: list[Finding] = []
        environment: dict[str, Any] = made_with(describe_environment())
        for experiment in filter(self.fits, EXPERIMENTS):
            if experiment.key in TABLES:
                rows += [replace(row, **environment) for row in TABLES[experiment.key]()]
            for name in experiment.requests():
                rows += self.measured(name, experiment.key)
            for training in experiment.trainings():
                if self._finished(training):
                    rows += self.trainings.findings(experiment.key, training)
        return Findings(rows)

    def _finished(self, training: Training) -> bool:
        if training.kl_share is not None and not self.trainings.is_finished(probe()):
            return False
        return self.trainings.is_finished(training)

    def measured(self, name: str, experiment: str) -> list[Finding]:
        """What a measurement found, with its cost; nothing where it is missing."""
        file = self.result(name)
        if not file.is_file():
            return []
        tree = json.loads(file.read_text("utf-8"))
        common = {"settings": self.digest, **tree["made_with"]}
        rows = [Finding(**(row | {"parts": tuple(row["parts"])} | common)) for row in tree["findings"]]
        seed, seconds = rows[0].seed, tree["core_seconds"]
        cost = Finding(experiment=experiment, quantity=COST, arm="all", seed=seed, value=seconds, **common)
        return [*rows, cost]

    def measurement(self, name: str, request: Mapping[str, Any], seconds: float = 0.0) -> Job:
        """The job of a measurement: `measure`, `overrides` of its own, and arguments."""
        request = {**request, "overrides": [*self.overrides, *request.get("overrides", ())]}
        command = [sys.executable, "-m", "sage_fast.study.measures", str(self.result(name)), json.dumps(request)]
        return Job(name=name, command=[*command, *self.files], log=self._log(name), seconds=seconds)

    def result(self, name: str) -> Path:
        """File of a measurement."""
        return self.folder / "measures" / f"{name}.json"

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name.replace('/', '-')}.log"
