"""VideoAlign (KwaiVGI/VideoReward), the reward of the SAGE-GRPO paper: visual quality,
motion quality, text alignment.

Qwen2-VL-2B reads the frames and a fixed questionnaire with the prompt in it; a linear
head turns its hidden states at three special tokens into scores.
https://arxiv.org/abs/2501.13918, https://github.com/KwaiVGI/VideoAlign.

    checkpoints/                        https://huggingface.co/KwaiVGI/VideoReward
        model_config.json               data_config, model_config, peft_lora_config, inference_config
        checkpoint-11352/model.pth      every weight

The weights are those of a PEFT model over transformers 4.45's Qwen2-VL. LoRA matrices
are added to the weights they adapt, in float32 before the one rounding to the run's
data type: the model is frozen, and this way it costs nothing.

Frames are prepared on tensors, without torchvision, by the rules of VideoAlign's reader
(vision_process.py, after qwen-vl-utils) and of Qwen2-VL's image processor in
transformers; both were part of the reward model's training.
"""

import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_fast.config.errors import RewardError
from sage_fast.config.files import loads
from sage_fast.config.sections import VideoConfig
from sage_fast.models.hub import (
    Requirement,
    checkpoint_folder,
    fetch_command,
    missing_files,
    require,
)
from sage_fast.models.stored import check_types
from sage_fast.rewards.base import (
    RewardCosts,
    Scale,
    check_counts,
    check_videos,
    resolve_device,
    resolve_dtype,
)

REPOSITORY = "KwaiVGI/VideoReward"
DEFAULT_BASE_MODEL = "Qwen/Qwen2-VL-2B-Instruct"
SCORES = ("VQ", "MQ", "TA")
SPECIAL_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
"""Tokens added to Qwen2-VL's vocabulary, in this order. The model's answer stands at
their positions.
"""

# Settings that this reward assumes; a checkpoint with others was trained differently.
_REQUIRED: tuple[tuple[str, str, object], ...] = (
    ("data_config", "prompt_template_type", "detailed_special"),
    ("data_config", "sample_type", "uniform"),
    ("data_config", "num_frames", None),
    ("model_config", "use_special_tokens", True),
    ("peft_lora_config", "vision_lora", False),
    ("peft_lora_config", "use_rslora", False),
)


def _positive(values: Mapping[str, Any], name: str) -> float:
    value = float(values[name])
    if not value > 0:
        raise ValueError(f"inference_config.{name} is {value}; it must be positive")
    return value


@dataclass(frozen=True, kw_only=True)
class VideoAlignSettings:
    """The part of model_config.json that inference needs.

    Attributes:
        sample_fps: frames the model sees per second.
        max_frame_pixels: upper limit of a frame's area.
        lora_rank: rank of the LoRA matrices, 0 without LoRA.
        lora_scale: factor of their product.
        statistics: score -> (mean, std) of the training set.

    Example: `VideoAlignSettings(sample_fps=2.0, max_frame_pixels=200704, lora_rank=64,
    lora_scale=2.0, statistics={"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA":
    (2.8105, 2.5121)})`
    """

    sample_fps: float
    max_frame_pixels: int
    lora_rank: int
    lora_scale: float
    statistics: Mapping[str, tuple[float, float]]

    @classmethod
    def read(cls, folder: Path) -> "VideoAlignSettings":
        """Settings of a checkpoint folder.

        Raises:
            FileNotFoundError: no model_config.json; the message holds the command that
                fetches it. ValueError: it is not a VideoAlign configuration, or one of
                a model that was trained otherwise.
        """
        path = folder / "model_config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing. The path of VideoAlign is the folder that holds "
                f"model_config.json and checkpoint-*/. {_fetch_checkpoint(folder)}."
            )
        try:
            tree = loads(path.read_text(encoding="utf-8"))
            for section, key, required in _REQUIRED:
                if tree[section].get(key) != required:
                    raise ValueError(
                        f"{section}.{key} is {tree[section].get(key)!r}, and this "
                        f"reward implements {required!r}"
                    )
            lora = tree["peft_lora_config"]
            rank = lora["lora_r"] if lora["lora_enable"] else 0
            given = tree["inference_config"]
            statistics = {
                name: (float(given[f"{name}_mean"]), _positive(given, f"{name}_std"))
                for name in SCORES
            }
            return cls(
                sample_fps=float(tree["data_config"]["fps"]),
                max_frame_pixels=int(tree["data_config"]["max_frame_pixels"]),
                lora_rank=rank,
                lora_scale=lora["lora_alpha"] / rank if rank else 0.0,
                statistics=statistics,
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be used as VideoAlign's model_config.json: "
                f"{type(error).__name__}: {error}."
            ) from error


