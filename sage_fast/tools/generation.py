"""Videos for a list of prompts, as mp4 files and one contact sheet, from the base model,
an adapter or a checkpoint; no training run and no reward is needed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.checkpoint.folder import checkpoint_name, read_best, update_of
from sage_fast.checkpoint.reader import Checkpoint, find_checkpoint, open_checkpoint
from sage_fast.config.errors import ConfigError
from sage_fast.config.files import content_digest, loads, write_text
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import EvaluationConfig, ModelConfig
from sage_fast.distributed.start import rank_device
from sage_fast.evaluation import describe_worse
from sage_fast.models import media_files
from sage_fast.models.family import VideoDecoder, family_of
from sage_fast.models.stored import FusedForward
from sage_fast.policy.adapters import (
    load_model,
    use_adapter,
    use_weights,
    weights_digest,
)
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.records import Prompt
from sage_fast.rollout import (
    Sampler,
    decode,
    evaluation_sampler,
    initial_latents,
    micro_batches,
    noise_seed,
)
from sage_fast.run import metrics
from sage_fast.run.directory import RunDirectory, read_metrics

logger = logging.getLogger(__name__)

TRAINED_MODEL = r"model\.family|lora\..*|training\.mode"
"""Keys that say which model a checkpoint's weights belong to."""


def choose_checkpoint(chosen: str, directory: RunDirectory) -> Checkpoint | None:
    """The checkpoint of a run that is meant; None for `none`.

    Args:
        chosen: `auto` (the newest; a warning says where the run's evaluations found it
            worse than its start or its best), `best` (of the best evaluation), `none`,
            or a checkpoint folder.
        directory: of the run.

    Raises:
        ConfigError: there is none. CheckpointError: it is damaged.
    """
    root = directory.checkpoints
    if chosen == "best":
        if (best := read_best(root)) is None:
            raise ConfigError(
                f"{root} holds no checkpoint that an evaluation found best. Give "
                "--checkpoint auto or a folder, or "
                "train with evaluation.every above 0."
            )
        return open_checkpoint(root / checkpoint_name(best[0]))
    found = find_checkpoint(chosen, root)
    if found is None and chosen == "auto":
        raise ConfigError(
            f"{root} holds no complete checkpoint. Continue training, or give "
            "--checkpoint FOLDER, or for `generate` "
            "--checkpoint none, the model that the run starts from."
        )
    # Checkpoints may have been copied from elsewhere without what the run has measured.
    if found is not None and chosen == "auto" and directory.metrics.exists():
        _warn_of_better(directory, update_of(found.folder))
    return found


def _warn_of_better(directory: RunDirectory, update: int) -> None:
    """Say where the run's last evaluation up to an update is worse than its start or
    its best.
    """
    gains = {
        row["update"]: (row["eval/paired_gain"], row["eval/paired_gain_stderr"])
        for row in read_metrics(directory.metrics)
        if "eval/paired_gain" in row and row["update"] <= update
    }
    found = describe_worse(gains)
    best = read_best(directory.checkpoints)
    if gains and best is not None and best[1] > gains[max(gains)][0]:
        if found is None:
            found = f"worse than update {best[0]}, whose gain was {best[1]:+.3g}"
        found += "; --checkpoint best takes that one"
    if found is not None:
        logger.warning("The newest checkpoint is %s.", found)


RECORD = "generation.json"
"""Beside the videos: what each was made with, so that a second call knows which ones to
keep.
"""

SHEET_ROWS = 16


