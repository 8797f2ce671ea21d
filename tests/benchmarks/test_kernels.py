"""The kernel benchmark: its arithmetic, its refusal behind a red parity check, and a smoke run of the command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import harness, kernels
from benchmarks.kernels import Plan
from sage_kernels.readme import bandwidths
from sage_kernels.registry import specs

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    # A child of a parallel test process would take itself for one, and pytest-benchmark times nothing there.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def plan(ops: Sequence[str] = ("gelu_tanh",), **changes: Any) -> Plan:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Plan(ops=list(ops), device=device, smoke=True, **changes)


def wrong_gelu(x: torch.Tensor) -> torch.Tensor:
    return 1.01 * specs()["gelu_tanh"].reference(x)


def record(implementation: str, median: float, op: str = "adaln") -> dict[str, Any]:
    info = {"op": op, "case": "B", "direction": "forward", "implementation": implementation}
    info |= {"dtype": "bfloat16", "bytes": 3_000_000}
    return {"extra_info": info, "stats": {"data": [median] * 20}}


def test_row_arithmetic() -> None:
    raw = [record("fused", 2e-6), record("eager", 5e-6), record("compiled", 3e-6)]
    (row,) = kernels.rows_of(raw, 3000.0, plan())
    assert row["gb_per_s"] == pytest.approx(1500.0)
    assert row["share_of_copy"] == pytest.approx(0.5)
    assert (row["times_eager"], row["times_compiled"]) == (pytest.approx(2.5), pytest.approx(1.5))
    assert row["seconds"]["eager"]["rounds"] == 20


def test_a_failed_parity_check_leaves_no_figure_in_the_table() -> None:
    judged = plan(specs={"gelu_tanh": replace(specs()["gelu_tanh"], op=wrong_gelu)})
    result = kernels.run(judged)
    assert result["kernels"] == [] and not result["parity"]["gelu_tanh"]["passed"]
    # Even a row that slipped in is not shown.
    result["kernels"] = kernels.rows_of([record(i, 2e-6, "gelu_tanh") for i in kernels.IMPLEMENTATIONS], 3e3, plan())
    text = kernels.table(result, smoke=False)
    (line,) = [line for line in text.splitlines() if line.startswith("gelu_tanh")]
    assert "PARITY FAILED, no ratio" in line and "rms error" in line
    assert "1500.0" not in text


def test_an_op_of_other_shape_or_type_fails_its_parity() -> None:
    judged = plan(specs={"gelu_tanh": replace(specs()["gelu_tanh"], op=lambda x: x.double())})
    judged.check_parity()
    assert "torch.float64" in judged.failures["gelu_tanh"][0]


def test_quantiles() -> None:
    assert harness.Quantiles.of([2.0]).median == 2.0
    quantiles = harness.Quantiles.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (quantiles.minimum, quantiles.median, quantiles.maximum, quantiles.rounds) == (1.0, 3.0, 5.0, 5)


def test_results_go_where_the_readme_looks(tmp_path: Path) -> None:
    environment = {"gpu": {"name": "NVIDIA H100 80GB HBM3"}, "commit": "0123456789abcdef-dirty"}
    path = harness.result_file(environment, tmp_path)
    assert path.parent.name == "nvidia-h100-80gb-hbm3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-012345678-dirty\.json", path.name)
    rows = kernels.rows_of([record("fused", 1e-6), record("eager", 1e-6), record("compiled", 1e-6)], 3333.0, plan())
    harness.write_result(path, {"kernels": rows})
    assert bandwidths(tmp_path) == {"adaln": f"forward 3000 GB/s (90% of copy), {path.parent.name}/{path.name}"}


def test_ceilings_are_positive() -> None:
    device = plan().device
    copy, matmul = harness.copy_bandwidth(device, smoke=True), harness.matmul_peak(device, smoke=True)
    assert copy["gb_per_s"] > 0 and matmul["tflop_per_s"] > 0


@pytest.mark.slow
def test_smoke_run_prints_ratios_of_what_passed_only(tmp_path: Path) -> None:
    """One op is replaced by a wrong one: the other is timed, the status is 1, the file says both."""
    file = tmp_path / "out.json"
    code = f"""
import sys
from dataclasses import replace
from benchmarks import kernels

right = kernels.specs()["sde_step"]
wrong = replace(right, op=lambda **inputs: [1.01 * out for out in right.op(**inputs)])
plan_of = kernels.plan_of

def with_the_wrong_op(options):
    plan = plan_of(options)
    plan.specs["sde_step"] = wrong
    return plan

kernels.plan_of = with_the_wrong_op
sys.exit(kernels.main(["--smoke", "--op", "gelu_tanh", "--op", "sde_step", "--output", {str(file)!r}]))
"""
    done = python("-c", code)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "mean nothing" in done.stdout or torch.cuda.is_available()
    timed = [line.split() for line in done.stdout.splitlines() if line.startswith("gelu_tanh")]
    assert [line[2] for line in timed] == ["forward", "backward"] and all(len(line) == 8 for line in timed)
    (refused,) = [line for line in done.stdout.splitlines() if line.startswith("sde_step")]
    assert "PARITY FAILED, no ratio" in refused
    result = json.loads(file.read_text("utf-8"))
    assert {row["op"] for row in result["kernels"]} == {"gelu_tanh"}
    assert list(result["parity_failures"]) == ["sde_step"]
    assert all(set(row["seconds"]) == set(kernels.IMPLEMENTATIONS) for row in result["kernels"])
    assert result["environment"]["packages"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["-m", "benchmarks", "kernels"], ["-m", "benchmarks.kernels"]], ids=" ".join)
def test_without_a_gpu_it_says_what_to_do(arguments: list[str]) -> None:
    done = python(*arguments)
    assert done.returncode == 1 and "run with --smoke" in done.stderr


def test_an_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kernel"]) == 2
    text = capsys.readouterr().err
    assert "'kernel' is no command" in text and all(name in text for name in command.COMMANDS)
    assert command.main(["--help"]) == 0
