"""Names of HunyuanVideo-1.5's transformer weights in other programs, there and back: whole models and LoRA adapters.

diffusers   transformer_blocks.0.attn.to_q
official    double_blocks.0.img_attn_q; the refiner's q, k and v are one tensor, the final modulation is (shift, scale)
comfyui     as official, with q, k and v of every attention in one tensor; adapters are named by the modules of the
            loaded model: diffusion_model.double_blocks.0.img_attn.qkv

Facts: `HunyuanVideo_1_5_DiffusionTransformer` of the official repository; diffusers'
convert_hunyuan_video1_5_to_diffusers.py; `process_unet_state_dict` and `model_lora_keys_unet` of ComfyUI.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sage_fast.models.transformer import Layout, StoredTensor

TARGET_SIZE = {"480p": 640, "720p": 960}
"""diffusers' `target_size` of an official `ideal_resolution`."""

FINAL_MODULATION = "final_layer.adaLN_modulation.1"


@dataclass(frozen=True)
class Renaming:
    """Names of modules: whole ones, and those inside the numbered blocks of a stack.

    whole: name -> new name. stacks: name of a stack -> its new name, and the names inside a block.

    Example: `Renaming({"img_in.proj": "x_embedder.proj"}, {})("img_in.proj")` is `x_embedder.proj`.
    """

    whole: Mapping[str, str]
    stacks: Mapping[str, tuple[str, Mapping[str, str]]]

    def __call__(self, module: str) -> str:
        """The new name. ValueError for a module that HunyuanVideo-1.5 does not have."""
        if module in self.whole:
            return self.whole[module]
        block = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", module)
        if block and block[1] in self.stacks:
            stack, inside = self.stacks[block[1]]
            if block[3] in inside:
                return f"{stack}.{block[2]}.{inside[block[3]]}"
        raise ValueError(f"{module} is no module of HunyuanVideo-1.5")

    def inverse(self) -> "Renaming":
        """The way back."""
        return Renaming(
            {new: old for old, new in self.whole.items()},
            {new: (old, {n: o for o, n in inside.items()}) for old, (new, inside) in self.stacks.items()},
        )


to_diffusers = Renaming(
    {
        "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
        "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
        "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        "txt_in.input_embedder": "context_embedder.proj_in",
        "byt5_in.layernorm": "context_embedder_2.norm",
        "byt5_in.fc1": "context_embedder_2.linear_1",
        "byt5_in.fc2": "context_embedder_2.linear_2",
        "byt5_in.fc3": "context_embedder_2.linear_3",
        "vision_in.proj.0": "image_embedder.norm_in",
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        "vision_in.proj.4": "image_embedder.norm_out",
        "img_in.proj": "x_embedder.proj",
        "cond_type_embedding": "cond_type_embed",
        FINAL_MODULATION: "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    {
        "txt_in.individual_token_refiner.blocks": (
            "context_embedder.token_refiner.refiner_blocks",
            {
                "norm1": "norm1",
                "norm2": "norm2",
                # One tensor in the official files, which are taken apart before they are renamed.
                "self_attn_q": "attn.to_q",
                "self_attn_k": "attn.to_k",
                "self_attn_v": "attn.to_v",
                "self_attn_proj": "attn.to_out.0",
                "mlp.fc1": "ff.net.0.proj",
                "mlp.fc2": "ff.net.2",
                "adaLN_modulation.1": "norm_out.linear",
            },
        ),
        "double_blocks": (
            "transformer_blocks",
            {
                "img_mod.linear": "norm1.linear",
                "txt_mod.linear": "norm1_context.linear",
                "img_attn_q": "attn.to_q",
                "img_attn_k": "attn.to_k",
                "img_attn_v": "attn.to_v",
                "img_attn_q_norm": "attn.norm_q",
                "img_attn_k_norm": "attn.norm_k",
                "img_attn_proj": "attn.to_out.0",
                "txt_attn_q": "attn.add_q_proj",
                "txt_attn_k": "attn.add_k_proj",
                "txt_attn_v": "attn.add_v_proj",
                "txt_attn_q_norm": "attn.norm_added_q",
                "txt_attn_k_norm": "attn.norm_added_k",
                "txt_attn_proj": "attn.to_add_out",
                "img_mlp.fc1": "ff.net.0.proj",
                "img_mlp.fc2": "ff.net.2",
                "txt_mlp.fc1": "ff_context.net.0.proj",
                "txt_mlp.fc2": "ff_context.net.2",
            },
        ),
    },
)
to_official = to_diffusers.inverse()


