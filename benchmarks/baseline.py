"""A run against the committed baseline of its device: ratios within a run, and seconds of an iteration.

Seconds differ between two days of one machine; ours over the peer's of the same run differ less. Every pair of timings
that a result holds becomes one ratio, ours over theirs, and a ratio of a ceiling for what has one. Only `iteration` is
held in seconds per video, because users pay for those.

A baseline is at least three runs of one commit. A figure of it is their median, and its error their spread; it may be
exceeded by

    band = max(floor, WIDTH * sqrt(spread^2 + s^2)),    s = 1.2533 (q80 - q20) / (1.683 median sqrt(n)) per timing

s is the relative standard error of a median of n rounds whose spread is taken from the raw quantiles: q80 - q20 is
1.683 standard deviations of a normal distribution, and a median's error is 1.2533 times a mean's.

benchmarks/budgets.yaml names the baseline of every device, as files under benchmarks/results/<device>/, and the figures
that a run must have: without one of these the guard is red, so an empty run never passes.
"""

import json
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import harness, results
from benchmarks.results import Result

FILE = Path(__file__).with_name("budgets.yaml")
FLOOR, WIDTH = 0.03, 4.0
"""Least relative band, and standard errors that a ratio may be off."""
FLOORS = {"cpu": 0.08, "iteration": 0.05}
"""Least band of a suite whose process or machine differs more from run to run."""
FEWEST_RUNS = 3
"""Runs of a baseline."""
PASSING = ("ok", "faster", "not measured", "not repeated")
"""Statuses that pass: a step that was skipped and is not required, and what was slow once and not again."""
MEMORY_BAND = 0.02
"""Relative band of a peak of memory, which the allocator repeats nearly to the byte."""
CEILINGS = {"bytes": "copy", "flop": "matmul"}
"""Work of a row -> the ceiling it stands under."""
COMPARED = ("kernels", "transformer", "decode", "sharded", "two_ranks", "cpu")
"""Suites in which ours stands beside peers."""


class Ratio(NamedTuple):
    """Ours over something of the same run, its relative standard error and its least band; less is better.

    Example: `Ratio(0.77, 0.004)` takes 0.77 of the peer's time, give or take 0.4 %.
    """

    value: float
    error: float
    floor: float = FLOOR


class Row(NamedTuple):
    """One figure of a run and its baseline; None, and `status` the reason, where there is none.

    Example: `Row("transformer forward B / P2", baseline=0.77, now=0.84, band=0.03, status="REGRESSED")`
    """

    name: str
    baseline: float | None
    now: float | None
    band: float
    status: str

    @property
    def ok(self) -> bool:
        return self.status in PASSING


class Comparison(NamedTuple):
    """A run beside the baseline, or a line that says why there is nothing to compare."""

    message: str
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def flagged(self) -> list[str]:
        """Suites in which something regressed, to be measured again."""
        return sorted({row.name.split()[0] for row in self.rows if row.status == "REGRESSED"})

    def confirmed(self, again: "Comparison") -> "Comparison":
        """Keep the regressions that a second measurement of their suite shows again."""
        second = {row.name: row for row in again.rows}
        rows = [
            row._replace(status="not repeated")
            if row.status == "REGRESSED" and row.name in second and second[row.name].ok
            else row
            for row in self.rows
        ]
        return Comparison(f"{self.message}; measured again: {', '.join(self.flagged)}", tuple(rows))

    def table(self) -> str:
        """Regressions first."""
        if not self.rows:
            return self.message
        form = "{:60} {:>9} {:>9} {:>8} {:>7}  {}"
        lines = [self.message, form.format("ratio, ours over theirs", "baseline", "now", "change", "band", "")]
        for row in sorted(self.rows, key=lambda row: row.ok):
            both = row.now is not None and row.baseline is not None
            shown = ["-" if value is None else f"{value:.4f}" for value in (row.baseline, row.now)]
            shown += [f"{row.now / row.baseline - 1:+.1%}", f"{row.band:.1%}"] if both else ["-", "-"]  # type: ignore[operator]
            lines.append(form.format(row.name, *shown, row.status))
        return "\n".join(lines)


