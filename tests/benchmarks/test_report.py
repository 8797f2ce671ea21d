"""The report: documents are what the committed results say; a GPU's tables from made-up
results.
"""

from pathlib import Path
from typing import Any

from benchmarks import harness, report
from tests.benchmarks.made_up import environment, gpu_result, timed


def written(
    folder: Path, result: dict[str, Any], name: str = "2026-01-01-012345678.json"
) -> Path:
    path = folder / "h100" / name
    harness.write_result(path, result)
    return path


def test_a_result_of_a_gpu_fills_the_tables(tmp_path: Path) -> None:
    found = report.read_results([written(tmp_path, gpu_result())])
    gpu = report.gpu_block(found)
    kernels = report.BLOCKS["kernels"](found)
    assert (
        "| adaln forward B | 60.0 (59.9 – 60.1) µs | 2237 GB/s | 83% | eager "
        "6.67x, compiled 1.67x |"
    ) in kernels
    ours = (
        "| forward B | 210.0 (209.6 – 210.4) ms | 512 TFLOP/s | 64% | 20.0 | P1 "
        "3.57x, P2 1.33x | 1.05x of 0.199 s |"
    )
    assert ours in gpu
    assert (
        "commit 012345678: `benchmarks/results/h100/2026-01-01-012345678.json`" in gpu
    )
    assert (
        "| forward B | cudnn | 17.0 (17.0 – 17.0) ms | 595 TFLOP/s | 75% | 1.02x "
        "of 0.0166 s |"
    ) in gpu
    headline = report.headline_block(found).splitlines()
    assert headline[1:4] == [
        "NVIDIA H100 80GB HBM3, 480x832, 9 of 54 layers:",
        "",
        "* 3.57 times as fast as diffusers as shipped, forward",
    ]
    assert headline[-1] == "* 32.0 s per video for an update of 2 steps, all 54 layers"


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """A figure that is off by more than a fifth is named; a cold iteration and peers
    have no prediction.
    """
    (found,) = report.read_results([written(tmp_path, gpu_result())])
    assert {name: round(ratio, 2) for name, ratio in found.over_plan.items()} == {
        "transformer forward B ours": 1.05,
        "transformer rollout B ours": 1.04,
        "transformer train B ours": 1.02,
        "transformer single_pass B ours": 1.09,
        "decode B ours": 1.55,
        "attention forward B cudnn": 1.02,
        "attention backward B cudnn": 1.04,
        "iteration 2 videos of 2 steps B ours": 1.07,
    }
    assert report.off_plan(found) == (
        "NVIDIA H100 80GB HBM3: **The plan is off by more than a fifth**, measured "
        "over predicted: "
        "decode B ours 1.55.\n"
    )
    h100 = [
        line for line in report.cards_block([found]).splitlines() if "(H100)" in line
    ]
    assert h100 and all(line.endswith("| 1.05 (1.02 to 1.55) |") for line in h100)
    assert "measured over predicted" not in report.cards_block([])


def test_the_newest_figure_of_a_device_counts_and_smoke_runs_do_not(
    tmp_path: Path,
) -> None:
    def decoded(median: float, smoke: bool) -> dict[str, Any]:
        cells = {"decode tiny": timed("decode", "tiny", "", "ours", median)}
        return {"environment": environment(gpu=None), "smoke": smoke, "cells": cells}

    runs = {
        "2026-02-01-a.json": decoded(1.5, False),
        "2026-01-01-b.json": decoded(9.0, False),
        "2026-03-01-c.json": decoded(7.0, True),
    }
    found = report.read_results(
        [written(tmp_path, result, name) for name, result in runs.items()]
    )
    text = "a\n<!-- benchmark cpu: begin -->\nold\n<!-- benchmark cpu: end -->\nb\n"
    renewed = report.document(text, found)
    assert (
        "1.50 (1.50 – 1.50) s" in renewed
        and "9.0" not in renewed
        and "7.0" not in renewed
    )
    assert "old" not in renewed and renewed.endswith("<!-- benchmark cpu: end -->\nb\n")
