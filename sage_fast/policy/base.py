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
        """One record per text, on the CPU; the empty string is the unconditional prompt of classifier-free guidance.

        A run calls it once, with all its texts: an encoder may load large models for the call and release them after.
        """
        ...


class DecodeError(RuntimeError):
    """Latents could not be turned into pixels; the message says why and what to change."""


class VideoDecoder(Protocol):
    """Turns latents into pixels."""

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of one video's latents. ValueError when the size cannot be encoded."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, F, H, W) float32 latents to (B, frames, 3, height, width) uint8 RGB videos.

        A function of each sample by itself, so that a batch may be split over processes.
        """
        ...


@dataclass(kw_only=True)
class Components:
    """The three parts of a text-to-video model that a run is made of.

    A model family is a function `load(model: ModelConfig) -> Components` (see `sage_fast/registry.py`). Its transformer
    is on the CPU, in `model.dtype` or in float32 (the run casts it then), in evaluation mode.
    """

    transformer: "HunyuanVideo15Transformer3DModel"
    prompt_encoder: PromptEncoder
    video_decoder: VideoDecoder
    guidance_distilled: str | None = None
    """Which file says that guidance is distilled into the weights; None for a model that is guided by two forwards."""

    def check_guidance(self, guidance_scale: float) -> None:
        """ValueError unless a model with distilled guidance is used without further guidance."""
        if self.guidance_distilled is not None and guidance_scale != 1.0:
            raise ValueError(
                f"rollout.guidance_scale is {guidance_scale}, but guidance is distilled into these weights "
                f"({self.guidance_distilled} says so), and guiding twice distorts the video. Set "
                "rollout.guidance_scale to 1, or use weights without distillation, such as 480p_t2v."
            )
