"""Reading VideoAlign's checkpoint: its settings, and its weights as transformers' current Qwen2-VL holds them.

    checkpoints/                        https://huggingface.co/KwaiVGI/VideoReward
        model_config.json               data_config, model_config, peft_lora_config, inference_config
        checkpoint-11352/model.pth      every weight; or adapter_model.safetensors and non_lora_state_dict.pth

The weights are those of a PEFT model over transformers 4.45's Qwen2-VL. LoRA matrices are added to the weights they
adapt, in float32 before the one rounding to the run's data type: the model is frozen, and this way it costs nothing.
"""

import json
import math
import pickle
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.models.hub import checkpoint_folder, fetch_command
from sage_fast.rewards.videoalign.prompt import SPECIAL_TOKENS

REPOSITORY = "KwaiVGI/VideoReward"
DEFAULT_BASE_MODEL = "Qwen/Qwen2-VL-2B-Instruct"
SCORES = ("VQ", "MQ", "TA")

_FETCH_BASE_MODEL = f"`{fetch_command(DEFAULT_BASE_MODEL, folder='FOLDER')}`"

# Settings that this reward assumes; a checkpoint with others was trained differently.
_REQUIRED: tuple[tuple[str, str, object], ...] = (
    ("data_config", "prompt_template_type", "detailed_special"),
    ("data_config", "sample_type", "uniform"),
    ("data_config", "num_frames", None),
    ("model_config", "use_special_tokens", True),
    ("peft_lora_config", "vision_lora", False),
)


@dataclass(frozen=True, kw_only=True)
class VideoAlignSettings:
    """The part of model_config.json that inference needs.

    sample_fps: frames the model sees per second. max_frame_pixels: upper limit of a frame's area. lora_rank: rank of
    the LoRA matrices, 0 without LoRA. lora_scale: factor of their product. tuned_vision: the checkpoint brings its own
    vision tower. statistics: score -> (mean, std) of the training set, empty when the file has none.

    Example: `VideoAlignSettings(sample_fps=2.0, max_frame_pixels=200704, lora_rank=64, lora_scale=2.0,
    tuned_vision=True, statistics={"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)})`
    """

    sample_fps: float
    max_frame_pixels: int
    lora_rank: int
    lora_scale: float
    tuned_vision: bool
    statistics: Mapping[str, tuple[float, float]]

    @classmethod
    def read(cls, folder: Path) -> "VideoAlignSettings":
        """Settings of a checkpoint folder.

        Raises:
            FileNotFoundError: no model_config.json; the message holds the command that fetches it.
            ValueError: it is not a VideoAlign configuration, or one of a model that was trained otherwise.
        """
        path = folder / "model_config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing. The path of VideoAlign is the folder that holds model_config.json and "
                f"checkpoint-*/; fetch it with {_fetch_checkpoint(folder)}."
            )
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            data, model, lora = tree["data_config"], tree["model_config"], tree["peft_lora_config"]
            for section, key, required in _REQUIRED:
                if tree[section].get(key) != required:
                    raise ValueError(
                        f"{section}.{key} is {tree[section].get(key)!r}, and this reward implements {required!r}"
                    )
            rank = lora["lora_r"] if lora["lora_enable"] else 0
            given = tree.get("inference_config")
            statistics = {n: (float(given[f"{n}_mean"]), float(given[f"{n}_std"])) for n in SCORES} if given else {}
            for name, (_, std) in statistics.items():
                if not std > 0:
                    raise ValueError(f"inference_config.{name}_std is {std}, and a std must be positive")
            return cls(
                sample_fps=float(data["fps"]),
                max_frame_pixels=int(data["max_frame_pixels"]),
                lora_rank=rank,
                lora_scale=lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank) if rank else 0.0,
                tuned_vision=not model.get("freeze_vision_tower", False),
                statistics=statistics,
            )
        except KeyError as error:
            raise ValueError(f"{path} has no {error}; it is not VideoAlign's model_config.json.") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be used: {error}.") from error


