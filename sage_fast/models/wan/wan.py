"""The model family `wan`: Wan 2.1 and Wan 2.2 5B from their repositories in diffusers'
layout, and its description.

`model.path` is a folder as diffusers saves a `WanPipeline` or a
`WanImageToVideoPipeline`, or the id of such a repository on the hub; all sizes are one
class. Wan 2.1's image-to-video reads a picture as channels and as tokens. The 5B model
has a noise level per token (`expand_timesteps`), so it continues a picture, if its
prompt has one. Wan 2.2 with two experts (`transformer_2`) is the family `wan_experts`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import ftfy  # noqa: F401  where it is missing, diffusers cleans prompts otherwise, without a word
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from sage_fast.config.errors import ConfigError
from sage_fast.config.sections import ModelConfig
from sage_fast.models.family import Components, ModelDescription, WeightFacts
from sage_fast.models.hub import (
    Requirement,
    cache_folder,
    check_known,
    fetch_command,
    find_folder,
    hashable,
    is_repository,
    load_vae,
    local_folder,
    model_device,
    published_shift,
    require_parts,
    requirement,
    stored_config,
    stored_value,
)
from sage_fast.models.stored import open_transformer, read_json
from sage_fast.models.wan import (
    DEFAULT_REPOSITORY,
    LARGE_REPOSITORY,
    PAIR_REPOSITORY,
    PICTURE_720P_REPOSITORY,
    PICTURE_REPOSITORY,
    SECOND_REPOSITORY,
    likely_repository,
)
from sage_fast.models.wan.block import TEXT_TOKENS
from sage_fast.models.wan.components import ENCODERS, WanDecoder, WanPromptEncoder
from sage_fast.models.wan.fused import WanTransformer, forward_work, image_tokens

WAN_1_3B: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
}
"""The published text-to-video transformer, 1,418,996,800 parameters."""

WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
"""The large one, 14,288,491,584 parameters."""

WAN_14B_PICTURES = WAN_14B | {
    "in_channels": 36,
    "image_dim": 1280,
    "added_kv_proj_dim": 5120,
}
"""That of image-to-video, 16,394,878,784 parameters."""

WAN_22_5B = WAN_1_3B | {
    "num_attention_heads": 24,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
}
"""That of Wan 2.2 TI2V, 4,999,787,712 parameters."""

PUBLISHED = {
    DEFAULT_REPOSITORY: WAN_1_3B,
    LARGE_REPOSITORY: WAN_14B,
    PICTURE_REPOSITORY: WAN_14B_PICTURES,
    PICTURE_720P_REPOSITORY: WAN_14B_PICTURES,
    SECOND_REPOSITORY: WAN_22_5B,
    PAIR_REPOSITORY: WAN_14B,
}
"""Repositories -> their transformer, or each of two."""

VAE_22: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
"""The published autoencoder of Wan 2.2 5B, as far as it differs from Wan 2.1's and its
latents' mean and deviation are not asked for.
"""

TEXT_ENCODER_GB = 11.4
"""Published UMT5-XXL's encoder, 5.68 B in bfloat16."""

DOWNLOAD_GB = {
    DEFAULT_REPOSITORY: 5.7 + 0.5,
    LARGE_REPOSITORY: 57.2 + 0.5,
    PICTURE_REPOSITORY: 65.6 + 0.5 + 2.5,
    PICTURE_720P_REPOSITORY: 65.6 + 0.5 + 2.5,
    SECOND_REPOSITORY: 20.0 + 2.8,
    PAIR_REPOSITORY: 114.4 + 0.5,
}
TEXT_DOWNLOAD_GB = 22.7
"""1e9 bytes of a download in float32, at most: transformers, autoencoder and CLIP; the
text encoder.
"""

TEXT_ENCODER: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 10240,
    "num_layers": 24,
    "d_kv": 64,
    "num_heads": 64,
}
"""The published UMT5-XXL."""

PARTS = ("transformer", "vae", *ENCODERS)
PICTURE_PARTS = ("image_encoder", "image_processor")
"""Folders in diffusers' layout, and those of image-to-video of Wan 2.1 alone."""

PICTURES = PICTURE_REPOSITORY, PICTURE_720P_REPOSITORY
"""Repositories of image-to-video of Wan 2.1."""

IMAGE_TO_VIDEO = "WanImageToVideoPipeline"


