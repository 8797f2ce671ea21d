"""The tables of docs/scaling.md, from the planner. Nothing is timed and no GPU is needed.

    python -m benchmarks.scaling            write them into the page

The page holds each between `<!-- plan NAME: begin -->` and `<!-- plan NAME: end -->`; a test compares the two.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from sage_fast.config.files import replacing
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


@cache
def recipe(mode: str, size: str, gpus: int, *overrides: str, text_tokens: int | None = None) -> Plan:
    """The preset for 8 GPUs on so many, with whatever is overridden; HSDP by nodes for all weights."""
    spread = ["--distributed.dp_replicate=null"]
    config = load_config(ROOT / f"configs/hv15_{size}_{mode}_8gpu.yaml", [*spread, *overrides])
    description = None if text_tokens is None else published_model(text_tokens=text_tokens)
    return make_plan(config, DEVICE, gpus=gpus, sizes={}, description=description)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


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
    return _table(header, rows)


def _exchange(plan: Plan, phase: str) -> str:
    """NVLink + network gigabytes of a phase, and seconds."""
    found = [e for e in plan.exchanges if e.phase == phase]
    near = sum(e.bytes * (1 - e.network_share) for e in found) / 1e9
    far = sum(e.bytes * e.network_share for e in found) / 1e9
    seconds = sum(e.seconds(plan.device) for e in found)
    sent = _number(near) if plan.gpus <= plan.layout.node else f"{_number(near)} + {_number(far)}"
    return f"{sent}; {_number(seconds)}" if found else "none"


def sequence() -> str:
    """What the degree of sequence parallelism costs and saves."""
    rows = []
    for size in SIZES:
        for sp in (1, 2, 4, 8, 16):
            plan = recipe("lora", size, 64, f"--distributed.sp={sp}", "--rollout.batch_size=4")
            videos = plan.config.rollout.batch_size
            swaps = [e for e in plan.exchanges if e.kind == "all_to_all" and e.phase != "evaluation"]
            sent = sum(e.bytes for e in swaps) / videos / 1e9
            seconds = sum(e.exposed(plan.device) for e in swaps) / videos
            model = ("rollout", "anchor", "update")
            whole = sum(phase.predicted for phase in plan.alone if phase.name in model)
            share = sum(phase.predicted - phase.waiting for phase in plan.phases if phase.name in model)
            rows.append(
                [
                    size,
                    str(sp),
                    f"{plan.memory.peak / 1e9:.1f}",
                    f"{plan.memory.total('update') / 1e9:.1f}",
                    _number(plan.seconds_per_video),
                    _number(sent),
                    _number(seconds),
                    _percent(whole / (sp * share)),
                    f"{plan.videos_per_gpu_hour:.1f}",
                    _percent(plan.weak_scaling),
                ]
            )
    header = ["size", "sp", "peak GB", "in the update", "s per video", "all-to-all GB", "and s"]
    return _table([*header, "computing divides", "videos per GPU-hour", "bound"], rows)


def strong() -> str:
    """More GPUs for as many videos per update: they can only share videos."""
    rows = []
    for size in SIZES:
        first = recipe("lora", size, 64, "--rollout.batch_size=1").seconds_per_rollout
        for sp in (1, 2, 4, 8):
            plan = recipe("lora", size, 64 * sp, f"--distributed.sp={sp}", "--rollout.batch_size=1")
            times = first / plan.seconds_per_rollout
            rows.append([size, str(plan.gpus), str(sp), _number(plan.seconds_per_rollout), f"{times:.1f}x"])
    return _table(["size", "GPUs", "sp", "s per update of 64 videos", "faster"], rows)


def replicas() -> str:
    """Weights of 512 GPUs over one node, eight, or all."""
    rows = []
    for shard in (8, 64, 512):
        plan = recipe("full", "480p", 512, f"--distributed.dp_shard={shard}")
        found = [e for e in plan.exchanges if e.phase != "evaluation"]
        gather = next(e for e in found if e.purpose == "weights" and e.phase == "update")
        backward = [e for e in found if e.phase == "update" and e.purpose in ("weights", "gradients")]
        small = recipe("full", "352x624", 512, f"--distributed.dp_shard={shard}")
        state = sum(
            plan.memory.phases["update"][name] for name in ("transformer", "optimizer state", "anchor", "gradients")
        )
        rows.append(
            [
                f"{512 // shard} x {shard}",
                f"{state / 1e9:.1f}",
                f"{1e3 * gather.call_seconds(DEVICE):.1f}",
                f"{1e3 * gather.window:.1f}",
                f"{1e3 * next(e.window for e in small.exchanges if e.phase == 'update'):.1f}",
                _number(sum(e.seconds(DEVICE) for e in backward)),
                _number(sum(e.exposed(DEVICE) for e in found)),
                _percent(plan.weak_scaling),
                _percent(small.weak_scaling),
            ]
        )
    header = ["replicas x shards", "state GB", "gather of a block, ms", "forward of it at 480p, ms", "at 352x624, ms"]
    header += ["update: exchange s", "waiting s, all", "bound, 480p", "bound, 352x624"]
    return _table(header, rows)


def presets() -> str:
    """The recipes that ship."""
    rows = []
    for path in sorted((ROOT / "configs").glob("hv15_*.yaml"), key=_order):
        plan = make_plan(load_config(path), DEVICE, gpus=preset_gpus(path), sizes={})
        layout, batch = plan.layout, plan.config.rollout.batch_size
        rows.append(
            [
                f"[`{path.stem}`](../configs/{path.name})",
                f"{layout.replicate} x {layout.shard} x {layout.sp}",
                str(layout.data_parallel * batch),
                f"{plan.memory.peak / 1e9:.1f}, {plan.memory.peak_phase}",
                f"{plan.seconds_per_rollout / 60:.1f}",
                f"{plan.videos_per_gpu_hour:.1f}",
                f"{plan.videos_per_gpu_hour * plan.gpus:,.0f}",
                _percent(plan.weak_scaling),
                f"{plan.checkpoint / 1e9:.2f}",
            ]
        )
    header = ["preset", "replicas x shards x sp", "videos per update", "peak GB", "min per update"]
    return _table([*header, "videos per GPU-hour", "videos per hour", "bound", "checkpoint GB per GPU"], rows)


def preset_gpus(path: Path) -> int:
    """The number of GPUs in a preset's name."""
    found = re.search(r"_(\d+)gpu$", path.stem)
    assert found is not None, path
    return int(found[1])


