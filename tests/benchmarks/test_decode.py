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
from sage_fast.models.hunyuan15.components import VAEDecoder

CPU = torch.device("cpu")
MakeSession = Callable[..., Session]


@pytest.fixture
def contest() -> Contest:
    decoder = VAEDecoder(
        decode.random_vae(decode.TINY, CPU, torch.float32), memory_gib=1.0
    )
    return Contest(
        decoder, decode.random_vae(decode.TINY, CPU, torch.float32), (4, 2, 2, 3)
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


def test_both_decode_in_tiles_where_one_sample_does_not_fit(contest: Contest) -> None:
    contest.decoder.memory_gib = 1e-6
    tiled = Contest(contest.decoder, contest.vae, (4, 1, 17, 2))
    assert tiled.tiled and tiled.check()["passed"]


def test_random_pixels_cover_their_range(contest: Contest) -> None:
    """A decoder of constant grey would agree with anything."""
    assert contest.ours().float().std() > 10
