"""A supervised run in which everything goes wrong: `python -m tests.benchmarks.faults
--output_file FILE`.

A sticky error of CUDA, a hang, and a crash each end a process; another one goes on with
the
next cell. The second cell waits until it is killed where FILE.wait exists.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import harness
from benchmarks import session as sessions
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite


def good(session: Session) -> Record:
    return {}


def killed(session: Session) -> Record:
    """Wait to be killed, in the first of two runs."""
    while session.path is not None and session.path.with_suffix(".wait").exists():
        time.sleep(0.05)
    return {}


def sticky(session: Session) -> Record:
    """Fail as CUDA does: here, and whenever the device is asked for anything from now
    on.
    """

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    harness.wait = fail
    return {}


def hang(session: Session) -> Record:
    """Wait beyond the limit of the suite."""
    time.sleep(3600.0)
    raise AssertionError


def crash(session: Session) -> Record:
    """End this process by a signal."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def suite_of(
    name: str, *work: Callable[[Session], Record], limit: float = 60.0
) -> Suite:
    """Cells named as what they do."""

    def cells(session: Session) -> list[Cell]:
        return [
            Cell(suite=name, name=each.__name__, work=partial(each, session))
            for each in work
        ]

    return Suite(name=name, cells=lambda session: iter(cells(session)), limit=limit)


SUITES = (
    suite_of("waiting", good, killed),
    suite_of("broken", sticky, good),
    suite_of("hanging", hang, limit=1.0),
    suite_of("crashing", crash, good),
)

if __name__ == "__main__":
    options = sessions.parser_of("faults", __doc__).parse_args()
    if options.started is None:
        sys.exit(sessions.supervise(("tests.benchmarks.faults",), sys.argv[1:]))
    sys.exit(sessions.execute(SUITES, options, on_cpu=True))
