"""What the trainer needs of a video model, whichever it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sage_fast.records import PromptEmbeds

if TYPE_CHECKING:
    from diffusers import HunyuanVideo15Transformer3DModel


class PromptEncoder(Protocol):
    """Turns prompts into conditioning."""

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text; the empty string is the unconditional prompt of classifier-free guidance."""
        ...


class VideoDecoder(Protocol):
    """Turns latents into pixels."""

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of one video's latents. ValueError when the size cannot be encoded."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, F, H, W) float32 latents to (B, frames, 3, height, width) uint8 RGB videos."""
        ...


@dataclass(kw_only=True)
class Components:
    """The three parts of a text-to-video model that a run is made of."""

    transformer: "HunyuanVideo15Transformer3DModel"
    prompt_encoder: PromptEncoder
    video_decoder: VideoDecoder
