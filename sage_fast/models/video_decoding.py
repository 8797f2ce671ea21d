"""Checks that every video decoder makes, and its pixels."""

import torch
from torch import Tensor

from sage_fast.config.errors import DecodeError


def check_video_size(num_frames: int, height: int, width: int, *, time: int, space: int) -> None:
    """ValueError unless there are `time` k + 1 frames of a size that is a multiple of `space`.

    It names the nearest allowed ones.
    """
    if num_frames < 1 or (num_frames - 1) % time:
        below = (num_frames - 1) // time * time + 1
        near = " or ".join(str(n) for n in (below, below + time) if n > 0)
        raise ValueError(
            f"video.num_frames is {num_frames}, but this VAE decodes {time}k + 1 frames. The nearest: {near}."
        )
    for key, size in (("height", height), ("width", width)):
        if size < space or size % space:
            below = size // space * space
            near = " or ".join(str(n) for n in (below, below + space) if n > 0)
            raise ValueError(
                f"video.{key} is {size}, but this VAE decodes multiples of {space} pixels. The nearest: {near}."
            )


def check_latents(latents: Tensor) -> None:
    """DecodeError where a latent is not finite."""
    if not latents.isfinite().all():
        raise DecodeError(
            "Latents to decode are not finite: the velocity of the model was not. Use model.dtype float32 or "
            "bfloat16, and check the weights."
        )


def to_uint8(pixels: Tensor) -> Tensor:
    """Decoded (B, 3, F, H, W) in [-1, 1] to uint8 (B, F, 3, H, W) on the CPU."""
    if not pixels.isfinite().all():
        raise DecodeError(
            f"The VAE decoded to values that are not finite in {pixels.dtype}. Set model.vae_dtype to bfloat16 or "
            "float32."
        )
    return ((pixels.float() / 2 + 0.5).clamp_(0, 1) * 255).round_().to(torch.uint8).transpose(1, 2).contiguous().cpu()
