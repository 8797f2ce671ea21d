"""Makes an operator of PyTorch: Triton launcher, plain PyTorch twin, result shapes and gradient under one name.

A launcher and a reference take the same arguments; the schema is what PyTorch knows of them. Autograd, `torch.compile`,
FSDP2 and selective checkpointing see one operator, `torch.ops.sage_kernels.<name>`, and another for its backward pass.
On CUDA tensors an operator runs its launcher, on CPU tensors the reference, or the launcher if Triton interprets
(`common.runs_triton`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sage_kernels import common
from sage_kernels.launch import Kernel, recording

P = ParamSpec("P")
R = TypeVar("R")


class Gradient(NamedTuple):
    """How autograd differentiates an operator; both functions are those of `torch.library.register_autograd`.

    Example: `Gradient(save, backward)` with `save(ctx, inputs, output)` and `backward(ctx, *cotangents)`.
    """

    save: Callable[..., None]
    """Keeps on ctx what the backward pass needs."""
    backward: Callable[..., Any]
    """Calls the backward operator; returns one gradient or None per input."""


_launchers: dict[object, Callable[..., Any]] = {}


def operator(
    name: str,
    schema: str,
    *,
    launcher: Callable[..., Any],
    reference: Callable[P, R],
    shapes: Callable[..., Any],
    gradient: Gradient | None = None,
) -> Callable[P, R]:
    """Register `torch.ops.sage_kernels.<name>` and return it with the signature of its reference.

    Args:
        name: of the operator.
        schema: arguments and results as PyTorch writes them; the first argument is the tensor that says where to run.
        launcher: starts the Triton kernels.
        reference: the same in plain PyTorch.
        shapes: the same for tensors without data: empty tensors like the results, which are contiguous.
        gradient: None for an operator without one, as backward operators are.
    """

    plain: Callable[..., Any] = reference

    def run(*arguments: Any) -> Any:
        if common.runs_triton(arguments[0]):
            return launcher(*arguments)
        # Elementwise PyTorch keeps the strides of a permuted input; what is promised, here and in `shapes`, is dense.
        return tree_map_only(Tensor, Tensor.contiguous, plain(*arguments))

    made = torch.library.custom_op(f"sage_kernels::{name}", run, mutates_args=(), schema=" ".join(schema.split()))
    made.register_fake(shapes)
    if gradient is not None:
        made.register_autograd(gradient.backward, setup_context=gradient.save)
    overload = getattr(torch.ops.sage_kernels, name).default
    _launchers[overload] = launcher
    return cast(Callable[P, R], overload)


class _Launchers(TorchDispatchMode):
    """Runs the launcher of every operator instead of the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _launchers.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def recording_on_meta(capability: tuple[int, int]) -> Iterator[list[Kernel]]:
    """Note the kernels that operators would launch for tensors on the meta device; nothing is computed."""
    with recording(capability) as kernels, _Launchers():
        yield kernels
