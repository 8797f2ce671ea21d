"""The tables of docs/scaling.md, from the planner. Nothing is timed and no GPU is needed.

    python -m benchmarks scaling            write them into the page

The page holds each between `<!-- plan NAME: begin -->` and `<!-- plan NAME: end -->`; a test compares the two.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks.report import markdown, renewed
from sage_fast.config.files import write_text
from sage_fast.config.load import load_config
from sage_fast.models.hunyuan15.description import published_model
from sage_fast.planning.devices import DEVICES
from sage_fast.planning.estimate import Plan, make_plan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/scaling.md"
DEVICE = DEVICES["h100"]
GPUS = (8, 64, 512)
SIZES = ("352x624", "480p")
MODES = {"lora": "LoRA", "full": "full"}

GPU_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
"""419 unexpected interruptions of 16,384 H100s in 54 days (The Llama 3 Herd of Models, arXiv 2407.21783, table 5)."""

RESTART_HOURS = 1 / 6
"""From a failure to the first rollout after it; assumed."""

INTERNET = 1e9 / 8
"""Bytes per second to a volunteer's machine (1 Gbit/s); assumed."""

SHARE_OF_MULTIPROCESSORS = 0.2
"""What a collective takes from the computation beside it; assumed (NCCL's default is up to 32 of an H100's 132)."""

Row = dict[str, str]
"""Column -> cell."""


@cache
def recipe(mode: str, size: str, gpus: int, *overrides: str, text_tokens: int | None = None) -> Plan:
    """The 8-GPU preset on `gpus` GPUs, with overrides; full training shards its weights by node (HSDP)."""
    spread = ["--distributed.dp_replicate=null"]
    config = load_config(ROOT / f"configs/hv15_{size}_{mode}_8gpu.yaml", [*spread, *overrides])
    description = None if text_tokens is None else published_model(text_tokens=text_tokens)
    return make_plan(config, DEVICE, gpus=gpus, sizes={}, description=description)


