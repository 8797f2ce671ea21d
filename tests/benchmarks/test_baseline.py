"""Ratios of a run against those of a baseline, on results that are made up in the format of the suites."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import baseline, guard, harness
from benchmarks.baseline import FLOOR, compare, compare_newest, ratios
from benchmarks.harness import Quantiles

DEVICE = "nvidia-h100-80gb-hbm3"


def quantiles(median: float, spread: float = 0.002, rounds: int = 20) -> dict[str, Any]:
    """A timing whose q20 and q80 are `spread` below and above its median."""
    return {
        "minimum": median * (1 - 2 * spread),
        "q20": median * (1 - spread),
        "median": median,
        "q80": median * (1 + spread),
        "maximum": median * (1 + 2 * spread),
        "rounds": rounds,
    }


def made_up() -> dict[str, Any]:
    """A run on an H100: one op, two steps of the transformer with three peers, a block, a decoder, the host."""

    def cell(seconds: float, gb: float) -> dict[str, Any]:
        return {"status": "done", "seconds": quantiles(seconds), "tflop": 200.0, "peak_memory_gb": gb, "mfu": 0.5}

    return {
        "environment": {"gpu": {"name": "NVIDIA H100 80GB HBM3"}, "commit": "0" * 40},
        "smoke": False,
        "parity_failures": {},
        "copy": {"bytes": 2**31, "seconds": quantiles(8e-4), "gb_per_s": 2700.0},
        "matmul": {"size": 8192, "seconds": quantiles(1.5e-3), "tflop_per_s": 730.0},
        "kernels": [
            {
                "op": "adaln",
                "case": "A",
                "direction": direction,
                "bytes": 2**27,
                "seconds": {"fused": quantiles(6e-5), "eager": quantiles(4e-4), "compiled": quantiles(1e-4)},
            }
            for direction in ("forward", "backward")
        ],
        "policy_failures": {},
        "policy_cells": {
            "forward B ours": cell(0.9, 20.0),
            "forward B P1": cell(1.8, 30.0),
            "forward B P2": cell(1.2, 22.0),
            "train B ours": cell(5.0, 55.0),
            "train B P2": cell(7.5, 60.0),
            "train B P2c": {"status": "skipped: it takes about 180 s and 20 s are left"},
            "single_pass B ours": cell(5.2, 56.0),
        },
        "block_parity": {"ours": {"passed": True}},
        "blocks": [
            {"shape": "B", "direction": "forward", "contender": contender, "seconds": quantiles(seconds)}
            for contender, seconds in (("ours", 0.016), ("P2", 0.022))
        ],
        "vae": [{"shape": "B", "passed": True, "seconds": {"ours": quantiles(2.0), "stock": quantiles(2.2)}}],
        "host": {"passed": True, "seconds": {"ours": quantiles(0.02), "P2": quantiles(0.05)}},
    }


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    """`made_up` with one entry replaced, or, where `value` is a factor, a timing that takes so many times as long."""
    result: Any = copy.deepcopy(made_up())
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(value, float) and isinstance(inner[path[-1]], dict):
        value = quantiles(value * inner[path[-1]]["median"])
    inner[path[-1]] = value
    return result


def statuses(now: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, str]:
    return {row.name: row.status for row in compare(now, before or made_up())}


def test_the_made_up_timing_is_the_harness_own_format() -> None:
    assert quantiles(1.0).keys() == Quantiles.of([1.0, 2.0]).__dict__.keys()


def test_every_suite_has_its_ratios() -> None:
    found = ratios(made_up())
    assert found["policy forward B ours / forward B P2"].value == pytest.approx(0.75)
    assert found["policy train B ours / train B P2"].value == pytest.approx(5.0 / 7.5)
    # The single pass needs no rollout beside it; alone it stands beside the peer's training step.
    assert found["policy single_pass B ours / train B P2"].value == pytest.approx(5.2 / 7.5)
    # 200 TFLOP at the product's rate take 200e12 / (2 * 8192^3) * 1.5 ms.
    assert found["policy forward B ours / matmul"].value == pytest.approx(0.9 / (200e12 / (2 * 8192**3) * 1.5e-3))
    # A sixteenth of the copy's bytes in 6e-5 s, where the copy takes 8e-4 s.
    assert found["kernel adaln A forward / copy"].value == pytest.approx(16 * 6e-5 / 8e-4)
    assert found["block forward B / P2"].value == pytest.approx(0.016 / 0.022)
    assert found["decode B / stock"].value == pytest.approx(2.0 / 2.2)
    assert found["host / P2"].value == pytest.approx(0.4)
    assert found["policy train B ours GB of memory"].value == 55.0
    assert not any("P2c" in name for name in found)
    assert len(found) == 2 * 3 + (2 + 1 + 1) + 3 + 3 + 3


def test_the_same_run_holds() -> None:
    assert set(statuses(made_up()).values()) == {"ok"}


def test_a_slower_machine_is_no_regression() -> None:
    """Every timing 30 % longer, ours and the peers': the ratios stay."""
    text = re.sub(
        r'"(minimum|q20|median|q80|maximum)": ([\d.e-]+)',
        lambda m: f'"{m[1]}": {1.3 * float(m[2])}',
        json.dumps(made_up()),
    )
    assert set(statuses(json.loads(text)).values()) == {"ok"}


