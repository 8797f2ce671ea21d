"""CLIPScore: does the video show what the prompt says?"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from sage_fast.rewards.clip import ClipSimilarity


class CLIPScore:
    """100 cos(frame, prompt) under CLIP, mean over the chosen frames.

    Hessel et al. 2021 (arXiv 2104.08718, section 3) define CLIPScore as 2.5 max(cos, 0) for one image. Tables report,
    and torchmetrics (`torchmetrics.multimodal.CLIPScore`) computes, 100 max(cos, 0): the same order on a scale of
    100, on which photographs with their captions have about 20 to 35. Reported here is 100 cos. The clamp is left
    out because a video that it touches would have no better or worse neighbours; for scores of practice, which are far
    above 0, all three differ by a factor alone. Scores of different checkpoints are not comparable.

    Args:
        path: CLIP checkpoint, a local folder or a hub id that `hf download` has fetched. The default is torchmetrics'.
        num_frames: frames that are scored, the middles of so many equal parts of the video; null scores all.
        device: `auto` (cuda where there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: of the model, `float32`, `bfloat16` or `float16`.
        batch_size: frames that go through the model at once.

    A prompt of more than 77 tokens is truncated, as CLIP does.

    Example: `CLIPScore().score(videos, ["a red circle moving left"] * 8)["CLIPScore"]` has shape (8,).
    """

    def __init__(
        self,
        path: str = "openai/clip-vit-large-patch14",
        num_frames: int | None = 8,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: int = 32,
    ) -> None:
        self.similarity = ClipSimilarity(
            "clip_score",
            path=path,
            processor=path,
            device=device,
            dtype=dtype,
            num_frames=num_frames,
            batch_size=batch_size,
        )

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """{"CLIPScore": (B,) float32} of videos (B, F, 3, H, W) uint8 and B prompts. ValueError for other shapes."""
        return {"CLIPScore": 100 * self.similarity(videos, prompts)}
