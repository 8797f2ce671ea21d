"""FSDP2 on one rank against the same transformer unwrapped, and a full fine-tune step with its state in CPU memory.

    python -m benchmarks sharded                  8.3 B random weights on one GPU, 480x832x81
    python -m benchmarks sharded --budget 300     seconds after which nothing new begins
    python -m benchmarks sharded --smoke          the same code anywhere on a tiny model; the numbers mean nothing

One rank communicates with nobody, so what FSDP2 adds here is its own: copies of gathered blocks, their allocation and
hooks. The steps are the product's: `parallelize`, `GuidedPolicy` and `TorchEngine`.

* LoRA: the gradient of a guided step as an update takes it (`GuidedPolicy`, split guidance, selective checkpointing),
  with the weights whole, and with the same weights sharded and gathered block by block. A run on one rank does not wrap
  frozen weights: the work of a rank of a larger run without its communication.
* Full: float32 masters, gradients and Muon's momentum in CPU memory (`distributed.cpu_offload`), computed in bfloat16:
  gradient, clipping, optimizer. It has as many of the layers as fit into CPU memory.

Parity comes first, on two layers of full width: velocity and every gradient, and for full the optimizer's change of
every weight, may differ from the unwrapped ones by `TOLERANCE`. At full size, where rounding adds up over 54 layers,
LoRA's must still resemble each other. What fails is not timed and has no ratio.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import harness, workload
from benchmarks.errors import pooled_error, relative_error, verdict
from benchmarks.harness import Quantiles
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from benchmarks.suites.transformer import FULL_DEPTH
from benchmarks.workload import Inputs, Shape
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import DataConfig, DistributedConfig, LoraConfig, ModelConfig, TrainingConfig
from sage_fast.distributed.parallelize import Gathering, TorchEngine, parallelize, shard_weights
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.hunyuan15.backbone import choose_forward
from sage_fast.optim import OptimizerSet
from sage_fast.planning.devices import host_memory
from sage_fast.planning.trace import meta_transformer
from sage_fast.policy.guidance import VJP, GuidedPolicy
from sage_fast.policy.lora import cast_weights, train_all, trainable_parameters

SUITE = "sharded"
Mode = Literal["lora", "full"]

TOLERANCE = 0.02
"""Relative difference on two layers. The operations are the same; a library may choose another kernel for weights that
lie elsewhere in memory, which is a few roundings of bfloat16."""
ROUNDS, FULL_ROUNDS = 6, 3
"""Most timed rounds."""
BUILD_SECONDS, RESERVE_SECONDS = 15.0, 4.0
"""Guess for drawing weights and comparing two layers; what is kept back for tidying up."""
HOST_SHARE = 0.8
"""Of CPU memory: the rest is for the transfers and the process."""


@contextmanager
def one_rank(device: torch.device) -> Iterator[World]:
    """A process group of this process alone, as a launched run has it, gone after the `with`."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield World(
            mesh=init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp")),
            fsdp_mesh=init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard")),
        )
    finally:
        dist.destroy_process_group()


def run_config(mode: Mode) -> RunConfig:
    """Settings of the model, the optimizer and FSDP2 in a run's configuration."""
    model = ModelConfig(dtype="bfloat16" if mode == "lora" else "float32", checkpointing="selective")
    offload = DistributedConfig(cpu_offload=True, param_dtype="bfloat16")
    return RunConfig(
        output_dir="unused",
        data=DataConfig(prompts="unused"),
        model=model,
        training=TrainingConfig(mode=mode),
        distributed=offload if mode == "full" else DistributedConfig(keep_gathered="never"),
    )


def shard(transformer: HunyuanVideo15Transformer3DModel, mode: Mode, world: World, device: torch.device) -> TorchEngine:
    """Wrap a transformer for one rank; returns the engine that trains it."""
    config = run_config(mode)
    if mode == "full":
        gathering = parallelize(transformer, config.distributed, config.model, config.training, world, device)
    else:
        # `parallelize` leaves frozen weights of a single rank whole, so its steps are taken one by one.
        choose_forward(transformer, replace(config.model, adaln="weights"))
        shard_weights(transformer, config.distributed, config.model, world, device, mode=mode)
        gathering = Gathering(transformer, "never")
    return TorchEngine(trainable_parameters(transformer), config.optimizer, world, gathering)


def take_gradient(
    transformer: HunyuanVideo15Transformer3DModel,
    inputs: Inputs,
    vjp: VJP,
    *,
    guidance_scale: float = workload.GUIDANCE_SCALE,
) -> Tensor:
    """Add the gradient of a step's log-probability up to a factor, as an update does; returns the velocity."""
    policy = GuidedPolicy(transformer, inputs.unconditional, guidance_scale)
    cotangent = inputs.noise / inputs.noise.numel()
    return policy.velocity_and_gradient(
        inputs.latents, inputs.sigma, [inputs.conditional], [cotangent], split=True, vjp=vjp
    )


