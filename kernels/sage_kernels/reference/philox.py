"""Reference of `sage_kernels.philox`: counter-based standard normal numbers in plain
PyTorch.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011), followed by the Box-Muller transform:

    counter = (block low 32 bits, block high 32 bits, step, stream),   key = two 32-bit words
    element e of a row (C order) = number e % 4 of block e // 4
    words (w0, w1) and (w2, w3) of a block -> two numbers each: (w, w') -> (r cos angle, r sin angle) with
        r = sqrt(-2 ln(w 2^-32 + 2^-33)) and angle = 2 pi w' 2^-32

Element e depends on (key, step, stream, e) alone: never on the batch, the shape, or
what was drawn before.

Shapes: B rows, N elements of a row, K blocks of four numbers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85


def philox(
    counter: Sequence[Tensor], key: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 in 64-bit integer arithmetic.

    Args:
        counter: four int64 tensors with values in [0, 2^32), shapes that broadcast
            together.
        key: two int64 tensors with values in [0, 2^32), shapes that broadcast with the
            counter.

    Returns:
        Four int64 tensors with values in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(ROUNDS):
        # A product of two 32-bit words wraps in int64 but keeps its bit pattern, so the
        # masked arithmetic shift is the unsigned high word.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        round_key_0 = k0 + round_index * WEYL_0
        round_key_1 = k1 + round_index * WEYL_1
        c0 = ((product_1 >> 32) ^ c1 ^ round_key_0) & MASK32
        c2 = ((product_0 >> 32) ^ c3 ^ round_key_1) & MASK32
        c1 = product_1 & MASK32
        c3 = product_0 & MASK32
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def box_muller(
    first: Tensor, second: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Two standard normal tensors from two int64 tensors of 32-bit words, computed in
    `dtype`.
    """
    # The half step keeps u away from 0; the largest magnitude is sqrt(66 ln 2) = 6.76.
    uniform = first.to(dtype).mul_(2.0**-32).add_(2.0**-33)
    angle = second.to(dtype).mul_(2.0**-32).mul_(2 * math.pi)
    radius = uniform.log_().mul_(-2).sqrt_()
    return radius * angle.cos(), radius * angle.sin()


def philox_normal(
    noise_ids: Tensor,
    num_elements: int,
    *,
    stream: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers of every row's key and step.

    Args:
        noise_ids: (B, 3) int64: the two 32-bit words of each row's key, and its step in
            [0, 2^32).
        num_elements: N.
        stream: fourth counter word, in [0, 2^32).
        dtype: float32, or float64 to judge float32 by: the same words, their transform
            in float64.

    Returns:
        (B, N) of `dtype`.
    """
    block = torch.arange(
        (num_elements + 3) // 4, dtype=torch.int64, device=noise_ids.device
    ).unsqueeze(0)
    k0, k1, step = (noise_ids & MASK32).unsqueeze(-1).unbind(1)
    words = philox(
        (block & MASK32, block >> 32, step, torch.full_like(step, stream)), (k0, k1)
    )
    numbers = torch.stack(
        [*box_muller(*words[:2], dtype), *box_muller(*words[2:], dtype)], dim=-1
    ).flatten(1)
    return numbers[:, :num_elements].contiguous()
