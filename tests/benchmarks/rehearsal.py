"""`python -m benchmarks device --rehearse`: the order of a GPU's run on a CPU, with everything going wrong in it.

    wrong kernel       gelu_tanh's is off by 5 %: it is red and has no figure, and the transformer runs without it
    NaN                an attention backend whose gradient is NaN: it is red and has no figure
    out of memory      a training step of a peer (P2): ours is measured all the same, and no ratio of the two is shown
    illegal access     a sticky error of CUDA: another process goes on with the next cell
    hang               where Python cannot stop it: the process is ended, another one goes on
    crash              a signal ends the process: another one goes on
    kill               SIGKILL to all processes at a random moment: the same command goes on, and repeats nothing

The shapes are those of a smoke run, so no figure means anything, and on a CPU the transformer runs plain twins in any
case. What the file and the table then say is asserted.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import device, goals, harness, results
from benchmarks import session as sessions
from benchmarks.results import Record, Result
from benchmarks.session import Cell, Session, Suite
from benchmarks.suites import attention, block, transformer

WRONG_OP, WRONG_BACKEND = "gelu_tanh", "sdpa"
OPS = (WRONG_OP, "adaln")
"""Ops of the rehearsal; the others would be more of the same."""
ILLEGAL, HANG, CRASH = "kernels adaln forward odd ours", "decode tiny ours", "block forward A P1"
NEXT = {ILLEGAL: "kernels adaln forward odd eager", HANG: "decode tiny stock"}
STEPS = ("forward B P2", "forward B ours", "train B P2", "train B ours", "forward B P2c")
OUT_OF_MEMORY, UNHARMED = "transformer train B P2", "transformer train B ours"
KILLED_IN = (4, 20)
"""Between which of its cells a run is killed."""
LIMIT, GRACE = 2.0, 2.0
"""Seconds of the cell that hangs, and for Python to stop it."""


# ------------------------------------------------------------------------------------------ faults


def run_with_faults(argv: Sequence[str]) -> int:
    """`python -m benchmarks device`, supervised, with all faults but the kill."""
    options = sessions.parser_of("device", __doc__).parse_args(argv)
    if options.run_id is None:
        return sessions.supervise(("tests.benchmarks.rehearsal",), argv)
    return sessions.execute(with_faults(device.SUITES), options)


def with_faults(suites: Sequence[Suite]) -> list[Suite]:
    """The suites with all faults but the kill, in this process."""
    sessions.GRACE = GRACE
    block.CONTENDERS = ("ours", "P1")
    break_kernel()
    attention.gradients = partial(nan_gradients, attention.gradients)  # type: ignore[assignment]
    transformer.Model.outcome = without_memory(transformer.Model.outcome)  # type: ignore[method-assign]
    faults = {ILLEGAL: illegal_access, HANG: hang, CRASH: crash}

    def cells(suite: Suite, session: Session) -> Iterator[Cell]:
        for cell in suite.cells(session):
            # The steps of the transformer that the faults are about; the others would be more of the same.
            if cell.suite == "transformer" and not cell.name.startswith(("parity", *STEPS)):
                continue
            fault = faults.get(cell.key)
            yield cell if fault is None else replace(cell, work=fault, limit=LIMIT if fault is hang else cell.limit)

    return [replace(suite, cells=partial(cells, suite)) for suite in suites]


def break_kernel() -> None:
    """Let the forward kernel of an op write values that are 5 % too large."""
    op: Any = importlib.import_module(f"sage_kernels.ops.{WRONG_OP}")
    launch = op.launch

    def wrong(function: Any, grid: Any, x: Tensor, out: Tensor, *rest: Any, **options: Any) -> None:
        launch(function, grid, x, out, *rest, **options)
        if function is op.gelu_tanh_forward_kernel:
            out.mul_(1.05)

    op.launch = wrong


def nan_gradients(right: Callable[..., list[Tensor]], tensors: Sequence[Tensor], backend: str) -> list[Tensor]:
    """The attention suite's gradients, with one backend's gradient of q NaN."""
    out, dq, dk, dv = right(tensors, backend)
    return [out, dq * float("nan") if backend == WRONG_BACKEND else dq, dk, dv]


def without_memory(right: Callable[..., Any]) -> Callable[..., Any]:
    """A step of the transformer, for which there is no memory where a peer trains at B."""

    def outcome(model: Any, timed: Any, velocity: Any, inputs: Any) -> Any:
        if timed.contender == "P2" and timed.trains and timed.shape == "B":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")
        return right(model, timed, velocity, inputs)

    return outcome


def illegal_access() -> Record:
    """Fail as CUDA does: here, and whenever the device is asked for anything from now on."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    harness.wait = fail
    fail(torch.device("cpu"))
    raise AssertionError


def hang() -> Record:
    """Wait where Python's signals do not arrive, as inside CUDA."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(3600.0)
    raise AssertionError


def crash() -> Record:
    """End this process by a signal."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


