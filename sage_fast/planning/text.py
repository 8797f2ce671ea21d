"""A plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sage_fast.planning.communication import Exchange
from sage_fast.planning.devices import ATTENTION_SHARE, CONVOLUTION_SHARE, ELEMENTWISE_SHARE, LINEAR_SHARE
from sage_fast.planning.estimate import Phase, Plan
from sage_fast.planning.layout import CHANNELS
from sage_fast.planning.memory import CPU_FRAGMENTATION, FRAGMENTATION, Memory, PhaseMemory
from sage_fast.planning.search import Option
from sage_fast.planning.weights import compute_dtype
from sage_fast.planning.work import anchor_share


def to_text(plan: Plan, options: Sequence[Option]) -> str:
    """The plan for people."""
    lines = [*_head(plan), *_memory(plan), *_time(plan), *_exchanges(plan), *_options(plan, options)]
    lines += [*_assumptions(plan), ""]
    return "\n".join(line.rstrip() for line in [*lines, _verdict(plan)])


def _head(plan: Plan) -> Iterator[str]:
    video, config = plan.config.video, plan.config
    mode = "adapters" if config.training.mode == "lora" else "weights"
    yield "model"
    yield f"  {plan.weights.total:,} parameters, {plan.weights.trained:,} trained ({mode})"
    yield (
        f"  {video.num_frames} frames of {video.height}x{video.width}: latent "
        f"{'x'.join(map(str, plan.latent))}, {plan.video_tokens:,} video and {plan.description.text_tokens} text tokens"
    )
    unit, size = ("TFLOP", 1e12) if plan.forward.total > 1e11 else ("MFLOP", 1e6)
    linear, attention = plan.forward.linear / size, plan.forward.attention / size
    yield f"  one forward of one sample: {linear:,.1f} + {attention:,.1f} {unit} (linear + attention)"
    if plan.gpus > 1:
        layout = plan.layout
        yield (
            f"  {plan.gpus} GPUs = {layout.replicate} replicas x {layout.shard} shards x {layout.sp} ranks per video "
            f"(dp_replicate, dp_shard, sp): {layout.data_parallel * config.rollout.batch_size} videos per rollout"
        )
    yield ""


def _memory(plan: Plan) -> Iterator[str]:
    columns = {phase: memory.parts() for phase, memory in plan.memory.phases.items()}
    unit, size, digits = _unit(plan)
    visible = 0.5 * size / 10**digits
    shown = [part for part in PhaseMemory().parts() if max(c[part] for c in columns.values()) >= visible]
    width = max(map(len, [*shown, "total"]))
    where = f"on each {plan.device.name}" if plan.gpus > 1 else f"on {plan.device.name}"
    yield f"memory {where}, {unit} (1e{len(str(int(size))) - 1} bytes)"

    def row(name: str, cells: Sequence[str]) -> str:
        aligned = "  ".join(f"{cell:>{max(len(phase), 7)}}" for cell, phase in zip(cells, columns, strict=True))
        return f"  {name:<{width}}  {aligned}"

    yield row("", list(columns))
    for part in shown:
        yield row(part, [f"{c[part] / size:.{digits}f}" if c[part] else "" for c in columns.values()])
    yield row("total", [f"{plan.memory.total(phase) / size:.{digits}f}" for phase in columns])
    limit = plan.memory_limit / size
    yield f"  peak {plan.memory.peak / size:.{digits}f} {unit} of {limit:.0f} {unit}, in {plan.memory.peak_phase}"
    if plan.asked.model.checkpointing == "auto":
        yield f"  model.checkpointing auto: {plan.config.model.settled_checkpointing}"
    if plan.loading is not None:
        yield f"  CPU memory of a node while it loads: {loading_text(plan.loading)}"
    yield ""


def loading_text(loading: Mapping[str, float]) -> str:
    """The sum of `MemoryPlan.loading` and its parts."""
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in loading.items() if size)
    return f"{sum(loading.values()) / 1e9:.1f} GB ({parts})"


def _unit(plan: Plan) -> tuple[str, float, int]:
    """(unit of memory, its bytes, digits behind the point)."""
    return ("GB", 1e9, 1) if plan.memory.peak >= 5e9 else ("MB", 1e6, 0)


SUMMARY = {
    "weights": ("transformer", "gathered_weights", "weights_in_flight"),
    "gradients, optimizer, anchor": (
        "adapters",
        "gradients",
        "optimizer_state",
        "anchor",
        "average",
        "gradient_accumulators",
    ),
    "trajectories": ("trajectories", "anchor_velocities", "videos"),
    "prompt encoder": ("prompt_encoder",),
    "VAE": ("video_decoder",),
    "rewards": ("reward_models", "reward_tables"),
    "runtime": ("runtime", "communication_buffers"),
    "activations": ("kept_activations",),
    "working set": ("working_set", "tables", "optimizer_step", "fragmentation"),
    "decoding": ("decoding",),
    "scoring": ("scoring",),
}
"""Rows of a summary of a plan's memory -> fields of `PhaseMemory`."""


