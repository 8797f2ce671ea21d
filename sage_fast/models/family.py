"""What the trainer needs of a video model, whichever it is."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sage_fast.config.errors import ConfigError
from sage_fast.config.registry import MODEL_FAMILIES, describe, resolve
from sage_fast.records import PromptEmbeds

if TYPE_CHECKING:
    from diffusers import HunyuanVideo15Transformer3DModel

    from sage_fast.config.schema import ModelConfig

logger = logging.getLogger(__name__)


class PromptEncoder(Protocol):
    """Turns prompts into conditioning."""

    def encode(self, texts: Sequence[str]) -> list[PromptEmbeds]:
        """One record per text, on the CPU; the empty string is the unconditional prompt of classifier-free guidance.

        A run calls it once, with all its texts: an encoder may load large models for the call and release them after.
        """
        ...


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

    A model family is a function `load(model: ModelConfig) -> Components` (see `sage_fast/config/registry.py`). Its
    transformer is on the CPU, in `model.dtype` or in float32 (the run casts it then), in evaluation mode.
    """

    transformer: "HunyuanVideo15Transformer3DModel"
    prompt_encoder: PromptEncoder
    video_decoder: VideoDecoder
    guidance_distilled: str | None = None
    """Which file says that guidance is distilled into the weights; None for a model that is guided by two forwards."""
    shift: float | None = None
    """Timestep shift that the model was published with; None where nothing says."""

    def check_guidance(self, guidance_scale: float) -> None:
        """ValueError unless a model with distilled guidance is used without further guidance."""
        check_guidance(self.guidance_distilled, guidance_scale)

    def warn_of_shift(self, shift: float) -> None:
        """Log a warning where the run's timestep shift is not the model's own."""
        if (text := shift_difference(self.shift, shift)) is not None:
            logger.warning("%s", text)


def load_components(model: "ModelConfig") -> Components:
    """Load the model that a configuration names, by the function of its family.

    Raises:
        ConfigError: no such family, or one of the user's own failed or gave no `Components`. Else what the family
            raises: ValueError and OSError for files and settings that do not fit.
    """
    load = resolve(model.family, MODEL_FAMILIES, "model.family")
    if model.family in MODEL_FAMILIES:
        components: Components = load(model)
        return components
    try:
        components = load(model)
    except (ValueError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model.family is {model.family!r}, but calling it failed: {describe(error)}.") from error
    if not isinstance(components, Components):
        raise ConfigError(
            f"model.family is {model.family!r}, which gave a {type(components).__name__} where "
            "sage_fast.models.family.Components is expected."
        )
    return components


def check_guidance(guidance_distilled: str | None, guidance_scale: float) -> None:
    """ValueError where guidance is distilled into weights (a file says so) that are to be guided once more."""
    if guidance_distilled is not None and guidance_scale != 1.0:
        raise ValueError(
            f"rollout.guidance_scale is {guidance_scale}, but guidance is distilled into these weights "
            f"({guidance_distilled} says so), and guiding twice distorts the video. Set rollout.guidance_scale to 1, "
            "or use weights without distillation, such as 480p_t2v."
        )


def shift_difference(published: float | None, shift: float) -> str | None:
    """What to say where a run's timestep shift differs from the one that a model was published with; None else.

    A warning and no error: another shift samples other noise levels of the same flow, which may be meant.
    """
    if published is None or published == shift:
        return None
    return (
        f"rollout.shift is {shift:g}, but these weights were published with a shift of {published:g}. Set "
        f"rollout.shift to {published:g}, unless you mean to sample and train at other noise levels."
    )
