"""The report: documents are what the committed results say; a GPU's tables and plots from made-up results."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from benchmarks import goals, report
from tests.benchmarks.made_up import environment, gpu_result, parity, timed

ROOT = Path(__file__).resolve().parents[2]


def written(
    folder: Path, result: dict[str, Any], name: str = "2026-01-01-012345678.json", device: str = "h100"
) -> Path:
    path = folder / device / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), "utf-8")
    return path


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roofline that takes no trace of the transformer; `test_transformer.py` has the real one."""
    monkeypatch.setattr(goals, "bound", lambda *arguments: 0.8)


def results_of(*paths: Path) -> report.Results:
    return report.read_results(paths)


def test_a_result_of_a_gpu_fills_the_tables(tmp_path: Path) -> None:
    found = results_of(written(tmp_path, gpu_result()))
    gpu = report.gpu_block(found)
    assert "| forward B vs P2 | 1.30x | 1.20x | 1.33x, target met |" in gpu
    assert "| train B vs P2c | – | – | not measured |" in gpu
    assert "| adaln forward B | compiled | 100.0 (99.8 – 100.2) µs | 2237 GB/s | 83% | 1.67x |" in gpu
    assert "| forward B | P1 | 1.80 (1.80 – 1.80) s | 512 TFLOP/s | 64% | 30.0 | 2.00x |" in gpu
    assert "commit 012345678: `benchmarks/results/h100/2026-01-01-012345678.json`" in gpu
    assert "| forward B | cudnn | 17.0 (17.0 – 17.0) ms | 595 TFLOP/s | 75% |" in gpu
    assert "* NVIDIA H100 80GB HBM3: forward B vs P1: 2.00x; forward B vs P2: 1.33x;" in report.headline_block(found)


def test_nothing_is_made_up_where_there_is_no_gpu(tmp_path: Path) -> None:
    cpu = gpu_result() | {"environment": environment(gpu=None)}
    found = results_of(written(tmp_path, cpu, device="cpu-a-cpu"))
    assert report.gpu_block(found) == report.headline_block(found) == report.NO_GPU


def test_the_newest_figure_of_a_device_counts_and_smoke_runs_do_not(tmp_path: Path) -> None:
    def toy(median: float) -> dict[str, Any]:
        cells = {"toy parity": parity("toy"), "toy iteration": timed("toy", "iteration", "", "ours", median)}
        return {"environment": environment(gpu=None), "smoke": False, "cells": cells}

    old = toy(9.0)
    old["cells"]["host ours"] = timed("host", "forward", "", "ours", 1.0)
    files = [
        written(tmp_path, toy(1.5), "2026-02-01-a.json", "cpu"),
        written(tmp_path, old, "2026-01-01-b.json", "cpu"),
        written(tmp_path, toy(7.0) | {"smoke": True}, "2026-03-01-c.json", "cpu"),
    ]
    found = results_of(*files)
    text = report.BLOCKS["cpu"](found)
    assert "1.50 (1.50 – 1.50) s" in text and "9.0" not in text and "7.0" not in text


def test_markers() -> None:
    nothing: report.Results = []
    text = "a\n<!-- benchmark cpu: begin -->\nold\n<!-- benchmark cpu: end -->\nb\n"
    assert report.document(text, nothing) == text.replace("old", "Not measured yet.")
    with pytest.raises(ValueError, match="named nothing"):
        report.document(text.replace("cpu", "nothing"), nothing)
    with pytest.raises(ValueError, match="does not end"):
        report.document(text.replace("<!-- benchmark cpu: end -->\n", ""), nothing)


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(written(tmp_path, {"cells": {}}))]) == 2
    assert "not a result of" in capsys.readouterr().err


def test_the_history_over_commits_is_one_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    files = [written(tmp_path, gpu_result(), f"2026-01-0{day}-a.json") for day in (1, 2)]
    assert report.main([*map(str, files), "--history", str(tmp_path / "history.svg")]) == 0
    drawn = (tmp_path / "history.svg").read_text("utf-8")
    assert "h100: iteration 2 videos of 4 steps B seconds per video" in drawn and "2026-01-02-a" in drawn
