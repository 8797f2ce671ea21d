"""VideoAlign (KwaiVGI/VideoReward), the reward of the SAGE-GRPO paper: visual quality,
motion quality, text alignment.

Qwen2-VL-2B reads the frames and a fixed questionnaire with the prompt in it; a linear
head turns its hidden states at three special tokens into scores.
https://arxiv.org/abs/2501.13918, https://github.com/KwaiVGI/VideoAlign.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.sections import VideoConfig
from sage_fast.models.hub import Requirement, fetch_command, missing_files, require
from sage_fast.rewards.base import (
    RewardCosts,
    Scale,
    check_counts,
    check_videos,
    resolve_device,
    resolve_dtype,
)
from sage_fast.rewards.videoalign import vision as preprocessing
from sage_fast.rewards.videoalign.checkpoint import (
    DEFAULT_BASE_MODEL,
    REPOSITORY,
    SCORES,
    SPECIAL_TOKENS,
    VideoAlignSettings,
    load_videoalign,
)

DEFAULT_FOLDER = "models/VideoReward"
"""Folder of the checkpoint where the option `path` is not set."""

VIDEO_TOKEN = "<|video_pad|>"
# The chat template of Qwen2-VL-Instruct, written out for one user message of a video
# and then a text, with the generation prompt.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{video}<|vision_end|>{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
# Template `detailed_special` of prompt_template.py,
# https://github.com/KwaiVGI/VideoAlign: part of the checkpoint's training data. One
# other character, a trailing blank included, and the scores move.
QUESTIONS = (Path(__file__).parent / "prompt.txt").read_text(encoding="utf-8")


class VideoAlignReward:
    """Scores VQ (visual quality), MQ (motion quality) and TA (text alignment) of
    VideoAlign; higher is better.

    With `normalise` a score is in standard deviations of the checkpoint's training set
    from its mean. The paper of SAGE-GRPO weighs (VQ, MQ, TA) by (1, 1, 1), its Setting
    A, or (0.5, 0.5, 1.0), its Setting B. In a configuration:

        reward:
          rewards: [videoalign]
          options:
            videoalign: {path: checkpoints/VideoReward, fps: 24}
          weights: {VQ: 0.5, MQ: 0.5, TA: 1.0}

    The model is frozen and keeps no state: a video's scores depend on the video, the
    prompt and `fps` alone, up to the rounding of another batch size.

    Args:
        path: folder of the checkpoint, the one that holds model_config.json; where the
            advice of `doctor` puts it. fps: frames per second that the videos are meant
            to be played at. Set it to `video.fps`: 2 frames of a second
            are scored, so it decides which ones, and a wrong value changes every score.
        base_model: folder, or hub id in the local cache, of Qwen2-VL-2B-Instruct.
        device: `auto` (this process's GPU where there is one), `cpu`, `cuda` or
            `cuda:N`.
        dtype: `auto` (bfloat16 on a GPU, float32 elsewhere), `bfloat16` or `float32`.
        batch_size: videos that go through the model at once.
        normalise: subtract the mean and divide by the std that the checkpoint's
            inference_config gives.

    Raises:
        FileNotFoundError, OSError: weights are missing; the message holds the command
            that fetches them. ValueError: an option is out of range, or the weights are
            damaged or do not fit.

    Example: `VideoAlignReward("checkpoints/VideoReward", fps=24).score(videos,
    prompts)["VQ"]` has shape (B,).
    """

    SCALES: ClassVar = dict.fromkeys(
        ("VQ", "MQ", "TA"),
        Scale(
            here="deviations from the mean of VideoAlign's training set",
            published="the same",
        ),
    )

    @staticmethod
    def requirements(options: Mapping[str, Any]) -> list[Requirement]:
        path = str(options.get("path", DEFAULT_FOLDER))
        # It is read from a folder only: the id of a repository does not work.
        missing = missing_files(
            Path(path).expanduser(), ["model_config.json", "checkpoint-*/model.pth"]
        )
        own = Requirement(
            name="VideoAlign",
            where=path,
            missing=missing,
            fetch=fetch_command(REPOSITORY, folder=path),
            repository=REPOSITORY,
            gigabytes=5.0,
        )
        base = require(
            "VideoAlign's base model",
            str(options.get("base_model", DEFAULT_BASE_MODEL)),
            ["config.json", "tokenizer_config.json"],
            DEFAULT_BASE_MODEL,
            # VideoAlign's own checkpoint brings all weights.
            "*.json",
            "*.txt",
            gigabytes=0.1,
        )
        return [own, base]

    @staticmethod
    def costs(options: Mapping[str, Any], video: VideoConfig) -> RewardCosts:
        """Weights in bfloat16; activations, and seconds with frames
        resized on the CPU, are assumed.
        """
        folder = str(options.get("path", DEFAULT_FOLDER))
        return RewardCosts(weights=4.5e9, folder=folder, working=1.0e9, seconds=0.5)

    def __init__(
        self,
        path: str = DEFAULT_FOLDER,
        fps: float | None = None,
        base_model: str = DEFAULT_BASE_MODEL,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 8,
        normalise: bool = True,
    ) -> None:
        if fps is None or not 0 < fps < math.inf:
            raise ValueError(
                f"fps is {fps!r}, and it must be a positive number: the frames per "
                "second that the videos are meant to be played at. VideoAlign sees 2 "
                "frames a second, so its scores depend on it; set it to video.fps."
            )
        check_counts(batch_size=batch_size)
        self.fps = float(fps)
        self.batch_size = batch_size
        self.device = resolve_device(device)
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype = resolve_dtype(dtype, "bfloat16", "float32")

        folder = Path(path).expanduser()
        self.settings = VideoAlignSettings.read(folder)
        statistics = [
            self.settings.statistics[name] if normalise else (0.0, 1.0)
            for name in SCORES
        ]
        self.mean, self.std = torch.tensor(statistics).T

        base = os.path.expanduser(base_model)
        model, head, self.tokenizer = load_videoalign(
            folder, self.settings, base, self.dtype
        )
        self.model: Any = model.to(self.device)
        self._rotate_as_published()
        self.head = head.to(self.device)
        self.video_token = self.tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
        self.score_tokens = self.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """RewardError, naming the prompt, for one that no score can be given for.

        A prompt with one of the tokenizer's control tokens would be read as more than a
        text: `<|VQ_reward|>` as the place of a score, `<|video_pad|>` as a piece of the
        video, `<|im_end|>` as the end of the questions.
        """
        for prompt in prompts:
            for token in self.tokenizer.get_added_vocab():
                if token in prompt:
                    raise RewardError(
                        f"VideoAlign cannot score the prompt {prompt!r}: it holds "
                        f"{token}, which the reward model reads as a control token and "
                        "not as text. Rewrite or remove the prompt."
                    )

    def _rotate_as_published(self) -> None:
        """Round positions as in VideoAlign's training, see `vision_angles`.

        1,600 tokens on, exact angles differ from the rounded ones, which the weights
        know, by up to 1.7 rad.
        """
        frequencies = self.model.get_submodule("language_model.rotary_emb").inv_freq
        frequencies.copy_(frequencies.to(self.dtype))
        for block in self.model.visual.blocks:
            block.register_forward_pre_hook(
                lambda block, args, kwargs: (
                    args,
                    kwargs | {"position_embeddings": self._vision_angles},
                ),
                with_kwargs=True,
            )

    @torch.no_grad()
    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score a batch.

        Args:
            videos: (B, F, 3, H, W) uint8 RGB, F at least 2.
            prompts: B texts.

        Returns:
            "VQ", "MQ" and "TA", each (B,) float32 on the CPU.

        Raises:
            RewardError: a prompt holds a control token.
            ValueError: another shape or dtype, not one prompt a video, or frames that
                Qwen2-VL cannot read.
        """
        check_videos(videos, prompts)
        self.check_prompts(prompts)
        indices = preprocessing.frame_indices(
            videos.shape[1], self.fps, self.settings.sample_fps
        )
        logits = []
        for start in range(0, len(prompts), self.batch_size):
            rows = slice(start, start + self.batch_size)
            frames = videos[rows, indices].to(self.device)
            logits.append(self._logits(frames, prompts[rows]))
        scores = (torch.cat(logits).cpu() - self.mean) / self.std
        return dict(zip(SCORES, scores.unbind(1), strict=True))

    def _logits(self, frames: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores before normalisation, float32 (B, 3).

        Args:
            frames: (B, N, 3, H, W) uint8.
            prompts: B texts.
        """
        batch, num_frames = frames.shape[:2]
        height, width = preprocessing.frame_size(
            frames.shape[3], frames.shape[4], self.settings.max_frame_pixels
        )
        levels = preprocessing.resize_frames(
            frames.flatten(0, 1), height, width
        ).unflatten(0, (batch, num_frames))
        patches = preprocessing.pixel_patches(levels).to(self.dtype)
        grid = (
            num_frames // preprocessing.TEMPORAL_PATCH_SIZE,
            height // preprocessing.PATCH_SIZE,
            width // preprocessing.PATCH_SIZE,
        )
        attention = self.model.visual.blocks[0].attn
        head_width = attention.qkv.in_features // attention.num_heads
        cos, sin = preprocessing.vision_angles(
            grid, head_width, self.dtype, self.device
        )
        # Handed to every block by the hooks of `_rotate_as_published`.
        self._vision_angles = cos.repeat(batch, 1), sin.repeat(batch, 1)
        output = self.model.visual(
            patches, grid_thw=torch.tensor([grid] * batch, device=self.device)
        )
        # The merged features: transformers 5 returns them beside the unmerged ones, 4
        # alone.
        features = getattr(output, "pooler_output", output)

        texts = [conversation(prompt, features.shape[0] // batch) for prompt in prompts]
        rows = [
            torch.tensor(ids)
            for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        # On the right, so that padding comes after everything that counts. Which token
        # it is does not matter.
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]

        embeddings = self.model.language_model.embed_tokens(tokens)
        is_video = (tokens == self.video_token)[..., None]
        # In order: every placeholder takes the next feature, and each video has as many
        # of both.
        embeddings = embeddings.masked_scatter(is_video, features.to(embeddings.dtype))
        # Positions count the tokens, the video's like all others, where Qwen2-VL itself
        # numbers those by frame, row and column. VideoAlign was trained so: its forward
        # passed no position ids, for which transformers 4.45 counted.
        positions = torch.arange(tokens.shape[1], device=self.device).expand(
            3, *tokens.shape
        )
        hidden = self.model.language_model(
            inputs_embeds=embeddings,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state

        # argmax finds the first place; each token has one, since `check_prompts`
        # refuses prompts with any.
        places = torch.stack(
            [(tokens == token).long().argmax(1) for token in self.score_tokens], dim=1
        )
        at_tokens = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        # In float32: the steps of bfloat16 would make ties within a group.
        logits = at_tokens.float() @ self.head.T
        # Of the outputs (B, 3 tokens, outputs) each token has its own, or all have the
        # only one.
        if logits.shape[2] == 1:
            return logits.squeeze(2)
        return logits.diagonal(dim1=1, dim2=2)


def conversation(prompt: str, num_video_tokens: int) -> str:
    """The text about one video: its placeholders, then the questions with the prompt.

    Args:
        prompt: the text the video was generated from. Braces in it are ordinary
            characters. num_video_tokens: merged vision tokens of the video, one
            placeholder each.
    """
    question = QUESTIONS.replace("{text_prompt}", prompt)
    chat = CHAT.replace("{video}", VIDEO_TOKEN * num_video_tokens)
    return chat.replace("{question}", question)
