"""The paired evaluation of a run: the scores before and after, sample videos, pictures,
and `result.json`.

"Before" is update 0 of the run: the model that it starts from. Its scores are part of
every checkpoint, so that no file that is deleted from the run directory changes a
comparison.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.files import write_text
from sage_fast.evaluation import (
    OVERALL,
    REWARD,
    Evaluation,
    PairedTest,
    format_comparison,
    headline,
    paired_test,
    paired_tests,
    scored_in_both,
    yes_no_score,
)
from sage_fast.models.media_files import read_video, video_file_name, write_video
from sage_fast.run import metrics as media
from sage_fast.run.directory import RunDirectory
from sage_fast.trainer import Trainer

MOST_SHOWN = 8
"""Samples on the contact sheet of an evaluation, and in Weights & Biases."""

logger = logging.getLogger(__name__)


class RunEvaluation:
    """Evaluates during a run, and compares its end with its beginning.

    Args:
        trainer: the run; its world's rank 0 writes the files, and all ranks call the
            same methods.
        directory: of the run.
    """

    def __init__(self, trainer: Trainer, directory: RunDirectory) -> None:
        self.trainer = trainer
        self.world = trainer.world
        self.directory = directory
        self.baseline: Evaluation | None = None
        """The scores of update 0, on all ranks; None where there was no evaluation."""
        self.latest: Evaluation | None = None
        """The scores that `run` has made last."""
        # Spread over the file: neighbouring prompts are often variations of one
        # another.
        count = len(trainer.eval_prompts)
        wanted = trainer.config.evaluation.num_samples
        self._sample_rows = sorted({count * i // wanted for i in range(wanted)})

    def restore_baseline(self, saved: Mapping[str, Any] | None) -> None:
        """Take the scores of update 0 from a checkpoint, or from their file where it
        has none. Collective.

        A file that is missing or was cut short is written again, from the checkpoint.
        """
        if saved is None:
            self.baseline = self.world.broadcast(
                self.load(0) if self.world.is_main else None
            )
            return
        self.baseline = Evaluation.from_dict(saved)
        if self.world.is_main and self.load(0) != self.baseline:
            self.baseline.save(self.directory.evaluation(0))

    def load(self, update: int) -> Evaluation | None:
        """The scores of an update from their file; None, with a warning, where it
        cannot be used.
        """
        file = self.directory.evaluation(update)
        if not file.exists():
            return None
        try:
            return Evaluation.load(file)
        except ValueError as error:
            logger.warning("%s", error)
            return None

    def run(self) -> dict[str, float]:
        """Evaluate, write samples and scores, and return the metrics; ranks other than
        0 write samples alone.

        Raises:
            RewardError: a reward failed and `reward.on_failure` says to stop, or fewer
                than two pairs are left.
        """
        trainer = self.trainer
        update = trainer.update
        start = time.perf_counter()

        def write(row: int, video: Tensor) -> None:
            if row in self._sample_rows:
                write_video(
                    self._video_file(update, row), video, trainer.config.video.fps
                )

        try:
            evaluation = trainer.evaluate(on_video=write)
        except RewardError as error:
            remedy = "--evaluation.every=0 turns evaluation off."
            if trainer.config.reward.on_failure == "stop":
                drop = "--reward.on_failure=drop_group leaves such a prompt out"
                remedy = f"{drop}, {remedy}"
            raise RewardError(
                f"{error} That was in the evaluation at update {update}: {remedy}"
            ) from error
        seconds = time.perf_counter() - start
        if update == 0:
            self.baseline = evaluation
        self.latest = evaluation
        # On every rank, so that an evaluation that cannot be compared ends all of them.
        metrics = self.metrics(evaluation) | {"time/evaluation": seconds}
        if not self.world.is_main:
            return {}
        evaluation.save(self.directory.evaluation(update))
        if self._sample_rows:
            # Other ranks have written some of these files: each did so before its
            # scores were gathered.
            cells = [
                media.Cell(caption=prompt, videos=[read_video(path)])
                for prompt, path in self.samples(update)
            ]
            media.contact_sheet(self.directory.sheet(update), cells, f"update {update}")
        return metrics

    def samples(self, update: int) -> list[tuple[str, Path]]:
        """The prompts on the contact sheet of an evaluation, and the mp4 of each."""
        # Every n-th, spread as the samples are; without samples the step would be 0,
        # which is an error.
        rows = self._sample_rows[:: math.ceil(len(self._sample_rows) / MOST_SHOWN) or 1]
        return [
            (self.trainer.eval_prompts[row].text, self._video_file(update, row))
            for row in rows
        ]

    def metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """Means and standard errors of an evaluation, and of its pairs with the scores
        of update 0. RewardError.
        """
        # the first evaluation of a run is that of update 0
        assert self.baseline is not None
        try:
            before, after = scored_in_both(self.baseline, evaluation)
        except ValueError as error:
            raise RewardError(
                f"The evaluation cannot be compared with that of update 0: {error}"
            ) from error
        test = paired_test(before.reward, after.reward)
        metrics: dict[str, float] = {
            "eval/paired_gain": test.mean,
            "eval/paired_gain_stderr": test.stderr,
        }
        # Over all prompts that were scored now, while the gain is over those that
        # update 0 has scored too.
        for name, values in evaluation.columns().items():
            key = {REWARD: "reward", OVERALL: "overall"}.get(name, name)
            column = torch.tensor(values, dtype=torch.float64)
            metrics[f"eval/{key}_mean"] = float(column.mean())
            metrics[f"eval/{key}_stderr"] = float(column.std()) / len(column) ** 0.5
        if test.count < len(self.trainer.eval_prompts):
            metrics["eval/pairs"] = test.count
        return metrics

    def conclude(self, rows: Sequence[Mapping[str, Any]]) -> PairedTest | None:
        """Write and print the paired test of the last evaluation against update 0; None
        where there are no two.

        Args:
            rows: the run's metrics. On rank 0 alone.
        """
        updates = {row["update"] for row in rows if "eval/reward_mean" in row} - {0}
        # From the newest on, and no further than to the first file that can be used.
        for update in sorted(updates, reverse=True):
            if (evaluation := self.load(update)) is not None:
                break
        else:
            return None
        if self.baseline is None:
            return None
        tests = paired_tests(self.baseline, evaluation)
        test = tests[REWARD]
        result: dict[str, Any] = {
            "before": 0,
            "after": update,
            "reward": asdict(test),
            "scores": {
                name: asdict(score) for name, score in tests.items() if name != REWARD
            },
            "standard_errors": test.standard_errors,
        }
        # JSON has no infinity, which it is where all prompts changed alike.
        if not math.isfinite(test.standard_errors):
            result["standard_errors"] = None
        write_text(self.directory.result, json.dumps(result, indent=1, allow_nan=False))
        self._before_after(update, evaluation)
        every = len(self.trainer.eval_prompts)
        of_all = ""
        if test.count < every:
            of_all = f" of {every} (the others could not be scored)"
        print(
            f"Paired evaluation: {test.count} prompts{of_all}, {evaluation.noise}, "
            f"update {update} against update 0\n{format_comparison(tests)}\n"
            f"{headline(tests)}"
        )
        return test

    # ----------------------------------------------------------------------------------
    # files

    def _video_file(self, update: int, row: int) -> Path:
        return self.directory.sample_folder(update) / video_file_name(
            row, self.trainer.eval_prompts[row].text
        )

    def _before_after(self, update: int, after: Evaluation) -> None:
        """Write a grid of the samples of update 0 and of this one, as far as both are
        there.
        """
        assert self.baseline is not None
        name = yes_no_score(self.baseline, after)
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        if name is not None:
            first = self.baseline.by_number(self.baseline.shown[name])
            last = after.by_number(after.shown[name])
        cells = []
        for row in self._sample_rows:
            try:
                videos = [read_video(self._video_file(at, row)) for at in (0, update)]
            except OSError as error:
                logger.warning("before_after.png lacks a prompt: %s", error)
                continue
            # A pair has marks only where both of its videos were scored.
            marks: list[bool] = []
            if row in first and row in last:
                marks = [bool(first[row]), bool(last[row])]
            caption = self.trainer.eval_prompts[row].text
            cells.append(media.Cell(caption=caption, videos=videos, marks=marks))
        if cells:
            title = (
                "Same prompt, same noise: above before training, below after update "
                f"{update}."
            )
            if marked := [cell.marks for cell in cells if cell.marks]:
                was, now = (sum(column) for column in zip(*marked, strict=True))
                title += (
                    f" \N{CHECK MARK} {name}: {was} and then {now} of {len(marked)}."
                )
                if after.noises > 1 and name is not None:
                    before = fmean(self.baseline.scores[name])
                    title += (
                        f" Over {after.noises} noises: {before:.0%} and then "
                        f"{fmean(after.scores[name]):.0%}."
                    )
            media.contact_sheet(self.directory.before_after, cells, title, grid=True)
