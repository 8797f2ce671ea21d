"""Work on the pretend device, one process for each, since the device is loaded before torch (program.py)."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.budgets import read_budgets
from tests import pretend_cuda
from tests.pretend_cuda import program

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(pretend_cuda.compiler() is None, reason="the pretend CUDA device needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the pretend CUDA device is for a machine without GPU"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that loads the device, which is built where it has not been."""
    variables = {"PRETEND_CUDA_LIBRARY": str(pretend_cuda.build()), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return os.environ | variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}


@pytest.fixture(scope="session")
def run(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`run("modes")` gives the findings of that work of program.py."""

    def of(work: str, *words: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(work)
        command = [sys.executable, "-m", program.__name__, work, str(folder), *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (folder / "found.json").is_file(), done.stderr[-4000:]
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found

    return of


def difference(
    before: dict[str, list[float]], expected: dict[str, list[float]], given: dict[str, list[float]]
) -> float:
    """How far two results are apart, over how far one of them moved."""
    apart = moved = 0.0
    for name in expected:
        for start, here, there in zip(before[name], expected[name], given[name], strict=True):
            apart, moved = apart + (here - there) ** 2, moved + (here - start) ** 2
    return math.sqrt(apart / moved)


def test_training_modes_are_those_of_the_cpu(run: Any, tmp_path: Path, in_the_repository: None) -> None:
    report = run("modes")
    assert "error" not in report["found"], report["found"]["error"]
    expected = program.modes(tmp_path, "cpu")
    for mode, found in report["found"]["modes"].items():
        assert found["before"] == expected[mode]["before"], mode
        # In bfloat16 the two sides round other sums.
        most = 0.2 if mode == "bfloat16" else 1e-3
        assert difference(found["before"], expected[mode]["after"], found["after"]) < most, mode
        assert set(found["first_ratio"]) == {0.0} and found["videos_on"] == "cpu", mode
    assert not report["races"] and all(report["found"]["saved_finite"]) and not report["cudnn_by_choice"]


def test_weights_in_cpu_memory_wait_for_copies_and_explicit_backends_are_accepted(run: Any) -> None:
    report = run("sharded")
    assert "error" not in report["found"], report["found"]["error"]
    assert all(found["moved"] for found in report["found"].values()) and len(report["found"]) == 4
    assert report["races"] == []


def test_a_device_that_is_not_the_current_one(run: Any) -> None:
    report = run("two_devices")
    assert "error" not in report["found"], report["found"]["error"]
    found = report["found"]
    assert difference(found["before"], found["cpu"], found["cuda"]) < 1e-5
    assert report["launches"]["adaln_backward_kernel"] > 0


def test_the_budget_of_waits_and_of_compiles(run: Any) -> None:
    """The guard counts waits on the meta device; here they are those of the operators that a GPU runs."""
    report = run("budget")
    assert "error" not in report["found"], report["found"]["error"]
    limits = {budget.name: budget.limit for budget in read_budgets()}
    for update, found in report["found"].items():
        for phase in ("rollout", "anchor", "update"):
            assert found["waits"].get(phase, 0) <= limits[f"loop.host_syncs/{update}/{phase}"], found["places"]
        assert found["compiled"] > 5 and found["again"] == []


def test_the_commands_on_a_tiny_real_model(run: Any) -> None:
    found = run("commands")["found"]
    assert found.get("status") == {"doctor": 0, "train": 0, "generate": 0, "export": 0} and found["videos"] == 2, found


@pytest.mark.slow
def test_the_benchmarks_end_with_their_table(environment: dict[str, str], tmp_path: Path) -> None:
    """Red where NCCL is wanted, and nowhere else. Two GPUs, which need it throughout, have a test on the CPU."""
    code = "import sys; from tests import pretend_cuda; pretend_cuda.install(jit=True); from benchmarks import device; "
    code += "device.SUITES = tuple(suite for suite in device.SUITES if suite.name != 'two_ranks'); "
    code += "sys.exit(device.main(['--smoke', '--output', sys.argv[1]]))"
    command = [sys.executable, "-c", code, str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "forward B vs P2" in done.stdout, done.stderr[-4000:]
    cells = json.loads((tmp_path / "found.json").read_text())["cells"]
    red = {name for name, cell in cells.items() if cell["status"].startswith("failed") or cell.get("passed") is False}
    assert red <= {"sharded setup"}, {name: cells[name] for name in red}


Check = Callable[[dict[str, Any]], bool]

NOTICED: list[tuple[str, dict[str, Check]]] = [
    (
        "mode",
        {
            "save without a wait": lambda report: not all(report["found"]["saved_finite"]),
            "videos on the device": lambda report: report["found"]["modes"]["lora"]["videos_on"] == "cuda",
            "cudnn by torch's own choice": lambda report: report["cudnn_by_choice"],
        },
    ),
    ("mode", {"noise on the host": lambda report: "error" in report["found"]}),
    (
        "two shards",
        {
            "exchange without a wait": lambda report: bool(report["races"]),
            "judged on the host": lambda report: "ConfigError" in report["found"]["error"],
        },
    ),
    ("two_devices", {"launch on another device": lambda report: "another device" in report["found"]["error"]}),
    ("waits", {"a copy that waits": lambda report: report["found"]["two_phase"]["waits"]["update"] > 2}),
]
"""Works in which the tests above would see faults of program.py, each with how it shows. One that ends its work is
alone.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("work", "checks"), NOTICED, ids=[", ".join(checks) for _, checks in NOTICED])
def test_faults_are_noticed(work: str, checks: dict[str, Check], run: Any) -> None:
    report = run(work, *checks)
    assert [fault for fault, noticed in checks.items() if not noticed(report)] == []


def test_every_fault_has_its_work() -> None:
    assert sorted(fault for _, checks in NOTICED for fault in checks) == sorted(program.FAULTS)
