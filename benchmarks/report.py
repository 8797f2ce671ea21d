"""Tables and plots of committed results, and the parts of the documents that are made from them.

    python -m benchmarks report                print the tables of benchmarks/results/*/*.json
    python -m benchmarks report FILE ...       of these files alone
    python -m benchmarks report --write        renew the documents, and the plots beside the results
    python -m benchmarks report --check        exit status 1 if a document is not what the results say

A document holds blocks between `<!-- benchmark NAME: begin -->` and `<!-- benchmark NAME: end -->`; `BLOCKS` has the
names. Of the files of one device the newest one that holds a figure counts. Figures of a contender whose parity check
was red, and those of smoke runs, are in no table.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness, policy_report
from benchmarks.workload import NUM_STEPS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/performance.md", "benchmarks/README.md")
PREDICTED = "predicted"
"""The folder whose files hold no measurement."""
_BLOCK = re.compile(
    r"(<!-- benchmark (?P<name>[\w-]+): begin -->\n)(?P<body>.*?)(<!-- benchmark (?P=name): end -->)", re.S
)
_MARKER = re.compile(r"<!-- benchmark ([\w-]+): (?:begin|end) -->")


@dataclass(kw_only=True)
class DeviceResults:
    """What was measured on one device: the newest value of every key, and the file that it is from.

    Example: `DeviceResults(folder="nvidia-h100", values={"kernels": [...]}, files={"kernels": "2026-01-01-0123.json"})`
    """

    folder: str
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> what it was made with."""

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


@dataclass(kw_only=True)
class Results:
    """All that was read. predicted: contents of the files that hold predictions, by stem."""

    devices: list[DeviceResults]
    predicted: dict[str, dict[str, Any]]

    @property
    def gpus(self) -> list[DeviceResults]:
        return [device for device in self.devices if device.is_gpu]


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
        if not isinstance(content, dict) or "environment" not in content:
            raise ValueError(f'{file} has no "environment", so it is no result of `python -m benchmarks`.')
        if content.get("smoke"):
            continue
        device = devices.setdefault(file.parent.name, DeviceResults(folder=file.parent.name))
        device.environments[file.name] = content["environment"]
        for key, value in content.items():
            if key not in ("environment", "smoke", "stages"):
                device.values[key] = value
                device.files[key] = file.name
    return Results(devices=list(devices.values()), predicted=predicted)


def committed_files(folder: Path = harness.RESULTS) -> list[Path]:
    """Every result there is."""
    return sorted(folder.glob("*/*.json"))


# ------------------------------------------------------------------------------------------ tables


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def source(device: DeviceResults, key: str) -> str:
    """Which device and file the figures under a key are from, as a line."""
    file = device.files[key]
    environment = device.environments[file]
    commit = (environment["commit"] or "no commit")[:9]
    torch = environment["packages"].get("torch", "?")
    return f"{device.name}, torch {torch}, commit {commit}: `benchmarks/results/{device.folder}/{file}`"


def _section(device: DeviceResults, key: str, table: str) -> str:
    return f"{source(device, key)}\n\n{table}"


def _joined(parts: Sequence[str], otherwise: str) -> str:
    return "\n".join(parts) if parts else otherwise + "\n"


NO_GPU = "Not measured yet: no result of a GPU is committed."


def _milliseconds(quantiles: dict[str, float]) -> str:
    return f"{quantiles['median'] * 1e3:.1f} ({quantiles['q20'] * 1e3:.1f} – {quantiles['q80'] * 1e3:.1f})"


def _seconds(quantiles: dict[str, float]) -> str:
    return f"{quantiles['median']:.2f} ({quantiles['q20']:.2f} – {quantiles['q80']:.2f})"


def devices_block(results: Results) -> str:
    """What was run where."""
    rows = [
        (
            device.name,
            "GPU" if device.is_gpu else "CPU",
            (environment["commit"] or "none")[:9],
            f"`{device.folder}/{file}`",
        )
        for device in results.devices
        for file, environment in sorted(device.environments.items())
    ]
    return markdown(("device", "kind", "commit", "file"), rows) if rows else "No result is committed yet.\n"


