"""Wan over diffusers' own class and weights, `WanTransformer3DModel`: its velocity,
fused or by diffusers' forward, closed forms and names.

The fused result is that of diffusers up to rounding. All prompts are 512 tokens, so a
batch is dense.

The zeros behind a prompt are equal keys and values, so they could be one key with a
bias of log(512 - L). It is not done: attention libraries take no bias, and merging that
key by its log-sum-exp reads and writes 3 S a pass. For 100 valid tokens at 480x832x81
that is 0.10 ms a block on an H100, where it saves 0.14 ms of 15 ms.

Facts used here (diffusers 0.36 - 0.42, `WanTransformer3DModel`):
* a prompt is always 512 tokens, its own and zeros: there is no mask, and the zeros act,
  because the text projection has biases;
* the time input is sigma * 1000 and stays float32. `UniPCMultistepScheduler`, which the
  repositories name, rounds it to whole numbers;
* time embedding, modulation tables and norms are float32 also in a bfloat16 model
  (`_keep_in_fp32_modules`);
* Wan 2.2 5B takes a noise level per token. That of a picture's tokens is 0, and all
  others have one, so the fused forward computes with two;
* one projection of the time embedding serves all blocks, and each adds its table: no
  weight of a block's modulation is worth a table of its results;
* names of adapters elsewhere: diffusion_model.blocks.0.self_attn.q.lora_A.weight in
  ComfyUI, with the names of the official class;
  lora_unet_blocks_0_self_attn_q.lora_down.weight in musubi-tuner.

Shapes: B batch, C channels, F frames, H, W, N video tokens, D width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from sage_fast.config.sections import ModelConfig
from sage_fast.models.block import EPS, run_block
from sage_fast.models.family import Client, ModelFamily, Work
from sage_fast.models.fused import (
    BlockwiseForward,
    require_full_scale,
    without_autocast,
)
from sage_fast.models.stored import velocity_dtype
from sage_fast.models.wan.block import TEXT_TOKENS, Block, TwoLevels, read_block
from sage_fast.records import PromptEmbeds, with_kept


def _fused_block(self: Any, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
    """Forward of an accelerated block. It runs as a module, so that FSDP gathers the
    block's weights around it.
    """
    acceleration: WanForward = self._acceleration
    # Modulation stays float32 in a 16-bit model, as in diffusers' block.
    wide = torch.promote_types(x.dtype, torch.float32)
    affine = torch.stack([self.norm2.weight.to(wide) - 1, self.norm2.bias.to(wide)])
    table = self.scale_shift_table + time.to(wide)
    affine = affine.expand(*table.shape[:-2], 2, -1)
    modulation = torch.cat([table, affine], dim=-2)
    weights, flat = read_block(self)
    settings = acceleration.settings(x.device, x.dtype)
    if acceleration.first is not None:
        settings = replace(settings, first=acceleration.first)
    given = (x, text, modulation, *flat)
    result: Tensor = run_block(Block, settings, weights, acceleration.rotary, *given)
    return result


def _fused_forward(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_image: Tensor | None = None,
    return_dict: bool = True,
    attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Forward of an accelerated transformer, with diffusers' arguments."""
    if attention_kwargs:
        require_full_scale(attention_kwargs)
    with without_autocast(hidden_states, self.patch_embedding.weight.dtype):
        sample = self._acceleration.forward(
            hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image
        )
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


@dataclass(kw_only=True, eq=False, repr=False)
class WanForward(BlockwiseForward):
    """See `BlockwiseForward`; made by `accelerate_wan`."""

    adaln = "weights"
    computes: ClassVar = {
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "eps": EPS,
    }
    forwards = (_fused_forward, _fused_block)
    adjacent = (
        ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        ("attn2.to_k", "attn2.to_v"),
    )

    first: int | None = field(default=None, init=False)
    """Tokens of the first latent frame that are computed here, where these have another
    noise level than the others in the forward that runs.
    """

    def make_rope(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        if not latents.is_meta:
            return super().make_rope(latents)
        # A plan counts a rank's tokens as one line, which is longer than the tables.
        tokens = prod(latents.shape[2:]) // prod(self.transformer.config["patch_size"])
        table = torch.empty(
            2, tokens, self.transformer.config["attention_head_dim"], device="meta"
        )
        return table[0], table[1]

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        image: Tensor | None = None,
    ) -> Tensor:
        """Velocity (B, C, F, H, W), in the weights' dtype, of latents, timesteps, text
        (B, 512, text width) and a picture's tokens (B, 257, 1280).

        Timesteps (B,), or (B, N) one per token, of which those of the first latent
        frame are equal, and all others.
        """
        transformer = self.transformer
        patch = transformer.config["patch_size"]
        sizes = [size // p for size, p in zip(latents.shape[2:], patch, strict=True)]
        levels = None
        if timestep.ndim == 2:
            # A video of one frame has the one level twice.
            levels = 2
            timestep = timestep[:, [0, -1]].flatten()
        temb, time, text, image = transformer.condition_embedder(
            timestep, text, image, timestep_seq_len=levels
        )
        if image is not None:
            text = torch.cat([image, text], 1)
        x = self.enter(
            transformer.patch_embedding(latents)
            .flatten(2)
            .transpose(1, 2)
            .contiguous(),
            latents,
        )
        self.first = None if levels is None else self._share(sizes[1] * sizes[2])
        # (B, 6 D) to the six vectors that every block adds its table to.
        time = time.unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, text, time)
        table = transformer.scale_shift_table + temb.unsqueeze(-2)
        shift, scale = table.unbind(-2)
        kernels = self.settings(x.device, x.dtype).kernels
        if self.first is not None:
            kernels = TwoLevels(kernels, self.first)
        x = self.leave(transformer.proj_out(kernels.adaln(x, scale, shift, EPS)))
        # Back to latents: each axis of the grid of tokens comes beside its axis of the
        # patch, and they are joined.
        x = x.unflatten(2, (*patch, -1)).unflatten(1, sizes)
        return (
            x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        )

    def _share(self, first: int) -> int:
        """How many of the first tokens this rank has."""
        if self.sequence is None:
            return first
        marks = (torch.arange(self.num_video) < first).int()
        return int(self.sequence.split(marks, 0).sum())