def summary(memory: Memory) -> dict[str, float]:
    """Gigabytes of each group of `SUMMARY`, each at its own peak, so they add up to more than the peak of a phase."""
    return {
        group: max(sum(getattr(phase, name) for name in names) for phase in memory.phases.values()) / 1e9
        for group, names in SUMMARY.items()
    }


def _time(plan: Plan) -> Iterator[str]:
    big = plan.forward.total > 1e11
    flop_unit, flop_size = ("TFLOP", 1e12) if big else ("GFLOP", 1e9)
    byte_unit, byte_size = ("TB", 1e12) if big else ("GB", 1e9)
    several = plan.gpus > 1
    shared = f", on the {plan.layout.sp} GPUs that share it" if plan.layout.sp > 1 else ""
    waits = f"  {'of it waiting':>13}" if several else ""
    yield f"time per video{shared}, predicted"
    yield (
        f"  {'':<13}  {'linear':>9}  {'attention':>9}  {'elementwise':>11}  "
        f"{'predicted':>10}{waits}  {'at ceilings':>11}"
    )
    seconds = f"  {'s':>13}" if several else ""
    yield f"  {'':<13}  {flop_unit:>9}  {flop_unit:>9}  {byte_unit:>11}  {'s':>10}{seconds}  {'s':>11}"

    def row(name: str, phases: Sequence[Phase]) -> str:
        linear = sum(phase.cost.linear for phase in phases) / flop_size
        attention = sum(p.cost.attention + p.cost.attention_backward for p in phases) / flop_size
        moved = sum(phase.cost.elementwise for phase in phases) / byte_size
        waiting = f"  {_number(sum(phase.waiting for phase in phases)):>13}" if several else ""
        return (
            f"  {name:<13}  {linear:>9,.1f}  {attention:>9,.1f}  {moved:>11,.2f}  "
            f"{_number(sum(phase.predicted for phase in phases)):>10}{waiting}  "
            f"{_number(sum(phase.bound for phase in phases)):>11}"
        )

    yield from (row(phase.name, [phase]) for phase in plan.phases)
    yield row("total", plan.phases)
    hours, batch = plan.videos_per_gpu_hour, plan.config.rollout.batch_size
    iteration = _span(plan.seconds_per_rollout)
    yield f"  {hours:,.1f} videos per GPU-hour; a rollout of {batch} videos and its update {iteration}"
    if several:
        yield (
            f"  {plan.gpus} GPUs: {hours * plan.gpus:,.0f} videos per hour, at most {plan.weak_scaling:.1%} of "
            f"{plan.gpus} times one GPU (weak scaling)"
        )
    if plan.seconds_per_evaluation is not None:
        every = plan.config.evaluation.every
        yield f"  an evaluation, every {every} updates: {_span(plan.seconds_per_evaluation)}"
    if several:
        yield f"  a checkpoint, every {plan.config.checkpoint.every} updates: {_bytes(plan.checkpoint)} from each GPU"
    yield ""


def _exchanges(plan: Plan) -> Iterator[str]:
    """Traffic of one GPU per iteration and per evaluation."""
    if not plan.exchanges:
        return
    rows = merged(plan.exchanges)
    width = max(len(purpose) for _, purpose, _ in rows)
    yield "exchange of one GPU per rollout and its updates (and per evaluation)"
    yield (
        f"  {'':<10}  {'':<{width}}  {'':<14}  {'calls':>9}  {'NVLink GB':>10}  {'network GB':>10}  {'s':>8}  "
        f"{'waited s':>8}"
    )
    for (phase, purpose, kind), exchanges in rows.items():
        near = sum(e.bytes * (1 - e.network_share) for e in exchanges) / 1e9
        far = sum(e.bytes * e.network_share for e in exchanges) / 1e9
        seconds = sum(e.seconds(plan.device) for e in exchanges)
        waited = sum(e.exposed(plan.device) for e in exchanges)
        yield (
            f"  {phase:<10}  {purpose:<{width}}  {kind.replace('_', '-'):<14}  "
            f"{sum(e.count for e in exchanges):>9,.0f}  {near:>10,.2f}  {far:>10,.2f}  {_number(seconds):>8}  "
            f"{_number(waited):>8}"
        )
    yield ""


