"""Shared parts of the ops: argument checks, the choice of kernel or reference,
allocation.

Dispatch. A public op checks its arguments and calls an operator (`custom_op.py`), which
runs the Triton kernel for CUDA tensors and the plain PyTorch reference for CPU tensors.
With TRITON_INTERPRET=1 in the environment when Triton is imported, CPU tensors go
through the Triton kernel itself, executed by Triton's interpreter.

Contiguity. A kernel reads its large inputs through strides as long as the last
dimension is dense (`dense_rows`); anything else is copied once, explicitly, by the
launcher. Outputs are always contiguous.

Addresses are formed in int64: a 720p batch passes 2^31 elements.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels read and write; they accumulate in float32."""

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter. Triton decides when a kernel is defined,
hence once, at import.
"""

POISON_EMPTY: bool = os.environ.get("SAGE_KERNELS_POISON_EMPTY") == "1"
"""Fill fresh float buffers with NaN, so that an element no kernel wrote cannot pass a
test.
"""

_ROUND_BY_HAND = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast float32 to the type that is stored, rounding to nearest even; use it before
    every store.

    The device rounds so by itself. The interpreter truncates float32 to bfloat16, which
    doubles the error and biases it, so there the rounding is done on the bits (a carry
    into the exponent is what rounding up to a power of two is).
    """
    if _ROUND_BY_HAND and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def load(pointers, mask):
    """Load as float32, 0 where the mask is off."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointers, x, mask):
    """Store float32 in the type of the pointers."""
    tl.store(pointers, narrow(x, pointers.dtype.element_ty), mask=mask)


@triton.jit
def sum_in_order(p_values, count, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of `count` float32 numbers in an order that depends on nothing but the
    constants.
    """
    # The number of chunks is a constant: 1 up to a million elements of a sample, 4 at
    # 720p and 121 frames.
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in range(CHUNKS):
        o = chunk * BLOCK + tl.arange(0, BLOCK)
        b_sum += tl.load(p_values + o, mask=o < count, other=0.0)
    return tl.sum(b_sum)


def runs_triton(tensor: Tensor) -> bool:
    """True if the op runs its Triton kernel on this tensor, False for its plain PyTorch
    reference.
    """
    return tensor.is_cuda or INTERPRETED


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, or a buffer of NaN under `POISON_EMPTY`."""
    buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    if POISON_EMPTY and dtype.is_floating_point:
        buffer.fill_(float("nan"))
    return buffer


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous buffer of the tensor's shape and device, allocated by `empty`."""
    return empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def contiguous(*tensors: Tensor | None) -> Any:
    """The tensors, each copied where it is not contiguous; None stays None."""
    return (None if tensor is None else tensor.contiguous() for tensor in tensors)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, else a contiguous copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def check_tensors(
    op: str, tensors: Mapping[str, object], *, optional: Sequence[str] = ()
) -> None:
    """Refuse arguments that are not tensors, not of a supported dtype, or on several
    devices.

    Args:
        op: name of the op, for the message.
        tensors: argument name -> argument.
        optional: names of those that may be None.

    Raises:
        ValueError: says which argument, what was given and what is allowed.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            given = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise ValueError(f"{op}: {name} is {given}; it must be a torch.Tensor")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{op}: {name} has dtype {tensor.dtype}; allowed are float32, "
                "bfloat16 and float16. "
                f"Convert it, or call sage_kernels.reference.{op}, which takes any "
                "float dtype"
            )
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first[0]} is on {first[1]}; "
                "move them to one device"
            )


def check_shape(
    op: str, name: str, tensor: Tensor, expected: Sequence[int], legend: str
) -> None:
    """Refuse a tensor whose shape is not `expected`; `legend` writes it in letters, for
    instance "(B, D)".
    """
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; it must be {legend} = "
            f"{tuple(expected)}, "
            "from the shapes of the other arguments"
        )


def check_ndim(op: str, name: str, tensor: Tensor, legend: str) -> None:
    """Refuse a tensor that has another number of dimensions than `legend`, for instance
    "(B, N, D)".
    """
    ndim = legend.count(",") + 1
    if tensor.ndim != ndim:
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; it must have {ndim} "
            f"dimensions {legend}"
        )


def check_eps(op: str, eps: float) -> None:
    """Refuse an epsilon that is not a positive number: a constant row would divide by
    zero.
    """
    if not isinstance(eps, int | float) or not eps > 0.0:
        raise ValueError(
            f"{op}: eps is {eps!r}; it must be a number above zero, for instance 1e-6"
        )


def check_latents(
    op: str, tensors: Mapping[str, Tensor | None], noise_ids: Tensor | None
) -> None:
    """Refuse tensors that do not have one shape (B, ...) in common, or noise ids that
    are not int64 (B, 3) beside them.

    Values on a GPU are not read: words and steps beyond 32 bits are taken modulo 2^32.
    """
    check_tensors(op, tensors, optional=("v_anchor",))
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    if len(set(shapes.values())) > 1 or any(
        len(shape) < 2 for shape in shapes.values()
    ):
        listed = ", ".join(
            f"{name} has shape {shape}" for name, shape in shapes.items()
        )
        raise ValueError(
            f"{op}: {listed}; they must have one shape (B, ...) of at least 2 "
            "dimensions"
        )
    first = next(iter(given.values()))
    if noise_ids is None:
        return
    expected = (torch.int64, (first.shape[0], 3), first.device)
    if not isinstance(noise_ids, Tensor):
        raise ValueError(f"{op}: noise_ids are {noise_ids!r}; they must be a tensor")
    given_ids = (noise_ids.dtype, tuple(noise_ids.shape), noise_ids.device)
    if given_ids != expected:
        raise ValueError(
            f"{op}: noise_ids are {given_ids[0]} {given_ids[1]} on {given_ids[2]}; they must be int64 (B, 3) = "
            f"({first.shape[0]}, 3) on {first.device}, "
            "two key words and the step of each row"
        )
