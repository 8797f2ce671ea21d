"""Facts about a video transformer of any family; `ModelFamily` in `family.py` computes
with it.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch

from sage_fast.models.attention.joint import SequenceLayout

Checkpointing = Literal["none", "feed_forward", "selective", "full"]
"""Activations that a block keeps for its backward pass."""

MAX_LEVELS = 512
"""Most noise levels in a table of modulation; beyond them it is emptied."""


class FusedForward:
    """The handle of a transformer that runs a fused forward instead of the stock one."""

    transformer: Any
    adaln: str
    """Source of the modulation, see `ModelConfig.adaln`."""
    sequence: SequenceLayout | None = None
    """Layout of the video tokens that are computed here; None for all of them."""

    def forget(self) -> None:
        """Forget what was computed from the weights, after they have changed behind its
        back.
        """

    def undo(self) -> None:
        """Restore the transformer's own forward."""
        raise NotImplementedError


def velocity_dtype(transformer: Any) -> torch.dtype:
    """Type of the velocities: float32, or float64 of a float64 model (an oracle in
    tests).
    """
    # `transformer.dtype` of diffusers visits all modules, 15 ms of every forward of the
    # real model.
    return torch.promote_types(next(transformer.parameters()).dtype, torch.float32)


def is_dead(name: str, dead: Sequence[str]) -> bool:
    """Tell whether a module's or parameter's qualified name lies in one of the `dead`
    modules.
    """
    return any(name == module or name.startswith(module + ".") for module in dead)


def in_parts(name: str, parts: Collection[str]) -> bool:
    """Tell whether one of `parts` is a part, between dots, of a qualified name."""
    return not set(parts).isdisjoint(name.split("."))