def whole(tensor: Tensor) -> Tensor:
    """A tensor or all of a sharded one, detached."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients that are there and not exactly zero."""
    found = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if bool(gradient.any())}


def release_everything(device: torch.device) -> None:
    """Give memory back to the system, page-locked CPU memory too, which torch would keep for later."""
    harness.release()
    if device.type == "cuda":
        torch._C._host_emptyCache()


# ------------------------------------------------------------------------------------------ parity


def check(mode: Mode, config: Mapping[str, Any], shape: Shape, world: World, device: torch.device) -> Record:
    """Compare sharded with unwrapped on two layers: velocity, gradient, and for full the optimizer's update."""
    lora = mode == "lora"
    dtype = torch.bfloat16 if lora else torch.float32
    transformer = workload.random_transformer({**config, "num_layers": 2}, device, dtype)
    workload.adapt(transformer) if lora else train_all(transformer)
    plain = copy.deepcopy(transformer)
    cast_weights(plain, torch.bfloat16)
    choose_forward(plain, run_config(mode).model)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    # One branch: the unwrapped weights are bfloat16 here, and so is a sum of two branches in their `.grad`.
    whole_engine = unwrapped_engine(plain, mode)
    expected = take_gradient(plain, inputs, whole_engine.vjp, guidance_scale=1.0)
    expected_gradients = whole_gradients(whole_engine.parameters)
    engine = shard(transformer, mode, world, device)
    velocity = take_gradient(transformer, inputs, engine.vjp, guidance_scale=1.0)
    given = {name: gradient.to(device) for name, gradient in whole_gradients(engine.parameters).items()}
    errors = {"velocity": relative_error(velocity, expected), "gradient": pooled_error(given, expected_gradients)}
    if not lora:
        errors["update"] = update_difference(engine, device)
    return verdict(errors, TOLERANCE)


def unwrapped_engine(transformer: HunyuanVideo15Transformer3DModel, mode: Mode) -> TorchEngine:
    """The engine of a transformer whose weights are whole."""
    gathering = Gathering(transformer, "never")
    return TorchEngine(trainable_parameters(transformer), run_config(mode).optimizer, SINGLE_PROCESS, gathering)


def update_difference(engine: TorchEngine, device: torch.device) -> float:
    """Let an engine apply its gradient; relative difference of the weights' change from that of whole weights."""
    before = {name: whole(p).to(device, copy=True) for name, p in engine.parameters.items()}
    plain = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    for name, parameter in engine.parameters.items():
        if parameter.grad is not None:
            plain[name].grad = whole(parameter.grad).to(device, copy=True)
    trained = {name: p for name, p in plain.items() if p.grad is not None and bool(p.grad.any())}
    reference = OptimizerSet(plain, run_config("full").optimizer)
    for each in (engine, reference):
        each.clip_gradients()
        each.step()
    expected = {name: p.detach() - before[name] for name, p in trained.items()}
    given = {name: whole(engine.parameters[name]).to(device) - before[name] for name in trained}
    return pooled_error(given, expected)


# ------------------------------------------------------------------------------------------ LoRA


def measure_lora(session: Session, config: Mapping[str, Any], shape: Shape, world: World) -> Record:
    """The gradient of one guided step of all layers, unwrapped and sharded: two rows.

    Both come from one cell, because the second is compared with the first.
    """
    device = session.device
    transformer = workload.random_transformer(config, device, torch.bfloat16)
    workload.adapt(transformer)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    acceleration = choose_forward(transformer, run_config("lora").model)
    assert acceleration is not None
    flop = workload.forward_work(config, shape).times(*workload.STEP_WORK["train_split"]).total
    note = f"rank {LoraConfig().rank}, {config['num_layers']} layers"
    rows: list[Record] = []
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for contender in ("unwrapped", "ours"):
        if contender == "unwrapped":
            engine = unwrapped_engine(transformer, "lora")
        else:
            acceleration.undo()
            engine = shard(transformer, "lora", world, device)
            harness.release(transformer)
        harness.forget_peak(device)
        velocity = take_gradient(transformer, inputs, engine.vjp)
        gradients = {name: g.float().cpu() for name, g in whole_gradients(engine.parameters).items()}
        engine.zero_grad()
        if expected is None:
            expected = velocity, gradients
        else:
            errors = relative_error(velocity, expected[0]), pooled_error(gradients, expected[1])
            if not max(errors) <= FULL_DEPTH:
                return {"status": f"failed: FSDP2 differs from the unwrapped weights by {errors}"}

        def call(engine: TorchEngine = engine) -> None:
            take_gradient(transformer, inputs, engine.vjp)
            engine.zero_grad()

        seconds = session.time(call, rounds=ROUNDS, warmup=0)
        peak = harness.peak_memory_gb(device)
        rows.append(timing("LoRA gradient", shape.name, contender, seconds, flop=flop, peak_memory_gb=peak, note=note))
    return {"rows": rows}


