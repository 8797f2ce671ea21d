"""The report: documents are what the committed results say; a GPU's tables and plots from made-up results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.harness import Quantiles
from benchmarks.policy_report import goal_records

ROOT = Path(__file__).resolve().parents[2]


def quantiles(median: float) -> dict[str, Any]:
    return {
        "minimum": median,
        "q20": 0.9 * median,
        "median": median,
        "q80": 1.1 * median,
        "maximum": median,
        "rounds": 9,
    }


def cell(seconds: float, status: str = "done") -> dict[str, Any]:
    figures = {"checkpointing": "selective", "tflop_per_s": 512.0, "mfu": 0.64, "peak_memory_gb": 41.5}
    return {"status": status} | ({"seconds": quantiles(seconds)} | figures if status == "done" else {})


def environment(gpu: str | None = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    return {
        "commit": "0123456789abcdef",
        "packages": {"torch": "2.13.0"},
        "cpu": {"model": "A CPU", "count": 2, "torch_threads": 1},
        "gpu": None if gpu is None else {"name": gpu},
    }


def gpu_result() -> dict[str, Any]:
    cells = {f"{step} {shape} P2": cell(2.0) for step in ("forward", "rollout", "train") for shape in "AB"}
    cells |= {f"{step} {shape} ours": cell(1.0) for step in ("forward", "rollout", "train") for shape in "AB"}
    cells["forward B P1"] = cell(0.0, "out of memory: CUDA")
    attention = {"cudnn": {"status": "checked", "passed": True}, "wrong": {"status": "checked", "passed": False}}
    kernels = [
        {
            "op": op,
            "case": "B",
            "direction": "forward",
            "dtype": "bfloat16",
            "seconds": {"fused": quantiles(50e-6)},
            "gb_per_s": 2600.0,
            "share_of_copy": 0.87,
            "times_eager": 6.5,
            "times_compiled": 1.25,
        }
        for op in ("adaln", "broken_op")
    ]
    rows = [
        {"backend": name, "shape": "B", "direction": "forward", "seconds": quantiles(0.017), "tflop_per_s": 595.0}
        for name in attention
    ]
    result: dict[str, Any] = {
        "environment": environment(),
        "smoke": False,
        "copy": {"gb_per_s": 3000.0},
        "matmul": {"tflop_per_s": 798.0},
        "kernels": kernels,
        "parity_failures": {"broken_op": ["rms error"]},
        "policy_cells": cells,
        "policy_failures": {},
        "attention": attention,
        "attention_rows": rows,
        "block_parity": {"ours": {"passed": True}, "P2": {"passed": True}, "P1": {"passed": False}},
        "blocks": [
            {"shape": "B", "contender": c, "direction": "forward", "seconds": quantiles(s), "tflop_per_s": 600.0}
            for c, s in (("ours", 0.01), ("P2", 0.013), ("P2c", 0.012), ("P1", 0.05))
        ],
    }
    return result | {"policy_goals": goal_records(result)}


def written(
    folder: Path, result: dict[str, Any], name: str = "2026-01-01-012345678.json", device: str = "h100"
) -> Path:
    path = folder / device / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), "utf-8")
    return path


def results_of(*paths: Path) -> report.Results:
    return report.read_results(paths)


def test_documents_are_what_the_committed_results_say() -> None:
    """`python -m benchmarks report --write` mends this one."""
    results = report.read_results(report.committed_files())
    for name in report.DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        assert report.renewed(text, results) == text, name


def test_every_block_stands_in_a_document() -> None:
    text = "".join((ROOT / name).read_text("utf-8") for name in report.DOCUMENTS)
    assert set(report.BLOCKS) == set(report._MARKER.findall(text))


def test_a_result_of_a_gpu_fills_the_tables(tmp_path: Path) -> None:
    results = results_of(written(tmp_path, gpu_result()))
    targets = report.targets_block(results)
    assert "| figure | target | floor | NVIDIA H100 80GB HBM3 |" in targets
    assert "| forward B vs P2 | 1.30x | 1.20x | 2.00x, target met |" in targets
    assert "| forward B vs P1 | 2.00x | 1.60x | not measured |" in targets
    assert "| video A: rollout, anchor, train | 105 s | 154 s | 60 s, target met |" in targets
    assert "| adaln | B | forward | 50.0 | 2600 | 87% | 6.50x | 1.25x |" in report.kernels_block(results)
    assert "| forward A ours | selective | 1000.0 (900.0 – 1100.0) | 512 | 64.0% | 41.5 |" in report.steps_block(
        results
    )
    assert "| cudnn | B | forward | 17.0 (15.3 – 18.7) | 595 |" in report.attention_block(results)
    assert "| B | forward | P2c | 12.0 (10.8 – 13.2) | 600 | 1.20x |" in report.blocks_block(results)
    assert "commit 012345678: `benchmarks/results/h100/2026-01-01-012345678.json`" in report.steps_block(results)


def test_a_red_parity_check_leaves_no_figure(tmp_path: Path) -> None:
    result = gpu_result() | {"policy_failures": {"ours": "wrong"}}
    result["policy_goals"] = goal_records(result)
    result["block_parity"]["ours"]["passed"] = False
    results = results_of(written(tmp_path, result))
    assert "broken_op" not in report.kernels_block(results)
    assert "| wrong |" not in report.attention_block(results)
    assert "forward A ours" not in report.steps_block(results) and "forward A P2" in report.steps_block(results)
    assert "PARITY FAILED (ours), no figure" in report.targets_block(results)
    assert report.blocks_block(results).startswith(report.NO_GPU)
    assert not any(bar.startswith(("A, ours", "B, ours")) for bar in report.video_bars(results.devices[0]))


def test_nothing_is_made_up_where_there_is_no_gpu(tmp_path: Path) -> None:
    cpu = {"environment": environment(gpu=None), "smoke": False, "kernels": gpu_result()["kernels"]}
    results = results_of(written(tmp_path, cpu, device="cpu-a-cpu"))
    assert results.gpus == []
    for name in ("kernels", "attention", "block", "steps"):
        assert report.BLOCKS[name](results).strip() == report.NO_GPU
    assert "not measured" in report.targets_block(results)
    assert "CPU (A CPU, 1 thread)" in report.devices_block(results)


def test_the_newest_figure_of_a_device_counts_and_smoke_runs_do_not(tmp_path: Path) -> None:
    toy = {"passed": True, "times_stock": 1.5, "seconds": {"stock": quantiles(3.0), "fused": quantiles(2.0)}}
    old = {"environment": environment(gpu=None), "smoke": False, "toy": toy | {"times_stock": 9.0}, "copy": {}}
    new = {"environment": environment(gpu=None), "smoke": False, "toy": toy}
    files = [
        written(tmp_path, new, "2026-02-01-a.json", "cpu"),
        written(tmp_path, old, "2026-01-01-b.json", "cpu"),
        written(tmp_path, new | {"smoke": True, "toy": {}}, "2026-03-01-c.json", "cpu"),
    ]
    results = results_of(*files)
    text = report.toy_block(results)
    assert "Stock over fused: 1.50." in text and "2026-02-01-a.json" in text
    assert results.devices[0].files == {"toy": "2026-02-01-a.json", "copy": "2026-01-01-b.json"}


def test_plots_of_a_gpu(tmp_path: Path) -> None:
    (device,) = results_of(written(tmp_path, gpu_result())).devices
    memory, compute = report.roofline_points(device)
    assert memory == [("adaln forward", 2600.0)]
    assert ("attention cudnn forward", 595.0) in compute and "wrong" not in str(compute)
    assert report.video_bars(device)["B, ours"] == {"rollout": 20.0, "anchor": 20.0, "update": 20.0}
    drawn = report.plots(device, tmp_path)
    assert [path.name for path in drawn] == ["roofline.png", "stacked_time.png"]
    first = [path.read_bytes() for path in drawn]
    assert all(image.startswith(b"\x89PNG") for image in first)
    assert [path.read_bytes() for path in report.plots(device, tmp_path)] == first


def test_markers(tmp_path: Path) -> None:
    results = report.Results(devices=[], predicted={})
    text = "a\n<!-- benchmark toy: begin -->\nold\n<!-- benchmark toy: end -->\nb\n"
    assert report.renewed(text, results) == text.replace("old", "Not measured yet.")
    with pytest.raises(ValueError, match="named nothing"):
        report.renewed(text.replace("toy", "nothing"), results)
    with pytest.raises(ValueError, match="does not end"):
        report.renewed(text.replace("<!-- benchmark toy: end -->\n", ""), results)


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"kernels": []})
    assert report.main([str(path)]) == 2
    assert "is no result of" in capsys.readouterr().err


def test_a_stale_document_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- benchmark toy: begin -->\nold\n<!-- benchmark toy: end -->\n", "utf-8")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "DOCUMENTS", ("page.md",))
    monkeypatch.setattr(report, "committed_files", list)
    assert report.main(["--check"]) == 1
    assert report.main(["--write"]) == 0
    assert report.main(["--check"]) == 0


def test_quantiles_are_the_fifths() -> None:
    found = Quantiles.of([float(n) for n in range(11)])
    assert (found.q20, found.median, found.q80) == (2.0, 5.0, 8.0)
