"""The kernels' suite: its arithmetic, its refusal behind a red parity check, and a smoke run of the command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import baseline, results
from benchmarks import session as sessions
from benchmarks.session import Session
from benchmarks.suites import kernels
from sage_kernels.registry import specs

ROOT = Path(__file__).resolve().parents[2]
MakeSession = Callable[..., Session]


def with_op(monkeypatch: pytest.MonkeyPatch, name: str, op: Callable[..., Any]) -> None:
    """Replace an op of the registry."""
    every = specs()
    monkeypatch.setattr(kernels, "specs", lambda: every | {name: replace(every[name], op=op)})


def test_an_op_of_other_shape_or_type_fails_its_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(specs()["gelu_tanh"], op=lambda x: x.double())
    found = kernels.check(wrong, torch.device("cpu"), kernels.wide_cases(wrong, smoke=True))
    assert not found["passed"] and "torch.float64" in found["reason"]
    json.dumps(found, allow_nan=False)


def test_an_unknown_op_is_refused(session: MakeSession) -> None:
    run = session(ops=["gelu"])
    run.run(kernels.PARITY)
    assert "--op gelu is no op; there are adaln, " in run.cells["kernels parity setup"]["status"]


@pytest.mark.slow
def test_smoke_run_prints_ratios_of_what_passed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One op is replaced by a wrong one: the other is timed, the status is 1, the file says both."""
    file = tmp_path / "out.json"
    right = specs()["sde_step"].op
    with_op(monkeypatch, "sde_step", lambda **inputs: [1.01 * out for out in right(**inputs)])
    arguments = ["--smoke", "--op", "gelu_tanh", "--op", "sde_step", "--output", str(file)]
    assert sessions.main("kernels", arguments) == 1
    printed = capsys.readouterr().out
    assert "mean nothing" in printed and "kernels parity sde_step: PARITY FAILED, no ratio" in printed
    rows = results.rows(json.loads(file.read_text("utf-8")))
    assert {step: set(found) for (suite, step, _), found in rows.items() if suite == "kernels"} == {
        f"gelu_tanh {direction}": set(kernels.CONTENDERS) for direction in kernels.DIRECTIONS
    }


@pytest.mark.slow
def test_pytest_benchmark_times_the_same_calls_and_the_guard_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    names = ["benchmarks/suites/kernels.py", "-k", "gelu_tanh and forward and not compiled"]
    options = [f"--benchmark-json={file}", "--benchmark-timer=benchmarks.harness.device_clock", "-p", "no:xdist"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", *names, *options, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    ((name, ratio),) = baseline.ratios(baseline.from_pytest_benchmark(file)).items()
    assert re.fullmatch(r"kernels gelu_tanh forward odd\S* / eager", name) and ratio.value > 0


def test_an_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kernel"]) == 2
    text = capsys.readouterr().err
    assert "'kernel' is not a command" in text and all(name in text for name in command.SUITES | command.COMMANDS)
    assert command.main(["--help"]) == 0
