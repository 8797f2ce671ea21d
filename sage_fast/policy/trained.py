"""Trained weights into a freshly loaded transformer, for sampling and export: no optimizer, nothing trainable."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sage_fast.checkpoint import MANIFEST, SavedTensors
from sage_fast.config.sections import LoraConfig
from sage_fast.distributed.engine import check_same_shapes, shapes_of
from sage_fast.models.transformer import backbone, is_dead
from sage_fast.policy.lora import ADAPTER_FILE, make_trainable, trainable_parameters


@torch.no_grad()
def use_weights(
    transformer: HunyuanVideo15Transformer3DModel,
    weights: Mapping[str, Tensor],
    *,
    mode: Literal["lora", "full"],
    lora: LoraConfig,
) -> None:
    """Take over the weights that a run trained, by parameter name, as its checkpoints hold them.

    With mode `lora` the adapter is added first, and keeps its float32. ValueError when names or shapes do not fit.
    """
    if mode == "lora":
        make_trainable(transformer, mode, lora, seed=0)  # every value is replaced below
        parameters = trainable_parameters(transformer)
    else:
        parameters = whole_parameters(transformer)
    saved = weights.meta if isinstance(weights, SavedTensors) else weights
    check_same_shapes(shapes_of(parameters), shapes_of(saved), "weights")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    transformer.requires_grad_(False)


def whole_parameters(transformer: HunyuanVideo15Transformer3DModel) -> dict[str, nn.Parameter]:
    """The weights that training.mode full trains, by name: all that can influence a velocity."""
    dead = backbone(transformer).dead_modules(transformer)
    return {n: p for n, p in transformer.named_parameters() if not is_dead(n, dead)}


def adapter_file(path: Path) -> Path:
    """The .safetensors file of an adapter, from its folder or its own path. ValueError when there is none."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"There is no adapter {file}. Give a folder that `sage-fast export` wrote, the lora/ folder of a "
            "checkpoint, or a .safetensors file."
        )
    return file


def read_adapter(file: Path) -> dict[str, Tensor]:
    """A LoRA adapter by diffusers' names, in float32, from a file in diffusers' layout.

    Its scale is 1: alpha / rank, where the file tells them, is multiplied into lora_B. A file that does not has alpha =
    rank, as diffusers takes it. ValueError for a file of another kind.
    """
    try:
        values = load_file(file)
        with safe_open(file, "pt") as opened:
            described = json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
        scale = float(described.get("lora_alpha", 1)) / float(described.get("r", 1))
    except (ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"{file} is not a LoRA adapter in diffusers' layout: {error}") from error
    adapter = {name.removeprefix("transformer."): value for name, value in values.items()}
    return {name: value.float() * (scale if ".lora_B." in name else 1) for name, value in adapter.items()}


@torch.no_grad()
def use_adapter(transformer: HunyuanVideo15Transformer3DModel, path: Path) -> None:
    """Take over a LoRA adapter in float32, as it was trained (diffusers alone would round it to the transformer's
    dtype).

    Args:
        path: its folder, or the .safetensors file, in diffusers' layout.

    Raises:
        ValueError: there is no such file, or it is for another transformer.
    """
    file = adapter_file(path)
    values = read_adapter(file)
    modules = {re.sub(r"\.lora_[AB]\.weight$", "", name) for name in values}
    unknown = sorted(modules - {name for name, _ in transformer.named_modules()})
    if unknown or not values:
        what = f"has an adapter for {unknown[0]!r}, which the model lacks" if unknown else "is empty"
        raise ValueError(f"{file} {what}. Give a LoRA adapter of HunyuanVideo-1.5 in diffusers' layout.")
    try:
        transformer.load_lora_adapter(values, prefix=None)
    except RuntimeError as error:  # shapes that differ
        raise ValueError(f"{file} does not fit this model: {error}") from error
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = values[_saved_name(name)].to(parameter.device)
    transformer.requires_grad_(False)


@torch.no_grad()
def load_adapter(transformer: HunyuanVideo15Transformer3DModel, path: Path) -> None:
    """Start training from an adapter: copy it into the freshly added, trainable one, in float32.

    lora_B is divided by this run's scale (alpha / rank), so that the model is the one that the adapter made.

    Args:
        path: its folder, or the .safetensors file, in diffusers' layout.

    Raises:
        ValueError: there is no such file, or its layers or rank are not those of this run.
    """
    file = adapter_file(path)
    own = {_saved_name(name): parameter for name, parameter in trainable_parameters(transformer).items()}
    try:
        values = read_adapter(file)
        check_same_shapes(shapes_of(own), shapes_of(values), "adapter")
    except ValueError as error:
        raise ValueError(
            f"model.adapter: {file} does not fit this run's adapter: {error} Set lora.rank and lora.target_modules to "
            "those of the run that trained it."
        ) from error
    ((_, config),) = transformer.peft_config.items()
    for name, parameter in own.items():
        parameter.copy_(values[name] / (config.lora_alpha / config.r) if ".lora_B." in name else values[name])


def _saved_name(name: str) -> str:
    """Name in a file of a parameter of an adapter, which has the adapter's own name in it."""
    return re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", name)


def weights_digest(path: Path) -> str:
    """SHA-256 over the weights of a checkpoint folder, an adapter folder or an adapter file."""
    digest = hashlib.sha256()
    if (path / MANIFEST).is_file():
        files = [path / MANIFEST]  # it holds the digests of all the others, which are gigabytes
    else:
        files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
