"""A run of benchmarks: cells that are measured, saved and resumed one by one.

A result file holds `environment`, `smoke` and `cells`, "<suite> <what>" -> a record:

    status     "done", or why there is nothing: "failed: ...", "out of memory: ...", "skipped: ...", "absent: ..." (no
               library), and "running" where the whole run was killed in the middle of it
    run        when its run began, on the machine's clock: in its own run a cell is tried once
    needs      cells of parity checks that must have passed; what stands behind a missing or red one does not count
    errors, bounds, passed   of a parity check
    rows       of a timing: step, shape, contender, seconds (quantiles); where known flop or bytes of a call with
               rate, unit and share of the ceiling, peak_memory_gb, a note
    telemetry  seconds, state of the GPU before and after

and `calls`, beginning of a run -> its seconds so far, and `ended`, suite -> the run
that has come to its end.

The file is written before and after every cell, and a later run with the same file goes
on with what is missing.

A run measures in a child process (`supervise`). Where that can measure no more (a
sticky CUDA error), is ended by a signal, or has used up a cell's time, another one goes
on with the next cell.
"""

import argparse
import faulthandler
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import benchmarks  # first, because it decides where kernels run
from benchmarks import harness, results
from benchmarks.harness import Quantiles
from benchmarks.results import Record, Result
from sage_fast.models.attention.attention import BACKENDS
from sage_kernels.registry import OPS

