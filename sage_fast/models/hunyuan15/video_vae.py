"""Decoding latents to pixels with the VAE of HunyuanVideo-1.5, diffusers'
`AutoencoderKLHunyuanVideo15`.

Facts used here (diffusers 0.36 - 0.42):
* 16 x spatial and 4 x temporal compression, causal in time: 4k+1 frames have k+1 latent
  frames;
* latents are divided by `scaling_factor` once, and have no shift;
* the attention of the middle block gets a dense causal mask of (F H W)^2 entries, which
  the class fills by a Python loop over its rows in every call, and expands over the
  batch so that only one sample at a time can be decoded.
"""

from functools import lru_cache

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from sage_fast.models.video_decoding import AutoencoderDecoder


def causal_mask(
    num_frames: int,
    tokens_per_frame: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Additive attention mask (N, N), N = num_frames * tokens_per_frame: 0 up to a
    token's own frame, -inf after it.

    The values are those of `HunyuanVideo15AttnBlock.prepare_causal_attention_mask`,
    without its loop over rows.
    """
    frame = (
        torch.arange(num_frames * tokens_per_frame, device=device) // tokens_per_frame
    )
    mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
    return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))


class VAEDecoder(AutoencoderDecoder):
    """Latents (B, C, F, H, W) to videos uint8 (B, 4F-3, 3, 16H, 16W), on the CPU.

    81 frames of 480 x 832 have latents of (32, 21, 30, 52). The official code decodes
    everything in tiles. These are 1.65 times the work of the whole at 480x832 (1,341
    TFLOP for 81 frames, against 813) and 1.51 times at 352x624 (675 against 446):
    overlaps are decoded twice. The class's parameters cannot make tiles equal. It
    begins one at every step up to the border, and a step is a tile less its overlap, so
    the last tile of a row has at most a step left: 4 of 16 latents at 480x832.
    """

    kind = AutoencoderKLHunyuanVideo15

    def __init__(
        self, vae: AutoencoderKLHunyuanVideo15, *, memory_gib: float | None = None
    ) -> None:
        super().__init__(vae, memory_gib=memory_gib)
        self.channels = vae.config["latent_channels"]
        self.time = vae.temporal_compression_ratio
        self.space = self.step = vae.spatial_compression_ratio
        # A mask serves all tiles and samples of a decode, and is freed after it: 2 GiB
        # at 480 x 848 and 81 frames.
        self._cached_mask = lru_cache(maxsize=4)(causal_mask)
        for block in vae.decoder.mid_block.attentions:
            block.prepare_causal_attention_mask = self._mask

    def _mask(
        self,
        n_frame: int,
        n_hw: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int | None = None,
    ) -> Tensor:
        """Stands in for the class's method. (1, N, N), its shape for one sample,
        broadcasts over any batch.
        """
        return self._cached_mask(n_frame, n_hw, dtype, device)[None]

    def scaled(self, latents: Tensor) -> Tensor:
        return (latents.float() / self.vae.config["scaling_factor"]).to(self.vae.dtype)

    def peak_bytes(self, frames: int, height: int, width: int) -> int:
        """See `AutoencoderDecoder`.

        The peak is in the last, widest blocks. Traced through the published VAE it is
        6.0 to 7.9 tensors of their size, in float16 (where normalisation makes float32
        copies) and in float32, for 1 to 121 frames and 256 to 1280 pixels.
        """
        pixels = ((frames - 1) * self.time + 1) * height * width * self.space**2
        return (
            8
            * pixels
            * int(self.vae.config["block_out_channels"][0])
            * self.vae.dtype.itemsize
        )

    def tiles(self) -> tuple[int, int, int, int]:
        rows = self.vae.tile_latent_min_height
        columns = self.vae.tile_latent_min_width
        between = 1 - self.vae.tile_overlap_factor
        return rows, columns, int(rows * between), int(columns * between)

    def decode(self, latents: Tensor) -> Tensor:
        try:
            return super().decode(latents)
        finally:
            self._cached_mask.cache_clear()

    def decode_plainly(self, latents: Tensor) -> Tensor:
        """See `AutoencoderDecoder`; slow, because the stock class makes its own mask."""
        blocks = self.vae.decoder.mid_block.attentions
        for block in blocks:
            del block.prepare_causal_attention_mask
        try:
            return super().decode_plainly(latents)
        finally:
            for block in blocks:
                block.prepare_causal_attention_mask = self._mask

    def counts(self, latents: Tensor, *, tiled: bool = False) -> tuple[int, int]:
        """See `AutoencoderDecoder`; making the mask is among them."""
        self._cached_mask.cache_clear()
        return super().counts(latents, tiled=tiled)
