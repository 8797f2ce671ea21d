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
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml

from benchmarks import harness, results
from benchmarks.results import Result

FILE = Path(__file__).with_name("budgets.yaml")
FLOOR, WIDTH = 0.03, 4.0
"""Least relative band, and standard errors that a ratio may be off."""
PASSING = ("ok", "faster", "not measured")
"""What may become of a ratio; a skipped step, or one that the run did not ask for, is not measured."""
MEMORY_BAND = 0.02
"""Relative band of a peak of memory, which the allocator repeats nearly to the byte."""

CEILINGS = {"bytes": "copy", "flop": "matmul"}
"""What a row counts -> the ceiling it stands under."""
COMPARED = ("kernels", "transformer", "block", "decode", "host")
"""Suites whose ratios are held; what a disk does is not, nor what CPU memory left room for."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ours over something of the same run; less is better.

    Example: `Ratio(value=0.77, error=0.004)` takes 0.77 of the peer's time, give or take 0.4 %.
    """

    value: float
    error: float
    """Relative standard error."""
    floor: float = FLOOR
    """Least band."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ratio of both runs.

    Example: `Row(name="policy forward B ours / P2", baseline=0.77, now=0.84, band=0.03, status="REGRESSED")`
    """

    name: str
    baseline: float
    now: float | None
    band: float
    """Relative."""
    status: str
    """ok, faster, REGRESSED, or why there is no figure."""

    @property
    def ok(self) -> bool:
        """Whether the guard lets it pass: what a run did not measure passes, what failed in it does not."""
        return self.status in PASSING


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run beside the baseline, or a line that says why there is nothing to compare.

    Example: `Comparison(message="no baseline is committed for nvidia-h100; nothing to compare", ok=True)`
    """

    message: str
    ok: bool
    rows: list[Row] = field(default_factory=list)

    def table(self) -> str:
        """For people: what regressed first."""
        if not self.rows:
            return self.message
        form = "{:60} {:>9} {:>9} {:>8} {:>7}  {}"
        lines = [self.message, form.format("ratio, ours over theirs", "baseline", "now", "change", "band", "")]
        for row in sorted(self.rows, key=lambda row: row.ok):
            now = "-" if row.now is None else f"{row.now:.4f}"
            change = "-" if row.now is None else f"{row.now / row.baseline - 1:+.1%}"
            lines.append(form.format(row.name, f"{row.baseline:.4f}", now, change, f"{row.band:.1%}", row.status))
        return "\n".join(lines)


def standard_error(seconds: Mapping[str, float]) -> float:
    """Relative standard error of the median of one timing, from its quantiles."""
    deviation = (seconds["q80"] - seconds["q20"]) / 1.683
    return 1.2533 * deviation / (seconds["median"] * math.sqrt(seconds["rounds"]))


def over(ours: Mapping[str, float], theirs: Mapping[str, float], scale: float = 1.0) -> Ratio:
    """Ratio of two timings of one run, times a number without an error."""
    error = math.hypot(standard_error(ours), standard_error(theirs))
    return Ratio(value=scale * ours["median"] / theirs["median"], error=error)


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
            found[f"{name} GB of memory"] = Ratio(value=ours["peak_memory_gb"], error=0.0, floor=MEMORY_BAND)
    return found


def failures(result: Result) -> dict[str, str]:
    """What of ours failed in a run, by the beginning of the names of its ratios."""
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
            rows.append(Row(name=name, baseline=old.value, now=None, band=old.floor, status=status))
            continue
        band = max(old.floor, WIDTH * math.hypot(old.error, new.error))
        change = new.value / old.value - 1.0
        status = "REGRESSED" if change > band else "faster" if change < -band else "ok"
        rows.append(Row(name=name, baseline=old.value, now=new.value, band=band, status=status))
    return rows


def device_of(result: Result) -> str:
    """Name of the folder of a result's device."""
    return harness.result_file(dict(result["environment"])).parent.name


def newest(folder: Path) -> Path | None:
    """The newest result in a device's folder; names begin with the date, and the time of writing decides within one."""
    files = sorted(folder.glob("*.json"), key=lambda path: (path.name[:10], path.stat().st_mtime))
    return files[-1] if files else None


def compare_newest(given: Path | None = None, folder: Path = harness.RESULTS, file: Path = FILE) -> Comparison:
    """Compare a run with the baseline of its device.

    Args:
        given: JSON file of the run; None is the newest result of this machine's GPU.
        folder: of the results.
        file: names the baselines.

    Raises:
        ValueError: the file is no run or a smoke run, or the baseline that the file names does not exist.
    """
    if given is None:
        if not torch.cuda.is_available():
            return Comparison(message="baseline: no GPU here, so no seconds are compared", ok=True)
        own = harness.result_file(harness.environment(), folder).parent
        given = newest(own)
        if given is None:
            return Comparison(message=f"baseline: no result of {own.name} yet, nothing to compare", ok=True)
    now = json.loads(given.read_text("utf-8"))
    if "environment" not in now:
        raise ValueError(f"{given} does not say on which device it was made. Give a file that a benchmark wrote.")
    if now.get("smoke"):
        raise ValueError(f"{given} is a smoke run, whose seconds mean nothing. Give the result of a full run.")
    device = device_of(now)
    name = (yaml.safe_load(file.read_text("utf-8")).get("baselines") or {}).get(device)
    if name is None:
        message = f"baseline: none is committed for {device}, nothing to compare; name one in {file.name} (baselines)"
        return Comparison(message=message, ok=True)
    path = folder / device / name
    if not path.is_file():
        raise ValueError(f"{file.name} names {name} as the baseline of {device}, but {path} does not exist.")
    if path.resolve() == given.resolve():
        return Comparison(message=f"baseline: {given.name} is the baseline itself, nothing newer to compare", ok=True)
    rows = compare(now, json.loads(path.read_text("utf-8")))
    worse, compared = sum(not row.ok for row in rows), sum(row.now is not None for row in rows)
    message = f"baseline: {given.name} against {name} on {device}: {compared} of {len(rows)} ratios compared, "
    message += f"{worse} regressed or failed"
    return Comparison(message=message, ok=worse == 0, rows=rows)
