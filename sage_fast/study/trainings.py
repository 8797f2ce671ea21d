"""The trainings of a study: what tells one from another, the command of each, whether it is finished, what it found."""

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.config.load import load_config
from sage_fast.config.resumable import FREE, marked_keys
from sage_fast.config.schema import RunConfig, by_dotted_key, to_dict
from sage_fast.evaluation import OVERALL, REWARD
from sage_fast.run.provenance import FILE_NAME as ENVIRONMENT
from sage_fast.study.claims import PER_PROMPT
from sage_fast.study.findings import COST, Finding, made_with
from sage_fast.tools.arms import TOLD, WHOLE, TrainedRun

PROBE = "kl-probe"
"""The arm that measures the share of the KL in the gradient, so that others can be given one."""
PROBE_WEIGHT = 0.01
SETTLED = 4
"""Updates after which the share is taken: at the first the policy is its own anchor, and the KL has no gradient."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of `sage-fast train`.

    arm: its name, the same for all seeds. overrides: of the study's configuration. kl_share: the part that the KL is to
    have in the gradient; its weight then follows from the probe.

    Example: `Training(arm="cps", overrides=("--rollout.sde_type=cps",), seed=3)`
    """

    arm: str
    overrides: tuple[str, ...]
    seed: int
    kl_share: float | None = None

    @property
    def name(self) -> str:
        """Arm and seed; the place of the run below the study's folder."""
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """The trainings of one study: a folder, and the configuration that the arms are laid over.

    files: YAML files. overrides: `--section.key=value` words of the user. launcher: words before the configuration;
    empty for this interpreter and one process.
    """

    folder: Path
    files: Sequence[str]
    overrides: Sequence[str] = ()
    launcher: Sequence[str] = ()
    _configs: dict[str, RunConfig] = field(default_factory=dict, init=False)

    def run(self, training: Training) -> TrainedRun:
        """The directory of a training, which may not be there yet."""
        return TrainedRun(self.folder / training.name)

    def words(self, training: Training) -> list[str]:
        """What follows `sage-fast train`. ConfigError while the probe that it waits for is missing."""
        return [
            *self.files,
            f"--output_dir={self.folder / training.name}",
            f"--seed={training.seed}",
            *self.overrides,
            *training.overrides,
            *self._weights(training),
        ]

    def command(self, training: Training) -> list[str]:
        """The whole command; it begins the training or goes on with it."""
        launcher = list(self.launcher) or [sys.executable, "-m", "sage_fast", "train"]
        return [*launcher, *self.words(training), "--resume=auto"]

    def shown_command(self, training: Training) -> str:
        """The command as one types it."""
        return shlex.join([*(self.launcher or ["sage-fast", "train"]), *self.words(training), "--resume=auto"])

    def config(self, training: Training) -> RunConfig:
        """The resolved configuration. ConfigError where it cannot run."""
        if training.name not in self._configs:
            words = self.words(training)
            self._configs[training.name] = load_config(self.files, words[len(self.files) :])
        return self._configs[training.name]

    def is_finished(self, training: Training) -> bool:
        """Whether its last update was evaluated.

        Raises:
            ConfigError: there is a run of another configuration.
        """
        run = self.run(training)
        if not (run.folder / "config.yaml").is_file():
            return False
        config = self.config(training)
        self._check_same(run, config)
        result = run.folder / "evaluation" / "result.json"
        if not result.is_file():
            return False
        return bool(json.loads(result.read_text("utf-8"))["after"] >= config.training.num_updates)

    def progress(self, training: Training) -> tuple[int, int]:
        """Updates done, and all."""
        run = self.run(training)
        done = max((row["update"] for row in run.rows), default=0) if (run.folder / "metrics.jsonl").is_file() else 0
        return done, self.config(training).training.num_updates

    def estimate(self, training: Training, speed: Mapping[str, float]) -> float:
        """Seconds of one core, from those of a `rollout` with its updates and of an `evaluation`."""
        config = self.config(training)
        total, every = config.training.num_updates, config.evaluation.every
        rollouts = total / config.training.updates_per_rollout
        evaluations = 1 + (total // every if every else 0)
        return rollouts * speed["rollout"] + evaluations * speed["evaluation"]

    def findings(self, experiment: str, training: Training) -> Iterator[Finding]:
        """What a finished training found."""
        run = self.run(training)
        environment = run.folder / ENVIRONMENT
        common: dict[str, Any] = {
            "experiment": experiment,
            "arm": training.arm,
            "seed": training.seed,
            "settings": settings_digest(run.settings),
            **made_with(json.loads(environment.read_text("utf-8")) if environment.is_file() else {}),
        }
        last = run.evaluation(max(run.evaluations))
        for column, values in last.columns().items():
            name = {REWARD: "reward", OVERALL: "overall"}.get(column, column)
            yield Finding(
                quantity=PER_PROMPT + name,
                value=fmean(values),
                n=len(values),
                stderr=stdev(values) / len(values) ** 0.5,
                parts=tuple(values),
                **common,
            )
        curve = list(run.curve("reward/mean").values())
        yield Finding(quantity="area", value=fmean(curve), n=len(curve), parts=tuple(curve), **common)
        yield Finding(quantity="unsteadiness", value=_unsteadiness(curve), n=len(curve), **common)
        if position := list(run.curve("kl/position").values()):
            yield Finding(quantity="kl_position", value=max(position), n=len(position), parts=tuple(position), **common)
        if shares := _settled_shares(run):
            yield Finding(quantity="kl_share", value=fmean(shares), n=len(shares), parts=tuple(shares), **common)
        seconds = sum(sum(run.curve(key).values()) for key in ("time/iteration", "time/evaluation"))
        yield Finding(quantity=COST, value=seconds, **common)

    def kl_weight(self, share: float) -> float:
        """The weight that gives the KL to the initial weights this share of the gradient. ConfigError without probe."""
        run = TrainedRun(self.folder / PROBE / "seed-0")
        if not (run.folder / "metrics.jsonl").is_file():
            raise ConfigError(f"The share of the KL is not known before the training {PROBE} in {self.folder} is done.")
        shares = _settled_shares(run)
        if not shares:
            raise ConfigError(f"{run.folder} has measured no share of the KL yet; let it finish.")
        return float(f"{PROBE_WEIGHT * share / fmean(shares):.3g}")

    def _weights(self, training: Training) -> list[str]:
        if training.kl_share is None:
            return []
        return constant_lambda(self.kl_weight(training.kl_share))

    def _check_same(self, run: TrainedRun, config: RunConfig) -> None:
        free = {*marked_keys(RunConfig, FREE)} - TOLD
        expected = by_dotted_key(json.loads(json.dumps(to_dict(config))), whole=WHOLE)
        for key, value in expected.items():
            if key not in free and key in run.settings and run.settings[key] != value:
                raise ConfigError(
                    f"{run.folder} was trained with {key} {run.settings[key]!r}, and the study now has {value!r}. "
                    "Choose another --output, or move that folder away."
                )


def constant_lambda(weight: float) -> list[str]:
    """Words that keep the weight of the KL where it is."""
    return [f"--kl_weight.minimum={weight:g}", f"--kl_weight.maximum={weight:g}"]


def _settled_shares(run: TrainedRun) -> list[float]:
    """The KL's share of the gradient at every update that measured it, from the fifth on."""
    return [value for update, value in run.curve("kl/grad_share").items() if update > SETTLED]


def _unsteadiness(curve: Sequence[float]) -> float:
    """Standard deviation of a curve from one update to the next, without its trend: of its differences over sqrt 2."""
    steps = [after - before for before, after in pairwise(curve)]
    return stdev(steps) / 2**0.5 if len(steps) > 1 else 0.0


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Eight characters that differ for configurations that differ in more than place, machine and seed."""
    ignored = {*marked_keys(RunConfig, FREE), "seed"} - TOLD
    kept = {key: value for key, value in settings.items() if key not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]