def targets_block(results: Results) -> str:
    """Target, floor and measured value of every goal, a column per GPU."""
    measured = [
        (d, {r["name"]: r for r in d.values["policy_goals"]}) for d in results.gpus if "policy_goals" in d.values
    ]
    empty = policy_report.goal_records({"policy_cells": {}, "policy_failures": {}})
    head = ["figure", "target", "floor", *(device.name for device, _ in measured)]
    if not measured:
        head.append("measured")
    rows = []
    for goal in empty:
        cells = []
        for _, records in measured:
            found = records.get(goal["name"])
            if found is None or found["text"] is None:
                cells.append("not measured" if found is None else found["verdict"])
            else:
                cells.append(f"{found['text']}{', ' + found['verdict'] if found['verdict'] else ''}")
        rows.append((goal["name"], goal["target"] or "–", goal["floor"] or "–", *(cells or ["not measured"])))
    return markdown(head, rows)


def kernels_block(results: Results) -> str:
    """Bandwidth of every op per GPU."""
    parts = []
    for device in results.gpus:
        red = device.values.get("parity_failures", {})
        rows = [
            (
                row["op"],
                row["case"],
                row["direction"],
                f"{row['seconds']['fused']['median'] * 1e6:.1f}",
                f"{row['gb_per_s']:.0f}",
                f"{row['share_of_copy']:.0%}",
                f"{row['times_eager']:.2f}x",
                f"{row['times_compiled']:.2f}x",
            )
            for row in device.values.get("kernels", [])
            if row["op"] not in red
        ]
        if rows:
            head = ("op", "shape", "pass", "µs", "GB/s", "of copy", "against eager", "against compiled")
            parts.append(_section(device, "kernels", markdown(head, rows)))
    return _joined(parts, NO_GPU)


def attention_block(results: Results) -> str:
    """Speed of every attention backend per GPU."""
    parts = []
    for device in results.gpus:
        checked = device.values.get("attention", {})
        rows = [
            (row["backend"], row["shape"], row["direction"], _milliseconds(row["seconds"]), f"{row['tflop_per_s']:.0f}")
            for row in device.values.get("attention_rows", [])
            if checked.get(row["backend"], {}).get("passed")
        ]
        if rows:
            head = ("backend", "shape", "pass", "ms, median (20 – 80 %)", "TFLOP/s")
            parts.append(_section(device, "attention_rows", markdown(head, rows)))
    return _joined(parts, NO_GPU)


def steps_block(results: Results) -> str:
    """Every measurement of the full-size transformer per GPU."""
    parts = []
    for device in results.gpus:
        rows = []
        for name, cell in device.values.get("policy_cells", {}).items():
            if cell["status"] != "done" or name.split()[-1] in device.values.get("policy_failures", {}):
                continue
            memory = cell.get("peak_memory_gb")
            rows.append(
                (
                    name,
                    cell["checkpointing"],
                    _milliseconds(cell["seconds"]),
                    f"{cell['tflop_per_s']:.0f}",
                    f"{cell['mfu']:.1%}",
                    "–" if memory is None else f"{memory:.1f}",
                )
            )
        if rows:
            head = ("step, shape, contender", "keeps", "ms, median (20 – 80 %)", "TFLOP/s", "MFU", "peak GB")
            parts.append(_section(device, "policy_cells", markdown(head, rows)))
    return _joined(parts, NO_GPU)


def blocks_block(results: Results) -> str:
    """One transformer block, every contender per GPU."""
    parts = []
    for device in results.gpus:
        green = {name for name, found in device.values.get("block_parity", {}).items() if found["passed"]}
        timed = [
            row
            for row in device.values.get("blocks", [])
            if "seconds" in row and {"ours", row["contender"].removesuffix("c")} <= green
        ]
        ours = {(r["shape"], r["direction"]): r["seconds"]["median"] for r in timed if r["contender"] == "ours"}
        rows = [
            (
                row["shape"],
                row["direction"],
                row["contender"],
                _milliseconds(row["seconds"]),
                f"{row['tflop_per_s']:.0f}",
                f"{row['seconds']['median'] / ours[row['shape'], row['direction']]:.2f}x",
            )
            for row in timed
            if (row["shape"], row["direction"]) in ours
        ]
        if rows:
            head = ("shape", "pass", "contender", "ms, median (20 – 80 %)", "TFLOP/s", "time over ours")
            parts.append(_section(device, "blocks", markdown(head, rows)))
    return _joined(parts, NO_GPU)


