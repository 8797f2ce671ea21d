"""Launches of Triton kernels: their settings, the launch itself, and a recorder of what
is launched.

Every kernel of the package is started by `launch`. Inside `recording()` it also notes
the kernel as it would be compiled, with the types, the constants and the alignment that
Triton specialises on; tensors on the meta device are noted without being computed. The
ahead-of-time builds are made from such records of the benchmark cases, so that what is
built is what is launched.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TRITON_TYPES |= {torch.int64: "i64", torch.bool: "i1"}
ALIGNMENT = 16
"""Triton compiles one version for pointers (bytes) and integers that are multiples of
it, another for the rest.
"""
STREAM_ELEMENTS = 2**18
"""A tensor of so many elements is a stream: every access to it must be 16 bytes wide.
"""

_INTERPRETED_PROGRAMS = 6
"""Programs that a sum over tokens is split over in the interpreter: enough to test the
second stage.
"""
_RECORDED_SMS = 132
"""Multiprocessors that launches on the meta device are sized for, those of an H100."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Triton kernel with what determines its machine code.

    Example:
        >>> Kernel(function=gelu_tanh_forward_kernel, signature={"x_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"},
        ...        constexprs={"BLOCK": 2048}, num_warps=8, aligned=("x_ptr", "out_ptr", "size"), streaming=("x_ptr",))
    """

    function: Any = field(repr=False)
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Run-time argument -> Triton type ("*bf16", "i32", "i64", "fp32"), in the order of
    the function.
    """
    constexprs: Mapping[str, Any]
    """Compile-time arguments; absent pointers (None) and integers of 1 are among them.
    """
    num_warps: int
    """Warps of a program."""
    programs_per_sm: int = 1
    """Programs that should run at once on a multiprocessor, over which the launch is
    spread.
    """
    fp_fusion: bool = True
    """True if the compiler may fuse multiply and add."""
    aligned: tuple[str, ...] = ()
    """Run-time arguments that are multiples of `ALIGNMENT`."""
    streaming: tuple[str, ...] = ()
    """Pointers to streams."""

    @property
    def name(self) -> str:
        """Name of the function without its ending: adaln_forward."""
        return str(self.function.__name__).removesuffix("_kernel")

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two records that compile to the same code."""
        signature = tuple(self.signature.items())
        constexprs = tuple(sorted(self.constexprs.items()))
        return (
            self.name,
            signature,
            constexprs,
            self.num_warps,
            self.programs_per_sm,
            self.fp_fusion,
            self.aligned,
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch settings of one kernel.

    Example:
        >>> Launch(num_warps=8, rows=4)
        Launch(num_warps=8, rows=4, programs_per_sm=1)
    """

    num_warps: int
    """Warps of a program; 32 threads each."""
    rows: int = 1
    """Rows (tokens) that a program of a forward kernel handles; what it loads once
    serves all of them.
    """
    programs_per_sm: int = 1
    """Programs per multiprocessor over which a kernel with a reduction is spread; they
    should run at once.
    """


_record: list[Kernel] | None = None
_capability: tuple[int, int] | None = None


@contextmanager
def recording(capability: tuple[int, int] | None = None) -> Iterator[list[Kernel]]:
    """Note every launch inside the context, in order. Recordings do not nest.

    capability: of the device that launches on the meta device are noted for.
    """
    global _record, _capability
    assert _record is None, "a recording is under way already"
    _record = []
    _capability = capability
    try:
        yield _record
    finally:
        _record = _capability = None


def launch(
    function: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    settings: Launch,
    fp_fusion: bool = True,
    **constexprs: Any,
) -> None:
    """Start a kernel on the device of its tensors; a grid or tensors without elements
    start nothing.

    Args:
        function: the `@triton.jit` function.
        grid: programs along each axis.
        arguments: its run-time arguments in order: tensors, numbers, or None for an
            absent one, which is known at compile time.
        settings: warps of a program, and programs a multiprocessor.
        fp_fusion: see `Kernel`.
        constexprs: its compile-time arguments.
    """
    device = next(
        (a.device for a in arguments if isinstance(a, Tensor) and a.numel()), None
    )
    if 0 in grid or device is None:
        return
    if _record is not None:
        _record.append(_kernel_of(function, arguments, constexprs, settings, fp_fusion))
    if device.type == "meta":
        return
    constexprs |= {"num_warps": settings.num_warps, "enable_fp_fusion": fp_fusion}
    if device.index is None or device.index == torch.cuda.current_device():
        start(function, grid, arguments, constexprs)
        return
    # Triton launches on the current device, whatever device the pointers are on.
    with torch.cuda.device(device):
        start(function, grid, arguments, constexprs)


