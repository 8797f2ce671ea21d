"""The metrics of a run: one JSON object per line of ``metrics.jsonl``, and trackers on request (`trackers.py`).

A record is ``{"update": 3, "reward/mean": 0.41, "time/rollout": 1.9, ...}``: ``update`` counts optimizer
updates, every other key is ``group/name``. Several records may share an update (training and evaluation).
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sage_fast.config.errors import RunDirectoryError
from sage_fast.config.files import replacing, write_text
from sage_fast.run.trackers import EvaluationMedia, Scalar, TensorBoard, WeightsAndBiases

FILE_NAME = "metrics.jsonl"

logger = logging.getLogger(__name__)


class NoMetrics:
    """The metrics of a rank that writes none."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def show(self, update: int, shown: EvaluationMedia) -> None:
        """Nothing."""

    def truncate_after(self, update: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class MetricsLogger:
    """Appends records to ``<run_dir>/metrics.jsonl``, and to TensorBoard and Weights & Biases where asked to.

    An existing file is continued; a line that was cut short by a kill is removed from it first.

    Args:
        run_dir: the run's directory; created when missing.
        tensorboard: also write event files to ``<run_dir>/tensorboard``.
        wandb_project: also send records to this Weights & Biases project. The run's identity is kept in
            ``<run_dir>/wandb_run_id``, so that a resumed run continues its own curve.
        settings: what the run is made with, which trackers keep with its curves: name -> JSON values.

    Raises:
        ValueError: a tracker was asked for whose package is not installed.
        OSError: the directory cannot be created or written to.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tensorboard: bool = False,
        wandb_project: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / FILE_NAME
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        settings = settings or {}
        if tensorboard:
            self._trackers.append(TensorBoard(self.run_dir, settings))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if wandb_project:
            self._trackers.append(WeightsAndBiases(self.run_dir, wandb_project, settings))
        _drop_partial_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record and wait until it is on disk; where that fails, as on a full disk, no part of it is left.

        Args:
            record: ``update`` (int >= 0) and metrics: numbers, strings, booleans, None, or one-element
                tensors and arrays, which are converted (on a GPU that waits for the device).

        Raises:
            ValueError: ``update`` is missing, or a value is not a scalar or not finite (something broke
                upstream, and a curve with holes would hide it). Nothing is written.
            OSError: it cannot be written.
        """
        values = {key: _scalar(key, value) for key, value in record.items()}
        update = values.pop("update", None)
        if isinstance(update, bool) or not isinstance(update, int) or update < 0:
            raise ValueError(f"a record needs 'update', a whole number from 0 up, not {update!r}")
        row = {"update": update} | dict(sorted(values.items()))
        self._append((json.dumps(row, allow_nan=False) + "\n").encode())
        for tracker in self._trackers:
            tracker.log(update, values)

    def show(self, update: int, shown: EvaluationMedia) -> None:
        """Hand what an evaluation shows to the trackers. Where one does not take it there is a warning, no error."""
        for tracker in self._trackers:
            try:
                tracker.show(update, shown)
            # Whatever a tracker raises: the numbers are safe, and a run does not end for a picture.
            except Exception as error:  # noqa: BLE001
                logger.warning("%s has no media of update %d: %s", type(tracker).__name__, update, error)

    def truncate_after(self, update: int) -> None:
        """Drop the records of updates after ``update``: a resumed run writes those again."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["update"] <= update]
        self._file.close()
        if len(kept) < len(rows):
            write_text(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept))
        self._file = self.path.open("ab", buffering=0)
        for tracker in self._trackers:
            tracker.truncate_after(update)

    def close(self) -> None:
        """Close the file and the trackers. Calling it again does nothing."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _append(self, line: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # the next start drops a line that was cut short
                self._file.truncate(start)
            raise


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, oldest first.

    A last line that was cut short (the run was killed while it wrote) is left out with a warning.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: a line before the last is not a record; the message starts with ``path:line``.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("update"), int):
                raise ValueError("it is not an object with a whole number 'update'")
        except ValueError as error:
            if number == len(lines):
                logger.warning("%s:%d: dropped the last line, which was cut short", path, number)
                break
            raise RunDirectoryError(
                f"{path}:{number}: not a metrics record ({error}); delete or mend that line."
            ) from error
        rows.append(row)
    return rows


def _scalar(key: str, value: Any) -> Scalar:
    if not isinstance(value, int | float | str | None) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"metric {key!r} must be one number, not {tuple(value.shape)} of them; reduce it"
            ) from error
    if not isinstance(value, int | float | str | None):
        raise ValueError(f"metric {key!r} must be a number, a string or a boolean, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"metric {key!r} is {value}: something went wrong in the computation before it")
    return value


def _drop_partial_line(path: Path) -> None:
    """Make the file end with a whole line, so that the next record starts a new one."""
    data = path.read_bytes() if path.exists() else b""
    if not data or data.endswith(b"\n"):
        return
    whole = data[: data.rfind(b"\n") + 1]
    try:
        json.loads(data[len(whole) :])
        whole = data + b"\n"
    except ValueError:
        logger.warning("%s: dropped the last line, which was cut short", path)
    with replacing(path) as temporary:
        temporary.write_bytes(whole)
