"""What the ops on one sampling step share: guidance, the noise of a row, coefficients per row, shapes of their tests.

Shapes: B batch, N elements of a sample.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common import FLOAT_DTYPES
from sage_kernels.philox import normal_tile
from sage_kernels.registry import Case, random_tensor

LATENT_SIZES = ("batch", "channels", "frames", "height", "width")


@triton.jit
def combine_guidance(b_cond, p_uncond, o_row, m, guidance_scale, HAS_UNCOND: tl.constexpr):
    """v_uncond + g (v_cond - v_uncond) in float32; b_cond where there is no unconditional branch."""
    b_velocity = b_cond
    if HAS_UNCOND:
        b_uncond = tl.load(p_uncond + o_row, mask=m, other=0.0).to(tl.float32)
        b_velocity = b_uncond + guidance_scale * (b_cond - b_uncond)
    return b_velocity


@triton.jit
def row_noise(p_keys, p_step, i_row, first_block, i_tile, BLOCK: tl.constexpr):
    """The numbers of a row for the tile's BLOCK elements, which start at block first_block + i_tile * BLOCK / 4."""
    BLOCKS: tl.constexpr = BLOCK // 4
    k0 = tl.load(p_keys + i_row * 2).to(tl.uint32)
    k1 = tl.load(p_keys + i_row * 2 + 1).to(tl.uint32)
    step = tl.load(p_step + i_row).to(tl.uint32)
    return normal_tile(first_block + i_tile * BLOCKS + tl.arange(0, BLOCKS), k0, k1, step, 0)


def coefficient_columns(
    op: str, values: Mapping[str, float | Tensor | None], rows: int, device: torch.device
) -> list[Tensor | None]:
    """Each coefficient as (B,) float32 on `device`. A float32 tensor is passed through as it is; a number
    costs one small fill.

    Raises:
        ValueError: for a coefficient that is neither a number nor such a tensor.
    """
    columns: list[Tensor | None] = []
    for name, value in values.items():
        if value is None:
            columns.append(None)
        elif isinstance(value, Tensor):
            if value.shape != (rows,) or value.dtype not in FLOAT_DTYPES or value.device != device:
                raise ValueError(
                    f"{op}: {name} has shape {tuple(value.shape)} and dtype {value.dtype} on {value.device}; "
                    f"it must be a number, or float32 (B,) = ({rows},) on {device}"
                )
            columns.append(value.detach().to(torch.float32))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{op}: {name} is {value!r}, a {type(value).__name__}; it must be a number or floats (B,)")
        else:
            columns.append(torch.full((rows,), float(value), dtype=torch.float32, device=device))
    return columns


def check_batch(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors (None is skipped) that do not have one shape (B, ...) in common."""
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1 or any(len(shape) < 2 for shape in given.values()):
        shapes = ", ".join(f"{name} has shape {shape}" for name, shape in given.items())
        raise ValueError(f"{op}: {shapes}; they must have one shape (B, ...) of at least 2 dimensions")


def latent_shape(batch: int, *sizes: int, **options: int) -> dict[str, int]:
    """Shape of a case: sizes of a batch of latents, and options of the op."""
    return dict(zip(LATENT_SIZES, (batch, *sizes), strict=True)) | options


def random_latents(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    """A (B, C, F, H, W) tensor of the case's sizes."""
    sizes = [case.shape[name] for name in LATENT_SIZES]
    return random_tensor(*sizes, dtype=dtype, device=device, generator=generator, strided=case.strided)


def noise_keys(rows: int, device: torch.device | str) -> Tensor:
    """(B, 2) int64, two different words a row."""
    words = torch.arange(1, 2 * rows + 1, dtype=torch.int64).view(rows, 2).mul(0x3C6EF372) & 0xFFFFFFFF
    return words.to(device)
