"""The directory of a run: where everything in it lies, and what those files hold that
more than one part reads.
"""

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_fast.checkpoint.folder import (
    BEST,
    CHECKPOINT_NAME,
    checkpoint_name,
    list_checkpoints,
    read_best,
    update_of,
)
from sage_fast.config.errors import ConfigError, RunDirectoryError
from sage_fast.config.files import loads
from sage_fast.config.schema import settings_of

logger = logging.getLogger(__name__)

EXPORT_RECORD = "export.json"
"""File of an export, which has a config.yaml too."""


class RunDirectory(os.PathLike[str]):
    """Every path inside a run's directory is spelled here, and nowhere else.

    It is a path itself, also as a text. Nothing needs to exist.

    Example: `RunDirectory("runs/demo").metrics` is the path runs/demo/metrics.jsonl.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = root = Path(path)
        # What the run is made with.
        self.config = root / "config.yaml"
        self.environment = root / "environment.json"
        # What it measures and makes.
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.wandb_id = root / "wandb_run_id"
        self.checkpoints = root / "checkpoints"
        self._evaluation = root / "evaluation"
        self.result = self._evaluation / "result.json"
        self.samples = root / "samples"
        self.reward_plot = root / "reward.png"
        self.before_after = root / "before_after.png"
        # How it goes.
        self.page = root / "index.html"
        self.status = root / "status.json"
        self.lease = root / "lease.txt"
        self.stop = root / "STOP"
        self.acknowledged = root / "acknowledged"
        # Made of it later, unless another folder is given.
        self.scores = root / "scores"
        self.generated = root / "generated"
        self.exported = root / "exported"

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def environment_after(self, update: int) -> Path:
        """Versions of what went on after an update: those that the first part was made
        with stay on record.
        """
        return (
            self.path / f"environment-{checkpoint_name(update)}.json"
            if update
            else self.environment
        )

    def evaluation(self, update: int) -> Path:
        """Scores per prompt after an update."""
        return self._evaluation / f"{checkpoint_name(update)}.json"

    def sample_folder(self, update: int) -> Path:
        """The mp4 files of an evaluation."""
        return self.samples / checkpoint_name(update)

    def sheet(self, update: int) -> Path:
        """The contact sheet of an evaluation."""
        return self.samples / f"{checkpoint_name(update)}.png"

    def traces(self) -> tuple[list[Path], int]:
        """What a run changes as it goes on: its checkpoints, and bytes of metrics."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        return list_checkpoints(self.checkpoints), size

    def left_by_a_run(self) -> list[Path]:
        """Files that a new run in this directory would take for its own, in the order
        in which it is moved away.

        Checkpoints go first: a run that is killed in between is then one whose
        checkpoints are gone, which starts nothing.
        """
        made = [
            self.checkpoints,
            self.metrics,
            self._evaluation,
            self.samples,
            self.tensorboard,
            self.wandb_id,
            self.config,
            *sorted(self.path.glob("environment*.json")),
            self.reward_plot,
            self.before_after,
            self.page,
            self.status,
            *sorted(self.path.glob("abandoned-*")),
        ]
        return [path for path in made if path.exists()]

    def made_after(self, update: int) -> list[Path]:
        """Files of later updates, and what is made of the last one, in the order in
        which they are renamed.

        The newest checkpoint goes first: a run that is killed in between goes on from
        an older one of the same part.
        """
        later = []
        numbered = [
            *reversed(list_checkpoints(self.checkpoints)),
            *self.path.glob("environment-*.json"),
            *self._evaluation.glob("*"),
            *self.samples.glob("*"),
        ]
        for path in numbered:
            name = CHECKPOINT_NAME.fullmatch(path.stem.removeprefix("environment-"))
            if name and int(name[1]) > update:
                later.append(path)
        if later:
            later += [self.result, self.before_after]
        # Without its pin an update that is made again is not taken for the best.
        if read_best(self.checkpoints, newest=update) is None:
            later.insert(0, self.checkpoints / BEST)
        return [path for path in later if path.exists()]

    # ----------------------------------------------------------------------------------
    # content

    @property
    def is_run(self) -> bool:
        """True where there is a configuration."""
        # False, not an error, for a word too long to be a path
        return os.path.isfile(self.config)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted key. ConfigError where there is none."""
        # its library may not be on a machine that measures
        from sage_fast.config.load import read_config_file

        if not self.is_run:
            raise ConfigError(
                f"{self} has no config.yaml, so it is not a run. Give directories of "
                "`sage-fast train`."
            )
        return settings_of(read_config_file(self.config))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics at the first look, one record per update, oldest first. ConfigError,
        RunDirectoryError.
        """
        if not self.metrics.is_file():
            raise ConfigError(
                f"{self} has no metrics.jsonl: the run has not begun yet."
            )
        merged: dict[int, dict[str, Any]] = {}
        for row in read_metrics(self.metrics):
            # Training and evaluation may each have a record of an update; where both
            # have a key, the later one counts.
            merged.setdefault(row["update"], {}).update(row)
        return [merged[update] for update in sorted(merged)]

    def curve(self, key: str) -> dict[int, float]:
        """A metric by update, where it was logged."""
        return {
            row["update"]: float(row[key])
            for row in self.rows
            if isinstance(row.get(key), int | float)
        }

    def evaluations(self) -> dict[int, Path]:
        """Files of scores per prompt, by update, oldest first."""
        return {
            update_of(file.with_suffix("")): file
            for file in sorted(self._evaluation.glob("update-*.json"))
        }


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, oldest first.

    A last line that was cut short (the run was killed while it wrote) is left out with
    a warning.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: a line before the last is not a record; the message starts
            with ``path:line``.
    """
    lines = Path(path).read_bytes().split(b"\n")
    # Without blank ends the last line is the last record, the only one that a kill can
    # have cut short.
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("update"), int):
                raise ValueError("it is not an object with a whole number 'update'")
        except ValueError as error:
            if number == len(lines):
                logger.warning(
                    "%s:%d: dropped the last line, which was cut short", path, number
                )
                break
            raise RunDirectoryError(
                f"{path}:{number}: not a metrics record ({error}); delete or mend "
                "that line."
            ) from error
        rows.append(row)
    return rows