# ------------------------------------------------------------------------------------------ what is said of them


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Expected content of file and table."""

    what: str
    holds: Callable[[Result, str], bool]


def status(name: str, begins: str) -> Callable[[Result, str], bool]:
    """A cell of this status, which the table names unless it is done."""
    return lambda result, printed: (
        result["cells"][name]["status"].startswith(begins) and (begins == "done" or f"\n{name}: {begins}" in printed)
    )


def red(parity: str, suite: str, absent: str) -> Callable[[Result, str], bool]:
    """A parity check that is red in file and table, and no figure of a contender or a step by that name."""

    def holds(result: Result, printed: str) -> bool:
        shown = [f"{step} {who}" for (of, step, _), rows in results.rows(result).items() if of == suite for who in rows]
        said = f"\n{parity}: PARITY FAILED, no ratio of what needs it" in printed
        return result["cells"][parity]["passed"] is False and said and not any(absent in name for name in shown)

    return holds


def note(name: str, words: str) -> Callable[[Result, str], bool]:
    """A row that says something of itself, also in the table."""
    return lambda result, printed: words in result["cells"][name]["rows"][0].get("note", "") and words in printed


def goal(name: str, text: str) -> Callable[[Result, str], bool]:
    """The outcome of a goal."""
    return lambda result, printed: {outcome.name: outcome.text for outcome in goals.outcomes(result)}[name] == text


EXPECTED = (
    Expectation(what="a wrong kernel is red", holds=red(f"kernels parity {WRONG_OP}", "kernels", WRONG_OP)),
    Expectation(
        what="the transformer runs without it",
        holds=note("transformer forward B ours", f"without the kernels of {WRONG_OP}"),
    ),
    Expectation(what="and is right", holds=status("transformer parity ours", "done")),
    Expectation(what="so does the iteration", holds=note("iteration B", f"without the kernels of {WRONG_OP}")),
    Expectation(what="a NaN is red", holds=red(f"attention parity {WRONG_BACKEND}", "attention", f" {WRONG_BACKEND}")),
    Expectation(what="memory ran out for one peer", holds=status(OUT_OF_MEMORY, "out of memory: CUDA out of memory")),
    Expectation(what="and for it alone", holds=note(UNHARMED, "not compared with P2 at full size")),
    Expectation(what="so there is no ratio", holds=goal("train B vs P2", "not measured")),
    Expectation(what="an illegal access is one cell's", holds=status(ILLEGAL, "failed: RuntimeError: CUDA error")),
    Expectation(what="the next cell is measured", holds=status(NEXT[ILLEGAL], "done")),
    Expectation(what="a hang is one cell's", holds=status(HANG, "stopped: it hung")),
    Expectation(what="the next cell is measured after it", holds=status(NEXT[HANG], "done")),
    Expectation(what="a crash is one cell's", holds=status(CRASH, "failed: its process ended by signal SIGSEGV")),
    Expectation(what="an iteration's ratio is 1", holds=status("iteration parity", "done")),
    Expectation(
        what="nothing is left running",
        holds=lambda result, printed: all(r["status"] != sessions.RUNNING for r in result["cells"].values()),
    ),
    Expectation(
        what="the table ends with what to do",
        holds=lambda result, printed: "Not everything was measured and passed. The same command goes on" in printed,
    ),
)


# ------------------------------------------------------------------------------------------ the rehearsal


def measured(printed: str) -> list[str]:
    """The cells that a run has begun, from what it printed."""
    return [line.partition("] ")[2] for line in printed.splitlines() if line.startswith("[") and " s] " in line]


def run(path: Path, *, killed_in: int | None) -> tuple[int, str]:
    """The exit status and the output of a run with faults, all of whose processes are killed in one of its cells."""
    words = [sys.executable, "-m", "tests.benchmarks.rehearsal", "--smoke", "--output", str(path)]
    words += [word for op in OPS for word in ("--op", op)]
    printed, begun = "", 0
    process = subprocess.Popen(
        words, cwd=device.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            printed += line
            begun += len(measured(line))
            if begun == killed_in:
                time.sleep(random.random())
                break
        else:
            process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, printed


def rehearse() -> int:
    """Rehearse; returns 1 where something is not as expected."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rehearsal.json"
        run(path, killed_in=random.randint(*KILLED_IN))
        before: dict[str, Record] = json.loads(path.read_text("utf-8"))["cells"]
        done = {name for name, record in before.items() if record["status"].startswith(sessions.SETTLED)}
        print(f"killed with {len(done)} cells done; going on", flush=True)
        code, second = run(path, killed_in=None)
        result: Result = json.loads(path.read_text("utf-8"))
    print(second[second.find("SMOKE RUN") :] if "SMOKE RUN" in second else second)
    again = measured(second)
    checks = {
        "killed in the middle": 0 < len(done) < len(result["cells"]),
        "what was done is not repeated": not done & set(again) and len(again) == len(set(again)),
        "what was done is kept": all(result["cells"][name] == before[name] for name in done),
        "the exit status is 1": code == 1,
    } | {expected.what: _holds(expected, result, second) for expected in EXPECTED}
    for what, holds in checks.items():
        print(f"{'ok    ' if holds else 'FAILED'}  {what}")
    return 0 if all(checks.values()) else 1


def _holds(expected: Expectation, result: Result, printed: str) -> bool:
    try:
        return expected.holds(result, printed)
    except KeyError as error:
        print(f"{expected.what}: there is no {error}")
        return False


if __name__ == "__main__":
    sys.exit(run_with_faults(sys.argv[1:]) if sys.argv[1:] else rehearse())
