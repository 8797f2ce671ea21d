"""A run of cells: what is saved, resumed, limited, refused and recorded; the GPU script and its sanitizer."""

import json
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import benchmarks
from benchmarks import device, harness, results
from benchmarks import session as sessions
from benchmarks.session import CEILINGS, Cell, Session, Suite, timing
from benchmarks.suites import block, kernels, transformer
from tests.benchmarks import rehearsal

MakeSession = Callable[..., Session]
RAN = "62 forward and backward passes of 8 ops ran"


def suite_of(*cells: Cell, limit: float = 60.0) -> Suite:
    return Suite(name="some", cells=lambda session: iter(cells), limit=limit)


def cell(name: str, work: Callable[[], dict[str, Any]] = dict, **options: Any) -> Cell:
    return Cell(suite="some", name=name, work=work, **options)


def row() -> dict[str, Any]:
    seconds = harness.Quantiles.of([1.0, 2.0])
    return {"rows": [timing("step", "A", "ours", seconds, flop=3e12)]}


def broken(*arguments: object, **options: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried 80 GiB.\nand more")


def test_every_cell_is_saved_when_it_is_measured(session: MakeSession, tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "run.json"

    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    run = session(path=path)
    with pytest.raises(KeyboardInterrupt):
        run.run(suite_of(cell("first", row), cell("second", interrupted), cell("third", row)))
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert {name: cells[f"some {name}"]["status"] for name in ("first", "second")} == {
        "first": "done",
        "second": "running",
    }
    assert "some third" not in cells and not results.succeeded(run.result)


def test_a_later_run_goes_on_with_what_is_missing(session: MakeSession) -> None:
    calls: list[str] = []

    def work(name: str, **record: Any) -> Callable[[], dict[str, Any]]:
        return lambda: calls.append(name) or dict(record)  # type: ignore[func-returns-value]

    first = session()
    first.run(suite_of(cell("done", work("done")), cell("part", work("part", status="done in part: 2 of 3"))))
    second = session(first.cells)
    second.run(suite_of(cell("done", work("done")), cell("part", work("part")), cell("new", work("new"))))
    assert calls == ["done", "part", "part", "new"]
    assert {record["status"] for record in second.cells.values()} == {"done"}


def test_a_missing_parity_is_as_red_as_a_failed_one(session: MakeSession) -> None:
    run = session({"some red": {"suite": "some", "status": "done", "passed": False}})
    run.run(suite_of(*(cell(name, row, needs=(f"some {name[:-1]}",)) for name in ("missing1", "red1"))))
    assert run.cells["some missing1"]["status"] == "skipped: some missing has not passed"
    assert run.cells["some red1"]["status"] == "skipped: some red has not passed"
    assert not results.succeeded(run.result) and results.rows(run.result) == {}
    # Neither does a figure count whose check turned red, or was lost, afterwards.
    run.cells["some red1"] = {"suite": "some", "status": "done", "needs": ["some red"]} | row()
    assert results.rows(run.result) == {}
    run.cells["some red"]["passed"] = True
    assert list(results.rows(run.result)) == [("some", "step", "A")]


def test_a_failure_is_one_cells_failure(session: MakeSession) -> None:
    run = session()
    run.run(suite_of(cell("memory", broken), cell("wrong", lambda: {"x": 1 // 0}), cell("good", row)))
    assert run.cells["some memory"]["status"] == "out of memory: CUDA out of memory. Tried 80 GiB."
    assert run.cells["some wrong"]["status"].startswith("failed: ZeroDivisionError: ")
    assert run.cells["some good"]["status"] == "done" and harness.device_clock.cycles == harness.HEAD_START_CYCLES
    assert "some wrong: failed: ZeroDivisionError" in results.table(run.result)
    assert not results.succeeded(run.result)
    del run.cells["some wrong"]
    assert results.succeeded(run.result), "a size that does not fit is an answer"


def test_a_missing_parity_is_red(session: MakeSession) -> None:
    """A cell whose check was stopped, never made or lost has no figure and no success."""
    check = {"suite": "some", "status": "done", "passed": True}
    run = session({"some parity": check})
    run.run(suite_of(cell("step", row, needs=("some parity",))))
    assert results.rows(run.result) and results.succeeded(run.result)
    for missing in (None, check | {"status": "stopped after 45 s"}, {"suite": "some", "status": "done"}):
        cells = {name: dict(record) for name, record in run.cells.items()}
        cells["some parity"] = missing
        result = {"smoke": True, "cells": {name: record for name, record in cells.items() if record is not None}}
        assert results.rows(result) == {} and not results.succeeded(result)
        assert "some step: no figure, because some parity has not passed" in results.table(result)
        later = session(dict(result["cells"]) | {"some parity": {"suite": "some", "status": "stopped after 45 s"}})
        del later.cells["some step"]
        later.run(suite_of(cell("step", row, needs=("some parity",))))
        assert later.cells["some step"]["status"] == "skipped: some parity has not passed"


def test_what_ends_python_is_one_cells_failure(session: MakeSession) -> None:
    run = session()
    run.run(suite_of(cell("ends", lambda: sys.exit("a library gives up")), cell("good", row)))
    assert run.cells["some ends"]["status"] == "failed: SystemExit: a library gives up"
    assert run.cells["some good"]["status"] == "done"


def test_a_suite_that_cannot_start_leaves_the_others_running(session: MakeSession) -> None:
    def cells(run: Session) -> Iterator[Cell]:
        yield cell("first", row)
        raise RuntimeError("no such weights")

    run = session()
    run.run(Suite(name="some", cells=cells))
    assert run.cells["some setup"]["status"] == "failed: RuntimeError: no such weights"
    run.run(suite_of(cell("second", row)))
    assert "some second" not in run.cells, "in one run a suite is tried once"
    run = session(run.cells)
    run.run(suite_of(cell("second", row)))
    assert "some setup" not in run.cells and run.cells["some second"]["status"] == "done"


def test_a_cell_is_stopped_at_the_limit_of_its_suite(session: MakeSession) -> None:
    def endless() -> dict[str, Any]:
        while True:
            time.sleep(0.01)

    before = signal.getsignal(signal.SIGALRM)
    run = session(smoke=False)
    run.run(suite_of(cell("endless", endless), cell("late", row), limit=0.2))
    assert run.cells["some endless"]["status"] == "stopped after 0 s"
    assert run.cells["some late"]["status"] == "skipped: the time is used up"
    assert signal.getsignal(signal.SIGALRM) is before
    run.run(Suite(name="other", cells=lambda session: iter([Cell(suite="other", name="good", work=row)])))
    assert run.cells["other good"]["status"] == "done"


def test_a_device_that_is_of_no_use_ends_a_supervised_process(
    session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one, of the same run, goes on with the next cell."""

    def sticky() -> dict[str, Any]:
        def fail(*arguments: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(harness, "wait", fail)
        return {}

    suite = suite_of(cell("first", row), cell("sticky", sticky), cell("next", row))
    run = session(path=tmp_path / "run.json", supervised=True)
    with pytest.raises(SystemExit) as stop:
        run.run(suite)
    assert stop.value.code == sessions.RESTART
    monkeypatch.undo()
    cells = json.loads((tmp_path / "run.json").read_text("utf-8"))["cells"]
    assert list(cells) == ["some first", "some sticky"], "the suite is not at fault"
    later = session(cells, run_id=run.run_id)
    later.run(suite)
    assert later.cells["some sticky"]["status"].startswith("failed: RuntimeError: CUDA error")
    assert later.cells["some next"]["status"] == "done"
    # Alone, without another process behind it, a run goes on and says of every cell that it failed.
    alone = session()
    alone.run(suite)
    assert alone.cells["some sticky"]["status"].startswith("failed")


def test_the_cell_in_which_a_process_ended_is_told_how(session: MakeSession) -> None:
    suite = suite_of(cell("ends", row), cell("next", row))
    run = session({"some setup": {"status": "running"}, "some ends": {"status": "running", "run": "1"}}, run_id="1")
    run.close(sessions.how_it_ended(-signal.SIGSEGV))
    run.run(suite)
    assert run.cells["some ends"]["status"] == "failed: its process ended by signal SIGSEGV"
    assert run.cells["some next"]["status"] == "done" and "some setup" not in run.cells
    # Where the process ended between its cells, the suite is left alone in this run.
    run = session({"some setup": {"status": "running", "run": "1"}}, run_id="1")
    run.close(sessions.how_it_ended(sessions.HUNG))
    run.run(suite)
    assert list(run.cells) == ["some setup"] and run.cells["some setup"]["status"].startswith("stopped: it hung")


@pytest.mark.parametrize(
    ("statuses", "given"),
    [
        pytest.param([0], 0, id="all-is-well"),
        pytest.param([sessions.RED], 1, id="red"),
        pytest.param([sessions.REFUSED], 2, id="refused"),
        pytest.param([sessions.RESTART, -signal.SIGSEGV, sessions.HUNG, 0], 0, id="goes-on"),
        pytest.param([sessions.RESTART] * 99, 1, id="not-for-ever"),
    ],
)
def test_another_process_goes_on(statuses: list[int], given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def process(command: list[str]) -> Any:
        commands.append(command)
        return types.SimpleNamespace(wait=lambda: statuses[len(commands) - 1], kill=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", process)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    assert sessions.supervise(("benchmarks", "device"), ["--budget", "9"]) == given
    assert len(commands) == min(len(statuses), sessions.MOST_RESTARTS)
    runs = {command[command.index("--run-id") + 1] for command in commands}
    assert len(runs) == 1 and all(command[4:6] == ["--budget", "9"] for command in commands)
    ended = [command[-1] if "--ended" in command else None for command in commands]
    if len(statuses) == 4:
        assert ended[:2] == [None, None] and "SIGSEGV" in str(ended[2]) and "it hung" in str(ended[3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures ceilings on a GPU")
def test_what_to_go_on_from_is_read_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"commit": "0123456789", "gpu": None, "packages": {"torch": "2"}}
    monkeypatch.setattr(harness, "environment", lambda: environment)
    given, own = tmp_path / "given.json", tmp_path / "own.json"
    words = ["--smoke", "--resume-from", str(given), "--output", str(own)]
    options = sessions.parser_of("device", "").parse_args(words)
    assert sessions.execute([], options) == sessions.REFUSED
    assert "there is no such file" in capsys.readouterr().err
    done = {"suite": "a", "status": "done"}
    harness.write_result(given, {"environment": environment, "smoke": True, "cells": {"a b": done}})
    assert sessions.execute([suite_of(cell("c", row))], options) == 0
    assert list(json.loads(own.read_text("utf-8"))["cells"]) == ["a b", "ceilings copy", "ceilings matmul", "some c"]
    assert list(json.loads(given.read_text("utf-8"))["cells"]) == ["a b"]
    monkeypatch.setattr(harness, "environment", lambda: environment | {"commit": "1"})
    assert sessions.execute([], options) == sessions.REFUSED
    assert "own.json: its commit is another. Name another file" in capsys.readouterr().err
    full = sessions.parser_of("device", "").parse_args(["--output", str(given)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sessions.execute([], full) == sessions.REFUSED
    assert "it is not a result of this command" in capsys.readouterr().err


def test_a_budget_counts_from_the_start_of_the_process() -> None:
    options = sessions.parser_of("device", "").parse_args([])
    assert options.started == benchmarks.STARTED <= time.monotonic()


class FakeGPU:
    """Events that have passed at once while the head start is shorter than `needs`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, needs: int, seconds: float) -> None:
        self.sleeps: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleeps.append)
        event = types.SimpleNamespace(
            record=lambda: None, query=lambda: self.sleeps[-1] < needs, elapsed_time=lambda end: 1e3 * seconds
        )
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
        monkeypatch.setattr(harness, "device_clock", harness.DeviceClock())


@pytest.mark.parametrize(("doublings", "late"), [(0, False), (2, False), (99, True)])
def test_a_late_start_is_given_more_time(doublings: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, most = harness.HEAD_START_CYCLES, harness.MOST_HEAD_START_CYCLES
    gpu = FakeGPU(monkeypatch, needs=first * 2**doublings, seconds=0.2)
    found = harness.measure(lambda: None, rounds=3)
    assert found.rounds == 3 and found.median == pytest.approx(0.2) and harness.device_clock.late == late
    assert gpu.sleeps[-1] == min(first * 2**doublings, most), (
        "what waits for the device itself is not repeated for ever"
    )
    assert gpu.sleeps[-3:] == [gpu.sleeps[-1]] * 3, "all rounds have the same head start"


def test_a_long_stretch_is_not_repeated_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue does not hold the launches of a training step, so the device has always begun before the last of them."""
    gpu = FakeGPU(monkeypatch, needs=harness.MOST_HEAD_START_CYCLES, seconds=8.0)
    assert harness.measure(lambda: None, rounds=3, warmup=0).median == 8.0
    assert gpu.sleeps == [harness.HEAD_START_CYCLES] * 3


def test_a_limit_leaves_the_timer_around_it_running() -> None:
    previous = signal.getitimer(signal.ITIMER_REAL)[0]
    with sessions.time_limit(5.0):
        assert 4.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5.0
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (after == 0.0) == (previous == 0.0) and after <= previous


def test_what_the_time_does_not_hold_is_skipped_and_says_so(session: MakeSession) -> None:
    run = session(smoke=False, budget=10.0)
    run.run(suite_of(cell("long", row, seconds=60.0)))
    assert run.cells["some long"]["status"] == "skipped: it takes about 60 s and 10 s are left"
    assert "The same command goes on from here." in results.table(run.result)


def test_ceilings_are_the_denominators(session: MakeSession) -> None:
    run = session()
    run.run(CEILINGS)
    run.run(suite_of(cell("step", row)))
    peak = results.ceiling(run.result, "matmul")
    assert peak is not None and peak > 0 and (results.ceiling(run.result, "copy") or 0.0) > 0
    (found,) = run.cells["some step"]["rows"]
    assert found["rate"] == pytest.approx(2.0) and found["unit"] == "TFLOP/s"
    assert found["share"] == pytest.approx(2.0 / peak)
    assert run.cells["some step"]["telemetry"]["seconds"] >= 0


def test_fewer_rounds_where_time_is_short() -> None:
    def rounds(limit: float, left: float) -> int:
        return harness.measure(lambda: None, rounds=5, limit=limit, left=left).rounds

    assert [rounds(10.0, 10.0), rounds(-1.0, 10.0), rounds(-1.0, -1.0)] == [5, harness.FEWEST_ROUNDS, 1]


def test_calls_are_counted_and_divided() -> None:
    calls: list[int] = []
    found = harness.measure(lambda: calls.append(time.sleep(0.004) or 1), rounds=3, calls=2, warmup=1)  # type: ignore[func-returns-value]
    assert len(calls) == 7 and found.rounds == 3 and 0.004 <= found.q20 < 0.008


def test_quantiles_are_the_fifths() -> None:
    found = harness.Quantiles.of([float(n) for n in range(11)])
    assert (found.q20, found.median, found.q80, found.rounds) == (2.0, 5.0, 8.0, 11)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert sessions.main("transformer", []) == sessions.REFUSED
    assert "run with --smoke" in capsys.readouterr().err


class FakeNVML(types.ModuleType):
    """A driver that counts energy, 100 J from call to call, and knows no temperature."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.energy = 0

    def __getattr__(self, name: str) -> object:
        fixed: dict[str, object] = {
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
            "nvmlDeviceGetPowerUsage": 412_000,
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=17_000_000_000),
        }
        if name not in fixed:
            raise AttributeError(name)
        return lambda *arguments: fixed[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self.energy += 100_000
        return self.energy

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        raise self.NVMLError("not supported")


def test_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda: "handle")
    with harness.telemetry() as record:
        time.sleep(0.01)
    assert record["start"] == {
        "driver": "580.1",
        "sm_mhz": 1755,
        "sm_mhz_max": 1980,
        "memory_mhz": 1755,
        "clock_limits": ["power cap", "thermal, software"],
        "power_w": 412.0,
        "energy_j": 100.0,
        "memory_used_gb": 17.0,
    }
    assert record["energy_j"] == 100.0 and record["mean_power_w"] == pytest.approx(100.0 / record["seconds"])


def test_a_gpu_without_the_library_of_its_driver_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", Mock(side_effect=nvml.NVMLError("library not found")))
    assert harness.gpu_state() is None


# ------------------------------------------------------------------------------------------ the GPU script


def test_suites_come_in_order_of_value() -> None:
    names = [
        "attention",
        "kernels parity",
        "transformer",
        "iteration",
        "kernels bandwidth",
        "block",
        "decode",
        "kernels wide parity",
        "transformer compiled",
        "kernels compiled",
        "block compiled",
        "sharded",
        "two_ranks",
        "sanitizer",
    ]
    assert [suite.name for suite in device.SUITES] == names
    steps = list(dict.fromkeys(timed.step for timed in transformer.ORDER))
    assert steps == ["forward", "train", "single_pass", "train_split", "rollout"]


@pytest.mark.parametrize(
    ("returncode", "output", "passed", "complaints"),
    [
        pytest.param(0, f"{RAN}\n========= ERROR SUMMARY: 0 errors", True, 0, id="clean"),
        pytest.param(0, f"{RAN}\n========= RACECHECK SUMMARY: 0 hazards displayed", True, 0, id="no-hazard"),
        pytest.param(9, f"{RAN}\n========= ERROR SUMMARY: 3 errors", False, 3, id="errors"),
        pytest.param(0, f"{RAN}\n========= RACECHECK SUMMARY: 2 hazards displayed", False, 2, id="hazards"),
        pytest.param(1, "Traceback\nRuntimeError", False, None, id="program-failed"),
        pytest.param(0, "========= ERROR SUMMARY: 0 errors", False, 0, id="program-did-not-finish"),
        pytest.param(0, RAN, False, None, id="tool-said-nothing"),
    ],
)
def test_reading_a_sanitizer(returncode: int, output: str, passed: bool, complaints: int | None) -> None:
    found = device.read_sanitizer(returncode, output, under_tool=True)
    assert (found["passed"], found["complaints"]) == (passed, complaints)


def sanitized(run: Session) -> dict[str, Any]:
    run.run(device.SUITES[-1])
    return run.cells


def test_both_tools_run_over_every_kernel(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    shares: list[float] = []

    def run(command: list[str], *, timeout: float, **options: Any) -> Any:
        commands.append(command)
        shares.append(timeout)
        if command[2] == "racecheck":
            raise subprocess.TimeoutExpired(command, timeout)
        return types.SimpleNamespace(returncode=0, stdout=f"{RAN}\nERROR SUMMARY: 0 errors", stderr="")

    monkeypatch.setattr(device, "find_sanitizer", lambda: "/opt/compute-sanitizer")
    monkeypatch.setattr(subprocess, "run", run)
    found = sanitized(session(smoke=False, budget=65.0))
    assert [command[:3] for command in commands] == [
        ["/opt/compute-sanitizer", "--tool", "memcheck"],
        ["/opt/compute-sanitizer", "--tool", "racecheck"],
    ]
    assert 28.0 < shares[0] <= 30.0
    assert found["sanitizer memcheck"]["passed"]
    assert found["sanitizer racecheck"]["status"].startswith("stopped after")


def test_a_missing_sanitizer_is_no_success(session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_sanitizer", lambda: None)
    run = session(smoke=False)
    assert "neither on PATH nor under CUDA_HOME/bin" in sanitized(run)["sanitizer memcheck"]["status"]
    assert not results.succeeded(run.result)


@pytest.mark.slow
def test_it_loads_on_a_bare_machine() -> None:
    """Imports of the script, without torch, triton, numpy, diffusers, transformers and peft."""
    code = """
import builtins, sys
absent = ("pytest", "pytest_benchmark", "pydantic", "av", "matplotlib", "tensorboard", "pynvml")
given = builtins.__import__
def restricted(name, *arguments, **options):
    if name.partition(".")[0] in absent:
        raise ModuleNotFoundError(f"{name} is not installed", name=name)
    return given(name, *arguments, **options)
builtins.__import__ = restricted
import benchmarks.device
print("loaded", sorted(set(absent) & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=device.ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "loaded []", done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    """The order of a GPU's run with everything going wrong in it, and what file and table say of it."""
    assert rehearsal.rehearse() == 0, capsys.readouterr().out


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every suite; those with another smoke run are cut short: most of the kernels' and the transformer's timings."""
    monkeypatch.setattr(transformer, "ORDER", transformer.ORDER[:2])
    monkeypatch.setattr(block, "CONTENDERS", ("ours", "P2"))
    monkeypatch.setattr(kernels, "CONTENDERS", ("ours",))
    path = tmp_path / "run.json"
    command = ["--smoke", "--op", "gelu_tanh", "--op", "adaln", "--output", str(path)]
    assert device.main(command) == 0
    printed = capsys.readouterr().out
    assert "mean nothing" in printed and "target met" not in printed and "MISSES FLOOR" not in printed
    result = json.loads(path.read_text("utf-8"))
    suites = {record["suite"] for record in result["cells"].values()}
    assert suites == {suite.name.partition(" ")[0] for suite in device.SUITES} | {"ceilings"}
    assert result["cells"]["kernels parity gelu_tanh"]["errors"]["bfloat16"] > 0
    assert "forward and backward passes" in " ".join(result["cells"]["sanitizer dry run"]["tail"])
    assert device.main(command) == 0
    assert "] " not in capsys.readouterr().out.partition("SMOKE")[0], "nothing is measured twice"
