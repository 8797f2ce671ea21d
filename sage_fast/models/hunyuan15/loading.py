"""HunyuanVideo-1.5 from the public checkpoints: the model family `hunyuan15`.

`model.path` is one of

* a folder as diffusers saves a `HunyuanVideo15Pipeline`: transformer/, vae/,
  text_encoder/, tokenizer/, ...; or a `HunyuanVideo15ImageToVideoPipeline`, with
  image_encoder/ and feature_extractor/ too;
* the id of such a repository on the Hugging Face hub, downloaded into its cache, or
  taken from there when offline.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, WeightFacts
from sage_fast.models.hub import fetch_command
from sage_fast.models.hunyuan15 import (
    DEFAULT_REPOSITORY,
    IMAGE_TO_VIDEO,
    PICTURE_PARTS,
    TEXT_PARTS,
    likely_repository,
)
from sage_fast.models.hunyuan15.text_encoders import (
    ENCODERS,
    VISION,
    HunyuanPromptEncoder,
)
from sage_fast.models.hunyuan15.video_vae import VAEDecoder
from sage_fast.models.snapshot import (
    cache_folder,
    find_folder,
    load_vae,
    model_device,
    published_shift,
    require_parts,
)
from sage_fast.models.stored import open_transformer, read_json

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
            ),
            memory_gib=model.decode_limit_gib,
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
    index = (
        read_json(root / "model_index.json")
        if (root / "model_index.json").is_file()
        else {}
    )
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