SLOWER: dict[str, tuple[list[str | int], list[str]]] = {
    "kernel": (
        ["kernels", 0, "seconds", "fused"],
        [f"kernel adaln A forward / {o}" for o in ("copy", "compiled", "eager")],
    ),
    "forward": (
        ["policy_cells", "forward B ours", "seconds"],
        [f"policy forward B ours / {other}" for other in ("forward B P1", "forward B P2", "matmul")],
    ),
    "block": (["blocks", 0, "seconds"], ["block forward B / P2"]),
    "decode": (["vae", 0, "seconds", "ours"], ["decode B / stock"]),
    "host": (["host", "seconds", "ours"], ["host / P2"]),
}


@pytest.mark.parametrize("name", SLOWER)
def test_what_became_slower_is_named_and_nothing_else(name: str) -> None:
    path, expected = SLOWER[name]
    worse = {name for name, status in statuses(changed(path, 1.05)).items() if status == "REGRESSED"}
    assert worse == set(expected)
    assert set(statuses(changed(path, 1.02)).values()) == {"ok"}
    assert {name for name, status in statuses(changed(path, 0.9)).items() if status == "faster"} == set(expected)


def test_more_memory_is_a_regression() -> None:
    path: list[str | int] = ["policy_cells", "train B ours", "peak_memory_gb"]
    assert statuses(changed(path, 56.5))["policy train B ours GB of memory"] == "REGRESSED"
    assert statuses(changed(path, 55.5))["policy train B ours GB of memory"] == "ok"


def test_the_band_is_that_of_the_rounds() -> None:
    """1.2533 (q80 - q20) / (1.683 median sqrt(n)) of four timings, of which one is noisy, times four."""
    noisy = changed(["policy_cells", "forward B ours", "seconds"], quantiles(0.9 * 1.05, spread=0.05, rounds=4))
    (row,) = [row for row in compare(noisy, made_up()) if row.name == "policy forward B ours / forward B P2"]
    of = lambda spread, rounds: 1.2533 * 2 * spread / (1.683 * rounds**0.5)  # noqa: E731
    assert row.band == pytest.approx(4.0 * (of(0.05, 4) ** 2 + 3 * of(0.002, 20) ** 2) ** 0.5)
    assert row.band > 0.05 > FLOOR and row.status == "ok"


@pytest.mark.parametrize(
    ("path", "value", "name", "status"),
    [
        (["parity_failures"], {"adaln": ["x"]}, "kernel adaln A forward / copy", "PARITY FAILED"),
        (["policy_failures"], {"ours": "x"}, "policy forward B ours / matmul", "PARITY FAILED"),
        (["policy_cells", "train B ours"], {"status": "out of memory: x"}, "policy train B ours / train B P2",
         "OUT OF MEMORY"),
        (["policy_cells", "train B ours"], {"status": "failed: x"}, "policy train B ours / train B P2", "FAILED"),
        (["policy_cells", "train B ours"], {"status": "skipped: x"}, "policy train B ours / matmul", "not measured"),
        (["policy_cells", "forward B P2"], {"status": "failed: x"}, "policy forward B ours / forward B P2",
         "not measured"),
        (["blocks", 0], {"shape": "B", "direction": "forward", "contender": "ours", "status": "failed: x"},
         "block forward B / P2", "FAILED"),
        (["vae", 0], {"shape": "B", "passed": False}, "decode B / stock", "PARITY FAILED"),
        (["host", "passed"], False, "host / P2", "PARITY FAILED"),
    ],
)  # fmt: skip
def test_what_failed_is_told_from_what_was_not_measured(
    path: list[str | int], value: Any, name: str, status: str
) -> None:
    (row,) = [row for row in compare(changed(path, value), made_up()) if row.name == name]
    assert row.status == status and row.now is None
    assert row.ok == (status == "not measured")


