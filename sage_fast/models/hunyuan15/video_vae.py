"""Decoding latents to pixels with the VAE of HunyuanVideo-1.5, diffusers' `AutoencoderKLHunyuanVideo15`.

Facts used here (diffusers 0.36 - 0.42):
* 16 x spatial and 4 x temporal compression, causal in time: 4k+1 frames have k+1 latent frames;
* latents are divided by `scaling_factor` once, and have no shift;
* the attention of the middle block gets a dense causal mask of (F H W)^2 entries, which the class fills by a Python
  loop over its rows in every call, and expands over the batch so that only one sample at a time can be decoded.
"""

from functools import lru_cache

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.video_processor import VideoProcessor
from torch import Tensor, nn

from sage_fast.models.video_decoding import check_latents, check_video_size, to_uint8


def causal_mask(num_frames: int, tokens_per_frame: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Additive attention mask (N, N), N = num_frames * tokens_per_frame: 0 up to a token's own frame, -inf after it.

    The values are those of `HunyuanVideo15AttnBlock.prepare_causal_attention_mask`, without its loop over rows.
    """
    frame = torch.arange(num_frames * tokens_per_frame, device=device) // tokens_per_frame
    mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
    return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))


class VAEDecoder:
    """Latents (B, C, F, H, W) to videos uint8 (B, 4F-3, 3, 16H, 16W), on the CPU.

    Args:
        vae: owned by the decoder from now on: moved to the device of the latents, and stripped of its encoder.
        memory_gib: what the activations of a decode may take, in GiB. As many samples as fit are decoded at once; a
            sample that does not fit by itself is decoded in diffusers' overlapping tiles of 256 pixels, as the official
            code decodes everything. None decodes each sample whole, one at a time.

    Tiles are 1.65 times the work of the whole at 480x832 (1,341 TFLOP for 81 frames, against 813) and 1.51 times at
    352x624 (675 against 446): overlaps are decoded twice. The class's parameters cannot make tiles equal. It begins one
    at every step up to the border, and a step is a tile less its overlap, so the last tile of a row has at most a step
    left: 4 of 16 latents at 480x832.
    """

    def __init__(self, vae: AutoencoderKLHunyuanVideo15, *, memory_gib: float | None = None) -> None:
        del vae.encoder
        self.vae = vae.eval().requires_grad_(False)
        # GPUs multiply channels that are neighbours; other weights are copied so in every call. The sums are the same.
        self.lay_out(torch.channels_last_3d)
        self.memory_gib = memory_gib
        # A mask serves all tiles and samples of a decode, and is freed after it: 2 GiB at 480 x 848 and 81 frames.
        self._cached_mask = lru_cache(maxsize=4)(causal_mask)
        for block in vae.decoder.mid_block.attentions:
            block.prepare_causal_attention_mask = self._mask

    def lay_out(self, memory_format: torch.memory_format) -> None:
        """Keep the weights of convolutions in a memory format: the same numbers in another order."""
        for module in self.vae.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.data = module.weight.data.to(memory_format=memory_format)

    def _mask(
        self,
        n_frame: int,
        n_hw: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int | None = None,
    ) -> Tensor:
        """Stands in for the class's method. (1, N, N), its shape for one sample, broadcasts over any batch."""
        return self._cached_mask(n_frame, n_hw, dtype, device)[None]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video: 81 frames of 480 x 832 are (32, 21, 30, 52).

        ValueError unless there are 4k+1 frames of a size that is a multiple of 16; it names the nearest allowed ones.
        """
        time, space = self.vae.temporal_compression_ratio, self.vae.spatial_compression_ratio
        check_video_size(num_frames, height, width, time=time, space=space)
        return self.vae.config["latent_channels"], (num_frames - 1) // time + 1, height // space, width // space

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos uint8 (B, 4F-3, 3, 16H, 16W) RGB on the CPU, of latents (B, C, F, H, W) on any device.

        Pixels p in [-1, 1] become round(255 clamp(p / 2 + 1/2, 0, 1)) in float32, ties to even, as the images of
        the stock pipeline. Each sample is decoded independently.

        Raises:
            DecodeError: a latent or a decoded pixel is not finite.
        """
        vae = self.vae.to(latents.device)
        check_latents(latents)
        scaled = (latents.float() / vae.config["scaling_factor"]).to(vae.dtype)
        frames, height, width = latents.shape[2:]
        needed = decode_bytes(vae, (frames, height, width))
        together = 1 if self.memory_gib is None else int(self.memory_gib * 2**30 / needed)
        vae.use_tiling = together == 0
        parts = scaled.split(together or 1)
        try:
            return torch.cat([to_uint8(vae.decode(part, return_dict=False)[0]) for part in parts])
        finally:
            self.forget_masks()

    def forget_masks(self) -> None:
        """Free what tiles and samples of a decode share."""
        self._cached_mask.cache_clear()

    @torch.no_grad()
    def decode_plainly(self, latents: Tensor) -> Tensor:
        """As `decode`, by the stock class with its own mask, whole. Slow; what `decode` is held against."""
        vae = self.vae.to(latents.device)
        vae.use_tiling = False
        blocks = vae.decoder.mid_block.attentions
        for block in blocks:
            del block.prepare_causal_attention_mask
        try:
            pixels = vae.decode((latents / vae.config["scaling_factor"]).to(vae.dtype)).sample
        finally:
            for block in blocks:
                block.prepare_causal_attention_mask = self._mask
        video = VideoProcessor(vae_scale_factor=vae.spatial_compression_ratio).postprocess_video(pixels, "pt")
        return (video * 255).round().to(torch.uint8).cpu()


def decode_bytes(vae: AutoencoderKLHunyuanVideo15, latent_size: tuple[int, int, int]) -> int:
    """Estimated peak of one sample's activations, in bytes, for latents of (F, H, W).

    The peak is in the last, widest blocks. Traced through the published VAE it is 6.0 to 7.9 tensors of their size, in
    float16 (where normalisation makes float32 copies) and in float32, for 1 to 121 frames and 256 to 1280 pixels.
    """
    frames, height, width = latent_size
    item = vae.dtype.itemsize
    pixels = ((frames - 1) * vae.temporal_compression_ratio + 1) * height * width * vae.spatial_compression_ratio**2
    return 8 * pixels * int(vae.config["block_out_channels"][0]) * item
