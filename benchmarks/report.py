"""Tables of committed results, and the parts of the documents that are made from them.

    python -m benchmarks report                print the tables of benchmarks/results/*/*.json
    python -m benchmarks report FILE ...       of these files alone
    python -m benchmarks report --write        renew the documents

A document holds blocks between `<!-- benchmark NAME: begin -->` and `<!-- benchmark
NAME: end -->`; `BLOCKS` has the names, and a test holds the documents to the results.
Of the files of one device the newest one that holds a cell counts. Figures behind a
missing or red parity check, and those of smoke runs, are in no table. The block
`presets` is the planner's, and `recipes` the file's of published recipes; they need no
result.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, predicted, recipes, results
from benchmarks.results import Result
from benchmarks.suites.iteration import STEP
from benchmarks.suites.transformer import LAYERS
from sage_fast.config.load import load_config, preset_evidence, preset_names
from sage_fast.planning.devices import DEVICES, key_of
from sage_fast.planning.estimate import Plan, make_plan
from sage_fast.planning.work import least_gpus

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "docs/how_to/which_card.md",
    "docs/performance.md",
    "docs/real_model.md",
    "benchmarks/README.md",
)
NO_GPU = "No speed has been measured on a GPU yet.\n"
HEADLINES = {
    "transformer forward B / P1": "times as fast as diffusers as shipped, forward",
    "transformer forward B / P2": (
        "times as fast as diffusers without padding and with the same attention, "
        "forward"
    ),
    "transformer train B / P2": "times as fast as the latter, in a training step",
}
"""Ratio -> what it is."""
RATIO = results.HEAD.index("over ours")
OFF = 0.2
"""Share of a prediction by which it may miss what was measured before the page says so.
"""
ITERATION = f"iteration {STEP} B seconds per video"
GPU_TABLES = {
    "One iteration, and decoding a video": ("iteration", "decode"),
    f"Steps of {LAYERS} layers of the transformer": ("transformer",),
    "Attention backends": ("attention",),
    "Ceilings": ("ceilings",),
}
"""Heading -> suites below it."""


@dataclass(kw_only=True)
class DeviceResults:
    """Newest record of every cell that was measured on one device, and the file it is
    from.

    Example: `DeviceResults(folder="nvidia-h100", result={"cells": {"decode B ours":
    {...}}, ...}, files={...})`
    """

    folder: str
    result: Result = field(default_factory=lambda: {"cells": {}, "smoke": False})
    """All files as one."""
    files: dict[str, str] = field(default_factory=dict)
    """Cell -> file."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> environment it was made in."""

    @property
    def newest(self) -> dict[str, Any]:
        """The newest environment."""
        return self.environments[max(self.environments)]

    @property
    def name(self) -> str:
        if self.newest["gpu"]:
            return str(self.newest["gpu"]["name"])
        cpu = self.newest["cpu"]
        threads = cpu["torch_threads"]
        return f"CPU ({cpu['model']}, {threads} thread{'s' if threads > 1 else ''})"

    @property
    def planned(self) -> str | None:
        """The planner's name of the GPU; None where it has none."""
        gpu = self.newest["gpu"]
        return key_of(gpu["name"]) if gpu else None

    @property
    def over_plan(self) -> dict[str, float]:
        """Measured seconds over those of the plan, of every timing that it predicts."""
        return {
            results.name_of(*step, who): row["seconds"]["median"] / row["predicted"]
            for step, contenders in results.rows(self.result).items()
            for who, row in contenders.items()
            if "predicted" in row
        }

    def source(self, suite: str) -> str:
        """Device and file of the newest figures of a suite, as a line."""
        cells = self.result["cells"]
        file = max(
            file
            for cell, file in self.files.items()
            if cells[cell]["suite"] == suite and "rows" in cells[cell]
        )
        environment = self.environments[file]
        commit = (environment["commit"] or "no commit")[:9]
        torch = environment["packages"].get("torch", "?")
        return (
            f"{self.name}, torch {torch}, commit {commit}: "
            f"`benchmarks/results/{self.folder}/{file}`"
        )


Results = list[DeviceResults]


