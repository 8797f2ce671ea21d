"""Counter-based Gaussian noise: a number depends on who asks for it, never on what was
drawn before.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011), followed by the Box-Muller transform, in
`sage_kernels.reference.philox`. One process or many, a batch of one or of eight, a
fresh run or a resumed one: the same sample at the same step sees the same noise.

Layout, which the fused kernels reproduce number by number:

    key     = 64 bits of blake2b over (seed, update, prompt_index, sample_index), see `NoiseKey.words`
    counter = (block low 32 bits, block high 32 bits, step, stream)
    element e of a sample (C order) = number e % 4 of block e // 4
    words (w0, w1) and (w2, w3) of a block -> two numbers each: (w, w') -> (r cos angle, r sin angle) with
        r = sqrt(-2 ln(w 2^-32 + 2^-33)) and angle = 2 pi w' 2^-32, all in float32

Because element e depends on its index alone, shape (n,) is a prefix of shape (m,) for n
< m, and (2, 3) holds the same numbers as (6,). The integer words are equal on every
device bit for bit; the float32 logarithm, sine and cosine of different devices agree to
about 1e-6.

Shapes: B batch.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_fast.kernels import philox_normal

STREAM_STEP = 0
"""Stream of the noise that a sampler adds at a step."""
STREAM_INITIAL = 1
"""Stream of the noise that a rollout starts from."""
STREAM_FORWARD = 2
"""Stream of the noise that the forward process adds to a finished video."""


@dataclass(frozen=True)
class NoiseKey:
    """Key of a sample's noise. All four fields are signed 64-bit integers.

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

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit words of the Philox key."""
        # `person`, below, keeps these keys apart from other uses of the hash.
        packed = struct.pack(
            "<4q", self.seed, self.update, self.prompt_index, self.sample_index
        )
        digest = hashlib.blake2b(packed, digest_size=8, person=b"sage_fast.noise")
        low, high = struct.unpack("<2I", digest.digest())
        return low, high


def noise_ids(
    keys: Sequence[NoiseKey], steps: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Words of the noise that a batch draws at its steps, (B, 3) int64: the words of
    each row's key and its step, which is less than 2^32.
    """
    rows = [(*key.words, step) for key, step in zip(keys, steps, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def gaussian(
    keys: Sequence[NoiseKey],
    step: int | Sequence[int],
    shape: tuple[int, ...],
    *,
    stream: int = STREAM_STEP,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal noise.

    Args:
        keys: one key per row.
        step: index of the sampler's step or of the forward process's level, or one
            index per row.
        shape: shape of one sample, without the batch.
        stream: what the noise is for; streams have no number in common.
        device: where the numbers are computed.

    Returns:
        float32 (B, *shape). Row b depends on keys[b], its step and the element's index,
        on nothing else.
    """
    steps = [step] * len(keys) if isinstance(step, int) else list(step)
    numbers = philox_normal(
        noise_ids(keys, steps, device), math.prod(shape), stream=stream
    )
    return numbers.view(len(keys), *shape)
