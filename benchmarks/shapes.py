"""Sizes that the suites time. They need no library of models, and a suite of attention
imports none.
"""

import math
from dataclasses import dataclass

HEADS = 16
HEAD_DIM = 128
"""Attention of HunyuanVideo-1.5."""
TINY_HEADS = 2
TINY_HEAD_DIM = 16
"""The same in a smoke run."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One size of video with its conditioning, batch 1.

    Example:
        >>> Shape(name="B", latent=(32, 21, 30, 52), text_tokens=250, padding=(1000, 256, 729)).video_tokens
        32760
    """

    name: str
    latent: tuple[int, int, int, int]
    """(C, F, H, W)."""
    text_tokens: int
    """Valid tokens of the prompt."""
    padding: tuple[int, int, int]
    """Text, glyph and image tokens that diffusers' pipeline passes, valid or not."""

    @property
    def video_tokens(self) -> int:
        return math.prod(self.latent[1:])


PIPELINE_PADDING = (1000, 256, 729)
A = Shape(name="A", latent=(32, 21, 22, 39), text_tokens=250, padding=PIPELINE_PADDING)
"""352x624, 81 frames."""
B = Shape(name="B", latent=(32, 21, 30, 52), text_tokens=250, padding=PIPELINE_PADDING)
"""480x832, 81 frames."""
SHAPES = (B, A)
"""By value."""
PARITY = Shape(
    name="parity", latent=(32, 3, 7, 9), text_tokens=37, padding=(64, 16, 24)
)
"""Small and odd, for a comparison in float64."""
SMOKE = (
    Shape(name="B", latent=(32, 2, 3, 5), text_tokens=5, padding=(12, 6, 7)),
    Shape(name="A", latent=(32, 2, 3, 4), text_tokens=5, padding=(12, 6, 7)),
)
"""Their stand-ins in a smoke run."""
