"""The kernels' suite: its arithmetic, its refusal behind a red parity check, and a
smoke run of the command.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks import session as sessions
from benchmarks.suites import kernels
from sage_kernels.registry import specs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_smoke_run_prints_ratios_of_what_passed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One op is replaced by a wrong one: the other is timed, the status is 1, the file
    says both.
    """
    every = specs()
    right = every["sde_step"].op
    wrong = replace(
        every["sde_step"], op=lambda **inputs: [1.01 * out for out in right(**inputs)]
    )
    monkeypatch.setattr(kernels, "specs", lambda: every | {"sde_step": wrong})
    file = tmp_path / "out.json"
    assert (
        sessions.main(
            "kernels",
            ["--smoke", "--op=gelu_tanh", "--op=sde_step", f"--output_file={file}"],
        )
        == 1
    )
    printed = capsys.readouterr().out
    assert (
        "mean nothing" in printed
        and "kernels parity sde_step: PARITY FAILED, no ratio" in printed
    )
    rows = results.rows(json.loads(file.read_text("utf-8")))
    timed = {
        step: set(found)
        for (suite, step, _), found in rows.items()
        if suite == "kernels"
    }
    assert timed == {
        f"gelu_tanh {direction}": set(kernels.CONTENDERS)
        for direction in kernels.DIRECTIONS
    }


@pytest.mark.slow
def test_pytest_benchmark_times_the_same_calls(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    names = [
        "benchmarks/suites/kernels.py",
        "-k",
        "gelu_tanh and forward and not compiled",
    ]
    options = [
        f"--benchmark-json={file}",
        "--benchmark-timer=benchmarks.harness.device_clock",
        "-p",
        "no:xdist",
    ]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        *names,
        *options,
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    stats = {
        timed["name"].rpartition("-")[2]: timed["stats"]
        for timed in json.loads(file.read_text())["benchmarks"]
    }
    assert stats.keys() == {"ours]", "eager]"} and all(
        found["median"] > 0 for found in stats.values()
    )
