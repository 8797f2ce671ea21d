"""Counter-based Gaussian noise: a number depends on who asks for it, never on what was drawn before.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
followed by the Box-Muller transform. One process or many, a batch of one or of eight, a fresh run or a
resumed one: the same sample at the same step sees the same noise.

Layout, which a fused kernel can reproduce number by number:

    key     = 64 bits of blake2b over (seed, update, prompt_index, sample_index), see `NoiseKey.words`
    counter = (block low 32 bits, block high 32 bits, step, stream)
    element e of a sample (C order) = number e % 4 of block e // 4
    words (w0, w1) and (w2, w3) of a block -> two numbers each: (w, w') -> (r cos angle, r sin angle) with
        r = sqrt(-2 ln(w 2^-32 + 2^-33)) and angle = 2 pi w' 2^-32, all in float32

Because element e depends on its index alone, shape (n,) is a prefix of shape (m,) for n < m, and (2, 3) holds
the same numbers as (6,). The integer words are equal on every device bit for bit; the float32 logarithm, sine
and cosine of different devices agree to about 1e-6.

Shapes: B batch, K blocks of four numbers.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

STREAM_STEP = 0
"""Stream of the noise that a sampler adds at a step."""
STREAM_INITIAL = 1
"""Stream of the noise that a rollout starts from."""

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


@dataclass(frozen=True)
class NoiseKey:
    """Whose noise it is. All four fields are signed 64-bit integers.

    Example:
        >>> key = NoiseKey(seed=0, update=3, prompt_index=17, sample_index=2)
        >>> gaussian([key], step=5, shape=(16, 4, 8, 8)).shape
        torch.Size([1, 16, 4, 8, 8])
    """

    seed: int
    """Seed of the run."""
    update: int
    """Index of the rollout (optimizer step) that the sample belongs to."""
    prompt_index: int
    """Index of the prompt in the data set."""
    sample_index: int
    """Index of the sample in the prompt's group."""

    def __post_init__(self) -> None:
        for name, value in zip(("seed", "update", "prompt_index", "sample_index"), astuple(self), strict=True):
            if not isinstance(value, int) or not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} is {value!r}; it must be an integer that fits in 64 bits")

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit words of the Philox key."""
        packed = struct.pack("<4q", self.seed, self.update, self.prompt_index, self.sample_index)
        low, high = struct.unpack("<2I", hashlib.blake2b(packed, digest_size=8, person=b"sage_fast.noise").digest())
        return low, high


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 in 64-bit integer arithmetic.

    Args:
        counter: four int64 tensors with values in [0, 2^32), shapes that broadcast together.
        key: two int64 tensors with values in [0, 2^32), shapes that broadcast with the counter.

    Returns:
        Four int64 tensors with values in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        # A product of two 32-bit words wraps in int64 but keeps its bit pattern, so the masked arithmetic
        # shift is the unsigned high word.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        round_key_0, round_key_1 = k0 + round_index * _WEYL_0, k1 + round_index * _WEYL_1
        c0 = ((product_1 >> 32) ^ c1 ^ round_key_0) & _MASK32
        c2 = ((product_0 >> 32) ^ c3 ^ round_key_1) & _MASK32
        c1, c3 = product_1 & _MASK32, product_0 & _MASK32
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two standard normal float32 tensors from two tensors of 32-bit words."""
    # The half step keeps u away from 0; the largest magnitude is sqrt(66 ln 2) = 6.76.
    uniform = first.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
    angle = second.to(torch.float32).mul_(2.0**-32).mul_(2 * math.pi)
    radius = uniform.log_().mul_(-2).sqrt_()
    return radius * angle.cos(), radius * angle.sin()


def _draw(
    keys: Sequence[NoiseKey],
    steps: Sequence[int],
    shape: tuple[int, ...],
    stream: int,
    device: torch.device | str,
) -> Tensor:
    if not keys:
        raise ValueError("no noise keys were given; pass one NoiseKey per row of the batch")
    if len(steps) != len(keys):
        raise ValueError(f"{len(steps)} steps for {len(keys)} noise keys; pass one step, or one per key")
    if any(not 0 <= step <= _MASK32 for step in steps):
        raise ValueError(f"steps are {list(steps)}; each must be between 0 and 2^32 - 1")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape is {shape}; it is the shape of one sample, without negative sizes")
    num_elements = math.prod(shape)
    rows = torch.tensor([[*key.words, step] for key, step in zip(keys, steps, strict=True)], dtype=torch.int64)
    k0, k1, step_word = rows.to(device).unsqueeze(-1).unbind(1)
    block = torch.arange((num_elements + 3) // 4, dtype=torch.int64, device=device).unsqueeze(0)
    words = philox((block & _MASK32, block >> 32, step_word, torch.full_like(step_word, stream)), (k0, k1))
    numbers = torch.stack([*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])], dim=-1)
    return numbers.view(len(keys), 4 * block.numel())[:, :num_elements].contiguous().view(len(keys), *shape)


def gaussian(
    keys: Sequence[NoiseKey],
    step: int | Sequence[int],
    shape: tuple[int, ...],
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal noise of a sampler's step.

    Args:
        keys: one key per row.
        step: index of the step, or one index per row.
        shape: shape of one sample, without the batch.
        device: where the numbers are computed.

    Returns:
        float32 (B, *shape). Row b depends on keys[b], its step and the element's index, on nothing else.

    Raises:
        ValueError: for no keys, a wrong number of steps, or a step or a shape out of range.
    """
    steps = [step] * len(keys) if isinstance(step, int) else list(step)
    return _draw(keys, steps, tuple(shape), STREAM_STEP, device)


def initial_noise(keys: Sequence[NoiseKey], shape: tuple[int, ...], *, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal noise that a rollout starts from: as `gaussian`, from a stream that no step uses.

    Args:
        keys: one key per row.
        shape: shape of one sample, without the batch.
        device: where the numbers are computed.

    Returns:
        float32 (B, *shape).
    """
    return _draw(keys, [0] * len(keys), tuple(shape), STREAM_INITIAL, device)
