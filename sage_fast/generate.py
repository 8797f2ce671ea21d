"""Videos for a list of prompts, as mp4 files and one contact sheet."""

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from sage_fast import media
from sage_fast.config import ConfigError
from sage_fast.rollout import micro_batches, sample_trajectory
from sage_fast.sde import SDE_TYPES, sigma_schedule, transition_table
from sage_fast.trainer import Trainer


def video_file_name(index: int, prompt: str, member: int = 0, count: int = 1) -> str:
    """A readable file name: `03-a-red-circle.mp4`, with the member appended when a prompt has several videos."""
    words = re.sub("[^a-z0-9]+", "-", prompt.lower())[:60].strip("-") or "prompt"
    return f"{index:02d}-{words}{f'-{member}' if count > 1 else ''}.mp4"


def generate(trainer: Trainer, output: Path, *, sampler: str = "ode", num_videos: int = 1) -> list[Path]:
    """Write `num_videos` videos for each of the trainer's evaluation prompts.

    Args:
        trainer: holds the model and the prompts.
        output: folder; created when missing.
        sampler: `ode`, or an SDE type, which uses the config's `rollout.eta`.
        num_videos: videos per prompt, each from its own noise.

    Raises:
        ConfigError: unknown sampler or no videos asked for. OSError: the folder cannot be written.
    """
    config = trainer.config
    if sampler not in SDE_TYPES:
        raise ConfigError(f"--sampler is {sampler!r}; choose one of {', '.join(SDE_TYPES)}.")
    if num_videos < 1:
        raise ConfigError(f"--num_videos is {num_videos}; it must be at least 1.")
    num_steps = config.evaluation.num_steps or config.rollout.num_steps
    table = transition_table(sampler, sigma_schedule(num_steps, config.rollout.shift), config.rollout.eta)
    samples = [replace(s, member=m) for s in trainer.eval_samples for m in range(num_videos)]
    paths: list[Path] = []
    rows: list[tuple[str, Tensor]] = []
    batches = list(micro_batches(samples, config.evaluation.batch_size))
    for batch in tqdm(batches, unit="batch", disable=None):
        trajectory = sample_trajectory(
            trainer.policy,
            batch,
            table,
            trainer.latent_shape,
            seed=config.evaluation.seed,
            update=0,
            device=trainer.device,
        )
        for sample, video in zip(batch, trainer.decoder.decode(trajectory.final).cpu(), strict=True):
            position = len(paths) // num_videos
            path = output / video_file_name(position, sample.prompt.text, sample.member, num_videos)
            media.write_video(path, video, config.video.fps)
            paths.append(path)
            if len(rows) < 16:
                rows.append((sample.prompt.text, video))
    media.contact_sheet(output / "contact_sheet.png", rows)
    return paths
