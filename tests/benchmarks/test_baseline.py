"""Ratios of a run against those of a baseline, on results that are made up in the format of the suites."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import baseline, guard, harness
from benchmarks.baseline import FLOOR, Comparison, compare, compare_run, ratios
from tests.benchmarks.made_up import gpu_result, quantiles

DEVICE = "nvidia-h100-80gb-hbm3"
FORWARD, TRAIN = "transformer forward B ours", "transformer train B ours"
ITERATION = "iteration 2 videos of 4 steps B seconds per video"
BEFORE = [gpu_result()] * 3
Guarded = Callable[..., tuple[int, str]]


def changed(cell: str, **values: Any) -> dict[str, Any]:
    """`gpu_result` with entries of a cell's record replaced, or `seconds` and `peak_memory_gb` of its row; `seconds` is
    a factor or quantiles.
    """
    result = copy.deepcopy(gpu_result())
    record = result["cells"][cell]
    row = record["rows"][0] if "rows" in record else {}
    for name, value in values.items():
        if name == "seconds" and isinstance(value, float):
            value = quantiles(value * row["seconds"]["median"])
        (row if name in ("seconds", "peak_memory_gb") else record)[name] = value
    return result


def statuses(now: dict[str, Any]) -> dict[str, str]:
    return {row.name: row.status for row in compare(now, BEFORE)}


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
    assert found["decode B / stock"].value == pytest.approx(2.0 / 2.2)
    assert found["transformer train B GB of memory"].value == 55.0
    assert not any("P2c" in name or "wrong" in name for name in found)
    assert found["attention forward B cudnn / matmul"].value == pytest.approx(730 / 595)
    assert found[ITERATION].value == pytest.approx(55.0)
    assert found["sharded LoRA gradient B / unwrapped"].value == pytest.approx(1.1)
    assert len(found) == 3 + (2 + 1 + 1) + 4 + 4 + 2 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("cell", "entry", "worse", "noise", "names"),
    [
        ("kernels adaln forward B ours", "seconds", 1.05, 1.02, "kernels adaln forward B / (copy|compiled|eager)"),
        (FORWARD, "seconds", 1.05, 1.02, "transformer forward B / (P1|P2|matmul)"),
        ("sharded LoRA gradient B ours", "seconds", 1.05, 1.02, "sharded LoRA gradient B / unwrapped"),
        ("iteration 2 videos of 4 steps B ours", "seconds", 1.1, 1.04, ITERATION),
        (TRAIN, "peak_memory_gb", 56.5, 55.5, "transformer train B GB of memory"),
    ],
)
def test_what_became_worse_is_named_and_nothing_else(
    cell: str, entry: str, worse: float, noise: float, names: str
) -> None:
    for name, status in statuses(changed(cell, **{entry: worse})).items():
        assert status == ("REGRESSED" if re.fullmatch(names, name) else "ok"), name
    assert set(statuses(changed(cell, **{entry: noise})).values()) == {"ok"}


def test_what_became_faster_passes() -> None:
    assert set(statuses(changed("sharded LoRA gradient B ours", seconds=0.9)).values()) == {"ok", "faster"}


def test_the_band_is_the_spread_of_the_runs_and_of_the_rounds() -> None:
    """Three runs at 0.75, 0.7 and 0.8 spread by 0.05; the new one has two noisy medians."""
    name = "transformer forward B / P2"
    runs = [gpu_result(), changed(FORWARD, seconds=0.7 / 0.75), changed(FORWARD, seconds=0.8 / 0.75)]
    now = changed(FORWARD, seconds=quantiles(0.9 * 1.2, spread=0.05, rounds=4))
    (row,) = [row for row in compare(now, runs) if row.name == name]
    of = lambda spread, rounds: 1.2533 * 2 * spread / (1.683 * rounds**0.5)  # noqa: E731
    expected = 4.0 * ((0.05 / 0.75) ** 2 + of(0.05, 4) ** 2 + of(0.002, 20) ** 2) ** 0.5
    assert row.baseline == pytest.approx(0.75) and row.band == pytest.approx(expected)
    assert row.band > 0.2 > FLOOR and row.status == "ok"


@pytest.mark.parametrize(
    ("cell", "record", "status"),
    [
        ("transformer parity ours", {"passed": False}, "PARITY FAILED"),
        (TRAIN, {"status": "skipped: transformer parity ours has not passed"}, "PARITY FAILED"),
        (TRAIN, {"status": "out of memory: x"}, "OUT OF MEMORY"),
        (TRAIN, {"status": "failed: x"}, "FAILED"),
        (TRAIN, {"status": "skipped: it takes 9 s"}, "not measured"),
        ("transformer train B P2", {"status": "failed: x"}, "not measured"),
    ],
)
def test_what_failed_is_told_from_what_was_not_measured(cell: str, record: dict[str, Any], status: str) -> None:
    (row,) = [row for row in compare(changed(cell, **record), BEFORE) if row.name == "transformer train B / P2"]
    assert row.status == status and row.now is None
    assert row.ok == (status == "not measured")


def test_what_is_slow_once_does_not_count() -> None:
    slow = Comparison("", tuple(compare(changed("decode B ours", seconds=1.2), BEFORE)))
    assert slow.flagged == ["decode"] and not slow.ok
    assert slow.confirmed(Comparison("", tuple(compare(gpu_result(), BEFORE)))).ok
    assert not slow.confirmed(slow).ok


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """Status and output of the guard for a run beside a baseline of three runs, or of as many as are named."""

    def guarded(now: dict[str, Any], named: int = 3) -> tuple[int, str]:
        names = [f"2030-01-0{day}-a.json" for day in range(1, named + 1)]
        for name in names[:3]:
            harness.write_result(tmp_path / DEVICE / name, gpu_result())
        harness.write_result(tmp_path / "now.json", now)
        required = yaml.safe_load(baseline.FILE.read_text("utf-8"))["required"]
        # The made-up run has one op.
        required["gpu"] = [name for name in required["gpu"] if not name.startswith("kernels")]
        harness.write_result(tmp_path / "budgets.yaml", {"baselines": {DEVICE: names}, "required": required})
        monkeypatch.setattr(baseline.compare_run, "__defaults__", (tmp_path, tmp_path / "budgets.yaml"))
        status = guard.main(["--only", "baseline", "--result", str(tmp_path / "now.json")])
        return status, "".join(capsys.readouterr())

    return guarded


def missing(output: str) -> list[str]:
    return [line.split("  ")[0] for line in output.splitlines() if line.endswith("MISSING")]


def test_a_required_figure_must_be_there(guarded: Guarded) -> None:
    """An empty run, or one without the iteration, is red; without a baseline what is there counts."""
    status, output = guarded(gpu_result(), named=0)
    assert status == 0 and "no baseline" in output and "budgets hold" not in output
    status, output = guarded(gpu_result() | {"cells": {}}, named=0)
    assert status == 1 and len(missing(output)) == 6
    now = gpu_result()
    del now["cells"]["iteration 2 videos of 4 steps B ours"]
    assert missing(guarded(now)[1]) == [ITERATION]


def test_two_gpus_are_measured_where_there_are_two(guarded: Guarded) -> None:
    now = gpu_result()
    now["environment"]["gpu"]["count"] = 2
    assert {name.split()[0] for name in missing(guarded(now)[1])} == {"two_ranks"}


def test_a_run_against_its_baseline(guarded: Guarded) -> None:
    status, output = guarded(gpu_result())
    assert status == 0 and "21 of 21 figures measured, 0 regressed" in output
    status, output = guarded(changed(FORWARD, seconds=1.2))
    first = output.splitlines()[2]
    assert status == 1 and "3 regressed" in output
    assert first.startswith("transformer forward B") and "+20.0%" in first and first.endswith("REGRESSED")
    for refused, words in (
        (guarded(gpu_result(), named=2), "names 2 run"),
        (guarded(gpu_result(), named=4), "2030-01-04-a.json does not exist"),
        (guarded(gpu_result() | {"smoke": True}), "is not a full run"),
        (guarded({}), "is not a full run"),
    ):
        assert refused[0] == 1 and words in refused[1]


@pytest.mark.parametrize("step", ["forward", "train"])
def test_the_committed_baseline_of_the_cpu_shows_a_tenth(step: str) -> None:
    """Red where a step takes 10 % longer beside its peer, or is not there; green as it was measured."""
    (name, *_) = yaml.safe_load(baseline.FILE.read_text("utf-8"))["baselines"]["cpu"]
    now = json.loads((harness.RESULTS / "cpu" / name).read_text("utf-8"))
    assert compare_run(now).ok
    turns = now["cells"][f"cpu {step} small"]["rows"][0]["over"]["P2"]
    turns |= {quantile: 1.1 * turns[quantile] for quantile in ("q20", "median", "q80")}
    assert [row.name for row in compare_run(now).rows if row.status == "REGRESSED"] == [f"cpu {step} small / P2"]
    del now["cells"][f"cpu {step} small"]
    assert [row.status for row in compare_run(now).rows if not row.ok] == ["MISSING"]