def accelerate_wan(
    transformer: WanTransformer3DModel,
    model: ModelConfig,
    computes_in: tuple[torch.device, torch.dtype] | None = None,
) -> WanForward:
    """Give one transformer the fused forward, whose signature is that of diffusers; as
    `ModelFamily.choose_forward`.
    """
    if model.adaln in ("table", "offload"):
        raise ValueError(
            f"model.adaln is {model.adaln!r}, but the blocks of Wan have no AdaLN "
            "layers to replace. Set it to auto."
        )
    acceleration = WanForward(
        transformer=transformer,
        attention=model.attention,
        kernels=model.kernels,
        checkpointing=model.settled_checkpointing,
        deterministic=model.deterministic,
    )
    acceleration.install(
        *(computes_in or (transformer.device, transformer.patch_embedding.weight.dtype))
    )
    return acceleration


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

PICTURE_NAMES = {
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
}
"""The same of image-to-video alone; they get an adapter where one is asked for."""

IMAGE_TOKENS = 257
"""Tokens of a picture: 16 x 16 patches of CLIP and its class token."""

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
    text_width = "text_dim"
    names: ClassVar = {
        layer: (official, official)
        for layer, official in (NAMES | PICTURE_NAMES).items()
    }
    official_blocks = "blocks"
    outer_names = OUTER_NAMES
    # 2.1 or without a number, or 2.2 5B, which no other model has the sizes of.
    architectures = r"(?!.*wan(video)?2[02-9](?!.*5b)).*wan.*"
    pipeline = "WanPipeline"
    scheduler = ("UniPCMultistepScheduler", "flow_shift")
    clients: ClassVar = {
        "diffusers": Client("diffusers"),
        "comfyui": Client(
            "ComfyUI",
            "# then load it with the node LoraLoaderModelOnly behind the Wan model\n"
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
        sigma = sigma.to(latents.device)
        timestep = sigma * 1000.0
        seen = with_kept(latents, prompts)
        mask = None
        if seen is not latents:
            mask = _mask_of_kept(latents, prompts)
            _, rows, columns = transformer.config["patch_size"]
            tokens = latents.shape[3] // rows * (latents.shape[4] // columns)
            # Of every token; those of a kept frame have no noise.
            timestep = timestep[:, None] * ~mask.flatten(1)
            timestep = timestep.repeat_interleave(tokens, dim=1)
        inputs = seen.to(dtype)
        if channels := [p.frame for p in prompts if p.frame is not None]:
            beside = torch.stack(channels).to(inputs)
            # Those of a plan have no size.
            beside = beside.expand(-1, -1, *latents.shape[2:])
            inputs = torch.cat([inputs, beside], dim=1)
        images = [p.image for p in prompts if p.image is not None]
        result: Tensor = transformer(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=text,
            encoder_hidden_states_image=torch.stack(images).to(text)
            if images
            else None,
            return_dict=False,
        )[0]
        result = result.to(velocity_dtype(transformer))
        if mask is None:
            return result
        # That of a kept frame is known and leads there: (x - x_0) / sigma.
        return torch.where(mask, (latents - seen) / sigma.view(-1, 1, 1, 1, 1), result)

    @classmethod
    def empty_prompt(
        cls, config: Mapping[str, Any], tokens: int, dtype: torch.dtype
    ) -> PromptEmbeds:
        images = image_tokens(config)
        prompt = super().empty_prompt(config, tokens - images, dtype)
        if not images:
            return prompt
        empty = partial(torch.empty, dtype=dtype, device="meta")
        beside = config["in_channels"] - config["out_channels"]
        return replace(
            prompt,
            image=empty(images, config["image_dim"]),
            frame=empty(beside, 1, 1, 1),
        )


def _mask_of_kept(latents: Tensor, prompts: Sequence[PromptEmbeds]) -> Tensor:
    """True (B, 1, F, 1, 1) for the frames of latents that prompts keep."""
    batch, _, frames, _, _ = latents.shape
    mask = torch.zeros(batch, 1, frames, 1, 1, dtype=torch.bool, device=latents.device)
    for row, prompt in zip(mask, prompts, strict=True):
        if prompt.kept is not None:
            row[:, : prompt.kept.shape[1]] = True
    return mask


def image_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a picture in a transformer of this config: none where it reads none."""
    return 0 if config.get("image_dim") is None else IMAGE_TOKENS


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
    images = image_tokens(config)
    if images:
        width = config["image_dim"]
        block += 2 * images * 2 * d * d
        ends += 2 * images * width * (width + d)
    attention = 4 * n * (n + TEXT_TOKENS + images) * d
    return Work(
        linear=config["num_layers"] * block + ends,
        attention=config["num_layers"] * attention,
    )
