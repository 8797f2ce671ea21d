"""Every op on tensors that lie against an unreadable page: an access out of their
bounds ends the process.

In Triton's interpreter a kernel reads and writes the memory of the process itself.
Elsewhere what lies beside a tensor belongs to another one, so a mask that is left out
passes every comparison of results.
"""

import argparse
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_kernels import registry

PAGE = mmap.PAGESIZE
FRESH = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "zeros",
    "zeros_like",
    "new_zeros",
}
"""Operators that make the buffers which kernels fill."""

CASES = [
    (spec, case)
    for spec in registry.specs().values()
    for case in spec.test_cases
    if not (case.mixed or case.strided)
]
"""Types and strides do not move the edge of a mask."""

DONE = "every access lies within its tensor"

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_long,
]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Pages:
    """Gives tensors memory that touches an unreadable page, in turns with their end and
    with their beginning.

    turn: 0 begins with the end. Cases of an op take turns, so that each of its tensors
    lies at both.
    """

    def __init__(self, turn: int) -> None:
        self.turn = turn

    def tensor(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor of bytes 0xFF, which are NaN. Its memory is never given back."""
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        length = count * dtype.itemsize
        inner = -(-length // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(
            None, inner + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        for outside in (base, base + PAGE + inner):
            assert libc.mprotect(outside, PAGE, 0) == 0
        start = base + PAGE + (0 if self.turn % 2 else inner - length)
        self.turn += 1
        ctypes.memset(start, 0xFF, length)
        buffer = (ctypes.c_byte * length).from_address(start)
        return torch.frombuffer(buffer, dtype=dtype, count=count).as_strided(
            size, stride
        )

    def copy(self, value: Any) -> Any:
        """A tensor's copy there; anything else as it is."""
        if not isinstance(value, Tensor) or not value.numel():
            return value
        return self.tensor(value.shape, value.stride(), value.dtype).copy_(value)


class Guarded(TorchDispatchMode):
    """Context manager in which fresh buffers lie beside a page."""

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self.pages = pages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FRESH or not out.numel():
            return out
        twin = self.pages.tensor(out.shape, out.stride(), out.dtype)
        return twin.zero_() if "zeros" in name else twin


def run(spec: registry.OpSpec, case: registry.Case, pages: Pages) -> None:
    """Forward and backward of a case in float32: the interpreter rounds to bfloat16 by
    hand, at the same addresses.
    """
    spec = spec.for_case(case)
    drawn = spec.make_inputs(
        case, torch.float32, "cpu", torch.Generator().manual_seed(0)
    )
    inputs = {name: pages.copy(value) for name, value in drawn.items()}
    leaves = [
        inputs[name].requires_grad_()
        for name in spec.differentiable
        if inputs[name] is not None
    ]
    with Guarded(pages):
        out = spec.op(**inputs)
        outputs = spec.with_gradient(out if isinstance(out, tuple) else (out,))
        if leaves:
            torch.autograd.grad(
                outputs,
                leaves,
                [pages.copy(torch.ones_like(o)) for o in outputs],
                allow_unused=True,
            )


def main() -> None:
    """Every case; the last line on stdout names the one that fails."""
    argparse.ArgumentParser(
        prog="python -m tests.kernels.guard_pages", description=__doc__
    ).parse_args()
    for turn, (spec, case) in enumerate(CASES):
        print(spec.name, case.id, flush=True)
        run(spec, case, Pages(turn))
    print(DONE, flush=True)


if __name__ == "__main__":
    main()
