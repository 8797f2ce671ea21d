"""The data manifold of the toy world as one table, and the distance of a video from it."""

from functools import lru_cache

import torch
from torch import Tensor

from sage_fast.models.toy.renderer import BACKGROUND, Scene, all_scenes, render_batch, to_uint8


class Manifold:
    """Every legal video of one size, rendered once (8 x 16 x 16: 1,800 videos, 44 MB as float32, on the CPU).

    Attributes:
        scenes: the M scenes, in the order of `all_scenes`.
        videos: uint8 (M, F, 3, H, W), the rendering of each scene.
        table: float32 (M, F*3*H*W), the same videos in [0, 1] minus the background colour.
        energy: float32 (M,), squared norm of each row of `table`; a blank video would have 0.
    """

    def __init__(self, num_frames: int, height: int, width: int) -> None:
        self.scenes: tuple[Scene, ...] = all_scenes()
        self.videos = to_uint8(render_batch(self.scenes, num_frames, height, width))
        # The background as it is after rounding, so that background pixels of the table are exactly zero.
        self.background = to_uint8(torch.tensor(BACKGROUND)).float().view(3, 1, 1) / 255
        self.table = self.flatten(self.videos)
        self.energy = self.table.square().sum(1)

    def flatten(self, videos: Tensor) -> Tensor:
        """uint8 (B, F, 3, H, W) -> float32 (B, F*3*H*W) on the CPU, in [0, 1] minus the background colour.

        ValueError when the videos have another dtype or size than this manifold.
        """
        if videos.dtype != torch.uint8 or videos.shape[1:] != self.videos.shape[1:]:
            expected = ", ".join(map(str, self.videos.shape[1:]))
            raise ValueError(f"Expected uint8 videos (B, {expected}), got {videos.dtype} {tuple(videos.shape)}.")
        return (videos.cpu().float() / 255 - self.background).flatten(1)

    def squared_distances(self, flat: Tensor) -> Tensor:
        """Squared distances, float32 (B, M), of flattened videos to the legal ones, to about 1e-4."""
        parts = [part.square().sum(1, keepdim=True) - 2 * part @ self.table.T + self.energy for part in flat.split(256)]
        return torch.cat(parts).clamp_min(0) if parts else torch.empty(0, len(self.scenes))

    def nearest_index(self, videos: Tensor) -> Tensor:
        """Row of the nearest legal video: int64 (B,)."""
        return self.squared_distances(self.flatten(videos)).argmin(1)

    def distance(self, videos: Tensor) -> Tensor:
        """Root mean square pixel distance to the nearest legal video, float32 (B,), pixels in [0, 1].

        Exactly 0 for a legal video; about 0.14 to 0.25 for a blank one, about 0.5 for noise.
        """
        flat = self.flatten(videos)
        nearest = self.squared_distances(flat).argmin(1)
        # The matmul form finds the neighbour; the distance itself is taken directly, free of cancellation.
        return (flat - self.table[nearest]).square().mean(1).sqrt().to(videos.device)


@lru_cache(maxsize=4)
def manifold_for(num_frames: int, height: int, width: int) -> Manifold:
    """The (cached) manifold of one video size."""
    return Manifold(num_frames, height, width)
