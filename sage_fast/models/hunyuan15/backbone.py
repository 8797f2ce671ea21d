"""The `Backbone` of diffusers' `HunyuanVideo15Transformer3DModel`."""

from collections.abc import Mapping
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from sage_fast.models.hunyuan15 import layouts, modulation
from sage_fast.models.hunyuan15.fused import choose_forward
from sage_fast.models.hunyuan15.velocity import dead_modules, velocity


class HunyuanVideo15Backbone:
    """See `Backbone`, and the functions themselves."""

    velocity = staticmethod(velocity)
    dead_modules = staticmethod(dead_modules)
    choose_forward = staticmethod(choose_forward)
    stored_weights = staticmethod(layouts.stored_weights)
    stored_config = staticmethod(layouts.stored_config)
    stored_adapter = staticmethod(layouts.stored_adapter)
    own_adapter = staticmethod(layouts.own_adapter)

    def build(self, config: Mapping[str, Any]) -> HunyuanVideo15Transformer3DModel:
        """See `build_transformer`."""
        return HunyuanVideo15Transformer3DModel(**config)

    def adaln_layers(self, transformer: Any) -> list[nn.Module]:
        """The AdaLN projections of all blocks, of the video and of the text."""
        return [layer for block in transformer.transformer_blocks for layer in modulation.adaln_layers(block)]