class Wan(WanTransformer):
    """See `ModelFamily`."""

    licence = "apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"
    repository = DEFAULT_REPOSITORY
    parts: tuple[str, ...] = PARTS

    def load(self, model: ModelConfig) -> Components:
        cache = cache_folder(model)
        root, facts = self.find(model)
        transformer, weights = open_transformer(
            WanTransformer3DModel,
            root / "transformer",
            getattr(torch, model.dtype),
            buffers=("rope",),
        )
        # Its authors decode in float32 on a GPU too, and float16 overflows.
        vae = load_vae(AutoencoderKLWan, root / "vae", model.decode_dtype(on_gpu=False))
        return Components(
            transformer=transformer,
            weights=weights,
            prompt_encoder=WanPromptEncoder(
                root=root,
                parts=_encoders(facts.pictures),
                cache=cache / "prompts",
                device=model_device(model),
            ),
            video_decoder=WanDecoder(vae, memory_gib=model.decode_limit_gib),
            **vars(facts),
        )

    def describe(self, model: ModelConfig) -> ModelDescription:
        path = model.path or self.repository
        likely = self._likely(path)
        check_known(path, likely, PUBLISHED)
        folder = local_folder(path)
        published = VAE_22 if likely == SECOND_REPOSITORY else {}
        autoencoder = stored_config(folder, "vae", published, AutoencoderKLWan)
        transformer = stored_config(
            folder, "transformer", PUBLISHED[likely], WanTransformer3DModel
        )
        images = image_tokens(transformer)
        decoder = WanDecoder.empty(config=hashable(autoencoder))
        decoding = WanDecoder.description(autoencoder)
        whole = decoding["decoding"]
        # Its authors decode in float32 on a GPU too.
        decoding["decoding"] = lambda latent, videos, section, on_gpu: whole(
            latent, videos, section, False
        )
        return ModelDescription(
            transformer=transformer,
            text_tokens=TEXT_TOKENS + images,
            image_tokens=images,
            forward_work=forward_work,
            decoder_gb=sum(p.nbytes for p in decoder.vae.parameters()) / 1e9,
            **decoding,
            encoder_gb=TEXT_ENCODER_GB,
            encoding=partial(
                _encoding, stored_config(folder, "text_encoder", TEXT_ENCODER)
            ),
        )

    def _likely(self, path: str) -> str:
        """See `likely_repository`. ConfigError for one of the other family."""
        likely = likely_repository(path)
        untold = stored_value(path, "model_index.json", "_class_name") is None
        if untold and not is_repository(path) and self.repository == PAIR_REPOSITORY:
            return PAIR_REPOSITORY
        pair = likely == PAIR_REPOSITORY
        if pair is not (self.repository == PAIR_REPOSITORY):
            kind = "of two experts" if pair else "one transformer"
            family = "wan_experts" if pair else "wan"
            raise ConfigError(
                f"model.path is {path!r}, which is {kind}. Set model.family to {family}."
            )
        return likely

    def requirements(self, model: ModelConfig) -> list[Requirement]:
        path = model.path or self.repository
        likely = self._likely(path)
        parts = self.parts + (PICTURE_PARTS if likely in PICTURES else ())
        include = ["model_index.json", *(f"{part}/*" for part in (*parts, "scheduler"))]
        size = DOWNLOAD_GB[likely] + TEXT_DOWNLOAD_GB
        return [
            requirement(
                "Wan",
                path,
                parts,
                likely,
                *include,
                kind=WanTransformer3DModel.__name__,
                gigabytes=size,
            )
        ]

    def inspect(self, model: ModelConfig) -> WeightFacts:
        return self.find(model, download=False)[1]

    def pipeline_of(self, model: ModelConfig) -> tuple[str, str]:
        if likely_repository(model.path or self.repository) in PICTURES:
            return IMAGE_TO_VIDEO, "image-to-video"
        return super().pipeline_of(model)

    def pipeline_base(self, model: ModelConfig) -> str:
        return model.path or self.repository

    def find(
        self, model: ModelConfig, *, download: bool = True
    ) -> tuple[Path, WeightFacts]:
        """The folder of the weights, and their facts. ValueError for missing files, and
        for what cannot be trained.
        """
        path = model.path or DEFAULT_REPOSITORY
        parts = (*PARTS, *PICTURE_PARTS, "scheduler")
        likely = likely_repository(path)
        root = find_folder(path, parts, likely, "convert_wan", download=download)
        file = root / "model_index.json"
        index = read_json(file) if file.is_file() else {"_class_name": "WanPipeline"}
        kind = index.get("_class_name")
        command = fetch_command(DEFAULT_REPOSITORY)
        # A pipeline's file has [null, null] for a part that it lacks.
        for wrong, why in (
            (
                kind not in ("WanPipeline", IMAGE_TO_VIDEO),
                f"is of a {kind}, not of a WanPipeline or {IMAGE_TO_VIDEO}",
            ),
            (
                (index.get("transformer_2") or [None])[0] is not None,
                "has two experts (Wan 2.2 A14B), which are model.family wan_experts",
            ),
            (
                index.get("boundary_ratio") is not None,
                "says at which noise level two experts take turns (Wan 2.2 A14B)",
            ),
            (
                (root / "transformer_2").exists(),
                "has transformer_2 beside it, one of two experts (Wan 2.2 A14B)",
            ),
        ):
            if wrong:
                raise ValueError(
                    f"These weights cannot be trained: {file} {why}. Use Wan 2.1 or Wan 2.2 "
                    f"5B, for example: {command}"
                )
        require_parts(root, PARTS, path, likely)
        # With a noise level per token the first frame may be a picture's.
        pictures = None if index.get("expand_timesteps") else False
        if image_tokens(read_json(root / "transformer" / "config.json")):
            pictures = True
            require_parts(root, PICTURE_PARTS, path, likely)
        return root, WeightFacts(shift=published_shift(root), pictures=pictures)


def _encoders(pictures: bool | None) -> tuple[str, ...]:
    """Folders of what encodes prompts, see `WeightFacts.pictures`."""
    if pictures is False:
        return ENCODERS
    return (*ENCODERS, "vae", *(PICTURE_PARTS if pictures else ()))


def _encoding(config: dict[str, Any], words: float) -> tuple[float, float]:
    """FLOPs of the text encoder for a prompt of so many words, and bytes of its tokens
    in bfloat16.
    """
    width = config["d_model"]
    inner = config["d_kv"] * config["num_heads"]
    tokens = min(4 / 3 * words + 1, TEXT_TOKENS)
    # Of a layer: queries, keys, values and output; and the three matrices of its gated
    # feed-forward.
    weights = 4 * width * inner + 3 * width * config["d_ff"]
    return 2 * config["num_layers"] * (
        weights * tokens + 2 * inner * tokens**2
    ), 2 * tokens * width