def test_a_failed_block_parity_fails() -> None:
    now = changed(["block_parity", "ours", "passed"], False)
    now["blocks"] = now["blocks"][1:]
    assert statuses(now)["block forward B / P2"] == "PARITY FAILED"


# ------------------------------------------------------------------------------------------ files


class Folder:
    """A folder of results with a file that names baselines."""

    def __init__(self, root: Path) -> None:
        self.results, self.file = root / "results", root / "budgets.yaml"
        self.name()

    def name(self, baseline: str | None = None) -> None:
        self.file.write_text(json.dumps({"baselines": {DEVICE: baseline} if baseline else {}, "budgets": []}))

    def write(self, name: str, result: dict[str, Any]) -> Path:
        path = self.results / DEVICE / name
        harness.write_result(path, result)
        return path

    def compare(self, given: Path | None = None) -> baseline.Comparison:
        return compare_newest(given, self.results, self.file)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_without_a_baseline_it_says_so_and_passes(folder: Folder) -> None:
    found = folder.compare(folder.write("2030-01-01-a.json", made_up()))
    assert found.ok and f"none is committed for {DEVICE}" in found.table()


def test_a_run_against_its_baseline(folder: Folder) -> None:
    folder.write("2030-01-01-a.json", made_up())
    folder.name("2030-01-01-a.json")
    good = folder.compare(folder.write("2030-01-02-b.json", made_up()))
    assert good.ok and "19 of 19 ratios compared, 0 regressed" in good.message

    slower = changed(["policy_cells", "forward B ours", "seconds"], 1.2)
    bad = folder.compare(folder.write("2030-01-03-c.json", slower))
    assert not bad.ok and "3 regressed" in bad.message
    first = bad.table().splitlines()[2]
    assert first.startswith("policy forward B ours") and "+20.0%" in first and first.endswith("REGRESSED")


def test_the_newest_result_of_this_gpu_is_taken(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no GPU here" in folder.compare().message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "environment", lambda: made_up()["environment"])
    assert f"no result of {DEVICE} yet" in folder.compare().message
    folder.write("2030-01-01-z.json", made_up())
    folder.name("2030-01-01-z.json")
    assert "the baseline itself" in folder.compare().message
    folder.write("2030-01-02-a.json", changed(["host", "seconds", "ours"], 2.0))
    found = folder.compare()
    assert not found.ok and found.message.startswith("baseline: 2030-01-02-a.json against 2030-01-01-z.json")


def test_a_missing_baseline_and_a_smoke_run_are_refused(folder: Folder) -> None:
    run = folder.write("2030-01-02-b.json", made_up())
    folder.name("2030-01-01-a.json")
    with pytest.raises(ValueError, match="names 2030-01-01-a.json as the baseline"):
        folder.compare(run)
    with pytest.raises(ValueError, match="is a smoke run"):
        folder.compare(folder.write("2030-01-03-c.json", made_up() | {"smoke": True}))
    with pytest.raises(ValueError, match="does not say on which device"):
        folder.compare(folder.write("2030-01-04-d.json", {"levers": []}))


def test_the_command_compares_a_given_run(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("2030-01-01-a.json", made_up())
    folder.name("2030-01-01-a.json")
    monkeypatch.setattr(baseline.compare_newest, "__defaults__", (None, folder.results, folder.file))
    slower = folder.write("2030-01-02-b.json", changed(["blocks", 0, "seconds"], 1.5))
    command = ["--only", "kernels", "--result", str(slower)]
    assert guard.main(command) == 1
    assert "block forward B / P2" in capsys.readouterr().out
    assert guard.main([*command, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ok"] and {row["status"] for row in printed["baseline"]["rows"]} == {"ok", "REGRESSED"}


def test_every_named_baseline_is_committed() -> None:
    for device, name in yaml.safe_load(baseline.FILE.read_text("utf-8"))["baselines"].items():
        assert (harness.RESULTS / device / name).is_file()
