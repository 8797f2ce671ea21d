"""A run of cells: what is saved, resumed, limited, refused and recorded; the GPU
script.
"""

import faulthandler
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from benchmarks import __main__, device, harness, results
from benchmarks import session as sessions
from benchmarks.session import CEILINGS, Cell, Session, Suite, timing
from tests.commands.programs import run_module

MakeSession = Callable[..., Session]

ROOT = Path(__file__).resolve().parents[2]


def suite_of(*cells: Cell, limit: float = 60.0) -> Suite:
    return Suite(name="some", cells=lambda session: iter(cells), limit=limit)


def cell(name: str, work: Callable[[], dict[str, Any]] = dict, **options: Any) -> Cell:
    return Cell(suite="some", name=name, work=work, **options)


def row() -> dict[str, Any]:
    seconds = harness.quantiles([1.0, 2.0])
    return {"rows": [timing("step", "A", "ours", seconds, flop=3e12)]}


def broken(*arguments: object, **options: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried 80 GiB.\nand more")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_fault_ends_a_run(tmp_path: Path) -> None:
    """Killed in its second cell and started again: what was done is kept, and every
    fault is one cell's.

    The supervisor alone is killed. The process that measures ends with it, for the next
    run would measure beside it.
    """
    path = tmp_path / "run.json"
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.faults",
        "--output_file",
        str(path),
    ]
    path.with_suffix(".wait").touch()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert any(line.endswith("waiting killed\n") for line in first.stdout)
        first.kill()
        killed = time.monotonic()
        first.stdout.read()
        assert time.monotonic() - killed < 30.0, (
            "both processes write there; the suite's own limit is 60 s"
        )
    before = json.loads(path.read_text("utf-8"))["cells"]
    assert (
        before["waiting good"]["status"] == "done"
        and before["waiting killed"]["status"] == "running"
    )
    path.with_suffix(".wait").unlink()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert done.returncode == 1 and cells["waiting good"] == before["waiting good"], (
        done.stderr[-2000:]
    )
    ended = "failed: its process ended in it, see the output"
    assert {name: record["status"] for name, record in cells.items()} == {
        "waiting good": "done",
        "waiting killed": "done",
        "broken sticky": (
            "failed: RuntimeError: CUDA error: an illegal memory access was encountered"
        ),
        "broken good": "done",
        "hanging hang": ended,
        "crashing crash": ended,
        "crashing good": "done",
    }
    assert "status -11" in done.stdout and f"\ncrashing crash: {ended}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", __main__.SUITES)
