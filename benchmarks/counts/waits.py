"""Where a program waits for the GPU, found without one: the meta device plays the GPU.

A meta tensor has no data, so every operator that needs some on the host would fail there. `answer` recognises these
operators and answers in their place, so that they can be counted and the program goes on.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SCALARS = frozenset({"_local_scalar_dense", "item"})
COMPARISONS = frozenset({"is_nonzero", "equal"})
MASKED = frozenset({"nonzero", "masked_select", "index"})
"""Their result has as many rows as a mask has ones, which the host must know."""


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """[what the operator would return], or nothing for an operator that does not wait for the device.

    Numbers are 1, tensors copied to the host are full of ones (False where they are bool, since masks of what is wrong
    come this way), masks select everything.
    """
    name = func.overloadpacket.__name__
    if not any(tensor.device.type == "meta" for tensor in _tensors((args, kwargs))):
        return []
    if name in SCALARS:
        return [torch.ones((), dtype=args[0].dtype).item()]
    if name in COMPARISONS:
        return [True]
    if name == "_to_copy" and "device" in kwargs and torch.device(kwargs["device"] or "meta").type == "cpu":
        dtype = kwargs.get("dtype") or args[0].dtype
        return [torch.full(args[0].shape, float(dtype != torch.bool), dtype=dtype)]
    if name == "copy_" and args[0].device.type == "cpu":
        return [args[0]]
    if name in MASKED:
        source: Tensor = args[0]
        if name == "nonzero":
            return [source.new_empty((source.numel(), source.ndim), dtype=torch.int64)]
        masks = [m for m in (args[1] if name == "index" else args[1:2]) if m is not None]
        if any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            size = source.shape[masks[0].ndim :] if name == "index" else ()
            return [source.new_empty((masks[0].numel(), *size))]
    return []


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
