"""The plan of a configuration: memory by phase, work, exchange and predicted time on
each GPU, and changes that save memory. Nothing is loaded.

plan = make_plan(load_config("hv15_480p_lora_1gpu"), DEVICES["h100"])
plan.memory.peak, plan.seconds_per_video
"""

import importlib
import importlib.util
import logging
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sage_fast.config.errors import ConfigError
from sage_fast.config.schema import RunConfig, check_gathering
from sage_fast.distributed.start import rank_device, world_size
from sage_fast.models.family import Decoding, ModelDescription, Work, describe_model
from sage_fast.models.hub import stored_bytes
from sage_fast.objectives.base import objective_of
from sage_fast.planning.devices import Device, gpu_memory_gb, waiting
from sage_fast.planning.memory import (
    CUDA_RUNTIME,
    FRAGMENTATION,
    GB,
    PICTURES,
    MemoryPlan,
    checkpoint_bytes,
)
from sage_fast.planning.trace import Cost, trace
from sage_fast.planning.work import (
    Visits,
    count_weights,
    gathered_weights,
    plan_layout,
    velocity_call,
    visits,
)
from sage_fast.records import word_count
from sage_fast.rewards.base import reward_costs
from sage_fast.run import prompt_files

logger = logging.getLogger(__name__)

FULL_CALL = 16_384
"""Video tokens of a call from which on a GPU counts as busy: more videos at once take
memory and save no time.
"""

SAFE_SHARE = 0.92
"""Share of a GPU's memory up to which an estimate counts as safe."""

AUTOMATIC = (
    ("model", "checkpointing"),
    ("rollout", "micro_batch_size"),
    ("model", "decode_memory_gib"),
)
"""Sections and keys that `auto` leaves to the plan. A video that may need tiles is
decoded in them where `decode_memory_gib` stays `auto`.
"""

_words = cache(word_count)  # a plan with options asks many times


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of an iteration, per video, on each of the GPUs that share the video.

    Attributes:
        cost: work of one GPU.
        predicted, bound: seconds, as predicted and with the computation at its
            ceilings; both hold `waiting`, the seconds in which a rank computes nothing
            because of an exchange or of a slower rank.

    Example: `Phase(name="update", cost=..., predicted=158.4, bound=138.2)`
    """

    name: str
    cost: Cost
    predicted: float
    bound: float
    waiting: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Encoding of the prompts that a run uses, at its first start; what the cache holds
    is not encoded again.

    Attributes:
        size: bytes in the cache.
        seconds: of the processes together, without loading the encoders.

    Example: `Encoding(prompts=1625, flops=6.6e15, size=2.5e9, seconds=9.2)`
    """

    prompts: int
    flops: float
    size: float
    seconds: float


