"""TensorBoard and Weights & Biases: the numbers of a run, and the media of its evaluations.

Both keep configuration, versions and commit with the curves. An evaluation adds its sample videos, its scores prompt by
prompt, and, in Weights & Biases, the page of the run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sage_fast.config.files import write_text
from sage_fast.run import media

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Scalar = int | float | bool | str | None


@dataclass(frozen=True, kw_only=True)
class SampleVideo:
    """A video of an evaluation. video: (F, 3, H, W) uint8 RGB. file: the same as an mp4.

    Example: `SampleVideo(prompt="a red circle", video=..., fps=8.0, file=Path("samples/update-000010/00-a-red.mp4"))`
    """

    prompt: str
    video: Tensor
    fps: float
    file: Path


@dataclass(frozen=True, kw_only=True)
class EvaluationMedia:
    """Content of an evaluation beside its metrics.

    head, rows: the table of its prompts. page: an HTML file, or None.

    Example: `EvaluationMedia(videos=[...], head=["prompt", "Reward"], rows=[["a red circle", 0.4]], page=None)`
    """

    videos: Sequence[SampleVideo]
    head: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    page: Path | None = None


class TensorBoard:
    """Event files in ``<run_dir>/tensorboard``.

    Args:
        settings: texts beside the curves, by name; JSON values.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "logging to TensorBoard needs a package that is missing: pip install tensorboard, or turn the option "
                "off"
            ) from error
        self._folder = run_dir / "tensorboard"
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

    def show(self, update: int, shown: EvaluationMedia) -> None:
        """Add the videos as animated pictures, which need no further package, and the table as text."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        writer = self._open()
        for sample in shown.videos:
            # `SummaryWriter.add_video` makes the same picture of a video, but only where moviepy is installed.
            data, (width, height) = media.animation(sample.video, sample.fps)
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
            value = Summary.Value(tag=f"samples/{sample.file.stem}", image=image)
            writer.file_writer.add_summary(Summary(value=[value]), update)  # type: ignore[attr-defined]
        cells = [
            [f"{cell:.4g}" if isinstance(cell, float) else str(cell).replace("|", "\\|") for cell in row]
            for row in shown.rows
        ]
        lines = [list(shown.head), ["---", *["---:"] * (len(shown.head) - 1)], *cells]
        writer.add_text("evaluation/prompts", "\n".join("| " + " | ".join(line) + " |" for line in lines), update)
        writer.flush()

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

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            for name, tree in self._settings.items():
                text = json.dumps(tree, indent=1, ensure_ascii=False)
                self._writer.add_text(name, f"```json\n{text}\n```")
        return self._writer


class WeightsAndBiases:
    """A run of a project. Its identity is kept in ``<run_dir>/wandb_run_id``, so that a resumed run goes on with it.

    Args:
        settings: the configuration that is kept with it; JSON values.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"logging to the Weights & Biases project {project!r} needs a package that is missing: "
                "pip install wandb, or unset wandb_project"
            ) from error
        id_file = run_dir / "wandb_run_id"
        run_id = id_file.read_text("utf-8").strip() if id_file.exists() else None
        self._run: Any = wandb.init(
            project=project,
            dir=str(run_dir),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            config=dict(settings),
        )
        if run_id is None:
            write_text(id_file, f"{self._run.id}\n")

    def log(self, update: int, values: Mapping[str, Scalar]) -> None:
        """Add a row to the history."""
        self._run.log({"update": update, **values}, step=update)

    def show(self, update: int, shown: EvaluationMedia) -> None:
        """Add the videos, the table and the page to the row of their update."""
        import wandb

        row: dict[str, Any] = {
            f"samples/{sample.file.stem}": wandb.Video(str(sample.file), caption=sample.prompt, format="mp4")
            for sample in shown.videos
        }
        row["evaluation/prompts"] = wandb.Table(columns=list(shown.head), data=[list(prompt) for prompt in shown.rows])
        if shown.page is not None:
            row["page"] = wandb.Html(shown.page.read_text("utf-8"), inject=False)
        self._run.log(row, step=update)

    def truncate_after(self, update: int) -> None:
        """Nothing: it keeps the first value that a step was given."""

    def close(self) -> None:
        """Send what is left and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
