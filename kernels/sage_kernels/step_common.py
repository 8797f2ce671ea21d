"""What the ops on one sampling step share: guidance, the noise of a row, coefficients per row, shapes of their tests.

Shapes: B batch, N elements of a sample.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common import check_shape
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
def row_noise(p_owner, i_row, first_block, i_tile, BLOCK: tl.constexpr):
    """The numbers of a row for the tile's BLOCK elements, which start at block first_block + i_tile * BLOCK / 4."""
    BLOCKS: tl.constexpr = BLOCK // 4
    k0 = tl.load(p_owner + i_row * 3).to(tl.uint32)
    k1 = tl.load(p_owner + i_row * 3 + 1).to(tl.uint32)
    step = tl.load(p_owner + i_row * 3 + 2).to(tl.uint32)
    return normal_tile(first_block + i_tile * BLOCKS + tl.arange(0, BLOCKS), k0, k1, step, 0)


def coefficient_columns(op: str, values: Mapping[str, float | Tensor], rows: int, device: torch.device) -> Tensor:
    """(B, C) float32 on `device` from C coefficients, each a number or a tensor (B,).

    Raises:
        ValueError: for a coefficient that is neither.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.shape not in ((), (rows,)) or not value.is_floating_point():
                raise ValueError(
                    f"{op}: {name} is {value.dtype} {tuple(value.shape)}; it must be a number or (B,) = ({rows},)"
                )
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{op}: {name} is {value!r}; it must be a number or floats (B,) = ({rows},)")
    if not any(isinstance(value, Tensor) for value in values.values()):
        return torch.tensor([list(values.values())], dtype=torch.float32).to(device).repeat(rows, 1)
    columns = [
        value.detach().to(device=device, dtype=torch.float32).expand(rows)
        if isinstance(value, Tensor)
        else torch.full((rows,), float(value), dtype=torch.float32, device=device)
        for value in values.values()
    ]
    return torch.stack(columns, dim=1)


def check_batch(op: str, tensors: Mapping[str, Tensor | None], first: str) -> None:
    """Refuse tensors that are not all of the shape (B, ...) of the argument named `first`."""
    shape = tensors[first].shape  # type: ignore[union-attr]
    if len(shape) < 2:
        raise ValueError(f"{op}: {first} has shape {tuple(shape)}; it must be (B, ...) with at least 2 dimensions")
    for name, tensor in tensors.items():
        if tensor is not None:
            check_shape(op, name, tensor, shape, "(B, ...)")


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
