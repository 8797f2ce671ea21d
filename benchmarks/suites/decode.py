"""Decoding a video: `sage_fast.models.hunyuan15.video_vae` against diffusers' own
decode, random weights.

    python -m benchmarks decode             on a GPU: the published size in float16, 81 frames of 352x624 and 480x832
    python -m benchmarks decode             on a CPU: a tiny autoencoder in float32, 9 frames of 64x64
    python -m benchmarks decode --smoke     the same anywhere, few rounds; the numbers mean nothing

Ours decodes a latent frame at a time. Diffusers decodes a video whole, or in its tiles
where that takes more than `STOCK_GIB`. Both end with bytes in CPU memory. Parity comes
first, of the first latent frames, which diffusers decodes whole: the pixels may differ
by at most `ALLOWED` of 255 levels, and by none in float32.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from benchmarks import harness
from benchmarks.errors import verdict
from benchmarks.results import Record
from benchmarks.session import Cell, Session, timing
from benchmarks.shapes import SHAPES
from benchmarks.workload import draw_weights
from sage_fast.models.hunyuan15.video_vae import VAEDecoder

SUITE = "decode"
TINY: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": [8, 8, 16, 16, 16],
    "layers_per_block": 1,
}
TINY_LATENT = (4, 3, 4, 4)
"""(C, F, H, W) on a CPU: 9 frames of 64x64."""
CONTENDERS = ("ours", "stock")
STOCK_GIB = 16.0
"""Limit of what diffusers takes for a video decoded whole; its mask is not counted."""
COMPARED = 5
"""Latent frames whose pixels are compared."""
ALLOWED = 2
"""Levels of 255 by which pixels in float16 may differ: both compute the same sums,
cuDNN and SDPA choose the order.
"""


def random_vae(
    config: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> AutoencoderKLHunyuanVideo15:
    """A frozen autoencoder with random weights; activations keep their scale from layer
    to layer.
    """
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15(**config)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    return draw_weights(vae, device)


def stock_decode(vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
    """The last lines of diffusers' pipeline, to uint8 (B, F, 3, H, W) on the CPU.

    The rounding to bytes is the image processor's, without a detour over PIL images.
    """
    with torch.no_grad():
        decoded = vae.decode(
            latents.to(vae.dtype) / vae.config["scaling_factor"], return_dict=False
        )[0]
    pixels = (decoded / 2 + 0.5).clamp(0, 1).transpose(1, 2).cpu().float()
    return (pixels * 255).round().to(torch.uint8)


def stock_bytes(vae: AutoencoderKLHunyuanVideo15, *latent: int) -> float:
    """Estimate of what diffusers takes for latents (F, H, W) decoded whole: 8 tensors
    of the size of the last, widest blocks. Traced they are 6.0 to 7.9.
    """
    frames, height, width = latent
    pixels = ((frames - 1) * 4 + 1) * height * width * 16**2
    return 8.0 * pixels * vae.config["block_out_channels"][0] * vae.dtype.itemsize


class Contest:
    """Both ways to decode one latent; `stock` has the weights of `decoder`.

    tiled: whether diffusers decodes it in tiles, within `stock_gib`.
    """

    def __init__(
        self,
        decoder: VAEDecoder,
        stock: AutoencoderKLHunyuanVideo15,
        latent: tuple[int, int, int, int],
        stock_gib: float = STOCK_GIB,
    ) -> None:
        self.decoder = decoder
        self.vae = stock
        device = next(stock.parameters()).device
        generator = torch.Generator(device).manual_seed(1)
        self.latents = torch.randn(1, *latent, generator=generator, device=device)
        self.tiled = stock_bytes(stock, *latent[1:]) > stock_gib * 2**30

    def ours(self) -> Tensor:
        return self.decoder.decode(self.latents)

    def stock(self) -> Tensor:
        self.vae.use_tiling = self.tiled
        return stock_decode(self.vae, self.latents)

    def check(self) -> Record:
        """Largest difference in levels. In diffusers' tiles the pixels are others."""
        some = self.latents[:, :, :COMPARED]
        self.vae.use_tiling = False
        ours = self.decoder.decode(some).int()
        difference = (ours - stock_decode(self.vae, some).int()).abs().max()
        return verdict(
            {"levels": float(difference)},
            0 if self.vae.dtype == torch.float32 else ALLOWED,
        )

    def measure(self, session: Session, shape: str, contender: str) -> Record:
        """The row of a contender."""
        call: Callable[[], object] = self.stock if contender == "stock" else self.ours
        harness.forget_peak(session.device)
        rounds = 20 if session.device.type == "cpu" else 2
        seconds = session.time(call, rounds=rounds)
        peak = harness.peak_memory_gb(session.device)
        size = " x ".join(str(n) for n in self.latents.shape[1:])
        dtype = str(self.vae.dtype).removeprefix("torch.")
        stock = contender == "stock"
        way = ("in tiles" if self.tiled else "whole") if stock else "frame by frame"
        note = f"{size}, {dtype}, {way}"
        more = {
            "peak_memory_gb": peak,
            "note": note,
            "tiled": stock and self.tiled,
        }
        return {"rows": [timing("", shape, contender, seconds, **more)]}


def cells(session: Session) -> Iterator[Cell]:
    """Parity and both contenders, a size at a time."""
    tiny = session.smoke or session.device.type == "cpu"
    config, dtype = (TINY, torch.float32) if tiny else ({}, torch.float16)
    vae = partial(random_vae, config, session.device, dtype)
    decoders = cache(lambda: (VAEDecoder(vae()), vae()))
    latents = {"tiny": TINY_LATENT}
    if not tiny:
        latents = {shape.name: shape.latent for shape in SHAPES}

    @cache
    def contest(name: str) -> Contest:
        return Contest(*decoders(), latents[name])

    def check(name: str) -> Record:
        return contest(name).check()

    def measure(name: str, contender: str) -> Record:
        return contest(name).measure(session, name, contender)

    for name in latents:
        yield Cell(suite=SUITE, name=f"parity {name}", work=partial(check, name))
        for who in CONTENDERS:
            yield Cell(
                suite=SUITE,
                name=f"{name} {who}",
                work=partial(measure, name, who),
                needs=(f"{SUITE} parity {name}",),
            )