@dataclass(kw_only=True)
class Generator:
    """A model that is ready to sample: the one that the run starts from, until
    `use_trained` is called.

    Attributes:
        prompts: those that it can be asked for.
        sampler: see `evaluation_sampler`, of which the keyword `sde_type` is left.
    """

    config: RunConfig
    policy: GuidedPolicy
    decoder: VideoDecoder
    prompts: Sequence[Prompt]
    sampler: Callable[..., Sampler]
    device: torch.device
    acceleration: FusedForward | None

    def use_trained(self, weights: Mapping[str, Tensor] | Path) -> None:
        """Take over the weights of a checkpoint, or a LoRA adapter's file. ConfigError
        when they do not fit.
        """
        transformer = self.policy.transformer
        # Modules change under the stock forward, and the forward is then chosen again.
        if self.acceleration is not None:
            self.acceleration.undo()
        try:
            if isinstance(weights, Path):
                use_adapter(transformer, weights)
            else:
                use_weights(
                    transformer,
                    weights,
                    mode=self.config.training.mode,
                    lora=self.config.lora,
                )
        except ValueError as error:
            what = "--lora" if isinstance(weights, Path) else "The checkpoint"
            raise ConfigError(f"{what}: {error}") from error
        transformer.to(self.device)
        self.acceleration = family_of(transformer).choose_forward(
            transformer, self.config.model
        )


def load_generator(config: RunConfig, prompts: Sequence[Prompt]) -> Generator:
    """Load the model that a run of a config starts from, and encode the prompts.

    Raises:
        ConfigError: a file is missing or a setting does not fit; the message names it.
    """
    device = rank_device(config.model.device)
    try:
        components = load_model(config.model, config.lora, read=False)
        components.check_guidance(config.rollout.guidance_scale)
        components.check_pictures(prompts)
        components.warn(
            config.rollout.shift, {"evaluation.num_steps": config.evaluation_steps}
        )
        video = config.evaluation_video
        latent_shape = components.video_decoder.latent_shape(
            video.num_frames, video.height, video.width
        )
        # In one call, and before the transformer takes its place: the encoders are
        # large, and are let go afterwards.
        encoder = components.prompt_encoder
        negative = config.rollout.negative_prompt
        encoder.prepare([negative, *(p.asked(video) for p in prompts)])
        unconditional = encoder.encode([negative])[0].to(device)
        if components.weights is not None:
            components.weights.read_into(components.transformer, device)
        transformer = components.transformer.to(device).requires_grad_(False)
        acceleration = family_of(transformer).choose_forward(transformer, config.model)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    policy = GuidedPolicy(transformer, unconditional, config.rollout.guidance_scale)
    sampler = partial(
        evaluation_sampler,
        config.rollout,
        config.evaluation,
        policy,
        lambda prompt: encoder.encode([prompt.asked(video)])[0].to(device),
        partial(initial_latents, shape=latent_shape, device=device),
    )
    return Generator(
        config=config,
        policy=policy,
        decoder=components.video_decoder,
        prompts=prompts,
        sampler=sampler,
        device=device,
        acceleration=acceleration,
    )


