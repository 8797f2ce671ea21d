"""Tables and plots of committed results, and the parts of the documents that are made from them.

    python -m benchmarks report                print the tables of benchmarks/results/*/*.json
    python -m benchmarks report FILE ...       of these files alone
    python -m benchmarks report --write        renew the documents, and the plots beside the results
    python -m benchmarks report --check        exit status 1 if a document is not what the results say

A document holds blocks between `<!-- benchmark NAME: begin -->` and `<!-- benchmark NAME: end -->`; `BLOCKS` has the
names. Of the files of one device the newest one that holds a cell counts. Figures behind a missing or red parity check,
and those of smoke runs, are in no table.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import goals, harness, results
from benchmarks.results import Record, Result, Rows
from benchmarks.workload import NUM_STEPS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/performance.md", "benchmarks/README.md")
NO_GPU = "Not measured yet: no result of a GPU is committed.\n"
HEADLINES = ("forward B vs P1", "forward B vs P2", "train step B vs P2", "video B: rollout, anchor, train")


@dataclass(kw_only=True)
class DeviceResults:
    """What was measured on one device: the newest record of every cell, and the file that it is from.

    Example: `DeviceResults(folder="nvidia-h100", cells={"block forward B ours": {...}}, files={...})`
    """

    folder: str
    cells: dict[str, Record] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Cell -> file."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> what it was made with."""

    @property
    def result(self) -> Result:
        """As if it were one file."""
        return {"cells": self.cells, "smoke": False}

    @property
    def is_gpu(self) -> bool:
        return any(environment["gpu"] for environment in self.environments.values())

    @property
    def name(self) -> str:
        """As people call it."""
        newest = self.environments[max(self.environments)]
        if newest["gpu"]:
            return str(newest["gpu"]["name"])
        cpu = newest["cpu"]
        return f"CPU ({cpu['model']}, {cpu['torch_threads']} thread{'s' if cpu['torch_threads'] > 1 else ''})"

    def source(self, suite: str) -> str:
        """Which device and file the newest figures of a suite are from, as a line."""
        file = max(file for cell, file in self.files.items() if self.cells[cell]["suite"] == suite)
        environment = self.environments[file]
        commit, torch = (environment["commit"] or "no commit")[:9], environment["packages"].get("torch", "?")
        return f"{self.name}, torch {torch}, commit {commit}: `benchmarks/results/{self.folder}/{file}`"


@dataclass(kw_only=True)
class Results:
    """All that was read. predicted: contents of the files that hold predictions, by stem."""

    devices: list[DeviceResults]
    predicted: dict[str, dict[str, Any]]


def read_results(files: Iterable[Path]) -> Results:
    """Read result files, oldest first by name.

    Raises:
        ValueError: a file that is no result of a benchmark.
    """
    devices: dict[str, DeviceResults] = {}
    predicted: dict[str, dict[str, Any]] = {}
    for file in sorted(files, key=lambda path: (path.parent.name, path.name)):
        try:
            content = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        if isinstance(content, dict) and content.get("predicted"):
            predicted[file.stem] = content
            continue
        if not isinstance(content, dict) or not {"environment", "cells"} <= content.keys():
            raise ValueError(f'{file} has no "environment" and "cells", so it is no result of `python -m benchmarks`.')
        if content.get("smoke"):
            continue
        device = devices.setdefault(file.parent.name, DeviceResults(folder=file.parent.name))
        device.environments[file.name] = content["environment"]
        device.cells |= content["cells"]
        device.files |= dict.fromkeys(content["cells"], file.name)
    return Results(devices=list(devices.values()), predicted=predicted)


def committed_files(folder: Path = harness.RESULTS) -> list[Path]:
    """Every result there is."""
    return sorted(folder.glob("*/*.json"))


