"""The fused forward of Wan 2.1 over diffusers' own class and weights, for
text-to-video.

The result is that of diffusers up to rounding. All prompts are 512 tokens, so a batch
is dense.

The zeros behind a prompt are equal keys and values, so they could be one key with a
bias of log(512 - L). It is not done: attention libraries take no bias, and merging that
key by its log-sum-exp reads and writes 3 S a pass. For 100 valid tokens at 480x832x81
that is 0.10 ms a block on an H100, where it saves 0.14 ms of 15 ms.

Shapes: B batch, C channels, F frames, H, W, N video tokens, D width.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from sage_fast.config.sections import ModelConfig
from sage_fast.models.block import EPS
from sage_fast.models.fused import BlockwiseForward, without_autocast
from sage_fast.models.wan.block import block_forward, read_block


def _fused_block(self: Any, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
    """Forward of an accelerated block. It runs as a module, so that FSDP gathers the
    block's weights around it.
    """
    acceleration: WanForward = self._acceleration
    # Modulation stays float32 in a 16-bit model, as in diffusers' block.
    wide = torch.promote_types(x.dtype, torch.float32)
    affine = torch.stack([self.norm2.weight.to(wide) - 1, self.norm2.bias.to(wide)])
    table = self.scale_shift_table + time.to(wide)
    modulation = torch.cat([table, affine.expand(len(table), 2, -1)], dim=1)
    weights, flat = read_block(self)
    settings = acceleration.settings(x.device, x.dtype)
    return block_forward(
        settings, weights, acceleration.rotary, x, text, modulation, *flat
    )


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
    scale = (attention_kwargs or {}).get("scale", 1.0)
    if encoder_hidden_states_image is not None or timestep.ndim != 1 or scale != 1.0:
        raise ValueError(
            "The fused forward of Wan is for text-to-video, with a timestep per "
            "sample and adapters at full scale. For "
            "anything else set model.forward to stock."
        )
    with without_autocast(hidden_states):
        sample = self._acceleration.forward(
            hidden_states, timestep, encoder_hidden_states
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

    def make_rope(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        if not latents.is_meta:
            return super().make_rope(latents)
        # A plan counts a rank's tokens as one line, which is longer than the tables.
        tokens = prod(latents.shape[2:]) // prod(self.transformer.config["patch_size"])
        table = torch.empty(
            2, tokens, self.transformer.config["attention_head_dim"], device="meta"
        )
        return table[0], table[1]

    def forward(self, latents: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Velocity (B, C, F, H, W), in the weights' dtype, of latents, timesteps (B,)
        and text (B, 512, text width).
        """
        transformer = self.transformer
        patch = transformer.config["patch_size"]
        temb, time, text, _ = transformer.condition_embedder(timestep, text, None)
        x = self.enter(
            transformer.patch_embedding(latents)
            .flatten(2)
            .transpose(1, 2)
            .contiguous(),
            latents,
        )
        # (B, 6 D) to the six vectors that every block adds its table to.
        time = time.unflatten(1, (6, -1))
        for block in self.blocks:
            x = block(x, text, time)
        shift, scale = (transformer.scale_shift_table + temb.unsqueeze(1)).unbind(1)
        x = self.leave(
            transformer.proj_out(
                self.settings(x.device, x.dtype).kernels.adaln(x, scale, shift, EPS)
            )
        )
        sizes = [size // p for size, p in zip(latents.shape[2:], patch, strict=True)]
        # Back to latents: each axis of the grid of tokens comes beside its axis of the
        # patch, and they are joined.
        x = x.unflatten(2, (*patch, -1)).unflatten(1, sizes)
        return (
            x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        )


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
