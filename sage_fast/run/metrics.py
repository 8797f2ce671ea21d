"""The metrics of a run, one JSON object per line of ``metrics.jsonl``, TensorBoard and
Weights & Biases on request; and its contact sheets of videos (PNG).

A record is ``{"update": 3, "reward/mean": 0.41, "time/rollout": 1.9, ...}``: ``update``
counts optimizer updates, every other key is ``group/name``. Several records may share
an update (training and evaluation).

Videos are uint8 tensors (F, 3, H, W), RGB. Every file appears whole or not at all.
"""

import json
import logging
import math
import os
import resource
import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.files import replacing, write_text
from sage_fast.config.registry import TRACKERS, resolve
from sage_fast.models.media_files import video_frames
from sage_fast.run.directory import RunDirectory, read_metrics
from sage_fast.run.plots import GAIN, LOSS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Scalar = int | float | bool | str | None
Samples = Sequence[tuple[str, Path]]
"""Prompts, and the mp4 of each."""

logger = logging.getLogger(__name__)


class Tracker:
    """A further place for the metrics of a run, on rank 0. An error of a method is one
    warning, and the run goes on.

    Args:
        directory: of the run.
        settings: what the run is made with: name -> JSON values.
    """

    def __init__(self, directory: RunDirectory, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        self.settings = settings

    def log(self, update: int, values: Mapping[str, Scalar]) -> None:
        """Take a record of metrics."""

    def show(self, update: int, sheet: Path, samples: Samples) -> None:
        """Take an evaluation's contact sheet, and its prompts with their videos."""

    def truncate_after(self, update: int) -> None:
        """The updates after this one are made again."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard(Tracker):
    """Curves in ``<run_dir>/tensorboard``, with the settings as text and a contact
    sheet of each evaluation.
    """

    def __init__(self, directory: RunDirectory, settings: Mapping[str, Any]) -> None:
        super().__init__(directory, settings)
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
            self._writer = SummaryWriter(
                str(self.directory.tensorboard), purge_step=self._purge_step
            )
            for name, tree in self.settings.items():
                text = json.dumps(tree, indent=1, ensure_ascii=False)
                self._writer.add_text(name, f"```json\n{text}\n```")
        return self._writer


class WeightsAndBiases(Tracker):
    """A run of the project in WANDB_PROJECT.

    Its identity is kept in ``<run_dir>/wandb_run_id``, so that a resumed run goes on
    with it. Its history only grows: the rows of updates that are made again come after
    the earlier ones.

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

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


class MetricsLogger:
    """Appends records to ``<run_dir>/metrics.jsonl``, and to TensorBoard and Weights &
    Biases where asked to.

    An existing file is continued; a line that was cut short by a kill is removed from
    it first.

    Args:
        run_dir: the run's directory; created when missing. None on a rank that writes
            none: every call does nothing.
        report_to: trackers that get the records too, see `LoggingConfig`.
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
        self._trackers: list[Tracker] = []
        self._warned: set[tuple[object, str]] = set()
        self._file: FileIO | None = None
        if run_dir is None:
            return
        directory = RunDirectory(run_dir)
        settings = settings or {}
        self.path = directory.metrics
        directory.path.mkdir(parents=True, exist_ok=True)
        for name in report_to:
            tracker = resolve(name, TRACKERS, "logging.report_to")
            self._trackers.append(tracker(directory, settings))
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


STRIP_FRAMES = 8
GRID_FRAMES = 3
"""Shown of each video, spread evenly from the first to the last; a shorter one shows
all.
"""

INK = "#1d232b"
MARGIN = 20
GAP = 24
LINE_HEIGHT = 26
WIDTH = 1660
"""Pixels of a sheet: twice as many as a README shows."""
MARK_WIDTH = 24
LETTER_WIDTH = 10
MOST_LINES = 3
"""Of a caption."""
DPI = 100

Text = tuple[float, float, str, str, int]
"""x, y of its middle, text, colour, size."""
Place = tuple[int, int, np.ndarray]
"""x, y of its top, picture."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A prompt of a sheet.

    Attributes:
        videos: (F, 3, H, W) uint8 RGB each, one below the other.
        marks: whether each shows what was asked, or none.

    Example: `Cell(caption="a red circle", videos=[before, after], marks=[False, True])`
    """

    caption: str
    videos: Sequence[Tensor]
    marks: Sequence[bool] = ()


def contact_sheet(
    path: str | os.PathLike[str],
    cells: Sequence[Cell],
    title: str = "",
    *,
    grid: bool = False,
) -> None:
    """Write a PNG with the caption of every cell above the frames of its videos, ticked
    where they are marked.

    Args:
        path: the file to write; missing folders are created.
        cells: videos of the same cell have the same size.
        title: above the cells.
        grid: up to 6 cells side by side, with `GRID_FRAMES` of each video; else one a
            row, with `STRIP_FRAMES`.

    Raises:
        ValueError: a video of another shape or dtype.
        OSError: the folder cannot be written to.
    """
    columns = min(6, math.ceil(math.sqrt(len(cells)))) if grid else 1
    frames = GRID_FRAMES if grid else STRIP_FRAMES
    # Pixels from one cell to the next, and of a frame, which has 2 white ones after it;
    # the mark follows the last.
    across = (WIDTH - 2 * MARGIN + GAP) // columns
    side = (across - GAP - MARK_WIDTH) // frames - 2
    texts: list[Text] = []
    places: list[Place] = []
    top = MARGIN
    if title:
        for line in _wrapped(title, WIDTH - 2 * MARGIN):
            texts.append((MARGIN, top + LINE_HEIGHT / 2, line, INK, 15))
            top += LINE_HEIGHT
        top += GAP
    for row in range(0, len(cells), columns):
        shown = cells[row : row + columns]
        captions = [_wrapped(cell.caption, across - GAP) for cell in shown]
        # The videos of a row begin at one height, below the longest of its captions.
        y = top + LINE_HEIGHT * max(map(len, captions))
        for column, (cell, caption) in enumerate(zip(shown, captions, strict=True)):
            x = MARGIN + column * across
            texts += [
                (x, top + (n + 0.5) * LINE_HEIGHT, line, INK, 13)
                for n, line in enumerate(caption)
            ]
            below = y
            for number, video in enumerate(cell.videos):
                strip = _strip(video, f"video {cell.caption!r}", frames, width=side)
                places.append((x, below, strip))
                if cell.marks:
                    sign, colour = (
                        ("\N{CHECK MARK}", GAIN)
                        if cell.marks[number]
                        else ("\N{BALLOT X}", LOSS)
                    )
                    texts.append(
                        (
                            x + strip.shape[1] + 4,
                            below + strip.shape[0] / 2,
                            sign,
                            colour,
                            18,
                        )
                    )
                below += strip.shape[0] + 4
        # Below the lowest strip, because the cells of a row may differ in the height
        # and number of their videos.
        top = max(top_of + strip.shape[0] for _, top_of, strip in places) + GAP
    _write_sheet(path, top, texts, places)


def _write_sheet(
    path: str | os.PathLike[str],
    height: int,
    texts: Sequence[Text],
    places: Sequence[Place],
) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
    with (
        rc_context({"font.family": ["DejaVu Sans", *_other_fonts()]}),
        catch_warnings(),
    ):
        # A character that no font has is a box; the page of the run and the names of
        # the files have it.
        simplefilter("ignore")
        # A sheet is laid out from the top; matplotlib counts pixels and shares of a
        # figure from the bottom.
        for x, top, strip in places:
            figure.figimage(
                strip, xo=x, yo=height - top - strip.shape[0], origin="upper"
            )
        for text_x, middle, text, colour, size in texts:
            # No mathematics: a prompt may hold dollars.
            at = text_x / WIDTH, 1 - middle / height
            figure.text(
                *at, text, color=colour, size=size, va="center", parse_math=False
            )
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI)


@cache
def _other_fonts() -> list[str]:
    """Fonts for scripts that matplotlib's own lacks, as far as they are installed."""
    from matplotlib.font_manager import fontManager

    wanted = (
        "Noto Sans CJK",
        "Noto Sans Arabic",
        "Noto Sans",
        "WenQuanYi",
        "Arial Unicode",
        "Microsoft YaHei",
    )
    names = sorted({font.name for font in fontManager.ttflist})
    return [name for start in wanted for name in names if name.startswith(start)]


def _wrapped(text: str, width: int) -> list[str]:
    """The text in at most `MOST_LINES` lines of about `width` pixels."""
    # East Asian characters are as wide as high, Latin ones about half that.
    wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    letters = max(8, width // (2 * LETTER_WIDTH - 2 if wide else LETTER_WIDTH))
    return textwrap.wrap(text, letters, max_lines=MOST_LINES, placeholder="…") or [""]


def _strip(video: Tensor, what: str, most: int, *, width: int) -> np.ndarray:
    """At most so many frames of a video in a row, evenly from the first to the last,
    each `width` wide: (H, W, 3).
    """
    frames = video_frames(video, what)
    height = round(frames.shape[1] * width / frames.shape[2])
    indices = (
        np.linspace(0, len(frames) - 1, min(len(frames), most)).round().astype(int)
    )
    whole = np.full((height, len(indices) * (width + 2) - 2, 3), 255, dtype=np.uint8)
    for place, index in enumerate(indices):
        frame = Image.fromarray(frames[index]).resize(
            (width, height), Image.Resampling.LANCZOS
        )
        whole[:, place * (width + 2) : place * (width + 2) + width] = frame
    return whole