def load_videoalign(
    folder: Path, settings: VideoAlignSettings, base_model: str, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Any]:
    """Model, reward head and tokenizer of a checkpoint.

    Args:
        folder: checkpoint folder, whose latest checkpoint-* is taken.
        settings: of that folder.
        base_model: folder, or hub id in the local cache, of Qwen2-VL-2B-Instruct, for
            configuration and tokenizer. Nothing is downloaded.
        dtype: of the returned model.

    Returns:
        transformers' Qwen2VLModel on the CPU, in evaluation mode and without gradients;
        the head's weight, float32 (1 or 3, hidden); the tokenizer with the reward
        tokens added.

    Raises:
        FileNotFoundError: a file is missing; the message holds the command that fetches
            it.
        OSError: the base model is missing or cannot be loaded.
        ValueError: a file is damaged, or checkpoint and base model do not fit together.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal():
            steps[int(number)] = path
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint-* folder with weights. "
            f"{_fetch_checkpoint(folder)}."
        )
    step = steps[max(steps)]
    base = checkpoint_folder(
        base_model, "reward.options.videoalign.base_model", "*.json", "*.txt"
    )
    config: Any = AutoConfig.from_pretrained(base, attn_implementation="sdpa")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    state = _current_names(_read_weights(step / "model.pth", folder))
    head = state.pop("rm_head.weight", torch.empty(0))
    # No text is generated.
    state.pop("lm_head.weight", None)

    config.text_config.vocab_size = len(tokenizer)
    # The parameters have no memory yet; the buffers, which no file holds, have.
    with init_empty_weights(include_buffers=False):
        model: Any = Qwen2VLModel(config)
    if settings.lora_rank:
        for name, module in model.named_modules():
            if name.startswith("language_model.") and isinstance(module, nn.Linear):
                _fold_lora(state, name, settings, step)
    hidden = config.text_config.hidden_size
    if head.shape not in ((1, hidden), (len(SCORES), hidden)):
        raise ValueError(
            f"{step}: rm_head.weight has shape {tuple(head.shape)}; it must be (3, "
            f"{hidden}), or (1, {hidden}) for a head that the three tokens share."
        )
    try:
        # Assigned and not copied, since the parameters have no memory to copy into.
        model.load_state_dict(
            {name: tensor.to(dtype) for name, tensor in state.items()}, assign=True
        )
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {step} do not fit Qwen2-VL: "
            f"{' '.join(str(error).split()):.500}. Is it a checkpoint of VideoAlign, "
            f"and base_model the model it was trained from, {DEFAULT_BASE_MODEL}?"
        ) from error
    return model.requires_grad_(False).eval(), head.float(), tokenizer


def _fetch_checkpoint(folder: Path) -> str:
    return f"Fetch it with `{fetch_command(REPOSITORY, folder=folder)}`"


def _read_weights(path: Path, folder: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} lacks {path.name}. {_fetch_checkpoint(folder)}."
        )
    try:
        # Mapped, so that the processes of a node share one copy while they load.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as weights. Is "
            "the download incomplete, or the file a Git LFS pointer? "
            f"{_fetch_checkpoint(folder)}."
        ) from error
    check_types(path, {name: tensor.dtype for name, tensor in state.items()})
    return state


def _current_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take PEFT's wrapping off, and give modules the paths that transformers has had
    since 4.52.

    Until then `Qwen2VLForConditionalGeneration` held `visual` and `model`, the language
    model; since then both are inside its `model`, the `Qwen2VLModel` that is used here.
    """
    names = {}
    for key, tensor in state.items():
        name = key.removeprefix("base_model.model.")
        for wrapping in (".base_layer", ".default"):
            name = name.replace(f"{wrapping}.", ".")
        if name.startswith("model."):
            name = f"language_{name}"
        names[name] = tensor
    return names


