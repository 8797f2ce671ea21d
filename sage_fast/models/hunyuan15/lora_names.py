"""LoRA adapters under the names of other programs: the official classes, and ComfyUI.

official    double_blocks.0.img_attn_q.lora_A.weight
comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight: q, k and v are one layer

Facts: `HunyuanVideo_1_5_DiffusionTransformer` of the official repository; `model_lora_keys_unet` of ComfyUI.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sage_fast.models.transformer import Layout

NAMES = {
    "norm1.linear": ("img_mod.linear", "img_mod.lin"),
    "attn.to_q": ("img_attn_q", "img_attn.qkv"),
    "attn.to_k": ("img_attn_k", "img_attn.qkv"),
    "attn.to_v": ("img_attn_v", "img_attn.qkv"),
    "attn.to_out.0": ("img_attn_proj", "img_attn.proj"),
    "ff.net.0.proj": ("img_mlp.fc1", "img_mlp.0"),
    "ff.net.2": ("img_mlp.fc2", "img_mlp.2"),
    "norm1_context.linear": ("txt_mod.linear", "txt_mod.lin"),
    "attn.add_q_proj": ("txt_attn_q", "txt_attn.qkv"),
    "attn.add_k_proj": ("txt_attn_k", "txt_attn.qkv"),
    "attn.add_v_proj": ("txt_attn_v", "txt_attn.qkv"),
    "attn.to_add_out": ("txt_attn_proj", "txt_attn.proj"),
    "ff_context.net.0.proj": ("txt_mlp.fc1", "txt_mlp.0"),
    "ff_context.net.2": ("txt_mlp.fc2", "txt_mlp.2"),
}
"""Linear layers of a block in diffusers -> (in the official classes, in ComfyUI). Layers of one ComfyUI name stand
below each other in it, in the order of the table."""


def named_adapter(values: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """A LoRA adapter by the names of a layout, from one by diffusers' names with a scale (alpha / rank) of 1.

    diffusers' has every tensor twice, for `load_lora_adapter` with its default prefix and with prefix=None.
    """
    if layout == "diffusers":
        return {**values, **{f"transformer.{name}": value.clone() for name, value in values.items()}}
    adapter: dict[str, Tensor] = {}
    for module in dict.fromkeys(re.sub(r"\.lora_[AB]\.weight$", "", name) for name in values):
        _, number, layer = module.split(".", 2)
        official, comfyui = NAMES[layer]
        down, up = values[f"{module}.lora_A.weight"], values[f"{module}.lora_B.weight"]
        name = f"double_blocks.{number}.{official}"
        if layout == "comfyui":
            name = f"diffusion_model.double_blocks.{number}.{comfyui}"
            joined = [other for other, (_, theirs) in NAMES.items() if theirs == comfyui]
            # The joined layer's rank is the sum of its parts' ranks: each has its own rows and columns of lora_B.
            rows = up.new_zeros(len(joined), *up.shape)
            rows[joined.index(layer)] = up
            down = torch.cat([*_of(adapter, f"{name}.lora_A.weight"), down])
            up = torch.cat([*_of(adapter, f"{name}.lora_B.weight"), rows.flatten(0, 1)], dim=1)
        adapter |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return adapter


def _of(adapter: Mapping[str, Tensor], name: str) -> list[Tensor]:
    return [adapter[name]] if name in adapter else []
