"""A run of benchmarks: cells that are measured, saved and resumed one by one.

A result file holds `environment`, `smoke` and `cells`, "<suite> <what>" -> a record:

    status     "done"; "done in part: ...", which is measured again when the run goes on; or why there is nothing:
               "failed: ...", "out of memory: ...", "stopped ...", "skipped: ...", "absent: ..." (no library)
    needs      cells of parity checks that must have passed; what stands behind a missing or red one does not count
    errors, bounds, passed   of a parity check
    rows       of a timing: step, shape, contender, seconds (quantiles); where known flop or bytes of a call with
               rate, unit and share of the ceiling, peak_memory_gb, a note
    telemetry  seconds, state of the GPU before and after

The file is written after every cell, and a later run with the same file goes on with what is missing.
"""

import argparse
import contextlib
import importlib
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, results
from benchmarks.harness import Quantiles
from benchmarks.results import Record, Result

BUDGET = 510.0
"""Seconds of a whole run."""
CELL_SHARE = 1 / 24
"""Of a run's time, for the rounds of one cell beyond the fewest."""
SETTLED = ("done", "absent")
"""How the status of a cell begins that a later run does not repeat; other libraries make it another run."""
ASSUMED_MFU = 0.35
"""For the guess whether a cell still fits into the time."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement or parity check.

    work: returns what the record holds besides `status`, which it may set itself. needs: parity cells, by full name.
    seconds: a guess; a cell that does not fit into the time is skipped.

    Example: `Cell(suite="block", name="forward B ours", work=..., needs=("block parity ours",))`
    """

    suite: str
    name: str
    work: Callable[[], Record]
    needs: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.suite} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells that share a model or inputs, most valuable first.

    cells: generator of them; it may build the next cell from what the last one found. limit: seconds it has at most in
    a run of all suites.
    """

    name: str
    cells: Callable[["Session"], Iterator[Cell]]
    limit: float = math.inf


class CellTimeout(BaseException):
    """A cell has used its time up. No `Exception`, so that nothing that is measured takes it for its own."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `CellTimeout` in this context after `seconds`; outside the main thread there is no limit."""
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise CellTimeout

    handler = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        # A timer that was running before (a test's own time limit) goes on.
        signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3) if outer else 0.0)
        signal.signal(signal.SIGALRM, handler)