def _fold_lora(
    state: dict[str, Tensor], module: str, settings: VideoAlignSettings, step: Path
) -> None:
    """Add the product of a layer's LoRA matrices to the weight it adapts. A layer
    without them is an error.
    """
    try:
        down = state.pop(f"{module}.lora_A.weight").float()
        up = state.pop(f"{module}.lora_B.weight").float()
        weight = state[f"{module}.weight"].float()
    except KeyError as error:
        raise ValueError(
            f"{step} has no {error}, though model_config.json says it was tuned with "
            "LoRA."
        ) from error
    if down.shape[0] != settings.lora_rank:
        raise ValueError(
            f"{step}: {module}.lora_A.weight has rank {down.shape[0]}, and "
            f"model_config.json says lora_r = {settings.lora_rank}. The two files are "
            "not of one checkpoint."
        )
    state[f"{module}.weight"] = weight + settings.lora_scale * (up @ down)


PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
SIZE_FACTOR = PATCH_SIZE * MERGE_SIZE

MIN_FRAMES = 4
MAX_FRAMES = 768
MIN_FRAME_PIXELS = 128 * SIZE_FACTOR**2
THETA = 10000.0

# OpenAI CLIP's statistics, as in Qwen2-VL's preprocessor_config.json.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def frame_indices(num_frames: int, fps: float, sample_fps: float) -> list[int]:
    """Frames that the model sees: an even number of them, evenly from the first frame
    to the last.

    Args:
        num_frames: frames of the video.
        fps: frames per second the video is played at.
        sample_fps: frames to see per second. At least 4 are seen, and of a shorter
            video all but an odd one.

    Raises:
        ValueError: fewer than two frames, which no temporal patch can be made of.
    """
    if num_frames < TEMPORAL_PATCH_SIZE:
        raise ValueError(
            f"a video of {num_frames} frame(s) cannot be scored: Qwen2-VL reads "
            "frames in pairs; give at least 2"
        )
    longest = min(MAX_FRAMES, num_frames) // TEMPORAL_PATCH_SIZE * TEMPORAL_PATCH_SIZE
    wanted = min(max(num_frames / fps * sample_fps, MIN_FRAMES), longest)
    # `round` takes halves to the even neighbour, and so did the training.
    count = round(wanted / TEMPORAL_PATCH_SIZE) * TEMPORAL_PATCH_SIZE
    return torch.linspace(0, num_frames - 1, count).round().long().tolist()


