"""Code for diffusers' `WanTransformer3DModel`: its velocity, fused or by diffusers'
forward, closed forms and names.

Facts used here (diffusers 0.36 - 0.42, `WanTransformer3DModel`):
* a prompt is always 512 tokens, its own and zeros: there is no mask, and the zeros act,
  because the text projection has biases;
* the time input is sigma * 1000 and stays float32. `UniPCMultistepScheduler`, which the
  repositories name, rounds it to whole numbers;
* time embedding, modulation tables and norms are float32 also in a bfloat16 model
  (`_keep_in_fp32_modules`);
* one projection of the time embedding serves all blocks, and each adds its table: no
  weight of a block's modulation is worth a table of its results;
* names of adapters elsewhere: diffusion_model.blocks.0.self_attn.q.lora_A.weight in
  ComfyUI, with the names of the official class;
  lora_unet_blocks_0_self_attn_q.lora_down.weight in musubi-tuner.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from sage_fast.models.family import Client, ModelFamily, Work
from sage_fast.models.transformer import velocity_dtype
from sage_fast.models.wan.fused import accelerate_wan
from sage_fast.records import PromptEmbeds

TEXT_TOKENS = 512

NAMES = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
"""Linear layers of a block in diffusers -> in the official class, and so in ComfyUI."""

OUTER_NAMES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}
"""The same outside the blocks, where adapters for fewer steps have layers too."""


class WanTransformer(ModelFamily):
    """The half of a family that computes with this transformer."""

    transformer_class = "WanTransformer3DModel"
    blocks = "blocks"
    lora_targets = tuple(NAMES)
    in_float32 = tuple(WanTransformer3DModel._keep_in_fp32_modules)
    plans_stock = True
    names: ClassVar = {layer: (official, official) for layer, official in NAMES.items()}
    official_blocks = "blocks"
    outer_names = OUTER_NAMES
    # 2.1 or without a number; text-to-video.
    architectures = r"(?!.*(wan(video)?2[02-9]|i2v)).*wan.*"
    pipeline = "WanPipeline"
    scheduler = ("UniPCMultistepScheduler", "flow_shift")
    clients: ClassVar = {
        "diffusers": Client("diffusers"),
        "comfyui": Client(
            "ComfyUI",
            "# then load it with the node LoraLoaderModelOnly behind the Wan 2.1 "
            "model\n"
            "cp {folder}/{file} ComfyUI/models/loras/",
        ),
        "musubi": Client(
            "musubi-tuner",
            "# musubi-tuner, with the other options of a generation\n"
            "python src/musubi_tuner/wan_generate_video.py --lora_weight "
            "{folder}/{file}",
        ),
        "peft": Client("peft"),
    }

    fuse = staticmethod(accelerate_wan)

    @staticmethod
    def build(config: Mapping[str, Any]) -> WanTransformer3DModel:
        return WanTransformer3DModel(
            **{key: value for key, value in config.items() if not key.startswith("_")}
        )

    @staticmethod
    def velocity(
        transformer: WanTransformer3DModel,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
    ) -> Tensor:
        # The type of the products: a 16-bit model keeps other weights in float32.
        dtype = transformer.patch_embedding.weight.dtype
        text = latents.new_zeros(
            len(prompts), TEXT_TOKENS, prompts[0].text.shape[1], dtype=dtype
        )
        for row, prompt in zip(text, prompts, strict=True):
            row[: len(prompt.text)] = prompt.text
        result: Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma.to(latents.device) * 1000.0,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        return result.to(velocity_dtype(transformer))

    @staticmethod
    def empty_prompt(
        config: Mapping[str, Any], tokens: int, dtype: torch.dtype
    ) -> PromptEmbeds:
        text = torch.empty(tokens, config["text_dim"], dtype=dtype, device="meta")
        # There is no glyph encoder, so any width of no tokens will do.
        return PromptEmbeds(text=text, glyph=torch.empty(0, 1, device="meta"))


def forward_work(
    config: Mapping[str, Any], video_tokens: int, text_tokens: int
) -> Work:
    """One forward: in each block 12 N D^2 + 4 N D f linear FLOPs, and for the 512 keys
    and values of the text 4 L D^2.

    N, L: tokens of the video and of the text, f: width of the feed-forward. Attention
    is over N and over L keys.

    Args:
        config: of diffusers' transformer.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    f = config["ffn_dim"]
    n = video_tokens
    block = 2 * n * (6 * d * d + 2 * d * f) + 2 * TEXT_TOKENS * 2 * d * d
    ends = (
        2
        * n
        * d
        * math.prod(config["patch_size"])
        * (config["in_channels"] + config["out_channels"])
    )
    # The text's projection of two layers; the time's embedding of two, and its
    # projection to six vectors.
    ends += 2 * TEXT_TOKENS * (config["text_dim"] * d + d * d) + 2 * (
        config["freq_dim"] * d + 7 * d * d
    )
    attention = 4 * n * (n + TEXT_TOKENS) * d
    return Work(
        linear=config["num_layers"] * block + ends,
        attention=config["num_layers"] * attention,
    )