def start(
    function: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Hand a launch to Triton; what stands before this call is what the package adds to
    it.
    """
    function[grid](*arguments, **options)


def _kernel_of(
    function: Any,
    arguments: Sequence[Any],
    constexprs: Mapping[str, Any],
    settings: Launch,
    fp_fusion: bool,
) -> Kernel:
    """The launch as Triton specialises it (`triton.runtime.jit`)."""
    signature: dict[str, str] = {}
    constants = dict(constexprs)
    aligned = []
    streaming = []
    for name, argument in zip(function.arg_names, arguments, strict=False):
        if argument is None or (isinstance(argument, int) and argument == 1):
            constants[name] = argument
        elif isinstance(argument, Tensor):
            signature[name] = f"*{TRITON_TYPES[argument.dtype]}"
            # Storages begin at multiples of 64 bytes and more; on the meta device they
            # have no address.
            if argument.storage_offset() * argument.element_size() % ALIGNMENT == 0:
                aligned.append(name)
            if argument.numel() >= STREAM_ELEMENTS:
                streaming.append(name)
        elif isinstance(argument, int):
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
            if argument % ALIGNMENT == 0:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    return Kernel(
        function=function,
        signature=signature,
        constexprs=constants,
        num_warps=settings.num_warps,
        programs_per_sm=settings.programs_per_sm,
        fp_fusion=fp_fusion,
        aligned=tuple(aligned),
        streaming=tuple(streaming),
    )


class LaunchTable:
    """Launch settings keyed by (largest width, device capability).

    A row serves widths up to its own, None any width; capability is (major, minor),
    None any device. The narrowest row that fits wins, and of two with one width the one
    that names the device. There is no autotuning: a lookup costs nothing, gives the
    same kernel in every process, and works in the interpreter.
    """

    def __init__(
        self, rows: Mapping[tuple[int | None, tuple[int, int] | None], Launch]
    ) -> None:
        if (None, None) not in rows:
            raise ValueError("a launch table needs the default row (None, None)")
        self._rows = sorted(
            rows.items(), key=lambda row: (row[0][0] or sys.maxsize, row[0][1] is None)
        )

    @classmethod
    def by_width(
        cls,
        num_warps: Sequence[int],
        *,
        rows: int = 1,
        programs_per_sm: Sequence[int] = (1, 1, 1),
    ) -> "LaunchTable":
        """A table for widths up to 2048, up to 4096 and beyond, on every device."""
        columns = zip((2048, 4096, None), num_warps, programs_per_sm, strict=True)
        return cls(
            {
                (w, None): Launch(num_warps=n, rows=rows, programs_per_sm=p)
                for w, n, p in columns
            }
        )

    def with_row(
        self, width: int, settings: Launch, *capabilities: tuple[int, int]
    ) -> "LaunchTable":
        """The table with a row for some devices."""
        return LaunchTable(
            dict(self._rows)
            | {(width, capability): settings for capability in capabilities}
        )

    def find(self, width: int, device: torch.device | None = None) -> Launch:
        """Settings for a block of `width` elements on `device`; without a device those
        of rows that name none.
        """
        capability = _capability
        if device and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        for (largest, named), settings in self._rows:
            if (largest is None or width <= largest) and named in (None, capability):
                return settings
        raise AssertionError("the default row fits every width")


def split_tokens(
    tokens: int, batch: int, settings: Launch, device: torch.device
) -> tuple[int, int]:
    """Deal the tokens of each of `batch` samples to about as many programs as fill the
    device, to sum over them.

    Returns:
        Programs of a sample, of which none is empty, and consecutive tokens of every
        program but the last, which may have fewer: 18,018 tokens over 528 programs are
        515 programs of 35 tokens, the last one with 28.

    So the last bits of a sum over tokens depend on the model of GPU. One number for
    all, or for an architecture, would leave some half idle: one program more than runs
    at once takes as long as twice as many. The split of an H100 SXM, with 132
    multiprocessors, would take 1.7 times as long on the PCIe card, which has 114.
    """
    filling = _INTERPRETED_PROGRAMS
    if device.type != "cpu":
        filling = settings.programs_per_sm * _multiprocessors(device)
    each = max(cdiv(tokens, max(filling // max(batch, 1), 1)), 1)
    return cdiv(tokens, each), each


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _RECORDED_SMS


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`; Triton blocks have such
    sizes.
    """
    return 1 << max(number - 1, 0).bit_length()


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-numerator // denominator)