def error_of(quantiles: Mapping[str, float]) -> float:
    """Relative standard error of a median."""
    deviation = (quantiles["q80"] - quantiles["q20"]) / 1.683
    return 1.2533 * deviation / (quantiles["median"] * math.sqrt(quantiles["rounds"]))


def over(ours: Mapping[str, float], theirs: Mapping[str, float], scale: float = 1.0, floor: float = FLOOR) -> Ratio:
    """Ratio of two timings of one run, times a number without an error."""
    return Ratio(scale * ours["median"] / theirs["median"], math.hypot(error_of(ours), error_of(theirs)), floor)


def ratios(result: Result) -> dict[str, Ratio]:
    """Every ratio that a result holds, by name: ours over each contender of the same step and shape and over the
    device's ceiling, and ours of memory. What failed its parity has none.
    """
    found: dict[str, Ratio] = {}
    rows = results.rows(result)
    ceilings = {work: (name, results.ceiling_row(rows, name)) for work, name in CEILINGS.items()}
    for (suite, step, shape), contenders in rows.items():
        name, floor = results.name_of(suite, step, shape), FLOORS.get(suite, FLOOR)
        if suite == "attention" and (top := ceilings["flop"][1]) is not None:
            # Backends are each other's peers, and which are installed differs: each stands under the product's rate.
            found |= {
                f"{name} {who} / matmul": Ratio(top["rate"] / row["rate"], error_of(row["seconds"]))
                for who, row in contenders.items()
                if "rate" in row
            }
        ours = contenders.get("ours")
        if ours is None:
            continue
        if suite == "iteration":
            seconds = ours["seconds"]["median"] / ours.get("videos", 1)
            found[f"{name} seconds per video"] = Ratio(seconds, error_of(ours["seconds"]), floor)
        if suite not in COMPARED:
            continue
        # The split gradient and the single pass stand beside the peers' training step.
        beside = rows.get((suite, "train", shape), {}) if step in ("train_split", "single_pass") else {}
        for who, row in (beside | contenders).items():
            turns = ours.get("over", {}).get(who)
            if turns is not None:
                found[f"{name} / {who}"] = Ratio(turns["median"], error_of(turns), floor)
            elif who != "ours":
                found[f"{name} / {who}"] = over(ours["seconds"], row["seconds"], floor=floor)
        for work, (ceiling, top) in ceilings.items():
            if work in ours and top is not None:
                found[f"{name} / {ceiling}"] = over(ours["seconds"], top["seconds"], top[work] / ours[work])
        if "peak_memory_gb" in ours:
            found[f"{name} GB of memory"] = Ratio(ours["peak_memory_gb"], 0.0, MEMORY_BAND)
    return found


def failures(result: Result) -> dict[str, str]:
    """Failed cells of ours, by the beginning of the names of their ratios."""
    found: dict[str, str] = {}
    for cell, record in result["cells"].items():
        status, name = record["status"], cell.removesuffix("ours")
        if name == cell:
            continue
        if status.startswith(("failed", "out of memory")):
            found[name] = status.split(":")[0].upper()
        elif status.endswith("has not passed") or (status == "done" and not results.counts(result, record)):
            found[name] = "PARITY FAILED"
    return found


