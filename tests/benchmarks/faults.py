"""A supervised run in which everything goes wrong: `python -m tests.benchmarks.faults --output FILE`.

A sticky error of CUDA, a hang where Python cannot stop it, and a crash each end a process; another one goes on with the
next cell. The first cell waits until it is killed where FILE.wait exists.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import harness
from benchmarks import session as sessions
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite

LIMIT, GRACE = 1.0, 1.0
"""Seconds of the suite that hangs, and for Python to stop it."""


def sticky() -> Record:
    """Fail as CUDA does: here, and whenever the device is asked for anything from now on."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    harness.wait = fail
    return {}


def hang() -> Record:
    """Wait where Python's signals do not arrive, as inside CUDA."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(3600.0)
    raise AssertionError


def crash() -> Record:
    """End this process by a signal."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def killed_once(session: Session) -> Record:
    """Wait to be killed, in the first of two runs."""
    assert session.path is not None
    while session.path.with_suffix(".wait").exists():
        time.sleep(0.05)
    return {}


def suite_of(name: str, **work: Callable[[], Record]) -> Suite:
    """Cells of these names."""
    cells = [Cell(suite=name, name=cell, work=function) for cell, function in work.items()]
    return Suite(name=name, cells=lambda session: iter(cells), limit=LIMIT if name == "hanging" else 60.0)


def waiting(session: Session) -> Iterator[Cell]:
    """A cell that is done, and one in which the run is killed."""
    yield Cell(suite="waiting", name="good", work=dict)
    yield Cell(suite="waiting", name="killed", work=lambda: killed_once(session))


SUITES = (
    Suite(name="waiting", cells=waiting),
    suite_of("broken", sticky=sticky, next=dict),
    suite_of("hanging", hang=hang),
    suite_of("crashing", crash=crash, next=dict),
)


def main(argv: Sequence[str]) -> int:
    """As `benchmarks.device.main`."""
    options = sessions.parser_of("faults", __doc__).parse_args(argv)
    if options.started is None:
        return sessions.supervise(("tests.benchmarks.faults",), argv)
    sessions.GRACE = GRACE
    return sessions.execute(SUITES, options, on_cpu=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