def load_videoalign(
    folder: Path, settings: VideoAlignSettings, base_model: str, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Any]:
    """Model, reward head and tokenizer of a checkpoint.

    Args:
        folder: checkpoint folder, whose latest checkpoint-* is taken.
        settings: of that folder.
        base_model: folder, or hub id in the local cache, of Qwen2-VL-2B-Instruct: configuration, tokenizer and, for
            the layout with adapter_model.safetensors, weights. Nothing is downloaded.
        dtype: of the returned model.

    Returns:
        transformers' Qwen2VLModel on the CPU, in evaluation mode and without gradients; the head's weight, float32
        (1 or 3, hidden); the tokenizer with the reward tokens added.

    Raises:
        FileNotFoundError: a file is missing; the message holds the command that fetches it.
        OSError: the base model cannot be loaded.
        ValueError: a file is damaged, or checkpoint and base model do not fit together.
    """
    step = _latest_step(folder)
    base_folder = _base_model_folder(base_model)
    config, tokenizer = _base_model_parts(base_folder)
    state = _read_step(folder, step)
    if not (step / "model.pth").is_file():
        state = _base_weights(base_folder, settings.tuned_vision) | state
    head = state.pop("rm_head.weight", None)
    # No text is generated.
    state.pop("lm_head.weight", None)

    embedding = state.get("language_model.embed_tokens.weight")
    if embedding is not None:
        if embedding.shape[0] != len(tokenizer):
            raise ValueError(
                f"{step} was trained with {embedding.shape[0]} tokens, and the tokenizer of base_model {base_model!r} "
                f"has {len(tokenizer)} with the reward tokens {', '.join(SPECIAL_TOKENS)}. VideoAlign is built on "
                f"{DEFAULT_BASE_MODEL}; fetch it with {_FETCH_BASE_MODEL}."
            )
        config.text_config.vocab_size = embedding.shape[0]
    model = _empty_model(config)
    linears = [name for name, module in model.language_model.named_modules() if isinstance(module, nn.Linear)]
    if settings.lora_rank:
        _fold_lora(state, [f"language_model.{name}" for name in linears], settings, step)
    _check_fit(model, head, state, step)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    assert head is not None  # or _check_fit has raised
    return model.requires_grad_(False).eval(), head.float(), tokenizer