def _order(path: Path) -> tuple[bool, int, str]:
    return "full" in path.stem, preset_gpus(path), path.stem


def beyond() -> str:
    """What the bound leaves out, each in per cent of an iteration."""
    rows = []
    for mode, name in MODES.items():
        for size in SIZES:
            plan = recipe(mode, size, 8)
            iteration = plan.seconds_per_rollout
            long = recipe(mode, size, 8, text_tokens=400).seconds_per_rollout / iteration - 1
            busy = sum(e.seconds(DEVICE) - e.exposed(DEVICE) for e in plan.exchanges if e.phase != "evaluation")
            every, section = plan.config.evaluation.every, plan.config.checkpoint
            assert plan.seconds_per_evaluation is not None
            stall = plan.checkpoint / 50e9 / section.every
            most = recipe(mode, size, 512)
            assert most.seconds_per_evaluation is not None
            rows.append(
                [
                    f"{name}, {size}",
                    _percent(long),
                    _percent(SHARE_OF_MULTIPROCESSORS * busy / iteration),
                    _percent(plan.seconds_per_evaluation / every / iteration),
                    _percent(most.seconds_per_evaluation / every / most.seconds_per_rollout),
                    _percent(stall / iteration),
                ]
            )
    header = ["recipe", "a prompt of 400 tokens on one rank", "collectives on the multiprocessors"]
    return _table([*header, "evaluation, 8 GPUs", "evaluation, 512 GPUs", "checkpoint's copy to the CPU"], rows)


def failures() -> str:
    """Hours between failures, and what is lost to them."""
    iteration = recipe("full", "480p", 64, "--distributed.sp=2", "--distributed.dp_shard=4").seconds_per_rollout / 3600
    rows = []
    for gpus in (8, 64, 512, 4096, 16384):
        between = GPU_HOURS_PER_FAILURE / gpus

        def lost(interval: float, between: float = between) -> str:
            share = (interval / 2 + RESTART_HOURS) / between
            return _percent(share) if share < 1 else "no progress"

        rows.append(
            [
                f"{gpus:,}",
                f"{between:,.0f} h" if between >= 100 else f"{between:.1f} h",
                lost(10 * iteration),
                lost(iteration),
                _percent(1 - math.exp(-10 * iteration / between)),
            ]
        )
    header = ["GPUs", "between failures", "lost, a checkpoint every 10 updates", "lost, one every update"]
    return _table([*header, "chance of a failure in 10 updates"], rows)


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
    return _table(["what", "size", "how often", "at 46 GB/s", "at 1 Gbit/s"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "phases-lora": lambda: phases("lora"),
    "phases-full": lambda: phases("full"),
    "sequence": sequence,
    "strong": strong,
    "replicas": replicas,
    "presets": presets,
    "beyond": beyond,
    "failures": failures,
    "wires": wires,
}

_BLOCK = re.compile(r"(<!-- plan (?P<name>[\w-]+): begin -->\n)(?P<body>.*?)(<!-- plan (?P=name): end -->)", re.S)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(name, body) of the page's tables."""
    return ((match["name"], match["body"]) for match in _BLOCK.finditer(text))


def renewed(text: str) -> str:
    """A page with its tables made anew."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match["name"]]() + match[4], text)


def main() -> None:
    """Write the page."""
    text = renewed(PAGE.read_text(encoding="utf-8"))
    with replacing(PAGE) as path:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
