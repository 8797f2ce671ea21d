"""FSDP2 on one rank against the same transformer unwrapped.

    python -m benchmarks sharded                  8.3 B random weights on one GPU, 480x832x81
    python -m benchmarks sharded --budget 300     seconds after which nothing new begins
    python -m benchmarks sharded --smoke          the same code anywhere on a tiny model; the numbers mean nothing

One rank communicates with nobody, so what FSDP2 adds here is its own: copies of gathered blocks, their allocation and
hooks. The step is the product's: the gradient of a guided step of LoRA as an update takes it (`GuidedPolicy`,
`TorchEngine`, split guidance, selective checkpointing), with the weights whole, and with the same weights sharded and
gathered block by block. A run on one rank does not wrap frozen weights: this is the work of a rank of a larger run
without its communication.

Parity comes first, on two layers of full width: velocity and every gradient may differ from the unwrapped ones by
`TOLERANCE`. At full size, where rounding adds up over 54 layers, they must still resemble each other. What fails is not
timed and has no ratio.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness, workload
from benchmarks.errors import pooled_error, relative_error, verdict
from benchmarks.results import Record
from benchmarks.session import Cell, Session, Suite, timing
from benchmarks.suites.transformer import FULL_DEPTH
from benchmarks.workload import Inputs, Shape
from sage_fast.config.sections import DistributedConfig, LoraConfig, ModelConfig, OptimizerConfig
from sage_fast.distributed.parallelize import Gathering, TorchEngine, shard_weights
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.models.hunyuan15.backbone import choose_forward
from sage_fast.policy.guidance import VJP, GuidedPolicy
from sage_fast.policy.lora import trainable_parameters

SUITE = "sharded"
TOLERANCE = 0.02
"""Relative difference on two layers. The operations are the same; a library may choose another kernel for weights that
lie elsewhere in memory, which is a few roundings of bfloat16."""
ROUNDS = 6
"""Most timed rounds."""
BUILD_SECONDS = 15.0
"""Guess for drawing weights and comparing two layers."""
MODEL = ModelConfig(dtype="bfloat16", checkpointing="selective")


@contextmanager
def one_rank(device: torch.device) -> Iterator[World]:
    """A process group of this process alone, as in a launched run, gone after the `with`."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield World(
            mesh=init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp")),
            fsdp_mesh=init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard")),
        )
    finally:
        dist.destroy_process_group()


def unwrapped_engine(transformer: HunyuanVideo15Transformer3DModel) -> TorchEngine:
    """The engine of a transformer whose weights are whole."""
    gathering = Gathering(transformer, "never")
    return TorchEngine(trainable_parameters(transformer), OptimizerConfig(), SINGLE_PROCESS, gathering)


def shard(transformer: HunyuanVideo15Transformer3DModel, world: World, device: torch.device) -> TorchEngine:
    """Wrap a transformer for one rank; returns the engine that trains it."""
    # `parallelize` leaves frozen weights of a single rank whole, so its steps are taken one by one.
    choose_forward(transformer, replace(MODEL, adaln="weights"))
    shard_weights(transformer, DistributedConfig(), MODEL, world, device, mode="lora")
    return TorchEngine(trainable_parameters(transformer), OptimizerConfig(), world, Gathering(transformer, "never"))


def take_gradient(transformer: HunyuanVideo15Transformer3DModel, inputs: Inputs, vjp: VJP) -> Tensor:
    """Add the gradient of a step's log-probability up to a factor, as an update does; returns the velocity."""
    policy = GuidedPolicy(transformer, inputs.unconditional, workload.GUIDANCE_SCALE)
    cotangent = inputs.noise / inputs.noise.numel()
    return policy.velocity_and_gradient(
        inputs.latents, inputs.sigma, [inputs.conditional], [cotangent], split=True, vjp=vjp
    )


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A copy on the CPU of gradients that are there and not exactly zero."""
    found = {name: p.grad.float().cpu() for name, p in parameters.items() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if bool(gradient.any())}


def check(config: Mapping[str, Any], shape: Shape, world: World, device: torch.device) -> Record:
    """Compare sharded with unwrapped on two layers: velocity and gradient."""
    transformer = workload.random_transformer({**config, "num_layers": 2}, device, torch.bfloat16)
    workload.adapt(transformer)
    plain = copy.deepcopy(transformer)
    choose_forward(plain, MODEL)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    whole, sharded = unwrapped_engine(plain), shard(transformer, world, device)
    expected = take_gradient(plain, inputs, whole.vjp)
    velocity = take_gradient(transformer, inputs, sharded.vjp)
    gradient = pooled_error(gradients_of(sharded.parameters), gradients_of(whole.parameters))
    return verdict({"velocity": relative_error(velocity, expected), "gradient": gradient}, TOLERANCE)


def measure(session: Session, config: Mapping[str, Any], shape: Shape, world: World) -> Record:
    """The gradient of one guided step of all layers, unwrapped and sharded: two rows.

    Both come from one cell, because the second is compared with the first.
    """
    device = session.device
    transformer = workload.random_transformer(config, device, torch.bfloat16)
    workload.adapt(transformer)
    inputs = workload.random_inputs(shape, config, device, torch.bfloat16)
    acceleration = choose_forward(transformer, MODEL)
    assert acceleration is not None
    flop = workload.forward_work(config, shape).times(*workload.STEP_WORK["train_split"]).total
    note = f"rank {LoraConfig().rank}, {config['num_layers']} layers"
    rows: list[Record] = []
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for contender in ("unwrapped", "ours"):
        if contender == "unwrapped":
            engine = unwrapped_engine(transformer)
        else:
            acceleration.undo()
            engine = shard(transformer, world, device)
            harness.release(transformer)
        harness.forget_peak(device)
        velocity = take_gradient(transformer, inputs, engine.vjp)
        gradients = gradients_of(engine.parameters)
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


def cells(session: Session) -> Iterator[Cell]:
    """Parity and the step, in one process group."""
    config, device = (workload.TINY if session.smoke else workload.HUNYUAN_VIDEO_15), session.device
    shape, small = (workload.SMOKE[1], workload.SMOKE[1]) if session.smoke else (workload.B, workload.PARITY)
    work = workload.forward_work(config, shape).times(*workload.STEP_WORK["train_split"]).total
    # Built once; each contender is called once to be compared and once to be timed.
    needed = 0.0 if session.smoke else BUILD_SECONDS + session.guess(work)
    with one_rank(device) as world:
        yield Cell(suite=SUITE, name="parity", work=partial(check, config, small, world, device))
        harness.release()
        step = partial(measure, session, config, shape, world)
        yield Cell(suite=SUITE, name="lora", work=step, needs=(f"{SUITE} parity",), seconds=needed)


SUITES = (Suite(name=SUITE, cells=cells, limit=110.0),)
