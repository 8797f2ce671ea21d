"""Acceptance on the real weights, once: every part of a run against another way to the
same numbers.

Prompt, velocity and video against the stock classes, rewards against scores that their
public code gave, and then one update of two videos: its ratio is exactly 1, its
timesteps are not rounded, its memory is what was planned. A part that fails, or cannot
be run, is a finding with its name; the others are still checked.
"""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.embeddings import Timesteps
from torch import Tensor

from sage_fast.config.errors import ConfigError, SageError
from sage_fast.config.files import loads
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import DistributedConfig, SDEWindowConfig
from sage_fast.distributed.start import rank_device
from sage_fast.models.family import Components, family_of
from sage_fast.models.media_files import read_video_and_rate
from sage_fast.noise import NoiseKey
from sage_fast.planning.estimate import make_memory_plan, settle_memory
from sage_fast.planning.memory import CUDA_RUNTIME
from sage_fast.policy.adapters import load_model
from sage_fast.rewards.base import find_reward
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rollout import initial_latents
from sage_fast.run.prompt_files import load_prompts
from sage_fast.sde import sigma_schedule
from sage_fast.tools.diagnosis import Check, judged
from sage_fast.trainer import Trainer

logger = logging.getLogger(__name__)

NUM_STEPS = 4
NUM_VIDEOS = 2
"""Of the one update."""

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative error |a - b| / |b| up to which two ways to compute the same are taken for
the same, by data type. 54 blocks in bfloat16 differ by 0.01 to 0.02; a part that is
wrong differs by more than 0.1.
"""

SCORE_LIMIT = 0.1
"""Difference from a stored score, in the score's own unit; bfloat16 on another machine
gives up to 0.06.
"""

MEMORY_LIMIT = 1.1
"""Measured over planned memory."""


def examine_deeply(config: RunConfig, scores: Path | None = None) -> list[Check]:
    """All parts in turn. Loads everything, and writes nothing but the caches that a run
    writes.

    Args:
        config: of a run that `examine` lets pass.
        scores: a file of scores by the rewards' public code, see `read_scores`.
    """
    config = settle_memory(config)
    checks: list[Check] = []

    def guarded(name: str, findings: Iterator[Check]) -> None:
        """Collect the findings of a part; an error that ends it is one of them."""
        logger.info("Checking: %s", name)
        try:
            checks.extend(findings)
        except (SageError, ValueError, OSError, RuntimeError) as error:
            checks.append(_judged(name, False, str(error), "see the message"))

    guarded("rewards", _stored_scores(config, scores))
    start = time.perf_counter()
    try:
        components = load_model(config.model, config.lora)
        components.check_guidance(config.rollout.guidance_scale)
    except (SageError, ValueError, OSError, RuntimeError) as error:
        return [*checks, _judged("model", False, str(error), "see the message")]
    parameters = sum(p.numel() for p in components.transformer.parameters())
    detail = (
        f"{parameters:,} parameters in {config.model.dtype}, loaded in "
        f"{time.perf_counter() - start:.0f} s"
    )
    checks.append(_judged("model", True, detail))
    guarded("prompt", _prompt(config, components))
    guarded("velocity", _velocity(config, components))
    guarded("update", _update(config, components))
    return checks


_judged = partial(judged, "deep", otherwise="failed")


def read_scores(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Stored scores by reward, from `{"videoalign": [{"video": "a.mp4", "prompt":
    "...", "scores": {"VQ": 0.3}}]}`.

    Videos are relative to the file. ConfigError for another content.
    """
    try:
        tree = loads(file.read_text(encoding="utf-8"))
        for row in (row for rows in tree.values() for row in rows):
            row |= {"video": file.parent / row["video"], "prompt": str(row["prompt"])}
            row["scores"] = {
                name: float(value) for name, value in row["scores"].items()
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--scores {file} cannot be used ({type(error).__name__}: {error}). It is "
            "JSON of the form "
            '{"REWARD": [{"video": "a.mp4", "prompt": "...", "scores": {"NAME": '
            "0.3}}]}."
        ) from error
    return dict(tree)


