"""Weights into a freshly loaded transformer: LoRA adapters from files, or what a
checkpoint has trained. For sampling and export nothing of it is trainable.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor, nn

from sage_fast.checkpoint.folder import MANIFEST
from sage_fast.checkpoint.reader import SavedTensors
from sage_fast.config.sections import LoraConfig, ModelConfig
from sage_fast.distributed.engine import check_same_shapes, shapes_of
from sage_fast.models.family import Components, family_of, open_components
from sage_fast.models.stored import is_dead
from sage_fast.policy.layouts import MERGE, adapter_files, read_adapter
from sage_fast.policy.lora import has_adapter, make_trainable, trainable_parameters


@torch.no_grad()
def use_weights(
    transformer: Any,
    weights: Mapping[str, Tensor],
    *,
    mode: Literal["lora", "full"],
    lora: LoraConfig,
) -> None:
    """Take over the weights that a run trained, by parameter name, as its checkpoints
    hold them.

    With mode `lora` the adapter is added first where there is none, and keeps its
    float32. ValueError when names or shapes do not fit.
    """
    if mode == "lora":
        make_trainable(transformer, mode, lora, seed=0)  # every value is replaced below
        parameters = trainable_parameters(transformer)
    else:
        # Not `make_trainable`, which wants float32 masters.
        dead = family_of(transformer).dead_modules(transformer)
        parameters = {
            name: p
            for name, p in transformer.named_parameters()
            if not is_dead(name, dead)
        }
    # Shapes come from the checkpoint's index, before any tensor is read.
    saved = weights.meta if isinstance(weights, SavedTensors) else weights
    check_same_shapes(shapes_of(parameters), shapes_of(saved), "weights")
    for name, parameter in parameters.items():
        # A look-up in a checkpoint reads one tensor, so it is never whole in memory.
        parameter.copy_(weights[name])
    transformer.requires_grad_(False)


def weights_digest(path: Path) -> str:
    """SHA-256 over the weights of a checkpoint folder, an adapter folder or an adapter
    file.

    ValueError as `adapter_files`.
    """
    digest = hashlib.sha256()
    manifest = path / MANIFEST
    # A manifest holds the digests of all the other files, which are gigabytes.
    for file in [manifest] if manifest.is_file() else adapter_files(path):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@torch.no_grad()
def use_adapter(transformer: Any, path: Path) -> None:
    """Take over a LoRA adapter in float32, as it was trained, instead of the one that
    is there. Nothing is trainable.

    Args:
        path: its folder or its file, see `read_adapter`.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is for another
            transformer.
    """
    pairs = read_adapter(path, family_of(transformer))
    if has_adapter(transformer):
        transformer.unload_lora()
    modules = {
        name: m for name, m in transformer.named_modules() if isinstance(m, nn.Linear)
    }
    for name, pair in pairs.items():
        if (layer := modules.get(name)) is None:
            raise ValueError(
                f"{path} adapts {name!r}, and this model has no linear layer of that "
                f"name. {MERGE}"
            )
        if (len(pair.b), pair.a.shape[1]) != layer.weight.shape:
            raise ValueError(
                f"{path} does not fit this model: its {name} has {pair.a.shape[1]} "
                f"inputs and {len(pair.b)} outputs, "
                f"and the model's has {layer.in_features} and {layer.out_features}."
            )
    most = max(len(pair.a) for pair in pairs.values())
    # peft compares a key with the end of a layer's name; `^` makes it the whole. With
    # alpha = rank everywhere the scale is 1: the pair's own is multiplied into lora_B.
    ranks: Any = {f"^{re.escape(name)}": len(pair.a) for name, pair in pairs.items()}
    transformer.add_adapter(
        PeftLoraConfig(
            r=most,
            lora_alpha=most,
            target_modules=[*pairs],
            rank_pattern=ranks,
            alpha_pattern=ranks,
        )
    )
    for name, parameter in transformer.named_parameters():
        layer, found, half = name.partition(".lora_")
        if found:
            pair = pairs[layer]
            value = pair.a if half.startswith("A.") else pair.b * pair.scale
            parameter.data = value.contiguous().to(parameter.device)
    transformer.requires_grad_(False)


@torch.no_grad()
def load_adapter(transformer: Any, path: Path) -> None:
    """Start training from an adapter: copy it into the freshly added, trainable one, in
    float32.

    lora_B is divided by this run's scale (alpha / rank), so that the model is the one
    that the adapter made.

    Args:
        path: its folder or its file, see `read_adapter`.

    Raises:
        ValueError: there is no such file, it cannot be read, or its layers or rank are
            not those of this run.
    """
    own = {
        re.sub(r"\.lora_([AB])\.[^.]+\.weight$", r".lora_\1.weight", name): parameter
        for name, parameter in trainable_parameters(transformer).items()
    }
    ((_, config),) = transformer.peft_config.items()
    family = family_of(transformer)
    scale = config.lora_alpha / config.r
    try:
        pairs = read_adapter(path, family)
    except ValueError as error:
        raise ValueError(f"model.adapter: {error}") from error
    values = dict[str, Tensor]()
    # An adapter from elsewhere may have pairs that change nothing here; this run's has
    # none for these layers.
    dead = family.dead_modules(transformer)
    for name, pair in pairs.items():
        if is_dead(name, dead):
            continue
        if not name.startswith(tuple(f"{e}{family.blocks}." for e in family.experts)):
            raise ValueError(
                f"model.adapter: {path} adapts {name!r}, which is outside the trained "
                f"blocks. {MERGE}"
            )
        values |= {
            f"{name}.lora_A.weight": pair.a,
            f"{name}.lora_B.weight": pair.b * (pair.scale / scale),
        }
    try:
        check_same_shapes(shapes_of(own), shapes_of(values), "adapter")
    except ValueError as error:
        raise ValueError(
            f"model.adapter: {path} does not fit this run's adapter: {error} Set "
            "lora.rank and lora.target_modules to "
            "those of the run that trained it."
        ) from error
    for name, parameter in own.items():
        parameter.copy_(values[name])


# --------------------------------------------------------------------------------------
# the start of a run


def load_model(
    model: ModelConfig, lora: LoraConfig, *, read: bool = True
) -> Components:
    """The model that a run starts from: the weights of `model.path` in `model.dtype`,
    and `model.adapter`, trainable.

    Whatever uses a run's model loads it here, so that all of them mean the same one.

    Args:
        read: False may leave the transformer's weights on disk (`Components.weights`),
            for who puts them elsewhere than into CPU memory, or wants a digest alone.

    Raises:
        As `open_components`, `make_trainable` and `load_adapter`.
    """
    components = open_components(model)
    transformer = components.transformer
    # Before the adapter is added, whose weights stay float32.
    family_of(transformer).cast(transformer, getattr(torch, model.dtype))
    if model.adapter is not None:
        make_trainable(transformer, "lora", lora, seed=0)  # every value is replaced
        load_adapter(transformer, Path(model.adapter))
    if read and components.weights is not None:
        components.weights.read_into(transformer)
    return components
