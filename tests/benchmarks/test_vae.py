"""The decoding benchmark: parity first, then times; both sides as they are used."""

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from benchmarks import vae
from sage_fast.models.hunyuan15.video_vae import VAEDecoder

CPU = torch.device("cpu")


@pytest.fixture
def decoder() -> VAEDecoder:
    return VAEDecoder(vae.random_vae(vae.TINY, CPU, torch.float32), memory_gib=1.0)


def test_a_tiny_decode_is_compared_and_timed(decoder: VAEDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    own = HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    monkeypatch.setattr(
        HunyuanVideo15AttnBlock,
        "prepare_causal_attention_mask",
        staticmethod(lambda *arguments, **options: masks.append(1) or own(*arguments, **options)),
    )
    row = vae.measure(decoder, (4, 2, 2, 3), "tiny", rounds=2)
    assert (row["difference"], row["allowed"], row["passed"], row["tiled"]) == (0, 0, True, False)
    assert row["times_stock"] == row["seconds"]["stock"]["median"] / row["seconds"]["ours"]["median"]
    # Once for the comparison, once to warm up, twice timed, in every attention block; ours never asks the class.
    assert len(masks) == 4 * len(decoder.vae.decoder.mid_block.attentions)


def test_wrong_pixels_are_not_timed(decoder: VAEDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vae.stock_decode
    monkeypatch.setattr(vae, "stock_decode", lambda *arguments: right(*arguments) ^ 1)
    row = vae.measure(decoder, (4, 2, 2, 3), "tiny", rounds=2)
    assert row["difference"] == 1 and not row["passed"] and "seconds" not in row
    result: dict[str, Any] = {"vae": [row]}
    assert not vae.succeeded(result)
    assert "PARITY FAILED, not timed: pixels differ by 1 levels" in vae.table(result)


def test_both_decode_in_tiles_where_one_sample_does_not_fit(decoder: VAEDecoder) -> None:
    decoder.memory_gib = 1e-6
    row = vae.measure(decoder, (4, 1, 17, 2), "tiny", rounds=1)
    assert row["tiled"] and row["passed"]


def test_random_pixels_cover_their_range(decoder: VAEDecoder) -> None:
    """A decoder of constant grey would agree with anything."""
    videos = decoder.decode(torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0)))
    assert videos.float().std() > 10


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(vae, "TINY_LATENT", (4, 1, 2, 2))
    file = tmp_path / "vae.json"
    assert vae.main(["--smoke", "--output", str(file)]) == 0
    assert "VAE decode" in capsys.readouterr().out and file.exists()
