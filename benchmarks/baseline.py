"""A run on a GPU against the committed baseline of the same device, as ratios within a run.

Seconds differ between two days of one machine; ours over the peer's of the same run differ less. Every pair of timings
that a result holds becomes one ratio, ours over theirs, and a ratio of a ceiling for what has one. A ratio may exceed
the baseline's by its noise band:

    band = max(FLOOR, WIDTH * sqrt(sum of s^2 over the four timings)),   s = 1.2533 (q80 - q20) / (1.683 median sqrt(n))

s is the relative standard error of a median of n rounds whose spread is taken from the raw quantiles: q80 - q20 is
1.683 standard deviations of a normal distribution, and a median's error is 1.2533 times a mean's. FLOOR covers what the
rounds of one process cannot show, such as another placement in memory.

The baseline of a device is a file under benchmarks/results/<device>/, named in benchmarks/budgets.yaml.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from benchmarks import harness, results
from benchmarks.results import Result

FILE = Path(__file__).with_name("budgets.yaml")
FLOOR, WIDTH = 0.03, 4.0
"""Least relative band, and standard errors that a ratio may be off."""
PASSING = ("ok", "faster", "not measured")
"""Statuses of a ratio that pass; a skipped step, or one that the run did not ask for, is not measured."""
MEMORY_BAND = 0.02
"""Relative band of a peak of memory, which the allocator repeats nearly to the byte."""
CEILINGS = {"bytes": "copy", "flop": "matmul"}
"""Work of a row -> the ceiling it stands under."""
COMPARED = ("kernels", "transformer", "block", "decode")
"""Suites whose ratios are held; how many layers fit into CPU memory differs between machines."""


class Ratio(NamedTuple):
    """Ours over something of the same run, its relative standard error and its least band; less is better.

    Example: `Ratio(0.77, 0.004)` takes 0.77 of the peer's time, give or take 0.4 %.
    """

    value: float
    error: float
    floor: float = FLOOR


class Row(NamedTuple):
    """One ratio of both runs; `now` is None, and `status` the reason, where there is no figure.

    Example: `Row("transformer forward B / P2", baseline=0.77, now=0.84, band=0.03, status="REGRESSED")`
    """

    name: str
    baseline: float
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

    def table(self) -> str:
        """Regressions first."""
        if not self.rows:
            return self.message
        form = "{:60} {:>9} {:>9} {:>8} {:>7}  {}"
        lines = [self.message, form.format("ratio, ours over theirs", "baseline", "now", "change", "band", "")]
        for row in sorted(self.rows, key=lambda row: row.ok):
            now = "-" if row.now is None else f"{row.now:.4f}"
            change = "-" if row.now is None else f"{row.now / row.baseline - 1:+.1%}"
            lines.append(form.format(row.name, f"{row.baseline:.4f}", now, change, f"{row.band:.1%}", row.status))
        return "\n".join(lines)


def over(ours: Mapping[str, float], theirs: Mapping[str, float], scale: float = 1.0) -> Ratio:
    """Ratio of two timings of one run, times a number without an error."""

    def error(seconds: Mapping[str, float]) -> float:
        deviation = (seconds["q80"] - seconds["q20"]) / 1.683
        return 1.2533 * deviation / (seconds["median"] * math.sqrt(seconds["rounds"]))

    return Ratio(scale * ours["median"] / theirs["median"], math.hypot(error(ours), error(theirs)))


def ratios(result: Result) -> dict[str, Ratio]:
    """Every ratio that a result holds, by name: ours over each contender of the same step and shape and over the
    device's ceiling, and ours of memory. What failed its parity has none.
    """
    found: dict[str, Ratio] = {}
    rows = results.rows(result)
    ceilings = {work: (name, results.ceiling_row(rows, name)) for work, name in CEILINGS.items()}
    for (suite, step, shape), contenders in rows.items():
        ours = contenders.get("ours")
        if suite not in COMPARED or ours is None:
            continue
        name = results.name_of(suite, step, shape)
        # The split gradient and the single pass stand beside the peers' training step.
        beside = rows.get((suite, "train", shape), {}) if step in ("train_split", "single_pass") else {}
        peers = {who: row for who, row in (beside | contenders).items() if who != "ours"}
        found |= {f"{name} / {who}": over(ours["seconds"], row["seconds"]) for who, row in peers.items()}
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


def compare(now: Result, before: Result) -> list[Row]:
    """One row per ratio of the baseline."""
    rows = []
    present, failed = ratios(now), failures(now)
    for name, old in ratios(before).items():
        new = present.get(name)
        if new is None:
            status = next((text for start, text in failed.items() if name.startswith(start)), "not measured")
            rows.append(Row(name, old.value, None, old.floor, status))
            continue
        band = max(old.floor, WIDTH * math.hypot(old.error, new.error))
        change = new.value / old.value - 1.0
        status = "REGRESSED" if change > band else "faster" if change < -band else "ok"
        rows.append(Row(name, old.value, new.value, band, status))
    return rows


def compare_newest(given: Path | None = None, folder: Path = harness.RESULTS, file: Path = FILE) -> Comparison:
    """Compare a run with the baseline of its device.

    Args:
        given: JSON file of the run; None is the newest result of this machine's GPU.
        folder: of the results.
        file: names the baselines.

    Raises:
        ValueError: the file does not hold a full run, or the baseline that is named does not exist.
    """
    if given is None:
        if not torch.cuda.is_available():
            return Comparison("baseline: no GPU here, so no seconds are compared")
        own = harness.result_file(harness.environment(), folder).parent
        # Names begin with the date; the time of writing decides within one.
        files = sorted(own.glob("*.json"), key=lambda path: (path.name[:10], path.stat().st_mtime))
        if not files:
            return Comparison(f"baseline: no result of {own.name} yet, nothing to compare")
        given = files[-1]
    now = json.loads(given.read_text("utf-8"))
    if "environment" not in now or now.get("smoke"):
        raise ValueError(f"{given} is not a full run of a benchmark. Give a file written without --smoke.")
    device = harness.result_file(dict(now["environment"])).parent.name
    name = (yaml.safe_load(file.read_text("utf-8")).get("baselines") or {}).get(device)
    if name is None:
        return Comparison(f"baseline: none is committed for {device}; name one in {file.name} (baselines)")
    path = folder / device / name
    if not path.is_file():
        raise ValueError(f"{file.name} names {name} as the baseline of {device}, but {path} does not exist.")
    if path.resolve() == given.resolve():
        return Comparison(f"baseline: {given.name} is the baseline itself, nothing newer to compare")
    rows = compare(now, json.loads(path.read_text("utf-8")))
    worse, compared = sum(not row.ok for row in rows), sum(row.now is not None for row in rows)
    message = f"baseline: {given.name} against {name} on {device}: {compared} of {len(rows)} ratios compared, "
    return Comparison(f"{message}{worse} regressed or failed", tuple(rows))