# ------------------------------------------------------------------------------------------ tables


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without its empty columns; the first one stays."""
    body = list(rows)
    kept = [column for column in range(len(head)) if column == 0 or any(row[column] for row in body)]
    lines = [[head[column] for column in kept], *([row[column] for column in kept] for row in body)]
    rendered = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([rendered[0], "|" + "---|" * len(kept), *rendered[1:]]) + "\n"


def suite_block(found: Results, *, suites: Sequence[str], gpu: bool = True) -> str:
    """Every timing of some suites, a table per device.

    Args:
        gpu: whether figures of a CPU are left out.
    """
    parts = []
    for device in found.devices:
        if gpu and not device.is_gpu:
            continue
        rows = results.rows(device.result)
        body = [
            [results.name_of(suite if len(suites) > 1 else "", step, shape), who, *results.cells_of(row, contenders)]
            for (suite, step, shape), contenders in rows.items()
            if suite in suites
            for who, row in contenders.items()
        ]
        if body:
            table = markdown(("step", "contender", *results.HEAD), body)
            parts.append(f"{device.source(next(s for s, *_ in rows if s in suites))}\n\n{table}")
    return "\n".join(parts) or (NO_GPU if gpu else "Not measured yet.\n")


def devices_block(found: Results) -> str:
    """What was run where."""
    rows = []
    for device in found.devices:
        kind = "GPU" if device.is_gpu else "CPU"
        for file, made_with in sorted(device.environments.items()):
            rows.append((device.name, kind, (made_with["commit"] or "none")[:9], f"`{device.folder}/{file}`"))
    return markdown(("device", "kind", "commit", "file"), rows) if rows else "No result is committed yet.\n"


def targets_block(found: Results) -> str:
    """Target, floor and measured value of every goal, a column per GPU."""
    gpus = [device for device in found.devices if device.is_gpu]
    columns = [goals.outcomes(device.result) for device in gpus] or [goals.outcomes({"cells": {}})]
    head = ("figure", "target", "floor", *([device.name for device in gpus] or ["measured"]))
    rows = [
        [same[0].name, same[0].target or "–", same[0].floor or "–", *(outcome.text for outcome in same)]
        for same in zip(*columns, strict=True)
    ]
    return markdown(head, rows)


def levers_block(found: Results, *, kind: str) -> str:
    """Levers that leave the gradient what it is, those that leave its mean, or those that change the mathematics."""
    if "levers" not in found.predicted:
        return "Not predicted yet: `python -m benchmarks levers`.\n"
    rows = []
    for row in found.predicted["levers"]["levers"]:
        before, after = row["without"], row["with"]
        seconds = f"{before['seconds']:.0f} → {after['seconds']:.0f}"
        memory = f"{before['peak_gb']:.0f} → {after['peak_gb']:.0f}"
        if row["kind"] == kind:
            cells = (f"`{row['option']}`", f"{row['factor']:.2f}x", seconds, memory)
            rows.append((row["name"], *cells, row["note"]))
    return markdown(("lever", "option", "factor", "seconds per video", "peak GB", ""), rows)


def recipes_block(found: Results) -> str:
    """Predicted seconds of a video by phase."""
    if "levers" not in found.predicted:
        return "Not predicted yet: `python -m benchmarks levers`.\n"
    predicted = found.predicted["levers"]
    phases = list(next(iter(predicted["recipes"].values()))["phases"])
    rows = []
    for file, plan in predicted["recipes"].items():
        total = sum(plan["phases"].values())
        cells = [f"{plan['phases'][phase]:.1f}" for phase in phases]
        rows.append((f"`{file}`", *cells, f"{total:.0f}", f"{3600 / total:.1f}", f"{plan['peak_gb']:.0f}"))
    head = ("recipe", *phases, "seconds per video", "videos per hour", "peak GB")
    return f"{predicted['device']}: {predicted['source']}.\n\n{markdown(head, rows)}"


def headline_block(found: Results) -> str:
    """A few lines for the front page."""
    lines = []
    for device in found.devices:
        measured = {goal.name: goal.measured for goal in goals.outcomes(device.result) if goal.measured}
        shown = [f"{name}: {measured[name]}" for name in HEADLINES if name in measured]
        if device.is_gpu and shown:
            lines.append(f"* {device.name}: {'; '.join(shown)}\n")
    return "".join(lines) or "No speed has been measured on a GPU yet.\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": headline_block,
    "devices": devices_block,
    "targets": targets_block,
    "kernels": partial(suite_block, suites=("kernels",)),
    "attention": partial(suite_block, suites=("attention",)),
    "block": partial(suite_block, suites=("block",)),
    "steps": partial(suite_block, suites=("transformer",)),
    "sharded": partial(suite_block, suites=("sharded",)),
    "decode": partial(suite_block, suites=("decode",), gpu=False),
    "toy": partial(suite_block, suites=("toy",), gpu=False),
    "costs": partial(suite_block, suites=("checkpoint", "host"), gpu=False),
    "recipes": recipes_block,
    "levers-exact": partial(levers_block, kind="exact"),
    "levers-unbiased": partial(levers_block, kind="unbiased"),
    "levers-other": partial(levers_block, kind="other"),
}
"""Name in a document -> its Markdown."""


def renewed(text: str, kind: str, make: Callable[[str], str]) -> str:
    """A document with the blocks of a kind (`benchmark`, `plan`) rebuilt.

    Raises:
        ValueError: a block that does not end.
    """
    block = re.compile(rf"(<!-- {kind} ([\w-]+): begin -->\n).*?(<!-- {kind} \2: end -->)", re.S)
    if text.count(f"<!-- {kind} ") != 2 * len(block.findall(text)):
        raise ValueError(f"a block of kind {kind} does not end, or does not begin, or lies within another one")
    return block.sub(lambda m: m[1] + make(m[2]) + m[3], text)


def document(text: str, found: Results) -> str:
    """A document as the results have it.

    Raises:
        ValueError: an unknown block, or one that does not end.
    """

    def make(name: str) -> str:
        if name not in BLOCKS:
            raise ValueError(f"no benchmark block is named {name}; there are {', '.join(BLOCKS)}")
        return BLOCKS[name](found)

    return renewed(text, "benchmark", make)


# ------------------------------------------------------------------------------------------ plots


def video_bars(rows: Rows) -> dict[str, dict[str, float]]:
    """Bar -> part -> seconds of a video: each contender's transformer, and ours with decoding."""
    recipe = {"rollout": "rollout", "anchor": "rollout", "update": "train"}
    ways = {
        "P2": ("P2", recipe),
        "ours": ("ours", recipe),
        "ours, single pass": ("ours", {"rollout with gradient": "single_pass"}),
    }
    bars: dict[str, dict[str, float]] = {}
    for shape in "AB":
        for label, (contender, parts) in ways.items():
            bar = {part: results.median(rows, (goals.SUITE, step, shape), contender) for part, step in parts.items()}
            if None in bar.values():
                continue
            bars[f"{shape}, {label}"] = {part: NUM_STEPS * seconds for part, seconds in bar.items() if seconds}
            decode = results.median(rows, ("decode", "", shape), "stock" if contender == "P2" else "ours")
            if decode is not None:
                bars[f"{shape}, {label}"]["decode"] = decode
    return bars


