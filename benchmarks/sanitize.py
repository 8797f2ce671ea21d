"""Runs every kernel of sage_kernels once per test shape and type, forward and backward, and nothing else.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize

`python -m benchmarks device` calls it so. PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each tensor an allocation of its own,
so that an access past its end is seen.
"""

import itertools
import sys

import torch

import benchmarks  # noqa: F401  first, because it decides where kernels run
from sage_kernels import parity
from sage_kernels.registry import specs


def main() -> int:
    """Run them all; returns 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = 0
    for spec in specs().values():
        for case, dtype in itertools.product(spec.test_cases, spec.dtypes):
            inputs = spec.make_inputs(case, dtype, device, torch.Generator().manual_seed(0))
            outputs, leaves = parity.run_forward(spec, spec.op, inputs)
            if spec.differentiable_outputs is not None:
                outputs = [outputs[index] for index in spec.differentiable_outputs]
            if leaves:
                torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(output) for output in outputs])
            count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{count} forward and backward passes of {len(specs())} ops ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
