"""The seam between SAGE-Fast and a class of video transformers.

A model family brings weights; the code that computes with them depends on the transformer's class alone. That code is a
`Backbone`, which `TRANSFORMERS` in `sage_fast/config/registry.py` names for every class.

Shapes: B batch, C channels, F frames, H, W.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_fast.config.registry import TRANSFORMERS, resolve
from sage_fast.models.attention.joint import SequenceLayout

Checkpointing = Literal["none", "feed_forward", "selective", "full"]
"""Activations that a block keeps for its backward pass."""

MAX_LEVELS = 512
"""Most noise levels in a table of modulation; beyond them it is emptied."""

Layout = Literal["diffusers", "official", "comfyui", "musubi", "peft"]
"""Programs that an adapter is exported for, each with its names for the same weights."""


class FusedForward:
    """The handle of a transformer that runs a fused forward instead of the stock one."""

    transformer: Any
    adaln: str
    """Source of the modulation, see `ModelConfig.adaln`."""
    sequence: SequenceLayout | None = None
    """Layout of the video tokens that are computed here; None for all of them."""

    def forget(self) -> None:
        """Forget what was computed from the weights, after they have changed behind its back."""
        raise NotImplementedError

    def undo(self) -> None:
        """Restore the transformer's own forward."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The code for one class of transformers.

    build: `config.json` -> a transformer with random weights, on the current default device.
    blocks: attribute with the list of its blocks, which are fused, sharded and given adapters one by one.
    velocity: (transformer, latents (B, C, F, H, W) float32, sigma (B,) float32 in [0, 1], B prompts) -> dx/dsigma,
        noise minus data, (B, C, F, H, W) in `velocity_dtype`.
    dead_modules: modules that cannot influence a text-to-video velocity: their gradient is None or exactly zero.
        Training them would mean weight decay without a gradient, and LoRA on them would be memory for nothing.
    adaln_layers: layers of all blocks whose output is a function of the noise level alone.
    choose_forward: (transformer, model section) gives the transformer the fused forward, or leaves it its own
        (`model.forward: stock`, None).
        `undo` of the handle is needed before an adapter is added. `computes_in` is the (device, dtype) of its inputs,
        where that is not the weights' yet. ConfigError for an attention backend that cannot run;
        ValueError for options or a variant that the fused forward does not support.
    named_adapter: a LoRA adapter by diffusers' names, with alpha = rank, by the names of a layout.
    layers_named: the linear layers by diffusers' names that a layer of any layout stands for, in the order of its rows;
        without a prefix, and with `.` or `_` between its parts. A name that no layout has stands for itself.

    Example: `BACKBONE` in `sage_fast/models/hunyuan15/backbone.py`
    """

    build: Callable[[Mapping[str, Any]], Any]
    blocks: str
    velocity: Callable[..., Tensor]
    dead_modules: Callable[[Any], tuple[str, ...]]
    adaln_layers: Callable[[Any], list[nn.Module]]
    choose_forward: Callable[..., FusedForward | None]
    named_adapter: Callable[[Mapping[str, Tensor], Layout], dict[str, Tensor]]
    layers_named: Callable[[str], list[str]]


def backbone(transformer: nn.Module | None = None, *, name: str | None = None) -> Backbone:
    """The code for a transformer, or for a class by its name; for neither that of the first class.

    ValueError for a class that the registry does not know.
    """
    names = [name or next(iter(TRANSFORMERS))]
    if transformer is not None:
        # FSDP2 puts a subclass instead of the class.
        names = [kind.__name__ for kind in type(transformer).__mro__]
    known = next((name for name in names if name in TRANSFORMERS), None)
    if known is None:
        raise ValueError(
            f"The transformer is a {names[0]}, and only {', '.join(TRANSFORMERS)} can be trained. Another class needs "
            "a Backbone (sage_fast/models/transformer.py) and a line in sage_fast/config/registry.py."
        )
    found: Backbone = resolve(known, TRANSFORMERS, "_class_name")
    return found


def transformer_blocks(transformer: nn.Module) -> list[Any]:
    """The blocks of a transformer, in their order."""
    return list(getattr(transformer, backbone(transformer).blocks))


def velocity_dtype(transformer: Any) -> torch.dtype:
    """Type of the velocities: float32, or float64 of a float64 model (an oracle in tests)."""
    # `transformer.dtype` of diffusers visits all modules, 15 ms of every forward of the real model.
    return torch.promote_types(next(transformer.parameters()).dtype, torch.float32)


def is_dead(name: str, dead: Sequence[str]) -> bool:
    """Tell whether a module's or parameter's qualified name lies in one of the `dead` modules."""
    return any(name == module or name.startswith(module + ".") for module in dead)
