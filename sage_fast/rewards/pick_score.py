"""PickScore: which of several pictures of a prompt would people pick?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from sage_fast.rewards.clip import PREPROCESSING, ClipSimilarity

PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""Where the model card of PickScore_v1 takes tokenizer and preprocessing from."""


class PickScore:
    """exp(logit_scale) cos(frame, prompt) under PickScore's fine-tuned CLIP-H, mean over the chosen frames.

    Kirstain et al. 2023 (arXiv 2305.01569, equation 2): the score of one image is the product of its embedding and the
    text's times the learned temperature. Scores of generated pictures lie around 18 to 24 with the published weights,
    whose temperature is 100. Some trainers divide by 26; a weight in `reward.weights` does that here.

    Args:
        path: checkpoint, a local folder or a hub id that `hf download` has fetched.
        processor: the same for tokenizer and preprocessor_config.json; null takes `path` when it is a folder that has
            them, and otherwise the repository that PickScore's model card names.
        num_frames, device, dtype, batch_size: see `CLIPScore`.

    Example: `PickScore().score(videos, ["a red circle moving left"] * 8)["PickScore"]` has shape (8,).
    """

    def __init__(
        self,
        path: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = None,
        num_frames: int | None = 8,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: int = 32,
    ) -> None:
        if processor is None:
            processor = path if (Path(path).expanduser() / PREPROCESSING).is_file() else PROCESSOR
        self.similarity = ClipSimilarity(
            "pick_score",
            path=path,
            processor=processor,
            device=device,
            dtype=dtype,
            num_frames=num_frames,
            batch_size=batch_size,
        )

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """{"PickScore": (B,) float32} of videos (B, F, 3, H, W) uint8 and B prompts. ValueError for other shapes."""
        return {"PickScore": self.similarity.logit_scale * self.similarity(videos, prompts)}
