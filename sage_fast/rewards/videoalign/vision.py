"""Video preprocessing of Qwen2-VL on tensors: frames, sizes, patches and their
positions. Needs no torchvision.

The rules are those of the reader of VideoAlign (vision_process.py of
https://github.com/KwaiVGI/VideoAlign, after qwen-vl-utils) and of Qwen2-VL's image
processor in transformers; both were part of the reward model's training.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
SIZE_FACTOR = PATCH_SIZE * MERGE_SIZE

MIN_FRAMES = 4
MAX_FRAMES = 768
MIN_FRAME_PIXELS = 128 * SIZE_FACTOR**2
THETA = 10000.0

# OpenAI CLIP's statistics, as in Qwen2-VL's preprocessor_config.json.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def frame_indices(num_frames: int, fps: float, sample_fps: float) -> list[int]:
    """Frames that the model sees: an even number of them, evenly from the first frame
    to the last.

    Args:
        num_frames: frames of the video.
        fps: frames per second the video is played at.
        sample_fps: frames to see per second. At least 4 are seen, and of a shorter
            video all but an odd one.

    Raises:
        ValueError: fewer than two frames, which no temporal patch can be made of.
    """
    if num_frames < TEMPORAL_PATCH_SIZE:
        raise ValueError(
            f"a video of {num_frames} frame(s) cannot be scored: Qwen2-VL reads "
            "frames in pairs; give at least 2"
        )
    longest = min(MAX_FRAMES, num_frames) // TEMPORAL_PATCH_SIZE * TEMPORAL_PATCH_SIZE
    wanted = min(max(num_frames / fps * sample_fps, MIN_FRAMES), longest)
    # `round` takes halves to the even neighbour, and so did the training.
    count = round(wanted / TEMPORAL_PATCH_SIZE) * TEMPORAL_PATCH_SIZE
    return torch.linspace(0, num_frames - 1, count).round().long().tolist()


def frame_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Height and width that a frame is resized to: multiples of 28 with about its
    aspect ratio.

    Between 100,352 and `max_pixels` pixels: small frames are enlarged.
    """
    rows = max(1, round(height / SIZE_FACTOR))
    columns = max(1, round(width / SIZE_FACTOR))
    # Sides are rounded down where the frame is too large, and up where it is too small:
    # so the limit holds.
    if rows * columns * SIZE_FACTOR**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / SIZE_FACTOR))
        columns = max(1, math.floor(width / shrink / SIZE_FACTOR))
    elif rows * columns * SIZE_FACTOR**2 < MIN_FRAME_PIXELS:
        grow = math.sqrt(MIN_FRAME_PIXELS / (height * width))
        rows = math.ceil(height * grow / SIZE_FACTOR)
        columns = math.ceil(width * grow / SIZE_FACTOR)
    return rows * SIZE_FACTOR, columns * SIZE_FACTOR


def resize_frames(frames: Tensor, height: int, width: int) -> Tensor:
    """Bicubic resize with antialiasing to whole levels, as an image library gives:
    float32 (N, 3, height, width).

    Args:
        frames: (N, 3, H, W) uint8.
    """
    levels = frames.float()
    if frames.shape[-2:] != (height, width):
        levels = F.interpolate(
            levels, size=(height, width), mode="bicubic", antialias=True
        )
    # Back to the 256 levels of the uint8 frames that the model was trained on.
    return levels.clamp(0, 255).round()


def pixel_patches(levels: Tensor) -> Tensor:
    """Normalised patches in the order of Qwen2-VL: two frames deep, the four that merge
    into one token side by side.

    Args:
        levels: (B, F, 3, H, W) float32, 0 to 255; F even, H and W multiples of 28.

    Returns:
        float32 (B * F/2 * H/14 * W/14, 1176), a row per patch (colour, frame, row,
        column).
    """
    mean, std = (
        torch.tensor(values, device=levels.device).view(3, 1, 1)
        for values in (PIXEL_MEAN, PIXEL_STD)
    )
    pixels = (levels / 255 - mean) / std
    batch, num_frames, _, height, width = pixels.shape
    patches = pixels.view(
        batch * num_frames // TEMPORAL_PATCH_SIZE,
        TEMPORAL_PATCH_SIZE,
        3,
        height // SIZE_FACTOR,
        MERGE_SIZE,
        PATCH_SIZE,
        width // SIZE_FACTOR,
        MERGE_SIZE,
        PATCH_SIZE,
    )
    # Pair of frames, block of four patches, patch within the block; then the patch's
    # own pixels.
    patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(-1, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2)


def vision_angles(
    grid: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (patches, width) in `dtype`: positions, frequencies and angles
    are all rounded to it.

    VideoAlign's training and inference call `model.to(torch.bfloat16)`, which rounds
    these buffers in transformers 4.45.2, the release it was trained with; newer ones
    keep them in float32.
    Source: VisionRotaryEmbedding, rot_pos_emb and apply_rotary_pos_emb_vision of
    4.45.2.

    Args:
        grid: pairs of frames, rows and columns of patches.
        width: of a head.
    """
    pairs, rows, columns = grid
    exponents = torch.arange(0, width // 2, 2, dtype=torch.float, device=device) / (
        width // 2
    )
    frequencies = (1.0 / THETA**exponents).to(dtype)
    table = torch.outer(
        torch.arange(max(rows, columns), dtype=dtype, device=device), frequencies
    )
    # Row and column of each patch, the four that merge into one token side by side.
    places = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
    )
    places = (
        places.unflatten(0, (-1, MERGE_SIZE))
        .unflatten(2, (-1, MERGE_SIZE))
        .transpose(1, 2)
        .reshape(-1, 2)
    )
    angles = table[places.repeat(pairs, 1).to(device)].flatten(1)
    return torch.cat([angles.cos()] * 2, dim=1), torch.cat([angles.sin()] * 2, dim=1)
