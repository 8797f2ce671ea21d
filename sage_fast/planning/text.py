"""A plan as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from sage_fast.objectives.base import FEW_PROMPTS, FEW_VIDEOS, objective_of, too_few
from sage_fast.planning.devices import CONVOLUTION_SHARE
from sage_fast.planning.estimate import Encoding, Option, Phase, Plan
from sage_fast.planning.memory import CPU_FRAGMENTATION, FRAGMENTATION
from sage_fast.planning.trace import Cost
from sage_fast.planning.work import CHANNELS, anchor_share


def to_text(plan: Plan, options: Sequence[Option]) -> str:
    """The plan for people."""
    # (unit of memory, its bytes, digits behind the point)
    unit = ("GB", 1e9, 1) if plan.memory.peak >= 5e9 else ("MB", 1e6, 0)
    lines = [
        *_head(plan),
        *_memory(plan, *unit),
        *_time(plan),
        *_options(plan, options, *unit),
    ]
    lines += ["assumptions", *(f"  - {line}" for line in assumptions(plan))]
    verdict = "It fits" if plan.fits else "It does not fit"
    lines += [
        "",
        f"{verdict}: {plan.memory.peak / plan.memory_limit:.0%} of the memory.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for name, *cells in (head, *rows):
        right = map(str.rjust, cells, widths[1:])
        yield "  " + "  ".join([name.ljust(widths[0]), *right])


def _head(plan: Plan) -> Iterator[str]:
    video = plan.config.video
    config = plan.config
    mode = "adapters" if config.training.mode == "lora" else "weights"
    yield "model"
    yield (
        f"  {plan.weights.total:,} parameters, {plan.weights.trained:,} trained "
        f"({mode})"
    )
    yield (
        f"  {video.num_frames} frames of {video.height}x{video.width}: latent "
        f"{'x'.join(map(str, plan.latent))}, {plan.video_tokens:,} video and "
        f"{plan.description.text_tokens} text tokens"
    )
    unit, size = ("TFLOP", 1e12) if plan.forward.total > 1e11 else ("MFLOP", 1e6)
    linear = plan.forward.linear / size
    attention = plan.forward.attention / size
    yield (
        f"  one forward of one sample: {linear:,.1f} + {attention:,.1f} {unit} "
        "(linear + attention)"
    )
    layout = plan.layout
    if layout.gpus > 1:
        yield (
            f"  {layout.gpus} GPUs = {layout.replicate} replicas x {layout.shard} "
            f"shards x {layout.sp} ranks per video (dp_replicate, dp_shard, sp): "
            f"{layout.data_parallel * config.rollout.batch_size} videos per rollout"
        )
    yield ""


def _memory(plan: Plan, unit: str, size: float, digits: int) -> Iterator[str]:
    phases = plan.memory.phases
    columns = [memory.parts() | {"total": memory.total} for memory in phases.values()]
    rows = []
    for part in columns[0]:
        held = [column[part] / size for column in columns]
        # Rows that would read 0 in every phase are left out.
        if max(held) >= 0.5 / 10**digits:
            rows.append([part, *(f"{n:.{digits}f}" if n else "" for n in held)])
    each = "each " if plan.layout.gpus > 1 else ""
    yield f"memory on {each}{plan.device.name}, {unit} (1e{9 if unit == 'GB' else 6} bytes)"
    yield from table(["", *phases], rows)
    limit = plan.memory_limit / size
    yield (
        f"  peak {plan.memory.peak / size:.{digits}f} {unit} of {limit:.0f} {unit}, "
        f"in {plan.memory.peak_phase}"
    )
    if plan.asked.model.checkpointing == "auto":
        yield f"  model.checkpointing auto: {plan.config.model.settled_checkpointing}"
    if plan.asked.rollout.micro_batch_size == "auto":
        yield f"  rollout.micro_batch_size auto: {plan.config.rollout.videos_at_once}"
    if plan.loading is not None:
        parts = ", ".join(
            f"{name} {size / 1e9:.1f}" for name, size in plan.loading.items() if size
        )
        yield (
            f"  CPU memory of a node, at most: {sum(plan.loading.values()) / 1e9:.1f} "
            f"GB ({parts})"
        )
    yield ""


def _time(plan: Plan) -> Iterator[str]:
    big = plan.forward.total > 1e11
    gpus = plan.layout.gpus
    flop_unit, flop_size = ("TFLOP", 1e12) if big else ("GFLOP", 1e9)
    byte_unit, byte_size = ("TB", 1e12) if big else ("GB", 1e9)
    sp = plan.layout.sp
    shared = f", on the {sp} GPUs that share it" if sp > 1 else ""
    yield f"time per video{shared}, predicted"

    def row(name: str, phases: Sequence[Phase]) -> list[str]:
        cost = sum((phase.cost for phase in phases), Cost())
        attention = cost.attention + cost.attention_backward
        cells = [
            name,
            f"{cost.linear / flop_size:,.1f}",
            f"{attention / flop_size:,.1f}",
            f"{cost.elementwise / byte_size:,.2f}",
            _number(sum(phase.predicted for phase in phases)),
        ]
        if gpus > 1:
            cells.append(_number(sum(phase.waiting for phase in phases)))
        return [*cells, _number(sum(phase.bound for phase in phases))]

    head = [
        "",
        f"linear, {flop_unit}",
        f"attention, {flop_unit}",
        f"elementwise, {byte_unit}",
        "predicted, s",
    ]
    if gpus > 1:
        head.append("of it waiting, s")
    rows = [row(phase.name, [phase]) for phase in plan.phases]
    rows.append(row("total", plan.phases))
    yield from table([*head, "at ceilings, s"], rows)
    hours = plan.videos_per_gpu_hour
    batch = plan.config.rollout.batch_size
    iteration = _span(plan.seconds_per_rollout)
    yield (
        f"  {hours:,.1f} videos per GPU-hour; a rollout of {batch} videos and its "
        f"update {iteration}"
    )
    if gpus > 1:
        yield f"  {gpus} GPUs: {hours * gpus:,.0f} videos per hour"
    yield from _per_update(plan)
    if plan.encoding is not None:
        yield (
            f"  encoding of prompts, at the first start: {encoding_text(plan.encoding)}"
        )
    if plan.seconds_per_evaluation is not None:
        every = plan.config.evaluation.every
        more = f"{_number(plan.evaluation_per_video)} s per video beside these"
        yield (
            f"  an evaluation, every {every} updates: about "
            f"{_span(plan.seconds_per_evaluation)}, {more}"
        )
    if gpus > 1:
        yield (
            f"  a checkpoint, every {plan.config.checkpoint.every} updates: "
            f"{_bytes(plan.checkpoint)} from each GPU"
        )
    yield ""


def encoding_text(encoding: Encoding) -> str:
    """Time and size of encoding the prompts that a run uses."""
    return (
        f"{encoding.prompts:,}, {_number(encoding.flops / 1e12)} TFLOP, "
        f"{_span(encoding.seconds)} and loading the "
        f"encoders, {_bytes(encoding.size)} in the cache"
    )


def _per_update(plan: Plan) -> Iterator[str]:
    """Videos and prompts of an update, beside those of published recipes
    (docs/real_model.md).
    """
    rollout = plan.config.rollout
    prompts = rollout.batch_size * plan.layout.data_parallel // rollout.num_generations
    videos = objective_of(plan.config).videos_per_update(plan.config, prompts)
    yield (
        f"  {videos} videos of {prompts} prompts per update; published: 64 (16 x 4) "
        "to 1,152 (48 x 24)"
    )
    if plan.on_gpu and too_few(videos, prompts):
        yield (
            f"  warning: below {FEW_VIDEOS} videos or {FEW_PROMPTS} prompts per "
            "update a curve may stay flat; raise "
            "rollout.batch_size, or start with a preset named quick"
        )


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _number(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def _span(seconds: float) -> str:
    return f"{_number(seconds)} s" if seconds < 120 else f"{_number(seconds / 60)} min"


def _options(
    plan: Plan, options: Sequence[Option], unit: str, size: float, digits: int
) -> Iterator[str]:
    if not options:
        return
    if plan.fits:
        yield "possible changes, one at a time; the result stays the same"
    elif options[0].plan.fits:
        yield "changes that make it fit, each line by itself; the result stays the same"
    else:
        yield "no change that keeps the result makes it fit; this one needs least memory"
    rows = []
    for option in options:
        peak = f"{option.plan.memory.peak / size:.{digits}f}"
        seconds = _number(option.plan.seconds_per_video)
        rows.append([option.overrides, peak, seconds])
    yield from table(["", f"peak {unit}", "s per video"], rows)
    if not plan.fits and not options[0].plan.fits:
        fewer = "more GPUs (--gpus), --training.mode=lora, or "
        smaller = fewer if plan.config.training.mode == "full" else ""
        yield (
            f"  beyond that: {smaller}a smaller video.num_frames, video.height and "
            "video.width, or more memory"
        )
    yield ""


def assumptions(plan: Plan) -> list[str]:
    """Premises of the figures."""
    config = plan.config
    device = plan.device
    reached = device.efficiencies
    layout = plan.layout
    product, _, _, attention = device.rates(
        config.compute_dtype, config.model.attention
    )
    image_tokens = plan.description.image_tokens
    pictures = f" ({image_tokens} of a picture)" if image_tokens else ""
    lines = [
        (
            "exact: parameters, trajectories, copies; FLOPs, elementwise bytes and "
            "activations traced on the meta device"
        ),
        (
            f"every prompt has {plan.description.text_tokens} text tokens{pictures}, "
            "the empty one too; no glyph tokens"
        ),
        f"ceilings ({device.source}): products {product / 1e12:,.3g} TFLOP/s, "
        f"attention {attention}, copy {device.bandwidth:,.3g} TB/s",
        f"efficiencies, {reached.source}: products {reached.linear:.0%}, attention "
        f"{device.attention_share(config.compute_dtype, config.model.attention):.0%}, "
        f"elementwise {reached.elementwise:.0%}",
        f"convolutions reach {CONVOLUTION_SHARE:.0%} of products",
    ]
    if plan.visits.anchor:
        share = anchor_share(config)
        measured = config.objective.kl_position_fraction
        steps = f" at {measured:.0%} of the steps" if measured < 1 else ""
        lines.append(
            f"the KL to the anchor is measured{steps} in {share:.0%} of the rollouts; "
            "after a refresh it is 0"
        )
    if plan.on_gpu:
        lines.append(
            f"fragmentation {FRAGMENTATION:.0%} of temporary memory; a CUDA context "
            "of 1.5 GB"
        )
    else:
        lines.append(
            "runtime is this process with the libraries of a run and the pictures of "
            f"an evaluation; the allocator keeps {CPU_FRAGMENTATION:.0%} of temporary "
            "memory; operators that take microseconds cost more"
        )
    if plan.decoding.tiled:
        lines.append(
            "videos are decoded in tiles: one does not fit model.decode_memory_gib "
            "whole"
        )
    if not plan.decoding.limited and plan.asked.model.decode_memory_gib != "auto":
        lines.append(
            f"model.decode_memory_gib changes nothing: {plan.asked.model.family} has "
            "no tiles"
        )
    if layout.gpus > 1:
        fabric = f"NVLink {device.link:,.0f} GB/s"
        if layout.gpus > layout.node:
            fabric += (
                f", network {device.network:,.0f} GB/s per GPU, nodes of {layout.node}"
            )
        lines += [
            f"waiting counted: exchange of a video's tokens and heads ({fabric}, "
            "reported); ranks wait for the longest prompts (expected "
            f"{plan.longest:.2f} times the mean) and for the rank with most videos to "
            "train, tokens, videos to decode and evaluation batches",
            (
                "waiting not counted: other collectives, latencies, GPUs of unequal "
                "speed, rewards"
            ),
            (
                "communication buffers: NCCL's defaults (NCCL_BUFFSIZE 4 MiB, "
                f"{CHANNELS} channels) per group of ranks"
            ),
        ]
        if plan.gathered.sharded:
            kept = {
                "never": "for every forward and backward",
                "rollout": (
                    "once for rollout, anchor and evaluation, and for every pass of "
                    "an update"
                ),
                "always": "once",
            }
            lines.append(
                f"weights are gathered {kept[plan.gathered.keep]} "
                "(distributed.keep_gathered)"
            )
        if plan.gathered.sharded and config.distributed.cpu_offload:
            lines.append(
                "the way of shards over PCIe, and the optimizer on the CPU, are not "
                "predicted"
            )
    else:
        lines.append("one process, so no communication and no waiting")
    return lines


JSON = (
    "fits device layout weights latent video_tokens forward memory_limit loading "
    "visits waits waiting seconds_per_video seconds_per_rollout "
    "videos_per_gpu_hour seconds_per_evaluation evaluation_per_video encoding checkpoint"
)
"""Fields and properties of `Plan` under their own names."""


def to_json(plan: Plan, options: Sequence[Option]) -> dict[str, Any]:
    """The plan for scripts; bytes, FLOPs and seconds without rounding."""
    tree = {name: getattr(plan, name) for name in JSON.split()}
    tree["memory"] = {name: held.parts() for name, held in plan.memory.phases.items()}
    tree["phases"] = {phase.name: phase for phase in plan.phases}
    tree["peak"] = plan.memory.peak
    tree["peak_phase"] = plan.memory.peak_phase
    tree["options"] = [
        {
            "changes": dict(option.changes),
            "fits": option.plan.fits,
            "peak": option.plan.memory.peak,
            "seconds_per_video": option.plan.seconds_per_video,
        }
        for option in options
    ]
    tree["assumptions"] = assumptions(plan)
    plain: dict[str, Any] = to_jsonable_python(tree)
    return plain