def _stored_scores(config: RunConfig, scores: Path | None) -> Iterator[Check]:
    """Every reward with stored scores against them, each video at the rate that its
    file declares.
    """
    stored = read_scores(scores) if scores is not None else {}
    for name in config.reward.rewards:
        what = f"reward {name}: scores"
        if not stored.get(name):
            yield Check(
                "deep",
                what,
                "info",
                "not compared: --scores FILE has none of its public code",
            )
            continue
        takes = inspect.signature(find_reward(name)).parameters
        worst = 0.0
        at = ""
        for row in stored[name]:
            video, fps = read_video_and_rate(row["video"])
            changes = {"fps": fps} if "fps" in takes else {}
            options = {name: config.reward.options.get(name, {}) | changes}
            section = replace(
                config.reward,
                rewards=[name],
                evaluation=[],
                options=options,
                url=None,
                python=None,
            )
            reward = CompositeReward.from_config(
                section, device=str(rank_device(config.model.device))
            )
            found = reward.call(
                name, video[None], [row["prompt"]], f"on {row['video'].name}"
            )
            for key, value in row["scores"].items():
                given = float(found[key][0])
                difference = abs(given - value)
                # A NaN in the file stays the worst whatever follows it.
                if difference > worst or math.isnan(difference):
                    worst = difference
                    at = f"; {key} of {row['video'].name}: {given:.3f}, not {value:.3f}"
        detail = (
            f"{len(stored[name])} videos, largest difference {worst:.3f} (limit "
            f"{SCORE_LIMIT:g}){at}"
        )
        fix = (
            f"is reward.options.{name} that of the public code, and are the weights "
            "the same?"
        )
        yield _judged(what, worst <= SCORE_LIMIT, detail, fix)


def _prompt(config: RunConfig, components: Components) -> Iterator[Check]:
    """One prompt as a run encodes it, or has encoded it, against the whole conversation
    without padding.
    """
    encoder = components.prompt_encoder
    prompt = load_prompts(config)[0][0]
    video = config.video
    text = prompt.text
    (embeds,) = encoder.encode([prompt.asked(video)])
    plain: Callable[[str], Tensor] | None = getattr(encoder, "encode_plainly", None)
    if plain is None:
        yield Check(
            "deep",
            "prompt",
            "info",
            f"{len(embeds.text)} tokens; the family has no second way to encode it",
        )
        return
    expected = plain(text)
    fix = "wrong crop or tokenizer; delete the prompts in model.cache_dir"
    yield _close("prompt", embeds.text, expected, f"{len(expected)} tokens", fix=fix)


def _velocity(config: RunConfig, components: Components) -> Iterator[Check]:
    """The fused forward against diffusers' own: the same weights, latents, noise level
    and prompt.
    """
    device = rank_device(config.model.device)
    video = config.video
    transformer = components.transformer.to(device)
    prompt = load_prompts(config)[0][0]
    asked = [prompt.asked(video)]
    (embeds,) = [e.to(device) for e in components.prompt_encoder.encode(asked)]
    shape = components.video_decoder.latent_shape(
        video.num_frames, video.height, video.width
    )
    key = NoiseKey(
        seed=config.seed, update=0, prompt_index=prompt.index, sample_index=0
    )
    latents = initial_latents([key], shape, device)
    sigma = sigma_schedule(NUM_STEPS, config.rollout.shift)[1:2].float()
    with torch.no_grad():
        family = family_of(transformer)
        # The stock forward first: the fused one takes its place in the modules.
        stock = family.velocity(transformer, latents, sigma, [embeds])
        forward = family.choose_forward(transformer, config.model)
        if forward is None:
            yield Check(
                "deep",
                "velocity",
                "info",
                "model.forward is stock: there is one forward",
            )
            return
        fused = family.velocity(transformer, latents, sigma, [embeds])
        forward.undo()
    transformer.cpu()  # as the trainer takes it
    what = f"fused against diffusers' forward in {config.model.dtype}"
    yield _close("velocity", fused, stock, what, transformer.dtype)


def _close(
    name: str,
    given: Tensor,
    expected: Tensor,
    what: str,
    dtype: torch.dtype | None = None,
    fix: str = "",
) -> Check:
    """Compare two ways to compute the same, as well as their data type allows."""
    if given.shape != expected.shape:
        return _judged(
            name,
            False,
            f"shape {tuple(given.shape)}, and not {tuple(expected.shape)}",
            fix,
        )
    given = given.cpu()
    expected = expected.cpu()
    limit = LIMITS.get(dtype or expected.dtype, LIMITS[torch.float32])
    error = float(
        (given.double() - expected.double()).norm() / expected.double().norm()
    )
    return _judged(
        name,
        error <= limit,
        f"{what}: relative error {error:.1e} (limit {limit:g})",
        fix,
    )


