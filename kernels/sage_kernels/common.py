"""What every op shares: argument checks, the choice of kernel or reference, launch settings, allocation.

Dispatch. A public op checks its arguments and calls a `torch.library.custom_op`. Its body runs the Triton kernel for
CUDA tensors and the plain PyTorch reference for CPU tensors. With TRITON_INTERPRET=1 in the environment when Triton is
imported, CPU tensors go through the Triton kernel itself, executed by Triton's interpreter.

Contiguity. A kernel reads its large inputs through strides as long as the last dimension is dense (`dense_rows`);
anything else is copied once, explicitly, by the launcher. Outputs are always contiguous.

Addresses are formed in int64: a 720p batch passes 2^31 elements.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels read and write; they accumulate in float32."""

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter. Triton decides when a kernel is defined, hence once, at import."""

POISON_EMPTY: bool = os.environ.get("SAGE_KERNELS_POISON_EMPTY") == "1"
"""Fill fresh float buffers with NaN, so that an element no kernel wrote cannot pass a test."""

_ROUND_BY_HAND = tl.constexpr(INTERPRETED)

_INTERPRETED_PROGRAMS = 6
"""Programs that a sum over tokens is split over in the interpreter: enough to test the second stage."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Cast float32 to the type that is stored, rounding to nearest even; use it before every store.

    The device rounds so by itself. The interpreter truncates float32 to bfloat16, which doubles the error and biases
    it, so there the rounding is done on the bits (a carry into the exponent is what rounding up to a power of two is).
    """
    if _ROUND_BY_HAND and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


def runs_triton(tensor: Tensor) -> bool:
    """Whether the op runs its Triton kernel on this tensor (True) or its plain PyTorch reference (False)."""
    return tensor.is_cuda or INTERPRETED


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: Triton launches on the current device, whatever device the pointers are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, or a buffer of NaN under `POISON_EMPTY`."""
    buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    if POISON_EMPTY and dtype.is_floating_point:
        buffer.fill_(float("nan"))
    return buffer


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous buffer of the tensor's shape and device, allocated by `empty`."""
    return empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension has stride 1, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def check_tensors(op: str, tensors: Mapping[str, object]) -> None:
    """Refuse arguments that are no tensors, not of a supported dtype, or on several devices.

    Args:
        op: name of the op, for the message.
        tensors: argument name -> argument; an absent optional argument is None and is skipped.

    Raises:
        ValueError: says which argument, what was given and what is allowed.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{op}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{op}: {name} has dtype {tensor.dtype}; allowed are float32, bfloat16 and float16. "
                f"Convert it, or call sage_kernels.reference.{op}.{op}, which takes any float dtype"
            )
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first[0]} is on {first[1]}; move them to one device"
            )


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int], legend: str) -> None:
    """Refuse a tensor whose shape is not `expected`; `legend` writes it in letters, for instance "(B, D)"."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; it must be {legend} = {tuple(expected)}, "
            "from the shapes of the other arguments"
        )


def check_ndim(op: str, name: str, tensor: Tensor, legend: str) -> None:
    """Refuse a tensor that has another number of dimensions than `legend`, for instance "(B, N, D)"."""
    ndim = legend.count(",") + 1
    if tensor.ndim != ndim:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; it must have {ndim} dimensions {legend}")


def check_eps(op: str, eps: float) -> None:
    """Refuse an epsilon that is not a positive number: a constant row would divide by zero."""
    if not eps > 0.0:
        raise ValueError(f"{op}: eps is {eps!r}; it must be a number above zero, for instance 1e-6")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch settings of one kernel.

    Example:
        >>> Launch(num_warps=8, rows=4)
        Launch(num_warps=8, rows=4, programs_per_sm=4)
    """

    num_warps: int
    """Warps of a program; 32 threads each."""
    rows: int = 1
    """Rows (tokens) that a program of a forward kernel handles; what it loads once serves all of them."""
    programs_per_sm: int = 4
    """Programs per multiprocessor over which a kernel with a reduction is spread."""


class LaunchTable:
    """Launch settings keyed by (largest width, device capability).

    A row serves widths up to its own, None any width; capability is (major, minor), None any device. The narrowest row
    that fits wins, and of two with one width the one that names the device. There is no autotuning: a lookup costs
    nothing, gives the same kernel in every process, and works in the interpreter.
    """

    def __init__(self, rows: Mapping[tuple[int | None, tuple[int, int] | None], Launch]) -> None:
        if (None, None) not in rows:
            raise ValueError("a launch table needs the default row (None, None)")
        self._rows = sorted(rows.items(), key=lambda row: (row[0][0] or sys.maxsize, row[0][1] is None))

    @property
    def default(self) -> Launch:
        """The row for any width and device."""
        return dict(self._rows)[None, None]

    def find(self, width: int, device: torch.device | None = None) -> Launch:
        """Settings for a block of `width` elements on `device`; without a device those of rows that name none."""
        capability = torch.cuda.get_device_capability(device) if device and device.type == "cuda" else None
        for (largest, named), launch in self._rows:
            if (largest is None or width <= largest) and named in (None, capability):
                return launch
        raise AssertionError("the default row fits every width")


@dataclass(frozen=True)
class Split:
    """How the tokens of a sample are dealt to the programs of a kernel that sums over tokens.

    Example: 18,018 tokens over 528 programs are 515 programs of 35 tokens, the last one with 28.
        >>> Split(programs=515, tokens=35)
        Split(programs=515, tokens=35)
    """

    programs: int
    """Programs of a sample; none of them is empty."""
    tokens: int
    """Tokens of every program but the last, which may have fewer."""


def split_tokens(tokens: int, batch: int, launch: Launch, device: torch.device) -> Split:
    """Deal `tokens` consecutive tokens of each of `batch` samples to about as many programs as fill the device."""
    wanted = max(num_programs(launch, device) // max(batch, 1), 1)
    each = max(cdiv(tokens, wanted), 1)
    return Split(programs=cdiv(tokens, each), tokens=each)


def num_programs(launch: Launch, device: torch.device) -> int:
    """Programs that fill the device at `launch.programs_per_sm` each; a small constant in the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return launch.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`; Triton blocks have such sizes."""
    return 1 << max(number - 1, 0).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-numerator // denominator)
