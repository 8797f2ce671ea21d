"""Rewards by CLIP: CLIPScore, does the video show what the prompt says, and PickScore,
which one would people pick?

Both are cosine similarities of frames and prompts. transformers has the model, the
tokenizer and the preprocessing.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sage_fast.config.sections import VideoConfig
from sage_fast.models.hub import Requirement, checkpoint_folder, require
from sage_fast.models.stored import load_pretrained
from sage_fast.rewards.base import (
    RewardCosts,
    Scale,
    check_counts,
    check_videos,
    resolve_device,
    resolve_dtype,
)

logger = logging.getLogger(__name__)

CLIP_L14 = "openai/clip-vit-large-patch14"
PICK_SCORE = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""Source of tokenizer and preprocessing according to the model card of PickScore_v1."""
PROCESSOR_FILES = ("*.json", "*.txt")
MODEL_FILES = (*PROCESSOR_FILES, "model.safetensors")
"""The repositories hold the same weights in up to four formats."""
PREPROCESSING = "preprocessor_config.json"
TOKENIZER = "tokenizer_config.json"
WEIGHTS = "*.safetensors|*.bin"

Precision = Literal["float32", "bfloat16", "float16"]


class _ClipSimilarity:
    """A frozen CLIP model and the way its checkpoint wants frames and texts prepared.

    Args:
        reward: short name, for messages.
        path: local folder, or hub id in the local cache, of the model.
        processor: the same of tokenizer and preprocessor_config.json.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: data type of the model; similarities are computed in float32.
        num_frames: frames per video, see `middle_frames`; null takes all.
        batch_size: frames that go through the model at once.

    Raises:
        ValueError, OSError: the checkpoint is missing or is not one of a CLIP model;
            the message says how to get it.
    """

    def __init__(
        self,
        reward: str,
        path: str,
        processor: str,
        *,
        num_frames: int | None,
        device: str,
        dtype: Precision,
        batch_size: int,
    ) -> None:
        from transformers import AutoTokenizer, CLIPModel

        # in transformers 5 CLIPImageProcessor resizes by torchvision where that is
        # installed
        try:
            from transformers import CLIPImageProcessorPil as CLIPImageProcessor
        except ImportError:
            from transformers import CLIPImageProcessor

        check_counts(num_frames=num_frames, batch_size=batch_size)
        self.reward = reward
        self.num_frames = num_frames
        self.batch_size = batch_size
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, "float32", "bfloat16", "float16")

        key = f"reward.options.{reward}"
        weights = checkpoint_folder(path, f"{key}.path", *MODEL_FILES)
        folder = weights
        if processor != path:  # its weights are not needed
            folder = checkpoint_folder(processor, f"{key}.processor", *PROCESSOR_FILES)
        self.preprocess = CLIPImageProcessor.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load_pretrained(CLIPModel, weights, dtype=self.dtype)
        self.model = model.to(self.device).requires_grad_(False)
        self.max_tokens = int(model.config.text_config.max_position_embeddings)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Warn of prompts of which the end is not read."""
        longer = [
            prompt
            for prompt in prompts
            if len(self.tokenizer(prompt, verbose=False)["input_ids"]) > self.max_tokens
        ]
        if longer:
            logger.warning(
                "%s reads the first %d tokens of a prompt, and %d prompts have more, "
                "such as %.60r...",
                *(self.reward, self.max_tokens, len(longer), longer[0]),
            )

    @torch.no_grad()
    def cosines(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        """Mean over the chosen frames of cos(frame, prompt), (B,) float32 on the CPU.

        Args:
            videos: (B, F, 3, H, W) uint8.
            prompts: B texts.
        """
        check_videos(videos, prompts)
        frames = videos[:, middle_frames(videos.shape[1], self.num_frames)]
        images = self._embed_frames(frames.flatten(0, 1).cpu()).view(
            *frames.shape[:2], -1
        )
        # The videos of a group share their prompt.
        distinct = list(dict.fromkeys(prompts))
        # Always to the full length: padding to the longest text would let one prompt
        # change another's rounding.
        tokens = self.tokenizer(
            distinct,
            padding="max_length",
            truncation=True,
            max_length=self.max_tokens,
            return_tensors="pt",
        )
        features = self.model.get_text_features(
            input_ids=tokens["input_ids"].to(self.device),
            attention_mask=tokens["attention_mask"].to(self.device),
        )
        embeds = functional.normalize(_pooled(features).float(), dim=-1)
        texts = embeds[[distinct.index(prompt) for prompt in prompts]]
        return (images * texts[:, None]).sum(-1).mean(1).cpu()

    def _embed_frames(self, frames: Tensor) -> Tensor:
        """uint8 (N, 3, H, W) to unit vectors (N, D) float32."""
        embeds = []
        for part in frames.split(self.batch_size):
            # Resized by PIL, frame after frame, as in the training of the checkpoints.
            prepared = self.preprocess(
                list(part), return_tensors="pt", input_data_format="channels_first"
            )
            pixels = prepared["pixel_values"].to(self.device, self.dtype)
            embeds.append(_pooled(self.model.get_image_features(pixel_values=pixels)))
        return functional.normalize(torch.cat(embeds).float(), dim=-1)


def _pooled(features: Any) -> Tensor:
    """The projected embedding: transformers 4 returns it, transformers 5 returns an
    object that holds it.
    """
    return features if isinstance(features, Tensor) else features.pooler_output


def middle_frames(total: int, num_frames: int | None) -> list[int]:
    """The frames that stand for a video of `total` frames: the middles of `num_frames`
    equal parts of it.

    All of them when `num_frames` is None or not less than `total`. Example: 4 of 81 are
    10, 30, 50 and 70.
    """
    count = total if num_frames is None else min(num_frames, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


class CLIPScore(_ClipSimilarity):
    """100 cos(frame, prompt) under CLIP, mean over the chosen frames.

    Hessel et al. 2021 (arXiv 2104.08718, section 3) define CLIPScore as 2.5 max(cos, 0)
    for one image. Tables report, and torchmetrics (`torchmetrics.multimodal.CLIPScore`)
    computes, 100 max(cos, 0): the same order on a scale of 100, on which photographs
    with their captions have about 20 to 35. Reported here is 100 cos. The clamp is left
    out because a video that it touches would have no better or worse neighbours; for
    scores of practice, which are far above 0, all three differ by a factor alone.
    Scores of different checkpoints are not comparable.

    Args:
        path: CLIP checkpoint, a local folder or a hub id that `hf download` has
            fetched. The default is torchmetrics'.
        num_frames: frames that are scored, the middles of that many equal parts of the
            video; null scores all.
        device: `auto` (cuda where there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: of the model, `float32`, `bfloat16` or `float16`.
        batch_size: frames that go through the model at once.

    A prompt of more than 77 tokens is truncated, as CLIP does.

    Example: `CLIPScore().score(videos, ["a red circle moving left"] * 8)["CLIPScore"]`
    has shape (8,).
    """

    SCALES: ClassVar = {
        "CLIPScore": Scale(
            here="100 cos",
            published="2.5 cos (Hessel et al. 2021), it seems",
            factor=0.025,
        )
    }

    @staticmethod
    def requirements(options: Mapping[str, Any]) -> list[Requirement]:
        path = str(options.get("path", CLIP_L14))
        files = ["config.json", WEIGHTS, PREPROCESSING, TOKENIZER]
        return [
            require("CLIPScore", path, files, CLIP_L14, *MODEL_FILES, gigabytes=1.7)
        ]

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        """Weights in float32; activations and seconds are assumed."""
        folder = str(options.get("path", CLIP_L14))
        return RewardCosts(weights=1.7e9, folder=folder, working=0.5e9, seconds=0.2)

    def __init__(
        self,
        path: str = CLIP_L14,
        num_frames: int | None = 8,
        device: str = "auto",
        dtype: Precision = "float32",
        batch_size: int = 32,
    ) -> None:
        super().__init__(
            "clip_score",
            path,
            path,
            num_frames=num_frames,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
        )

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """{"CLIPScore": (B,) float32} of videos (B, F, 3, H, W) uint8 and B prompts.
        ValueError for other shapes.
        """
        return {"CLIPScore": 100 * self.cosines(videos, prompts)}


class PickScore(_ClipSimilarity):
    """exp(logit_scale) cos(frame, prompt) under PickScore's fine-tuned CLIP-H, mean
    over the chosen frames.

    Kirstain et al. 2023 (arXiv 2305.01569, equation 2): the score of one image is the
    product of its embedding and the text's times the learned temperature. Scores of
    generated pictures lie around 18 to 24 with the published weights, whose temperature
    is 100. Some trainers divide by 26; a weight in `reward.weights` does that here.

    Args:
        path: checkpoint, a local folder or a hub id that `hf download` has fetched.
        processor: the same for tokenizer and preprocessor_config.json; null takes
            `path` when it is a folder that has them, and otherwise the repository that
            PickScore's model card names.
        num_frames, device, dtype, batch_size: see `CLIPScore`.

    Example: `PickScore().score(videos, ["a red circle moving left"] * 8)["PickScore"]`
    has shape (8,).
    """

    SCALES: ClassVar = {
        "PickScore": Scale(
            here="exp(logit_scale) cos, about 18 to 24",
            published="divided by 26",
            factor=1 / 26,
        )
    }

    @staticmethod
    def requirements(options: Mapping[str, Any]) -> list[Requirement]:
        path = str(options.get("path", PICK_SCORE))
        files = ["config.json", WEIGHTS]
        found = [
            require("PickScore", path, files, PICK_SCORE, *MODEL_FILES, gigabytes=3.9)
        ]
        processor = str(options.get("processor") or _processor_of(path))
        if processor != path:
            what = "PickScore's processor"
            files = [PREPROCESSING, TOKENIZER]
            found.append(require(what, processor, files, PROCESSOR, *PROCESSOR_FILES))
        return found

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        """Weights in float32; activations and seconds are assumed."""
        folder = str(options.get("path", PICK_SCORE))
        return RewardCosts(weights=4.0e9, folder=folder, working=0.5e9, seconds=0.3)

    def __init__(
        self,
        path: str = PICK_SCORE,
        processor: str | None = None,
        num_frames: int | None = 8,
        device: str = "auto",
        dtype: Precision = "float32",
        batch_size: int = 32,
    ) -> None:
        super().__init__(
            "pick_score",
            path,
            processor or _processor_of(path),
            num_frames=num_frames,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
        )

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """{"PickScore": (B,) float32} of videos (B, F, 3, H, W) uint8 and B prompts.
        ValueError for other shapes.
        """
        temperature = float(self.model.logit_scale.float().exp())
        return {"PickScore": temperature * self.cosines(videos, prompts)}


def _processor_of(path: str) -> str:
    """Source of tokenizer and preprocessing of a PickScore checkpoint, unless the
    options say.
    """
    return path if (Path(path).expanduser() / PREPROCESSING).is_file() else PROCESSOR