# ---------------------------------------------------------------------------------------------- into diffusers


@dataclass(frozen=True)
class Recipe:
    """How one tensor of the converted model is made: `change` of the tensor `source` of the official files.

    Example: `Recipe("final_layer.adaLN_modulation.1.bias", swap_halves)`
    """

    source: str
    change: Callable[[Tensor], Tensor] | None = None


def swap_halves(weight: Tensor) -> Tensor:
    """(shift, scale) to (scale, shift) along the first dimension, and back."""
    first, second = weight.chunk(2)
    return torch.cat([second, first])


def _third(index: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.chunk(3)[index].clone()


def transformer_recipes(names: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by diffusers' name for the official names of a transformer. ValueError for a name it does not know."""
    recipes: dict[str, Recipe] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        if module.endswith("_attn_qkv"):
            for index, part in enumerate("qkv"):
                recipes[f"{to_diffusers(module.removesuffix('qkv') + part)}.{kind}"] = Recipe(name, _third(index))
        else:
            change = swap_halves if module == FINAL_MODULATION else None
            recipes[f"{to_diffusers(module)}.{kind}"] = Recipe(name, change)
    return recipes


def own_adapter(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A LoRA adapter by diffusers' names, from a file of diffusers' or the official layout.

    The output rows of a layer are those of its lora_B, so what a recipe does to the weight it does to lora_B.
    ValueError for a layer that the official transformer does not have.
    """
    values = {name.removeprefix("transformer."): value for name, value in values.items()}
    modules = {re.sub(r"\.lora_[AB]\.weight$", "", name) for name in values}
    if not any(m.startswith("double_blocks.") for m in modules):
        return values
    adapter = {}
    for name, recipe in transformer_recipes([f"{module}.weight" for module in sorted(modules)]).items():
        ours, theirs = name.removesuffix(".weight"), recipe.source.removesuffix(".weight")
        adapter[f"{ours}.lora_A.weight"] = values[f"{theirs}.lora_A.weight"]
        rows = values[f"{theirs}.lora_B.weight"]
        adapter[f"{ours}.lora_B.weight"] = recipe.change(rows) if recipe.change else rows
    return adapter


# ---------------------------------------------------------------------------------------------- out of diffusers


def stored_weights(names: Iterable[str], layout: Layout) -> dict[str, StoredTensor]:
    """The tensors of a layout by their names there, from diffusers' names. ValueError for an unknown name."""
    stored: dict[str, StoredTensor] = {}
    joined = {"diffusers": "", "official": "self_attn", "comfyui": "self_attn|img_attn|txt_attn"}[layout]
    for name in names:
        if layout == "diffusers":
            stored[name] = StoredTensor(sources={0: name})
            continue
        module, _, kind = name.rpartition(".")
        theirs = to_official(module)
        part = re.search(rf"(?:{joined})_([qkv])$", theirs)
        if part is None:
            change = swap_halves if theirs == FINAL_MODULATION else None
            stored[f"{theirs}.{kind}"] = StoredTensor(sources={0: name}, change=change)
        else:
            whole = stored.setdefault(f"{theirs[:-1]}qkv.{kind}", StoredTensor(sources={}, parts=3))
            whole.sources["qkv".index(part[1])] = name
    return stored


def stored_adapter(values: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """A LoRA adapter of a layout, from one by diffusers' names with a scale (alpha / rank) of 1.

    q, k and v of one tensor have the sum of their ranks: their lora_A stand one below the other, their lora_B in the
    rows of their own part. diffusers' has every tensor twice, for `load_lora_adapter` with its default prefix and
    with prefix=None.
    """
    if layout == "diffusers":
        return {**values, **{f"transformer.{name}": value.clone() for name, value in values.items()}}
    modules = dict.fromkeys(re.sub(r"\.lora_[AB]\.weight$", "", name) for name in values)
    adapter = {}
    for name, tensor in stored_weights([f"{module}.weight" for module in modules], layout).items():
        places = sorted(tensor.sources)
        layers = [tensor.sources[place].removesuffix(".weight") for place in places]
        down = [values[f"{layer}.lora_A.weight"] for layer in layers]
        up = [values[f"{layer}.lora_B.weight"] for layer in layers]
        rows = up[0].new_zeros(tensor.parts, len(up[0]), sum(part.shape[1] for part in up))
        column = 0
        for place, part in zip(places, up, strict=True):
            rows[place, :, column : column + part.shape[1]] = part
            column += part.shape[1]
        module = name.removesuffix(".weight")
        if layout == "comfyui":
            module = f"diffusion_model.{_comfyui_module(module)}"
        adapter[f"{module}.lora_A.weight"] = torch.cat(down)
        adapter[f"{module}.lora_B.weight"] = rows.flatten(0, 1)
    return adapter


_COMFYUI_LAYERS = {
    "mod.linear": "mod.lin",
    "attn_qkv": "attn.qkv",
    "attn_proj": "attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}
"""Layers of a block in the official class, and in ComfyUI's, both after `img_` or `txt_`."""


def _comfyui_module(module: str) -> str:
    stream, separator, layer = re.split("(img_|txt_)", module)
    return f"{stream}{separator}{_COMFYUI_LAYERS[layer]}"


def stored_config(config: Mapping[str, Any], layout: Layout) -> dict[str, Any] | None:
    """config.json of the official class for diffusers' configuration; None for a layout that has none of its own.

    ValueError for a transformer that is no HunyuanVideo-1.5: the official class fixes what its config.json leaves out.
    """
    if layout != "official":
        return None
    resolutions = {size: name for name, size in TARGET_SIZE.items()}
    if config["target_size"] not in resolutions or config["in_channels"] != 2 * config["out_channels"] + 1:
        raise ValueError(
            f"a transformer with target_size {config['target_size']} and {config['in_channels']} input channels is "
            "none that the official class can build"
        )
    return {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
        "attn_mode": "flash",
        "attn_param": None,
        "concat_condition": True,
        "glyph_byT5_v2": True,
        "guidance_embed": False,
        "heads_num": config["num_attention_heads"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "ideal_resolution": resolutions[config["target_size"]],
        "ideal_task": "t2v",
        "in_channels": config["out_channels"],
        "is_reshape_temporal_channels": False,
        "mlp_act_type": "gelu_tanh",
        "mlp_width_ratio": config["mlp_ratio"],
        "mm_double_blocks_depth": config["num_layers"],
        "mm_single_blocks_depth": 0,
        "out_channels": config["out_channels"],
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
        "qk_norm": True,
        "qk_norm_type": "rms",
        "qkv_bias": True,
        "rope_dim_list": list(config["rope_axes_dim"]),
        "rope_theta": int(config["rope_theta"]),
        "text_pool_type": None,
        "text_projection": "single_refiner",
        "text_states_dim": config["text_embed_dim"],
        "text_states_dim_2": None,
        "use_attention_mask": True,
        "use_cond_type_embedding": True,
        "use_meanflow": False,
        "vision_projection": "linear",
        "vision_states_dim": config["image_embed_dim"],
    }
