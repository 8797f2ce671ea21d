"""Decoding latents to pixels with the VAE of Wan 2.1, diffusers' `AutoencoderKLWan`.

Facts used here (diffusers 0.36 - 0.42):
* 8 x spatial and 4 x temporal compression, causal in time; the transformer's patches
  double the spatial step;
* latents are normalised by channel: z / (1 / latents_std) + latents_mean is decoded, in
  this order of operations;
* it decodes one latent frame at a time with a cache, one video per call, and clamps to
  [-1, 1] itself, which makes an infinite pixel look like any other: what is decoded in
  a type that can overflow cannot be checked afterwards.
"""

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from sage_fast.models.video_decoding import AutoencoderDecoder


class WanDecoder(AutoencoderDecoder):
    """Latents (B, 16, F, H, W) to videos uint8 (B, 4F-3, 3, 8H, 8W), on the CPU.

    81 frames of 480 x 832 have latents of (16, 21, 60, 104).
    """

    kind = AutoencoderKLWan
    most = 1
    """Its cache is of one call."""

    def __init__(
        self, vae: AutoencoderKLWan, *, memory_gib: float | None = None
    ) -> None:
        super().__init__(vae, memory_gib=memory_gib)
        self.channels = vae.config["z_dim"]
        self.time = vae.config["scale_factor_temporal"]
        self.space = vae.config["scale_factor_spatial"]
        self.step = 2 * self.space

    def scaled(self, latents: Tensor) -> Tensor:
        latents = latents.to(self.vae.dtype)
        mean, std = (
            torch.tensor(self.vae.config[name])
            .view(1, -1, 1, 1, 1)
            .to(latents.device, latents.dtype)
            for name in ("latents_mean", "latents_std")
        )
        return latents / (1.0 / std) + mean

    def peak_bytes(self, frames: int, height: int, width: int) -> int:
        """See `AutoencoderDecoder`.

        The widest layers hold the four frames of one latent frame, and beside them is
        the video in float32.
        """
        pixels = height * width * int(self.space) ** 2
        item = self.vae.dtype.itemsize
        widest = 6 * 4 * int(self.vae.config["base_dim"]) * item
        return pixels * (widest + 2 * 3 * 4 * frames * item)

    def tiles(self) -> tuple[int, int, int, int]:
        vae = self.vae
        space = self.space
        rows = vae.tile_sample_min_height // space
        columns = vae.tile_sample_min_width // space
        return (
            rows,
            columns,
            vae.tile_sample_stride_height // space,
            vae.tile_sample_stride_width // space,
        )

    def work_of(self, frames: int, height: int, width: int) -> tuple[int, int]:
        # The first latent frame is one of pixels, and all others cost the same.
        if frames <= 3:
            return super().work_of(frames, height, width)
        two, three = (
            super(WanDecoder, self).work_of(count, height, width) for count in (2, 3)
        )
        flops, moved = (
            b + (frames - 3) * (b - a) for a, b in zip(two, three, strict=True)
        )
        return flops, moved
