"""A tiny Qwen-Image with random weights, in the layout of the published repository."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.tiny.checkpoints import LANGUAGE_MODEL, chat_tokenizer, make_distinct

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)


def build_qwen_image() -> QwenImagePipeline:
    tokenizer = chat_tokenizer(SYSTEM, 34)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        vision = {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
        }
        encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config={"vocab_size": len(tokenizer), **LANGUAGE_MODEL},
                vision_config={**vision, "out_hidden_size": 32},
            )
        )
        transformer = QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=LANGUAGE_MODEL["hidden_size"],
            axes_dims_rope=(8, 4, 4),
        )
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
        for model in (encoder, transformer, vae):
            make_distinct(model.eval())
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, shift_terminal=0.02
        ),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_qwen_image(folder: Path) -> Path:
    build_qwen_image().save_pretrained(folder)
    return folder