def sharded_block(results: Results) -> str:
    """A step under FSDP2 on one rank beside the unwrapped one, and a full fine-tuning step with CPU offload."""
    parts = []
    for device in results.gpus:
        records = device.values.get("sharded", {})
        rows = []
        lora, full = (records.get(mode, {"passed": False}) for mode in ("lora", "full"))
        if lora["passed"]:
            times = {"unwrapped": "1", "fsdp": f"{lora['fsdp_over_unwrapped']:.3f}"}
            for name, label in (("unwrapped", "whole"), ("fsdp", "FSDP2")):
                peak = f"{lora['peak_memory_gb'][name]:.1f}"
                layers = f"{lora['layers']}"
                rows.append(
                    (f"LoRA gradient, {label}", layers, _seconds(lora["seconds"][name]), times[name], peak, "–")
                )
        if full["passed"]:
            layers = f"{full['layers']} of {full['of_layers']}"
            layers += "" if full["limited_by"] == "nothing" else f" ({full['limited_by']})"
            peak, host = f"{full['peak_memory_gb']:.1f}", f"{full['host_gb']:.0f}"
            for name, quantiles in full["seconds"].items():
                label = f"full, FSDP2 with CPU offload, {name}"
                rows.append((label, layers, _seconds(quantiles), "–", peak, host))
        if rows:
            head = ("step", "layers", "s, median (20 – 80 %)", "over whole", "peak GB", "CPU memory, GB")
            parts.append(_section(device, "sharded", markdown(head, rows)))
    return _joined(parts, NO_GPU)


def vae_block(results: Results) -> str:
    """Decoding, ours and stock."""
    parts = []
    for device in results.devices:
        rows = [
            (
                row["shape"],
                " x ".join(str(n) for n in row["latent"]),
                row["dtype"],
                "tiles" if row["tiled"] else "whole",
                _milliseconds(row["seconds"]["ours"]),
                _milliseconds(row["seconds"]["stock"]),
                f"{row['times_stock']:.2f}x",
            )
            for row in device.values.get("vae", [])
            if row["passed"]
        ]
        if rows:
            head = (
                "shape",
                "latent",
                "type",
                "decoded",
                "ours, ms (20 – 80 %)",
                "stock, ms (20 – 80 %)",
                "stock / ours",
            )
            parts.append(_section(device, "vae", markdown(head, rows)))
    return _joined(parts, "Not measured yet.")


def toy_block(results: Results) -> str:
    """An iteration of the toy run, stock and fused."""
    parts = []
    for device in results.devices:
        toy = device.values.get("toy")
        if toy is None or not toy["passed"]:
            continue
        peaks = toy.get("peak_memory_gib", {})
        rows = [
            (
                f"`{forward}`",
                _seconds(toy["seconds"][forward]),
                str(toy["seconds"][forward]["rounds"]),
                f"{peaks[forward]:.2f}" if forward in peaks else "–",
            )
            for forward in ("stock", "fused")
        ]
        head = (
            "`model.forward`",
            "processor seconds per iteration, median (20 – 80 %)",
            "iterations",
            "peak GiB of the process",
        )
        ratio = f"\nStock over fused: {toy['times_stock']:.2f}.\n"
        parts.append(_section(device, "toy", markdown(head, rows)) + ratio)
    return _joined(parts, "Not measured yet.")


def costs_block(results: Results) -> str:
    """Stall of a checkpoint, and the host's share of a forward."""
    parts = []
    for device in results.devices:
        rows = []
        for name, found in device.values.get("checkpoint", {}).items():
            label = {"toy": "saving the toy run", "lora": "saving a LoRA run of HunyuanVideo-1.5"}[name]
            rows.append((label, f"{_seconds(found['seconds'])} s", f"{found['bytes'] / 1e6:.0f} MB"))
            if "background" in found:
                share = f"{found['background_over_foreground']:.2f} of it"
                rows.append((f"{label}, in the background", f"{_seconds(found['background']['seconds'])} s", share))
        host = device.values.get("host", {"passed": False})
        if host["passed"]:
            what = "until the call returns" if host["device"] == "cuda" else "with its tiny arithmetic"
            for name, quantiles in host["seconds"].items():
                label = f"forward of {host['blocks']} narrow blocks, {name}"
                rows.append((label, f"{_milliseconds(quantiles)} ms", what))
        if rows:
            key = "host" if "host" in device.values else "checkpoint"
            parts.append(_section(device, key, markdown(("cost", "median (20 – 80 %)", ""), rows)))
    return _joined(parts, "Not measured yet.")


