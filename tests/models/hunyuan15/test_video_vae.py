"""The VAE decoder against diffusers' own decode and postprocess."""

import copy

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.suites.decode import TINY, random_vae
from sage_fast.models.counting import Tracer
from sage_fast.models.hunyuan15.video_vae import FramewiseDecoder, VAEDecoder
from tests.tiny.checkpoints import LATENT_CHANNELS

CPU = torch.device("cpu")


@pytest.fixture
def vae(pipeline: HunyuanVideo15Pipeline) -> AutoencoderKLHunyuanVideo15:
    return copy.deepcopy(pipeline.vae)


def latents_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape[0],
        LATENT_CHANNELS,
        *shape[1:],
        generator=torch.Generator().manual_seed(seed),
    )


def stock_frames(pipeline: HunyuanVideo15Pipeline, latents: Tensor) -> Tensor:
    """(B, F, 3, H, W) uint8 of the stock pipeline's last lines, one sample at a time,
    as PIL images.
    """
    videos = []
    for sample in latents.split(1):
        with torch.no_grad():
            decoded = pipeline.vae.decode(
                sample / pipeline.vae.config.scaling_factor, return_dict=False
            )[0]
        images = pipeline.video_processor.postprocess_video(decoded, output_type="pil")[
            0
        ]
        videos.append(
            torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(
                0, 3, 1, 2
            )
        )
    return torch.stack(videos)


def test_equals_stock_decode_and_postprocess(
    pipeline: HunyuanVideo15Pipeline, vae: AutoencoderKLHunyuanVideo15
) -> None:
    latents = latents_of(3, 3, 4, 4)
    expected = stock_frames(pipeline, latents)
    assert expected.min() == 0 and expected.max() == 255, (
        "the tiny VAE covers the range, clipping included"
    )
    decoder = VAEDecoder(vae)
    videos = decoder.decode(latents)
    assert (
        videos.dtype == torch.uint8
        and videos.shape == (3, 9, 3, 64, 64)
        and videos.is_contiguous()
    )
    assert torch.equal(videos, expected)


DTYPES = [
    "float32",
    "bfloat16",
    pytest.param("float16", marks=pytest.mark.slow),  # a CPU emulates it
]


def test_below_16_latents_of_a_frame_a_level_may_round_otherwise(
    pipeline: HunyuanVideo15Pipeline, vae: AutoencoderKLHunyuanVideo15
) -> None:
    """So small a product of one frame adds up in another order than of all frames."""
    latents = latents_of(3, 3, 3, 2)
    found = VAEDecoder(vae).decode(latents).int() - stock_frames(pipeline, latents)
    assert found.abs().max() <= 1 and found.abs().float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(4, 4, 5), (1, 2, 2)])