def _latest_step(folder: Path) -> Path:
    steps = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint-* folder with weights. Fetch it with {_fetch_checkpoint(folder)}."
        )
    return max(steps, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _read_step(folder: Path, step: Path) -> dict[str, Tensor]:
    """All tensors of a step by their current names."""
    full = step / "model.pth"
    adapter, rest = step / "adapter_model.safetensors", step / "non_lora_state_dict.pth"
    if full.is_file():
        return _current_names(_read_pickled(full, folder))
    missing = [path.name for path in (adapter, rest) if not path.is_file()]
    if missing:
        instead = "model.pth" if len(missing) == 2 else " and ".join(missing)
        raise FileNotFoundError(
            f"{step} lacks {instead}: its weights are model.pth, or adapter_model.safetensors with "
            f"non_lora_state_dict.pth. Fetch it with {_fetch_checkpoint(folder)}."
        )
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        matrices = load_file(adapter)
    except SafetensorError as error:
        raise ValueError(_damaged(adapter, folder)) from error
    return _current_names(matrices | _read_pickled(rest, folder))


def _read_pickled(path: Path, folder: Path) -> dict[str, Tensor]:
    try:
        # Mapped, so that the processes of a node share one copy while they load.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(_damaged(path, folder)) from error


def _fetch_checkpoint(folder: Path) -> str:
    return f"`{fetch_command(REPOSITORY, folder=folder)}`"


def _damaged(path: Path, folder: Path) -> str:
    return (
        f"{path} ({path.stat().st_size:,} bytes) cannot be read as weights. Is the download incomplete, or the file a "
        f"Git LFS pointer? Fetch it again with {_fetch_checkpoint(folder)}."
    )


def _current_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's wrapping taken off, and module paths as transformers has them since 4.52.

    Until then `Qwen2VLForConditionalGeneration` held `visual` and `model`, the language model; since then both are
    inside its `model`, the `Qwen2VLModel` that is used here.
    """
    names = {}
    for key, tensor in state.items():
        name = key.removeprefix("base_model.model.")
        name = name.replace(".base_layer.", ".").replace(".lora_A.default.", ".lora_A.")
        name = name.replace(".lora_B.default.", ".lora_B.")
        if name.startswith(("model.visual.", "model.language_model.")):
            name = name.removeprefix("model.")
        elif name.startswith("model."):
            name = f"language_{name}"
        names[name] = tensor
    return names


def _base_model_folder(base_model: str) -> Path:
    """The folder of the base model. OSError, with the command that fetches it, when there is none."""
    try:
        return checkpoint_folder(base_model, "reward.options.videoalign.base_model")
    except OSError as error:
        # A name with another number of slashes than the hub's `owner/name` is meant as a folder.
        where = "nor is it in the hub's local cache" if base_model.count("/") == 1 else "and it is no hub id"
        raise OSError(_base_model_message(base_model, f"there is no such folder, {where}")) from error


def _base_model_parts(base_model: Path) -> tuple[Any, Any]:
    """Configuration and tokenizer of the base model, the reward tokens added to the tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(base_model, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError) as error:
        raise OSError(_base_model_message(base_model, _first_line(error))) from error
    if config.model_type != "qwen2_vl":
        raise ValueError(
            f"base_model '{base_model}' is a {config.model_type} model, and VideoAlign is built on "
            f"{DEFAULT_BASE_MODEL}. Fetch it with {_FETCH_BASE_MODEL}."
        )
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    return config, tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(" .:")


def _base_model_message(base_model: str | Path, reason: str) -> str:
    return (
        f"base_model '{base_model}' cannot be loaded: {reason}. It is a folder or the hub id of Qwen2-VL-2B-Instruct. "
        f"Fetch it with {_FETCH_BASE_MODEL} and set base_model to that folder."
    )


def _base_weights(base_model: Path, tuned_vision: bool) -> dict[str, Tensor]:
    """The weights that a checkpoint with adapter_model.safetensors takes from the base model."""
    from transformers import Qwen2VLForConditionalGeneration

    try:
        model, info = Qwen2VLForConditionalGeneration.from_pretrained(
            base_model, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise OSError(_base_model_message(base_model, _first_line(error))) from error
    if info["missing_keys"]:
        raise ValueError(
            f"The weights of base_model '{base_model}' are incomplete: {_some(info['missing_keys'])} missing. "
            f"Fetch it with {_FETCH_BASE_MODEL}."
        )
    # The checkpoint's own: rows of the reward tokens, and the tuned tower.
    own = ("language_model.embed_tokens.",) + (("visual.",) if tuned_vision else ())
    return {name: tensor for name, tensor in model.model.state_dict().items() if not name.startswith(own)}


def _empty_model(config: Any) -> Any:
    """Qwen2VLModel whose parameters have no memory yet; its buffers, which no file holds, are there."""
    from accelerate import init_empty_weights
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    with init_empty_weights(include_buffers=False):
        return Qwen2VLModel(config)


def _fold_lora(state: dict[str, Tensor], modules: Collection[str], settings: VideoAlignSettings, step: Path) -> None:
    """Add the product of every pair of LoRA matrices to the weight it adapts."""
    missing = []
    for module in modules:
        names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        absent = [name for name in names if name not in state]
        if absent or f"{module}.weight" not in state:
            missing += absent
            continue
        down, up = (state.pop(name).float() for name in names)
        if down.shape[0] != settings.lora_rank:
            raise ValueError(
                f"{step}: {names[0]} has rank {down.shape[0]}, and model_config.json says lora_r = "
                f"{settings.lora_rank}. The two files are not of one checkpoint."
            )
        state[f"{module}.weight"] = state[f"{module}.weight"].float() + settings.lora_scale * (up @ down)
    if missing:
        raise ValueError(f"{step} has no {_some(missing)}, though model_config.json says that it was tuned with LoRA.")


def _check_fit(model: nn.Module, head: Tensor | None, state: Mapping[str, Tensor], step: Path) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = sorted(expected.keys() - state.keys()) + ([] if head is not None else ["rm_head.weight"])
    unexpected = sorted(state.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"The weights of {step} do not fit Qwen2-VL: missing {_some(missing)}; unexpected {_some(unexpected)}. "
            "Is it a checkpoint of VideoAlign, and base_model the model it was trained from?"
        )
    wrong = [f"{n} {tuple(state[n].shape)}, not {tuple(s)}" for n, s in expected.items() if state[n].shape != s]
    if wrong:
        raise ValueError(
            f"The weights of {step} have other shapes than base_model's configuration gives: {_some(wrong)}. "
            f"VideoAlign is built on {DEFAULT_BASE_MODEL}."
        )
    assert head is not None
    hidden = expected["language_model.norm.weight"][0]
    if head.dim() != 2 or head.shape[0] not in (1, len(SCORES)) or head.shape[1] != hidden:
        raise ValueError(
            f"{step}: rm_head.weight has shape {tuple(head.shape)}; it must be (3, {hidden}), or (1, {hidden}) for a "
            "head that the three tokens share."
        )


def _some(names: Collection[str], limit: int = 6) -> str:
    listed = ", ".join(list(names)[:limit]) or "none"
    return listed + (f" and {len(names) - limit} more" if len(names) > limit else "")
