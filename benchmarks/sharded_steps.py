"""What `benchmarks sharded` measures: a step under FSDP2 on one rank, compared and timed; its state in CPU memory.

The steps are the product's own: `parallelize`, `GuidedPolicy` and `TorchEngine`, on a world of one rank.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness
from benchmarks.attention import relative_error
from benchmarks.policy import FULL_DEPTH, adapt, pooled_error, release, rounds_within
from benchmarks.workload import GUIDANCE_SCALE, Inputs, Shape, random_inputs, random_transformer
from sage_fast.config.distributed import DistributedSettings
from sage_fast.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from sage_fast.distributed.parallelize import Gathering, parallelize, shard_weights
from sage_fast.distributed.torch_engine import TorchEngine
from sage_fast.distributed.world import ALONE, World
from sage_fast.models.hunyuan15.fused import choose_forward
from sage_fast.optim import OptimizerSet
from sage_fast.planning.devices import host_memory
from sage_fast.policy.guidance import VJP, GuidedPolicy
from sage_fast.policy.lora import cast_weights, train_all, trainable_parameters

Mode = Literal["lora", "full"]

TOLERANCE = 0.02
"""Relative difference on two layers. The operations are the same; a library may choose another kernel for weights that
lie elsewhere in memory, which is a few roundings of bfloat16."""
PROBE_LAYERS = 4
HOST_SHARE = 0.85
"""Of the free CPU memory: the rest is for the transfers and the process."""


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
    """What a run's configuration says of the model, the optimizer and FSDP2; nothing else of it is read."""
    model = ModelConfig(dtype="bfloat16" if mode == "lora" else "float32", checkpointing="selective")
    offload = DistributedSettings(cpu_offload=True, param_dtype="bfloat16")
    return RunConfig(
        output_dir="unused",
        data=DataConfig(prompts="unused"),
        model=model,
        training=TrainingConfig(mode=mode),
        distributed=offload if mode == "full" else DistributedSettings(keep_gathered="never"),
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
    transformer: HunyuanVideo15Transformer3DModel, inputs: Inputs, vjp: VJP, *, guidance_scale: float = GUIDANCE_SCALE
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
    release(None)
    if device.type == "cuda":
        torch._C._host_emptyCache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


# ------------------------------------------------------------------------------------------ parity


def check(
    mode: Mode, config: Mapping[str, Any], shape: Shape, world: World, device: torch.device
) -> dict[str, float | bool]:
    """Compare sharded with unwrapped on two layers.

    Returns:
        {"velocity", "gradient", and for full "update": relative differences; "bitwise": whether velocity and gradient
        are equal bit for bit; "bound", "passed"}.
    """
    lora = mode == "lora"
    transformer = random_transformer({**config, "num_layers": 2}, device, torch.bfloat16 if lora else torch.float32)
    adapt(transformer) if lora else train_all(transformer)
    plain = copy.deepcopy(transformer)
    cast_weights(plain, torch.bfloat16)
    choose_forward(plain, run_config(mode).model)
    inputs = random_inputs(shape, config, device, torch.bfloat16)
    engines = {
        "unwrapped": TorchEngine(
            trainable_parameters(plain), run_config(mode).optimizer, ALONE, Gathering(plain, "never")
        ),
        "fsdp": shard(transformer, mode, world, device),
    }
    velocities, gradients = {}, {}
    for (name, engine), model in zip(engines.items(), (plain, transformer), strict=True):
        # One branch: the unwrapped weights are bfloat16 here, and so is a sum of two branches in their `.grad`.
        velocities[name] = take_gradient(model, inputs, engine.vjp, guidance_scale=1.0)
        gradients[name] = whole_gradients(engine.parameters)
    expected = gradients["unwrapped"]
    given = {name: gradient.to(device) for name, gradient in gradients["fsdp"].items()}
    result: dict[str, float | bool] = {
        "velocity": relative_error(velocities["fsdp"], velocities["unwrapped"].double()),
        "gradient": pooled_error(given, expected),
        "bitwise": torch.equal(*velocities.values())
        and all(name in given and torch.equal(given[name].to(e.dtype), e) for name, e in expected.items()),
    }
    if not lora:
        result["update"] = update_difference(engines["fsdp"], device)
    worst = max(value for name, value in result.items() if name != "bitwise")
    return result | {"bound": TOLERANCE, "passed": worst <= TOLERANCE}


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


def measure_lora(
    config: Mapping[str, Any], shape: Shape, world: World, device: torch.device, *, rounds: int, budget: float
) -> dict[str, Any]:
    """The gradient of one guided step of all layers, unwrapped and sharded.

    Args:
        budget: seconds for all of it; it decides on the number of rounds.

    Returns:
        {"difference": {velocity, gradient}, "passed", "peak_memory_gb" on a GPU}, and if passed "seconds" per
        contender and "fsdp_over_unwrapped", a ratio of medians.
    """
    ends = time.monotonic() + budget
    transformer = random_transformer(config, device, torch.bfloat16)
    adapt(transformer)
    inputs = random_inputs(shape, config, device, torch.bfloat16)
    settings = run_config("lora")
    acceleration = choose_forward(transformer, settings.model)
    assert acceleration is not None
    engine = TorchEngine(trainable_parameters(transformer), settings.optimizer, ALONE, Gathering(transformer, "never"))
    seconds: dict[str, harness.Quantiles] = {}
    peaks: dict[str, float] = {}
    result: dict[str, Any] = {"passed": True}
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for name in ("unwrapped", "fsdp"):
        if name == "fsdp":
            acceleration.undo()
            engine = shard(transformer, "lora", world, device)
            release(transformer)
        _forget_peak(device)
        began = time.monotonic()
        velocity = take_gradient(transformer, inputs, engine.vjp)
        _wait(device)
        once = time.monotonic() - began
        found = velocity, {n: g.float().cpu() for n, g in whole_gradients(engine.parameters).items()}
        engine.zero_grad()
        if expected is None:
            expected = found
        else:
            difference = {
                "velocity": relative_error(velocity, expected[0].double()),
                "gradient": pooled_error(found[1], expected[1]),
            }
            result |= {"difference": difference, "passed": max(difference.values()) <= FULL_DEPTH}
            if not result["passed"]:
                return result

        def call(vjp: VJP = engine.vjp, zero: Callable[[], None] = engine.zero_grad) -> None:
            take_gradient(transformer, inputs, vjp)
            zero()

        # The second contender needs a call more than its rounds.
        left = ends - time.monotonic()
        share = max((left - once) / 2 if name == "unwrapped" else left, 0.0)
        seconds[name] = rounds_within(call, rounds, limit=share, left=share)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device) / 1e9
    result["seconds"] = {name: asdict(found) for name, found in seconds.items()}
    result["fsdp_over_unwrapped"] = seconds["fsdp"].median / seconds["unwrapped"].median
    return result | ({"peak_memory_gb": peaks} if peaks else {})


