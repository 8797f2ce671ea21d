"""Trained weights into a freshly loaded transformer, for sampling and export: no
optimizer, nothing trainable.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sage_fast.checkpoint.folder import MANIFEST
from sage_fast.checkpoint.reader import SavedTensors
from sage_fast.config.sections import LoraConfig
from sage_fast.distributed.engine import check_same_shapes, shapes_of
from sage_fast.models.family import family_of
from sage_fast.models.transformer import is_dead
from sage_fast.policy.layouts import adapter_files
from sage_fast.policy.lora import make_trainable, trainable_parameters


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
