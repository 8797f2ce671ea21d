"""Stock diffusers as the oracle of the fused forward: tiny models, padded inputs,
float64 without float32 islands.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import diffusers.models.embeddings as embeddings
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from sage_fast.records import PromptEmbeds

TEXT_WIDTH = 24
GLYPH_WIDTH = 20
IMAGE_WIDTH = 12
CHANNELS = 4
SIZE = 2, 3, 4


def tiny_transformer(
    *,
    layers: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: object,
):
    """A random model whose every weight matters: biases, norms and modulation are drawn
    too.
    """
    settings = {
        "in_channels": 2 * CHANNELS + 1,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": layers,
        "num_refiner_layers": 1,
        "text_embed_dim": TEXT_WIDTH,
        "text_embed_2_dim": GLYPH_WIDTH,
        "image_embed_dim": IMAGE_WIDTH,
        "rope_axes_dim": (4, 6, 6),
        "target_size": 16,
        "task_type": "t2v",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HunyuanVideo15Transformer3DModel(**(settings | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or "norm1" in name or "norm_out" in name:
                    parameter.normal_(
                        1.0 if "norm_" in name and name.endswith("weight") else 0.0, 0.3
                    )
    return (model.double() if dtype == torch.float64 else model.to(dtype)).eval()


def prompt(
    text: int,
    glyph: int = 0,
    image: int = 0,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PromptEmbeds:
    """Random tokens of one prompt, and of its picture where that has any."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    words = PromptEmbeds(text=draw(text, TEXT_WIDTH), glyph=draw(glyph, GLYPH_WIDTH))
    frame = draw(CHANNELS, 1, *SIZE[1:]).float()  # the type of latents, in any model
    return (
        replace(words, image=draw(image, IMAGE_WIDTH), frame=frame) if image else words
    )


def latents(batch: int, *, seed: int = 0, size: Sequence[int] = SIZE) -> Tensor:
    """Random float32 latents (B, C, F, H, W)."""
    return torch.randn(
        batch, CHANNELS, *size, generator=torch.Generator().manual_seed(100 + seed)
    )


def padded_arguments(
    x: Tensor,
    timestep: Tensor,
    prompts: Sequence[PromptEmbeds],
    dtype: torch.dtype,
    *,
    extra: int = 3,
) -> dict[str, object]:
    """Arguments of diffusers' pipelines: latents with condition channels, padded tokens
    with masks, image tokens.
    """
    batch = len(prompts)

    def pad(tokens: list[Tensor]) -> tuple[Tensor, Tensor]:
        length = max(t.shape[0] for t in tokens) + extra
        rows = torch.zeros(batch, length, tokens[0].shape[1], dtype=dtype)
        mask = torch.zeros(batch, length)
        for i, t in enumerate(tokens):
            rows[i, : t.shape[0]] = t.to(dtype)
            mask[i, : t.shape[0]] = 1
        return rows, mask

    text, text_mask = pad([p.text for p in prompts])
    glyph, glyph_mask = pad([p.glyph for p in prompts])
    condition = x.new_zeros(batch, CHANNELS + 1, *x.shape[2:], dtype=dtype)
    image = torch.zeros(batch, 5, IMAGE_WIDTH)
    if prompts[0].image is not None:
        image = torch.stack([p.image for p in prompts])
        condition[:, :CHANNELS, 0] = torch.stack([p.frame[:, 0] for p in prompts]).to(
            dtype
        )
        condition[:, CHANNELS, 0] = 1
    return {
        "hidden_states": torch.cat([x.to(dtype), condition], dim=1),
        "timestep": timestep.to(dtype),
        "encoder_hidden_states": text,
        "encoder_attention_mask": text_mask,
        "encoder_hidden_states_2": glyph,
        "encoder_attention_mask_2": glyph_mask,
        "image_embeds": image.to(dtype),
        "return_dict": False,
    }


@contextmanager
def widened() -> Iterator[None]:
    """In float64, let diffusers compute RMSNorm and the rotary embedding in float64 as
    well, instead of float32.
    """

    def norm(self: RMSNorm, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        )

    def rope(
        x: Tensor, tables: tuple[Tensor, Tensor], sequence_dim: int = 1, **_: object
    ) -> Tensor:
        cos, sin = (table.to(x.dtype)[None, :, None] for table in tables)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cos + torch.stack([-odd, even], dim=-1).flatten(-2) * sin

    stock_norm = RMSNorm.forward
    stock_rope = embeddings.apply_rotary_emb
    RMSNorm.forward = norm
    embeddings.apply_rotary_emb = rope
    try:
        yield
    finally:
        RMSNorm.forward = stock_norm
        embeddings.apply_rotary_emb = stock_rope
