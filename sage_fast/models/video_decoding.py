"""Latents to pixels with a video autoencoder of diffusers, of any family."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Self

import torch
from diffusers.video_processor import VideoProcessor
from torch import Tensor, nn

from sage_fast.config.errors import DecodeError
from sage_fast.models.counting import Tracer
from sage_fast.models.family import Decoding
from sage_fast.models.hub import hashable

PRODUCTS = frozenset({"convolution", "bmm"})
"""Operators of a decoder whose time is that of their FLOPs; all others take the time of
the bytes that they move.
"""


class AutoencoderDecoder:
    """Latents (B, C, F, H, W) to videos uint8 (B, frames, 3, height, width), on the
    CPU, one video at a time.

    A subclass for another autoencoder names its `kind`, diffusers' class, and the
    sizes.

    Attributes:
        channels: of latents.
        time, space: frames of a latent, and pixels along its sides.
        step: what sides of a video are multiples of.

    Args:
        vae: owned by the decoder from now on: moved to the device of the latents, and
            stripped of its encoder.
    """

    kind: ClassVar[Any]
    channels: int
    time: int
    space: int
    step: int

    def __init__(self, vae: Any) -> None:
        # Some classes look for it when they decode.
        vae.encoder = nn.Identity()
        self.vae = vae.eval().requires_grad_(False)

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

    @classmethod
    def description(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `ModelDescription`, by the configuration of the autoencoder."""
        empty = partial(cls.empty, config=hashable(config))
        return {
            "latent_shape": empty().latent_shape,
            "decoding": lambda latent, videos, model, on_gpu: empty(
                model.decode_dtype(on_gpu)
            ).decoding(latent, model.decode_limit_gib),
            "decode_work": lambda latent, tiled, dtype: empty(dtype).work(
                latent, tiled
            ),
        }

    def scaled(self, latents: Tensor) -> Tensor:
        """The input of the autoencoder, in its type, by the operations of the pipeline;
        by default those of `latents_mean` and `latents_std`.
        """
        latents = latents.to(self.vae.dtype)
        mean, std = (
            torch.tensor(self.vae.config[name]).view(1, -1, 1, 1, 1).to(latents)
            for name in ("latents_mean", "latents_std")
        )
        return latents / (1.0 / std) + mean

    def parts(self, latents: Tensor) -> Iterator[Tensor]:
        """Pixels (1, 3, frames, height, width) of scaled latents (1, C, F, H, W), in
        the order of time, each part once it is decoded; by default all at once.
        """
        yield self.vae.decode(latents, return_dict=False)[0]

    def decoding(
        self, latent: tuple[int, int, int, int], memory_gib: float | None
    ) -> Decoding:
        """How `decode` decodes a video of latents (C, F, H, W) within a limit, for a
        plan; by default whole, whatever the limit, and its memory is traced.
        """
        return Decoding(peak_bytes=float(_traced(self, *latent[1:]).peak))

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
        self.vae.to(latents.device)
        videos, _, frames, height, width = latents.shape
        result = torch.empty(
            videos,
            self.time * (frames - 1) + 1,
            3,
            self.space * height,
            self.space * width,
            dtype=torch.uint8,
        )
        for video, one in zip(result, self.scaled(latents).split(1), strict=True):
            done = 0
            for pixels in self.parts(one):
                # Assigned in place, so that no float video is ever on the device.
                video[done : done + pixels.shape[2]] = _to_uint8(pixels[0])
                done += pixels.shape[2]
            assert done == len(video)
        return result

    @torch.no_grad()
    def decode_plainly(self, latents: Tensor) -> Tensor:
        """As `decode`, by the autoencoder's own method, whole, and through the
        pipeline's own processor; what `decode` is held against.
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
        """
        assert not tiled
        return self.work_of(*latent[1:])

    def work_of(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """As `work`, of latents that are decoded whole."""
        return counted(self, frames, height, width)

    @torch.no_grad()
    def traced(self, latents: Tensor) -> "_Decode":
        """FLOPs, bytes and memory of `parts` for scaled latents (1, C, F, H, W)."""
        with _Decode([latents, *self.vae.parameters()]) as counter:
            for pixels in self.parts(latents):
                del pixels
        return counter


class _Decode(Tracer):
    """Also adds up the bytes outside products."""

    moved = 0

    def count(self, name: str, args: Any, result: Any, moved: int) -> None:
        """See `CountingMode`."""
        super().count(name, args, result, moved)
        self.moved += moved if name not in PRODUCTS else 0


@cache
def _traced(decoder: AutoencoderDecoder, *size: int) -> _Decode:
    """`AutoencoderDecoder.traced` of latents (F, H, W), traced once."""
    shape = (1, decoder.channels, *size)
    return decoder.traced(torch.empty(shape, device="meta", dtype=decoder.vae.dtype))


def counted(
    decoder: AutoencoderDecoder, frames: int, height: int, width: int
) -> tuple[int, int]:
    """FLOPs of decoding latents whole, and bytes outside products, counted once."""
    found = _traced(decoder, frames, height, width)
    return found.flops.total(), found.moved


def _to_uint8(pixels: Tensor) -> Tensor:
    """Decoded (3, F, H, W) in [-1, 1] to uint8 (F, 3, H, W) on the CPU."""
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
        .transpose(0, 1)
        .contiguous()
        .cpu()
    )
