"""The model family `hunyuan15`: HunyuanVideo-1.5 from its public checkpoints, and its
description for the planner.

`model.path` is one of

* a folder as diffusers saves a `HunyuanVideo15Pipeline`: transformer/, vae/,
  text_encoder/, tokenizer/, ...; or a `HunyuanVideo15ImageToVideoPipeline`, with
  image_encoder/ and feature_extractor/ too;
* the id of such a repository on the Hugging Face hub, downloaded into its cache, or
  taken from there when offline.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, ModelDescription, WeightFacts
from sage_fast.models.hub import (
    Requirement,
    cache_folder,
    check_known,
    fetch_command,
    find_folder,
    load_vae,
    local_folder,
    model_device,
    published_shift,
    require_parts,
    requirement,
    stored_bytes,
    stored_config,
)
from sage_fast.models.hunyuan15 import (
    DEFAULT_REPOSITORY,
    IMAGE_TO_VIDEO,
    PICTURE_PARTS,
    TEXT_PARTS,
    animates_pictures,
    likely_repository,
)
from sage_fast.models.hunyuan15.backbone import (
    IMAGE_TOKENS,
    HunyuanTransformer,
    forward_work,
    modulation,
)
from sage_fast.models.hunyuan15.components import (
    ENCODERS,
    VISION,
    HunyuanPromptEncoder,
)
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.stored import open_transformer, read_json

logger = logging.getLogger(__name__)

SUPPORTED = "480p_t2v, 720p_t2v, 480p_t2v_distilled, 480p_i2v or 720p_i2v"

DISTILLED_STEPS = 50
"""Steps that weights with distilled guidance must use, by the README of
Tencent-Hunyuan/HunyuanVideo-1.5.
"""


def load_components(model: ModelConfig) -> Components:
    """Open the transformer, load the VAE, and prepare the prompt encoders, which load
    themselves when they are needed.

    The transformer is in `model.dtype`, without its weights (`Components.weights`).
    Everything is on the CPU.

    Raises:
        ValueError: files are missing or damaged (the message names the file and the
            command that gets it), or the weights are of a variant that cannot be
            trained.
        OSError: a folder cannot be written to.
    """
    cache = cache_folder(model)
    root, facts = find_model(model)
    dtype = getattr(torch, model.dtype)
    device = model_device(model)
    transformer, weights = open_transformer(
        HunyuanVideo15Transformer3DModel, root / "transformer", dtype
    )
    transformer.reads_pictures = facts.pictures
    if model.decode_memory_gib != "auto":
        logger.warning(
            "model.decode_memory_gib changes nothing: hunyuan15 has no tiles"
        )
    return Components(
        transformer=transformer,
        weights=weights,
        prompt_encoder=HunyuanPromptEncoder(
            root=root,
            parts=ENCODERS + VISION if facts.pictures else ENCODERS,
            cache=cache / "prompts",
            device=device,
        ),
        video_decoder=VAEDecoder(
            load_vae(
                AutoencoderKLHunyuanVideo15,
                root / "vae",
                model.decode_dtype(device.startswith("cuda")),
            )
        ),
        **vars(facts),
    )


def find_model(
    model: ModelConfig, *, download: bool = True
) -> tuple[Path, WeightFacts]:
    """The folder that `model.path` names, and its facts: checked as far as it can be
    without loading anything.

    Args:
        download: whether a hub repository may be downloaded; otherwise it has to be in
            the local cache.

    Raises as `load_components`.
    """
    parts = (*TEXT_PARTS, *PICTURE_PARTS, "scheduler", "guider")
    path = model.path or DEFAULT_REPOSITORY
    convert = "convert_hunyuan_video1_5"
    likely = likely_repository(path)
    root = find_folder(path, parts, likely, convert, download=download)
    if (root / "model_index.json").is_file():
        index = read_json(root / "model_index.json")
    else:
        index = {}
    kind = index.get("_class_name", "HunyuanVideo15Pipeline")
    if kind not in ("HunyuanVideo15Pipeline", IMAGE_TO_VIDEO):
        _refuse(
            root / "model_index.json",
            f"is of a {kind}, not of a HunyuanVideo15Pipeline or {IMAGE_TO_VIDEO}",
        )
    pictures = kind == IMAGE_TO_VIDEO
    require_parts(root, TEXT_PARTS + (PICTURE_PARTS if pictures else ()), path, likely)
    config_file = root / "transformer" / "config.json"
    config = read_json(config_file)
    if config.get("_class_name") != HunyuanVideo15Transformer3DModel.__name__:
        _refuse(config_file, f"describes a {config.get('_class_name')}")
    if config.get("use_meanflow"):
        _refuse(
            config_file,
            (
                "says use_meanflow: the model is step-distilled, so its velocity is "
                "not that of a flow"
            ),
        )
    # Published text-to-video pipelines carry task_type i2v in this file, so it counts
    # only where nothing else speaks.
    if not index and config.get("task_type") == "i2v":
        _refuse(
            config_file,
            "says task_type i2v, and only model_index.json can tell whether that is so",
        )
    guider = root / "guider" / "guider_config.json"
    # A guider whose scale is 1 belongs to weights that guidance is distilled into.
    distilled = guider.is_file() and read_json(guider).get("guidance_scale") == 1.0
    facts = WeightFacts(
        guidance_distilled=str(guider) if distilled else None,
        shift=published_shift(root),
        least_steps=DISTILLED_STEPS if distilled else None,
        pictures=pictures,
    )
    return root, facts


def _refuse(where: Path, why: str) -> None:
    raise ValueError(
        (
            f"These weights cannot be trained: {where} {why}. Use {SUPPORTED}, for "
            "example: "
        )
        + fetch_command(DEFAULT_REPOSITORY)
    )


HUNYUAN_VIDEO_15: dict[str, Any] = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56),
    "target_size": 640,
    "task_type": "t2v",
    "use_meanflow": False,
}
"""The published transformer, 8,326,608,160 parameters."""

_NAMES = (
    *("480p_t2v", "720p_t2v", "480p_t2v_distilled", "480p_i2v", "720p_i2v"),
    *("480p_i2v_distilled", "720p_i2v_distilled", "480p_i2v_step_distilled"),
)
PUBLISHED = [DEFAULT_REPOSITORY.replace("480p_t2v", name) for name in _NAMES]
"""Repositories with that transformer."""

TEXT_TOKENS = 250
"""Tokens of a prompt of a long sentence or two."""

LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "dtype": "bfloat16",
}
"""The published text model of Qwen2.5-VL-7B."""

TEMPLATE_TOKENS = 108
END_TOKENS = 5
TOKENS_PER_WORD = 4 / 3
"""Tokens before a prompt, which are cropped, and behind it, which are not; and of a
word of English.
"""

VAE_GB = 2.5
TEXT_ENCODER_GB = 15.1
"""Published weights: the video autoencoder in float16; Qwen2.5-VL's language model,
7.07 B in bfloat16, and ByT5's encoder, 0.22 B in float32.
"""

VISION_GB = 1.7
PICTURE_FLOPS = 0.6e12
PICTURE_BYTES = 729 * 1152 * 4
"""SigLIP's 0.43 B parameters in float32, 1e9 bytes; its work for a picture, and its
tokens.
"""

DOWNLOAD_GB = 33.3 + 5.0 + 14.2 + 0.9
"""1e9 bytes of transformer, autoencoder, Qwen2.5-VL's language model and glyph encoder,
at most: from their numbers of parameters in float32, of the language model in bfloat16.
"""


def encoding(
    language: dict[str, Any], words: float, *, picture: bool = False
) -> tuple[float, float]:
    """FLOPs of the language model for a prompt of so many words, and bytes of its
    tokens; with those of a picture.

    Example: 150 words are 205 tokens, 313 with the template before them: 4.1e12 FLOPs
    and 1.5e6 bytes.
    """
    width = language["hidden_size"]
    layers = language["num_hidden_layers"]
    tokens = TOKENS_PER_WORD * words + END_TOKENS
    length = TEMPLATE_TOKENS + tokens
    # Several heads of queries share one of keys and values, so these are narrower.
    keys = width * language["num_key_value_heads"] / language["num_attention_heads"]
    # Of a layer: queries and output, keys and values; and the three matrices of its
    # gated feed-forward.
    weights = 2 * width * (width + keys) + 3 * width * language["intermediate_size"]
    flops = 2 * layers * (weights * length + width * length**2)
    size = tokens * width * (4 if language.get("dtype") == "float32" else 2)
    return (flops + PICTURE_FLOPS, size + PICTURE_BYTES) if picture else (flops, size)


def published_model(**changes: Any) -> ModelDescription:
    """The published HunyuanVideo-1.5, with other values for some fields of the
    description.
    """
    fields: dict[str, Any] = {
        "transformer": dict(HUNYUAN_VIDEO_15),
        "text_tokens": TEXT_TOKENS,
        **VAEDecoder.description({}),
        "forward_work": forward_work,
        "decoder_gb": VAE_GB,
        "encoder_gb": TEXT_ENCODER_GB,
        "encoding": partial(encoding, LANGUAGE_MODEL),
    }
    fields |= changes
    return ModelDescription(**fields, modulation=modulation(fields["transformer"]))


class HunyuanVideo15(HunyuanTransformer):
    """See `ModelFamily`. The pipeline and its encoders take seconds to import, so only
    what needs them does.
    """

    licence = (
        "tencent-hunyuan-community",
        "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE",
    )

    def load(self, model: ModelConfig) -> Components:

        return load_components(model)

    def describe(self, model: ModelConfig) -> ModelDescription:
        path = model.path or DEFAULT_REPOSITORY
        check_known(path, likely_repository(path), PUBLISHED)
        folder = local_folder(path)
        pictures = animates_pictures(path)
        published = HUNYUAN_VIDEO_15 | {"reads_pictures": pictures}
        transformer = stored_config(
            folder, "transformer", published, HunyuanVideo15Transformer3DModel
        )
        language = stored_config(folder, "text_encoder", LANGUAGE_MODEL)
        changes: dict[str, Any] = {
            "transformer": transformer,
            # Also where only the transformer's file is here.
            "latent_shape": lambda *size: (
                transformer["out_channels"],
                *VAEDecoder.empty().latent_shape(*size)[1:],
            ),
            "encoding": partial(encoding, language, picture=pictures),
        }
        if pictures:
            changes |= {
                "text_tokens": TEXT_TOKENS + IMAGE_TOKENS,
                "image_tokens": IMAGE_TOKENS,
            }
            changes["encoder_gb"] = TEXT_ENCODER_GB + VISION_GB
        if folder and (size := stored_bytes(str(folder / "vae"))):
            changes["decoder_gb"] = size / 1e9
        return published_model(**changes)

    def requirements(self, model: ModelConfig) -> list[Requirement]:
        path = model.path or DEFAULT_REPOSITORY
        pictures = animates_pictures(path)
        parts: tuple[str, ...] = TEXT_PARTS
        size = DOWNLOAD_GB
        if pictures:
            parts = parts + PICTURE_PARTS
            size = size + VISION_GB
        whole = requirement(
            "HunyuanVideo-1.5",
            path,
            parts,
            likely_repository(path),
            kind=HunyuanVideo15Transformer3DModel.__name__,
            gigabytes=size,
        )
        licence = (
            "not licensed in the European Union, the United Kingdom and South Korea"
        )
        return [replace(whole, licence=licence)]

    def inspect(self, model: ModelConfig) -> WeightFacts:

        return find_model(model, download=False)[1]

    def pipeline_of(self, model: ModelConfig) -> tuple[str, str]:
        if model.path and animates_pictures(model.path):
            return IMAGE_TO_VIDEO, "image-to-video"
        return super().pipeline_of(model)

    def pipeline_base(self, model: ModelConfig) -> str:
        """See `ModelFamily.pipeline_base`.

        A folder without the whole pipeline is of the repository that it most likely
        came from. A path that no longer exists is returned as it is: code that fails on
        it is better than another model.
        """
        if model.path is None:
            return DEFAULT_REPOSITORY
        if (
            super().pipeline_base(model) is None
            and (Path(model.path) / "transformer" / "config.json").is_file()
        ):
            return likely_repository(model.path)
        return model.path
