"""Compiles the Triton kernels that a run launches in many processes at once, while the GPU does something else.

One takes a quarter of a second of one core, and the timed shapes need dozens of them. Each process asks Triton
for its share of them as a launch would, for a device that it does not have: what it compiles lies in Triton's cache
under the key that the launch looks for, and no CUDA context is made.
"""

import multiprocessing
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.results import Record
from sage_kernels import aot, common
from sage_kernels.launch import ALIGNMENT, TRITON_TYPES, Kernel
from sage_kernels.registry import specs

TORCH_TYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}


class Compilation:
    """The kernels of all ops being compiled for the current device."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._counts: Any = None

    def start(self, device: torch.device) -> Record:
        """Start a process for all but two cores. They end with this one."""
        if device.type != "cuda" or common.INTERPRETED:
            return {"status": "absent: there is no GPU, and kernels are interpreted"}
        capability, count = torch.cuda.get_device_capability(device), max((os.cpu_count() or 1) - 2, 1)
        self._pool = multiprocessing.get_context("spawn").Pool(count)
        self._counts = self._pool.starmap_async(compile_share, [(capability, n, count) for n in range(count)])
        return {"processes": count}

    def wait(self, device: torch.device) -> Record:
        """Until all of them are there; another process may have started before this one took over."""
        found = {} if self._pool is not None else self.start(device)
        if self._pool is None:
            return found
        try:
            return found | {"kernels": sum(self._counts.get())}
        finally:
            self._pool.terminate()
            self._pool = None


def compile_share(capability: tuple[int, int], number: int, count: int) -> int:
    """Compile one of `count` shares of the kernels for a device of this capability; returns how many those are."""
    share = list(kernels_of(10 * capability[0] + capability[1]))[number::count]
    for kernel in share:
        compile_as_launched(kernel, capability)
    return len(share)


def kernels_of(arch: int) -> Iterator[Kernel]:
    """Every kernel of the timed shapes, those in the types that training runs first."""
    found = [kernel for spec in specs().values() for kernel in aot.launched_kernels(spec, arch).values()]
    yield from sorted(found, key=lambda kernel: "*bf16" not in kernel.signature.values())


def compile_as_launched(kernel: Kernel, capability: tuple[int, int]) -> Any:
    """What Triton makes of a kernel when it is launched on a device of this capability; returns its record of it."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    triton.runtime.driver.set_active(driver)
    arguments = {
        name: kernel.constexprs[name] if name in kernel.constexprs else _argument(kernel, name)
        for name in kernel.function.arg_names
    }
    return kernel.function.warmup(grid=(1,), **arguments, num_warps=kernel.num_warps, enable_fp_fusion=kernel.fp_fusion)


def _argument(kernel: Kernel, name: str) -> Any:
    """Something of the type and the alignment that Triton has compiled a kernel for."""
    kind, aligned = kernel.signature[name], name in kernel.aligned
    if kind.startswith("*"):
        return SimpleNamespace(dtype=TORCH_TYPES[kind[1:]], data_ptr=lambda: 0 if aligned else 1)
    if kind == "fp32":
        return 1.0
    return (2**40 if kind == "i64" else 0) + (ALIGNMENT if aligned else ALIGNMENT + 1)
