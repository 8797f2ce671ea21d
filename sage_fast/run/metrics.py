"""The metrics of a run: one JSON object per line of ``metrics.jsonl``, TensorBoard and
Weights & Biases on request.

A record is ``{"update": 3, "reward/mean": 0.41, "time/rollout": 1.9, ...}``: ``update``
counts optimizer updates, every other key is ``group/name``. Several records may share
an update (training and evaluation).
"""

import json
import logging
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import write_text
from sage_fast.run.directory import RunDirectory, read_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Scalar = int | float | bool | str | None
Samples = Sequence[tuple[str, Path]]
"""Prompts, and the mp4 of each."""

logger = logging.getLogger(__name__)


class TensorBoard:
    """Curves in ``<run_dir>/tensorboard``, with the settings as text and a contact
    sheet of each evaluation.
    """

    def __init__(self, directory: RunDirectory, settings: Mapping[str, Any]) -> None:
        self._folder = directory.tensorboard
        self._settings = settings
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def log(self, update: int, values: Mapping[str, Scalar]) -> None:
        """Add a point to the curve of every number."""
        writer = self._open()
        for key, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(key, value, update)
        writer.flush()

    def show(self, update: int, sheet: Path, samples: Samples) -> None:
        """Add the contact sheet."""
        with Image.open(sheet) as image:
            self._open().add_image(
                "samples", np.asarray(image), update, dataformats="HWC"
            )
        self._open().flush()

    def truncate_after(self, update: int) -> None:
        """Have TensorBoard hide what earlier event files hold of later updates."""
        self._purge_step = update + 1
        self.close()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Not before the first point: only then is it known from which update on a
            # resumed run writes again.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            for name, tree in self._settings.items():
                text = json.dumps(tree, indent=1, ensure_ascii=False)
                self._writer.add_text(name, f"```json\n{text}\n```")
        return self._writer


class WeightsAndBiases:
    """A run of the project in WANDB_PROJECT.

    Its identity is kept in ``<run_dir>/wandb_run_id``, so that a resumed run goes on
    with it.

    Raises:
        ConfigError: wandb is not installed, or begins no run.
    """

    def __init__(self, directory: RunDirectory, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logging.report_to has wandb, which is not installed: pip install "
                "wandb, or leave it out."
            ) from error
        id_file = directory.wandb_id
        run_id = id_file.read_text("utf-8").strip() if id_file.exists() else None
        project = os.environ.get("WANDB_PROJECT", "sage-fast")
        try:
            self._run: Any = wandb.init(
                project=project,
                dir=str(directory),
                name=directory.path.name,
                id=run_id,
                resume="allow",
            )
        # it has many kinds, and passes on those of the network
        except Exception as error:
            raise ConfigError(
                f"logging.report_to has wandb, which cannot begin: {error}. Run "
                "`wandb login`, set WANDB_MODE=offline, "
                "or leave it out."
            ) from error
        # A resumed run may have other settings, and updates that W&B has seen: its own
        # steps only rise.
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        if run_id is None:
            write_text(id_file, f"{self._run.id}\n")

    def log(self, update: int, values: Mapping[str, Scalar]) -> None:
        """Add a row to the history."""
        self._run.log({"update": update, **values})

    def show(self, update: int, sheet: Path, samples: Samples) -> None:
        """Add a row with the videos to the history."""
        import wandb

        videos = {
            file.stem: wandb.Video(str(file), caption=prompt, format="mp4")
            for prompt, file in samples
        }
        self._run.log(
            {
                "update": update,
                **{f"samples/{name}": video for name, video in videos.items()},
            }
        )

    def truncate_after(self, update: int) -> None:
        """Nothing: its history only grows; the rows of updates that are made again come
        after the earlier ones.
        """

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


