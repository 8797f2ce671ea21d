"""The counter-based noise: published Philox vectors, layout, distribution and what a
number may depend on.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from sage_fast.noise import NoiseKey, gaussian
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rollout import initial_latents, noise_keys, noise_seed, sample_trajectory
from sage_fast.sde import sigma_schedule, transition_table
from sage_kernels.reference.philox import philox

KEY = NoiseKey(seed=3, update=11, prompt_index=5, sample_index=2)


def keys(count: int) -> list[NoiseKey]:
    return [
        NoiseKey(seed=0, update=1, prompt_index=i // 4, sample_index=i % 4)
        for i in range(count)
    ]


def philox_of(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    words = philox(
        [torch.tensor([word]) for word in counter],
        [torch.tensor([word]) for word in key],
    )
    return [int(word) for word in words]


def python_normal(key: NoiseKey, stream: int, step: int, element: int) -> float:
    """One number from the documented layout in double precision."""
    packed = struct.pack(
        "<4q", key.seed, key.update, key.prompt_index, key.sample_index
    )
    digest = hashlib.blake2b(packed, digest_size=8, person=b"sage_fast.noise").digest()
    block, lane = divmod(element, 4)
    words = philox_of(
        [block & 0xFFFFFFFF, block >> 32, step, stream], struct.unpack("<2I", digest)
    )
    first, second = words[:2] if lane < 2 else words[2:]
    radius = math.sqrt(-2 * math.log(first / 2**32 + 2**-33))
    angle = 2 * math.pi * second / 2**32
    return radius * (math.cos(angle) if lane % 2 == 0 else math.sin(angle))


PUBLISHED = (
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
)
"""Counter, key and words of Random123 (kat_vectors, philox 4x32, 10 rounds)."""


@pytest.mark.parametrize(
    ("counter", "key", "expected"), PUBLISHED, ids=["zeros", "ones", "pi"]
)
def test_philox_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert philox_of(counter, key) == expected


@pytest.mark.parametrize("element", [0, 1, 2, 3, 4, 6143, 70001])
def test_numbers_follow_the_documented_layout(element: int) -> None:
    step = gaussian([KEY], 9, (70002,))[0, element]
    start = initial_latents([KEY], (70002,))[0, element]
    assert float(step) == pytest.approx(python_normal(KEY, 0, 9, element), abs=2e-6)
    assert float(start) == pytest.approx(python_normal(KEY, 1, 0, element), abs=2e-6)


def test_layout_is_pinned() -> None:
    """A resumed run must see the numbers of the run that it resumes: changing these
    breaks checkpoints.
    """
    expected = [[0.4216278, -0.8752539, 1.2336555, 0.4689991]]
    torch.testing.assert_close(
        gaussian([KEY], 9, (4,)), torch.tensor(expected), rtol=0, atol=2e-6
    )


def test_moments_and_distribution() -> None:
    sample = gaussian(keys(32), 4, (16384,)).double().flatten()
    n = sample.numel()
    # Standard errors of the first four moments of a standard normal: 1, sqrt 2, sqrt
    # 15, sqrt 96 over sqrt n.
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert float((sample**power).mean()) == pytest.approx(
            moment, abs=4 * math.sqrt(spread / n)
        )
    ordered = sample.sort().values
    uniform = (1 + torch.erf(ordered / math.sqrt(2))) / 2
    ranks = torch.arange(n, dtype=torch.float64) / n
    # Kolmogorov-Smirnov at 0.1 %
    assert float((uniform - ranks).abs().max()) < 1.95 / math.sqrt(n)
    assert float(sample.abs().max()) < 6.77


@pytest.mark.parametrize(
    ("other", "step"),
    [
        pytest.param(NoiseKey(4, 11, 5, 2), 9, id="seed"),
        pytest.param(NoiseKey(3, 12, 5, 2), 9, id="update"),
        pytest.param(NoiseKey(3, 11, 6, 2), 9, id="prompt"),
        pytest.param(NoiseKey(3, 11, 5, 3), 9, id="sample"),
        pytest.param(NoiseKey(11, 3, 5, 2), 9, id="exchanged-fields"),
        pytest.param(KEY, 10, id="step"),
    ],
)
def test_a_change_of_owner_or_step_gives_independent_noise(
    other: NoiseKey, step: int
) -> None:
    first = gaussian([KEY], 9, (65536,))
    second = gaussian([other], step, (65536,))
    assert abs(float((first * second).mean())) < 4 / 256
    assert float((first == second).float().mean()) < 1e-3


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (3, 5, 7), (6143,), (6144,), (33333,)], ids=str
)
def test_a_row_does_not_depend_on_its_batch(shape: tuple[int, ...]) -> None:
    owners = keys(9)
    steps = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    batch = gaussian(owners, steps, shape)
    assert (
        batch.shape == (9, *shape)
        and batch.dtype == torch.float32
        and batch.is_contiguous()
    )
    for row, (owner, step) in enumerate(zip(owners, steps, strict=True)):
        assert torch.equal(gaussian([owner], step, shape)[0], batch[row])
    assert torch.equal(gaussian(owners[::-1], steps[::-1], shape), batch.flip(0))


def test_shapes_share_a_prefix_and_only_the_flat_index_counts() -> None:
    long = gaussian(keys(3), 2, (1001,))
    assert torch.equal(gaussian(keys(3), 2, (50,)), long[:, :50])
    assert torch.equal(gaussian(keys(3), 2, (7, 11, 13)).flatten(1), long)


def test_every_step_of_a_rollout_draws_its_own_noise() -> None:
    """The loss draws the same noise again, by owner and step, so each latent must
    follow from the one before.
    """
    owners = keys(2)
    table = transition_table("sage_grpo", sigma_schedule(4, 3.0), 0.5)
    initial = initial_latents(owners, (1, 1, 2, 3))
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=Prompt(text="", index=0), embeds=embeds, member=member)
        for member in range(2)
    ]
    found = sample_trajectory(
        lambda step, x, sigma: x.sin(), samples, owners, table, initial
    )
    for step, (x, after) in enumerate(pairwise([*found.latents, found.final])):
        a, b, std = (float(column[step]) for column in (table.a, table.b, table.std))
        expected = a * x + b * x.sin() + std * gaussian(owners, step, (1, 1, 2, 3))
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


def test_shared_initial_noise_starts_a_group_alike() -> None:
    owners = [NoiseKey(0, 1, 7, member) for member in range(4)]
    first, second, third, fourth = initial_latents(
        owners, (4,), kind="shared", members=2
    )
    assert torch.equal(first, second) and torch.equal(third, fourth)
    assert not torch.equal(first, third), "two groups of one prompt"


def test_a_prompt_seed_is_mixed_with_a_run_seed_that_is_not_the_default() -> None:
    embeds = PromptEmbeds(text=torch.zeros(1, 1), glyph=torch.zeros(0, 1))
    samples = [
        Sample(prompt=Prompt(text="", index=i, seed=s), embeds=embeds, member=0)
        for i, s in ((0, 7), (1, None))
    ]
    keys = noise_keys(samples, 1_000_003, update=0, usual=1_000_003)
    assert [key.seed for key in keys] == [7, 1_000_003]
    pairs = [(own, seed) for own in range(20) for seed in range(20)]
    mixed = {
        noise_seed(Prompt(text="", index=0, seed=own), seed) for own, seed in pairs
    }
    assert len(mixed) == len(pairs) and all(0 <= seed < 2**63 for seed in mixed), (
        "1 and 2 are not 2 and 1"
    )
    keys = noise_keys(samples, 3, update=0)
    assert [key.seed for key in keys] == [noise_seed(samples[0].prompt, 3), 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_draws_the_same_numbers() -> None:
    owners = keys(8)
    on_gpu = gaussian(owners, 3, (6145,), device="cuda").cpu()
    torch.testing.assert_close(on_gpu, gaussian(owners, 3, (6145,)), rtol=0, atol=5e-6)