def plan_encoding(
    config: RunConfig, device: Device, description: ModelDescription, gpus: int
) -> Encoding | None:
    """None where encoding costs nothing, or the prompts are not here."""
    files = config.data.prompts, config.evaluation.prompts
    if not description.encoding(1)[0] or any(
        isinstance(file, str) and not Path(file).is_file() for file in files
    ):
        return None
    prompts = prompt_files.load_prompts(config)
    used = prompt_files.run_prompts(config, *prompts, gpus // config.distributed.sp)
    # A thousand of them are a mean.
    some = used[:: math.ceil(len(used) / 1000)]
    words = sum(_words(prompt.text) for prompt in some) / len(some)
    flops, size = (len(used) * value for value in description.encoding(words))
    # Each process encodes a share of the prompts.
    seconds, _ = device.seconds(Cost(linear=flops / gpus), "bfloat16", "auto")
    return Encoding(prompts=len(used), flops=flops, size=size, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Plan(MemoryPlan):
    """Memory, work and time of a configuration.

    Attributes:
        forward: closed form of one packed forward of one sample.
        phases: per video, with the optimizer and what is exchanged once divided by the
            videos of a rollout; `evaluation`, once per `evaluation.every` updates, is
            not among them.
        longest: of the prompts that ranks sample at a time, over the mean length;
            expected.
        waits: seconds by phase in which tokens and heads are exchanged, per rollout and
            its updates.
        seconds_per_evaluation: None without one.
        checkpoint: bytes of one that each GPU writes.
        encoding: at the first start; None where its prompts are not here.
    """

    device: Device
    forward: Work
    visits: Visits
    longest: float
    phases: tuple[Phase, ...]
    waits: Mapping[str, float]
    seconds_per_evaluation: float | None
    checkpoint: float
    decoding: Decoding
    encoding: Encoding | None

    @property
    def seconds_per_video(self) -> float:
        """On the GPUs that share a video."""
        return sum(phase.predicted for phase in self.phases)

    @property
    def evaluation_per_video(self) -> float:
        """Seconds of evaluations, dealt out to the videos that are trained between two
        of them.
        """
        every = (
            self.config.evaluation.every
            * self.config.rollout.batch_size
            / self.config.training.updates_per_rollout
        )
        return (self.seconds_per_evaluation or 0.0) / max(every, 1)

    @property
    def seconds_per_rollout(self) -> float:
        return self.seconds_per_video * self.config.rollout.batch_size

    @property
    def videos_per_gpu_hour(self) -> float:
        return 3600.0 / (self.seconds_per_video * self.layout.sp)

    @property
    def waiting(self) -> float:
        """Seconds per video in which a rank computes nothing."""
        return sum(phase.waiting for phase in self.phases)


def make_memory_plan(
    config: RunConfig,
    *,
    on_gpu: bool,
    gpus: int,
    memory_gb: float,
    limit_gb: float | None = None,
    runtime: float | None = None,
    description: ModelDescription | None = None,
    sizes: Mapping[str, float] | None = None,
) -> MemoryPlan:
    """The part of `make_plan` that is about memory; it needs no ceilings of a device.

    Args:
        memory_gb: 1e9 bytes that the device has; it decides whether gathered weights
            stay.
        limit_gb: 1e9 bytes that may be used; None means all of them.

    Returns:
        The plan. Its `config` has what fits instead of `auto` for `model.checkpointing`
        and `rollout.micro_batch_size`, and a number for `model.decode_memory_gib: auto`
        where a video of a family that has tiles fits whole.

    Raises:
        ConfigError: the model, the size of the videos or the options do not fit each
            other.
    """
    description = description or describe_model(config.model)
    if runtime is None:
        runtime = CUDA_RUNTIME if on_gpu else resident_bytes()
    if not on_gpu and config.evaluation.num_samples:
        runtime += PICTURES
    limit_gb = memory_gb if limit_gb is None else limit_gb
    room = SAFE_SHARE * limit_gb * GB
    try:
        video = config.video
        latent = description.latent_shape(video.num_frames, video.height, video.width)
        heads = description.transformer["num_attention_heads"]
        layout = plan_layout(config, gpus, heads, description.tokens(latent))
        weights = count_weights(config, description.transformer)
        memory = min(memory_gb, limit_gb) * 1e9
        gathered = gathered_weights(
            config, weights, description.num_blocks, layout, memory
        )
        # A configuration that a run refuses is not planned. It may be launched as one
        # process of a group.
        check_gathering(
            config.distributed,
            config.model,
            config.training,
            launched=True,
            shards=layout.weight_shards,
        )
        if gathered.sharded and gathered.keep == "never" and layout.shard > 1:
            objective_of(config).check_steps_agree(config)
        # Weights whose files are here; for the others the reward's own figure counts.
        if sizes is None:
            sizes = {
                name: stored_bytes(costs.folder) / 1e9
                for name, costs in reward_costs(config.reward, config.video).items()
                if costs.folder is not None
            }
        plan = MemoryPlan(
            asked=config,
            config=config,
            description=description,
            on_gpu=on_gpu,
            layout=layout,
            weights=weights,
            gathered=gathered,
            sizes={name: size for name, size in sizes.items() if size},
            runtime=runtime,
            memory_limit=limit_gb * 1e9,
        )
        # Checkpointing first; several videos at once take of the room that it leaves.
        if on_gpu and config.model.checkpointing == "auto":
            plan = _fill(plan, room)
        if on_gpu and config.rollout.micro_batch_size == "auto":
            plan = _fill_calls(plan, room)
        decode = plan.memory.phases["decode"]  # with what `auto` is without a plan
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # A video is decoded whole if that fits beside what the phase holds anyway, and in
    # tiles, if the family has them, if not.
    if on_gpu and config.model.decode_memory_gib == "auto":
        whole = replace(plan.config.model, decode_memory_gib=None)
        needed = description.decoding(latent, 1, whole, on_gpu).peak_bytes
        more = needed - decode.decoding
        if more > 0 and decode.total + (1 + FRAGMENTATION) * more <= room:
            # Rounded up, or the video would exceed its own limit.
            limit = float(math.ceil(needed / 2**30))
            plan = _with(plan, "model.decode_memory_gib", limit)
    return plan


Change = tuple[str, Any]
"""A config key and its new value."""


def _changed(config: RunConfig, *changes: Change) -> RunConfig:
    for key, value in changes:
        section, _, name = key.partition(".")
        new = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: new})
    return config