class MetricsLogger:
    """Appends records to ``<run_dir>/metrics.jsonl``, and to TensorBoard and Weights &
    Biases where asked to.

    An existing file is continued; a line that was cut short by a kill is removed from
    it first.

    Args:
        run_dir: the run's directory; created when missing. None on a rank that writes
            none: every call does nothing. report_to: trackers that get the records too,
            see `LoggingConfig`.
        settings: what the run is made with, which trackers keep with its curves: name
            -> JSON values.

    Raises:
        ConfigError: wandb was asked for and is not installed, or begins no run.
        OSError: the directory cannot be created or written to.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        report_to: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        self._warned: set[tuple[object, str]] = set()
        self._file: FileIO | None = None
        if run_dir is None:
            return
        directory = RunDirectory(run_dir)
        settings = settings or {}
        self.path = directory.metrics
        directory.path.mkdir(parents=True, exist_ok=True)
        self._trackers = [TRACKERS[name](directory, settings) for name in report_to]
        self._file = self._open(math.inf)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record and wait until it is on disk; where that fails, as on a
        full disk, no part of it is left.

        Args:
            record: ``update`` (int >= 0) and metrics: numbers, strings, booleans, None,
                or one-element tensors and arrays, which are converted (on a GPU that
                waits for the device).

        Raises:
            ValueError: ``update`` is missing, or a value is not a scalar or not finite
                (something broke upstream, and a curve with holes would hide it).
                Nothing is written.
            OSError: it cannot be written.
        """
        if self._file is None:
            return
        # All values before any byte: one that is refused leaves the file as it was.
        values = {key: _scalar(key, value) for key, value in record.items()}
        update: Any = values.pop("update")
        row = {"update": update} | dict(sorted(values.items()))
        # Where the record begins, to cut the file back to where only a part of it fits
        # on the disk.
        start = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
            # An unbuffered file may take a part at a time.
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # the next start drops a line that was cut short
                self._file.truncate(start)
            raise
        self._tell("log", f"numbers of update {update}", update, values)

    def show(self, update: int, sheet: Path, samples: Samples) -> None:
        """Hand the samples of an evaluation to the trackers."""
        self._tell("show", f"samples of update {update}", update, sheet, samples)

    def truncate_after(self, update: int, but: str | None = None) -> None:
        """Drop the records of updates after ``update``: a resumed run writes those
        again.

        Args:
            but: a key whose records of this update are dropped too.
        """
        if self._file is None:
            return
        self._file.close()
        self._file = self._open(update, but)
        self._tell("truncate_after", f"return to update {update}", update)

    def close(self) -> None:
        """Close the file and the trackers. Calling it again does nothing."""
        if self._file is not None:
            self._file.close()
        self._tell("close", "end of the run")

    def _tell(self, method: str, what: str, *arguments: Any) -> None:
        """Call a method of every tracker. Where it fails, that is one warning: the
        numbers are safe in the file.
        """
        for tracker in self._trackers:
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001  whatever a tracker raises, a run does not end for it
                if (tracker, method) not in self._warned:
                    logger.warning(
                        "%s has no %s (said once): %s",
                        type(tracker).__name__,
                        what,
                        error,
                    )
                self._warned.add((tracker, method))

    def _open(self, last: float, but: str | None = None) -> FileIO:
        """Open the file to append to, without what `truncate_after` drops and without a
        line that was cut short.
        """
        written = self.path.read_bytes() if self.path.exists() else b"\n"
        rows = read_metrics(self.path) if self.path.exists() else []
        kept = [
            row
            for row in rows
            if row["update"] < last or (row["update"] == last and but not in row)
        ]
        # A last line without its end, whole or not, would run on into the next record.
        if len(kept) < len(rows) or not written.endswith(b"\n"):
            write_text(
                self.path,
                "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept),
            )
        return self.path.open("ab", buffering=0)


def _scalar(key: str, value: Any) -> Scalar:
    scalar: Scalar = value.item() if hasattr(value, "item") else value
    if isinstance(scalar, float) and not math.isfinite(scalar):
        raise ValueError(
            f"metric {key!r} is {scalar}: something went wrong in the computation "
            "before it"
        )
    return scalar


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the device, or of this process on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
