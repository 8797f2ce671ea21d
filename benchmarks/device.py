"""Everything that needs a GPU in one run of under 9 minutes, most valuable first, into one JSON file.

    python -m benchmarks device            on a GPU; a table last
    python -m benchmarks device --smoke    the same code anywhere, on tiny shapes

The file is written before and after every cell. Where a cell takes its process with it (a sticky CUDA error, a crash,
a hang), another process goes on with the next one; where the whole run is cut short, the same command goes on from
there on the same commit and device. A suite has a share of the time at most.

It needs torch, triton, numpy, diffusers, transformers and peft; benchmarks/README.md has the command for a machine
without this package, diffusers and git. NVML (nvidia-ml-py) adds clocks, power and energy.
"""

from benchmarks.suites import attention, decode, iteration, kernels, transformer

SUITES = (
    *attention.SUITES,
    kernels.PARITY,
    transformer.FULL,
    *iteration.SUITES,
    kernels.BANDWIDTH,
    *decode.SUITES,
    transformer.COMPILED,
    kernels.COMPILED,
)
"""In the order of their value, after the ceilings."""
