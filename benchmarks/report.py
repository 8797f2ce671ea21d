"""Tables of committed results, and the parts of the documents that are made from them.

    python -m benchmarks report                print the tables of benchmarks/results/*/*.json
    python -m benchmarks report FILE ...       of these files alone
    python -m benchmarks report --write        renew the documents
    python -m benchmarks report --history FILE plot what the guard requires over all runs

A document holds blocks between `<!-- benchmark NAME: begin -->` and `<!-- benchmark NAME: end -->`; `BLOCKS` has the
names, and a test holds the documents to the results. Of the files of one device the newest one that holds a cell
counts. Figures behind a missing or red parity check, and those of smoke runs, are in no table. The block `presets` is
the planner's and needs no result.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import baseline, goals, harness, results
from benchmarks.results import Record, Result
from sage_fast.config.load import load_config
from sage_fast.config.presets import preset_names
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import make_plan
from sage_fast.planning.layout import least_gpus
from sage_fast.planning.text import between

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/performance.md", "benchmarks/README.md")
NO_GPU = "No speed has been measured on a GPU yet.\n"
HEADLINES = ("forward B vs P1", "forward B vs P2", "train B vs P2", "video B: rollout, anchor, train")
GPU_TABLES = {
    "Steps of the full-size transformer": ("transformer",),
    "FSDP2 on one rank": ("sharded",),
    "Attention backends": ("attention",),
    "Kernels": ("kernels",),
}
"""Heading -> suites below it."""


@dataclass(kw_only=True)
class DeviceResults:
    """Newest record of every cell that was measured on one device, and the file it is from.

    Example: `DeviceResults(folder="nvidia-h100", cells={"decode B ours": {...}}, files={...})`
    """

    folder: str
    cells: dict[str, Record] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Cell -> file."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> environment it was made in."""

    @property
    def result(self) -> Result:
        """All files as one."""
        return {"cells": self.cells, "smoke": False}

    @property
    def is_gpu(self) -> bool:
        return any(environment["gpu"] for environment in self.environments.values())

    @property
    def name(self) -> str:
        newest = self.environments[max(self.environments)]
        if newest["gpu"]:
            return str(newest["gpu"]["name"])
        cpu = newest["cpu"]
        return f"CPU ({cpu['model']}, {cpu['torch_threads']} thread{'s' if cpu['torch_threads'] > 1 else ''})"

    def source(self, suite: str) -> str:
        """Device and file of the newest figures of a suite, as a line."""
        file = max(file for cell, file in self.files.items() if self.cells[cell]["suite"] == suite)
        environment = self.environments[file]
        commit, torch = (environment["commit"] or "no commit")[:9], environment["packages"].get("torch", "?")
        return f"{self.name}, torch {torch}, commit {commit}: `benchmarks/results/{self.folder}/{file}`"


Results = list[DeviceResults]


def read_results(files: Iterable[Path]) -> Results:
    """Read result files, oldest first by name.

    Raises:
        ValueError: a file that does not hold a benchmark's result.
    """
    devices: dict[str, DeviceResults] = {}
    for file in sorted(files, key=lambda path: (path.parent.name, path.name)):
        try:
            content = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(content, dict) or not {"environment", "cells"} <= content.keys():
            raise ValueError(f'{file} has no "environment" and "cells": not a result of `python -m benchmarks`.')
        if content.get("smoke"):
            continue
        device = devices.setdefault(file.parent.name, DeviceResults(folder=file.parent.name))
        device.environments[file.name] = content["environment"]
        device.cells |= content["cells"]
        device.files |= dict.fromkeys(content["cells"], file.name)
    return list(devices.values())


def committed_files() -> list[Path]:
    """Every result there is."""
    return sorted(harness.RESULTS.glob("*/*.json"))


# ------------------------------------------------------------------------------------------ tables


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without its empty columns; the first one stays."""
    body = list(rows)
    kept = [column for column in range(len(head)) if column == 0 or any(row[column] for row in body)]
    lines = [[head[column] for column in kept], *([row[column] for column in kept] for row in body)]
    rendered = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([rendered[0], "|" + "---|" * len(kept), *rendered[1:]]) + "\n"


def suite_block(found: Results, *, suites: Sequence[str]) -> str:
    """Every timing of some suites, a table per device."""
    parts = []
    for device in found:
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
    return "\n".join(parts) or "Not measured yet.\n"


def gpu_block(found: Results) -> str:
    """Goals and timings of every GPU, or one sentence where there is no result of any."""
    gpus = [device for device in found if device.is_gpu]
    if not gpus:
        return NO_GPU
    columns = [goals.outcomes(device.result) for device in gpus]
    head = ("figure", "target", "floor", *(device.name for device in gpus))
    rows = [
        [same[0].name, same[0].target or "–", same[0].floor or "–", *(outcome.text for outcome in same)]
        for same in zip(*columns, strict=True)
    ]
    tables = [f"### {title}\n\n{suite_block(gpus, suites=suites)}" for title, suites in GPU_TABLES.items()]
    return "\n".join([markdown(head, rows), *tables])


def headline_block(found: Results) -> str:
    """A few lines for the front page."""
    lines = []
    for device in found:
        measured = {goal.name: goal.measured for goal in goals.outcomes(device.result) if goal.measured}
        shown = [f"{name}: {measured[name]}" for name in HEADLINES if name in measured]
        if device.is_gpu and shown:
            lines.append(f"* {device.name}: {'; '.join(shown)}\n")
    return "".join(lines) or NO_GPU


def presets_block(found: Results) -> str:
    """The plan of every preset of the real model on H100s, without weights on this machine."""
    phases = ("rollout", "anchor", "update")
    rows = []
    for name in (name for name in preset_names() if name.startswith("hv15_")):
        config = load_config(name)
        plan = make_plan(config, DEVICES["h100"], gpus=least_gpus(config.distributed, config.rollout), sizes={})
        seconds = {phase.name: phase.predicted for phase in plan.phases}
        row = [
            f"[`{name}`](../configs/{name}.yaml)",
            f"{plan.layout.replicate} x {plan.layout.shard} x {plan.layout.sp}",
            *(f"{seconds[phase]:.1f}" for phase in phases),
            between(plan.seconds_per_video, plan.slowest, "{:.1f}".format),
            between(plan.videos_per_gpu_hour / plan.slowest, plan.slowest, "{:.1f}".format),
            f"{plan.memory.peak / 1e9:.1f}, {plan.memory.peak_phase}",
        ]
        rows.append(row)
    head = ("preset", "replicas x shards x sp", *phases, "s per video", "videos per GPU-hour", "peak GB")
    return markdown(head, rows)


CARDS = (
    ("24 GB", "rtx4090", None, "hv15_quick_lora_24gb"),
    ("40 GB", "a100", 40.0, "hv15_quick_lora_1gpu_nft"),
    ("48 GB", "l40s", None, "hv15_quick_lora_1gpu_nft"),
    ("80 GB", "h100", None, "hv15_quick_lora_1gpu"),
    ("8 x 80 GB", "h100", None, "hv15_480p_lora_8gpu_fast"),
)
"""Memory, device, 1e9 bytes where they are fewer than the device's, and a preset that fits."""


