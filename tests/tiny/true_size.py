"""HunyuanVideo-1.5 of its true size with random weights, in diffusers' layout: 20 GB, in half a minute.

    python -m tests.tiny.true_size FOLDER
    sage-fast doctor hv15_quick_lora_1gpu --deep --model.path FOLDER

tries a machine before anything is downloaded. The text encoders have the published widths, but few layers.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import nn

from sage_fast.models.family import family_of
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15
from tests.tiny import checkpoints

LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": HUNYUAN_VIDEO_15["text_embed_dim"],
    "intermediate_size": 256,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
}
BYT5 = {"d_model": HUNYUAN_VIDEO_15["text_embed_2_dim"], "d_kv": 64, "d_ff": 512, "num_heads": 6}
DRAWN = 2**26
"""Random numbers, of which every parameter is a part: drawing billions takes minutes."""


def write(folder: Path, transformer: Mapping[str, Any] = HUNYUAN_VIDEO_15, **vae: Any) -> None:
    """Write the layout.

    Args:
        folder: new, or to be written over.
        transformer: of `HunyuanVideo15Transformer3DModel`, in bfloat16.
        vae: of `AutoencoderKLHunyuanVideo15`, in float16, where it is not the published one.
    """
    language_model = patch.dict(checkpoints.LANGUAGE_MODEL, LANGUAGE_MODEL)
    with language_model, patch.dict(checkpoints.BYT5, BYT5), patch.object(checkpoints, "_make_distinct"):
        pipeline = checkpoints.build_pipeline()
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(**transformer)
        decoder = AutoencoderKLHunyuanVideo15(**vae)
    family_of(model).cast(model, torch.bfloat16)
    pool = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))
    pipeline.register_modules(transformer=fill(model, pool), vae=fill(decoder.half(), pool))
    pipeline.save_pretrained(folder, max_shard_size="5GB")


def fill(model: nn.Module, pool: torch.Tensor) -> nn.Module:
    """Give a model on the meta device weights under which activations keep their scale from layer to layer."""
    model.to_empty(device="cpu")
    start = 0
    for name, parameter in model.named_parameters():
        mean, std = 0.0, 0.02
        if name.endswith("gamma") or (parameter.ndim == 1 and name.endswith("weight")):
            mean, std = 1.0, 0.05
        elif parameter.ndim > 1 and "cond_type_embed" not in name:
            std = parameter[0].numel() ** -0.5
        # Each begins elsewhere, so that no two are alike.
        start = (start + 7919) % (len(pool) - parameter.numel())
        values = pool[start : start + parameter.numel()]
        parameter.data = (mean + std * values).view(parameter.shape).to(parameter.dtype)
    return model.requires_grad_(False).eval()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiny.true_size", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the model")
    write(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
