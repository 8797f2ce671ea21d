"""The position code that VideoAlign was trained with, where today's Qwen2-VL would compute another one.

Its training and inference call `model.to(torch.bfloat16)`. In transformers 4.45.2, the release it was trained with,
that also rounds the rotary frequencies, which are buffers; newer releases keep them in float32. 1,600 tokens on, the
angles of the two differ by up to 1.7 rad, and the weights know the rounded ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_fast.rewards.videoalign.vision import MERGE_SIZE

Rotary = Literal["published", "exact"]

VISION_THETA = 10000.0


def sequential_positions(tokens: Tensor) -> Tensor:
    """Position ids (3, B, L) that count the tokens, the video's like all others.

    Qwen2-VL itself numbers video tokens by frame, row and column. VideoAlign was trained without: its forward passed no
    position ids, for which transformers 4.45 counted. Its weights know no other positions.
    """
    batch, length = tokens.shape
    return torch.arange(length, device=tokens.device).expand(3, batch, length)


def round_frequencies(rotary: Any, dtype: torch.dtype) -> None:
    """Round the frequencies of the language model's rotary embedding to `dtype`, in place.

    Angles are products in float32 with positions that are exact, in 4.45.2 as now.
    """
    rotary.inv_freq.copy_(rotary.inv_freq.to(dtype))


@contextmanager
def vision_rotation(visual: nn.Module, grids: Sequence[Sequence[int]], dtype: torch.dtype | None) -> Iterator[None]:
    """Within the context the blocks of the vision tower rotate by 4.45.2's cosines and sines.

    Args:
        visual: Qwen2-VL's vision tower.
        grids: (pairs of frames, rows, columns) of patches of every video.
        dtype: of the model; None leaves the tower's own, exact rotation.
    """
    blocks: Any = visual.blocks
    if dtype is None:
        yield
        return
    attention = blocks[0].attn
    width = attention.qkv.in_features // attention.num_heads
    rotation = vision_angles(grids, width, dtype, attention.qkv.weight.device)

    def replace(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"position_embeddings": rotation}

    hooks = [block.register_forward_pre_hook(replace, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def vision_angles(
    grids: Sequence[Sequence[int]], width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (patches, width) in `dtype`: positions, frequencies and angles are all rounded to it.

    Source: VisionRotaryEmbedding, rot_pos_emb and apply_rotary_pos_emb_vision of transformers 4.45.2.

    Args:
        grids: (pairs of frames, rows, columns) of patches of every video.
        width: of a head.
    """
    exponents = torch.arange(0, width // 2, 2, dtype=torch.float, device=device) / (width // 2)
    frequencies = (1.0 / VISION_THETA**exponents).to(dtype)
    longest = max(side for grid in grids for side in grid[1:])
    table = torch.outer(torch.arange(longest, dtype=dtype, device=device), frequencies)
    rows = torch.cat([_patch_places(*grid) for grid in grids]).to(device)
    angles = table[rows].flatten(1)
    return torch.cat([angles.cos()] * 2, dim=1), torch.cat([angles.sin()] * 2, dim=1)


def _patch_places(pairs: int, rows: int, columns: int) -> Tensor:
    """(patches, 2): row and column of each patch, the four that merge into one token side by side."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    blocks = places.unflatten(0, (-1, MERGE_SIZE)).unflatten(2, (-1, MERGE_SIZE))
    return blocks.transpose(1, 2).reshape(-1, 2).repeat(pairs, 1)