def frame_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Height and width that a frame is resized to: multiples of 28 with about its
    aspect ratio.

    Between 100,352 and `max_pixels` pixels: small frames are enlarged.
    """
    rows = max(1, round(height / SIZE_FACTOR))
    columns = max(1, round(width / SIZE_FACTOR))
    # Sides are rounded down where the frame is too large, and up where it is too small:
    # so the limit holds.
    if rows * columns * SIZE_FACTOR**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / SIZE_FACTOR))
        columns = max(1, math.floor(width / shrink / SIZE_FACTOR))
    elif rows * columns * SIZE_FACTOR**2 < MIN_FRAME_PIXELS:
        grow = math.sqrt(MIN_FRAME_PIXELS / (height * width))
        rows = math.ceil(height * grow / SIZE_FACTOR)
        columns = math.ceil(width * grow / SIZE_FACTOR)
    return rows * SIZE_FACTOR, columns * SIZE_FACTOR


def resize_frames(frames: Tensor, height: int, width: int) -> Tensor:
    """Bicubic resize with antialiasing to whole levels, as an image library gives:
    float32 (N, 3, height, width).

    Args:
        frames: (N, 3, H, W) uint8.
    """
    levels = frames.float()
    if frames.shape[-2:] != (height, width):
        levels = F.interpolate(
            levels, size=(height, width), mode="bicubic", antialias=True
        )
    # Back to the 256 levels of the uint8 frames that the model was trained on.
    return levels.clamp(0, 255).round()


def pixel_patches(levels: Tensor) -> Tensor:
    """Normalised patches in the order of Qwen2-VL: two frames deep, the four that merge
    into one token side by side.

    Args:
        levels: (B, F, 3, H, W) float32, 0 to 255; F even, H and W multiples of 28.

    Returns:
        float32 (B * F/2 * H/14 * W/14, 1176), a row per patch (colour, frame, row,
        column).
    """
    mean, std = (
        torch.tensor(values, device=levels.device).view(3, 1, 1)
        for values in (PIXEL_MEAN, PIXEL_STD)
    )
    pixels = (levels / 255 - mean) / std
    batch, num_frames, _, height, width = pixels.shape
    patches = pixels.view(
        batch * num_frames // TEMPORAL_PATCH_SIZE,
        TEMPORAL_PATCH_SIZE,
        3,
        height // SIZE_FACTOR,
        MERGE_SIZE,
        PATCH_SIZE,
        width // SIZE_FACTOR,
        MERGE_SIZE,
        PATCH_SIZE,
    )
    # Pair of frames, block of four patches, patch within the block; then the patch's
    # own pixels.
    patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(-1, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2)


def vision_angles(
    grid: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (patches, width) in `dtype`: positions, frequencies and angles
    are all rounded to it.

    VideoAlign's training and inference call `model.to(torch.bfloat16)`, which rounds
    these buffers in transformers 4.45.2, the release it was trained with; newer ones
    keep them in float32.
    Source: VisionRotaryEmbedding, rot_pos_emb and apply_rotary_pos_emb_vision of
    4.45.2.

    Args:
        grid: pairs of frames, rows and columns of patches.
        width: of a head.
    """
    pairs, rows, columns = grid
    exponents = torch.arange(0, width // 2, 2, dtype=torch.float, device=device) / (
        width // 2
    )
    frequencies = (1.0 / THETA**exponents).to(dtype)
    table = torch.outer(
        torch.arange(max(rows, columns), dtype=dtype, device=device), frequencies
    )
    # Row and column of each patch, the four that merge into one token side by side.
    places = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
    )
    places = (
        places.unflatten(0, (-1, MERGE_SIZE))
        .unflatten(2, (-1, MERGE_SIZE))
        .transpose(1, 2)
        .reshape(-1, 2)
    )
    angles = table[places.repeat(pairs, 1).to(device)].flatten(1)
    return torch.cat([angles.cos()] * 2, dim=1), torch.cat([angles.sin()] * 2, dim=1)


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
QUESTIONS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")


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
            advice of `doctor` puts it.
        fps: frames per second that the videos are meant to be played at. Set it to
            `video.fps`: 2 frames of a second are scored, so it decides which ones, and
            a wrong value changes every score.
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
        indices = frame_indices(videos.shape[1], self.fps, self.settings.sample_fps)
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
        height, width = frame_size(
            frames.shape[3], frames.shape[4], self.settings.max_frame_pixels
        )
        levels = resize_frames(frames.flatten(0, 1), height, width).unflatten(
            0, (batch, num_frames)
        )
        patches = pixel_patches(levels).to(self.dtype)
        grid = (
            num_frames // TEMPORAL_PATCH_SIZE,
            height // PATCH_SIZE,
            width // PATCH_SIZE,
        )
        attention = self.model.visual.blocks[0].attn
        head_width = attention.qkv.in_features // attention.num_heads
        cos, sin = vision_angles(grid, head_width, self.dtype, self.device)
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
            characters.
        num_video_tokens: merged vision tokens of the video, one placeholder each.
    """
    question = QUESTIONS.replace("{text_prompt}", prompt)
    chat = CHAT.replace("{video}", VIDEO_TOKEN * num_video_tokens)
    return chat.replace("{question}", question)
