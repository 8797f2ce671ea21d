"""A whole transformer to disk, one tensor in memory at a time.

What `save_pretrained` would write, name by name and file by file, from tensors that are read one by one. A
transformer of 8.3 B float32 weights takes 33 GB, which the machine that exports it need not have.

Layout of a .safetensors file: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from sage_fast.config.files import replacing
from sage_fast.models.stored import INDEX, STEM

_ALIGNMENT = 64
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save_transformer(
    transformer: Any,
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype,
    *,
    max_shard_size: int | str = "10GB",
) -> None:
    """Write what `transformer.save_pretrained(folder)` would write, were its weights those that `read` returns.

    Args:
        transformer: says which weights there are; its own values do not matter.
        read: name -> tensor on the CPU, of the transformer's shape; called once for each, in the order of the files.
        dtype: of what is written.
        max_shard_size: largest file; the default is that of `save_pretrained`.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{STEM}*"):
        old.unlink()
    described = {
        name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in transformer.state_dict().items()
    }
    split = split_torch_state_dict_into_shards(
        described, filename_pattern=f"{STEM}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        with replacing(folder / file) as partial:
            _write(partial, {name: described[name] for name in names}, read)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        with replacing(folder / INDEX) as partial:
            partial.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    transformer.save_config(folder)


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
