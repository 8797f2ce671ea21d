"""A world of badly captioned videos, as `pretrain` asks for it: a part of the training,
and what it draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sage_fast.records import PromptEmbeds


class World(Protocol):
    """Videos with captions that are often wrong. Captions are rows of a tensor,
    whatever they hold.
    """

    shape: tuple[int, int, int, int]
    """(C, F, H, W) of the latents."""

    def draw_captions(self, count: int, dropped: float) -> Tensor:
        """Captions (count, ...), a share `dropped` of them unconditional."""

    def draw_latents(self, captions: Tensor) -> Tensor:
        """Latents (B, C, F, H, W) of videos that have these captions."""

    def prompts(self, captions: Tensor) -> list[PromptEmbeds]:
        """Features of captions, for the transformer."""

    def velocity(self, latents: Tensor, sigma: Tensor, captions: Tensor) -> Tensor:
        """E[z - x0 | x, caption] (B, C, F, H, W) at noise levels (B,)."""


@dataclass(frozen=True, kw_only=True)
class Phase(ABC):
    """A part of the pretraining, with a separate optimizer and draws. It goes on from
    the weights before it.
    """

    name: ClassVar[str]
    """Of the world, on the command line."""
    transformer: ClassVar[Mapping[str, Any]]
    """Configuration of the network."""
    dtype: ClassVar[torch.dtype]
    """Of the products. bfloat16 takes 20 times as long on a processor without such
    products.
    """

    steps: int
    """Optimizer steps."""
    rate: float = 1.0
    """Peak of the learning rates, as a share of the configuration's."""
    noised_up_to: float = 1.0
    """Largest sigma of noised videos. Those on the network's own paths have every
    sigma.
    """

    @abstractmethod
    def world(self, generator: torch.Generator) -> World:
        """The videos, drawn by this generator."""
