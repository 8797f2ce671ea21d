"""Work of the suites: a transformer with random weights, its inputs, its FLOPs.

Letters: N video tokens, L text tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15ByT5TextProjection,
)
from torch import Tensor, nn

from benchmarks.shapes import TINY_HEAD_DIM, TINY_HEADS, Shape
from sage_fast.config.sections import LoraConfig
from sage_fast.models.family import family_of
from sage_fast.models.hunyuan15.hunyuan15 import HUNYUAN_VIDEO_15 as HUNYUAN_VIDEO_15
from sage_fast.policy.lora import add_lora, trainable_parameters
from sage_fast.records import PromptEmbeds

Model = TypeVar("Model", bound=nn.Module)

NUM_STEPS = 20
SHIFT = 5.0
ETA = 0.5
GUIDANCE_SCALE = 6.0
"""Sampler and guidance of the reference recipe."""

TINY: dict[str, Any] = HUNYUAN_VIDEO_15 | {
    "num_attention_heads": TINY_HEADS,
    "attention_head_dim": TINY_HEAD_DIM,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 48,
    "text_embed_2_dim": 32,
    "image_embed_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
"""For smoke runs."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One evaluation of the model under guidance.

    Attributes:
        latents, noise: (1, C, F, H, W) float32; noise doubles as the cotangent's
            direction.
        sigma: (1,) float32 on the CPU.
        conditional, unconditional: prompts of equal length in the transformer's dtype,
            without glyph tokens.
    """

    latents: Tensor
    noise: Tensor
    sigma: Tensor
    conditional: PromptEmbeds
    unconditional: PromptEmbeds


def random_inputs(
    shape: Shape, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Inputs:
    """Inputs that are a function of the shape alone. sigma * 1000 = 640 is exact in
    bfloat16, to which P1 rounds.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def prompt() -> PromptEmbeds:
        return PromptEmbeds(
            text=draw(shape.text_tokens, config["text_embed_dim"], dtype=dtype),
            glyph=draw(0, config["text_embed_2_dim"], dtype=dtype),
        )

    return Inputs(
        latents=draw(1, *shape.latent),
        noise=draw(1, *shape.latent),
        sigma=torch.tensor([0.64]),
        conditional=prompt(),
        unconditional=prompt(),
    )


def random_transformer(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> HunyuanVideo15Transformer3DModel:
    """A frozen transformer in evaluation mode with random weights, see `draw_weights`."""
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel(**config)
        if transformer.proj_out.in_features < 2048:
            # The class fixes this hidden width at 2048, and Muon's products of such
            # matrices take minutes on a CPU.
            width = transformer.proj_out.in_features
            transformer.context_embedder_2 = HunyuanVideo15ByT5TextProjection(
                config["text_embed_2_dim"], width, width
            )
    family_of(transformer).cast(transformer, dtype)
    return draw_weights(transformer, device)


def draw_weights(model: Model, device: torch.device) -> Model:
    """Draw the weights of a model on the meta device in place, so that 8.3 B take no
    copy, and freeze it.

    Matrices keep the scale of their input, norms are near 1, so activations stay of
    order 1 through 54 blocks and no product multiplies zeros, which a GPU does at a
    higher clock.
    """
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 0.0
            std = 0.02
            if name.endswith("gamma") or (
                parameter.ndim == 1 and name.endswith("weight")
            ):
                mean = 1.0
                std = 0.05
            elif parameter.ndim > 1 and "cond_type_embed" not in name:
                std = parameter[0].numel() ** -0.5
            parameter.normal_(mean, std, generator=generator)
    return model.requires_grad_(False).eval()


def adapt(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Add the default LoRA adapters, with weights that are not zero: zero ones would
    hide half of the gradients.
    """
    defaults = LoraConfig()
    add_lora(
        transformer,
        rank=defaults.rank,
        alpha=defaults.alpha,
        target_modules=defaults.target_modules,
        seed=0,
    )
    generator = torch.Generator(transformer.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02, generator=generator)


def take_gradients(transformer: nn.Module) -> dict[str, Tensor]:
    """Gradients of the trained weights, which have none then."""
    found = {
        name: p.grad
        for name, p in trainable_parameters(transformer).items()
        if p.grad is not None
    }
    transformer.zero_grad(set_to_none=True)
    return found


STEP_WORK: dict[str, tuple[float, float]] = {"forward": (1, 1), "rollout": (2, 2)}
STEP_WORK |= dict.fromkeys(("train", "train_split", "single_pass"), (4, 6))
"""Step -> forwards' worth of linear and of attention operations.

Guidance makes two forwards. With LoRA a backward pass is one product per frozen linear
layer, for the gradient of its input, and four for attention's two. Scores that a flash
kernel computes again are recomputation and are not credited.
"""
