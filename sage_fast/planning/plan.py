"""The plan of a configuration: memory by phase, work and predicted time, on one device. Nothing is loaded.

plan = make_plan(load_config("configs/hv15_480p_lora_1gpu.yaml"), DEVICES["h100"])
plan.memory.peak, plan.seconds_per_video
"""

import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from sage_fast.config import ConfigError, RunConfig
from sage_fast.planning.devices import CONVOLUTION_SHARE, Device
from sage_fast.planning.memory import (
    CUDA_RUNTIME,
    Calls,
    Memory,
    Weights,
    count_weights,
    model_calls,
    plan_memory,
)
from sage_fast.planning.trace import Cost
from sage_fast.planning.work import Visits, Work, forward_work, visits
from sage_fast.policy.description import ModelDescription
from sage_fast.prompts import read_prompts
from sage_fast.registry import DESCRIPTIONS, MODEL_FAMILIES, resolve
from sage_fast.requirements import weight_sizes

REWARD_SECONDS = {"videoalign": 0.5, "clip_score": 0.2, "pick_score": 0.3}
"""Seconds to score a video on a GPU, frames resized on the CPU; assumed."""

HOST_LINK = 50e9
"""Bytes per second between CPU and GPU memory, pinned, one direction; assumed."""

NODE_SIZE, INTER_NODE = 8, 50.0
"""GPUs of a node, and GB/s per GPU between nodes (400 Gbit/s); assumed."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of an iteration. cost: of one video, or of one update for the optimizer. predicted, bound: its seconds.

    Example: `Phase(name="update", cost=..., predicted=158.4, bound=138.2)`
    """

    name: str
    cost: Cost
    predicted: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration costs.

    forward: closed form of one packed forward of one sample. phases: per video, the optimizer and communication shared
    out among the videos of a rollout; `evaluation`, once per `evaluation.every` updates, is not among them.
    seconds_per_evaluation: None without one. communication: bytes each GPU sends per optimizer update.
    """

    config: RunConfig
    description: ModelDescription
    device: Device
    gpus: int
    memory_limit: float
    latent: tuple[int, int, int, int]
    weights: Weights
    forward: Work
    calls: Calls
    visits: Visits
    memory: Memory
    phases: tuple[Phase, ...]
    communication: float
    seconds_per_evaluation: float | None
    tiled: bool

    @cached_property
    def video_tokens(self) -> int:
        patch = self.description.transformer
        grid = prod(self.latent[1:])
        return int(grid // (patch.get("patch_size_t", 1) * patch.get("patch_size", 1) ** 2))

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.memory_limit

    @property
    def seconds_per_video(self) -> float:
        """On one GPU."""
        return sum(phase.predicted for phase in self.phases)

    @property
    def bound_per_video(self) -> float:
        """On one GPU, with everything at its ceiling."""
        return sum(phase.bound for phase in self.phases)

    @property
    def seconds_per_rollout(self) -> float:
        return self.seconds_per_video * self.config.rollout.batch_size

    @property
    def videos_per_gpu_hour(self) -> float:
        return 3600.0 / self.seconds_per_video


def describe(config: RunConfig) -> ModelDescription:
    """What the family of a config says of its model.

    Raises:
        ConfigError: a family that says nothing.
    """
    family = config.model.family
    if family in MODEL_FAMILIES:
        function: Callable[..., ModelDescription] = resolve(DESCRIPTIONS[family], {}, "model.family")
    else:
        module = family.partition(":")[0]
        resolve(family, MODEL_FAMILIES, "model.family")
        if not hasattr(importlib.import_module(module), "describe_model"):
            raise ConfigError(
                f"model.family is {family!r}, and {module} has no describe_model, so nothing is known of the model "
                "before it is loaded. Give it a function describe_model(model: ModelConfig) -> ModelDescription "
                "(sage_fast/policy/description.py)."
            )
        function = resolve(f"{module}:describe_model", {}, "model.family")
    try:
        return function(config.model)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def make_plan(
    config: RunConfig,
    device: Device,
    *,
    on_gpu: bool = True,
    gpus: int = 1,
    memory_gb: float | None = None,
    runtime: float | None = None,
    description: ModelDescription | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Plan:
    """Plan a configuration.

    Args:
        device: its ceilings.
        on_gpu: whether the device is a GPU.
        gpus: data-parallel replicas, each with `rollout.batch_size` videos.
        memory_gb: 1e9 bytes that may be used; None is what the device has.
        runtime: bytes of the process before anything is loaded; None is a CUDA context's, or this process's.
        description: of the model; None asks the family.
        sizes: gigabytes of weights beside the transformer; None looks for their files.

    Raises:
        ConfigError: the model, the size of the videos or the options do not fit each other.
    """
    description = description or describe(config)
    if runtime is None:
        runtime = CUDA_RUNTIME if on_gpu else resident_bytes()
    try:
        latent = description.latent_shape(config.video.num_frames, config.video.height, config.video.width)
        weights = count_weights(config, description.transformer)
        calls = model_calls(config, description, on_gpu)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    memory = plan_memory(
        config,
        description,
        on_gpu=on_gpu,
        calls=calls,
        weights=weights,
        sizes=weight_sizes(config) if sizes is None else sizes,
        runtime=runtime,
    )
    visited = visits(config)
    decoding = description.decoding(latent, config.rollout.micro_batch_size, config.model, on_gpu)
    communication = 2 * (gpus - 1) / gpus * 4.0 * weights.trained
    decode_flops = description.decode_flops(latent, decoding.tiled)
    phases = _phases(config, device, weights, calls, visited, decode_flops, communication, gpus)
    return Plan(
        config=config,
        description=description,
        device=device,
        gpus=gpus,
        memory_limit=(device.memory_gb if memory_gb is None else memory_gb) * 1e9,
        latent=latent,
        weights=weights,
        forward=forward_work(description.transformer, prod(latent[1:]), description.text_tokens),
        calls=calls,
        visits=visited,
        memory=memory,
        phases=phases,
        communication=communication,
        seconds_per_evaluation=_evaluation_seconds(config, device, calls, decode_flops),
        tiled=decoding.tiled,
    )


def _phases(
    config: RunConfig,
    device: Device,
    weights: Weights,
    calls: Calls,
    visited: Visits,
    decode_flops: float,
    communication: float,
    gpus: int,
) -> tuple[Phase, ...]:
    model, batch = config.model, config.rollout.micro_batch_size

    def phase(name: str, cost: Cost, extra: float = 0.0) -> Phase:
        predicted, bound = device.seconds(cost, model.dtype, model.attention)
        return Phase(name=name, cost=cost, predicted=predicted + extra, bound=bound + extra)

    # What was kept in CPU memory is waited for in the backward pass; on its way out it hides behind the computation.
    steps = visited.pass_steps + visited.update + visited.late_updates
    kept = max(calls.gradient.kept, calls.single_pass.kept)
    waiting = steps / batch * kept / HOST_LINK if model.offload_activations else 0.0
    # The products of a second backward pass are those of a gradient's cost less a velocity's.
    backward = _less(calls.single_pass, calls.velocity)
    rollout = calls.velocity.times(visited.rollout / batch) + calls.single_pass.times(visited.pass_steps / batch)
    anchor = calls.velocity.times(visited.anchor / batch)
    if config.training.update == "single_pass":
        rollout = rollout + backward.times(visited.second_products / batch)
    update = calls.gradient.times(visited.update / batch) + calls.late_gradient.times(visited.late_updates / batch)
    updates, videos = config.training.updates_per_rollout, config.rollout.batch_size
    # Gradient, weight and moments are read, weight and moments written; clipping reads and writes the gradient.
    optimizer = Cost(linear=weights.muon_flops, elementwise=4.0 * (5 * weights.trained + 2 * weights.moments))
    rate = device.rates("bfloat16" if model.vae_dtype != "float32" else "float32", "sdpa")[0]
    scoring = sum(REWARD_SECONDS.get(name, 0.0) for name in config.reward.rewards)
    phases = [
        phase("rollout", rollout, waiting if config.training.update == "single_pass" else 0.0),
        Phase(
            name="decode",
            cost=Cost(linear=decode_flops),
            predicted=decode_flops / rate / CONVOLUTION_SHARE,
            bound=decode_flops / rate,
        ),
        Phase(name="reward", cost=Cost(), predicted=scoring, bound=scoring),
        phase("anchor", anchor),
        phase("update", update, 0.0 if config.training.update == "single_pass" else waiting),
        phase("optimizer", optimizer.times(updates / videos)),
    ]
    if gpus > 1:
        rate = (device.link if gpus <= NODE_SIZE else INTER_NODE) * 1e9
        seconds = updates / videos * communication / rate
        phases.append(Phase(name="communication", cost=Cost(), predicted=seconds, bound=seconds))
    return tuple(phases)


def _less(whole: Cost, part: Cost) -> Cost:
    return Cost(
        linear=whole.linear - part.linear,
        attention=whole.attention - part.attention,
        attention_backward=whole.attention_backward,
        elementwise=whole.elementwise - part.elementwise,
    )


def _evaluation_seconds(config: RunConfig, device: Device, calls: Calls, decode_flops: float) -> float | None:
    section = config.evaluation
    if not section.every:
        return None
    prompts = section.num_prompts or len(read_prompts(section.prompts or config.data.prompts))
    steps = section.num_steps or config.rollout.num_steps
    forward, _ = device.seconds(calls.evaluation, config.model.dtype, config.model.attention)
    decode = decode_flops / (device.matmul * 1e12) / CONVOLUTION_SHARE
    return prompts * (steps * forward / section.batch_size + decode)


def resident_bytes() -> int:
    """Memory of this process with the libraries of a run imported."""
    for name in ("sage_fast.run", "peft", "torch.utils.tensorboard", "matplotlib.figure", "av"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