def _with(plan: MemoryPlan, key: str, value: Any) -> MemoryPlan:
    return replace(plan, config=_changed(plan.config, (key, value)))


def _peak(plan: MemoryPlan, *phases: str) -> float:
    return max(plan.memory.phases[name].total for name in phases)


def _fill(plan: MemoryPlan, room: float) -> MemoryPlan:
    """With the checkpointing that computes least again among those whose passes fit
    `room` bytes, for `auto`.
    """
    for checkpointing in ("feed_forward", "selective"):
        tried = _with(plan, "model.checkpointing", checkpointing)
        if _peak(tried, "rollout", "update") <= room:
            return tried
    return _with(plan, "model.checkpointing", "full")


def _fill_calls(plan: MemoryPlan, room: float) -> MemoryPlan:
    """With the fewest videos of a group at once that fill the GPU, as far as they fit
    `room` bytes, for `auto`.
    """
    config = plan.config
    group = math.gcd(config.rollout.batch_size, config.rollout.num_generations)
    plan = _with(plan, "rollout.micro_batch_size", 1)
    if objective_of(config).splits_videos and config.training.updates_per_rollout > 1:
        return plan
    # Divisors of the group alone, so that no micro-batch mixes prompts.
    for size in range(2, group + 1):
        if group % size:
            continue
        if plan.config.rollout.videos_at_once * plan.video_tokens >= FULL_CALL:
            break
        larger = _with(plan, "rollout.micro_batch_size", size)
        if _peak(larger, "rollout", "decode", "update") > room:
            break
        plan = larger
    return plan


def settle_memory(config: RunConfig) -> RunConfig:
    """With what the plan has room for on this process's GPU instead of `auto`: what
    blocks keep, how to decode, how many videos at once.

    It depends on the configuration and on the size of the GPU, not on what is free at
    the moment: every rank of a run, and the run after it has been resumed, computes
    alike. Ranks whose GPUs differ are refused by `start_world`.
    """
    device = rank_device(config.model.device)
    asked = [
        (section, name)
        for section, name in AUTOMATIC
        if getattr(getattr(config, section), name) == "auto"
    ]
    if not asked or device.type != "cuda":
        return config
    limit = gpu_memory_gb(device)
    try:
        plan = make_memory_plan(config, on_gpu=True, gpus=world_size(), memory_gb=limit)
    except ConfigError:
        return config  # what cannot be planned is computed as without a plan
    for section, name in asked:
        value = getattr(getattr(plan.config, section), name)
        logger.info("%s.%s auto: %s", section, name, value)
    return plan.config


