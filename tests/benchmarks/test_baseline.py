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
from tests.benchmarks.made_up import gpu_result, quantiles

DEVICE = "nvidia-h100-80gb-hbm3"
FORWARD = "transformer forward B ours"


def changed(cell: str, **values: Any) -> dict[str, Any]:
    """`gpu_result` with entries of a cell's record replaced, or `seconds` and `peak_memory_gb` of its row; `seconds` is
    a factor or quantiles.
    """
    result = copy.deepcopy(gpu_result())
    record = result["cells"][cell]
    for name, value in values.items():
        if name in ("seconds", "peak_memory_gb"):
            (row,) = record["rows"]
            row[name] = (
                quantiles(value * row["seconds"]["median"]) if isinstance(value, float) and name == "seconds" else value
            )
        else:
            record[name] = value
    return result


def statuses(now: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, str]:
    return {row.name: row.status for row in compare(now, before or gpu_result())}


def test_the_made_up_timing_is_the_harness_own_format() -> None:
    assert quantiles(1.0).keys() == Quantiles.of([1.0, 2.0]).__dict__.keys()


def test_every_suite_has_its_ratios() -> None:
    found = ratios(gpu_result())
    assert found["transformer forward B / P2"].value == pytest.approx(0.75)
    assert found["transformer train B / P2"].value == pytest.approx(5.0 / 7.5)
    # The single pass needs no rollout beside it; alone it stands beside the peer's training step.
    assert found["transformer single_pass B / P2"].value == pytest.approx(5.2 / 7.5)
    # 200 TFLOP at the product's rate take 200e12 / (2 * 8192^3) * 1.5 ms.
    assert found["transformer forward B / matmul"].value == pytest.approx(0.9 / (200e12 / (2 * 8192**3) * 1.5e-3))
    # A sixteenth of the copy's bytes in 6e-5 s, where the copy takes 8e-4 s.
    assert found["kernels adaln forward B / copy"].value == pytest.approx(16 * 6e-5 / 8e-4)
    assert found["block forward B / P2"].value == pytest.approx(0.016 / 0.022)
    assert found["decode B / stock"].value == pytest.approx(2.0 / 2.2)
    assert found["transformer train B GB of memory"].value == 55.0
    assert not any("P2c" in name or "wrong" in name for name in found)
    assert len(found) == 3 + (2 + 1 + 1 + 1) + 4 + 4 + 2


def test_the_same_run_holds() -> None:
    assert set(statuses(gpu_result()).values()) == {"ok"}


def test_a_slower_machine_is_no_regression() -> None:
    """Every timing 30 % longer, ours and the peers': the ratios stay."""
    text = re.sub(
        r'"(q20|median|q80)": ([\d.e-]+)',
        lambda m: f'"{m[1]}": {1.3 * float(m[2])}',
        json.dumps(gpu_result()),
    )
    assert set(statuses(json.loads(text)).values()) == {"ok"}


SLOWER: dict[str, list[str]] = {
    "kernels adaln forward B ours": [f"kernels adaln forward B / {other}" for other in ("copy", "compiled", "eager")],
    FORWARD: [f"transformer forward B / {other}" for other in ("P1", "P2", "matmul")],
    "block forward B ours": ["block forward B / P2"],
    "decode B ours": ["decode B / stock"],
}


@pytest.mark.parametrize("cell", SLOWER)
def test_what_became_slower_is_named_and_nothing_else(cell: str) -> None:
    worse = {name for name, status in statuses(changed(cell, seconds=1.05)).items() if status == "REGRESSED"}
    assert worse == set(SLOWER[cell])
    assert set(statuses(changed(cell, seconds=1.02)).values()) == {"ok"}
    faster = {name for name, status in statuses(changed(cell, seconds=0.9)).items() if status == "faster"}
    assert faster == set(SLOWER[cell])


def test_more_memory_is_a_regression() -> None:
    name, cell = "transformer train B GB of memory", "transformer train B ours"
    assert statuses(changed(cell, peak_memory_gb=56.5))[name] == "REGRESSED"
    assert statuses(changed(cell, peak_memory_gb=55.5))[name] == "ok"


