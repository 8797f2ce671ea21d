"""What a user checks once on the real weights: every part of a run against another way to the same numbers.

Files against the hub's hashes, noise levels against diffusers' scheduler, prompt, velocity and video against the stock
classes, rewards against scores that their public code gave, and then one update of two videos: its ratio is exactly 1,
its timesteps are not rounded, its memory is what was planned. A part that fails, or cannot be run, is a finding with
its name; the others are still checked.
"""

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.embeddings import Timesteps
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sage_fast.config.distributed import DistributedConfig
from sage_fast.config.errors import ConfigError, SageError
from sage_fast.config.rollout_sections import SDEWindowConfig
from sage_fast.config.schema import RunConfig
from sage_fast.config.training_sections import TrainOnConfig
from sage_fast.distributed.start import rank_device
from sage_fast.models.family import Components, VideoDecoder, load_components, shift_difference
from sage_fast.models.hub import Requirement, downloaded_files, local_folder, published_hashes
from sage_fast.models.transformer import backbone
from sage_fast.models.video_files import read_video_and_rate
from sage_fast.noise import NoiseKey, initial_noise
from sage_fast.planning.devices import gpu_memory_gb
from sage_fast.planning.estimate import make_memory_plan, settle_memory
from sage_fast.planning.memory import CUDA_RUNTIME
from sage_fast.policy.lora import cast_weights
from sage_fast.rewards.base import find_reward
from sage_fast.rewards.composite import CompositeReward
from sage_fast.run.run import load_prompts
from sage_fast.sde import sigma_schedule
from sage_fast.tools.diagnosis import needed_files
from sage_fast.tools.machine import Check
from sage_fast.trainer import Trainer

logger = logging.getLogger(__name__)

SECTION = "deep"

NUM_STEPS, NUM_VIDEOS = 4, 2
"""Of the one update."""

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative error |a - b| / |b| up to which two ways to compute the same are taken for the same, by data type. 54 blocks
in bfloat16 differ by 0.01 to 0.02; a part that is wrong differs by more than 0.1."""

SCORE_LIMIT = 0.1
"""Difference from a stored score, in the score's own unit; bfloat16 on another machine gives up to 0.06."""

MEMORY_LIMIT = 1.1
"""Measured over planned memory."""


def examine_deeply(config: RunConfig, scores: Path | None = None) -> list[Check]:
    """All parts in turn. Loads everything, and writes nothing but the caches that a run writes.

    Args:
        config: of a run that `examine` lets pass.
        scores: a file of scores by the rewards' public code, see `read_scores`.
    """
    config = settle_memory(config)
    return [*_guarded("files", lambda: _files(config)), *_Examination(config, scores).checks()]


def _ok(name: str, detail: str) -> Check:
    return Check(SECTION, name, "ok", detail)


def _info(name: str, detail: str) -> Check:
    return Check(SECTION, name, "info", detail)


def _failed(name: str, detail: str, fix: str = "") -> Check:
    return Check(SECTION, name, "failed", detail, fix=fix)


def _judged(name: str, passes: bool, detail: str, fix: str = "") -> Check:
    return _ok(name, detail) if passes else _failed(name, detail, fix)


