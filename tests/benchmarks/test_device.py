"""The GPU script: stages, budget, what is kept when it is cut short, how a sanitizer's output is read."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import device, kernels, policy
from benchmarks.device import DeviceRun, read_sanitizer

RAN = "62 forward and backward passes of 8 ops ran"


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


def test_a_sanitizer_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert device.run_sanitizer(["compute-sanitizer"], 30.0) == {
        "passed": False,
        "errors": None,
        "status": "stopped after 30 s",
    }


@pytest.mark.slow
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage; what has a smoke run of its own is cut short: the kernels' timings and most of the policy's."""
    monkeypatch.setattr(kernels, "time_kernels", lambda plan, copy: [])
    monkeypatch.setattr(policy, "CELLS", policy.CELLS[:2])
    path = tmp_path / "run.json"
    assert device.main(["--smoke", "--op", "gelu_tanh", "--op", "grpo_objective", "--output", str(path)]) == 0
    assert "forward and backward passes of 8 ops ran" in capsys.readouterr().out
    result = json.loads(path.read_text("utf-8"))
    assert all(stage["status"] == "done" for stage in result["stages"].values())
    assert result["parity"]["gelu_tanh"]["bfloat16"]["max_error"] > 0
    assert {name: cell["status"] for name, cell in result["policy_cells"].items()} == {
        "forward B P2": "done",
        "forward B ours": "done",
    }
    assert result["policy_parity"]["ours none"]["gradient"] > 0