def draw_bars(bars: Mapping[str, Mapping[str, float]], path: Path, *, title: str, label: str) -> bool:
    """Stacked bars, name -> part -> seconds; False where there are none."""
    if not bars:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.5 * len(bars)))
    axis = figure.subplots()
    starts = dict.fromkeys(bars, 0.0)
    for part in dict.fromkeys(part for bar in bars.values() for part in bar):
        heights = [bar.get(part, 0.0) for bar in bars.values()]
        axis.barh(list(bars), heights, left=[starts[name] for name in bars], label=part)
        for name, height in zip(bars, heights, strict=True):
            starts[name] += height
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.set_title(title)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axis.margins(x=0.02)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date or version in it, the same figures give the same file.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    return True


def plots(found: Results, folder: Path) -> list[Path]:
    """Draw stacked_time.png of every device that has the figures, and of the predicted times."""
    drawn = []
    for device in found.devices:
        path, bars = folder / device.folder / "stacked_time.png", video_bars(results.rows(device.result))
        label = f"seconds per video ({NUM_STEPS} steps, guidance, measured medians)"
        drawn += [path] if draw_bars(bars, path, title=device.name, label=label) else []
    if "levers" in found.predicted:
        predicted, path = found.predicted["levers"], folder / "predicted" / "stacked_time.png"
        bars = {Path(file).stem: plan["phases"] for file, plan in predicted["recipes"].items()}
        draw_bars(bars, path, title=f"{predicted['device']}: predicted, not measured", label="seconds per video")
        drawn.append(path)
    return drawn


# ------------------------------------------------------------------------------------------ the command


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; with --check returns 1 when a document is stale."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files; default benchmarks/results/*/*.json")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="renew the documents and the plots")
    mode.add_argument("--check", action="store_true", help="exit status 1 if a document is stale")
    options = parser.parse_args(argv)
    if options.files and (options.write or options.check):
        parser.error("documents are made from all committed results: leave the files out")
    try:
        found = read_results(options.files or committed_files())
        if not (options.write or options.check):
            for name, block in BLOCKS.items():
                print(f"## {name}\n\n{block(found)}")
            return 0
        return _documents(found, write=options.write)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _documents(found: Results, *, write: bool) -> int:
    texts = {name: (ROOT / name).read_text("utf-8") for name in DOCUMENTS}
    stale = {name: new for name, text in texts.items() if (new := document(text, found)) != text}
    if write:
        for name, text in stale.items():
            (ROOT / name).write_text(text, "utf-8")
        for item in [*stale, *plots(found, harness.RESULTS)]:
            print(f"written {item}")
        return 0
    for name in stale:
        print(f"{name} is not what benchmarks/results says: python -m benchmarks report --write", file=sys.stderr)
    return 1 if stale else 0
