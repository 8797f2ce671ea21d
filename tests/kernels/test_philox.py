"""Noise of the kernels: the words of Philox, the numbers of the reference, one sequence
for every launch geometry.

Their statistics are those of the reference: tests/test_noise.py.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_fast.noise import NoiseKey, gaussian
from sage_kernels.launch import cdiv
from sage_kernels.ops import sde_step as module
from sage_kernels.philox import box_muller, philox_words
from sage_kernels.reference.philox import philox, philox_normal

KEYS = torch.tensor(
    [[0x3C6EF372, 0xDAA66D2B], [0xFFFFFFFF, 0], [7, 0x80000000]], dtype=torch.int64
)
STEPS = torch.tensor([0, 19, 0xFFFFFFFF], dtype=torch.int64)
IDS = torch.cat([KEYS, STEPS.unsqueeze(1)], dim=1)


def draw(
    noise_ids: Tensor, numel: int, device: torch.device, *, block: int | None = None
) -> Tensor:
    """The noise that `sde_step` adds, (B, numel), with a = b = 0 and std = 1; `block`
    elements a program.
    """
    x = torch.zeros(len(noise_ids), numel, device=device)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCK", "INTERPRETED_BLOCK"):
            patch.setattr(module, name, block or getattr(module, name))
        return module.sde_step(x, x, noise_ids.to(device), 0.0, 0.0, 1.0).cpu()


@triton.jit
def words_kernel(p_block, p_key, p_out, step, stream, numel, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < numel
    k0 = tl.load(p_key).to(tl.uint32)
    k1 = tl.load(p_key + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(
        tl.load(p_block + o, mask=m, other=0), k0, k1, step, stream
    )
    tl.store(p_out + o * 4, w0.to(tl.int64), mask=m)
    tl.store(p_out + o * 4 + 1, w1.to(tl.int64), mask=m)
    tl.store(p_out + o * 4 + 2, w2.to(tl.int64), mask=m)
    tl.store(p_out + o * 4 + 3, w3.to(tl.int64), mask=m)


@triton.jit
def normal_kernel(p_first, p_second, p_out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_one, b_two = box_muller(
        tl.load(p_first + o).to(tl.uint32), tl.load(p_second + o).to(tl.uint32)
    )
    tl.store(p_out + o, b_one)
    tl.store(p_out + BLOCK + o, b_two)


@pytest.mark.parametrize(
    ("row", "first"),
    [(0, 0), (1, 2**32 - 5), (2, 2**34 + 3)],
    ids=["start", "carry", "far"],
)
def test_words_are_those_of_the_reference_bit_for_bit(
    row: int, first: int, device: torch.device
) -> None:
    block = torch.arange(first, first + 1001)
    out = torch.zeros(1001, 4, dtype=torch.int64, device=device)
    step = int(STEPS[row])
    stream = 1
    words_kernel[(cdiv(1001, 256),)](
        block.to(device), KEYS[row].to(device), out, step, stream, 1001, BLOCK=256
    )
    counter = (
        block & 0xFFFFFFFF,
        block >> 32,
        torch.tensor([step]),
        torch.tensor([stream]),
    )
    assert torch.equal(
        out.cpu(), torch.stack(philox(counter, KEYS[row].unsqueeze(1)), dim=1)
    )


def test_the_extreme_words_give_finite_numbers(device: torch.device) -> None:
    words = torch.tensor(
        [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFF7F, 0xFFFFFFFE, 0xFFFFFFFF, 2],
        device=device,
    )
    out = torch.empty(16, device=device)
    normal_kernel[(1,)](words, words.flip(0), out, BLOCK=8)
    assert bool(torch.isfinite(out).all()) and float(out.abs().max()) < 6.77


def test_numbers_are_those_of_the_reference_and_of_the_rollout(
    device: torch.device,
) -> None:
    drawn = draw(IDS, 20_003, device)
    expected = philox_normal(IDS, 20_003)
    # Four units in the last place of the largest numbers (below 8): logarithm, root,
    # sine and product.
    torch.testing.assert_close(drawn, expected, rtol=0, atol=2e-6)
    owner = NoiseKey(seed=3, update=11, prompt_index=5, sample_index=2)
    rollout = gaussian([owner], 9, (7, 5, 11))
    ours = draw(torch.tensor([[*owner.words, 9]]), 385, device)
    torch.testing.assert_close(ours.view(1, 7, 5, 11), rollout, rtol=0, atol=2e-6)


def test_numbers_depend_on_neither_the_block_size_nor_the_batch(
    device: torch.device,
) -> None:
    batch = draw(IDS, 3001, device, block=512)
    assert torch.equal(draw(IDS, 3001, device, block=1024), batch)
    assert torch.equal(draw(IDS[1:2], 3001, device)[0], batch[1])
    assert torch.equal(draw(IDS.flip(0), 3001, device), batch.flip(0))
