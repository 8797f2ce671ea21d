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
from typing import Any

import torch
import yaml

from benchmarks import harness

FILE = Path(__file__).with_name("budgets.yaml")
FLOOR, WIDTH = 0.03, 4.0
"""Least relative band, and standard errors that a ratio may be off."""
PASSING = ("ok", "faster", "not measured")
"""What may become of a ratio; a skipped step, or one that the run did not ask for, is not measured."""
MEMORY_BAND = 0.02
"""Relative band of a peak of memory, which the allocator repeats nearly to the byte."""

Result = Mapping[str, Any]


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
    """Every ratio that a result holds, by name. What failed its parity has none."""
    return _kernel_ratios(result) | _policy_ratios(result) | _suite_ratios(result)


def _kernel_ratios(result: Result) -> dict[str, Ratio]:
    """Fused kernels over eager and compiled code, and over a copy of the same bytes."""
    found: dict[str, Ratio] = {}
    for row in result.get("kernels", []):
        seconds = row["seconds"]
        if row["op"] in result.get("parity_failures", {}) or "fused" not in seconds:
            continue
        name = f"kernel {row['op']} {row['case']} {row['direction']}"
        for other in sorted(seconds.keys() - {"fused"}):
            found[f"{name} / {other}"] = over(seconds["fused"], seconds[other])
        if "copy" in result:
            copy = result["copy"]
            found[f"{name} / copy"] = over(seconds["fused"], copy["seconds"], copy["bytes"] / row["bytes"])
    return found


def _suite_ratios(result: Result) -> dict[str, Ratio]:
    """Blocks, decoding and the host's share, over every contender beside them."""
    timings: dict[str, dict[str, Any]] = {}
    for row in result.get("blocks", []):
        if "seconds" in row:
            timings.setdefault(f"block {row['direction']} {row['shape']}", {})[row["contender"]] = row["seconds"]
    for row in result.get("vae", []):
        if row["passed"]:
            timings[f"decode {row['shape']}"] = row["seconds"]
    host = result.get("host", {})
    if host.get("passed"):
        timings["host"] = host["seconds"]
    return {
        f"{name} / {other}": over(seconds["ours"], theirs)
        for name, seconds in timings.items()
        if "ours" in seconds
        for other, theirs in seconds.items()
        if other != "ours"
    }


def _policy_ratios(result: Result) -> dict[str, Ratio]:
    """Ratios of the steps of the full-size transformer, their share of the matrix product's time, and their memory."""
    red = result.get("policy_failures", {})
    cells = {
        name: cell
        for name, cell in result.get("policy_cells", {}).items()
        if cell["status"] == "done" and name.split()[-1] not in red
    }
    found: dict[str, Ratio] = {}
    for name, cell in cells.items():
        step, shape, contender = name.split()
        if contender != "ours":
            continue
        for other in ("P1", "P2", "P2c"):
            # The split and the single pass stand beside the peer's training step.
            for peer in dict.fromkeys((f"{step} {shape} {other}", f"train {shape} {other}")):
                if peer in cells and (peer.startswith(f"{step} ") or step not in ("forward", "rollout", "train")):
                    found[f"policy {name} / {peer}"] = over(cell["seconds"], cells[peer]["seconds"])
        if "matmul" in result:
            product = result["matmul"]
            work = cell["tflop"] * 1e12 / (2 * product["size"] ** 3)
            found[f"policy {name} / matmul"] = over(cell["seconds"], product["seconds"], 1.0 / work)
        if cell.get("peak_memory_gb") is not None:
            found[f"policy {name} GB of memory"] = Ratio(value=cell["peak_memory_gb"], error=0.0, floor=MEMORY_BAND)
    return found


def failures(result: Result) -> dict[str, str]:
    """What failed in a run, by the beginning of the names of its ratios."""
    found = {f"kernel {op} ": "PARITY FAILED" for op in result.get("parity_failures", {})}
    if "ours" in result.get("policy_failures", {}):
        found["policy "] = "PARITY FAILED"
    for name, cell in result.get("policy_cells", {}).items():
        if name.endswith(" ours") and cell["status"].startswith(("failed", "out of memory")):
            found[f"policy {name} "] = cell["status"].split(":")[0].upper()
    for row in result.get("blocks", []):
        if row["contender"] == "ours" and row.get("status", "").startswith("failed"):
            found[f"block {row['direction']} {row['shape']} "] = "FAILED"
    if not result.get("block_parity", {}).get("ours", {}).get("passed", True):
        found["block "] = "PARITY FAILED"
    found |= {f"decode {row['shape']} ": "PARITY FAILED" for row in result.get("vae", []) if not row["passed"]}
    if not result.get("host", {}).get("passed", True):
        found["host "] = "PARITY FAILED"
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


def compare_newest(given: Path | None = None, results: Path = harness.RESULTS, file: Path = FILE) -> Comparison:
    """Compare a run with the baseline of its device.

    Args:
        given: JSON file of the run; None is the newest result of this machine's GPU.
        results: folder of the results.
        file: names the baselines.

    Raises:
        ValueError: the file is no run or a smoke run, or the baseline that the file names does not exist.
    """
    if given is None:
        if not torch.cuda.is_available():
            return Comparison(message="baseline: no GPU here, so no seconds are compared", ok=True)
        folder = harness.result_file(harness.environment(), results).parent
        given = newest(folder)
        if given is None:
            return Comparison(message=f"baseline: no result of {folder.name} yet, nothing to compare", ok=True)
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
    path = results / device / name
    if not path.is_file():
        raise ValueError(f"{file.name} names {name} as the baseline of {device}, but {path} does not exist.")
    if path.resolve() == given.resolve():
        return Comparison(message=f"baseline: {given.name} is the baseline itself, nothing newer to compare", ok=True)
    rows = compare(now, json.loads(path.read_text("utf-8")))
    worse, compared = sum(not row.ok for row in rows), sum(row.now is not None for row in rows)
    message = f"baseline: {given.name} against {name} on {device}: {compared} of {len(rows)} ratios compared, "
    message += f"{worse} regressed or failed"
    return Comparison(message=message, ok=worse == 0, rows=rows)
