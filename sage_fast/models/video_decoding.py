"""Latents to pixels with a video autoencoder of diffusers, of any family."""

from abc import ABC, abstractmethod
from collections import Counter
from functools import cache
from typing import Any, ClassVar, Self

import torch
from diffusers.video_processor import VideoProcessor
from torch import Tensor, nn

from sage_fast.config.errors import DecodeError
from sage_fast.models.counting import CountingMode
from sage_fast.models.family import Decoding

PRODUCTS = frozenset({"convolution", "bmm"})
"""Operators of a decoder whose time is that of their FLOPs; all others take the time of
the bytes that they move.
"""


class AutoencoderDecoder(ABC):
    """Latents (B, C, F, H, W) to videos uint8 (B, frames, 3, height, width), on the
    CPU.

    kind: diffusers' class. channels: of latents. time, space: frames of a latent, and
    pixels along its sides. step: what sides of a video are multiples of. most: videos
    that one call may decode.

    Args:
        vae: owned by the decoder from now on: moved to the device of the latents, and
            stripped of its encoder. memory_gib: what the activations of a decode may
            take, in GiB. As many videos as fit are decoded at once; one
            that does not fit by itself is decoded in diffusers' overlapping tiles of
            256 pixels. None decodes each video whole, one at a time.
    """

    kind: ClassVar[Any]
    channels: int
    time: int
    space: int
    step: int
    most = 2**31

    def __init__(self, vae: Any, *, memory_gib: float | None = None) -> None:
        del vae.encoder
        self.vae = vae.eval().requires_grad_(False)
        self.memory_gib = memory_gib

    @classmethod
    @cache
    def empty(
        cls, dtype: str = "float32", config: tuple[tuple[str, Any], ...] = ()
    ) -> Self:
        """A decoder without memory for its weights, of the published autoencoder or of
        another configuration.
        """
        options = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in config
        }
        with torch.device("meta"):
            # The method of the class would warn of layers that it keeps in float32.
            return cls(nn.Module.to(cls.kind(**options), getattr(torch, dtype)))

    @abstractmethod
    def scaled(self, latents: Tensor) -> Tensor:
        """The input of the autoencoder, in its type, by the operations of the pipeline."""

    @abstractmethod
    def peak_bytes(self, frames: int, height: int, width: int) -> int:
        """Estimated peak of the activations of one video of latents (F, H, W)."""

    @abstractmethod
    def tiles(self) -> tuple[int, int, int, int]:
        """Rows and columns of a tile, and between the beginnings of two, in latents."""

    def latent_shape(
        self, num_frames: int, height: int, width: int
    ) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video.

        ValueError unless there are `time` k + 1 frames of a size that is a multiple of
        `step`; it names the nearest allowed ones.
        """
        frames = f"{self.time}k + 1 frames"
        pixels = f"multiples of {self.step} pixels"
        for key, size, first, step, allowed in (
            ("num_frames", num_frames, 1, self.time, frames),
            ("height", height, self.step, self.step, pixels),
            ("width", width, self.step, self.step, pixels),
        ):
            if size < first or (size - first) % step:
                below = (size - first) // step * step + first
                near = " or ".join(str(n) for n in (below, below + step) if n > 0)
                raise ValueError(
                    f"video.{key} is {size}, but this VAE decodes {allowed}. The "
                    f"nearest: {near}."
                )
        return (
            self.channels,
            (num_frames - 1) // self.time + 1,
            height // self.space,
            width // self.space,
        )

    def together(
        self, frames: int, height: int, width: int, memory_gib: float | None
    ) -> int:
        """Videos of latents (F, H, W) that one call decodes within a limit; 0: one in
        tiles.
        """
        if memory_gib is None:
            return 1
        return min(
            self.most, int(memory_gib * 2**30 / self.peak_bytes(frames, height, width))
        )

    def decoding(
        self, latent: tuple[int, int, int, int], videos: int, memory_gib: float | None
    ) -> Decoding:
        """How `decode` decodes a micro-batch within a limit, for a plan."""
        _, frames, height, width = latent
        dtype = str(self.vae.dtype).removeprefix("torch.")
        if together := min(videos, self.together(frames, height, width, memory_gib)):
            return Decoding(
                peak_bytes=float(together * self.peak_bytes(frames, height, width)),
                dtype=dtype,
            )
        rows, columns, _, _ = self.tiles()
        tile = self.peak_bytes(frames, min(height, rows), min(width, columns))
        return Decoding(peak_bytes=float(tile), tiled=True, dtype=dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos uint8 (B, frames, 3, height, width) RGB on the CPU, of latents (B, C,
        F, H, W) on any device.

        Pixels p in [-1, 1] become round(255 clamp(p / 2 + 1/2, 0, 1)) in float32, ties
        to even, as the images of the stock pipeline. Each video is decoded
        independently.

        Raises:
            DecodeError: a decoded pixel is not finite.
        """
        vae = self.vae.to(latents.device)
        _, _, frames, height, width = latents.shape
        together = self.together(frames, height, width, self.memory_gib)
        vae.use_tiling = together == 0
        parts = self.scaled(latents).split(together or 1)
        return torch.cat(
            [_to_uint8(vae.decode(part, return_dict=False)[0]) for part in parts]
        )

    @torch.no_grad()
    def decode_plainly(self, latents: Tensor) -> Tensor:
        """As `decode`, whole and through the pipeline's own processor; what `decode` is
        held against.
        """
        vae = self.vae.to(latents.device)
        vae.use_tiling = False
        pixels = torch.cat(
            [
                vae.decode(one, return_dict=False)[0]
                for one in self.scaled(latents).split(1)
            ]
        )
        video = VideoProcessor(vae_scale_factor=self.space).postprocess_video(
            pixels, "pt"
        )
        return (video * 255).round().to(torch.uint8).cpu()

    def work(
        self, latent: tuple[int, int, int, int], tiled: bool
    ) -> tuple[float, float]:
        """FLOPs of decoding one video, and bytes that it reads and writes outside its
        products; on the meta device.

        81 frames of 480x832 of HunyuanVideo-1.5 are 813e12 and, in float16, 2.5e12,
        whole. Blending the tiles, less than a part in a thousand, is not counted.
        """
        _, frames, height, width = latent
        rows, columns, row_step, column_step = (
            self.tiles() if tiled else (height, width, height, width)
        )
        # Tiles begin where `tiled_decode` of diffusers begins them; those at the end
        # are smaller.
        parts = Counter(
            (frames, min(rows, height - top), min(columns, width - left))
            for top in range(0, height, row_step)
            for left in range(0, width, column_step)
        )
        works = [(count, *self.work_of(*part)) for part, count in parts.items()]
        return float(sum(n * flops for n, flops, _ in works)), float(
            sum(n * moved for n, _, moved in works)
        )

    def work_of(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """As `work`, of latents that are decoded whole."""
        return _counts(self, frames, height, width)

    @torch.no_grad()
    def counts(self, latents: Tensor, *, tiled: bool = False) -> tuple[int, int]:
        """FLOPs of one call of the autoencoder's decoder, and bytes that it reads and
        writes outside its products.
        """
        self.vae.use_tiling = tiled
        try:
            with _Decode() as counter:
                self.vae.decode(latents)
        finally:
            self.vae.use_tiling = False  # an empty decoder serves whoever asks next
        return counter.flops.total(), counter.moved


class _Decode(CountingMode):
    """Adds up the bytes outside products."""

    moved = 0

    def count(self, name: str, args: Any, result: Any, moved: int) -> None:
        """See `CountingMode`."""
        self.moved += moved if name not in PRODUCTS else 0


@cache
def _counts(
    decoder: AutoencoderDecoder, frames: int, height: int, width: int
) -> tuple[int, int]:
    """Counted once for each size."""
    latents = torch.empty(
        1,
        decoder.channels,
        frames,
        height,
        width,
        device="meta",
        dtype=decoder.vae.dtype,
    )
    return decoder.counts(latents)


def _to_uint8(pixels: Tensor) -> Tensor:
    """Decoded (B, 3, F, H, W) in [-1, 1] to uint8 (B, F, 3, H, W) on the CPU."""
    if not pixels.isfinite().all():
        raise DecodeError(
            f"The VAE decoded to values that are not finite in {pixels.dtype}. Set "
            "model.vae_dtype to bfloat16 or "
            "float32."
        )
    return (
        ((pixels.float() / 2 + 0.5).clamp_(0, 1) * 255)
        .round_()
        .to(torch.uint8)
        .transpose(1, 2)
        .contiguous()
        .cpu()
    )
