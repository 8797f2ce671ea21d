"""Toy videos to latents and back: blocks of pixels in a cosine basis, without loss."""

import math
from functools import reduce

import torch
from torch import Tensor

from sage_fast.models.toy.renderer import to_uint8

PATCH_FRAMES = 2
PATCH_HEIGHT = 4
PATCH_WIDTH = 4
LATENT_CHANNELS = 3 * PATCH_FRAMES * PATCH_HEIGHT * PATCH_WIDTH


def _cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II matrix, float64 (size, size), one basis vector per row."""
    index = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(
        math.pi / size * (index[None] + 0.5) * index[:, None]
    ) * math.sqrt(2 / size)
    # The constant vector is longer than the others by this.
    basis[0] /= math.sqrt(2)
    return basis


class PatchCodec:
    """Videos uint8 (B, F, 3, H, W) <-> latents float32 (B, 96, F/2, H/4, W/4).

    Pixels in [0, 1] are centred on the `mean` colour of the toy videos and divided by
    their standard deviation `std`, then each block of 2 x 4 x 4 RGB pixels is rotated
    into the cosine basis. The rotation is orthonormal, so a distance between latents is
    `1 / std` times the distance between pixels, and latents of the toy videos have unit
    variance on average. `decode(encode(videos))` gives back every byte.

    With a `mean` of one number videos are grey: encoded by the mean of their colours,
    in a third of the channels.
    """

    mean: tuple[float, ...] = (0.13, 0.12, 0.13)
    std = 0.19

    def __init__(self) -> None:
        sizes = (PATCH_FRAMES, len(self.mean), PATCH_HEIGHT, PATCH_WIDTH)
        self._basis = reduce(torch.kron, map(_cosine_basis, sizes)).float()
        self._mean = torch.tensor(self.mean).view(-1, 1, 1)

    def latent_shape(
        self, num_frames: int, height: int, width: int
    ) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video; ValueError unless the sizes are
        multiples of 2, 4 and 4.
        """
        patches = {"frames": PATCH_FRAMES, "height": PATCH_HEIGHT, "width": PATCH_WIDTH}
        for (name, patch), size in zip(
            patches.items(), (num_frames, height, width), strict=True
        ):
            if size <= 0 or size % patch:
                raise ValueError(
                    f"The toy codec needs a {name} that is a positive multiple of "
                    f"{patch}, not {size}."
                )
        return (
            len(self._basis),
            num_frames // PATCH_FRAMES,
            height // PATCH_HEIGHT,
            width // PATCH_WIDTH,
        )

    def encode(self, videos: Tensor) -> Tensor:
        """uint8 (B, F, 3, H, W) -> float32 (B, 96, F/2, H/4, W/4)."""
        batch, frames, _, height, width = videos.shape
        channels, f, h, w = self.latent_shape(frames, height, width)
        colours = len(self._mean)
        pixels = (
            videos.float() / 255
            if colours == 3
            else videos.float().mean(2, keepdim=True) / 255
        )
        pixels = (pixels - self._mean.to(videos.device)) / self.std
        blocks = pixels.view(
            batch, f, PATCH_FRAMES, colours, h, PATCH_HEIGHT, w, PATCH_WIDTH
        )
        # Frames, colours, rows and columns of a block become one axis, in the order of
        # the basis.
        blocks = blocks.permute(0, 1, 4, 6, 2, 3, 5, 7).reshape(
            batch, f, h, w, channels
        )
        return (
            (blocks @ self._basis.T.to(videos.device))
            .permute(0, 4, 1, 2, 3)
            .contiguous()
        )

    def decode(self, latents: Tensor) -> Tensor:
        """float (B, 96 or 32, F, H, W) -> uint8 (B, 2F, 3, 4H, 4W) on the CPU, clipped."""
        batch, _, f, h, w = latents.shape
        blocks = latents.float().permute(0, 2, 3, 4, 1) @ self._basis.to(latents.device)
        blocks = blocks.view(
            batch, f, h, w, PATCH_FRAMES, len(self._mean), PATCH_HEIGHT, PATCH_WIDTH
        )
        pixels = blocks.permute(0, 1, 4, 5, 2, 6, 3, 7).reshape(
            batch, f * PATCH_FRAMES, len(self._mean), h * PATCH_HEIGHT, w * PATCH_WIDTH
        )
        # A grey video gets three equal colours; one with colours stays as it is.
        return (
            to_uint8(pixels * self.std + self._mean.to(latents.device))
            .cpu()
            .expand(-1, -1, 3, -1, -1)
        )