def merged(exchanges: Sequence[Exchange]) -> dict[tuple[str, str, str], list[Exchange]]:
    """Exchanges of one phase, purpose and kind together."""
    rows: dict[tuple[str, str, str], list[Exchange]] = {}
    for exchange in exchanges:
        rows.setdefault((exchange.phase, exchange.purpose, exchange.kind), []).append(exchange)
    return rows


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _number(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def _span(seconds: float) -> str:
    return f"{_number(seconds)} s" if seconds < 120 else f"{_number(seconds / 60)} min"


def _options(plan: Plan, options: Sequence[Option]) -> Iterator[str]:
    if not options:
        return
    unit, size, digits = _unit(plan)
    if plan.fits:
        yield "what could be changed, one at a time; none changes what is computed"
    elif options[0].plan.fits:
        yield "what makes it fit, the fewest changes first; none changes what is computed"
    else:
        yield "no change of how it is computed makes it fit; the one that needs least memory"
    width = max(len(option.overrides) for option in options)
    yield f"  {'':<{width}}  {'peak ' + unit:>9}  {'s per video':>11}"
    for option in options:
        yield (
            f"  {option.overrides:<{width}}  {option.plan.memory.peak / size:>9.{digits}f}  "
            f"{_number(option.plan.seconds_per_video):>11}"
        )
    if not plan.fits and not options[0].plan.fits:
        smaller = "more GPUs (--gpus), --training.mode=lora, or " if plan.config.training.mode == "full" else ""
        yield f"  beyond that: {smaller}a smaller video.num_frames, video.height and video.width, or more memory"
    yield ""


def assumptions(plan: Plan) -> list[str]:
    """Assumptions behind the figures."""
    config, device = plan.config, plan.device
    product, _, _, attention = device.rates(compute_dtype(config), config.model.attention)
    fused = config.model.forward == "fused"
    counted = "traced on the meta device" if fused else "estimated: diffusers' own forward cannot be traced"
    lines = [
        f"exact: parameters, trajectories, copies; FLOPs, elementwise bytes and activations {counted}",
        f"every prompt has {plan.description.text_tokens} text tokens, the empty one too; no glyph tokens",
        f"ceilings ({device.source}): products {product / 1e12:,.3g} TFLOP/s, attention {attention}, copy "
        f"{device.bandwidth:,.3g} TB/s",
        f"reached of them: products {LINEAR_SHARE:.0%}, attention {ATTENTION_SHARE:.0%}, elementwise "
        f"{ELEMENTWISE_SHARE:.0%}, convolutions {CONVOLUTION_SHARE:.0%}",
    ]
    if plan.visits.anchor:
        share = anchor_share(config.training, config.objective.kl_mode)
        lines.append(
            f"the anchor lies behind the policy in {share:.0%} of the rollouts; the others need no forward for it"
        )
        if config.objective.kl_position_fraction < 1:
            lines.append(f"the KL to it is measured at {config.objective.kl_position_fraction:.0%} of the steps")
    rollout, chosen = config.rollout, config.training.train_on.count
    if chosen:
        uneven = plan.layout.data_parallel > 1 and rollout.batch_size % rollout.num_generations
        waiting = "; a group lies on several ranks, which wait for the one with most" if uneven else ""
        lines.append(f"{chosen} of the {rollout.num_generations} videos of a group are trained{waiting}")
    if plan.on_gpu:
        lines.append(f"fragmentation {FRAGMENTATION:.0%} of what comes and goes; a CUDA context of 1.5 GB")
    else:
        lines.append(
            f"runtime is this process with the libraries of a run; the allocator keeps {CPU_FRAGMENTATION:.0%} of what "
            "comes and goes; operators that take microseconds cost more"
        )
    if plan.tiled:
        lines.append("videos are decoded in tiles: one does not fit model.decode_memory_gib whole")
    if plan.gpus > 1:
        lines += _several(plan)
    elif plan.gathered.sharded:
        lines.append("one process under torchrun: FSDP gathers from one rank, and nothing is exchanged")
    else:
        lines.append("one process, so no communication")
    return lines


def _several(plan: Plan) -> Iterator[str]:
    device, layout = plan.device, plan.layout
    fabric = f"exchange (reported, not measured here): NVLink {device.link:,.0f} GB/s"
    if plan.gpus > layout.node:
        fabric += f", network {device.network:,.0f} GB/s per GPU, nodes of {layout.node}"
    yield f"{fabric}; latencies of NCCL's rings"
    if plan.on_gpu:
        yield f"communication buffers: NCCL's defaults (NCCL_BUFFSIZE 4 MiB, {CHANNELS} channels) per group of ranks"
    if plan.gathered.sharded:
        kept = {
            "never": "gathered for every forward and backward",
            "rollout": "kept gathered through rollout, anchor and evaluation, gathered for every pass of an update",
            "always": "kept gathered",
        }
        yield (
            f"weights are {kept[plan.gathered.keep]} (distributed.keep_gathered); what is gathered or summed hides "
            "behind a block's computation"
        )
    if layout.sp > 1:
        yield "all-to-alls hide behind nothing; a video is decoded and scored by one of its ranks"
    if plan.gathered.sharded and plan.config.distributed.cpu_offload:
        yield "the way of shards over PCIe, and the optimizer on the CPU, are not predicted"
    yield "no rank waits for another: prompts of one length, GPUs of one speed, rewards in time"


def _assumptions(plan: Plan) -> Iterator[str]:
    yield "assumptions"
    for line in assumptions(plan):
        yield f"  - {line}"


def _verdict(plan: Plan) -> str:
    used = plan.memory.peak / plan.memory_limit
    if plan.fits:
        return f"It fits: {used:.0%} of the memory."
    return f"It does not fit: {used:.0%} of the memory."


def to_json(plan: Plan, options: Sequence[Option]) -> dict[str, Any]:
    """The plan for scripts; bytes, FLOPs and seconds without rounding."""
    return {
        "fits": plan.fits,
        "device": asdict(plan.device),
        "gpus": plan.gpus,
        "parameters": plan.weights.total,
        "trained_parameters": plan.weights.trained,
        "latent": list(plan.latent),
        "video_tokens": plan.video_tokens,
        "text_tokens": plan.description.text_tokens,
        "forward_flops": asdict(plan.forward),
        "memory_limit": plan.memory_limit,
        "peak_memory": plan.memory.peak,
        "peak_phase": plan.memory.peak_phase,
        "checkpointing": plan.config.model.checkpointing,
        "loading_memory": plan.loading,
        "memory": {phase: memory.parts() for phase, memory in plan.memory.phases.items()},
        "phases": {
            phase.name: {
                "linear_flops": phase.cost.linear,
                "attention_flops": phase.cost.attention + phase.cost.attention_backward,
                "elementwise_bytes": phase.cost.elementwise,
                "seconds": phase.predicted,
                "seconds_at_ceilings": phase.bound,
                "seconds_waiting": phase.waiting,
            }
            for phase in plan.phases
        },
        "seconds_per_video": plan.seconds_per_video,
        "videos_per_gpu_hour": plan.videos_per_gpu_hour,
        "seconds_per_evaluation": plan.seconds_per_evaluation,
        "degrees": {"dp_replicate": plan.layout.replicate, "dp_shard": plan.layout.shard, "sp": plan.layout.sp},
        "weak_scaling": plan.weak_scaling,
        "checkpoint_bytes_per_gpu": plan.checkpoint,
        "exchanges": [
            {
                "phase": e.phase,
                "purpose": e.purpose,
                "kind": e.kind,
                "count": e.count,
                "bytes_sent": e.bytes,
                "network_share": e.network_share,
                "ranks": e.group.ranks,
                "seconds": e.seconds(plan.device),
                "seconds_waiting": e.exposed(plan.device),
            }
            for e in plan.exchanges
        ],
        "options": [
            {
                "changes": dict(option.changes),
                "fits": option.plan.fits,
                "peak_memory": option.plan.memory.peak,
                "seconds_per_video": option.plan.seconds_per_video,
            }
            for option in options
        ],
        "assumptions": assumptions(plan),
    }
