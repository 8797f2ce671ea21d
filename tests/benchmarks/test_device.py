"""The GPU script: stages, budget, what is kept when it is cut short, how a sanitizer's output is read."""

import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from benchmarks import blocks, device, harness, kernels, policy, timed
from benchmarks.device import DeviceRun, read_sanitizer

RAN = "62 forward and backward passes of 7 ops ran"


def run_of(path: Path | None, budget: float = 100.0, smoke: bool = True) -> DeviceRun:
    plan = kernels.Plan(ops=["gelu_tanh"], device=torch.device("cpu"), smoke=smoke)
    return DeviceRun(plan=plan, path=path, budget=budget)


@pytest.mark.parametrize(
    ("returncode", "output", "passed", "errors"),
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
def test_reading_a_sanitizer(returncode: int, output: str, passed: bool, errors: int | None) -> None:
    found = read_sanitizer(returncode, output, under_tool=True)
    assert (found["passed"], found["errors"]) == (passed, errors)


def test_stages_come_in_order_of_value() -> None:
    assert list(device.STAGES) == [
        "parity",
        "ceilings",
        "kernels",
        "policy",
        "sharded",
        "blocks",
        "vae",
        "costs",
        "sanitizer",
    ]


def test_a_run_that_is_cut_short_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "run.json"
    run = run_of(path)
    run.stage("ceilings", device.ceilings_stage)

    def interrupted(run: DeviceRun) -> dict[str, object]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.stage("kernels", interrupted)
    kept = json.loads(path.read_text("utf-8"))
    assert kept["copy"]["gb_per_s"] > 0 and list(kept["stages"]) == ["ceilings"]


def test_a_stage_after_the_budget_is_skipped_and_says_so() -> None:
    run = run_of(None, budget=0.0)
    run.result["parity_failures"] = {}
    run.stage("ceilings", device.ceilings_stage)
    assert "copy" not in run.result
    assert not device.succeeded(run.result)
    assert "ceilings skipped: the budget of 0 s is used up" in device.table(run.result, smoke=True)


def test_a_missing_sanitizer_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_sanitizer", lambda: None)
    run = run_of(None, smoke=False)
    run.result["parity_failures"] = {}
    run.stage("sanitizer", device.sanitizer_stage)
    assert not device.succeeded(run.result)
    assert "neither on PATH nor under CUDA_HOME/bin" in device.table(run.result, smoke=False)


def test_both_tools_run_over_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(prefix: list[str], timeout: float) -> dict[str, object]:
        commands.append(prefix)
        return {"passed": True, "errors": 0, "status": RAN}

    monkeypatch.setattr(device, "find_sanitizer", lambda: "/opt/compute-sanitizer")
    monkeypatch.setattr(device, "run_sanitizer", record)
    run = run_of(None, smoke=False)
    run.result["parity_failures"] = {}
    run.stage("sanitizer", device.sanitizer_stage)
    assert [command[:3] for command in commands] == [
        ["/opt/compute-sanitizer", "--tool", "memcheck"],
        ["/opt/compute-sanitizer", "--tool", "racecheck"],
    ]
    assert device.succeeded(run.result)
    assert f"racecheck: passed, {RAN}" in device.table(run.result, smoke=False)


def test_a_sanitizer_that_was_stopped_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def slow(prefix: list[str], timeout: float) -> dict[str, object]:
        shares.append(timeout)
        return {"passed": False, "errors": None, "status": f"stopped after {timeout:.0f} s"}

    monkeypatch.setattr(device, "find_sanitizer", lambda: "/opt/compute-sanitizer")
    monkeypatch.setattr(device, "run_sanitizer", slow)
    run = run_of(None, budget=65.0, smoke=False)
    run.stage("sanitizer", device.sanitizer_stage)
    assert run.result["stages"]["sanitizer"]["status"] == "not finished: memcheck, racecheck"
    assert 28.0 < shares[0] <= 30.0
    run.stage("sanitizer", device.sanitizer_stage)
    assert len(shares) == 4


def test_a_sanitizer_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert device.run_sanitizer(["compute-sanitizer"], 30.0) == {
        "passed": False,
        "errors": None,
        "status": "stopped after 30 s",
    }


def test_a_second_run_goes_on_where_the_first_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    calls: list[str] = []

    def stage(name: str, outcome: dict[str, object]) -> object:
        return lambda run: calls.append(name) or dict(outcome)

    done: dict[str, object] = {"parity": {}, "parity_failures": {}}
    stages = {"parity": stage("parity", done), "late": stage("late", {"status": "not finished: train A P2"})}
    monkeypatch.setattr(device, "STAGES", stages)
    monkeypatch.setattr(device, "table", lambda result, smoke: "")
    arguments = ["--smoke", "--output", str(path)]
    assert device.main(arguments) == 1
    monkeypatch.setitem(stages, "late", stage("late", {}))
    assert device.main(arguments) == 0
    assert device.main(arguments) == 0
    assert calls == ["parity", "late", "late"]
    assert device.main([*arguments, "--fresh"]) == 0
    assert calls == ["parity", "late", "late", "parity", "late"]


def test_the_result_of_another_commit_is_not_gone_on_with(tmp_path: Path) -> None:
    environment = {"commit": "0123456789", "gpu": {"name": "H100"}, "packages": {"torch": "2"}, "cpu": {"model": "x"}}
    path = device.harness.result_file(environment, tmp_path)
    assert device.newest_file(environment, tmp_path) == path
    assert device.previous_result(path, environment, smoke=False) is None
    earlier = path.with_name(f"2020-01-01-{environment['commit'][:9]}.json")
    device.harness.write_result(earlier, {"environment": environment, "smoke": False, "stages": {}})
    (earlier.parent / "2020-01-02-999999999.json").write_text("{}", "utf-8")
    assert device.newest_file(environment, tmp_path) == earlier
    assert device.previous_result(earlier, environment, smoke=False) is not None
    assert device.previous_result(earlier, environment, smoke=True) is None
    assert device.previous_result(earlier, environment | {"commit": "1" * 10}, smoke=False) is None


def test_a_stage_is_stopped_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(run: DeviceRun) -> dict[str, object]:
        while True:
            time.sleep(0.01)

    monkeypatch.setitem(device.LIMITS, "endless", 0.1)
    run = run_of(None, smoke=False)
    before = signal.getsignal(signal.SIGALRM)
    run.stage("endless", endless)
    assert run.result["stages"]["endless"]["status"] == "stopped after 0 s"
    assert signal.getsignal(signal.SIGALRM) is before
    run.stage("after", lambda run: {})
    assert run.result["stages"]["after"]["status"] == "done"


def test_a_limit_leaves_the_timer_around_it_running() -> None:
    previous = signal.getitimer(signal.ITIMER_REAL)[0]
    with device.time_limit(5.0):
        assert 4.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5.0
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert (after == 0.0) == (previous == 0.0) and after <= previous


def test_a_stage_that_fails_is_recorded_and_the_others_run() -> None:
    run = run_of(None)

    def broken(run: DeviceRun) -> dict[str, object]:
        raise RuntimeError("no such kernel\nand more")

    run.stage("broken", broken)
    run.stage("ceilings", device.ceilings_stage)
    assert run.result["stages"]["broken"]["status"] == "failed: RuntimeError: no such kernel"
    assert run.result["copy"]["gb_per_s"] > 0 and "broken failed" in device.table(
        run.result | {"parity_failures": {}}, smoke=True
    )


def test_cells_that_were_measured_are_kept() -> None:
    kept = {"status": "done", "seconds": {"median": 1.0}}
    run = policy.PolicyRun(
        device=torch.device("cpu"),
        smoke=True,
        budget=60.0,
        save=lambda result: None,
        cells=policy.CELLS[:1],
        result={"matmul": {"tflop_per_s": 1.0}, "policy_cells": {policy.CELLS[0].name: kept}},
    )
    policy.cells_stage(run)
    assert run.result["policy_cells"] == {policy.CELLS[0].name: kept}


class FakeNVML(types.ModuleType):
    """A driver that counts energy, 100 J from call to call, and knows no temperature."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.energy = 0
        self.uuids: list[str] = []

    def __getattr__(self, name: str) -> object:
        fixed: dict[str, object] = {
            "nvmlInit": None,
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

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuids.append(uuid)
        return "handle"


def test_telemetry_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="12-34"))
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
    assert nvml.uuids == ["GPU-12-34"] * 2


def test_it_loads_on_a_bare_machine() -> None:
    """What the script imports besides torch, triton, numpy, diffusers, transformers, peft and pytest."""
    code = """
import builtins, sys
absent = ("pytest_benchmark", "pytest_timeout", "jsonargparse", "av", "matplotlib", "tensorboard", "pynvml")
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


@pytest.mark.parametrize("with_plugin", [True, False], ids=["pytest-benchmark", "own-rounds"])
def test_named_calls_are_timed(monkeypatch: pytest.MonkeyPatch, with_plugin: bool) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if not with_plugin:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    counts = {"short": 0, "long": 0}

    def call(name: str, seconds: float) -> None:
        counts[name] += 1
        time.sleep(seconds)

    found = timed.time_calls({"short": lambda: call("short", 0.0), "long": lambda: call("long", 0.02)}, rounds=3)
    assert counts == {"short": 4, "long": 4}
    assert found["long"].rounds == 3 and found["long"].minimum >= 0.02 > found["short"].median
    with pytest.raises(RuntimeError, match="failed"):
        timed.time_calls({"broken": lambda: 1 // 0}, rounds=1)


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage; what has a smoke run of its own is cut short: the kernels' timings and most of the policy's."""
    monkeypatch.setattr(kernels, "time_kernels", lambda plan, copy: [])
    monkeypatch.setattr(policy, "CELLS", policy.CELLS[:2])
    monkeypatch.setattr(blocks, "CONTENDERS", ("ours", "P2"))
    path = tmp_path / "run.json"
    assert device.main(["--smoke", "--op", "gelu_tanh", "--op", "sde_step", "--output", str(path)]) == 0
    assert "forward and backward passes of 7 ops ran" in capsys.readouterr().out
    result = json.loads(path.read_text("utf-8"))
    assert all(stage["status"] == "done" for stage in result["stages"].values())
    assert result["parity"]["gelu_tanh"]["bfloat16"]["max_error"] > 0
    assert {name: cell["status"] for name, cell in result["policy_cells"].items()} == {
        "forward B P2": "done",
        "forward B ours": "done",
    }
    assert result["policy_parity"]["ours none"]["gradient"] > 0