def _levers(results: Results, *, exact: bool) -> str:
    found = results.predicted.get("levers")
    if found is None:
        return "Not predicted yet: `python -m benchmarks levers`.\n"
    rows = [
        (
            row["name"],
            f"`{row['option']}`",
            f"{row['factor']:.2f}x",
            f"{row['without']['seconds']:.0f} → {row['with']['seconds']:.0f}",
            f"{row['without']['peak_gb']:.0f} → {row['with']['peak_gb']:.0f}",
            row["note"],
        )
        for row in found["levers"]
        if row["exact"] == exact
    ]
    return markdown(("lever", "option", "factor", "seconds per video", "peak GB", ""), rows)


def exact_levers_block(results: Results) -> str:
    """Levers that leave the gradient what it is."""
    return _levers(results, exact=True)


def other_levers_block(results: Results) -> str:
    """Levers that change the mathematics."""
    return _levers(results, exact=False)


def recipes_block(results: Results) -> str:
    """Predicted seconds of a video by phase."""
    found = results.predicted.get("levers")
    if found is None:
        return "Not predicted yet: `python -m benchmarks levers`.\n"
    phases = list(next(iter(found["recipes"].values()))["phases"])
    rows = []
    for file, plan in found["recipes"].items():
        total = sum(plan["phases"].values())
        cells = [f"{plan['phases'][phase]:.1f}" for phase in phases]
        rows.append((f"`{file}`", *cells, f"{total:.0f}", f"{3600 / total:.1f}", f"{plan['peak_gb']:.0f}"))
    head = ("recipe", *phases, "seconds per video", "videos per hour", "peak GB")
    return f"{found['device']}: {found['source']}.\n\n{markdown(head, rows)}"


def headline_block(results: Results) -> str:
    """A few lines for the front page."""
    wanted = ("forward B vs P1", "forward B vs P2", "train step B vs P2", "video B: rollout, anchor, train")
    lines = []
    for device in results.gpus:
        goals = {goal["name"]: goal["text"] for goal in device.values.get("policy_goals", [])}
        shown = [f"{name}: {goals[name]}" for name in wanted if goals.get(name)]
        if shown:
            lines.append(f"* {device.name}: {'; '.join(shown)}\n")
    return "".join(lines) or "No speed has been measured on a GPU yet.\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": headline_block,
    "devices": devices_block,
    "targets": targets_block,
    "kernels": kernels_block,
    "attention": attention_block,
    "block": blocks_block,
    "steps": steps_block,
    "sharded": sharded_block,
    "vae": vae_block,
    "toy": toy_block,
    "costs": costs_block,
    "recipes": recipes_block,
    "levers-exact": exact_levers_block,
    "levers-other": other_levers_block,
}
"""Name in a document -> its Markdown."""


