"""Decoding a video: `sage_fast.models.hunyuan15.video_vae` against diffusers' own decode, random weights.

    python -m benchmarks vae             on a GPU: the published size in float16, 81 frames of 352x624 and 480x832
    python -m benchmarks vae             on a CPU: a tiny autoencoder in float32, 9 frames of 48x64
    python -m benchmarks vae --smoke     the same anywhere, few rounds; the numbers mean nothing

Both decode the same way, in tiles where one sample does not fit into `model.decode_memory_gib`, and end with bytes in
CPU memory. Parity comes first: the pixels may differ by at most `ALLOWED` of 255 levels, and by none in float32.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import Tensor

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, timed
from benchmarks.workload import SHAPES
from sage_fast.config.schema import ModelConfig
from sage_fast.models.hunyuan15.video_vae import VAEDecoder, decode_bytes

TINY: dict[str, Any] = {"latent_channels": 4, "block_out_channels": [8, 8, 16, 16, 16], "layers_per_block": 1}
TINY_LATENT = (4, 3, 3, 4)
"""(C, F, H, W) on a CPU: 9 frames of 48x64."""
ALLOWED = 2
"""Levels of 255 by which pixels in float16 may differ: both compute the same sums, cuDNN and SDPA choose the order."""


def random_vae(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> AutoencoderKLHunyuanVideo15:
    """An autoencoder whose random weights are drawn in place; activations keep their scale from layer to layer."""
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15(**config)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    vae = vae.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.endswith("gamma"):
                parameter.normal_(1.0, 0.05, generator=generator)
            elif parameter.ndim > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return vae.eval().requires_grad_(False)


def stock_decode(vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
    """The last lines of diffusers' pipeline, to uint8 (B, F, 3, H, W) on the CPU.

    The rounding to bytes is the image processor's, without a detour over PIL images.
    """
    with torch.no_grad():
        decoded = vae.decode(latents.to(vae.dtype) / vae.config["scaling_factor"], return_dict=False)[0]
    pixels = (decoded / 2 + 0.5).clamp(0, 1).transpose(1, 2).cpu().float()
    return (pixels * 255).round().to(torch.uint8)


def stock_masks(vae: AutoencoderKLHunyuanVideo15) -> None:
    """Give the attention blocks of a decoder that `VAEDecoder` has taken over their class's own mask again."""
    for block in vae.decoder.mid_block.attentions:
        block.prepare_causal_attention_mask = HunyuanVideo15AttnBlock.prepare_causal_attention_mask


def measure(decoder: VAEDecoder, latent: tuple[int, int, int, int], name: str, *, rounds: int) -> dict[str, Any]:
    """A row: shape, latent, tiled, difference (levels), and, if that is allowed, seconds of ours and stock."""
    vae = decoder.vae
    device = next(vae.parameters()).device
    latents = torch.randn(1, *latent, generator=torch.Generator(device).manual_seed(1), device=device)
    ours = decoder.decode(latents)
    tiled = decoder.memory_gib is not None and decode_bytes(vae, latent[1:]) > decoder.memory_gib * 2**30
    replaced = [block.prepare_causal_attention_mask for block in vae.decoder.mid_block.attentions]

    def stock() -> Tensor:
        vae.use_tiling = tiled
        stock_masks(vae)
        try:
            return stock_decode(vae, latents)
        finally:
            for block, mask in zip(vae.decoder.mid_block.attentions, replaced, strict=True):
                block.prepare_causal_attention_mask = mask

    difference = int((ours.int() - stock().int()).abs().max())
    allowed = 0 if vae.dtype == torch.float32 else ALLOWED
    row: dict[str, Any] = {"shape": name, "latent": list(latent), "tiled": tiled, "dtype": str(vae.dtype)[6:]}
    row |= {"difference": difference, "allowed": allowed, "passed": difference <= allowed}
    if not row["passed"]:
        return row
    calls: dict[str, Callable[[], object]] = {"ours": lambda: decoder.decode(latents), "stock": stock}
    peaks = {}
    if device.type == "cuda":
        for contender, call in calls.items():
            torch.cuda.reset_peak_memory_stats()
            call()
            peaks[contender] = torch.cuda.max_memory_allocated() / 1e9
    seconds = timed.time_calls(calls, rounds=rounds)
    row["seconds"] = {contender: asdict(found) for contender, found in seconds.items()}
    row["times_stock"] = seconds["stock"].median / seconds["ours"].median
    return row | ({"peak_memory_gb": peaks} if peaks else {})


def run(device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """{"vae": rows}."""
    tiny = smoke or device.type == "cpu"
    vae = random_vae(TINY if tiny else {}, device, torch.float32 if tiny else torch.float16)
    decoder = VAEDecoder(vae, memory_gib=ModelConfig().decode_memory_gib)
    if tiny:
        return {"vae": [measure(decoder, TINY_LATENT, "tiny", rounds=2 if smoke else 20)]}
    return {"vae": [measure(decoder, shape.latent, shape.name, rounds=3) for shape in SHAPES]}


def table(result: dict[str, Any]) -> str:
    """The rows for people."""
    form = "{:18} {:>10} {:>10} {:>9}  {}"
    lines = [form.format("VAE decode", "ours ms", "stock ms", "x stock", "")]
    for row in result["vae"]:
        note = "in tiles" if row["tiled"] else "whole"
        if not row["passed"]:
            lines.append(f"{row['shape']:18} PARITY FAILED, not timed: pixels differ by {row['difference']} levels")
            continue
        shown = [f"{row['seconds'][contender]['median'] * 1e3:.1f}" for contender in ("ours", "stock")]
        lines.append(form.format(row["shape"], *shown, f"{row['times_stock']:.2f}", note))
    return "\n".join(lines)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether every size passed its parity."""
    return all(row["passed"] for row in result["vae"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when the pixels differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks vae", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny autoencoder and few rounds")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<device>/...-vae.json")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(device, smoke=options.smoke)
    print(table(result))
    path = options.output or (None if options.smoke else harness.result_file(harness.environment(), suffix="-vae"))
    if path is not None:
        harness.write_result(path, {"environment": harness.environment(), "smoke": options.smoke} | result)
        print(f"written to {path}")
    return 0 if succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main())
