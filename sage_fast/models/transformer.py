"""What sampling, training and planning need of a video transformer, whichever class it is.

A model family brings weights; the code that computes with them depends on the transformer's class alone. That code is a
`Backbone`, which `TRANSFORMERS` in `sage_fast/config/registry.py` names for every class. The functions below take a
transformer and ask the backbone of its class.

Shapes: B batch, C channels, F frames, H, W, N video tokens, L text tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from sage_fast.config.model_sections import ModelConfig
from sage_fast.config.registry import TRANSFORMERS, resolve
from sage_fast.models.attention.joint import SequenceLayout
from sage_fast.models.reuse import FeatureCache
from sage_fast.records import PromptEmbeds

Checkpointing = Literal["none", "feed_forward", "selective", "full"]
"""What a block keeps for its backward pass."""

Layout = Literal["diffusers", "official", "comfyui"]
"""Programs that an export is for, each with names of its own for the same weights."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a layout.

    sources: place -> name of our tensor; `parts` of them stand one below the other. change: of the result.

    Example: `StoredTensor(sources={0: "attn.to_q.weight", 1: "attn.to_k.weight", 2: "attn.to_v.weight"}, parts=3)`
    """

    sources: dict[int, str]
    parts: int = 1
    change: Callable[[Tensor], Tensor] | None = None

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor, from ours by name."""
        ours = [read(self.sources[place]) for place in range(self.parts)]
        whole = torch.cat(ours) if self.parts > 1 else ours[0]
        return self.change(whole) if self.change else whole


class FusedForward(Protocol):
    """The handle of a transformer that runs a fused forward in place of its own."""

    sequence: SequenceLayout | None
    """Which video tokens are computed here; None is all of them."""

    @property
    def transformer(self) -> Any:
        """The transformer."""
        ...

    @property
    def adaln(self) -> str:
        """Where the modulation comes from, see `ModelConfig.adaln`."""
        ...

    def forget(self) -> None:
        """Forget what was computed from the weights, after they have changed behind its back."""
        ...

    def undo(self) -> None:
        """Restore the transformer's own forward."""
        ...


class Backbone(Protocol):
    """What one class of transformers can do."""

    def build(self, config: Mapping[str, Any]) -> Any:
        """A transformer with random weights, on the current default device."""
        ...

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        sigma: Tensor,
        prompts: Sequence[PromptEmbeds],
        cache: FeatureCache | None = None,
    ) -> Tensor:
        """See `velocity`."""
        ...

    def dead_modules(self, transformer: Any) -> tuple[str, ...]:
        """See `dead_modules`."""
        ...

    def adaln_layers(self, transformer: Any) -> list[nn.Module]:
        """See `adaln_layers`."""
        ...

    def choose_forward(self, transformer: Any, model: ModelConfig) -> FusedForward | None:
        """See `choose_forward`."""
        ...

    def stored_weights(self, names: Iterable[str], layout: Layout) -> dict[str, StoredTensor]:
        """The tensors of a layout by their names there. ValueError for a name that the class does not have."""
        ...

    def stored_config(self, config: Mapping[str, Any], layout: Layout) -> dict[str, Any] | None:
        """config.json of a layout; None where it has none. ValueError for a model that is not of that program."""
        ...

    def stored_adapter(self, values: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """A LoRA adapter with alpha = rank as a file of a layout has it."""
        ...

    def own_adapter(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A LoRA adapter by diffusers' names, from diffusers' or the official layout. ValueError for another's."""
        ...


@cache
def _backbone(name: str) -> Backbone:
    found: Backbone = resolve(name, TRANSFORMERS, "_class_name")()
    return found


def backbone(transformer: nn.Module | None = None) -> Backbone:
    """The code for a transformer; None is the first class. ValueError for a class that the registry does not know."""
    if transformer is None:
        return _backbone(next(iter(TRANSFORMERS)))
    # FSDP2 puts a subclass of its own in place of the class.
    for kind in type(transformer).__mro__:
        if kind.__name__ in TRANSFORMERS:
            return _backbone(kind.__name__)
    raise ValueError(
        f"The transformer is a {type(transformer).__name__}, and only {', '.join(TRANSFORMERS)} can be trained. A "
        "further class needs a Backbone (sage_fast/models/transformer.py) and a line in sage_fast/config/registry.py."
    )


def build_transformer(config: Mapping[str, Any]) -> Any:
    """A transformer with random weights, on the current default device.

    Args:
        config: its `config.json`; without a `_class_name` it is of the first class of `TRANSFORMERS`.
    """
    return _backbone(config.get("_class_name", next(iter(TRANSFORMERS)))).build(config)


def velocity(
    transformer: nn.Module,
    latents: Tensor,
    sigma: Tensor,
    prompts: Sequence[PromptEmbeds],
    cache: FeatureCache | None = None,
) -> Tensor:
    """Velocity dx/dsigma (noise minus data) of the model at noise level sigma.

    Args:
        latents: (B, C, F, H, W) float32.
        sigma: (B,) float32 in [0, 1], one noise level per sample.
        prompts: B records.
        cache: features of earlier steps, which the fused forward may use again; no gradient then.

    Returns:
        (B, C, F, H, W) in `velocity_dtype`.
    """
    return backbone(transformer).velocity(transformer, latents, sigma, prompts, cache)


def velocity_dtype(transformer: Any) -> torch.dtype:
    """Type of the velocities: float32, or float64 of a float64 model (an oracle in tests)."""
    return torch.promote_types(transformer.dtype, torch.float32)


def dead_modules(transformer: nn.Module) -> tuple[str, ...]:
    """Modules that cannot influence a text-to-video velocity: their gradient is None or exactly zero.

    Training them would mean weight decay without a gradient, and LoRA on them would be memory for nothing.
    """
    return backbone(transformer).dead_modules(transformer)


def is_dead(name: str, dead: Sequence[str]) -> bool:
    """Whether a module's or parameter's qualified name lies in one of the `dead` modules."""
    return any(name == module or name.startswith(module + ".") for module in dead)


def adaln_layers(transformer: nn.Module) -> list[nn.Module]:
    """The layers of all blocks whose output is a function of the noise level alone."""
    return backbone(transformer).adaln_layers(transformer)


def choose_forward(transformer: nn.Module, model: ModelConfig) -> FusedForward | None:
    """Give the transformer the fused forward, or leave it its own (`model.forward: stock`).

    Returns:
        The handle whose `undo()` restores the stock forward, as is needed before an adapter is added; None for stock.

    Raises:
        ConfigError: an attention backend that cannot run. ValueError: options or a variant that the fused forward does
        not support.
    """
    return backbone(transformer).choose_forward(transformer, model)
