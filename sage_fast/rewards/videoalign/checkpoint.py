"""Reading VideoAlign's checkpoint: its settings, and its weights as transformers'
current Qwen2-VL holds them.

    checkpoints/                        https://huggingface.co/KwaiVGI/VideoReward
        model_config.json               data_config, model_config, peft_lora_config, inference_config
        checkpoint-11352/model.pth      every weight

The weights are those of a PEFT model over transformers 4.45's Qwen2-VL. LoRA matrices
are added to the weights they adapt, in float32 before the one rounding to the run's
data type: the model is frozen, and this way it costs nothing.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.config.files import loads
from sage_fast.models.hub import checkpoint_folder, fetch_command
from sage_fast.models.stored import check_types

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


@dataclass(frozen=True, kw_only=True)
class VideoAlignSettings:
    """The part of model_config.json that inference needs.

    sample_fps: frames the model sees per second. max_frame_pixels: upper limit of a
    frame's area. lora_rank: rank of the LoRA matrices, 0 without LoRA. lora_scale:
    factor of their product. statistics: score -> (mean, std) of the training set.

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
                name: (float(given[f"{name}_mean"]), float(given[f"{name}_std"]))
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