def _guarded(name: str, findings: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The findings of a part. An error that ends it is one of them."""
    logger.info("Checking: %s", name)
    try:
        yield from findings()
    except (SageError, ValueError, OSError, RuntimeError) as error:
        yield _failed(name, str(error), "see the message")


# ---------------------------------------------------------------------------------------------------------------- files


def _files(config: RunConfig) -> Iterator[Check]:
    for requirement in needed_files(config):
        folder = local_folder(requirement.where)
        if folder is not None:
            yield from _guarded(f"files: {requirement.name}", lambda r=requirement, f=folder: _compare(r, f))  # type: ignore[misc]


def _compare(requirement: Requirement, folder: Path) -> Iterator[Check]:
    """The files of a folder against the index of their shards, and against the hashes of the hub."""
    name = f"files: {requirement.name}"
    for index in sorted(folder.rglob("*.safetensors.index.json")):
        if (file := _misplaced(index)) is not None:
            detail = f"{file.relative_to(folder)} holds other tensors than {index.name} says"
            yield _failed(name, detail, f"delete it, then: {requirement.fetch}")
            return
    revision, hashes = downloaded_files(folder)
    published = published_hashes(requirement.repository, revision) if requirement.repository else {}
    source = f"{requirement.repository} on the hub" if published else "its download, as the hub is not reachable"
    expected = {file: digest for file, digest in (published or hashes).items() if (folder / file).is_file()}
    if not expected:
        yield _info(name, "not compared: the hub is not reachable, and no record of a download is here")
        return
    wrong = [file for file, digest in expected.items() if _sha256(folder / file) != digest]
    if wrong:
        detail = f"{wrong[0]} is not the file of {source}" + (f", nor are {len(wrong) - 1} more" if wrong[1:] else "")
        yield _failed(name, detail, f"delete it, then: {requirement.fetch}")
    else:
        size = sum((folder / file).stat().st_size for file in expected) / 1e9
        yield _ok(name, f"{len(expected)} large files ({size:.1f} GB) are those of {source}")


def _misplaced(index: Path) -> Path | None:
    """A shard that holds other tensors than its index says."""
    shards: dict[str, set[str]] = {}
    for tensor, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        shards.setdefault(file, set()).add(tensor)
    for file, tensors in shards.items():
        try:
            with safe_open(index.parent / file, framework="pt") as shard:
                if set(shard.keys()) != tensors:
                    return index.parent / file
        except (SafetensorError, OSError):
            return index.parent / file
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -------------------------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True, kw_only=True)
class Example:
    """A video and what the public code of a reward said of it.

    Example: `Example(video=Path("example_1_A.mp4"), prompt="a girl ...", scores={"VQ": 0.3, "MQ": -0.1, "TA": 0.9})`
    """

    video: Path
    prompt: str
    scores: Mapping[str, float]


def read_scores(file: Path) -> dict[str, list[Example]]:
    """Stored scores by reward, from `{"videoalign": [{"video": "a.mp4", "prompt": "...", "scores": {"VQ": 0.3}}]}`.

    Videos are relative to the file. ConfigError for another content.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        return {
            reward: [
                Example(
                    video=file.parent / row["video"],
                    prompt=str(row["prompt"]),
                    scores={name: float(value) for name, value in row["scores"].items()},
                )
                for row in rows
            ]
            for reward, rows in tree.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--scores {file} cannot be used ({type(error).__name__}: {error}). It is JSON of the form "
            '{"REWARD": [{"video": "a.mp4", "prompt": "...", "scores": {"NAME": 0.3}}]}.'
        ) from error


def _deviations(rewards: CompositeReward) -> Iterator[Check]:
    """What the rewards themselves say of how they differ from their public code."""
    for name, reward in rewards.rewards.items():
        what, says = f"reward {name}: arithmetic", getattr(reward, "deviations", None)
        if says is None:
            continue
        deviations: list[str] = says()
        yield from (_failed(what, deviation) for deviation in deviations)
        if not deviations:
            yield _ok(what, "as its public code computes")


def _stored_scores(config: RunConfig, device: str, scores: Path | None) -> Iterator[Check]:
    """Every reward with stored scores against them, each video at the rate that its file declares."""
    stored = read_scores(scores) if scores is not None else {}
    for name in config.reward.rewards:
        what = f"reward {name}: scores"
        if not stored.get(name):
            yield _info(what, "not compared: --scores FILE has none of its public code")
            continue
        worst, at = 0.0, ""
        for example in stored[name]:
            video, fps = read_video_and_rate(example.video)
            found = _reward_at(config, name, fps, device).score(video[None], [example.prompt])
            for key, value in example.scores.items():
                difference = abs(float(found[key][0]) - value)
                if not difference <= worst:
                    worst, at = (
                        difference,
                        f"{key} of {example.video.name}: {float(found[key][0]):.3f}, not {value:.3f}",
                    )
        detail = f"{len(stored[name])} videos, largest difference {worst:.3f} (limit {SCORE_LIMIT:g})"
        fix = f"is reward.options.{name} that of the public code, and are the weights the same?"
        yield _judged(what, worst <= SCORE_LIMIT, f"{detail}; {at}" if worst > SCORE_LIMIT else detail, fix)


def _reward_at(config: RunConfig, name: str, fps: float, device: str) -> Any:
    """A reward of the configuration for a video file of `fps`: what has been an mp4 is not compressed again."""
    takes = inspect.signature(find_reward(name)).parameters
    changes = {key: value for key, value in (("fps", fps), ("mp4", False)) if key in takes}
    section = replace(config.reward, rewards=[name], options={name: config.reward.options.get(name, {}) | changes})
    return CompositeReward.from_config(section, device=device).rewards[name]


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(kw_only=True)
class _Recorder:
    """A video decoder that keeps what it was last given, and what it made of it."""

    decoder: VideoDecoder
    latents: Tensor = field(default_factory=lambda: torch.empty(0))
    videos: Tensor = field(default_factory=lambda: torch.empty(0))
    seconds: float = 0.0

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return self.decoder.latent_shape(num_frames, height, width)

    def decode(self, latents: Tensor) -> Tensor:
        start = time.perf_counter()
        self.latents, self.videos = latents, self.decoder.decode(latents)
        self.seconds = time.perf_counter() - start
        return self.videos


class _Examination:
    """The parts that need the model, in the order in which they leave room for each other."""

    def __init__(self, config: RunConfig, scores: Path | None) -> None:
        self.config = config
        self.scores = scores
        self.device = rank_device(config.model.device)
        self.components: Components | None = None

    def checks(self) -> Iterator[Check]:
        config = self.config
        yield from _guarded("rewards", lambda: _stored_scores(config, str(self.device), self.scores))
        yield from _guarded("model", self._load)
        if self.components is None:
            return
        components = self.components
        yield from _guarded("schedule", lambda: _schedule(config, components))
        yield from _guarded("prompt", lambda: self._prompt(components))
        yield from _guarded("velocity", lambda: self._velocity(components))
        yield from _guarded("update", lambda: self._update(components))

    def _load(self) -> Iterator[Check]:
        start = time.perf_counter()
        components = load_components(self.config.model)
        components.check_guidance(self.config.rollout.guidance_scale)
        cast_weights(components.transformer, getattr(torch, self.config.model.dtype))
        self.prompt = load_prompts(self.config)[0][0]
        self.components = components
        parameters = sum(p.numel() for p in components.transformer.parameters())
        seconds = time.perf_counter() - start
        yield _ok("model", f"{parameters:,} parameters in {self.config.model.dtype}, loaded in {seconds:.0f} s")

    def _prompt(self, components: Components) -> Iterator[Check]:
        """One prompt as a run encodes it, or has encoded it, against the whole conversation without padding."""
        encoder, text = components.prompt_encoder, self.prompt.text
        (embeds,) = encoder.encode([text])
        plain: Callable[[str], Tensor] | None = getattr(encoder, "encode_plainly", None)
        if plain is None:
            yield _info("prompt", f"{len(embeds.text)} tokens; the family has no second way to encode it")
            return
        expected = plain(text)
        if embeds.text.shape != expected.shape:
            more = len(embeds.text) - len(expected)
            detail = f"{abs(more)} {'more' if more > 0 else 'fewer'} than the {len(expected)} tokens of the prompt"
            yield _failed("prompt", detail, "wrong crop or tokenizer; delete the prompts in model.cache_dir")
            return
        yield _close("prompt", embeds.text, expected, f"{len(expected)} tokens")

    def _velocity(self, components: Components) -> Iterator[Check]:
        """The fused forward against diffusers' own: the same weights, latents, noise level and prompt."""
        model, transformer = self.config.model, components.transformer.to(self.device)
        (embeds,) = [e.to(self.device) for e in components.prompt_encoder.encode([self.prompt.text])]
        latents = self._noise(components)
        sigma = sigma_schedule(NUM_STEPS, self.config.rollout.shift)[1:2].float()
        with torch.no_grad():
            code = backbone(transformer)
            stock = code.velocity(transformer, latents, sigma, [embeds])
            forward = code.choose_forward(transformer, model)
            if forward is None:
                yield _info("velocity", "model.forward is stock: there is one forward")
                return
            fused = code.velocity(transformer, latents, sigma, [embeds])
            forward.undo()
        transformer.cpu()  # as the trainer takes it
        yield _close("velocity", fused, stock, f"fused against diffusers' forward in {model.dtype}", transformer.dtype)

    def _noise(self, components: Components) -> Tensor:
        video = self.config.video
        shape = components.video_decoder.latent_shape(video.num_frames, video.height, video.width)
        key = NoiseKey(seed=self.config.seed, update=0, prompt_index=self.prompt.index, sample_index=0)
        return initial_noise([key], shape, device=self.device)

    def _update(self, components: Components) -> Iterator[Check]:
        """One update of two videos, and what it shows of timesteps, ratio, decoding and memory."""
        config = one_update(self.config)
        if config.training.mode == "full" and self.device.type == "cuda":
            yield _info("update", "left out: training.mode full needs several GPUs; check the LoRA preset of this size")
            return
        rewards = CompositeReward.from_config(
            config.reward, [self.prompt.text], device=str(self.device), fps=config.video.fps
        )
        yield from _deviations(rewards)
        recorder = _Recorder(decoder=components.video_decoder)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the stock forward has left there is not the update's
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        trainer = Trainer(config, replace(components, video_decoder=recorder), rewards, [self.prompt], [])
        with _timesteps(components.transformer) as seen:
            metrics = trainer.iterate()
        seconds = time.perf_counter() - start
        yield _exact_timesteps(seen, sigma_schedule(NUM_STEPS, config.rollout.shift))
        deviation = metrics["ratio/first_max_deviation"]
        yield _judged("ratio", deviation == 0.0, f"differs from 1 by {deviation:g}", "rollout and update must agree")
        detail = f"{NUM_VIDEOS} videos at {NUM_STEPS} steps in {seconds:.0f} s, reward {metrics['reward/mean']:.3f}"
        yield _ok("update", f"{detail}, gradient norm {metrics['grad_norm']:.2e}")
        yield _decode(recorder)
        yield self._memory(config)

    def _memory(self, config: RunConfig) -> Check:
        """Peak memory of the update against the plan of the same configuration."""
        if self.device.type != "cuda":
            return _info("memory", "not compared: on a CPU the process holds the earlier parts too")
        planned = make_memory_plan(config, on_gpu=True, gpus=1, memory_gb=gpu_memory_gb(self.device)).memory.peak / 1e9
        peak = (torch.cuda.max_memory_reserved(self.device) + CUDA_RUNTIME) / 1e9
        return _judged("memory", peak <= MEMORY_LIMIT * planned, f"{peak:.1f} GB at most, {planned:.1f} GB planned")


def one_update(config: RunConfig) -> RunConfig:
    """The configuration of a single update of two videos at four steps, all of them trained, by one process.

    What needs steps or videos that are not trained is off: window, best and worst.
    """
    return replace(
        config,
        rollout=replace(
            config.rollout,
            num_steps=NUM_STEPS,
            num_generations=NUM_VIDEOS,
            batch_size=NUM_VIDEOS,
            micro_batch_size=1,
            sde_window=SDEWindowConfig(),
        ),
        training=replace(config.training, num_updates=1, updates_per_rollout=1, train_on=TrainOnConfig()),
        evaluation=replace(config.evaluation, every=0),
        distributed=DistributedConfig(),
    )


def _close(name: str, given: Tensor, expected: Tensor, what: str, dtype: torch.dtype | None = None) -> Check:
    """Whether two ways to compute the same agree as well as their data type allows."""
    given, expected = given.cpu(), expected.cpu()
    limit = LIMITS.get(dtype or expected.dtype, LIMITS[torch.float32])
    difference = (given.double() - expected.double()).norm()
    error = float(difference / expected.double().norm())
    return _judged(name, error <= limit, f"{what}: relative error {error:.1e} (limit {limit:g})")


def _schedule(config: RunConfig, components: Components) -> Iterator[Check]:
    """The noise levels of a rollout against those of diffusers' scheduler with the published shift."""
    shift, steps = config.rollout.shift, config.rollout.num_steps
    if components.shift is None:
        yield _info("schedule", f"shift {shift:g}; nothing says with which one the weights were published")
        return
    scheduler = FlowMatchEulerDiscreteScheduler(shift=components.shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    error = float((scheduler.sigmas.double() - sigma_schedule(steps, shift).double()).abs().max())
    detail = shift_difference(components.shift, shift) or f"{steps} noise levels, shift {shift:g}: error {error:.0e}"
    yield _judged("schedule", error < 1e-5, detail, f"--rollout.shift={components.shift:g}")


@contextmanager
def _timesteps(transformer: nn.Module) -> Iterator[set[float]]:
    """Collects the timesteps that the transformer embeds within the context."""
    seen: set[float] = set()
    handles = [
        module.register_forward_pre_hook(lambda module, arguments: seen.update(arguments[0].tolist()))
        for module in transformer.modules()
        if isinstance(module, Timesteps)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _exact_timesteps(seen: set[float], sigmas: Tensor) -> Check:
    """Whether the transformer was asked at exactly the noise levels of the sampler, in float32."""
    expected = set((sigmas[:-1].float() * 1000.0).tolist())
    strange = sorted(seen - expected)
    detail = f"{len(seen)} of the sampler, unrounded"
    if strange:
        nearest = min(expected, key=lambda value: abs(value - strange[0]))
        detail = f"the model is asked at {strange[0]:g} where the sampler is at {nearest:g}: rounded?"
    return _judged("timesteps", not strange and seen == expected, detail, "keep sigma and t in float32")


def _decode(recorder: _Recorder) -> Check:
    """The decoded videos, and a corner of their latents by the stock class."""
    videos, name = recorder.videos, "decode"
    spread = float(videos.float().std())
    detail = f"{tuple(videos.shape)} in {recorder.seconds:.1f} s, standard deviation {spread:.0f} of 255"
    plain: Callable[[Tensor], Tensor] | None = getattr(recorder.decoder, "decode_plainly", None)
    if plain is None:
        return _judged(name, spread > 0, detail)
    corner = recorder.latents[:1, :, :2, :8, :8]
    error = float((recorder.decoder.decode(corner).float() - plain(corner).float()).abs().mean())
    return _judged(name, spread > 0 and error < 1, f"{detail}; {error:.2f} levels from the stock decoder")
