"""The suites: what needs a GPU, most valuable first, into one JSON file; and those of a
CPU.

    python -m benchmarks device            on a GPU, in under 9 minutes; a table last
    python -m benchmarks device --smoke    the same code anywhere, on tiny shapes

The file is written before and after every cell. Where a cell takes its process with it
(a sticky CUDA error, a crash, a hang), another process goes on with the next one; where
the whole run is cut short, the same command goes on from there on the same commit and
device. A suite has a share of the time at most.

It needs torch, triton, numpy, diffusers, transformers and peft; benchmarks/README.md
has the command for a machine without this package, diffusers and git. NVML
(nvidia-ml-py) adds clocks, power and energy.
"""

from collections.abc import Callable, Iterator
from importlib import import_module

from benchmarks.session import CEILINGS, Cell, Session, Suite


def _cells(module: str, name: str = "cells") -> Callable[[Session], Iterator[Cell]]:
    """Cells of `benchmarks/suites/<module>.py`, which is imported when they begin: the
    libraries of models take eight seconds, in every process that follows a fault.
    """

    def cells(session: Session) -> Iterator[Cell]:
        yield from getattr(import_module(f"benchmarks.suites.{module}"), name)(session)

    return cells


ON_GPU = (
    CEILINGS,
    Suite(name="attention", cells=_cells("attention"), limit=45.0),
    Suite(name="kernels parity", cells=_cells("kernels", "parity_cells"), limit=90.0),
    Suite(name="transformer", cells=_cells("transformer"), limit=110.0),
    Suite(name="decode", cells=_cells("decode"), limit=120.0),
    Suite(name="iteration", cells=_cells("iteration"), limit=200.0),
    Suite(
        name="kernels bandwidth", cells=_cells("kernels", "bandwidth_cells"), limit=90.0
    ),
    Suite(
        name="transformer compiled",
        cells=_cells("transformer", "compiled_cells"),
        limit=240.0,
    ),
    Suite(
        name="kernels compiled", cells=_cells("kernels", "compiled_cells"), limit=120.0
    ),
)
"""In the order of their value."""
SUITES = {
    suite.name: suite
    for suite in (*ON_GPU, *(Suite(name=n, cells=_cells(n)) for n in ("cpu", "peers")))
}
WITHOUT_GPU = ("decode", "cpu", "peers")
"""Commands that also measure on a CPU."""


def suites_of(command: str) -> list[Suite]:
    """The suites whose names begin with a command, after those that they refer to;
    `device` is all that needs a GPU.
    """
    if command == "device":
        return list(ON_GPU)
    before = [] if command in WITHOUT_GPU else ["ceilings"]
    if command == "transformer":
        before.append("attention")
    return [
        suite
        for name, suite in SUITES.items()
        if name in before or name.startswith(command)
    ]
