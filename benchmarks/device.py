"""Everything that needs a GPU in one run of under 9 minutes, most valuable first, into one JSON file.

    python -m benchmarks device            on a GPU; a table last
    python -m benchmarks device --smoke    the same code anywhere, on tiny shapes

The file is written before and after every cell. Where a cell takes its process with it (a sticky CUDA error, a crash,
a hang inside CUDA), another process goes on with the next one; where the whole run is cut short, the same command goes
on from there on the same commit and device. A suite has a share of the time at most; a cell that does not fit into what
is left is skipped and says so.

It needs torch, triton, numpy, diffusers, transformers and peft; benchmarks/README.md has the command for a machine
without this package, diffusers and git. NVML (nvidia-ml-py) adds clocks, power and energy.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, execute, parser_of, supervise
from benchmarks.suites import attention, decode, iteration, kernels, sharded, transformer, two_ranks
from sage_kernels import parity
from sage_kernels.registry import specs

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("memcheck", "racecheck")
FINISHED = "of every op ran"
"""The end of what `every_kernel` prints last."""
SMOKE_SECONDS = 300.0
"""For the program of the sanitizer without it."""


def every_kernel(smoke: bool) -> None:
    """Run every kernel once per test shape and type, forward and, where it has one, backward: the sanitizer's program.

    A smoke run takes one shape of each.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each tensor its own allocation, so that an access past its end is seen.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = 0
    for spec in specs().values():
        cases = kernels.cases_of(spec, smoke=True) if smoke else spec.test_cases
        for case, dtype in itertools.product(cases, spec.dtypes):
            inputs = spec.make_inputs(case, dtype, device, torch.Generator(device).manual_seed(0))
            outputs, leaves = parity.run_forward(spec, spec.op, inputs)
            if leaves:
                outputs = spec.with_gradient(outputs)
                torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(output) for output in outputs])
            count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{count} forward and backward passes {FINISHED}")


def sanitize(tool: Sequence[str], seconds: float) -> Record:
    """Run `every_kernel` under a tool, or one shape of each kernel without any.

    It passed if the program came to its end and the tool has reported nothing.
    """
    command = [*tool, sys.executable, "-c", f"from benchmarks.device import every_kernel; every_kernel({not tool})"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": f"stopped after {seconds:.0f} s"}
    output = done.stdout + done.stderr
    passed = done.returncode == 0 and FINISHED in output and (not tool or "SUMMARY: 0 " in output)
    tail = [line for line in output.splitlines() if line.strip()][-5:]
    return {"passed": passed, "reason": f"exit status {done.returncode}: {' / '.join(tail)}"}


def sanitizer_cells(session: Session) -> Iterator[Cell]:
    """compute-sanitizer over every kernel, one tool after the other, each with an equal share of what is left."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{toolkit}/bin")

    def work(name: str, remaining: int) -> Record:
        if session.smoke:
            return sanitize([], SMOKE_SECONDS)
        if program is None:
            return {"status": "failed: compute-sanitizer is neither on PATH nor under CUDA_HOME/bin"}
        # A moment is kept to write the result down.
        seconds = max((session.left - 5.0) / remaining, 1.0)
        return sanitize([program, "--tool", name, "--error-exitcode", "9"], seconds)

    for done, name in enumerate(["dry run"] if session.smoke else SANITIZERS):
        yield Cell(suite="sanitizer", name=name, work=partial(work, name, len(SANITIZERS) - done))


SUITES = (
    *attention.SUITES,
    kernels.PARITY,
    transformer.FULL,
    *iteration.SUITES,
    kernels.BANDWIDTH,
    *decode.SUITES,
    kernels.WIDE,
    transformer.COMPILED,
    kernels.COMPILED,
    *sharded.SUITES,
    *two_ranks.SUITES,
    Suite(name="sanitizer", cells=sanitizer_cells),
)
"""In the order of their value, after the ceilings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 unless everything was measured and passed."""
    words = list(sys.argv[2:] if argv is None else argv)
    options = parser_of("device", __doc__).parse_args(words)
    if options.started is None and not options.smoke:
        return supervise(("benchmarks", "device"), words)
    return execute(SUITES, options)
