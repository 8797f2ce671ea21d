"""A plan as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sage_fast.planning.devices import ATTENTION_SHARE, CONVOLUTION_SHARE, ELEMENTWISE_SHARE, LINEAR_SHARE
from sage_fast.planning.memory import CPU_FRAGMENTATION, FRAGMENTATION
from sage_fast.planning.plan import HOST_LINK, Plan
from sage_fast.planning.search import Option


def to_text(plan: Plan, options: Sequence[Option]) -> str:
    """The plan for people."""
    lines = [*_head(plan), *_memory(plan), *_time(plan), *_options(plan, options), *_assumptions(plan), ""]
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
    yield ""


def _memory(plan: Plan) -> Iterator[str]:
    phases = list(plan.memory.phases)
    parts = dict.fromkeys(part for phase in plan.memory.phases.values() for part in phase)
    if "fragmentation" in parts:
        parts["fragmentation"] = parts.pop("fragmentation")
    unit, size = ("GB", 1e9) if plan.memory.peak >= 5e9 else ("MB", 1e6)
    digits = 1 if unit == "GB" else 0
    shown = [p for p in parts if max(v.get(p, 0.0) for v in plan.memory.phases.values()) >= 0.5 * size / 10**digits]
    width = max(map(len, [*shown, "total"]))
    columns = [max(len(phase), 7) for phase in phases]
    where = "on each GPU" if plan.gpus > 1 else f"on {plan.device.name}"
    yield f"memory {where}, {unit} (1e{len(str(int(size))) - 1} bytes)"

    def row(name: str, cells: Sequence[str]) -> str:
        aligned = "  ".join(f"{cell:>{column}}" for cell, column in zip(cells, columns, strict=True))
        return f"  {name:<{width}}  {aligned}"

    yield row("", phases)
    for part in shown:
        values = [plan.memory.phases[phase].get(part) for phase in phases]
        yield row(part, ["" if not value else f"{value / size:.{digits}f}" for value in values])
    yield row("total", [f"{plan.memory.total(phase) / size:.{digits}f}" for phase in phases])
    limit = plan.memory_limit / size
    yield f"  peak {plan.memory.peak / size:.{digits}f} {unit} of {limit:.0f} {unit}, in {plan.memory.peak_phase}"
    yield ""


def _time(plan: Plan) -> Iterator[str]:
    big = plan.forward.total > 1e11
    flop_unit, flop_size = ("TFLOP", 1e12) if big else ("GFLOP", 1e9)
    byte_unit, byte_size = ("TB", 1e12) if big else ("GB", 1e9)
    yield "time per video, predicted"
    yield (f"  {'':<13}  {'linear':>9}  {'attention':>9}  {'elementwise':>11}  {'predicted':>10}  {'at ceilings':>11}")
    yield f"  {'':<13}  {flop_unit:>9}  {flop_unit:>9}  {byte_unit:>11}  {'s':>10}  {'s':>11}"
    for phase in plan.phases:
        cost = phase.cost
        attention = cost.attention + cost.attention_backward
        yield (
            f"  {phase.name:<13}  {cost.linear / flop_size:>9,.1f}  {attention / flop_size:>9,.1f}  "
            f"{cost.elementwise / byte_size:>11,.2f}  {_number(phase.predicted):>10}  {_number(phase.bound):>11}"
        )
    flops = sum(phase.cost.linear for phase in plan.phases) / flop_size
    attention = sum(p.cost.attention + p.cost.attention_backward for p in plan.phases) / flop_size
    moved = sum(phase.cost.elementwise for phase in plan.phases) / byte_size
    yield (
        f"  {'total':<13}  {flops:>9,.1f}  {attention:>9,.1f}  {moved:>11,.2f}  "
        f"{_number(plan.seconds_per_video):>10}  {_number(plan.bound_per_video):>11}"
    )
    hours, batch = plan.videos_per_gpu_hour, plan.config.rollout.batch_size
    iteration = _span(plan.seconds_per_rollout)
    yield f"  {hours:,.1f} videos per GPU-hour; a rollout of {batch} videos and its update {iteration}"
    if plan.gpus > 1:
        yield (
            f"  {plan.gpus} GPUs: {hours * plan.gpus:,.0f} videos per hour; each sends "
            f"{plan.communication / 1e9:.2f} GB of gradients per optimizer update"
        )
    if plan.seconds_per_evaluation is not None:
        every = plan.config.evaluation.every
        yield f"  an evaluation, every {every} updates: {_span(plan.seconds_per_evaluation)}"
    yield ""


def _number(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def _span(seconds: float) -> str:
    return f"{_number(seconds)} s" if seconds < 120 else f"{_number(seconds / 60)} min"


def _options(plan: Plan, options: Sequence[Option]) -> Iterator[str]:
    if not options:
        return
    unit, size, digits = ("GB", 1e9, 1) if plan.memory.peak >= 5e9 else ("MB", 1e6, 0)
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
        smaller = "--training.mode=lora, or " if plan.config.training.mode == "full" else ""
        yield f"  beyond that: {smaller}a smaller video.num_frames, video.height and video.width, or more memory"
    yield ""


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on."""
    config, device = plan.config, plan.device
    product, _, _, attention = device.rates(config.model.dtype, config.model.attention)
    fused = config.model.forward == "fused"
    counted = "traced on the meta device" if fused else "estimated: diffusers' own forward cannot be traced"
    lines = [
        f"exact: parameters, trajectories, copies; FLOPs, elementwise bytes and activations {counted}",
        f"every prompt has {plan.description.text_tokens} text tokens, the empty one too; no glyph tokens",
        f"ceilings ({device.source}): products {product / 1e12:,.3g} TFLOP/s, attention {attention}, copy "
        f"{device.bandwidth:,.3g} TB/s",
        f"reached of them: products {LINEAR_SHARE:.0%}, attention {ATTENTION_SHARE:.0%}, elementwise "
        f"{ELEMENTWISE_SHARE:.0%}, decoding {CONVOLUTION_SHARE:.0%}",
    ]
    if plan.visits.anchor:
        share = plan.visits.anchor / max(plan.visits.update + plan.visits.late_updates, plan.visits.pass_steps)
        lines.append(
            f"the anchor lies behind the policy in {share:.0%} of the rollouts; the others need no forward for it"
        )
    if plan.device.link:
        lines.append(f"fragmentation {FRAGMENTATION:.0%} of what comes and goes; a CUDA context of 1.5 GB")
        if config.model.offload_activations:
            lines.append(f"activations come back from the CPU at {HOST_LINK / 1e9:.0f} GB/s, not hidden")
    else:
        lines.append(
            f"runtime is this process with the libraries of a run; the allocator keeps {CPU_FRAGMENTATION:.0%} of what "
            "comes and goes; operators that take microseconds cost more"
        )
    if plan.tiled:
        lines.append("videos are decoded in tiles: one does not fit model.decode_memory_gib whole")
    if plan.gpus > 1:
        lines.append(
            f"{plan.gpus} data-parallel replicas, a prediction: the trainer runs on one process today; "
            "communication is not overlapped"
        )
    else:
        lines.append("one process, so no communication")
    return lines


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
        "memory": {phase: dict(parts) for phase, parts in plan.memory.phases.items()},
        "phases": {
            phase.name: {
                "linear_flops": phase.cost.linear,
                "attention_flops": phase.cost.attention + phase.cost.attention_backward,
                "elementwise_bytes": phase.cost.elementwise,
                "seconds": phase.predicted,
                "seconds_at_ceilings": phase.bound,
            }
            for phase in plan.phases
        },
        "seconds_per_video": plan.seconds_per_video,
        "videos_per_gpu_hour": plan.videos_per_gpu_hour,
        "seconds_per_evaluation": plan.seconds_per_evaluation,
        "communication_bytes": plan.communication,
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