def test_bits_are_those_of_the_whole_video(dtype: str, size: tuple[int, ...]) -> None:
    """A latent frame at a time against the published class, on a CPU."""
    vae = random_vae(TINY, CPU, getattr(torch, dtype))
    z = latents_of(1, *size).to(vae.dtype)
    with torch.no_grad():
        whole = vae.decode(z, return_dict=False)[0]
        parts = [*VAEDecoder(vae).parts(z)]
    assert [part.shape[2] for part in parts] == [1] + [4] * (size[0] - 1)
    assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize(
    ("size", "parts", "channels"),
    [
        ((4, 2, 3), (1, 3), [8, 8, 16, 16, 16]),
        ((7, 1, 1), (2, 3), [8, 8, 16, 16, 16]),
        ((3, 1, 4), (1, 2), [8, 16, 32, 32, 64]),
    ],
)
def test_any_parts_make_up_the_whole_video(
    size: tuple[int, int, int], parts: tuple[int, ...], channels: list[int]
) -> None:
    """In float64, at any size and in parts of any length."""
    vae = random_vae(TINY | {"block_out_channels": channels}, CPU, torch.float64)
    z = latents_of(1, *size, seed=1).double()
    with torch.no_grad():
        whole = vae.decode(z, return_dict=False)[0]
    assert whole.abs().max() > 1
    for together in parts:
        decode = FramewiseDecoder(vae.decoder)
        with torch.no_grad():
            found = [decode(part) for part in z.split(together, dim=2)]
        torch.testing.assert_close(torch.cat(found, 2), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_depends_on_no_later_one_and_on_no_other_video(dtype: str) -> None:
    """To the byte, at sizes where a CPU's convolutions change with the number of
    frames.
    """
    decoder = VAEDecoder(random_vae(TINY, CPU, getattr(torch, dtype)))
    latents = latents_of(2, 3, 3, 3)
    videos = decoder.decode(latents)
    assert videos.float().std() > 10 and videos.shape == (2, 9, 3, 48, 48)
    for k in (1, 2):
        assert torch.equal(decoder.decode(latents[1:, :, :k]), videos[1:, : 4 * k - 3])


def test_the_class_is_left_as_it_was(pipeline: HunyuanVideo15Pipeline) -> None:
    vae = copy.deepcopy(pipeline.vae)
    latents = latents_of(1, 3, 3, 2)
    decoder = VAEDecoder(vae)
    before = [set(vars(module)) for module in vae.modules()]
    decoder.decode(latents)
    assert [set(vars(module)) for module in vae.modules()] == before
    assert torch.equal(decoder.decode_plainly(latents), stock_frames(pipeline, latents))


def test_work_is_the_class_less_what_its_mask_hides() -> None:
    """FLOPs by torch's counter: the class multiplies all pairs of queries and keys, of
    which (F - 1) / 2F are masked.
    """
    decoder = VAEDecoder.empty("float16")
    frames, height, width = size = (4, 5, 3)
    latents = torch.empty(1, 32, *size, dtype=torch.float16, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as whole:
        decoder.vae.decode(latents)
    with torch.no_grad(), FlopCounterMode(display=False) as ours:
        assert sum(part.shape[2] for part in decoder.parts(latents)) == 13
    tokens = height * width
    masked = tokens**2 * frames * (frames - 1) // 2
    assert whole.get_total_flops() - ours.get_total_flops() == 2 * 2 * 1024 * masked
    assert decoder.work((32, *size), False)[0] == ours.get_total_flops()


def test_work_of_many_frames_follows_from_that_of_few() -> None:
    decoder = VAEDecoder.empty("float16")
    for size in ((9, 5, 7), (5, 2, 1)):
        latents = torch.empty(1, 32, *size, dtype=torch.float16, device="meta")
        found = decoder.traced(latents)
        assert decoder.work((32, *size), False) == (found.flops.total(), found.moved)
    flops, moved = decoder.work((32, 21, 30, 52), False)
    assert flops == pytest.approx(811.19e12, rel=1e-5)
    assert moved == pytest.approx(3.026e12, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((80, 480, 832), "video.num_frames is 80.*77 or 81"),
        ((81, 8, 832), "video.height is 8.*nearest: 16."),
    ],
)
def test_an_impossible_size_names_the_nearest(
    vae: AutoencoderKLHunyuanVideo15, size: tuple[int, int, int], words: str
) -> None:
    decoder = VAEDecoder(vae)
    assert decoder.latent_shape(121, 720, 1280) == (LATENT_CHANNELS, 31, 45, 80)
    with pytest.raises(ValueError, match=words):
        decoder.latent_shape(*size)


@pytest.mark.parametrize("frame", [0, 2])
def test_values_that_are_not_finite_are_refused(
    frame: int, vae: AutoencoderKLHunyuanVideo15
) -> None:
    latents = latents_of(2, 3, 1, 1)
    latents[1, :, frame] = float("nan")
    with pytest.raises(RuntimeError, match="model.vae_dtype"):
        VAEDecoder(vae).decode(latents)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float16", (2, 16, 16)),
        ("float32", (9, 16, 24)),
        ("bfloat16", (5, 22, 39)),
        ("float32", (3, 1, 1)),
        ("float16", (21, 30, 52)),
    ],
)
def test_memory_bound_of_the_published_vae(
    dtype: str, size: tuple[int, int, int]
) -> None:
    """The peak of a decode, traced without data at the published size, lies just below
    the bound.
    """
    decoder = VAEDecoder.empty(dtype)
    peak = traced_peak(decoder, *size)
    assert 0.9 < peak / decoder.peak_bytes(*size) < 1
    assert decoder.decoding((32, *size), 1.0) == decoder.decoding((32, *size), None)
    if size[0] == 21:
        assert peak == pytest.approx(4.37e9, rel=2e-3)


def test_memory_bound_where_the_attention_is_largest() -> None:
    decoder = VAEDecoder.empty("float16")
    size = (9, 120, 200)
    peak = traced_peak(decoder, *size)
    assert peak > 1.1 * decoder.peak_bytes(2, *size[1:]), "the widest blocks alone"
    assert 0.9 < peak / decoder.peak_bytes(*size) < 1


def test_one_frame_takes_no_more_than_the_bound() -> None:
    decoder = VAEDecoder.empty("float16")
    for size in ((1, 2, 2), (1, 30, 52)):
        assert 0.6 < traced_peak(decoder, *size) / decoder.peak_bytes(*size) < 1


def traced_peak(decoder: VAEDecoder, *size: int) -> int:
    latents = torch.empty(1, 32, *size, dtype=decoder.vae.dtype, device="meta")
    with torch.no_grad(), Tracer([latents, *decoder.vae.parameters()]) as tracer:
        for pixels in decoder.parts(latents):
            del pixels
    return tracer.peak