def _number(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    if value < 0.005:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.9995 else f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms" if seconds >= 5e-4 else "< 1 ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def phases(mode: str) -> str:
    """What one GPU computes and exchanges in an iteration of two videos, without sequence parallelism."""
    rows: list[list[str]] = []
    for size in SIZES:
        plans = [recipe(mode, size, gpus) for gpus in GPUS]
        videos = plans[0].config.rollout.batch_size
        for number, phase in enumerate(plans[0].phases):
            if phase.name in ("decode", "reward"):
                continue
            computing = videos * (phase.predicted - phase.waiting)
            cells = [_exchange(plan, phase.name) for plan in plans]
            waiting = " / ".join(_number(videos * plan.phases[number].waiting) for plan in plans)
            work = _number(videos * phase.cost.flops / 1e15)
            rows.append([size, phase.name, work, _number(computing), *cells, waiting])
        total = videos * sum(phase.predicted for phase in plans[0].alone)
        waits = " / ".join(_number(sum(videos * phase.waiting for phase in plan.phases)) for plan in plans)
        rows.append([size, "all, with decoding and scoring", "", _number(total), "", "", "", waits])
        bounds = [f"**{_percent(plan.weak_scaling)}**" for plan in plans]
        rows.append([size, "bound on weak scaling", "", "", *bounds, ""])
    header = ["size", "phase", "PFLOP", "computing s"]
    header += [f"{gpus} GPUs: sent GB; s" for gpus in GPUS] + ["waiting s"]
    return markdown(header, rows)


def _exchange(plan: Plan, phase: str) -> str:
    """NVLink + network gigabytes of a phase, and seconds."""
    found = [e for e in plan.exchanges if e.phase == phase]
    near = sum(e.bytes * (1 - e.network_share) for e in found) / 1e9
    far = sum(e.bytes * e.network_share for e in found) / 1e9
    seconds = sum(e.seconds(plan.device) for e in found)
    sent = _number(near) if plan.gpus <= plan.layout.node else f"{_number(near)} + {_number(far)}"
    return f"{sent}; {_number(seconds)}" if found else "none"


def sequence() -> Iterator[Row]:
    """What the degree of sequence parallelism costs and saves."""
    model = ("rollout", "anchor", "update")
    for size, sp in product(SIZES, (1, 2, 4, 8, 16)):
        plan = recipe("lora", size, 64, f"--distributed.sp={sp}", "--rollout.batch_size=4")
        videos = plan.config.rollout.batch_size
        swaps = [e for e in plan.exchanges if e.kind == "all_to_all" and e.phase != "evaluation"]
        whole = sum(phase.predicted for phase in plan.alone if phase.name in model)
        share = sum(phase.predicted - phase.waiting for phase in plan.phases if phase.name in model)
        yield {
            "size": size,
            "sp": str(sp),
            "peak GB": f"{plan.memory.peak / 1e9:.1f}",
            "in the update": f"{plan.memory.total('update') / 1e9:.1f}",
            "s per video": _number(plan.seconds_per_video),
            "all-to-all GB": _number(sum(e.bytes for e in swaps) / videos / 1e9),
            "and s": _number(sum(e.exposed(plan.device) for e in swaps) / videos),
            "computing divides": _percent(whole / (sp * share)),
            "videos per GPU-hour": f"{plan.videos_per_gpu_hour:.1f}",
            "bound": _percent(plan.weak_scaling),
        }


def strong() -> Iterator[Row]:
    """More GPUs for as many videos per update: they can only share videos."""
    for size, sp in product(SIZES, (1, 2, 4, 8)):
        first = recipe("lora", size, 64, "--rollout.batch_size=1").seconds_per_rollout
        plan = recipe("lora", size, 64 * sp, f"--distributed.sp={sp}", "--rollout.batch_size=1")
        yield {
            "size": size,
            "GPUs": str(plan.gpus),
            "sp": str(sp),
            "s per update of 64 videos": _number(plan.seconds_per_rollout),
            "faster": f"{first / plan.seconds_per_rollout:.1f}x",
        }


def replicas() -> Iterator[Row]:
    """Weights of 512 GPUs over one node, eight, or all."""
    for shard in (8, 64, 512):
        plan, small = (recipe("full", size, 512, f"--distributed.dp_shard={shard}") for size in ("480p", "352x624"))
        found = [e for e in plan.exchanges if e.phase != "evaluation"]
        gather = next(e for e in found if e.purpose == "weights" and e.phase == "update")
        backward = [e for e in found if e.phase == "update" and e.purpose in ("weights", "gradients")]
        held = plan.memory.phases["update"]
        state = held.transformer + held.optimizer_state + held.anchor + held.gradients
        window = next(e.window for e in small.exchanges if e.phase == "update")
        yield {
            "replicas x shards": f"{512 // shard} x {shard}",
            "state GB": f"{state / 1e9:.1f}",
            "gather of a block, ms": f"{1e3 * gather.call_seconds(DEVICE):.1f}",
            "forward of it at 480p, ms": f"{1e3 * gather.window:.1f}",
            "at 352x624, ms": f"{1e3 * window:.1f}",
            "update: exchange s": _number(sum(e.seconds(DEVICE) for e in backward)),
            "waiting s, all": _number(sum(e.exposed(DEVICE) for e in found)),
            "bound, 480p": _percent(plan.weak_scaling),
            "bound, 352x624": _percent(small.weak_scaling),
        }


def presets() -> Iterator[Row]:
    """The recipes that ship."""
    for path in sorted((ROOT / "configs").glob("hv15_*.yaml"), key=_order):
        plan = make_plan(load_config(path), DEVICE, gpus=preset_gpus(path), sizes={})
        layout = plan.layout
        yield {
            "preset": f"[`{path.stem}`](../configs/{path.name})",
            "replicas x shards x sp": f"{layout.replicate} x {layout.shard} x {layout.sp}",
            "videos per update": str(layout.data_parallel * plan.config.rollout.batch_size),
            "peak GB": f"{plan.memory.peak / 1e9:.1f}, {plan.memory.peak_phase}",
            "min per update": f"{plan.seconds_per_rollout / 60:.1f}",
            "videos per GPU-hour": f"{plan.videos_per_gpu_hour:.1f}",
            "videos per hour": f"{plan.videos_per_gpu_hour * plan.gpus:,.0f}",
            "bound": _percent(plan.weak_scaling),
            "checkpoint GB per GPU": f"{plan.checkpoint / 1e9:.2f}",
        }


def preset_gpus(path: Path) -> int:
    """The number of GPUs in a preset's name."""
    found = re.search(r"_(\d+)gpu(_|$)", path.stem)
    assert found is not None, path
    return int(found[1])


def _order(path: Path) -> tuple[bool, int, str]:
    return "full" in path.stem, preset_gpus(path), path.stem


def beyond() -> Iterator[Row]:
    """What the bound leaves out, each in per cent of an iteration."""
    for (mode, name), size in product(MODES.items(), SIZES):
        plan, most = recipe(mode, size, 8), recipe(mode, size, 512)
        iteration = plan.seconds_per_rollout
        long = recipe(mode, size, 8, text_tokens=400).seconds_per_rollout / iteration - 1
        busy = sum(e.seconds(DEVICE) - e.exposed(DEVICE) for e in plan.exchanges if e.phase != "evaluation")
        evaluation = [(p.seconds_per_evaluation or 0.0) / p.config.evaluation.every for p in (plan, most)]
        stall = plan.checkpoint / 50e9 / plan.config.checkpoint.every
        yield {
            "recipe": f"{name}, {size}",
            "a prompt of 400 tokens on one rank": _percent(long),
            "collectives on the multiprocessors": _percent(SHARE_OF_MULTIPROCESSORS * busy / iteration),
            "evaluation, 8 GPUs": _percent(evaluation[0] / iteration),
            "evaluation, 512 GPUs": _percent(evaluation[1] / most.seconds_per_rollout),
            "checkpoint's copy to the CPU": _percent(stall / iteration),
        }


def failures() -> Iterator[Row]:
    """Hours between failures, and what is lost to them."""
    iteration = recipe("full", "480p", 64, "--distributed.sp=2", "--distributed.dp_shard=4").seconds_per_rollout / 3600
    for gpus in (8, 64, 512, 4096, 16384):
        between = GPU_HOURS_PER_FAILURE / gpus
        lost = [(interval * iteration / 2 + RESTART_HOURS) / between for interval in (10, 1)]
        often, always = (_percent(share) if share < 1 else "no progress" for share in lost)
        yield {
            "GPUs": f"{gpus:,}",
            "between failures": f"{between:,.0f} h" if between >= 100 else f"{between:.1f} h",
            "lost, a checkpoint every 10 updates": often,
            "lost, one every update": always,
            "chance of a failure in 10 updates": _percent(1 - math.exp(-10 * iteration / between)),
        }


def wires() -> str:
    """Sizes of what would travel between separate rollout and training machines."""
    lora, full = recipe("lora", "480p", 64), recipe("full", "480p", 64)
    rollout = lora.config.rollout
    steps, latent = rollout.num_steps, 4.0 * math.prod(lora.latent)
    video = lora.config.video
    network = DEVICE.network * 1e9

    def row(what: str, size: float, often: str) -> list[str]:
        text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size:.0f} B"
        return [what, text, often, _time(size / network), _time(size / INTERNET)]

    rows = [
        row("adapters of rank 32, float32", 4.0 * lora.weights.trained, "per update, to every rollout machine"),
        row("all weights, bfloat16", 2.0 * full.weights.total, "per update, to every rollout machine"),
        row("a trajectory: latents and velocities, float32", (2 * steps + 1) * latent, "per video"),
        row("its latents alone, float32", (steps + 1) * latent, "per video"),
        row("a noise key and a score", 64.0, "per video"),
        row("decoded frames, uint8", 3.0 * video.num_frames * video.height * video.width, "per video, to a reward"),
        row("gradient of the adapters, float32", 4.0 * lora.weights.trained, "per update, from every trainer"),
        row("a full checkpoint, Muon", full.checkpoint * full.gpus, "per checkpoint, from all"),
    ]
    return markdown(["what", "size", "how often", "at 46 GB/s", "at 1 Gbit/s"], rows)


def table(rows: Iterator[Row]) -> str:
    """Rows with the same columns as a table."""
    found = list(rows)
    return markdown(list(found[0]), [list(row.values()) for row in found])


TABLES: dict[str, Callable[[], str]] = {
    "phases-lora": lambda: phases("lora"),
    "phases-full": lambda: phases("full"),
    "sequence": lambda: table(sequence()),
    "strong": lambda: table(strong()),
    "replicas": lambda: table(replicas()),
    "presets": lambda: table(presets()),
    "beyond": lambda: table(beyond()),
    "failures": lambda: table(failures()),
    "wires": wires,
}


def page() -> str:
    """The page with its tables rebuilt."""
    return renewed(PAGE.read_text("utf-8"), "plan", lambda name: TABLES[name]())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=(__doc__ or "").split("\n")[0])
    parser.parse_args(argv)
    text = page()
    write_text(PAGE, text)
    return 0
