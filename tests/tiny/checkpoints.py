"""Tiny random HunyuanVideo-1.5 models in diffusers' layout, so that the code that loads
real weights is run.

`save_diffusers_layout` writes what `HunyuanVideo15Pipeline.save_pretrained` writes:
every component of the published repositories with its real class, a tokenizer with the
chat template and special tokens of Qwen2.5-VL, and a system prompt of 108 tokens.
`build_image_to_video` makes the pipeline from pictures.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

LATENT_CHANNELS = 4
TEXT_DIM = 32
GLYPH_DIM = 24
IMAGE_TOKENS = 4
PREFIX_TOKENS = 108
"""Tokens of the system prompt and the start of the user's turn, which the pipeline
crops.
"""

TRANSFORMER: dict[str, Any] = {
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    # The text refiner's width is the class's own 4, whatever this says.
    "mlp_ratio": 2.0,
    "text_embed_dim": TEXT_DIM,
    "text_embed_2_dim": GLYPH_DIM,
    "image_embed_dim": 16,
    "rope_axes_dim": [4, 4, 4],
    "task_type": "t2v",
}
VAE: dict[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": [8, 8, 16, 16, 16],
    "layers_per_block": 1,
}
LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": TEXT_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [1, 1, 2],
    },
}
BYT5: dict[str, Any] = {
    "d_model": GLYPH_DIM,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
    "endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GLYPH_TOKENS = [
    *(f"<color-{index}>" for index in range(3)),
    "<en-font-0>",
    "<cn-font-1>",
]
"""Annotations of the glyph encoder: special tokens of its tokenizer."""


def build_pipeline(
    *, seed: int = 0, shift: float = 5.0, guidance_scale: float = 6.0
) -> HunyuanVideo15Pipeline:
    """A whole stock text-to-video pipeline, float32, on the CPU, its weights a function
    of `seed`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = chat_tokenizer()
        glyph_tokenizer = ByT5Tokenizer()
        glyph_tokenizer.add_tokens(GLYPH_TOKENS, special_tokens=True)
        pipeline = HunyuanVideo15Pipeline(
            text_encoder=Qwen2_5_VLTextModel(
                Qwen2_5_VLTextConfig(vocab_size=len(tokenizer), **LANGUAGE_MODEL)
            ),
            tokenizer=tokenizer,
            transformer=HunyuanVideo15Transformer3DModel(**TRANSFORMER),
            vae=AutoencoderKLHunyuanVideo15(**VAE),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            text_encoder_2=T5EncoderModel(
                T5Config(vocab_size=len(glyph_tokenizer), **BYT5)
            ),
            tokenizer_2=glyph_tokenizer,
            guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
        )
        for name in ("text_encoder", "transformer", "vae", "text_encoder_2"):
            make_distinct(getattr(pipeline, name).eval())
        # Random decoders stay close to grey; this one covers the range of pixels, and
        # goes beyond it here and there.
        pipeline.vae.decoder.conv_out.conv.weight.data *= 1.5
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_diffusers_layout(folder: Path, **options: Any) -> HunyuanVideo15Pipeline:
    """Write the layout of hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v,
    and return the pipeline in it.

    `options` are those of `build_pipeline`.
    """
    pipeline = build_pipeline(**options)
    pipeline.save_pretrained(folder)
    return pipeline


def build_image_to_video() -> HunyuanVideo15ImageToVideoPipeline:
    """The same pipeline from pictures, with a SigLIP of `IMAGE_TOKENS` tokens; videos
    have about 64x64 pixels.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        siglip = SiglipVisionModel(
            SiglipVisionConfig(image_size=28, patch_size=14, **sizes)
        ).eval()
        make_distinct(siglip)
    processor = SiglipImageProcessor(size={"height": 28, "width": 28})
    components = build_pipeline().components
    pipeline = HunyuanVideo15ImageToVideoPipeline(
        image_encoder=siglip, feature_extractor=processor, **components
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.target_size = 64
    return pipeline


def picture(file: Path, *, seed: int = 0, size: tuple[int, int] = (96, 64)) -> Path:
    """Write a picture of random blocks, (width, height) pixels."""
    blocks = torch.randint(
        0,
        256,
        (4, 6, 3),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.uint8,
    )
    Image.fromarray(blocks.numpy()).resize(size).save(file)
    return file


def chat_tokenizer(
    system: str = HunyuanVideo15Pipeline._get_mllm_prompt_embeds.__defaults__[2],
    prefix_tokens: int = PREFIX_TOKENS,
) -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen's kind that knows the words of the system prompt, so
    that it is as long as the real one.

    Other words are spelled in bytes and short pieces.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator([system, "system\nuser\nassistant\n"], trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    words = dict.fromkeys(
        [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    )
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        padding_side="right",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[1:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    assert len(tokenizer(prefix).input_ids) == prefix_tokens
    return tokenizer


def make_distinct(model: nn.Module) -> None:
    """Move norm scales and biases off 1 and 0, so that one mistaken for another shows."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)


def copy_tree(source: Path, target: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(source, target))
