"""The forward that a configuration names, over a transformer whose adapters and requires_grad are settled."""

from diffusers import HunyuanVideo15Transformer3DModel

from sage_fast.config import ModelConfig
from sage_fast.policy.fused import Acceleration, accelerate


def choose_forward(transformer: HunyuanVideo15Transformer3DModel, model: ModelConfig) -> Acceleration | None:
    """Give the transformer the fused forward, or leave it diffusers' own (`model.forward: stock`).

    Returns:
        The handle whose `undo()` restores diffusers' forward, as is needed before an adapter is added; None for stock.

    Raises:
        ConfigError: an attention backend that cannot run. ValueError: options or a variant that the fused forward does
        not support.
    """
    if model.forward == "stock":
        if model.checkpointing == "full":
            transformer.enable_gradient_checkpointing()
        return None
    return accelerate(
        transformer,
        attention=model.attention,
        kernels=model.kernels,
        checkpointing=model.checkpointing,
        deterministic=model.deterministic,
        offload_activations=model.offload_activations,
        adaln=model.adaln,
        compile=model.compile,
    )