# ------------------------------------------------------------------------------------------ full, offloaded


def host_bytes(config: Mapping[str, Any], num_layers: int) -> int:
    """CPU memory that a full fine-tune with so many layers takes: masters, gradients and Muon's momentum.

    The first two are page-locked, in blocks that torch rounds up to a power of two.
    """
    sizes = [4 * p.numel() for p in meta_transformer(config, torch.float32, num_layers).parameters()]
    return sum(2 * 2 ** math.ceil(math.log2(size)) + size for size in sizes)


def layers_that_fit(config: Mapping[str, Any], memory: int | None) -> int:
    """Number of layers, at least 1, that fit into so much CPU memory; all of them where it is not known."""
    layers: int = config["num_layers"]
    if memory is None:
        return layers
    one, two = (host_bytes(config, n) for n in (1, 2))
    return max(1, min(layers, 1 + math.floor((HOST_SHARE * memory - one) / (two - one))))


def run_full(
    config: Mapping[str, Any], shape: Shape, world: World, device: torch.device, *, rounds: int, ends: float
) -> dict[str, list[float]]:
    """Steps of a full fine-tune whose masters, gradients and momentum are in CPU memory.

    Args:
        config: of the transformer, with as many layers as are trained.
        ends: of `time.monotonic`, after which no further round begins.

    Returns:
        Seconds of the gradient and of the optimizer, and norms of the gradient, by round. The first round makes the
        optimizer's memory.
    """
    transformer = workload.random_transformer(config, device, torch.float32)
    train_all(transformer)
    engine = shard(transformer, "full", world, device)
    harness.release(transformer)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    harness.forget_peak(device)
    found: dict[str, list[float]] = {"gradient": [], "optimizer": [], "norm": []}
    while len(found["norm"]) < rounds + 1:
        if found["norm"] and time.monotonic() + found["gradient"][-1] + found["optimizer"][-1] > ends:
            break
        start = time.perf_counter()
        take_gradient(transformer, inputs, engine.vjp)
        harness.wait(device)
        between = time.perf_counter()
        found["norm"].append(engine.clip_gradients())
        engine.step()
        harness.wait(device)
        found["gradient"].append(between - start)
        found["optimizer"].append(time.perf_counter() - between)
    return found


def measure_full(session: Session, config: Mapping[str, Any], shape: Shape, world: World) -> Record:
    """Gradient and optimizer step of as many layers as CPU memory allows: two rows."""
    device, layers = session.device, config["num_layers"]
    chosen = layers_that_fit(config, host_memory())
    rounds = 1 if session.smoke else FULL_ROUNDS
    ends = time.monotonic() + session.left - RESERVE_SECONDS
    found = run_full({**config, "num_layers": chosen}, shape, world, device, rounds=rounds, ends=ends)
    peak = harness.peak_memory_gb(device)
    if not all(math.isfinite(norm) and norm > 0 for norm in found["norm"]):
        return {"status": f"failed: norms of the gradient are {found['norm']}"}
    note = f"{run_config('full').optimizer.name}, {chosen} of {layers} layers, "
    note += f"{host_bytes(config, chosen) / 1e9:.1f} GB of CPU memory"
    note += "" if len(found["norm"]) > 1 else ", first round"
    # The first round counts where it is the only one.
    steps = {name: found[name][1:] or found[name] for name in ("gradient", "optimizer")}
    rows = [
        timing(f"full, offloaded, {name}", shape.name, "ours", Quantiles.of(seconds), peak_memory_gb=peak, note=note)
        for name, seconds in steps.items()
    ]
    return {"rows": rows}


def cells(session: Session) -> Iterator[Cell]:
    """Parity and steps of both modes, in one process group."""
    config, device = (workload.TINY if session.smoke else workload.HUNYUAN_VIDEO_15), session.device
    shape, small = (workload.SMOKE[1], workload.SMOKE[1]) if session.smoke else (workload.B, workload.PARITY)
    work = workload.forward_work(config, shape).times(*workload.STEP_WORK["train_split"]).total
    # Built once; each contender is called once to be compared and once to be timed.
    needed = 0.0 if session.smoke else BUILD_SECONDS
    with one_rank(device) as world:
        steps = {"lora": (measure_lora, needed + session.guess(work)), "full": (measure_full, needed)}
        modes: tuple[Mode, ...] = ("lora", "full")
        for mode in modes:
            parity = f"parity {mode}"
            yield Cell(suite=SUITE, name=parity, work=partial(check, mode, config, small, world, device))
            release_everything(device)
            measure, seconds = steps[mode]
            step = partial(measure, session, config, shape, world)
            yield Cell(suite=SUITE, name=mode, work=step, needs=(f"{SUITE} {parity}",), seconds=seconds)
            release_everything(device)


SUITES = (Suite(name=SUITE, cells=cells, limit=110.0),)