def test_every_command_measures_its_first_cells(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of each suite the first one, which imports what the suite needs."""
    run = Session.run

    def first(session: Session, suite: Suite) -> None:
        run(
            session,
            replace(suite, cells=lambda session: islice(suite.cells(session), 1)),
        )

    monkeypatch.setattr(Session, "run", first)
    words = [
        command,
        "--smoke",
        f"--output_file={tmp_path / 'result.json'}",
        f"--public={tmp_path}",
    ]
    with pytest.raises(SystemExit, match="1" if command == "peers" else "0"):
        run_module("benchmarks", words)
    cells = json.loads((tmp_path / "result.json").read_text("utf-8"))["cells"]
    assert {name.split()[0] for name in cells} == {
        suite.name.split()[0] for suite in device.suites_of(command)
    }
    # backends that need a GPU, and checkouts that are not there
    of_others = ("attention", "peers")
    assert {
        cell["status"] for name, cell in cells.items() if not name.startswith(of_others)
    } <= {"done"}, cells


@pytest.mark.parametrize(
    ("status", "given", "processes"),
    [(sessions.REFUSED, 2, 1), (-9, 1, sessions.MOST_RESTARTS)],
)
def test_a_child_that_came_to_its_end_has_no_successor(
    status: int, given: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = MagicMock(
        **{"return_value.__enter__.return_value.wait.return_value": status}
    )
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    assert sessions.supervise(("benchmarks", "device"), []) == given
    assert started.call_count == processes


def test_a_missing_parity_is_as_red_as_a_failed_one(session: MakeSession) -> None:
    """Where its check was stopped, never made, lost or has failed, a cell is not
    measured, and has no figure.
    """
    check = {"suite": "some", "status": "done", "passed": True}
    step = cell("step", row, needs=("some parity",))
    run = session({"some parity": check})
    run.run(suite_of(step))
    assert list(results.rows(run.result)) == [
        ("some", "step", "A")
    ] and results.succeeded(run.result)
    for bad in (
        {},
        check | {"status": "stopped after 45 s"},
        {"status": "done"},
        check | {"passed": False},
    ):
        later = session({"some parity": {"suite": "some", "status": "absent"} | bad})
        later.run(suite_of(step))
        assert (
            later.cells["some step"]["status"] == "skipped: some parity has not passed"
        )
        result = {
            "smoke": True,
            "cells": later.cells | {"some step": run.cells["some step"]},
        }
        assert results.rows(result) == {} and not results.succeeded(result)
        assert (
            "some step: no figure, because some parity has not passed"
            in results.table(result)
        )


def test_a_failure_is_one_cells_failure(session: MakeSession) -> None:
    run = session()
    works = {
        "memory": broken,
        "wrong": partial(int, "x"),
        "ends": partial(sys.exit, "a library gives up"),
        "good": row,
    }
    run.run(suite_of(*(cell(name, work) for name, work in works.items())))
    assert [record["status"] for record in run.cells.values()] == [
        "out of memory: CUDA out of memory. Tried 80 GiB.",
        "failed: ValueError: invalid literal for int() with base 10: 'x'",
        "failed: SystemExit: a library gives up",
        "done",
    ]
    assert "some wrong: failed: ValueError" in results.table(run.result)
    assert not results.succeeded(run.result)
    del run.cells["some wrong"], run.cells["some ends"]
    assert results.succeeded(run.result), "a size that does not fit is an answer"


def test_a_suite_that_cannot_start_is_tried_again_by_the_next_run(
    session: MakeSession,
) -> None:
    run = session()
    run.run(Suite(name="some", cells=broken))
    assert run.cells["some setup"]["status"].startswith("out of memory")
    run.run(suite_of(cell("second", row)))
    assert "some second" not in run.cells, "in one run a suite is tried once"
    run = session(run.cells)
    run.run(suite_of(cell("second", row)))
    assert {name: record["status"] for name, record in run.cells.items()} == {
        "some second": "done"
    }


def test_a_suite_has_its_time_and_its_process_ends_there(
    session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is ended with its process, which another one follows; what is left of the
    suite is not begun. A cell that began in time may end a minute later, but not behind
    the run's end.
    """
    ends = Mock()
    monkeypatch.setattr(faulthandler, "dump_traceback_later", ends)
    run = session(smoke=False, budget=90.0, supervised=True)
    run.run(suite_of(cell("good", row), limit=5.0))
    run.budget = 40.0
    run.run(
        Suite(
            name="other", cells=lambda session: iter([cell("second", row)]), limit=5.0
        )
    )
    assert [round(call.args[0]) for call in ends.call_args_list] == [
        60,
        60,
        60,
        60,
        40,
        60,
    ]
    run.run(
        Suite(name="late", cells=lambda session: iter([cell("late", row)]), limit=0.0)
    )
    assert run.cells["some good"]["status"] == "done"
    assert run.cells["some late"]["status"] == "skipped: the time is used up"
    assert "The same command goes on from here." in results.table(run.result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures ceilings on a GPU")
def test_a_file_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"commit": "0123456789", "gpu": None, "packages": {"torch": "2"}}
    monkeypatch.setattr(harness, "environment", lambda: environment)
    own = tmp_path / "own.json"
    done = {"suite": "a", "status": "done"}
    harness.write_result(
        own, {"environment": environment, "smoke": True, "cells": {"a b": done}}
    )
    options = sessions.parser_of("device", "").parse_args(
        ["--smoke", "--output_file", str(own)]
    )
    assert sessions.execute([suite_of(cell("c", row))], options) == 0
    assert list(json.loads(own.read_text("utf-8"))["cells"]) == ["a b", "some c"]
    monkeypatch.setattr(harness, "environment", lambda: environment | {"commit": "1"})
    assert sessions.execute([], options) == sessions.REFUSED
    assert (
        "own.json: its commit is another. Name another file" in capsys.readouterr().err
    )
    own.write_text("[]", "utf-8")
    assert sessions.execute([], options) == sessions.REFUSED
    assert "own.json has no" in capsys.readouterr().err
    options.output_file = own / "below.json"
    assert sessions.execute([CEILINGS], options) == sessions.REFUSED
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot write below.json" in said
    options.smoke = False
    assert sessions.execute([], options) == sessions.REFUSED
    assert "run with --smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("doublings", "seconds", "cycles"),
    [
        (0, 0.2, harness.HEAD_START_CYCLES),
        (99, 0.2, harness.MOST_HEAD_START_CYCLES),
        # A queue does not hold the launches of a training step: the device has always
        # begun before the last of them.
        (99, 8.0, harness.HEAD_START_CYCLES),
    ],
    ids=["in time", "waits for the device itself", "long"],
)
def test_a_late_start_is_given_more_time(
    doublings: int, seconds: float, cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of a GPU have passed at once while the head start is too short; all rounds
    have the same one.
    """
    sleeps: list[int] = []
    needed = harness.HEAD_START_CYCLES * 2**doublings
    event = Mock(
        query=lambda: sleeps[-1] < needed, elapsed_time=lambda end: 1e3 * seconds
    )
    monkeypatch.setattr(
        torch, "cuda", Mock(_sleep=sleeps.append, Event=lambda enable_timing: event)
    )
    monkeypatch.setattr(harness, "device_clock", harness.DeviceClock())
    found = harness.measure(lambda: None, rounds=3)
    assert (
        found["rounds"] == 3
        and found["median"] == pytest.approx(seconds)
        and sleeps[-3:] == [cycles] * 3
    )


def test_a_stretch_is_shortened_until_its_launches_fit_into_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[int] = []
    call = Mock(side_effect=lambda: queued.append(queued.pop() + 1))
    event = Mock(query=lambda: queued[-1] > 10, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(
        torch,
        "cuda",
        Mock(_sleep=lambda cycles: queued.append(0), Event=lambda enable_timing: event),
    )
    monkeypatch.setattr(harness, "device_clock", harness.DeviceClock())
    found = harness.measure(call, rounds=2, calls=100, warmup=0)
    assert queued == [100, 25, 6, 6] and found["median"] == pytest.approx(1e-3 / 6)
    assert harness.device_clock.cycles == harness.HEAD_START_CYCLES


def test_two_that_attend_by_different_libraries_have_no_ratio() -> None:
    """Of two runs; the newest record of every cell counts."""
    row_of = partial(timing, "train", "B", seconds=harness.quantiles([1.0, 2.0]))
    rows = [
        row_of("ours", attention="cudnn"),
        row_of("P1", attention="cudnn"),
        row_of("P2", attention="sdpa"),
    ]
    cells = {
        row["contender"]: {"suite": "transformer", "status": "done", "rows": [row]}
        for row in rows
    }
    result = {"smoke": False, "cells": cells}
    assert results.ratios(result) == {"transformer train B / P1": 1.0}
    assert results.table(result).count("1.00x") == 1


@pytest.mark.parametrize(
    ("limit", "left", "rounds"), [(10.0, 10.0, 5), (-1.0, 10.0, 3), (-1.0, -1.0, 1)]
)
def test_a_measurement_fits_into_its_time(
    limit: float, left: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    now = [0.0]

    def wait() -> None:
        now[0] += 0.004

    clock = Mock(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(harness, "time", clock)
    call = Mock(side_effect=wait)
    found = harness.measure(call, rounds=5, calls=2, warmup=1, limit=limit, left=left)
    assert found["rounds"] == rounds
    assert call.call_count == 1 + 2 * rounds
    assert found["q20"] == pytest.approx(0.004)


def test_ceilings_are_the_denominators(session: MakeSession) -> None:
    run = session()
    run.run(CEILINGS)
    run.run(suite_of(cell("step", row)))
    peak = results.ceiling(run.result, "matmul")
    assert (
        peak is not None
        and peak > 0
        and (results.ceiling(run.result, "copy") or 0.0) > 0
    )
    (found,) = run.cells["some step"]["rows"]
    assert found["rate"] == pytest.approx(2.0) and found["unit"] == "TFLOP/s"
    assert found["share"] == pytest.approx(2.0 / peak)


def test_the_state_of_a_gpu_is_what_its_driver_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a temperature, as in a slice of a GPU."""
    readings = {"clock_rate.return_value": 1980, "power_draw.return_value": 412_000}
    monkeypatch.setattr(
        torch, "cuda", Mock(**readings, **{"temperature.side_effect": LookupError})
    )
    assert harness.gpu_state() == {"sm_mhz": 1980, "power_w": 412.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suites", "absent"),
    [
        (["transformer", "decode", "iteration"], []),
        (["attention", "kernels"], ["diffusers", "transformers", "peft", "pydantic"]),
    ],
    ids=["models", "no models"],
)
def test_it_loads_on_a_bare_machine(suites: list[str], absent: list[str]) -> None:
    """With torch, triton, numpy, diffusers, transformers, peft and pydantic alone, and
    a suite without models without the last four.
    """
    absent += [
        "pytest",
        "pytest_benchmark",
        "ruamel.yaml",
        "av",
        "matplotlib",
        "tensorboard",
        "pynvml",
    ]
    modules = ", ".join(
        ["benchmarks.device", *(f"benchmarks.suites.{suite}" for suite in suites)]
    )
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); import {modules}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


