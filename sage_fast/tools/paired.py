"""The paired evaluation of a trained model and the model it starts from, as files. Each
model is evaluated once.

FOLDER/
    before.json  after.json     scores per prompt of the base and the trained model
    base/  trained/             every video, and settings.json: what the scores were made with
    evaluation.json             every number, also per prompt
    evaluation.html             one page with everything, in light and dark; it plays the videos of base/ and trained/
    contact_sheet.png           frames of both models, base above trained
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from sage_fast import __version__
from sage_fast.config.files import loads, write_text
from sage_fast.config.load import portable
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.start import rank_device
from sage_fast.evaluation import (
    ENOUGH_PROMPTS,
    OVERALL,
    REWARD,
    Evaluation,
    PairedTest,
    direction_label,
    evaluate,
    format_comparison,
    headline,
    paired_tests,
)
from sage_fast.models import media_files
from sage_fast.policy.adapters import weights_digest
from sage_fast.records import Prompt
from sage_fast.rewards.base import Scale, reward_scales
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import VideoScoring
from sage_fast.run import metrics
from sage_fast.run.page import render
from sage_fast.run.prompt_files import prompts_digest
from sage_fast.tools.generation import (
    Generator,
    initial_weights,
    load_generator,
    sampling_settings,
)

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
SCORES = {"base": "before.json", "trained": "after.json"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of the files.

    Attributes:
        scores: paired tests by score, the reward first.
        weights: score name -> weight in the reward.
        resamples: of the bootstrap.
        settings: of both evaluations, as JSON values.
        videos: prompt's number -> name of its video in base/ and in trained/, from the
            largest gain to the largest loss.
        scales: of the scores that say how they compare with published ones.

    Example: `Report(scores=paired_tests(base, trained), base=base, trained=trained,
    weights={"VQ": 1.0}, ...)`
    """

    scores: Mapping[str, PairedTest]
    base: Evaluation
    trained: Evaluation
    weights: Mapping[str, float]
    resamples: int
    settings: Mapping[str, Any]
    videos: Mapping[int, str]
    scales: Mapping[str, Scale] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{format_comparison(self.scores)}\n{headline(self.scores)}"


@dataclass(kw_only=True)
class PairedEvaluation:
    """Evaluates the base and the trained model into a folder. The model is loaded when
    it is first needed.

    Attributes:
        prompts: at least 2.
        folder: where everything goes.
        trained: the checkpoint or adapter that is compared with the base model; its
            weights identify it.
        weights: those of the checkpoint, or the adapter's file.
        overwrite: evaluate again what has been evaluated there.
    """

    config: RunConfig
    prompts: Sequence[Prompt]
    folder: Path
    trained: Path
    weights: Mapping[str, Tensor] | Path
    overwrite: bool

    @cached_property
    def files(self) -> list[str]:
        """Names of the videos, in base/ and in trained/."""
        return [
            media_files.video_file_name(i, prompt.text)
            for i, prompt in enumerate(self.prompts)
        ]

    @cached_property
    def loaded(self) -> tuple[CompositeReward, Generator]:
        """The rewards, which score both models, and the model, with the base weights
        until it gets the trained ones.
        """
        texts = [prompt.text for prompt in self.prompts]
        device = str(rank_device(self.config.model.device))
        reward = CompositeReward.from_config(
            self.config.reward, texts, device=device, fps=self.config.video.fps
        )
        return reward, load_generator(self.config, self.prompts)

    def report(self, *, num_videos: int, resamples: int) -> Report:
        """Evaluate what has not been evaluated, and compare.

        Args:
            num_videos: prompts whose videos are shown.
            resamples: of the bootstrap.

        Raises:
            ConfigError, RewardError, OSError: each says what to do; a model that was
                finished stays finished.
        """
        # In this order: the trained weights replace the base model's.
        base = self.scores("base")
        trained = self.scores("trained")
        given = self.config.reward.weights
        weights = {name: weight for name, weight in given.items() if weight}
        differences = [a - b for b, a in zip(base.reward, trained.reward, strict=True)]
        shown = spread_over_ranks(differences, num_videos)
        return Report(
            scores=paired_tests(base, trained, weights=weights, resamples=resamples),
            base=base,
            trained=trained,
            weights=weights,
            resamples=resamples,
            settings=self._settings("trained")
            | {
                "trained": str(self.trained),
                "prompts": portable(
                    self.config.evaluation.prompts or self.config.data.prompts
                ),
            },
            videos={i: self.files[i] for i in shown},
            scales=reward_scales(self.config.reward.named),
        )

    def scores(self, model: Literal["base", "trained"]) -> Evaluation:
        """Scores of one model: those in the folder if they were made with the same
        settings.
        """
        file = self.folder / SCORES[model]
        videos = self.folder / model
        record = videos / SETTINGS
        settings = self._settings(model)
        # The videos too, since the page plays them.
        complete = all(
            path.exists()
            for path in (file, record, *(videos / name for name in self.files))
        )
        if complete and not self.overwrite:
            try:
                if loads(record.read_text(encoding="utf-8")) == settings:
                    found = Evaluation.load(file)
                    logger.info(
                        "Using the scores of the %s model in %s: same settings.",
                        model,
                        file,
                    )
                    return found
            except ValueError as error:
                logger.warning("%s Evaluating again.", error)
        # Until it is finished, nothing may claim to be it.
        record.unlink(missing_ok=True)
        result = self._evaluate(model)
        result.save(file)
        # Last: it says that the scores and all videos are there.
        write_text(record, json.dumps(settings, indent=1) + "\n")
        return result

    def _evaluate(self, model: str) -> Evaluation:
        reward, generator = self.loaded
        if model == "trained":
            generator.use_trained(self.weights)

        def write(number: int, video: Tensor) -> None:
            media_files.write_video(
                self.folder / model / self.files[number], video, self.config.video.fps
            )
            logger.info(
                "%s model: %d of %d videos",
                model.capitalize(),
                number + 1,
                len(self.prompts),
            )

        section = self.config.evaluation
        # The seed is that of a run's own evaluation, so that a reward that draws draws
        # alike for both models.
        seed = (section.seed, -1)
        scoring = VideoScoring(
            decoder=generator.decoder, reward=reward, on_failure="stop", seed=seed
        )
        return evaluate(
            generator.sampler(), scoring, generator.prompts, section, on_video=write
        )

    def _settings(self, model: Literal["base", "trained"]) -> dict[str, Any]:
        """Settings that decide the scores of a model, as JSON values."""
        weights = (
            initial_weights(self.config.model)
            if model == "base"
            else weights_digest(self.trained)
        )
        settings = sampling_settings(self.config, "ode", weights) | {
            "noises": self.config.evaluation.noises,
            "reward": {
                key: getattr(self.config.reward, key)
                for key in ("rewards", "options", "weights")
            }
            | {"rewards": self.config.reward.named},
            "prompts": prompts_digest([], self.prompts),
        }
        return json.loads(json.dumps(settings))  # as it is read back, tuples and all


