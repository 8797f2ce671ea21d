"""HunyuanVideo-1.5 of its true size with random weights, in diffusers' layout: 20 GB.

    python -m tests.tiny.true_size FOLDER
    python -m sage_fast doctor hv15_quick_lora_1gpu --deep --model.path=FOLDER \\
        "--reward.rewards=[benchmarks.suites.iteration:Brightness]" --reward.weights.brightness=1

try a machine before anything is downloaded. The text encoders have the published
widths, but few layers.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.suites.decode import random_vae
from benchmarks.workload import random_transformer
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15
from tests.tiny import checkpoints

LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": HUNYUAN_VIDEO_15["text_embed_dim"],
    "intermediate_size": 256,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [16, 24, 24],
    },
}
BYT5 = {
    "d_model": HUNYUAN_VIDEO_15["text_embed_2_dim"],
    "d_kv": 64,
    "d_ff": 512,
    "num_heads": 6,
}


def write(
    folder: Path, transformer: Mapping[str, Any] = HUNYUAN_VIDEO_15, **vae: Any
) -> None:
    """Write the layout.

    Args:
        folder: new, or to be written over.
        transformer: of `HunyuanVideo15Transformer3DModel`, in bfloat16.
        vae: of `AutoencoderKLHunyuanVideo15`, in float16, where it is not the published
            one.
    """
    language_model = patch.dict(checkpoints.LANGUAGE_MODEL, LANGUAGE_MODEL)
    with (
        language_model,
        patch.dict(checkpoints.BYT5, BYT5),
        patch.object(checkpoints, "make_distinct"),
    ):
        pipeline = checkpoints.build_pipeline()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_transformer(transformer, device, torch.bfloat16).cpu()
    pipeline.register_modules(
        transformer=model, vae=random_vae(vae, device, torch.float16).cpu()
    )
    pipeline.save_pretrained(folder, max_shard_size="5GB")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tiny.true_size",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("folder", type=Path, help="where to write the model")
    write(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