BUDGET = 510.0
"""Seconds of a whole run."""
ARRIVAL = 45.0
"""Of a lease, before a run begins on it: the machine's start, copying."""
CELL_SHARE = 1 / 24
"""Of a run's time, for the rounds of one cell beyond the fewest."""
SETTLED = ("done", "absent")
"""How the status of a cell begins that a later run does not repeat; other libraries
make it another run.
"""
RUNNING = "running"
"""Status of a cell from its beginning to its end."""
RED = 10
REFUSED = 2
"""Exit statuses of a child process that came to its end: something is missing; it
cannot run at all.
"""
MOST_RESTARTS = 20
MOST_SECONDS = 3600.0
"""Of a cell without a limit, after which its process is ended all the same."""
LEAST_SECONDS = 60.0
"""That a suite may take between two of its cells, and one cell in any case, before its
process is ended.
"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement or parity check.

    Attributes:
        work: returns the record without `status`, which it may set itself.
        needs: parity cells, by full name.

    Example: `Cell(suite="decode", name="B ours", work=..., needs=("decode parity B",))`
    """

    suite: str
    name: str
    work: Callable[[], Record]
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.suite} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells that share a model or inputs, most valuable first.

    Attributes:
        cells: generator of them; it may build the next cell from what the last one
            found.
        limit: seconds it has at most in a run of all suites.
    """

    name: str
    cells: Callable[["Session"], Iterator[Cell]]
    limit: float = math.inf


@dataclass(kw_only=True)
class Session:
    """State of a run: where it measures, what is known so far, how much time is left.

    Attributes:
        ops: of the kernels, those that are measured; empty for all.
        attention: backend of the transformer and its peers.
        public: folder with checkouts of public trainers.
        started: when the run began, which is also its name in the records.
        supervised: whether another process goes on when this one ends.
    """

    device: torch.device
    smoke: bool
    budget: float = math.inf
    path: Path | None = None
    result: Result = field(default_factory=lambda: {"cells": {}})
    ops: Sequence[str] = ()
    attention: str = "auto"
    public: Path | None = None
    started: float = field(default_factory=time.monotonic)
    supervised: bool = False
    _suite_ends: float = math.inf

    @property
    def cells(self) -> dict[str, Record]:
        """The records so far."""
        found: dict[str, Record] = self.result["cells"]
        return found

    @property
    def left(self) -> float:
        """Seconds that are left to the running suite."""
        return min(self.left_of_run, self._suite_ends - time.monotonic())

    @property
    def left_of_run(self) -> float:
        """Seconds that are left to all suites."""
        return self.budget - (time.monotonic() - self.started)

    def run(self, suite: Suite) -> None:
        """Measure the cells of a suite that are not there yet."""
        self._suite_ends = math.inf if self.smoke else time.monotonic() + suite.limit
        setup = f"{suite.name} setup"
        ended = self.result.setdefault("ended", {})
        if self._tried(setup) or ended.get(suite.name) == self.started:
            return
        self.cells[setup] = {
            "suite": suite.name,
            "needs": [],
            "status": RUNNING,
            "run": self.started,
        }
        self._end_process_after(LEAST_SECONDS)
        try:
            for cell in suite.cells(self):
                self.measure(cell)
                self._end_process_after(LEAST_SECONDS)
            harness.release()
        except Exception as error:  # noqa: BLE001  what a suite does between its cells may fail like a cell
            self.cells[setup] |= {"status": failure(error)}
        else:
            del self.cells[setup]
        ended[suite.name] = self.started
        self._suite_ends = math.inf
        self.save()
        self._require_device()
        faulthandler.cancel_dump_traceback_later()

    def _tried(self, key: str) -> bool:
        """True if this run need not try a cell: it is done, its library is absent, or
        it has failed in this run.
        """
        record = self.cells.get(key, {})
        return (
            record.get("status", "").partition(":")[0] in SETTLED
            or record.get("run") == self.started
        )

    def measure(self, cell: Cell) -> None:
        """Measure a cell, unless there is nothing to do about it, and save the result."""
        if self._tried(cell.key):
            return
        record: Record = {
            "suite": cell.suite,
            "needs": list(cell.needs),
            "status": RUNNING,
            "run": self.started,
        }
        if red := results.red(self.result, cell.needs):
            record["status"] = f"skipped: {red[0]} has not passed"
        elif self.left <= 0:
            record["status"] = results.LATE
        else:
            self.cells[cell.key] = record
            self.save()
            print(f"[{time.monotonic() - self.started:5.0f} s] {cell.key}", flush=True)
            record = record | self._work(cell.work)
        self.cells[cell.key] = record
        self.save()
        if record["status"].startswith("failed"):
            self._require_device()

    def _require_device(self) -> None:
        """Let another process go on where every further call of CUDA would fail too.

        Raises:
            SystemExit: in a supervised run.
        """
        try:
            harness.wait(self.device)
        except RuntimeError as error:
            if self.supervised:
                # The suite is not at fault.
                self.result["cells"] = {
                    key: r for key, r in self.cells.items() if r["status"] != RUNNING
                }
                self.save()
                sys.exit(
                    f"CUDA is of no use to this process any more: {failure(error)}"
                )

    def blame(self) -> None:
        """Give up the cell, or else the suite, in which an earlier process of this run
        ended.
        """
        running = [
            k
            for k, r in self.cells.items()
            if r["status"] == RUNNING and r.get("run") == self.started
        ]
        for key in running:
            if key.endswith(" setup") and len(running) > 1:
                del self.cells[key]
            else:
                self.cells[key] |= {
                    "status": "failed: its process ended in it, see the output"
                }

    def _end_process_after(self, seconds: float) -> None:
        """End a supervised process that is not done then, also inside CUDA, where
        Python could not stop it.
        """
        if self.supervised:
            faulthandler.dump_traceback_later(min(seconds, MOST_SECONDS), exit=True)

    def _work(self, work: Callable[[], Record]) -> Record:
        record: Record = {"status": "done"}
        # A cell that began in time may end behind its suite's, though not behind the
        # run's.
        self._end_process_after(min(self.left_of_run, max(self.left, LEAST_SECONDS)))
        start = harness.gpu_state()
        began = time.monotonic()
        try:
            record |= work()
            harness.wait(self.device)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a library raises is this cell's failure
            record = {"status": failure(error)}
        telemetry: Record = {"seconds": time.monotonic() - began}
        if start is not None:
            telemetry |= {"start": start, "end": harness.gpu_state()}
        harness.device_clock.reset()
        kinds = (("flop", "TFLOP/s", 1e12, "matmul"), ("bytes", "GB/s", 1e9, "copy"))
        for row, (amount, unit, scale, ceiling) in itertools.product(
            record.get("rows", []), kinds
        ):
            if amount in row:
                row |= {
                    "rate": row[amount] / row["seconds"]["median"] / scale,
                    "unit": unit,
                }
                if (limit := results.ceiling(self.result, ceiling)) is not None:
                    row["share"] = row["rate"] / limit
        return record | {"telemetry": telemetry}

    def time(
        self,
        call: Callable[[], object],
        *,
        rounds: int,
        calls: int = 1,
        warmup: int = 1,
    ) -> Quantiles:
        """Quantiles of a call within what this cell may take; a smoke run makes two
        rounds.
        """
        if self.smoke:
            return harness.measure(call, rounds=2, calls=calls, warmup=min(warmup, 1))
        limit = self.budget * CELL_SHARE
        return harness.measure(
            call, rounds=rounds, calls=calls, warmup=warmup, limit=limit, left=self.left
        )

    def save(self) -> None:
        """Write the result so far."""
        self.result.setdefault("calls", {})[str(self.started)] = (
            time.monotonic() - self.started
        )
        if self.path is not None:
            harness.write_result(self.path, self.result)


def failure(error: BaseException) -> str:
    """A status: the kind of an exception and the first line of its message."""
    kind = f"failed: {type(error).__name__}"
    if isinstance(error, torch.OutOfMemoryError):
        kind = "out of memory"
    return f"{kind}: {(str(error).strip().splitlines() or [''])[0]}"


def timing(
    step: str, shape: str, contender: str, seconds: Quantiles, **more: Any
) -> Record:
    """A row, without what is None: `flop` or `bytes` of a call, peak_memory_gb, note,
    and what else a suite tells.
    """
    row = {"step": step, "shape": shape, "contender": contender, "seconds": seconds}
    return row | {name: value for name, value in more.items() if value is not None}


def ceiling_cells(session: Session) -> Iterator[Cell]:
    """Copy bandwidth and the rate of a large product, the denominators of every share.

    A kernel can reach at least the rate of one copy: the ceiling is the faster of
    memcpy and a Triton copy.
    """

    def measured(name: str) -> Record:
        calls, work = harness.CEILINGS[name](session.device, session.smoke)
        rows = []
        for contender, call in calls.items():
            seconds = session.time(
                call, rounds=20, calls=1 if session.smoke else 5, warmup=3
            )
            rows.append(timing(name, "", contender, seconds, **work))
        return {"rows": rows}

    for name in harness.CEILINGS:
        yield Cell(suite="ceilings", name=name, work=partial(measured, name))


CEILINGS = Suite(name="ceilings", cells=ceiling_cells, limit=20.0)


# --------------------------------------------------------------------------------------
# the command


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Options that the commands share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}", description=description
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny shapes and few rounds; runs without a GPU",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET,
        help=f"seconds of the whole run ({BUDGET:.0f})",
    )
    parser.add_argument(
        "--lease",
        type=float,
        help="seconds for which a GPU is lent, for this run and the next",
    )
    parser.add_argument(
        "--output_file",
        type=Path,
        help="JSON; default benchmarks/results/<device>/<date>-<commit>...",
    )
    parser.add_argument(
        "--op",
        action="append",
        default=[],
        choices=OPS,
        metavar="NAME",
        help="of the kernels, this op only; may be repeated",
    )
    parser.add_argument(
        "--attention",
        default="auto",
        choices=("auto", *BACKENDS),
        metavar="NAME",
        help="backend of the transformer's attention and of its peers",
    )
    parser.add_argument(
        "--public",
        type=Path,
        help="of the peers: folder with checkouts of the public trainers",
    )
    # `supervise` gives its processes the time at which it began.
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return parser


def supervise(program: Sequence[str], argv: Sequence[str]) -> int:
    """Run `python -m <program>` in a child process, and in another one for as long as
    one ends early.

    Returns:
        The exit status of the whole.
    """
    command = [
        sys.executable,
        "-m",
        *program,
        *argv,
        "--started",
        repr(benchmarks.STARTED),
    ]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for _ in range(MOST_RESTARTS):
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                status = process.wait()
            finally:
                process.kill()
        if status in (0, RED, REFUSED):
            return 1 if status == RED else status
        print(
            f"A process ended with status {status} (-N is signal N); another one goes "
            "on",
            flush=True,
        )
    return 1


def end_with_supervisor() -> None:
    """Wait for the end of the supervising process, however it comes, and end this one:
    the next run of the same command would measure beside it. The supervisor holds the
    other end of this one's input.
    """
    os.read(0, 1)
    os._exit(1)


def left_of(lease: float, calls: Mapping[str, float]) -> float:
    """Seconds that a lease has left for one more run, after these."""
    return lease - sum(calls.values()) - ARRIVAL * (len(calls) + 1)


def execute(
    suites: Sequence[Suite],
    options: argparse.Namespace,
    *,
    suffix: str = "",
    on_cpu: bool = False,
) -> int:
    """Run suites as the command line asks.

    Args:
        suffix: of the result file's name.
        on_cpu: whether a full run makes sense without a GPU.

    Returns:
        0 if everything was measured and passed, else 1 or, in a supervised process,
        `RED`; `REFUSED` where it cannot run: no GPU and no --smoke, or its file is of
        another environment.
    """
    try:
        session = _open(options, suffix=suffix, on_cpu=on_cpu)
        for suite in suites:
            session.run(suite)
    except (ValueError, OSError) as error:  # an OSError is of the result's file
        print(error, file=sys.stderr)
        return REFUSED
    except Exception:  # noqa: BLE001  cells have their own guards: this is a mistake of this module
        traceback.print_exc()
        return REFUSED
    print(results.table(session.result))
    if session.path is not None:
        print(f"written to {session.path}")
    if options.lease and not options.smoke:
        left = max(0.0, left_of(options.lease, session.result["calls"]))
        print(
            f"{left:.0f} s of the lease are left for another run; to measure: "
            f"{results.left(session.result)}"
        )
    if results.succeeded(session.result):
        return 0
    return RED if session.supervised else 1


def _open(options: argparse.Namespace, *, suffix: str, on_cpu: bool) -> Session:
    """A session of the command line, with the cells that its file has already."""
    if not (torch.cuda.is_available() or options.smoke or on_cpu):
        raise ValueError(
            "There is no CUDA device here: run with --smoke, or on a machine with a "
            "GPU."
        )
    logging.disable(logging.INFO)
    environment = harness.environment()
    path = options.output_file
    if path is None and not options.smoke:
        path = harness.result_file(environment, suffix=suffix)
    result: Result = {"environment": environment, "smoke": options.smoke, "cells": {}}
    if path is not None and path.is_file():
        print(f"going on from {path}")
        found = results.read_result(path)
        known = found["environment"]
        wrong = [
            f"its {key} is another"
            for key in ("commit", "gpu", "packages")
            if known.get(key) != environment[key]
        ]
        if found.get("smoke") != options.smoke:
            wrong.append("it is not a result of this command")
        if wrong:
            raise ValueError(
                f"{path}: {', '.join(wrong)}. Name another file with --output_file."
            )
        result = found
    budget = options.budget
    if options.lease and not options.smoke:
        earlier = {
            run: seconds
            for run, seconds in result.get("calls", {}).items()
            if run != str(options.started)
        }
        budget = min(budget, left_of(options.lease, earlier))
        if budget <= 0:
            raise ValueError(
                f"A lease of {options.lease:.0f} s has no time left for a run: "
                f"{len(earlier)} run(s) of {path} took "
                f"{sum(earlier.values()):.0f} s, and each loses {ARRIVAL:.0f} s "
                "before it begins."
            )
    session = Session(
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        smoke=options.smoke,
        # A smoke run measures nothing, so on a busy machine it may take its time.
        budget=math.inf if options.smoke else budget,
        path=path,
        result=result,
        ops=options.op,
        attention=options.attention,
        public=options.public,
        started=benchmarks.STARTED if options.started is None else options.started,
        supervised=options.started is not None,
    )
    if session.supervised:
        threading.Thread(target=end_with_supervisor, daemon=True).start()
        session.blame()
    return session


def main(name: str, argv: Sequence[str], purpose: str = "") -> int:
    """A command of `benchmarks.device`: its suites in a child process, or in this one
    for a smoke run.
    """
    from benchmarks.device import WITHOUT_GPU, suites_of

    options = parser_of(name, purpose).parse_args(argv)
    if options.started is None and not options.smoke:
        return supervise(("benchmarks", name), argv)
    suffix = "" if name == "device" else f"-{name}"
    return execute(suites_of(name), options, suffix=suffix, on_cpu=name in WITHOUT_GPU)
