"""The VAE decoder against diffusers' own decode and postprocess."""

import copy
import weakref
from functools import lru_cache

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from torch import Tensor

from sage_fast.models.hunyuan15.components import VAEDecoder, causal_mask
from sage_fast.planning.trace import Tracer
from tests.tiny.checkpoints import LATENT_CHANNELS


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
    latents = latents_of(3, 3, 3, 2)
    expected = stock_frames(pipeline, latents)
    assert expected.min() == 0 and expected.max() == 255, (
        "the tiny VAE covers the range, clipping included"
    )
    decoder = VAEDecoder(vae)
    videos = decoder.decode(latents)
    assert (
        videos.dtype == torch.uint8
        and videos.shape == (3, 9, 3, 48, 32)
        and videos.is_contiguous()
    )
    assert torch.equal(videos, expected)


def test_tiles_are_those_of_diffusers(
    pipeline: HunyuanVideo15Pipeline, vae: AutoencoderKLHunyuanVideo15
) -> None:
    latents = latents_of(1, 1, 18, 2)
    whole = stock_frames(pipeline, latents)
    pipeline.vae.enable_tiling()
    try:
        tiled = stock_frames(pipeline, latents)
    finally:
        pipeline.vae.disable_tiling()
    assert not torch.equal(whole, tiled)
    assert torch.equal(VAEDecoder(vae, memory_gib=1e-6).decode(latents), tiled)
    assert torch.equal(
        VAEDecoder(copy.deepcopy(pipeline.vae), memory_gib=None).decode(latents), whole
    )


@pytest.mark.parametrize(("fitting", "parts"), [(5, [5]), (2, [2, 2, 1]), (1, [1] * 5)])
def test_as_many_samples_at_once_as_fit(
    vae: AutoencoderKLHunyuanVideo15,
    monkeypatch: pytest.MonkeyPatch,
    fitting: int,
    parts: list[int],
) -> None:
    latents = latents_of(5, 1, 2, 2)
    plain = VAEDecoder(copy.deepcopy(vae))
    expected = plain.decode(latents)
    decode = vae.decode
    sizes = []
    monkeypatch.setattr(
        vae, "decode", lambda z, **options: sizes.append(len(z)) or decode(z, **options)
    )
    budget = (fitting + 0.5) * plain.peak_bytes(1, 2, 2) / 2**30
    videos = VAEDecoder(vae, memory_gib=budget).decode(latents)
    assert sizes == parts
    # Another batch size may round a pixel the other way.
    assert (videos.int() - expected.int()).abs().max() <= 1


def test_one_mask_serves_a_decode_and_is_freed(
    vae: AutoencoderKLHunyuanVideo15,
) -> None:
    decoder = VAEDecoder(vae)
    made = []

    def spy(*arguments: object) -> Tensor:
        mask = causal_mask(*arguments)
        made.append(weakref.ref(mask))
        return mask

    decoder._cached_mask = lru_cache(maxsize=4)(spy)
    decoder.decode(latents_of(3, 2, 2, 2))
    assert [mask() for mask in made] == [None]


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


def test_values_that_are_not_finite_are_refused(
    vae: AutoencoderKLHunyuanVideo15,
) -> None:
    decoder = VAEDecoder(vae)
    vae.decoder.conv_out.conv.bias.data[0] = float("inf")
    with pytest.raises(RuntimeError, match="model.vae_dtype"):
        decoder.decode(latents_of(1, 1, 1, 1))


def test_memory_estimate_of_the_published_vae() -> None:
    """The peak of a decode, traced without data at the published size, lies just below
    the estimate.
    """
    decoder = VAEDecoder.empty("float16")
    size = (9, 16, 24)
    latents = torch.empty(1, 32, *size, dtype=torch.float16, device="meta")
    with torch.no_grad(), Tracer([latents, *decoder.vae.parameters()]) as tracer:
        decoder.vae.decode(latents)
    assert 0.8 < tracer.peak / decoder.peak_bytes(*size) < 1
