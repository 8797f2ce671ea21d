"""Makes an operator of PyTorch: Triton launcher, plain PyTorch twin and gradient under
one name.

A launcher and a reference take the same arguments; the schema is what PyTorch knows of
them. Autograd, `torch.compile`, FSDP2 and selective checkpointing see one operator,
`torch.ops.sage_kernels.<name>`, and another for its backward pass. On CUDA tensors an
operator runs its launcher, on CPU tensors the reference, or the launcher if Triton
interprets (`common.runs_triton`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sage_kernels import common
from sage_kernels.launch import Kernel, recording

P = ParamSpec("P")
R = TypeVar("R")


_launchers: dict[object, Callable[..., Any]] = {}


def operator(
    schema: str,
    *,
    launcher: Callable[..., Any],
    reference: Callable[P, R],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[P, R]:
    """Register `torch.ops.sage_kernels.<name>` and return it with the signature of its
    reference.

    Args:
        schema: name, arguments and results as PyTorch writes them; the first argument
            is the tensor that says where to run.
        launcher: starts the Triton kernels.
        reference: the same in plain PyTorch. It also says the shapes of results where
            tensors have no data.
        save: `save(ctx, inputs, output)` keeps what the backward pass needs.
        backward: `backward(ctx, *cotangents)` returns one gradient or None per input.
            Without it the operator has no gradient, as backward operators have none.
    """
    name, _, signature = " ".join(schema.split()).partition("(")

    def in_pytorch(*arguments: Any) -> Any:
        # Elementwise PyTorch keeps the strides of a permuted input; what is promised is
        # dense.
        plain: Callable[..., Any] = reference
        return tree_map_only(Tensor, Tensor.contiguous, plain(*arguments))

    def run(*arguments: Any) -> Any:
        return (launcher if common.runs_triton(arguments[0]) else in_pytorch)(
            *arguments
        )

    made = torch.library.custom_op(
        f"sage_kernels::{name}", run, mutates_args=(), schema=f"({signature}"
    )
    made.register_fake(in_pytorch)
    if backward is not None:
        made.register_autograd(backward, setup_context=save)
    overload = getattr(torch.ops.sage_kernels, name).default
    _launchers[overload] = launcher
    return cast(Callable[P, R], overload)


class _Launchers(TorchDispatchMode):
    """Runs the launcher of every operator instead of the operator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _launchers.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def recording_on_meta(capability: tuple[int, int]) -> Iterator[list[Kernel]]:
    """Note the kernels that operators would launch for tensors on the meta device;
    nothing is computed.
    """
    with recording(capability) as kernels, _Launchers():
        yield kernels