def _update(config: RunConfig, components: Components) -> Iterator[Check]:
    """One update of two videos: its timesteps, ratio, decoding and memory."""
    config = one_update(config)
    device = rank_device(config.model.device)
    if config.training.mode == "full" and device.type == "cuda":
        detail = (
            "left out: training.mode full needs several GPUs; check the LoRA preset "
            "of this size"
        )
        yield Check("deep", "update", "info", detail)
        return
    prompt = load_prompts(config)[0][0]
    rewards = CompositeReward.from_config(
        config.reward, [prompt.text], device=str(device), fps=config.video.fps
    )
    decoder = components.video_decoder
    decoded = list[tuple[Tensor, Tensor]]()

    def decode(latents: Tensor) -> Tensor:
        decoded.append((latents, decoder.decode(latents)))
        return decoded[-1][1]

    # In place of the decoder, to keep what goes through it for the comparison below.
    recorder: Any = SimpleNamespace(latent_shape=decoder.latent_shape, decode=decode)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the stock forward's leavings are not the update's
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    trainer = Trainer(
        config, replace(components, video_decoder=recorder), rewards, [prompt], []
    )
    # The times that the model embeds: what was rounded on the way is none of the
    # sampler's.
    seen: set[float] = set()
    hooks = [
        module.register_forward_pre_hook(
            lambda module, arguments: seen.update(arguments[0].tolist())
        )
        for module in components.transformer.modules()
        if isinstance(module, Timesteps)
    ]
    metrics = trainer.iterate()
    for hook in hooks:
        hook.remove()
    seconds = time.perf_counter() - start

    expected = set(
        (sigma_schedule(NUM_STEPS, config.rollout.shift)[:-1].float() * 1000.0).tolist()
    )
    detail = (
        f"{len(seen)} reach the model, {len(seen & expected)} of the sampler's "
        f"{len(expected)} among them"
    )
    yield _judged("timesteps", seen == expected, detail, "keep sigma and t in float32")
    deviation = metrics["ratio/first_max_deviation"]
    yield _judged(
        "ratio",
        deviation == 0.0,
        f"differs from 1 by {deviation:g}",
        "rollout and update must agree",
    )
    detail = (
        f"{NUM_VIDEOS} videos at {NUM_STEPS} steps in {seconds:.0f} s, reward "
        f"{metrics['reward/mean']:.3f}"
    )
    yield _judged("update", True, f"{detail}, gradient norm {metrics['grad_norm']:.2e}")

    latents, videos = decoded[-1]
    spread = float(videos.float().std())
    detail = f"{tuple(videos.shape)}, standard deviation {spread:.0f} of 255"
    passes = spread > 0
    plain: Callable[[Tensor], Tensor] | None = getattr(decoder, "decode_plainly", None)
    if plain is not None:
        # A corner of one video, because the stock decoder takes it whole and without
        # tiles.
        corner = latents[:1, :, :2, :8, :8]
        error = float(
            (decoder.decode(corner).float() - plain(corner).float()).abs().mean()
        )
        detail = f"{detail}; {error:.2f} levels from the stock decoder"
        passes = passes and error < 1
    yield _judged("decode", passes, detail)

    if device.type != "cuda":
        yield Check(
            "deep",
            "memory",
            "info",
            "not compared: on a CPU the process holds the earlier parts too",
        )
        return
    memory_gb = torch.cuda.get_device_properties(device).total_memory / 1e9
    planned = (
        make_memory_plan(config, on_gpu=True, gpus=1, memory_gb=memory_gb).memory.peak
        / 1e9
    )
    peak = (torch.cuda.max_memory_reserved(device) + CUDA_RUNTIME) / 1e9
    yield _judged(
        "memory",
        peak <= MEMORY_LIMIT * planned,
        f"{peak:.1f} GB at most, {planned:.1f} GB planned",
    )


def one_update(config: RunConfig) -> RunConfig:
    """The configuration of a single update of two videos at four steps, all of them
    trained, by one process.

    The window and the choice of best and worst are off: they need steps or videos that
    are not trained.
    """
    process = config.forward_process
    if process.states == "path":
        process = replace(
            process, within=1.0, levels=min(process.levels, NUM_STEPS - 1)
        )
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
        training=replace(
            config.training, num_updates=1, updates_per_rollout=1, best_and_worst=0
        ),
        forward_process=process,
        evaluation=replace(config.evaluation, every=0),
        distributed=DistributedConfig(),
    )