# --------------------------------------------------------------------------------------
# a lease


def test_runs_share_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"commit": "0", "gpu": None, "packages": {}}
    monkeypatch.setattr(harness, "environment", lambda: environment)
    monkeypatch.setattr(sessions.benchmarks, "STARTED", time.monotonic())
    path = tmp_path / "gpu.json"
    options = sessions.parser_of("device", "").parse_args(
        ["--lease=900", f"--output_file={path}"]
    )
    budgets = []

    def cells(run: Session) -> list[Cell]:
        budgets.append(run.budget)
        return [cell("good", row)]

    suite = Suite(name="some", cells=lambda run: iter(cells(run)))
    for earlier in ({}, {"1.0": 507.0}, {"1.0": 507.0, "2.0": 290.0}):
        known = {
            "environment": environment,
            "smoke": False,
            "cells": {},
            "calls": earlier,
        }
        harness.write_result(path, known)
        status = sessions.execute([suite], options, on_cpu=True)
    assert budgets == [510.0, pytest.approx(303.0)]
    assert status == sessions.REFUSED
    printed = capsys.readouterr()
    assert "A lease of 900 s has no time left for a run: 2 run(s) of " in printed.err
    assert "gpu.json took 797 s, and each loses 45 s before it begins." in printed.err
    assert (
        printed.out.count(
            " s of the lease are left for another run; to measure: nothing\n"
        )
        == 2
    )


def test_a_process_that_follows_a_fault_begins_where_the_last_one_was(
    session: MakeSession,
) -> None:
    """The modules of an ended suite are not imported again; a later run looks for what
    is missing.
    """
    imported = []
    suite = Suite(
        name="some", cells=lambda run: imported.append(run) or iter([cell("good", row)])
    )
    first = session()
    first.run(suite)
    following = session(first.cells, result=first.result, started=first.started)
    following.run(suite)
    assert imported == [first]
    later = session(first.cells, result=first.result)
    later.run(suite)
    assert imported == [first, later]