def cards_block(found: Results) -> str:
    """Presets that fit some cards, by the plan."""
    rows = []
    for memory, device, limit, preset in CARDS:
        config = load_config(preset)
        gpus = least_gpus(config.distributed, config.rollout)
        plan = make_plan(config, DEVICES[device], gpus=gpus, memory_gb=limit, sizes={})
        assert plan.fits, preset
        videos = config.rollout.batch_size * plan.layout.data_parallel
        minutes = between(plan.seconds_per_rollout / 60, plan.slowest, "{:.1f}".format)
        frames = f"{config.video.num_frames} frames of {config.video.height}x{config.video.width}"
        card = plan.device.name.removesuffix(" SXM").removesuffix(" SXM 80 GB")
        row = [f"{memory} ({card})", f"`{preset}`", f"{plan.memory.peak / 1e9:.1f} GB"]
        rows.append([*row, f"{videos} videos, {frames}: {minutes} min"])
    return markdown(("GPU", "preset", "peak (predicted)", "update (predicted)"), rows)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "cards": cards_block,
    "headline": headline_block,
    "gpu": gpu_block,
    "cpu": partial(suite_block, suites=("decode",)),
    "presets": presets_block,
}
"""Name in a document -> its Markdown."""


def document(text: str, found: Results) -> str:
    """A document with its blocks rebuilt from the results.

    Raises:
        ValueError: an unknown block, or one that does not end.
    """
    block = re.compile(r"(<!-- benchmark ([\w-]+): begin -->\n).*?(<!-- benchmark \2: end -->)", re.S)
    if text.count("<!-- benchmark ") != 2 * len(block.findall(text)):
        raise ValueError("a benchmark block does not end, or does not begin, or lies within another one")

    def renewed(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ValueError(f"no benchmark block is named {match[2]}; there are {', '.join(BLOCKS)}")
        return match[1] + BLOCKS[match[2]](found) + match[3]

    return block.sub(renewed, text)


# ------------------------------------------------------------------------------------------ the command


def plot_history(files: Iterable[Path], target: Path) -> None:
    """Ratios that the guard requires over the committed runs of every device, oldest first, as one plot."""
    from matplotlib.figure import Figure

    required = {
        name for names in yaml.safe_load(baseline.FILE.read_text("utf-8"))["required"].values() for name in names
    }
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    runs = sorted(files, key=lambda path: path.name)
    for device in sorted({path.parent.name for path in runs}):
        lines: dict[str, list[tuple[str, float]]] = {}
        for path in (path for path in runs if path.parent.name == device):
            for name, ratio in baseline.ratios(json.loads(path.read_text("utf-8"))).items():
                if name in required:
                    lines.setdefault(name, []).append((path.stem[:20], ratio.value))
        for name, points in lines.items():
            first = points[0][1]
            days, values = zip(*points, strict=True)
            axes.plot(days, [value / first for value in values], marker="o", label=f"{device}: {name}")
    axes.axhline(1.0, color="gray", linewidth=0.5)
    axes.set_ylabel("figure over that of the first run (less is better)")
    axes.tick_params(axis="x", labelrotation=30)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure.savefig(target)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 2 where a file or a document is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files; default benchmarks/results/*/*.json")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="renew the documents, from all committed results")
    mode.add_argument("--history", type=Path, metavar="FILE", help="plot the guard's figures over all runs")
    options = parser.parse_args(argv)
    files = committed_files() if options.write or not options.files else options.files
    try:
        found = read_results(files)
        if options.history is not None:
            plot_history(files, options.history)
        elif options.write:
            for name in DOCUMENTS:
                text = (ROOT / name).read_text("utf-8")
                (ROOT / name).write_text(document(text, found), "utf-8")
        else:
            for name, block in BLOCKS.items():
                print(f"## {name}\n\n{block(found)}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