def write_videos(
    generator: Generator,
    output: Path,
    *,
    weights: str,
    sampler: str,
    num_videos: int,
    overwrite: bool,
) -> list[Path]:
    """Write `num_videos` videos for each of the generator's prompts, and a contact
    sheet of the first 16.

    A video that is there already, made with the same settings from the same prompt and
    noise, is kept: an interrupted call goes on where it stopped.

    Args:
        output: folder; created when missing.
        weights: what the generator's weights are called in the record, such as the path
            of the checkpoint.
        sampler: `ode`, or an SDE type, with the evaluation's noise scale.
        num_videos: videos per prompt, each from its own noise.
        overwrite: make every video again.

    Returns:
        The paths of all videos.

    Raises:
        ConfigError: a video of other settings is in the way.
        OSError: the folder cannot be written.
    """
    config = generator.config
    settings = sampling_settings(config, sampler, weights)
    plan: dict[str, tuple[Prompt, int]] = {}
    records = {}
    for position, prompt in enumerate(generator.prompts):
        # The parts of a prompt that decide its video; of a picture its content, not its
        # place.
        identity = asdict(prompt)
        del identity["image"], identity["columns"]
        if prompt.image is not None:
            identity["image"] = content_digest(prompt.image)
        seed = noise_seed(prompt, config.evaluation.seed, EvaluationConfig.seed)
        for member in range(num_videos):
            name = media_files.video_file_name(
                position, prompt.text, member, num_videos
            )
            plan[name] = prompt, member
            own = {"noise_seed": seed, "prompt": identity, "member": member}
            # As it comes back from the file: a tuple is a list there.
            records[name] = json.loads(json.dumps(settings | own))
    # The record goes first: a video without one would be a stranger's to the next call.
    kept = _keep_or_refuse(output, records, overwrite)
    remaining = [name for name in plan if name not in kept]
    if kept:
        logger.info(
            "Keeping %d of %d videos that are there already (--overwrite makes them "
            "again).",
            len(kept),
            len(plan),
        )
    sample = generator.sampler(sde_type=sampler)
    done = 0
    for names in micro_batches(remaining, config.evaluation.batch_size):
        latents = sample(sample.samples(plan[name] for name in names)).final
        for name, video in zip(names, decode(generator.decoder, latents), strict=True):
            media_files.write_video(output / name, video.cpu(), config.video.fps)
        done += len(names)
        logger.info(
            "%d of %d videos, the last is %s", done, len(remaining), output / names[-1]
        )
    cells = [
        metrics.Cell(
            caption=plan[name][0].text, videos=[media_files.read_video(output / name)]
        )
        for name in list(plan)[:SHEET_ROWS]
    ]
    metrics.contact_sheet(output / "contact_sheet.png", cells)
    return [output / name for name in plan]


def initial_weights(model: ModelConfig) -> str:
    """Name of the weights that a run starts from, with a digest of its adapter.
    ConfigError where there is none.
    """
    if model.adapter is None:
        return "base"
    try:
        return f"{model.adapter} ({weights_digest(Path(model.adapter))[:12]})"
    except ValueError as error:
        raise ConfigError(f"model.adapter: {error}") from error


def sampling_settings(config: RunConfig, sampler: str, weights: str) -> dict[str, Any]:
    """Settings that decide how a video looks, apart from its prompt and number, as JSON
    values.
    """
    by_unipc = sampler == "ode" and config.evaluation.solver == "unipc"
    return {
        "weights": weights,
        "model": {
            key: getattr(config.model, key)
            for key in ("family", "path", "dtype", "vae_dtype")
        },
        "video": asdict(config.evaluation_video),
        # Earlier versions say `ode` of Euler's steps.
        "sampler": "unipc" if by_unipc else sampler,
        "eta": config.rollout.eta if sampler != "ode" else 0.0,
        "num_steps": config.evaluation_steps,
        "shift": config.rollout.shift,
        "guidance_scale": config.rollout.guidance_scale,
        "noise_seed": config.evaluation.seed,
        "negative_prompt": config.rollout.negative_prompt,
    }


def _keep_or_refuse(
    output: Path, records: Mapping[str, Mapping[str, Any]], overwrite: bool
) -> set[str]:
    """Names of the videos that can be kept; the record of all of them is written.

    ConfigError, with nothing written, when a video is in the way that was made
    otherwise.
    """
    file = output / RECORD
    known: dict[str, Any] = {}
    if file.exists():
        try:
            known = loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{file} is not JSON ({error}); delete it, or give another "
                "--output_dir."
            ) from error
    present = set[str]()
    if not overwrite:
        present = {name for name in records if (output / name).exists()}
    for name in sorted(present):
        old = known.get(name, {})
        changes = [
            f"{key}: {old.get(key)!r} there, {value!r} now"
            for key, value in sorted(records[name].items())
            if old.get(key) != value
        ]
        if changes:
            raise ConfigError(
                f"{output / name} is in the way: it was made with other settings "
                f"({', '.join(changes)}). Give another --output_dir, or --overwrite to "
                "make it again."
            )
    # Videos of earlier calls stay in the folder, and so do their records.
    write_text(file, json.dumps(known | dict(records), indent=1) + "\n")
    return present