def test_the_band_is_that_of_the_rounds() -> None:
    """1.2533 (q80 - q20) / (1.683 median sqrt(n)) of four timings, of which one is noisy, times four."""
    noisy = changed(FORWARD, seconds=quantiles(0.9 * 1.05, spread=0.05, rounds=4))
    (row,) = [row for row in compare(noisy, gpu_result()) if row.name == "transformer forward B / P2"]
    of = lambda spread, rounds: 1.2533 * 2 * spread / (1.683 * rounds**0.5)  # noqa: E731
    assert row.band == pytest.approx(4.0 * (of(0.05, 4) ** 2 + 3 * of(0.002, 20) ** 2) ** 0.5)
    assert row.band > 0.05 > FLOOR and row.status == "ok"


TRAIN = "transformer train B ours"


@pytest.mark.parametrize(
    ("cell", "values", "name", "status"),
    [
        ("kernels parity adaln", {"passed": False}, "kernels adaln forward B / copy", "PARITY FAILED"),
        ("transformer parity ours", {"passed": False}, "transformer forward B / matmul", "PARITY FAILED"),
        (TRAIN, {"status": "out of memory: x"}, "transformer train B / P2", "OUT OF MEMORY"),
        (TRAIN, {"status": "failed: x"}, "transformer train B / P2", "FAILED"),
        (TRAIN, {"status": "skipped: block parity ours has not passed"}, "transformer train B / P2", "PARITY FAILED"),
        (TRAIN, {"status": "skipped: it takes 9 s"}, "transformer train B / matmul", "not measured"),
        ("transformer forward B P2", {"status": "failed: x"}, "transformer forward B / P2", "not measured"),
        ("decode parity B", {"passed": False}, "decode B / stock", "PARITY FAILED"),
    ],
)
def test_what_failed_is_told_from_what_was_not_measured(
    cell: str, values: dict[str, Any], name: str, status: str
) -> None:
    (row,) = [row for row in compare(changed(cell, **values), gpu_result()) if row.name == name]
    assert row.status == status and row.now is None
    assert row.ok == (status == "not measured")


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
    found = folder.compare(folder.write("2030-01-01-a.json", gpu_result()))
    assert found.ok and f"none is committed for {DEVICE}" in found.table()


def test_a_run_against_its_baseline(folder: Folder) -> None:
    folder.write("2030-01-01-a.json", gpu_result())
    folder.name("2030-01-01-a.json")
    good = folder.compare(folder.write("2030-01-02-b.json", gpu_result()))
    assert good.ok and "18 of 18 ratios compared, 0 regressed" in good.message

    slower = changed(FORWARD, seconds=1.2)
    bad = folder.compare(folder.write("2030-01-03-c.json", slower))
    assert not bad.ok and "3 regressed" in bad.message
    first = bad.table().splitlines()[2]
    assert first.startswith("transformer forward B") and "+20.0%" in first and first.endswith("REGRESSED")


def test_the_newest_result_of_this_gpu_is_taken(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no GPU here" in folder.compare().message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "environment", lambda: gpu_result()["environment"])
    assert f"no result of {DEVICE} yet" in folder.compare().message
    folder.write("2030-01-01-z.json", gpu_result())
    folder.name("2030-01-01-z.json")
    assert "the baseline itself" in folder.compare().message
    folder.write("2030-01-02-a.json", changed(FORWARD, seconds=2.0))
    found = folder.compare()
    assert not found.ok and found.message.startswith("baseline: 2030-01-02-a.json against 2030-01-01-z.json")


def test_a_missing_baseline_and_a_smoke_run_are_refused(folder: Folder) -> None:
    run = folder.write("2030-01-02-b.json", gpu_result())
    folder.name("2030-01-01-a.json")
    with pytest.raises(ValueError, match="names 2030-01-01-a.json as the baseline"):
        folder.compare(run)
    with pytest.raises(ValueError, match="is not a full run"):
        folder.compare(folder.write("2030-01-03-c.json", gpu_result() | {"smoke": True}))
    with pytest.raises(ValueError, match="is not a full run"):
        folder.compare(folder.write("2030-01-04-d.json", {"cells": {}}))


def test_the_command_compares_a_given_run(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("2030-01-01-a.json", gpu_result())
    folder.name("2030-01-01-a.json")
    monkeypatch.setattr(baseline.compare_newest, "__defaults__", (None, folder.results, folder.file))
    slower = folder.write("2030-01-02-b.json", changed("block forward B ours", seconds=1.5))
    command = ["--only", "kernels", "--result", str(slower)]
    assert guard.main(command) == 1
    assert "block forward B / P2" in capsys.readouterr().out


def test_every_named_baseline_is_committed() -> None:
    for device, name in yaml.safe_load(baseline.FILE.read_text("utf-8"))["baselines"].items():
        assert (harness.RESULTS / device / name).is_file()
