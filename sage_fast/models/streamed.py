"""A whole transformer to disk, one tensor in memory at a time, in the layout of any program.

In diffusers' it is what `save_pretrained` would write, name by name and file by file, from tensors that are read one by
one. A transformer of 8.3 B float32 weights takes 33 GB, which the machine that exports it need not have.

Layout of a .safetensors file: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from sage_fast.config.files import replacing, write_text
from sage_fast.models.stored import INDEX, STEM
from sage_fast.models.transformer import Layout, backbone

_ALIGNMENT = 64
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_transformer(
    transformer: Any,
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype,
    *,
    layout: Layout = "diffusers",
    max_shard_size: int | str = "10GB",
) -> None:
    """Write what `transformer.save_pretrained(folder)` would write, were its weights those that `read` returns.

    Args:
        transformer: says which weights there are; its own values do not matter.
        read: name -> tensor on the CPU, of the transformer's shape; called once for each.
        dtype: of what is written.
        layout: of the files; ComfyUI's is one file without a configuration.
        max_shard_size: largest file, where there may be several; the default is that of `save_pretrained`.

    Raises:
        ValueError: the transformer is not of that layout's program. OSError: the folder cannot be written to.
    """
    code, ours = backbone(transformer), transformer.state_dict()
    stored = code.stored_weights(ours, layout)
    config = code.stored_config(transformer.config, layout)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{STEM}*"):
        old.unlink()
    described = {
        name: tensor.make(lambda source: torch.empty(ours[source].shape, dtype=dtype, device="meta"))
        for name, tensor in stored.items()
    }
    split = split_torch_state_dict_into_shards(
        described,
        filename_pattern=f"{STEM}{{suffix}}.safetensors",
        max_shard_size=sys.maxsize if layout == "comfyui" else max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        with replacing(folder / file) as partial:
            _write(partial, {name: described[name] for name in names}, lambda name: stored[name].make(read))
    if split.is_sharded:
        _write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    if config is not None:
        _write_json(folder / "config.json", config)
    elif layout == "diffusers":
        transformer.save_config(folder)


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(tree, indent=2, sort_keys=True) + "\n")


def _write(path: Path, described: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """One .safetensors file: its header, then the bytes of every tensor."""
    # Files are mapped into memory as they are, and arithmetic on tensors at odd addresses is slower and rounds
    # differently. There may be no gaps, so what has an odd size comes last.
    names = sorted(described, key=lambda name: -math.gcd(described[name].nbytes, _ALIGNMENT))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = described[name]
        end = position + tensor.nbytes
        offsets = {"shape": list(tensor.shape), "data_offsets": [position, end]}
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype]} | offsets
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            value = read(name).to(described[name].dtype).contiguous()
            assert value.shape == described[name].shape, name
            file.write(value.flatten().view(torch.uint8).numpy().data)
