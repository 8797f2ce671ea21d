"""`model.attention: auto` of a training run: the installed backends are timed once, at
the size of its videos.

A table cannot know: published figures of FlashAttention-4 and cuDNN on a B200 differ by
a factor of two, in both directions (flash-attention, pull request 2605; sglang, pull
request 33655).
"""

import logging
import math
import time
from dataclasses import replace

import torch

from sage_fast.config.schema import RunConfig
from sage_fast.distributed.start import rank_device
from sage_fast.distributed.world import World
from sage_fast.models.attention.attention import (
    backend_report,
    call_backward,
    call_forward,
)
from sage_fast.models.attention.libraries import Use
from sage_fast.models.family import ModelDescription

logger = logging.getLogger(__name__)


def settle_attention(
    config: RunConfig, model: ModelDescription, world: World, kept: str = "auto"
) -> RunConfig:
    """The configuration with the fastest backend instead of `model.attention: auto`.
    Collective.

    It is the same on every rank: of the backends that run on all of them, the one whose
    slowest rank is fastest. `auto` stays without a GPU, with diffusers' own forward,
    where at most one backend runs, and with `model.deterministic`: a measurement may
    end in another way next time.

    Args:
        kept: backend of the checkpoint that the run goes on from; it stays if it runs
            on every rank.
    """
    device = rank_device(config.model.device)
    asked = config.model.attention, config.model.forward, config.model.deterministic
    if asked != ("auto", "fused", False) or device.type != "cuda":
        return config
    head_dim = model.transformer["attention_head_dim"]
    use = Use(device, getattr(torch, config.compute_dtype), head_dim)
    reasons = backend_report(use.device, use.dtype, use.head_dim)
    own = [
        name
        for name, reason in reasons.items()
        if reason is None and name != "reference"
    ]
    ranks = world.gather(own)
    shared = [name for name in own if all(name in names for names in ranks)]
    if kept not in shared:
        if kept != "auto":
            why = reasons.get(kept) or "it is not on every rank"
            logger.warning(
                "The run's attention was computed by %s, which cannot go on here: %s.",
                kept,
                why,
            )
        if len(shared) < 2:
            return config
        latent = model.latent_shape(
            config.video.num_frames, config.video.height, config.video.width
        )
        tokens = model.tokens(latent) + model.text_tokens
        heads = model.transformer["num_attention_heads"] // world.sp
        size = (config.rollout.videos_at_once, tokens, heads, head_dim)
        measured = world.gather(
            {name: time_backend(name, size, use) for name in shared}
        )
        slowest = {name: max(seconds[name] for seconds in measured) for name in shared}
        kept = min(shared, key=slowest.__getitem__)
        shown = ", ".join(
            f"{name} {1e3 * seconds:.1f} ms" for name, seconds in slowest.items()
        )
        logger.info(
            "model.attention auto: %s (%s; forward and backward of %d tokens)",
            kept,
            shown,
            tokens,
        )
    return replace(config, model=replace(config.model, attention=kept))  # type: ignore[arg-type]  # a backend's name


def time_backend(name: str, size: tuple[int, int, int, int], use: Use) -> float:
    """Seconds of a forward and a backward pass of (B, N, H, D); infinity where the
    library fails.
    """
    # the run's own stays where it is
    generator = torch.Generator(use.device).manual_seed(0)
    q, k, v, grad = torch.randn(
        4, *size, generator=generator, device=use.device, dtype=use.dtype
    )
    seconds = []
    try:
        for _ in range(3):
            torch.cuda.synchronize(use.device)
            start = time.perf_counter()
            out, lse = call_forward(q, k, v, name, use.deterministic)
            call_backward(grad, q, k, v, out, lse, name, use.deterministic)
            torch.cuda.synchronize(use.device)
            seconds.append(time.perf_counter() - start)
    except RuntimeError as error:
        # Before `auto` was measured, a library behind the first one was never called.
        logger.warning("Attention by %s fails and is not taken: %s", name, error)
        return math.inf
    return min(seconds[1:])  # the first round warms up