@dataclass(kw_only=True)
class Session:
    """State of a run: where it measures, what is known so far, how much time is left.

    options: of the command line, for the suites that have some (`op`, `attention`, `folder`). bare: whether only the
    libraries of a bare machine may be needed.
    """

    device: torch.device
    smoke: bool
    budget: float = math.inf
    path: Path | None = None
    result: Result = field(default_factory=lambda: {"cells": {}})
    options: dict[str, Any] = field(default_factory=dict)
    bare: bool = False
    started: float = field(default_factory=time.monotonic)
    _suite_ends: float = math.inf

    @property
    def cells(self) -> dict[str, Record]:
        """The records so far."""
        found: dict[str, Record] = self.result["cells"]
        return found

    @property
    def left(self) -> float:
        """Seconds that are left to the running suite."""
        now = time.monotonic()
        return min(self.budget - (now - self.started), self._suite_ends - now)

    def run(self, suite: Suite) -> None:
        """Measure the cells of a suite that are not there yet."""
        # A smoke run measures nothing, so on a busy machine it may take its time.
        self._suite_ends = math.inf if self.smoke else time.monotonic() + suite.limit
        setup = f"{suite.name} setup"
        self.cells.pop(setup, None)
        try:
            for cell in suite.cells(self):
                self.measure(cell)
        except Exception as error:  # noqa: BLE001  what a suite does between its cells may fail like a cell
            self.cells[setup] = {"status": failure(error)}
        self._suite_ends = math.inf
        harness.release()
        self.save()

    def measure(self, cell: Cell) -> None:
        """Measure a cell, unless it is done or its library is known to be absent, and save the result."""
        if self.cells.get(cell.key, {}).get("status", "").partition(":")[0] in SETTLED:
            return
        red = [name for name in cell.needs if not results.passed(self.result, name)]
        record: Record
        if red:
            record = {"status": f"skipped: {red[0]} has not passed"}
        elif self.left <= 0:
            record = {"status": "skipped: the time is used up"}
        elif self.left < cell.seconds:
            record = {"status": f"skipped: it takes about {cell.seconds:.0f} s and {self.left:.0f} s are left"}
        else:
            print(f"[{time.monotonic() - self.started:5.0f} s] {cell.key}", flush=True)
            record = self._work(cell.work)
        self.cells[cell.key] = {"suite": cell.suite, "needs": list(cell.needs)} | record
        self.save()

    def _work(self, work: Callable[[], Record]) -> Record:
        seconds = self.left
        with harness.telemetry() as telemetry:
            try:
                with time_limit(seconds):
                    record: Record = {"status": "done"} | work()
                    harness.wait(self.device)
            except CellTimeout:
                record = {"status": f"stopped after {seconds:.0f} s"}
            except Exception as error:  # noqa: BLE001  whatever a library raises is recorded as this cell's failure
                record = {"status": failure(error)}
            harness.reset_clock()
        for row in record.get("rows", []):
            self._rate(row)
        return record | {"telemetry": telemetry}

    def _rate(self, row: Record) -> None:
        for work, unit, scale, ceiling in (("flop", "TFLOP/s", 1e12, "matmul"), ("bytes", "GB/s", 1e9, "copy")):
            if work in row:
                row |= {"rate": row[work] / row["seconds"]["median"] / scale, "unit": unit}
                if (limit := self.ceiling(ceiling)) is not None:
                    row["share"] = row["rate"] / limit

    def ceiling(self, name: str) -> float | None:
        """TFLOP/s of a large product (`matmul`), or GB/s of a device copy (`copy`), measured in this run."""
        return results.ceiling(self.result, name)

    def guess(self, flop: float) -> float:
        """Seconds that a cell of `flop` operations takes: one call to compare, one to warm up, two rounds."""
        peak = self.ceiling("matmul")
        return 0.0 if peak is None or self.smoke else 4 * flop / (ASSUMED_MFU * peak * 1e12)

    def time(self, call: Callable[[], object], *, rounds: int, calls: int = 1, warmup: int = 1) -> Quantiles:
        """Quantiles of a call within what this cell may take; a smoke run makes two rounds."""
        if self.smoke:
            return harness.measure(call, rounds=2, calls=calls, warmup=min(warmup, 1))
        limit = self.budget * CELL_SHARE
        return harness.measure(call, rounds=rounds, calls=calls, warmup=warmup, limit=limit, left=self.left)

    def save(self) -> None:
        """Write the result so far."""
        if self.path is not None:
            harness.write_result(self.path, self.result)


def peer_parity(
    session: Session, suite: str, check: Callable[[str, dict[str, float] | None], Record]
) -> Iterator[Cell]:
    """Parity of P2 against float64, and of P1 and ours beside P2, whose errors are their yardstick.

    Args:
        check: of a contender, given P2's errors, or None for P2 itself.
    """
    p2 = f"{suite} parity P2"
    yield Cell(suite=suite, name="parity P2", work=lambda: check("P2", None))
    for contender in ("P1", "ours"):

        def work(contender: str = contender) -> Record:
            return check(contender, session.cells[p2]["errors"])

        yield Cell(suite=suite, name=f"parity {contender}", work=work, needs=(p2,))


def failure(error: Exception) -> str:
    """A status: the kind of an exception and the first line of its message."""
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"failed: {type(error).__name__}"
    return f"{kind}: {(str(error).strip().splitlines() or [''])[0]}"


def timing(
    step: str,
    shape: str,
    contender: str,
    seconds: Quantiles,
    *,
    flop: float | None = None,
    nbytes: float | None = None,
    peak_memory_gb: float | None = None,
    note: str | None = None,
    **more: Any,
) -> Record:
    """A row; what is None is left out."""
    known = {"flop": flop, "bytes": nbytes, "peak_memory_gb": peak_memory_gb, "note": note}
    row = {"step": step, "shape": shape, "contender": contender, "seconds": asdict(seconds)}
    return row | {name: value for name, value in known.items() if value is not None} | more


