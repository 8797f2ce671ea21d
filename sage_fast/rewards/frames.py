"""What every reward of video frames does first: find its device, check its videos, choose frames."""

from collections.abc import Sequence

import torch
from torch import Tensor


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda where there is one. ValueError for a device that torch cannot use here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {name!r}, which torch cannot use here: {error}. Use auto or cpu.") from error
    return torch.device(name)


def check_videos(videos: Tensor, prompts: Sequence[str]) -> None:
    """ValueError unless `videos` is uint8 (B, F, 3, H, W), F >= 1, with one prompt each."""
    if videos.dtype != torch.uint8 or videos.ndim != 5 or videos.shape[2] != 3 or not videos.shape[1]:
        raise ValueError(f"Expected uint8 videos (B, F, 3, H, W), got {videos.dtype} {tuple(videos.shape)}.")
    if len(videos) != len(prompts):
        raise ValueError(f"Got {len(videos)} videos and {len(prompts)} prompts; there must be one prompt per video.")


def frame_indices(total: int, num_frames: int | None) -> list[int]:
    """The frames that stand for a video of `total` frames: the middles of `num_frames` equal parts of it.

    All of them when `num_frames` is None or not less than `total`. Example: 4 of 81 are 10, 30, 50 and 70.
    """
    count = total if num_frames is None else min(num_frames, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


def sample_frames(videos: Tensor, num_frames: int | None) -> Tensor:
    """(B, F, 3, H, W) to (B, n, 3, H, W), see `frame_indices`."""
    return videos[:, frame_indices(videos.shape[1], num_frames)]
