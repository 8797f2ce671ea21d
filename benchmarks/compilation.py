"""Compiles the Triton kernels that a run launches in many processes at once, while the GPU does something else.

One takes a quarter of a second of one core, and the timed shapes need dozens of them. Each process asks Triton
for its share of them as a launch would, for a device that it does not have: what it compiles lies in Triton's cache
under the key that the launch looks for, and no CUDA context is made.

    python -m benchmarks.compilation 9 0 0 4    the first of four shares, for compute capability 9.0
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class Compilation:
    """The kernels of all ops being compiled for the current device."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, device: torch.device) -> Record:
        """Start a process for all but two cores."""
        if device.type != "cuda" or common.INTERPRETED:
            return {"status": "absent: there is no GPU, and kernels are interpreted"}
        major, minor = torch.cuda.get_device_capability(device)
        count = max((os.cpu_count() or 1) - 2, 1)
        for share in range(count):
            words = [sys.executable, "-m", "benchmarks.compilation", *map(str, (major, minor, share, count))]
            self.processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return {"processes": count}

    def wait(self, device: torch.device) -> Record:
        """Until all of them are there; another process may have started before this one took over."""
        found = {} if self.processes else self.start(device)
        try:
            outputs = [process.communicate()[0] for process in self.processes]
            failed = [output for process, output in zip(self.processes, outputs, strict=True) if process.returncode]
        finally:
            while self.processes:
                self.processes.pop().kill()
        if failed:
            return {"status": f"failed: {failed[0].strip().splitlines()[-1:]}"}
        return found | {"kernels": sum(int(output.split()[-1]) for output in outputs)}


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


def main(major: int, minor: int, share: int, count: int) -> int:
    """Compile one of `count` shares and say how many kernels that were."""
    chosen = list(kernels_of(10 * major + minor))[share::count]
    for kernel in chosen:
        compile_as_launched(kernel, (major, minor))
    print(len(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