def ceiling_cells(session: Session) -> Iterator[Cell]:
    """Copy bandwidth and the rate of a large product, the denominators of every share."""
    for name, make, work in (("copy", harness.copy_call, "nbytes"), ("matmul", harness.matmul_call, "flop")):

        def measured(name: str = name, make: Any = make, work: str = work) -> Record:
            call, amount = make(session.device, smoke=session.smoke)
            seconds = session.time(call, rounds=20, calls=1 if session.smoke else 5, warmup=3)
            return {"rows": [timing(name, "", "device", seconds, **{work: amount})]}

        yield Cell(suite="ceilings", name=name, work=measured)


CEILINGS = Suite(name="ceilings", cells=ceiling_cells, limit=20.0)


# ------------------------------------------------------------------------------------------ the command


def previous_result(path: Path, environment: dict[str, Any], *, smoke: bool) -> Result | None:
    """What an earlier run of this commit on this device has measured; None where there is nothing to go on from."""
    if not path.is_file():
        return None
    found: Result = json.loads(path.read_text("utf-8"))
    known = found.get("environment", {})
    same = all(known.get(key) == environment[key] for key in ("commit", "gpu", "packages"))
    return found if same and found.get("smoke") == smoke and "cells" in found else None


def newest_file(environment: dict[str, Any], folder: Path = harness.RESULTS, *, suffix: str = "") -> Path:
    """The file of a run in this environment: of an earlier day, if there is one of this commit and device."""
    today = harness.result_file(environment, folder, suffix=suffix)
    earlier = sorted(today.parent.glob(f"????-??-??-{today.name[len('2026-01-01-') :]}"))
    return earlier[-1] if earlier else today


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """Options that the commands share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}", description=(description or "").split("\n")[0]
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and few rounds; runs without a GPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds of the whole run ({BUDGET:.0f})")
    parser.add_argument("--fresh", action="store_true", help="measure everything again, in a file of today")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<device>/<date>-<commit>...")
    parser.add_argument("--op", action="append", help="of the kernels, this op only; may be repeated")
    parser.add_argument("--attention", default="auto", help="backend of the transformer's attention and of its peers")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; it decides which disk is measured")
    return parser


def execute(
    suites: Sequence[Suite], options: argparse.Namespace, *, suffix: str = "", bare: bool = False, on_cpu: bool = False
) -> int:
    """Run suites as the command line asks; returns 1 unless everything was measured and passed.

    Args:
        suffix: of the result file's name.
        on_cpu: whether a full run makes sense without a GPU.

    Raises:
        SystemExit: there is no GPU and no --smoke.
    """
    if not (torch.cuda.is_available() or options.smoke or on_cpu):
        sys.exit("There is no CUDA device here: run with --smoke, or on a machine with a GPU.")
    logging.disable(logging.INFO)
    environment = harness.environment()
    path = options.output
    if path is None and not options.smoke:
        find = harness.result_file if options.fresh else newest_file
        path = find(environment, suffix=suffix)
    session = Session(
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        smoke=options.smoke,
        budget=options.budget,
        path=path,
        result={"environment": environment, "smoke": options.smoke, "cells": {}},
        options={"op": options.op, "attention": options.attention, "folder": options.folder},
        bare=bare,
    )
    known = None if path is None or options.fresh else previous_result(path, environment, smoke=options.smoke)
    if known is not None:
        print(f"going on from {path}")
        session.result = known
    for suite in [CEILINGS, *suites]:
        session.run(suite)
    print(results.table(session.result))
    if path is not None:
        print(f"written to {path}")
    return 0 if results.succeeded(session.result) else 1


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """The command of one suite, `benchmarks/suites/<name>.py`."""
    module = importlib.import_module(f"benchmarks.suites.{name}")
    options = parser_of(name, module.__doc__).parse_args(argv)
    return execute(module.SUITES, options, suffix=f"-{name}", on_cpu=getattr(module, "ON_CPU", False))
