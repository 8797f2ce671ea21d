"""The decoding suite: parity first, then times; both sides as they are used."""

from collections.abc import Callable

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
)

from benchmarks import device, results
from benchmarks.session import Session
from benchmarks.suites import decode
from benchmarks.suites.decode import Contest
from sage_fast.models.counting import Tracer
from sage_fast.models.hunyuan15.video_vae import VAEDecoder

CPU = torch.device("cpu")
MakeSession = Callable[..., Session]


@pytest.fixture
def contest() -> Contest:
    decoder = VAEDecoder(decode.random_vae(decode.TINY, CPU, torch.float32))
    return Contest(
        decoder, decode.random_vae(decode.TINY, CPU, torch.float32), (4, 2, 4, 4)
    )


def test_stock_asks_its_own_mask_and_ours_never(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    own = HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    counted = staticmethod(
        lambda *arguments, **options: masks.append(1) or own(*arguments, **options)
    )
    monkeypatch.setattr(
        HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", counted
    )
    assert contest.check() == {
        "errors": {"levels": 0.0},
        "bounds": {"levels": 0},
        "passed": True,
    }
    assert len(masks) == len(contest.vae.decoder.mid_block.attentions)
    contest.ours()
    assert len(masks) == len(contest.vae.decoder.mid_block.attentions)


def test_wrong_pixels_are_not_timed(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = decode.stock_decode
    monkeypatch.setattr(
        decode, "stock_decode", lambda *arguments: right(*arguments) ^ 1
    )
    monkeypatch.setattr(decode, "TINY_LATENT", (4, 1, 2, 2))
    found = session()
    found.run(device.SUITES["decode"])
    assert (
        found.cells["decode parity tiny"]["errors"] == {"levels": 1.0}
        and results.rows(found.result) == {}
    )
    assert not results.succeeded(found.result)


def test_stock_decodes_in_tiles_where_a_video_does_not_fit(contest: Contest) -> None:
    """Its tiles have other pixels at their seams, so the whole is what is compared."""
    assert not contest.tiled
    tiled = Contest(contest.decoder, contest.vae, (4, 1, 17, 2), stock_gib=1e-6)
    assert tiled.tiled and tiled.check()["passed"]
    assert not torch.equal(tiled.stock(), tiled.ours())
    assert tiled.vae.use_tiling


def test_the_estimate_of_stock_is_what_it_takes() -> None:
    """Traced without data, a size of the published autoencoder decoded whole."""
    vae = VAEDecoder.empty("float16").vae
    size = (9, 16, 24)
    latents = torch.empty(1, 32, *size, dtype=torch.float16, device="meta")
    with torch.no_grad(), Tracer([latents, *vae.parameters()]) as tracer:
        vae.decode(latents)
    assert 0.75 < tracer.peak / decode.stock_bytes(vae, *size) < 1


def test_random_pixels_cover_their_range(contest: Contest) -> None:
    """A decoder of constant grey would agree with anything."""
    assert contest.ours().float().std() > 10
