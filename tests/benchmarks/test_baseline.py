"""Ratios of a run against those of a baseline, on results that are made up in the format of the suites."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import baseline, guard, harness
from benchmarks.baseline import FLOOR, Comparison, compare, compare_run, ratios
from benchmarks.suites import cpu
from tests.benchmarks.made_up import gpu_result, quantiles, timed

DEVICE = "nvidia-h100-80gb-hbm3"
FORWARD, TRAIN = "transformer forward B ours", "transformer train B ours"
ITERATION = "iteration 2 videos of 4 steps B seconds per video"
BEFORE = [gpu_result()] * 3


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


def test_a_slower_machine_is_no_regression_but_for_the_seconds_of_an_iteration() -> None:
    """Every timing 30 % longer, ours and the peers': the ratios stay."""
    text = re.sub(
        r'"(q20|median|q80)": ([\d.e-]+)',
        lambda m: f'"{m[1]}": {1.3 * float(m[2])}',
        json.dumps(gpu_result()),
    )
    found = statuses(json.loads(text))
    assert found.pop(ITERATION) == "REGRESSED"
    assert set(found.values()) == {"ok"}


@pytest.mark.parametrize(
    ("cell", "entry", "worse", "noise", "names"),
    [
        ("kernels adaln forward B ours", "seconds", 1.05, 1.02, "kernels adaln forward B / (copy|compiled|eager)"),
        (FORWARD, "seconds", 1.05, 1.02, "transformer forward B / (P1|P2|matmul)"),
        ("sharded lora", "seconds", 1.05, 1.02, "sharded LoRA gradient B / unwrapped"),
        ("iteration B", "seconds", 1.1, 1.04, ITERATION),
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
    assert set(statuses(changed("sharded lora", seconds=0.9)).values()) == {"ok", "faster"}


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
    ("cell", "values", "name", "status"),
    [
        ("transformer parity ours", {"passed": False}, "transformer forward B / matmul", "PARITY FAILED"),
        (
            TRAIN,
            {"status": "skipped: transformer parity ours has not passed"},
            "transformer train B / P2",
            "PARITY FAILED",
        ),
        (TRAIN, {"status": "out of memory: x"}, "transformer train B / P2", "OUT OF MEMORY"),
        (TRAIN, {"status": "failed: x"}, "transformer train B / P2", "FAILED"),
        (TRAIN, {"status": "skipped: it takes 9 s"}, "transformer train B / matmul", "not measured"),
        ("transformer forward B P2", {"status": "failed: x"}, "transformer forward B / P2", "not measured"),
    ],
)
def test_what_failed_is_told_from_what_was_not_measured(
    cell: str, values: dict[str, Any], name: str, status: str
) -> None:
    (row,) = [row for row in compare(changed(cell, **values), BEFORE) if row.name == name]
    assert row.status == status and row.now is None
    assert row.ok == (status == "not measured")


def test_what_is_slow_once_does_not_count() -> None:
    slow = Comparison("", tuple(compare(changed("decode B ours", seconds=1.2), BEFORE)))
    assert slow.flagged == ["decode"] and not slow.ok
    assert slow.confirmed(Comparison("", tuple(compare(gpu_result(), BEFORE)))).ok
    assert not slow.confirmed(slow).ok


# ------------------------------------------------------------------------------------------ files


class Folder:
    """A folder of results, and a file that names baselines and requires what budgets.yaml does."""

    def __init__(self, root: Path) -> None:
        self.results, self.file = root / "results", root / "budgets.yaml"
        self.name()

    def name(self, *runs: str) -> None:
        required = yaml.safe_load(baseline.FILE.read_text("utf-8"))["required"]
        # The made-up run has one op.
        required["gpu"] = [name for name in required["gpu"] if not name.startswith("kernels")]
        self.file.write_text(json.dumps({"baselines": {DEVICE: list(runs)}, "required": required, "budgets": []}))

    def write(self, name: str, result: dict[str, Any]) -> Path:
        path = self.results / DEVICE / name
        harness.write_result(path, result)
        return path

    def compare(self, now: dict[str, Any]) -> Comparison:
        return compare_run(now, self.results, self.file)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def missing(found: Comparison) -> set[str]:
    return {row.name for row in found.rows if row.status == "MISSING"}


def test_a_required_figure_must_be_there(folder: Folder) -> None:
    """An empty run, or one without the iteration, is red; without a baseline what is there counts."""
    found = folder.compare(gpu_result())
    assert found.ok and "no baseline" in found.message
    assert len(missing(folder.compare(gpu_result() | {"cells": {}}))) == 6
    now = gpu_result()
    del now["cells"]["iteration B"]
    assert missing(folder.compare(now)) == {ITERATION}


def test_two_gpus_are_measured_where_there_are_two(folder: Folder) -> None:
    now = gpu_result()
    now["environment"]["gpu"]["count"] = 2
    assert {name.split()[0] for name in missing(folder.compare(now))} == {"two_ranks"}
    rows = [timed("two_ranks", "all-to-all", "B", "ours", 0.001, bytes=2**20)["rows"][0]]
    for step, peer in (("forward", "whole"), ("slower rank", "faster")):
        rows += [timed("two_ranks", step, "B", who, 1.0)["rows"][0] for who in ("ours", peer)]
    now["cells"]["two_ranks two GPUs"] = {"suite": "two_ranks", "needs": [], "status": "done", "rows": rows}
    assert folder.compare(now).ok


def test_a_run_against_its_baseline(folder: Folder) -> None:
    names = [f"2030-01-0{day}-a.json" for day in (1, 2, 3)]
    for name in names:
        folder.write(name, gpu_result())
    folder.name(*names)
    good = folder.compare(gpu_result())
    assert good.ok and "21 of 21 figures measured, 0 regressed" in good.message
    bad = folder.compare(changed(FORWARD, seconds=1.2))
    assert not bad.ok and "3 regressed" in bad.message
    first = bad.table().splitlines()[2]
    assert first.startswith("transformer forward B") and "+20.0%" in first and first.endswith("REGRESSED")
    folder.name(*names[:2])
    with pytest.raises(ValueError, match="names 2 run"):
        folder.compare(gpu_result())
    folder.name(*names[:2], "2030-01-04-a.json")
    with pytest.raises(ValueError, match=r"2030-01-04-a\.json does not exist"):
        folder.compare(gpu_result())


@pytest.mark.parametrize("now", [gpu_result() | {"smoke": True}, {"cells": {}}, {}])
def test_what_is_not_a_full_run_is_refused(folder: Folder, now: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not a full run"):
        folder.compare(now)


def test_the_command_compares_a_given_run(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower iteration is red; so is an empty file."""
    names = [f"2030-01-0{day}-a.json" for day in (1, 2, 3)]
    for name in names:
        folder.write(name, gpu_result())
    folder.name(*names)
    monkeypatch.setattr(baseline.compare_run, "__defaults__", (folder.results, folder.file))
    for result, status in ((gpu_result(), 0), (changed("iteration B", seconds=1.1), 1)):
        command = ["--only", "baseline", "--result", str(folder.write("2030-01-04-b.json", result))]
        assert guard.main(command) == status
    output = capsys.readouterr().out
    assert "seconds per video" in output and "budgets hold" not in output
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    assert guard.main(["--only", "baseline", "--result", str(empty)]) == 1


def test_a_pass_that_is_added_on_a_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio of the contenders in turns, with a second forward on our side."""
    contest = cpu.Contest()
    monkeypatch.setitem(cpu.STEPS, "forward", (cpu.STEPS["forward"][0], 5))
    before = {"cells": {"cpu forward small": contest.measure("forward", False) | {"suite": "cpu", "status": "done"}}}
    forward = cpu.STEPS["forward"][0]

    def twice(velocity: Any, inputs: Any, kernels: Any) -> None:
        for _ in range(2 if "fused" in velocity.__qualname__ else 1):
            forward(velocity, inputs, kernels)

    monkeypatch.setitem(cpu.STEPS, "forward", (twice, 5))
    after = {"cells": {"cpu forward small": contest.measure("forward", False) | {"suite": "cpu", "status": "done"}}}
    slower = ratios(after)["cpu forward small / P2"].value / ratios(before)["cpu forward small / P2"].value
    assert slower > 1.4


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
