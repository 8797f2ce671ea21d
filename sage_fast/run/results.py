"""The paired evaluation of a run: the scores before and after, sample videos, pictures, and `result.json`.

"Before" is update 0 of the run: the model that it starts from. Its scores are part of every checkpoint, so that what is
deleted from the run directory changes no comparison.
"""

import json
import logging
import math
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.files import replacing, write_text
from sage_fast.evaluation import (
    OVERALL,
    REWARD,
    Evaluation,
    PairedTest,
    format_comparison,
    paired_test,
    paired_tests,
    scored_in_both,
)
from sage_fast.models.video_files import video_file_name, write_video
from sage_fast.run import media
from sage_fast.run.trackers import EvaluationMedia, SampleVideo
from sage_fast.trainer import Trainer

logger = logging.getLogger(__name__)


class RunEvaluation:
    """Evaluates during a run, and compares its end with its beginning.

    Args:
        trainer: the run; its world's rank 0 writes the files, and all ranks call the same methods.
        directory: of the run.
    """

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.directory = directory
        self.baseline: Evaluation | None = None
        """The scores of update 0, on all ranks; None where there was no evaluation."""
        self._latest: tuple[int, Evaluation] | None = None
        self._videos: Mapping[int, Tensor] = {}
        # Spread over the file: neighbouring prompts are often variations of one another.
        count, wanted = len(trainer.eval_prompts), trainer.config.evaluation.num_samples
        self._sample_rows = sorted({count * i // wanted for i in range(wanted)}) if wanted else []

    def restore_baseline(self, saved: Mapping[str, Any] | None) -> None:
        """Take the scores of update 0 from a checkpoint, or from their file where it has none. Collective.

        A file that is missing or was cut short is written again, from the checkpoint.
        """
        if saved is None:
            self.baseline = self.world.broadcast(self._load(0) if self.world.is_main else None)
            return
        self.baseline = Evaluation.from_dict(saved)
        if self.world.is_main and self._load(0) != self.baseline:
            self.baseline.save(self._scores_file(0))

    @property
    def latest(self) -> tuple[int, Evaluation]:
        """Update and scores of the evaluation that `run` made last."""
        assert self._latest is not None
        return self._latest

    def is_on_disk(self, update: int) -> bool:
        """Whether the scores of an update can be read back."""
        return self._load(update) is not None

    def run(self) -> dict[str, float]:
        """Evaluate, write samples and scores, and return the metrics; on ranks other than 0, evaluate alone.

        Raises:
            RewardError: a reward failed and `reward.on_failure` says to stop, or fewer than two pairs are left.
        """
        trainer, update = self.trainer, self.trainer.update
        start = time.perf_counter()
        try:
            evaluation, videos = trainer.evaluate(return_videos=self._sample_rows)
        except RewardError as error:
            raise RewardError(
                f"{error} That was in the evaluation at update {update}: --reward.on_failure=drop_group leaves such a "
                "prompt out, --evaluation.every=0 turns evaluation off."
            ) from error
        seconds = time.perf_counter() - start
        if update == 0:
            self.baseline = evaluation
        self._latest = (update, evaluation)
        metrics = self.metrics(evaluation) | {"time/evaluation": seconds}
        if not self.world.is_main:
            return {}
        evaluation.save(self._scores_file(update))
        self._videos = videos
        self._write_samples()
        return metrics

    def media(self, page: Path | None = None) -> EvaluationMedia:
        """What the last evaluation shows; on rank 0 alone. The videos are let go of.

        Args:
            page: of the run.
        """
        assert self.baseline is not None
        update, evaluation = self.latest
        videos, self._videos = self._videos, {}
        before = dict(zip(self.baseline.prompts, self.baseline.reward, strict=True))
        columns = evaluation.columns()
        return EvaluationMedia(
            videos=[
                SampleVideo(
                    prompt=self._prompt(row),
                    video=video,
                    fps=self.trainer.config.video.fps,
                    file=self._video_file(update, row),
                )
                for row, video in videos.items()
            ],
            head=["prompt", "Reward at update 0", *columns],
            rows=[
                [prompt, before.get(prompt, math.nan), *(column[row] for column in columns.values())]
                for row, prompt in enumerate(evaluation.prompts)
            ],
            page=page,
        )

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """Means and standard errors of an evaluation, and of its pairs with the scores of update 0. RewardError."""
        assert self.baseline is not None  # the first evaluation of a run is that of update 0
        try:
            before, after = scored_in_both(self.baseline, evaluation)
        except ValueError as error:
            raise RewardError(f"The evaluation cannot be compared with that of update 0: {error}") from error
        test = paired_test(before.reward, after.reward)
        overall = torch.tensor(evaluation.reward, dtype=torch.float64)
        metrics = {
            "eval/reward_mean": float(overall.mean()),
            "eval/reward_stderr": float(overall.std()) / len(overall) ** 0.5,
            "eval/paired_gain": test.mean,
            "eval/paired_gain_stderr": test.stderr,
        }
        named = {"overall" if name == OVERALL else name: values for name, values in evaluation.columns().items()}
        del named[REWARD]
        for score, values in named.items():
            column = torch.tensor(values, dtype=torch.float64)
            metrics[f"eval/{score}_mean"] = float(column.mean())
            metrics[f"eval/{score}_stderr"] = float(column.std()) / len(column) ** 0.5
        if test.count < len(self.trainer.eval_prompts):
            metrics["eval/pairs"] = test.count
            if self.world.is_main:
                logger.warning(
                    "The rewards failed on some evaluation prompts: %d of %d are compared with update 0.",
                    *(test.count, len(self.trainer.eval_prompts)),
                )
        return metrics

    def conclude(self, rows: Sequence[Mapping[str, Any]]) -> PairedTest | None:
        """Write and print the paired test of the last evaluation against update 0; None where there are no two.

        Args:
            rows: the run's metrics. On rank 0 alone.
        """
        last = self._last(sorted((row["update"] for row in rows if "eval/reward_mean" in row), reverse=True))
        if self.baseline is None or last is None:
            return None
        update, evaluation = last
        first, after = scored_in_both(self.baseline, evaluation)
        tests = paired_tests(first, after)
        test = tests.pop(REWARD)
        result = {"before": 0, "after": update, "reward": asdict(test)}
        result["scores"] = {name: asdict(score) for name, score in tests.items()}
        result["standard_errors"] = test.standard_errors
        write_text(self.directory / "evaluation" / "result.json", json.dumps(result, indent=1))
        self._before_after_sheet(update)
        every = len(self.trainer.eval_prompts)
        sampler = self.trainer.config.evaluation.sampler
        of_all = f" of {every} (the others could not be scored)" if test.count < every else ""
        print(
            f"Paired evaluation: {test.count} prompts{of_all}, same noise, sampler {sampler}, update {update} against "
            f"update 0\n{format_comparison(first, after)}\n"
            f"The reward changed by {test.mean:+.4f} +- {test.stderr:.4f}, which is "
            f"{test.standard_errors:+.1f} standard errors."
        )
        return test

    # ------------------------------------------------------------------------------------------ files

    def _scores_file(self, update: int) -> Path:
        return self.directory / "evaluation" / f"update-{update:06d}.json"

    def _frames_file(self, update: int) -> Path:
        return self.directory / "samples" / f"update-{update:06d}.npz"

    def _load(self, update: int) -> Evaluation | None:
        """The scores of an update from their file; None, with a warning, where it cannot be used."""
        file = self._scores_file(update)
        if not file.exists():
            return None
        try:
            return Evaluation.load(file)
        except ValueError as error:
            logger.warning("%s", error)
            return None

    def _last(self, updates: Sequence[int]) -> tuple[int, Evaluation] | None:
        """The latest of these evaluations after update 0 that can be had."""
        for update in updates:
            if self._latest is not None and self._latest[0] == update > 0:
                return self._latest
            evaluation = self._load(update) if update > 0 else None
            if evaluation is not None:
                return update, evaluation
        return None

    def _prompt(self, row: int) -> str:
        return self.trainer.eval_prompts[row].text

    def _video_file(self, update: int, row: int) -> Path:
        name = video_file_name(row, self._prompt(row))
        return self.directory / "samples" / f"update-{update:06d}" / name

    def _write_samples(self) -> None:
        """Videos and a contact sheet of the present model, and frames for the before/after sheet."""
        videos, update = self._videos, self.trainer.update
        if not videos:
            return
        for row, video in videos.items():
            write_video(self._video_file(update, row), video, self.trainer.config.video.fps)
        rows = [(self._prompt(row), video) for row, video in videos.items()]
        sheet = self.directory / "samples" / f"update-{update:06d}.png"
        media.contact_sheet(sheet, rows, title=f"update {update}")
        self._keep_frames(videos)

    def _keep_frames(self, videos: Mapping[int, Tensor]) -> None:
        """Keep a few frames of the first and the latest samples for the before/after sheet, also across a resume."""
        frames = {}
        for row, video in videos.items():
            chosen = torch.linspace(0, len(video) - 1, min(8, len(video))).round().long()
            frames[str(row)] = video[chosen].numpy()
        present = self._frames_file(self.trainer.update)
        with replacing(present) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **frames)
        for old in present.parent.glob("update-*.npz"):
            if old not in (present, self._frames_file(0)):
                old.unlink()

    def _before_after_sheet(self, update: int) -> None:
        files = [self._frames_file(0), self._frames_file(update)]
        if not all(f.exists() for f in files):
            return
        try:
            with np.load(files[0]) as before, np.load(files[1]) as after:
                rows = [
                    (self._prompt(int(row)), torch.from_numpy(before[row]), torch.from_numpy(after[row]))
                    for row in before.files
                    if row in after.files
                ]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            logger.warning("No before_after.png: the frames in %s cannot be read: %s", files[0].parent, error)
            return
        title = f"same prompt, same noise: before training and after update {update}"
        media.before_after_sheet(self.directory / "before_after.png", rows, title=title)