def compare(now: Result, before: Sequence[Result], required: Collection[str] = ()) -> list[Row]:
    """One row per figure of the baseline, and per required one that it lacks.

    Args:
        before: runs of the baseline; none, and only what is required must be there.
        required: names that must have been measured.
    """
    rows = []
    present, failed = ratios(now), failures(now)
    known: dict[str, list[Ratio]] = {}
    for run in before:
        for name, ratio in ratios(run).items():
            known.setdefault(name, []).append(ratio)
    for name in dict.fromkeys([*known, *required]):
        old, new = known.get(name, []), present.get(name)
        values = [ratio.value for ratio in old]
        center = statistics.median(values) if values else None
        if new is None:
            absent = "MISSING" if name in required else "not measured"
            status = next((text for start, text in failed.items() if name.startswith(start)), absent)
            rows.append(Row(name, center, None, 0.0, status))
            continue
        if center is None:
            rows.append(Row(name, None, new.value, 0.0, "ok"))
            continue
        spread = statistics.stdev(values) / center if len(values) > 1 else old[0].error
        band = max(new.floor, WIDTH * math.hypot(spread, new.error))
        change = new.value / center - 1.0
        status = "REGRESSED" if change > band else "faster" if change < -band else "ok"
        rows.append(Row(name, center, new.value, band, status))
    return rows


def compare_run(now: Result, folder: Path = harness.RESULTS, file: Path = FILE) -> Comparison:
    """Compare a run with the baseline of its device.

    Args:
        now: the run.
        folder: of the results.
        file: names the baselines and what is required.

    Raises:
        ValueError: not a full run, or a baseline that is named does not exist or has too few runs.
    """
    if "environment" not in now or now.get("smoke"):
        raise ValueError("The run to compare is not a full run of a benchmark: measure without --smoke.")
    kind = "gpu" if now["environment"]["gpu"] else "cpu"
    # A CPU's ratios are held whatever the CPU is.
    device = harness.result_file(dict(now["environment"])).parent.name if kind == "gpu" else kind
    settings = yaml.safe_load(file.read_text("utf-8"))
    names = (settings.get("baselines") or {}).get(device, [])
    missing = [name for name in names if not (folder / device / name).is_file()]
    if missing or 0 < len(names) < FEWEST_RUNS:
        raise ValueError(
            f"{file.name} names {len(names)} run(s) as the baseline of {device}: it takes {FEWEST_RUNS}, under "
            f"{folder / device}" + (f", where {missing[0]} does not exist." if missing else ".")
        )
    before = [json.loads((folder / device / name).read_text("utf-8")) for name in names]
    required = list(settings["required"][kind])
    if kind == "gpu" and now["environment"]["gpu"].get("count", 1) > 1:
        required += settings["required"]["two_gpus"]
    rows = compare(now, before, required)
    worse, compared = sum(not row.ok for row in rows), sum(row.now is not None for row in rows)
    known = f"{len(names)} runs" if names else "no baseline (commit three runs and name them in budgets.yaml)"
    message = f"baseline of {device}: {known}; {compared} of {len(rows)} figures measured, {worse} regressed or missing"
    return Comparison(message, tuple(rows))


def from_pytest_benchmark(file: Path) -> Result:
    """Rows of the kernels from a file of pytest-benchmark (`--benchmark-json`), in the format of `benchmarks.session`.

    Its quartiles stand for the quantiles at .2 and .8, widened as a normal distribution's. The test that times a call
    has checked its parity before.
    """
    cells: dict[str, Any] = {}
    for entry in json.loads(file.read_text("utf-8")).get("benchmarks", []):
        found = re.search(r"\[(\w+)-(.+)-(forward|backward)-(\w+)\]$", entry["name"])
        if found is None:
            continue
        op, case, direction, contender = found.groups()
        stats = entry["stats"]
        low, high = (stats["median"] + (stats[q] - stats["median"]) * 1.683 / 1.349 for q in ("q1", "q3"))
        seconds = {"q20": low, "median": stats["median"], "q80": high, "rounds": stats["rounds"]}
        row = {"step": f"{op} {direction}", "shape": case, "contender": contender, "seconds": seconds}
        record = {"suite": "kernels", "needs": [], "status": "done", "rows": [row]}
        cells[f"kernels {op} {direction} {case} {contender}"] = record
    return {"cells": cells}