def read_results(files: Iterable[Path]) -> Results:
    """Read result files, oldest first by name.

    Raises:
        ValueError: a file that does not hold a benchmark's result.
    """
    devices: dict[str, DeviceResults] = {}
    for file in sorted(files, key=lambda path: (path.parent.name, path.name)):
        content = results.read_result(file)
        if content.get("smoke"):
            continue
        device = devices.setdefault(
            file.parent.name, DeviceResults(folder=file.parent.name)
        )
        device.environments[file.name] = content["environment"]
        device.result["cells"] |= content["cells"]
        device.files |= dict.fromkeys(content["cells"], file.name)
    for device in devices.values():
        if device.planned is None:
            continue
        for (suite, _, _), contenders in results.rows(device.result).items():
            for row in contenders.values():
                if seconds := predicted.seconds(suite, row, device.planned):
                    row["predicted"] = seconds
    return list(devices.values())


def committed_files() -> list[Path]:
    """Every result there is."""
    return sorted(harness.RESULTS.glob("*/*.json"))


# --------------------------------------------------------------------------------------
# tables


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without its empty columns; the first one stays."""
    body = list(rows)
    kept = [
        column
        for column in range(len(head))
        if column == 0 or any(row[column] for row in body)
    ]
    text = ""
    for row in (head, *body):
        text += "| " + " | ".join(row[column] for column in kept) + " |\n"
        if row is head:
            text += "|" + "---|" * len(kept) + "\n"
    return text


def suite_block(found: Results, *, suites: Sequence[str], by_step: bool = False) -> str:
    """Every timing of some suites, a table per device.

    by_step: one row for a step, ours, with what the others take over it; a row for each
    where ours is missing.
    """
    parts = []
    for device in found:
        measured = [
            item for item in results.rows(device.result).items() if item[0][0] in suites
        ]
        body = []
        for (suite, step, shape), contenders in measured:
            name = results.name_of(suite if len(suites) > 1 else "", step, shape)
            rows = {
                who: results.cells_of(row, contenders)
                for who, row in contenders.items()
            }
            if by_step and "ours" in rows:
                ours = rows["ours"]
                ours[RATIO] = ", ".join(
                    f"{who} {cells[RATIO]}"
                    for who, cells in rows.items()
                    if cells[RATIO]
                )
                rows = {"": ours}
            body += [[name, who, *cells] for who, cells in rows.items()]
        if body:
            table = markdown(("step", "contender", *results.HEAD), body)
            parts.append(f"{device.source(measured[0][0][0])}\n\n{table}")
    return "\n".join(parts) or "Not measured yet.\n"


def gpus_of(found: Results) -> Results:
    """The devices that are GPUs."""
    return [device for device in found if device.newest["gpu"]]


def gpu_block(found: Results) -> str:
    """Timings of every GPU, or one sentence where there is no result of any."""
    if not (gpus := gpus_of(found)):
        return NO_GPU
    tables = [
        f"### {title}\n\n{suite_block(gpus, suites=suites, by_step=True)}"
        for title, suites in GPU_TABLES.items()
    ]
    return "\n".join([*(off_plan(device) for device in gpus), *tables])


def off_plan(device: DeviceResults) -> str:
    """A sentence on the figures that the plan misses."""
    missed = [
        f"{name} {ratio:.2f}"
        for name, ratio in device.over_plan.items()
        if abs(ratio - 1) > OFF
    ]
    said = "the plan is within a fifth of every figure that it predicts."
    if missed:
        said = (
            "**The plan is off by more than a fifth**, measured over predicted: "
            f"{', '.join(missed)}."
        )
    return f"{device.name}: {said}\n"


def headline_block(found: Results) -> str:
    """A few lines for the front page."""
    lines = []
    for device in gpus_of(found):
        ratios = results.ratios(device.result)
        shown = [
            f"{1 / ratios[name]:.2f} {said}"
            for name, said in HEADLINES.items()
            if name in ratios
        ]
        if ITERATION in ratios:
            shown.append(
                f"{ratios[ITERATION]:.1f} s per video for an update of 2 steps, all "
                "54 layers"
            )
        if shown:
            lines.append(f"\n{device.name}, 480x832, {LAYERS} of 54 layers:\n\n")
            lines += [f"* {text}\n" for text in shown]
    return "".join(lines) or NO_GPU


def presets_block(found: Results) -> str:
    """The plan of every preset of the real model on H100s, without weights on this
    machine.
    """
    names = (name for name in preset_names() if name.startswith("hv15_"))
    rows = [
        [
            f"[`{name}`](../../configs/{name}.yaml)",
            *cells_of_plan(plan_of(name)),
            preset_evidence(name),
        ]
        for name in names
    ]
    return markdown(("preset", "peak, GB", "update", "tried by"), rows)


def plan_of(preset: str, device: str = "h100", memory: float | None = None) -> Plan:
    """The plan of a preset on the fewest GPUs that its degrees fit; `memory` in 1e9
    bytes, by default the device's.
    """
    config = load_config(preset)
    gpus = least_gpus(config.distributed, config.rollout)
    return make_plan(config, DEVICES[device], gpus=gpus, memory_gb=memory, sizes={})


def cells_of_plan(plan: Plan) -> list[str]:
    """Peak in GB, and the videos of a rollout with its minutes."""
    video = plan.config.video
    updates = plan.config.training.updates_per_rollout
    videos = plan.config.rollout.batch_size * plan.layout.data_parallel
    # each update trains a part of the videos
    if plan.config.training.update == "forward_process":
        videos //= updates
    frames = f"{video.num_frames} frames of {video.height}x{video.width}"
    minutes = plan.seconds_per_rollout / updates / 60
    return [
        f"{plan.memory.peak / 1e9:.1f}",
        f"{videos} videos, {frames}: {minutes:.1f} min",
    ]


CARDS = (
    ("24 GB", "rtx4090", None, "hv15_quick_lora_24gb"),
    ("40 GB", "a100", 40.0, "hv15_quick_lora_1gpu_nft"),
    ("48 GB", "l40s", None, "hv15_quick_lora_1gpu_nft"),
    ("80 GB", "h100", None, "hv15_quick_lora_1gpu"),
    ("141 GB", "h200", None, "hv15_480p_lora_1gpu"),
    ("8 x 80 GB", "h100", None, "hv15_480p_lora_8gpu_fast"),
)
"""Memory, device, 1e9 bytes where they are fewer than the device's, and a preset that
fits.
"""


def cards_block(found: Results) -> str:
    """Presets that fit some cards, by the plan."""
    rows = []
    for memory, device, limit, preset in CARDS:
        plan = plan_of(preset, device, limit)
        assert plan.fits, preset
        peak, update = cells_of_plan(plan)
        card = plan.device.name.removesuffix(" SXM").removesuffix(" SXM 80 GB")
        ratio = evidence(found, device)
        gpu = f"{memory} ({card})"
        tried = preset_evidence(preset)
        rows.append([gpu, f"`{preset}`", f"{peak} GB", update, tried, ratio])
    head = (
        "GPU",
        "preset",
        "peak (predicted)",
        "update (predicted)",
        "tried by",
        "measured over predicted there",
    )
    return markdown(head, rows)


def evidence(found: Results, device: str) -> str:
    """Measured seconds over the plan's, on a device: median and range of all that it
    predicts.
    """
    ratios = [
        ratio
        for measured in found
        if measured.planned == device
        for ratio in measured.over_plan.values()
    ]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "cards": cards_block,
    "headline": headline_block,
    "gpu": gpu_block,
    "kernels": partial(suite_block, suites=("kernels",), by_step=True),
    "cpu": partial(suite_block, suites=("decode",)),
    "peers": partial(suite_block, suites=("peers",)),
    "presets": presets_block,
    "recipes": lambda found: recipes.table(),
}
"""Name in a document -> its Markdown."""


def document(text: str, found: Results) -> str:
    """A document with its blocks rebuilt from the results.

    Raises:
        ValueError: an unknown block, or one that does not end.
    """
    block = re.compile(
        r"(<!-- benchmark ([\w-]+): begin -->\n).*?(<!-- benchmark \2: end -->)", re.S
    )
    if text.count("<!-- benchmark ") != 2 * len(block.findall(text)):
        raise ValueError(
            "a benchmark block does not end, or does not begin, or lies within "
            "another one"
        )

    def renewed(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise ValueError(
                f"no benchmark block is named {match[2]}; there are {', '.join(BLOCKS)}"
            )
        return match[1] + BLOCKS[match[2]](found) + match[3]

    return block.sub(renewed, text)


# --------------------------------------------------------------------------------------
# the command


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 2 where a file or a document is not what it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        default=committed_files(),
        help="result files; default benchmarks/results/*/*.json",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="renew the documents, from all committed results",
    )
    options = parser.parse_args(argv)
    try:
        found = read_results(committed_files() if options.write else options.files)
        if options.write:
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
