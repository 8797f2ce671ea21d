"""The paired evaluation as files: both models' videos and scores in one folder, each model evaluated once.

FOLDER/
    before.json  after.json              scores per prompt of the base and the trained model
    base/  trained/                      every video, and settings.json: what the scores were made with
    evaluation.{json,md,html}  contact_sheet.png     see `report.py`
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from tqdm import tqdm

from sage_fast.config.files import write_text
from sage_fast.config.presets import portable
from sage_fast.config.schema import RunConfig
from sage_fast.distributed.start import rank_device
from sage_fast.evaluation import Evaluation, EvaluationSampling, evaluate, paired_tests
from sage_fast.models import video_files
from sage_fast.policy.trained import weights_digest
from sage_fast.records import Prompt
from sage_fast.rewards.base import reward_scales
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import VideoScoring
from sage_fast.run.run import prompts_digest
from sage_fast.tools.generation import Generator, load_generator, sampling_settings
from sage_fast.tools.report import Report, ShownVideo, spread_over_ranks

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
SCORES = {"base": "before.json", "trained": "after.json"}


class PairedEvaluation:
    """Evaluates the base and the trained model into a folder. The model is loaded when it is first needed.

    Args:
        config: model, rewards, sampling.
        prompts: at least 2.
        folder: where everything goes.
        trained: the checkpoint or adapter that is compared with the base model; its weights identify it.
        use_trained: puts the trained weights into a generator.
        overwrite: evaluate again what has been evaluated there.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        folder: Path,
        trained: Path,
        use_trained: Callable[[Generator], None],
        *,
        overwrite: bool = False,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.folder = folder
        self.trained = trained
        self.use_trained = use_trained
        self.overwrite = overwrite
        self.files = [video_files.video_file_name(i, p.text) for i, p in enumerate(prompts)]

    @cached_property
    def generator(self) -> Generator:
        """The model, with the base weights until the trained ones are put into it."""
        return load_generator(self.config, self.prompts)

    @cached_property
    def reward(self) -> CompositeReward:
        """The rewards, which score both models."""
        texts, device = [prompt.text for prompt in self.prompts], str(rank_device(self.config.model.device))
        return CompositeReward.from_config(self.config.reward, texts, device=device, fps=self.config.video.fps)

    def report(self, *, num_videos: int, resamples: int, seed: int) -> Report:
        """Evaluate what has not been evaluated, and compare.

        Args:
            num_videos: prompts whose videos are shown. resamples, seed: of the bootstrap.

        Raises:
            ConfigError, RewardError, OSError: each says what to do; a model that was finished stays finished.
        """
        # In this order: the trained weights replace the base model's.
        base, trained = self.scores("base"), self.scores("trained")
        weights = {name: weight for name, weight in self.config.reward.weights.items() if weight}
        differences = [a - b for b, a in zip(base.reward, trained.reward, strict=True)]
        return Report(
            scores=paired_tests(base, trained, weights=weights, resamples=resamples, seed=seed),
            base=base,
            trained=trained,
            weights=weights,
            scales=reward_scales(self.config.reward.rewards),
            resamples=resamples,
            seed=seed,
            settings={
                "trained": str(self.trained),
                "prompts": portable(self.config.evaluation.prompts or self.config.data.prompts),
                **{k: v for k, v in self._settings("trained").items() if k != "prompts"},
            },
            videos=[
                ShownVideo(
                    prompt=base.prompts[i],
                    base=self.folder / "base" / self.files[i],
                    trained=self.folder / "trained" / self.files[i],
                    difference=differences[i],
                )
                for i in spread_over_ranks(differences, num_videos)
            ],
        )

    def scores(self, model: Literal["base", "trained"]) -> Evaluation:
        """Scores of one model: those in the folder if they were made with the same settings."""
        file, videos = self.folder / SCORES[model], self.folder / model
        settings = self._settings(model)
        if not self.overwrite and file.exists() and self._finished(videos, settings):
            try:
                found = Evaluation.load(file)
            except ValueError as error:
                logger.warning("%s Evaluating again.", error)
            else:
                logger.info("Using the scores of the %s model in %s: same settings.", model, file)
                return found
        # Until it is finished, nothing may claim to be it.
        (videos / SETTINGS).unlink(missing_ok=True)
        result = self._evaluate(model)
        result.save(file)
        write_text(videos / SETTINGS, json.dumps(settings, indent=1) + "\n")
        return result

    def _finished(self, videos: Path, settings: Mapping[str, Any]) -> bool:
        file = videos / SETTINGS
        if not file.exists() or not all((videos / name).exists() for name in self.files):
            return False
        try:
            return bool(json.loads(file.read_text(encoding="utf-8")) == settings)
        except ValueError:
            return False

    def _evaluate(self, model: str) -> Evaluation:
        reward, generator, evaluation = self.reward, self.generator, self.config.evaluation
        if model == "trained":
            self.use_trained(generator)
        with tqdm(total=len(self.prompts), unit="video", desc=model, disable=None) as bar:

            def write(number: int, video: Tensor) -> None:
                video_files.write_video(self.folder / model / self.files[number], video, self.config.video.fps)
                bar.update()
                done = number + 1
                if bar.disable and (done % evaluation.batch_size == 0 or done == len(self.prompts)):
                    logger.info("%s model: %d of %d videos", model.capitalize(), done, len(self.prompts))

            sampling = EvaluationSampling(
                policy=generator.policy,
                embed=generator.embed,
                table=generator.table("ode"),
                latent_shape=generator.latent_shape,
                seed=evaluation.seed,
                batch_size=evaluation.batch_size,
                noises=evaluation.noises,
                device=generator.device,
            )
            scoring = VideoScoring(decoder=generator.decoder, reward=reward, on_failure="stop")
            return evaluate(sampling, scoring, generator.prompts, on_video=write)[0]

    def _settings(self, model: Literal["base", "trained"]) -> dict[str, Any]:
        """Settings that decide the scores of a model, as JSON values."""
        weights = "base" if model == "base" else weights_digest(self.trained)
        settings = sampling_settings(self.config, "ode", weights) | {
            "noises": self.config.evaluation.noises,
            "reward": {key: getattr(self.config.reward, key) for key in ("rewards", "options", "weights")},
            "prompts": prompts_digest([], self.prompts),
        }
        return json.loads(json.dumps(settings))  # as it is read back, tuples and all