def renewed(text: str, results: Results) -> str:
    """A document with its blocks made anew.

    Raises:
        ValueError: a block that nobody knows, or one that does not end.
    """
    unknown = {name for name in _MARKER.findall(text) if name not in BLOCKS}
    if unknown:
        raise ValueError(f"no benchmark block is named {', '.join(sorted(unknown))}; there are {', '.join(BLOCKS)}")
    if len(_MARKER.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise ValueError("a benchmark block does not end, or does not begin, or lies within another one")
    return _BLOCK.sub(lambda m: m.group(1) + BLOCKS[m["name"]](results) + m.group(4), text)


# ------------------------------------------------------------------------------------------ plots


def plots(device: DeviceResults, folder: Path) -> list[Path]:
    """Draw what a device has: roofline.png (its roofs and how near each op comes), stacked_time.png."""
    drawn = []
    for name, draw in (("roofline.png", draw_roofline), ("stacked_time.png", draw_stacked_time)):
        if draw(device, folder / name):
            drawn.append(folder / name)
    return drawn


def roofline_points(device: DeviceResults) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """((kernel, GB/s), ...) under the roof of memory, ((call, TFLOP/s), ...) under that of products."""
    values = device.values
    memory = [
        (f"{row['op']} {row['direction']}", row["gb_per_s"])
        for row in values.get("kernels", [])
        if row["case"] == "B" and row["op"] not in values.get("parity_failures", {})
    ]
    compute = [
        (f"attention {row['backend']} {row['direction']}", row["tflop_per_s"])
        for row in values.get("attention_rows", [])
        if row["shape"] == "B" and values["attention"].get(row["backend"], {}).get("passed")
    ]
    compute += [
        (name, cell["tflop_per_s"])
        for name, cell in values.get("policy_cells", {}).items()
        if cell["status"] == "done" and " B " in name and name.split()[-1] not in values.get("policy_failures", {})
    ]
    return memory, compute


def draw_roofline(device: DeviceResults, path: Path) -> bool:
    """Both roofs with what lies under them; False where nothing was measured."""
    memory, compute = roofline_points(device)
    roofs = [
        (memory, "GB/s", device.values.get("copy", {}).get("gb_per_s"), "device copy"),
        (compute, "TFLOP/s", device.values.get("matmul", {}).get("tflop_per_s"), "bfloat16 product"),
    ]
    roofs = [roof for roof in roofs if roof[0] and roof[2] is not None]
    if not roofs:
        return False
    pyplot = _pyplot()
    rows = max(len(points) for points, *_ in roofs)
    figure, axes = pyplot.subplots(
        1, len(roofs), figsize=(6.5 * len(roofs), 1.2 + 0.26 * rows), squeeze=False, layout="constrained"
    )
    for axis, (points, unit, ceiling, label) in zip(axes[0], roofs, strict=True):
        names, heights = zip(*points, strict=True)
        axis.barh(range(len(points)), heights, color="#4c72b0")
        axis.set_yticks(range(len(points)), names, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(ceiling, color="#c44e52", label=f"{label}, {ceiling:.0f} {unit}")
        axis.set_xlabel(unit)
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8, frameon=False)
    figure.suptitle(f"{device.name}, shape B")
    _save(figure, path)
    return True


def video_bars(device: DeviceResults) -> dict[str, dict[str, float]]:
    """Bar -> part -> seconds of a video: each contender's transformer, and ours with decoding."""
    values = device.values
    result: dict[str, Any] = {"policy_cells": values.get("policy_cells", {})}
    red = values.get("policy_failures", {})
    decode = {
        row["shape"]: {name: q["median"] for name, q in row["seconds"].items()}
        for row in values.get("vae", [])
        if row["passed"]
    }
    ways = {
        "P2": ("P2", {"rollout": "rollout", "anchor": "rollout", "update": "train"}),
        "ours": ("ours", {"rollout": "rollout", "anchor": "rollout", "update": "train"}),
        "ours, single pass": ("ours", {"rollout with gradient": "single_pass"}),
    }
    bars: dict[str, dict[str, float]] = {}
    for shape in "AB":
        for label, (contender, parts) in ways.items():
            medians = {
                part: policy_report.median(result, f"{step} {shape} {contender}") for part, step in parts.items()
            }
            if contender in red or None in medians.values():
                continue
            bar = {part: NUM_STEPS * value for part, value in medians.items() if value is not None}
            if shape in decode:
                bar["decode"] = decode[shape]["stock" if contender == "P2" else "ours"]
            bars[f"{shape}, {label}"] = bar
    return bars


def draw_stacked_time(device: DeviceResults, path: Path) -> bool:
    """Seconds per video by phase; False where nothing was measured."""
    bars = video_bars(device)
    if bars:
        draw_bars(bars, path, title=device.name, label="seconds per video (20 steps, guidance, measured medians)")
    return bool(bars)


def draw_predicted(results: Results, path: Path) -> bool:
    """Predicted seconds per video by phase, of the recipes."""
    found = results.predicted.get("levers")
    if found is not None:
        bars = {Path(file).stem: plan["phases"] for file, plan in found["recipes"].items()}
        draw_bars(bars, path, title=f"{found['device']}: predicted, not measured", label="seconds per video")
    return found is not None


def draw_bars(bars: dict[str, dict[str, float]], path: Path, *, title: str, label: str) -> None:
    """Stacked bars: name -> part -> seconds."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 1.4 + 0.5 * len(bars)))
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
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date or version in it, the same figures give the same file.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    _pyplot().close(figure)


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
        results = read_results(options.files or committed_files())
        if not (options.write or options.check):
            for name, block in BLOCKS.items():
                print(f"## {name}\n\n{block(results)}")
            return 0
        return _documents(results, write=options.write)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _documents(results: Results, *, write: bool) -> int:
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text("utf-8")
        new = renewed(text, results)
        if new != text:
            stale.append(name)
            if write:
                path.write_text(new, "utf-8")
    if write:
        drawn = [plot for device in results.devices for plot in plots(device, harness.RESULTS / device.folder)]
        predicted = harness.RESULTS / PREDICTED / "stacked_time.png"
        drawn += [predicted] if draw_predicted(results, predicted) else []
        for item in [*stale, *drawn]:
            print(f"written {item}")
        return 0
    for name in stale:
        print(f"{name} is not what benchmarks/results says: python -m benchmarks report --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