def make_plan(
    config: RunConfig,
    device: Device,
    *,
    gpus: int = 1,
    memory_gb: float | None = None,
    runtime: float | None = None,
    description: ModelDescription | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Plan:
    """Plan a configuration.

    Args:
        device: its ceilings.
        gpus: processes, one per GPU, as the config's `distributed` section divides
            them.
        memory_gb: 1e9 bytes that may be used; None means all of the device.
        runtime: bytes of the process before anything is loaded; None means a CUDA
            context's, or this process's.
        description: of the model; None asks the family.
        sizes: gigabytes of the weights that are here, by reward; None looks for their
            files.

    Raises:
        ConfigError: the model, the size of the videos or the options do not fit each
            other.
    """
    held = make_memory_plan(
        config,
        on_gpu=device.is_gpu,
        gpus=gpus,
        memory_gb=device.memory_gb,
        limit_gb=memory_gb,
        runtime=runtime,
        description=description,
        sizes=sizes,
    )
    config = held.config
    description = held.description
    layout = held.layout
    evaluated = held.latent_of(config.evaluation_video)
    visited = visits(config, layout.data_parallel, sharded=held.gathered.sharded)
    decoding, decode = _decoding(
        held, device, held.latent, config.rollout.videos_at_once
    )
    section = config.evaluation
    _, decode_evaluated = _decoding(held, device, evaluated, section.batch_size)
    if section.every:
        prompts = section.num_prompts or len(prompt_files.load_eval_prompts(config))
    else:
        prompts = 0
    # Of an evaluation, on the rank that has most of them.
    videos = math.ceil(prompts * section.noises / section.batch_size)
    batches = math.ceil(videos / layout.data_parallel)
    tokens = description.tokens(evaluated)
    waits = waiting(
        held, visited, device, evaluation_tokens=tokens, eval_batches=batches
    )
    longest = longest_prompt(config, layout.data_parallel)
    forward = _forward_work(held, description.text_tokens)
    words = description.text_tokens - description.image_tokens
    # A picture has as many tokens for every prompt; only the words are more.
    longer = _forward_work(held, round(longest * words) + description.image_tokens)
    slower = longer.total / forward.total - 1
    seconds_per_evaluation = None
    if section.every:
        how = config.compute_dtype, config.model.attention
        one, _ = device.seconds(held.calls.evaluation, *how)
        # The ranks that share a video take turns at decoding.
        decoded = math.ceil(batches * section.batch_size / layout.sp)
        scoring = sum(
            costs.seconds
            for costs in reward_costs(config.reward, config.evaluation_video).values()
        )
        seconds_per_evaluation = batches * config.evaluation_steps * one
        seconds_per_evaluation += decoded * (decode_evaluated.predicted + scoring)
        seconds_per_evaluation += waits.get("evaluation", 0.0)
    return Plan(
        **{field.name: getattr(held, field.name) for field in fields(held)},
        device=device,
        forward=forward,
        visits=visited,
        longest=longest,
        phases=_phases(held, device, visited, decode, waits, slower),
        waits=waits,
        seconds_per_evaluation=seconds_per_evaluation,
        checkpoint=checkpoint_bytes(config, held.weights) / layout.gpus,
        decoding=decoding,
        encoding=plan_encoding(config, device, description, layout.gpus),
    )


def _forward_work(held: MemoryPlan, text_tokens: int) -> Work:
    """Work of one forward of one sample, by the family's closed form or traced."""
    model = held.description
    if model.forward_work is not None:
        return model.forward_work(model.transformer, held.video_tokens, text_tokens)
    call = velocity_call(held.config, model, held.on_gpu)
    call = replace(call, batch=1, guidance_scale=1.0, text_tokens=text_tokens)
    cost = trace(replace(call, trained="full"))  # without adapters
    return Work(linear=cost.linear, attention=cost.attention)


def longest_prompt(config: RunConfig, data_parallel: int) -> float:
    """Expected length in words of the longest prompt among the ranks of a rollout, over
    the mean length.

    All ranks wait for the one that has it. 1 where a rollout has one prompt, or its
    prompts are not here.
    """
    groups = data_parallel * config.rollout.batch_size // config.rollout.num_generations
    prompts = config.data.prompts
    if (
        data_parallel == 1
        or groups <= 1
        or (isinstance(prompts, str) and not Path(prompts).is_file())
    ):
        return 1.0
    words = sorted(
        _words(prompt.text)
        for prompt in prompt_files.read_prompts(prompts, config.data.prompt_key)
    )
    # The largest of `groups` draws is the n-th of N with the chance (n/N)^groups -
    # ((n-1)/N)^groups.
    chances = [(n / len(words)) ** groups for n in range(len(words) + 1)]
    longest = sum(
        count * (high - low)
        for count, (low, high) in zip(words, pairwise(chances), strict=True)
    )
    return max(1.0, longest * len(words) / max(1, sum(words)))


def _decoding(
    held: MemoryPlan, device: Device, latent: tuple[int, int, int, int], videos: int
) -> tuple[Decoding, Phase]:
    """(how videos are decoded, the cost of one on the GPU that decodes it)."""
    decoding = held.description.decoding(latent, videos, held.config.model, held.on_gpu)
    dtype = decoding.dtype or held.config.model.decode_dtype(held.on_gpu)
    flops, moved = held.description.decode_work(latent, decoding.tiled, dtype)
    cost = Cost(linear=flops, elementwise=moved)
    predicted, bound = device.decode_seconds(cost, dtype)
    return decoding, Phase(name="decode", cost=cost, predicted=predicted, bound=bound)


def _phases(
    held: MemoryPlan,
    device: Device,
    visited: Visits,
    decode: Phase,
    waits: Mapping[str, float],
    slower: float,
) -> tuple[Phase, ...]:
    """Phases per video; `slower` is the share by which the rank with the longest
    prompts computes longer.
    """
    config = held.config
    weights = held.weights
    calls = held.calls
    layout = held.layout
    batch = config.rollout.videos_at_once
    videos = config.rollout.batch_size
    updates = config.training.updates_per_rollout

    def phase(name: str, cost: Cost, slower: float = 0.0) -> Phase:
        predicted, bound = device.seconds(
            cost, config.compute_dtype, config.model.attention
        )
        wait = waits.get(name, 0.0) / videos + slower * predicted
        return Phase(
            name=name,
            cost=cost,
            predicted=predicted + wait,
            bound=bound + wait,
            waiting=wait,
        )

    # The products of a second backward pass are those of a gradient's cost less a
    # velocity's.
    second = calls.gradient + calls.velocity.times(-1.0)
    # A call is of a micro-batch, a phase of one video.
    rollout = calls.sampling.times(visited.rollout / batch) + calls.gradient.times(
        visited.pass_steps / batch
    )
    rollout = rollout + second.times(visited.second_products / batch)
    # One of the two branches of a velocity.
    rollout = rollout + calls.velocity.times(visited.repeated / (2 * batch))
    # Gradient, weight and moments are read, weight and moments written; clipping reads
    # and writes the gradient. Shards are those of this rank, but the matrices that Muon
    # makes orthogonal are whole.
    shard = 1 / layout.weight_shards if config.training.mode == "full" else 1.0
    elementwise = 4.0 * (5 * weights.trained + 2 * weights.moments) * shard
    optimizer = Cost(linear=weights.muon_flops, elementwise=elementwise)
    # The ranks that share videos decode and score a share of them each, once all are
    # sampled.
    in_turn = math.ceil(videos / layout.sp) / videos
    seconds = {name: getattr(decode, name) * in_turn for name in ("predicted", "bound")}
    costs = reward_costs(config.reward, config.video)
    scoring = sum(costs[name].seconds for name in config.reward.rewards) * in_turn
    return (
        phase("rollout", rollout, slower),
        replace(decode, cost=decode.cost.times(in_turn), **seconds),
        Phase(name="reward", cost=Cost(), predicted=scoring, bound=scoring),
        phase("anchor", calls.velocity.times(visited.anchor / batch), slower),
        phase("update", calls.gradient.times(visited.update / batch), slower),
        phase("optimizer", optimizer.times(updates / videos)),
    )


NOT_TIMED = {"distributed.cpu_offload", "reward.url"}
"""Changes whose cost is not predicted, or lies elsewhere; they come last."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A changed configuration with its plan.

    Example: `Option(changes=(("training.guidance", "split"),), plan=...)`
    """

    changes: tuple[Change, ...]
    plan: Plan

    @property
    def overrides(self) -> str:
        """As words of the command line."""
        return " ".join(
            f"--{key}={value:g}" if isinstance(value, float) else f"--{key}={value}"
            for key, value in self.changes
        )


def find_options(plan: Plan) -> list[Option]:
    """Up to eight changes that save memory and leave what is computed as it is, the
    fastest first.

    Of a plan that fits: the single changes that save memory. Of one that does not: the
    single changes that make it fit, or else one set of changes of which none can be
    left out; if even that does not fit, it needs least memory.
    """
    tried = [_try(plan, (change,)) for change in possible_changes(plan)]
    single = [option for option in tried if option is not None]
    peak = plan.memory.peak
    if plan.fits:
        # What saves less than a hundredth is not worth a line.
        helping = [o for o in single if o.plan.memory.peak < 0.99 * peak]
    else:
        helping = [o for o in single if o.plan.fits]
        if single and not helping:
            best = _together(plan, single)
            helping = [best] if best.plan.memory.peak < peak else []

    def rank(option: Option) -> tuple[bool, float]:
        not_timed = not NOT_TIMED.isdisjoint(dict(option.changes))
        return not_timed, option.plan.seconds_per_video

    return sorted(helping, key=rank)[:8]


def _together(plan: Plan, single: list[Option]) -> Option:
    """All changes together, less those that are not needed to fit, or that save nothing
    where nothing fits.
    """
    # Of the values of a key the last one saves most.
    chosen: dict[str, Any] = {}
    best = single[0]
    for option in single:
        both = chosen | dict(option.changes)
        # None where it excludes an earlier one
        if together := _try(plan, tuple(both.items())):
            chosen = both
            best = together
    # Leave out again what is not needed, the costliest first: the changes are in that
    # order.
    for key in list(chosen):
        fewer = {name: value for name, value in chosen.items() if name != key}
        found = _try(plan, tuple(fewer.items()))
        if found is not None and (
            found.plan.fits or found.plan.memory.peak <= best.plan.memory.peak
        ):
            chosen = fewer
            best = found
    return best


def possible_changes(plan: Plan) -> Iterator[Change]:
    """Single changes that may save memory and keep the result, those that cost most
    first.
    """
    config = plan.asked
    model = config.model
    rollout = config.rollout
    evaluation = config.evaluation
    if plan.on_gpu and plan.memory.phases["encode"].reward_models:
        yield "reward.url", "http://HOST:8000"
    if plan.gathered.sharded and not config.distributed.cpu_offload:
        yield "distributed.cpu_offload", True
    # one of the user's own may have inherited it
    if not config.own_step and (update := objective_of(config).same_gradient):
        yield "training.update", update
    # Only values that keep less than the present one.
    if model.checkpointing not in ("selective", "full"):
        yield "model.checkpointing", "selective"
    if model.checkpointing != "full":
        yield "model.checkpointing", "full"
    if config.training.guidance == "paired" and rollout.guidance_scale != 1.0:
        yield "training.guidance", "split"
    most = plan.config.rollout.videos_at_once
    # Of the divisors, the next smaller one and the smallest.
    sizes = [size for size in range(most - 1, 0, -1) if rollout.batch_size % size == 0]
    for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
        yield "rollout.micro_batch_size", size
    if (
        plan.gathered.sharded
        and plan.gathered.keep != "never"
        and not config.distributed.cpu_offload
    ):
        yield "distributed.keep_gathered", "never"
    if evaluation.every:
        for size in dict.fromkeys((evaluation.batch_size // 4, 1)):
            if 0 < size < evaluation.batch_size:
                yield "evaluation.batch_size", size
    # In GiB. A video that needs more than that is decoded in tiles.
    for limit in (8.0, 1.0):
        whole = plan.decoding.limited and not plan.decoding.tiled
        if whole and limit < (model.decode_limit_gib or math.inf):
            yield "model.decode_memory_gib", limit
    if plan.on_gpu and model.decode_dtype(True) == "float32":
        yield "model.vae_dtype", "auto"
    if plan.on_gpu and config.training.mode == "lora" and model.adaln != "offload":
        yield "model.adaln", "offload"


def _try(plan: Plan, changes: tuple[Change, ...]) -> Option | None:
    """The option, or None where the configuration or a run refuses the changes."""
    given = dict(changes)
    keep = plan.asked.distributed.keep_gathered
    if "distributed.cpu_offload" in given and keep in ("rollout", "always"):
        # what is offloaded cannot stay on the GPU
        given["distributed.keep_gathered"] = "auto"
    changes = tuple(given.items())
    try:
        changed = make_plan(
            _changed(plan.asked, *changes),
            plan.device,
            gpus=plan.layout.gpus,
            memory_gb=plan.memory_limit / 1e9,
            runtime=plan.runtime,
            description=plan.description,
            sizes=plan.sizes,
        )
    except ConfigError:
        return None
    return Option(changes=changes, plan=changed)


def resident_bytes() -> int:
    """Memory of this process with the libraries of a run imported."""
    # Optional packages take memory only where they are installed.
    for name in (
        "sage_fast.run.run",
        "peft",
        "torch.utils.tensorboard",
        "matplotlib.figure",
        "av",
    ):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The second number is the resident set, in pages.
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
