"""The `Backbone` of diffusers' `HunyuanVideo15Transformer3DModel`."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.config.schema import ModelConfig
from sage_fast.models.hunyuan15 import modulation
from sage_fast.models.hunyuan15.fused import choose_forward
from sage_fast.models.hunyuan15.velocity import dead_modules, velocity
from sage_fast.models.transformer import FusedForward
from sage_fast.records import PromptEmbeds


class HunyuanVideo15Backbone:
    """See `Backbone`."""

    def build(self, config: Mapping[str, Any]) -> HunyuanVideo15Transformer3DModel:
        """See `build_transformer`."""
        return HunyuanVideo15Transformer3DModel(**config)

    def velocity(self, transformer: Any, latents: Tensor, sigma: Tensor, prompts: Sequence[PromptEmbeds]) -> Tensor:
        """See `velocity.py`."""
        return velocity(transformer, latents, sigma, prompts)

    def dead_modules(self, transformer: Any) -> tuple[str, ...]:
        """See `velocity.py`."""
        return dead_modules(transformer)

    def adaln_layers(self, transformer: Any) -> list[nn.Module]:
        """The AdaLN projections of all blocks, of the video and of the text."""
        return [layer for block in transformer.transformer_blocks for layer in modulation.adaln_layers(block)]

    def choose_forward(self, transformer: Any, model: ModelConfig) -> FusedForward | None:
        """See `fused.py`."""
        return choose_forward(transformer, model)
