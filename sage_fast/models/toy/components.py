"""Load a toy model: a tiny `HunyuanVideo15Transformer3DModel`, the word encoder and the patch codec."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors import safe_open
from torch import Tensor

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, Decoding, ModelDescription, ModelFamily
from sage_fast.models.toy.captions import EMBED_DIM, GLYPH_DIM, WordEncoder
from sage_fast.models.toy.codec import LATENT_CHANNELS, PatchCodec

ASSETS = Path(__file__).parent / "assets"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "weights.safetensors"

# The class creates these whatever the task. Without glyph and image tokens they never act, and their hidden
# layer of fixed width 2048 would be two thirds of the file: they are not stored, not trained, and loaded as zeros.
UNUSED_MODULES = ("context_embedder_2", "image_embedder")

TRANSFORMER_CONFIG: dict[str, Any] = {
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": EMBED_DIM,
    "text_embed_2_dim": GLYPH_DIM,
    "image_embed_dim": 32,
    "rope_theta": 256.0,
    "rope_axes_dim": [8, 12, 12],
    "target_size": 16,
    "task_type": "t2v",
    "use_meanflow": False,
}


def is_unused(name: str) -> bool:
    """Tell whether a parameter (by its qualified name) belongs to a module that the toy world never uses."""
    return name.split(".", 1)[0] in UNUSED_MODULES


def build_transformer(config: Mapping[str, Any]) -> HunyuanVideo15Transformer3DModel:
    """A freshly initialised float32 transformer in training mode, its unused modules zero."""
    transformer = HunyuanVideo15Transformer3DModel(**config)
    # No caption quotes a text, and Muon's products of the glyph projection's 2048 x 2048 matrices take minutes.
    transformer.unread_modules = UNUSED_MODULES
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if is_unused(name):
                parameter.zero_()
    return transformer


def stored_parameters(transformer: HunyuanVideo15Transformer3DModel) -> dict[str, Tensor]:
    """The parameters that a toy checkpoint holds: all but the unused modules."""
    return {name: value for name, value in transformer.state_dict().items() if not is_unused(name)}


def load_components(model: ModelConfig) -> Components:
    """Load a toy model from plain files; nothing is downloaded.

    Args:
        model: its `path` is a folder with `config.json` and `weights.safetensors`, as
            `python -m sage_fast.models.toy.pretrain` writes it; None is the base model that ships with the project.

    Returns the components; the transformer is float32, on the CPU, in evaluation mode.

    ValueError when a file is missing or the weights do not fit the config.
    """
    directory = ASSETS if model.path is None else Path(model.path)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}. Give a folder written by 'python -m sage_fast.models.toy.pretrain "
                "--output FOLDER', or no path for the model that ships with the project."
            )
    transformer = build_transformer(json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8")))
    expected = stored_parameters(transformer)
    with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    misshapen = {name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape}
    if missing or unexpected or misshapen:
        raise ValueError(
            f"{directory / WEIGHTS_NAME} does not fit {CONFIG_NAME}: missing {sorted(missing)[:5]}, "
            f"unexpected {sorted(unexpected)[:5]}, of another shape {sorted(misshapen)[:5]}. "
            "Use the two files of one run."
        )
    transformer.load_state_dict(weights, strict=False)
    return Components(transformer=transformer.eval(), prompt_encoder=WordEncoder(), video_decoder=PatchCodec())


def _decoding(latent: tuple[int, int, int, int], videos: int, model: ModelConfig, on_gpu: bool) -> Decoding:
    """One product with the codec's basis; its result, a reordered copy and two rescaled ones are alive at once."""
    return Decoding(peak_bytes=4 * 4.0 * videos * math.prod(latent))


class Toy(ModelFamily):
    """The model family `toy`, see `ModelFamily`. It needs no files but those of the package."""

    def load(self, model: ModelConfig) -> Components:
        return load_components(model)

    def describe(self, model: ModelConfig) -> ModelDescription:
        file = (ASSETS if model.path is None else Path(model.path)) / CONFIG_NAME
        if not file.is_file():
            raise ValueError(
                f"{file.parent} has no {CONFIG_NAME}. Give a folder written by sage_fast.models.toy.pretrain."
            )
        return ModelDescription(
            transformer=json.loads(file.read_text(encoding="utf-8")) | {"unread_modules": UNUSED_MODULES},
            text_tokens=len(["a", "red", "circle", "moving", "left"]),
            latent_shape=PatchCodec().latent_shape,
            decoding=_decoding,
            decode_flops=lambda latent, tiled: 2.0 * math.prod(latent) * LATENT_CHANNELS,
        )