def spread_over_ranks(differences: Sequence[float], count: int) -> list[int]:
    """Positions of `count` values, evenly from the largest to the smallest, so that
    losses show as well as gains.

    Example: `spread_over_ranks([0.0, 3.0, 1.0], 2)` is `[1, 0]`.
    """
    order = sorted(range(len(differences)), key=lambda i: -differences[i])
    count = min(count, len(order))
    return [
        order[round(k * (len(order) - 1) / max(1, count - 1))] for k in range(count)
    ]


# --------------------------------------------------------------------------------------
# files


def write_report(folder: Path, report: Report) -> None:
    """Write the numbers, the page and the contact sheet. OSError when the folder cannot
    be written.
    """
    write_text(folder / "evaluation.json", json.dumps(to_json(report), indent=1) + "\n")
    write_text(folder / "evaluation.html", to_html(report))
    if report.videos:
        cells = [
            metrics.Cell(
                caption=report.base.prompts[i],
                videos=[
                    media_files.read_video(folder / model / name)
                    for model in ("base", "trained")
                ],
            )
            for i, name in report.videos.items()
        ]
        metrics.contact_sheet(
            folder / "contact_sheet.png",
            cells,
            title="same prompt, same noise: base above trained",
        )


def to_json(report: Report) -> dict[str, Any]:
    """All numbers of the report as JSON values."""
    base = report.base.columns()
    trained = report.trained.columns()
    return {
        "sage_fast": __version__,
        "prompts": len(report.base.prompts),
        "confidence": 0.95,
        "resamples": report.resamples,
        "weights": dict(report.weights),
        "scores": {name: asdict(test) for name, test in report.scores.items()},
        "settings": dict(report.settings),
        "scales": {name: asdict(scale) for name, scale in report.scales.items()},
        "per_prompt": [
            {
                "prompt": prompt,
                "base": {name: column[i] for name, column in base.items()},
                "trained": {name: column[i] for name, column in trained.items()},
            }
            for i, prompt in enumerate(report.base.prompts)
        ],
    }


def to_html(report: Report) -> str:
    """The page of the report."""
    base = report.base
    trained = report.trained
    prompts = list(zip(base.prompts, base.reward, trained.reward, strict=True))
    rows = []
    for name, test in report.scores.items():
        way = ""  # a colour for what is significant alone
        if test.significant:
            way = "gain" if (test.mean > 0) is not test.lower_is_better else "loss"
        rows.append((direction_label(name, test.lower_is_better), way, test))
    return render(
        "evaluation.html",
        "Evaluation: base and trained",
        headline=headline(report.scores),
        rows=rows,
        notes=_notes(report),
        scales=[
            (
                name,
                scale.here,
                scale.published,
                *(f"{scale.factor * mean:.4g}" for mean in (test.before, test.after)),
            )
            for name, test in report.scores.items()
            if (scale := report.scales.get(name)) is not None
        ],
        videos=[
            (base.prompts[i], trained.reward[i] - base.reward[i], name)
            for i, name in report.videos.items()
        ],
        prompts=sorted(prompts, key=lambda row: row[2] - row[1]),
        settings=report.settings,
    )


def _notes(report: Report) -> list[str]:
    terms = " + ".join(f"{weight:g} {name}" for name, weight in report.weights.items())
    overall = ""
    if OVERALL in report.scores:
        overall = f" {OVERALL} is the plain sum, whatever was trained on."
    lower = ""
    if any(test.lower_is_better for test in report.scores.values()):
        lower = ", and lower where there is an arrow down"
    count = len(report.base.prompts)
    noises = report.base.noises
    videos = "one video" if noises == 1 else f"{noises} videos"
    marked = "differences are marked where the interval leaves out zero"
    if count < ENOUGH_PROMPTS:
        marked = (
            f"none is marked, because an interval of fewer than {ENOUGH_PROMPTS} "
            "prompts is not to be relied on"
        )
    return [
        f"{count} prompts, {videos} each; both models start from the same noise. "
        f"{REWARD} = {terms}.{overall} Other scores are measured only. Higher is "
        f"better{lower}.",
        "± is one standard error. 95 %: paired bootstrap over prompts, "
        f"{report.resamples:,} resamples; {marked}. "
        "Win rate: prompts on which the trained model scores better.",
    ]
