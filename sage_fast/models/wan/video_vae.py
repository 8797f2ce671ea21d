"""Decoding latents to pixels with the VAE of Wan 2.1, diffusers' `AutoencoderKLWan`.

Facts used here (diffusers 0.36 - 0.42):
* 8 x spatial and 4 x temporal compression, causal in time; the transformer's patches double the spatial step;
* latents are normalised by channel: z / (1 / latents_std) + latents_mean is decoded, in this order of operations;
* it decodes one latent frame at a time with a cache, one video per call, and clamps to [-1, 1] itself, which makes an
  infinite pixel look like any other: what is decoded in a type that can overflow cannot be checked afterwards.
"""

import math

import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from sage_fast.models.video_decoding import check_latents, check_video_size, to_uint8


class WanDecoder:
    """Latents (B, 16, F, H, W) to videos uint8 (B, 4F-3, 3, 8H, 8W), on the CPU.

    Args:
        vae: owned by the decoder from now on: moved to the device of the latents, and stripped of its encoder.
        memory_gib: what the activations of a decode may take, in GiB. A video that does not fit is decoded in
            diffusers' overlapping tiles of 256 pixels. None decodes every video whole.
    """

    def __init__(self, vae: AutoencoderKLWan, *, memory_gib: float | None = None) -> None:
        del vae.encoder
        self.vae = vae.eval().requires_grad_(False)
        self.memory_gib = memory_gib

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video: 81 frames of 480 x 832 are (16, 21, 60, 104).

        ValueError unless there are 4k+1 frames of a size that is a multiple of 16; it names the nearest allowed ones.
        """
        config = self.vae.config
        time, space = config["scale_factor_temporal"], config["scale_factor_spatial"]
        check_video_size(num_frames, height, width, time=time, space=2 * space)
        return config["z_dim"], (num_frames - 1) // time + 1, height // space, width // space

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos uint8 (B, 4F-3, 3, 8H, 8W) RGB on the CPU, of latents (B, C, F, H, W) on any device.

        Each sample is decoded independently. DecodeError where a latent or a pixel is not finite.
        """
        check_latents(latents)
        scaled = self._scaled(latents)
        _, _, *size = latents.shape
        limit = None if self.memory_gib is None else self.memory_gib * 2**30
        self.vae.use_tiling = limit is not None and decode_bytes(self.vae, *size) > limit
        # One by one: its cache is of one call.
        return torch.cat([to_uint8(self.vae.decode(one, return_dict=False)[0]) for one in scaled.split(1)])

    @torch.no_grad()
    def decode_plainly(self, latents: Tensor) -> Tensor:
        """As `decode`, whole and through the pipeline's own processor; what `decode` is held against."""
        self.vae.use_tiling = False
        pixels = torch.cat([self.vae.decode(one, return_dict=False)[0] for one in self._scaled(latents).split(1)])
        video = VideoProcessor(vae_scale_factor=8).postprocess_video(pixels, "pt")
        return (video * 255).round().to(torch.uint8).cpu()

    def _scaled(self, latents: Tensor) -> Tensor:
        """The input of the autoencoder, in its type, by the operations of the pipeline."""
        vae = self.vae.to(latents.device)
        latents = latents.to(vae.dtype)
        mean, std = (
            torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
            for name in ("latents_mean", "latents_std")
        )
        return latents / (1.0 / std) + mean


def decode_bytes(vae: AutoencoderKLWan, frames: int, height: int, width: int) -> int:
    """Estimated peak of the activations of one video of latents (F, H, W), in bytes.

    The widest layers hold the four frames of one latent frame, and beside them is the video in float32.
    """
    pixels = height * width * int(vae.config["scale_factor_spatial"]) ** 2
    widest = 6 * 4 * int(vae.config["base_dim"]) * vae.dtype.itemsize
    return pixels * (widest + 2 * 3 * math.prod((frames, 4)) * vae.dtype.itemsize)
