"""The trainings of a study: their commands, their state, and their findings."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.config.fields import FREE, digest, marked_keys
from sage_fast.config.load import load_config
from sage_fast.config.schema import RunConfig, by_dotted_key, to_dict
from sage_fast.evaluation import OVERALL, REWARD
from sage_fast.run.provenance import FILE_NAME as ENVIRONMENT
from sage_fast.study.claims import PER_PROMPT
from sage_fast.study.experiments import Training
from sage_fast.study.findings import COST, Finding, made_with
from sage_fast.tools.comparison import TOLD, WHOLE, TrainedRun

PROGRAM = (sys.executable, "-m", "sage_fast", "train")

SETTLED = 4
"""Updates after which the share is taken: at the first the policy is its own anchor, and the KL has no gradient."""


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

    def words(self, training: Training) -> list[str]:
        """Arguments of `sage-fast train`."""
        return [
            *self.files,
            f"--output_dir={self.folder / training.name}",
            f"--seed={training.seed}",
            *self.overrides,
            *training.overrides,
        ]

    def command(self, training: Training, program: Sequence[str] = PROGRAM) -> list[str]:
        """The whole command; it begins the training or goes on with it."""
        return [*(self.launcher or program), *self.words(training), "--resume=auto"]

    def is_finished(self, training: Training) -> bool:
        """Return True if its last update was evaluated.

        Raises:
            ConfigError: there is a run of another configuration.
        """
        run = TrainedRun(self.folder / training.name)
        if not (run.folder / "config.yaml").is_file():
            return False
        config = load_config(self.files, self.words(training)[len(self.files) :])
        self._check_same(run, config)
        result = run.folder / "evaluation" / "result.json"
        if not result.is_file():
            return False
        return bool(json.loads(result.read_text("utf-8"))["after"] >= config.training.num_updates)

    def findings(self, experiment: str, training: Training) -> Iterator[Finding]:
        """Findings of a finished training."""
        run = TrainedRun(self.folder / training.name)
        environment = run.folder / ENVIRONMENT
        common: dict[str, Any] = {
            **{"experiment": experiment, "arm": training.arm, "seed": training.seed},
            **{"settings": settings_digest(run.settings)},
            **made_with(json.loads(environment.read_text("utf-8")) if environment.is_file() else {}),
        }

        def found(quantity: str, value: float, numbers: Sequence[float], *, kept: bool = True, **more: Any) -> Finding:
            parts = tuple(numbers) if kept else ()
            return Finding(quantity=quantity, value=value, n=max(1, len(numbers)), parts=parts, **common, **more)

        for column, values in run.evaluation(max(run.evaluations)).columns().items():
            name = {REWARD: "reward", OVERALL: "overall"}.get(column, column)
            yield found(PER_PROMPT + name, fmean(values), values, stderr=stdev(values) / len(values) ** 0.5)
        curve = list(run.curve("reward/mean").values())
        yield found("area", fmean(curve), curve)
        yield found("unsteadiness", unsteadiness(curve), curve, kept=False)
        if position := list(run.curve("kl/position").values()):
            yield found("kl_position", max(position), position)
        if shares := _settled_shares(run):
            yield found("kl_share", fmean(shares), shares)
        yield found(COST, sum(sum(run.curve(key).values()) for key in ("time/iteration", "time/evaluation")), ())

    def _check_same(self, run: TrainedRun, config: RunConfig) -> None:
        free = {*marked_keys(RunConfig, FREE)} - TOLD
        expected = by_dotted_key(json.loads(json.dumps(to_dict(config))), whole=WHOLE)
        for key, value in expected.items():
            if key not in free and key in run.settings and run.settings[key] != value:
                raise ConfigError(
                    f"{run.folder} was trained with {key} {run.settings[key]!r}, and the study now has {value!r}. "
                    "Choose another --output, or move that folder away."
                )


def _settled_shares(run: TrainedRun) -> list[float]:
    """The KL's share of the gradient at every update that measured it, from the fifth on."""
    return [value for update, value in run.curve("kl/grad_share").items() if update > SETTLED]


def unsteadiness(curve: Sequence[float]) -> float:
    """Standard deviation of a curve from one update to the next, without its trend: of its differences over sqrt 2."""
    steps = [after - before for before, after in pairwise(curve)]
    return stdev(steps) / 2**0.5 if len(steps) > 1 else 0.0


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Eight characters that differ for configurations that differ in more than place, machine and seed."""
    ignored = {*marked_keys(RunConfig, FREE), "seed"} - TOLD
    kept = {key: value for key, value in settings.items() if key not in ignored}
    return digest(kept)[:8]
