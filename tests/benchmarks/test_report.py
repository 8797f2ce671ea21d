"""The report: documents are what the committed results say; a GPU's tables from made-up results."""

from pathlib import Path
from typing import Any

from benchmarks import harness, report
from tests.benchmarks.made_up import environment, gpu_result, timed


def written(folder: Path, result: dict[str, Any], name: str = "2026-01-01-012345678.json") -> Path:
    path = folder / "h100" / name
    harness.write_result(path, result)
    return path


def test_a_result_of_a_gpu_fills_the_tables(tmp_path: Path) -> None:
    found = report.read_results([written(tmp_path, gpu_result())])
    gpu = report.gpu_block(found)
    assert "| adaln forward B | compiled | 100.0 (99.8 – 100.2) µs | 2237 GB/s | 83% | 1.67x |" in gpu
    assert "| forward B | P1 | 1.80 (1.80 – 1.80) s | 512 TFLOP/s | 64% | 30.0 | 2.00x |" in gpu
    assert "commit 012345678: `benchmarks/results/h100/2026-01-01-012345678.json`" in gpu
    assert "| forward B | cudnn | 17.0 (17.0 – 17.0) ms | 595 TFLOP/s | 75% |" in gpu
    assert (
        "* NVIDIA H100 80GB HBM3: forward B / P1: 2.00x; forward B / P2: 1.33x; train B / P2: 1.50x"
        in report.headline_block(found)
    )


def test_the_newest_figure_of_a_device_counts_and_smoke_runs_do_not(tmp_path: Path) -> None:
    def decoded(median: float, smoke: bool) -> dict[str, Any]:
        cells = {"decode tiny": timed("decode", "tiny", "", "ours", median)}
        return {"environment": environment(gpu=None), "smoke": smoke, "cells": cells}

    runs = {
        "2026-02-01-a.json": decoded(1.5, False),
        "2026-01-01-b.json": decoded(9.0, False),
        "2026-03-01-c.json": decoded(7.0, True),
    }
    found = report.read_results([written(tmp_path, result, name) for name, result in runs.items()])
    text = "a\n<!-- benchmark cpu: begin -->\nold\n<!-- benchmark cpu: end -->\nb\n"
    renewed = report.document(text, found)
    assert "1.50 (1.50 – 1.50) s" in renewed and "9.0" not in renewed and "7.0" not in renewed
    assert "old" not in renewed and renewed.endswith("<!-- benchmark cpu: end -->\nb\n")
