"""A tiny Wan with random weights, in the layout of the published repositories."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

TEXT_WIDTH = 32
SENTENCE = (
    "a red blue green circle square triangle moving left right up down fox in the snow"
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {
        "<pad>": 0,
        "</s>": 1,
        "<unk>": 2,
        **{word: 3 + i for i, word in enumerate(SENTENCE.split())},
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
    )


SIZES: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def tiny_transformer(seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _noisy(WanTransformer3DModel(**SIZES | changes))


AUTOENCODER: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [-0.5, 0.3, 0.1, 0.2],
    "latents_std": [2.0, 1.5, 1.0, 0.8],
}
SECOND = {
    "decoder_base_dim": 12,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
"""Differences of Wan 2.2 5B's autoencoder."""

IMAGE_WIDTH = 20
READS_PICTURES = {"in_channels": 12, "image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 24}
"""Differences of image-to-video's transformer: four channels of a mask and four of the
picture, and its tokens.
"""


def build_wan(
    flow_shift: float = 3.0, kind: str = "2.1"
) -> WanPipeline | WanImageToVideoPipeline:
    """Of text-to-video, or of Wan 2.2 `5B`, or of `i2v`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vae = AutoencoderKLWan(**AUTOENCODER | (SECOND if kind == "5B" else {}))
        sizes = {
            "d_model": TEXT_WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 2,
        }
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=24, feed_forward_proj="gated-gelu", dropout_rate=0.0, **sizes
            )
        )
        parts = _noisy(vae), _noisy(encoder)
        vision = _noisy(
            CLIPVisionModel(
                CLIPVisionConfig(
                    hidden_size=IMAGE_WIDTH,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    image_size=32,
                    patch_size=8,
                )
            )
        )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=flow_shift,
        num_train_timesteps=1000,
    )
    whole: dict[str, Any] = {
        "tokenizer": tokenizer(),
        "text_encoder": parts[1],
        "vae": parts[0],
        "scheduler": scheduler,
        "transformer": tiny_transformer(**READS_PICTURES if kind == "i2v" else {}),
    }
    if kind == "i2v":
        pipeline = WanImageToVideoPipeline(
            image_encoder=vision,
            image_processor=CLIPImageProcessor(
                size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
            ),
            **whole,
        )
    else:
        pipeline = WanPipeline(expand_timesteps=kind == "5B", **whole)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_wan(folder: Path, kind: str = "2.1") -> Path:
    build_wan(5.0 if kind == "5B" else 3.0, kind).save_pretrained(folder)
    return folder


def save_pair(folder: Path) -> Path:
    """Two experts, as Wan 2.2 A14B has them."""
    one = build_wan()
    WanPipeline(
        tokenizer=one.tokenizer,
        text_encoder=one.text_encoder,
        vae=one.vae,
        scheduler=one.scheduler,
        transformer=one.transformer,
        transformer_2=tiny_transformer(7),
        boundary_ratio=0.875,
    ).save_pretrained(folder)
    return folder


def _noisy(module: Any) -> Any:
    """In evaluation mode, with no weight at zero or one, as it is after its
    initialisation.
    """
    for parameter in module.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return module.eval()