# ------------------------------------------------------------------------------------------ full, offloaded


def host_bytes(config: Mapping[str, Any], num_layers: int) -> int:
    """CPU memory that a full fine-tune with so many layers takes: masters, gradients and Muon's momentum.

    The first two are page-locked, in blocks that torch rounds up to a power of two.
    """

    def of(layers: int) -> int:
        with torch.device("meta"):
            transformer = HunyuanVideo15Transformer3DModel(**{**config, "num_layers": layers})
        sizes = [4 * p.numel() for p in transformer.parameters()]
        return sum(2 * 2 ** math.ceil(math.log2(size)) + size for size in sizes)

    one, two = of(1), of(2)
    return one + (num_layers - 1) * (two - one)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of CPU memory that nobody uses, of the machine or of this container; None where the system does not say."""
    information = root / "proc/meminfo"
    fields = (
        dict(line.split(":") for line in information.read_text("utf-8").splitlines()) if information.exists() else {}
    )
    if "MemAvailable" not in fields:
        return host_memory()
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    limit = (group / "memory.max").read_text("utf-8").strip() if (group / "memory.max").exists() else "max"
    if limit.isdigit():
        used = int((group / "memory.current").read_text("utf-8"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines())
        # Pages of files count as used until somebody else needs the memory.
        free = min(free, int(limit) - used + int(counts.get("inactive_file", 0)))
    return free


def layers_that_fit(config: Mapping[str, Any], free: int | None) -> int:
    """How many of the layers, at least 1, fit into so much free CPU memory; all of them where it is not known."""
    layers: int = config["num_layers"]
    if free is None:
        return layers
    one, two = (host_bytes(config, n) for n in (1, 2))
    return max(1, min(layers, 1 + math.floor((HOST_SHARE * free - one) / (two - one))))


def measure_full(
    config: Mapping[str, Any], shape: Shape, world: World, device: torch.device, *, rounds: int, budget: float
) -> dict[str, Any]:
    """Steps of a full fine-tune whose masters, gradients and momentum are in CPU memory.

    Args:
        config: of the transformer, with as many layers as are to be trained.
        budget: seconds after which no further round begins.

    Returns:
        {"layers", "sharding_seconds": until the weights are where they belong, "seconds": {"gradient", "optimizer"},
        "host_gb": counted, "passed": the gradient's norm is finite and not zero, "warm", "peak_memory_gb" on a GPU}.
        The first round makes the optimizer's memory; it counts where it is the only one, and "warm" is False.
    """
    began = time.monotonic()
    transformer = random_transformer(config, device, torch.float32)
    train_all(transformer)
    engine = shard(transformer, "full", world, device)
    release(transformer)
    result: dict[str, Any] = {"layers": config["num_layers"], "sharding_seconds": time.monotonic() - began}
    inputs = random_inputs(shape, config, device, torch.bfloat16)
    _forget_peak(device)
    seconds: dict[str, list[float]] = {"gradient": [], "optimizer": []}
    norms: list[float] = []
    while len(norms) < rounds + 1:
        last = sum(values[-1] for values in seconds.values()) if norms else 0.0
        if norms and time.monotonic() - began + last > budget:
            break
        start = time.perf_counter()
        take_gradient(transformer, inputs, engine.vjp)
        _wait(device)
        between = time.perf_counter()
        norms.append(engine.clip_gradients())
        engine.step()
        _wait(device)
        seconds["gradient"].append(between - start)
        seconds["optimizer"].append(time.perf_counter() - between)
    result["passed"] = all(math.isfinite(norm) and norm > 0 for norm in norms)
    result["host_gb"] = host_bytes(config, config["num_layers"]) / 1e9
    result["warm"] = len(norms) > 1
    if result["passed"]:
        warm = {name: values[1:] or values for name, values in seconds.items()}
        result["seconds"] = {name: asdict(harness.Quantiles.of(values)) for name, values in warm.items()}
    if device.type == "cuda":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return result


def choose_layers(config: Mapping[str, Any], free: int | None, *, probe_seconds: float, left: float) -> tuple[int, str]:
    """(layers, what limits them: "nothing", "CPU memory" or "time") of the full step.

    Args:
        probe_seconds: what `PROBE_LAYERS` took, all in all. left: seconds for the measurement.
    """
    fit = layers_that_fit(config, free)
    # What surrounds the layers, the text refiner above all, has about as many weights as one of them.
    in_time = (PROBE_LAYERS + 1) * left / probe_seconds - 1
    in_time = max(math.floor(min(in_time, config["num_layers"])), 1)
    if in_time < fit:
        return in_time, "time"
    return fit, "nothing" if fit == config["num_layers"] else "CPU memory"
