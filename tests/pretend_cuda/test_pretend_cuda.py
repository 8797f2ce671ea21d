"""Work on the pretend device, one process for each, forked from one that loads the
device before torch (program.py).
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.budgets import read_budgets
from tests import pretend_cuda
from tests.pretend_cuda import program

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(
        pretend_cuda.compiler() is None or torch.cuda.is_available(),
        reason="the pretend CUDA device needs a C++ compiler and a machine without GPU",
    ),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """`run("sharded")` gives the findings of that work of program.py, on a device that
    is built once.
    """
    variables = {
        "PRETEND_CUDA_LIBRARY": str(pretend_cuda.build()),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
    }
    environment = os.environ | variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", program.__name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        given = server.stdin
        answers = server.stdout

        def of(work: str) -> dict[str, Any]:
            folder = tmp_path_factory.mktemp(work)
            print(work, folder, file=given, flush=True)
            assert answers.readline() == "done\n", "the server has ended"
            assert (folder / "found.json").is_file(), (folder / "output").read_text()[
                -4000:
            ]
            found: dict[str, Any] = json.loads((folder / "found.json").read_text())
            return found

        yield of


def test_training_modes_are_those_of_the_cpu(
    run: Any, tmp_path: Path, in_the_repository: None
) -> None:
    report = run("on_cuda")
    expected = program.modes(tmp_path, "cpu")
    for mode, found in report["found"]["modes"].items():
        assert found["before"] == expected[mode]["before"], mode
        # In bfloat16 the two sides round other sums.
        most = 0.2 if mode == "bfloat16" else 1e-3
        after = expected[mode]["after"]
        assert math.dist(found["after"], after) < most * math.dist(
            found["before"], after
        ), mode
        assert set(found["first_ratio"]) == {0.0} and found["videos_on"] == "cpu", mode
    # Two backends run in bfloat16 there, and one in float32.
    chosen = {
        mode: found["attention"] for mode, found in report["found"]["modes"].items()
    }
    assert chosen.pop("bfloat16") in ("cudnn", "sdpa") and set(chosen.values()) == {
        "auto"
    }
    assert (
        not report["races"]
        and all(report["found"]["saved_finite"])
        and not report["cudnn_by_choice"]
    )


def test_weights_in_cpu_memory_wait_for_copies_and_explicit_backends_are_accepted(
    run: Any,
) -> None:
    report = run("sharded")
    assert (
        report["found"] == dict.fromkeys(("fixed", "ema", "sdpa", "triton"), True)
        and report["races"] == []
    )


def test_a_device_that_is_not_the_current_one(run: Any) -> None:
    report = run("two_devices")
    expected, given = report["found"].values()
    assert math.dist(expected, given) < 1e-5 * math.hypot(*expected)
    assert report["launches"]["adaln_backward_kernel"] > 0


def test_the_budget_of_waits_and_of_compiles(run: Any) -> None:
    """The guard counts waits on the meta device; here they are those of the operators
    that a GPU runs.
    """
    report = run("budget")
    limits = {budget.name: budget.limit for budget in read_budgets()}
    for update, found in report["found"].items():
        for phase in ("rollout", "anchor", "update"):
            assert (
                found["waits"].get(phase, 0)
                <= limits[f"loop.host_syncs/{update}/{phase}"]
            ), found["places"]
        assert found["compiled"] > 5 and found["again"] == []


def test_the_commands_on_a_tiny_real_model(run: Any) -> None:
    status = {"doctor": 0, "train": 0, "generate": 0, "export": 0}
    assert run("commands")["found"] == {"status": status, "videos": 2}


def test_the_benchmarks_measure_everything(run: Any) -> None:
    cells = run("benchmarks")["found"]
    red = {
        name: cell
        for name, cell in cells.items()
        if not cell["status"].startswith(("done", "absent"))
    }
    red |= {name: cell for name, cell in cells.items() if cell.get("passed") is False}
    assert not red and "transformer train B P2c" in cells, red
