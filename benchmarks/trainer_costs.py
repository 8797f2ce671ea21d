"""What surrounds the model: an iteration of the toy run, the stall of a checkpoint, the host's share of a forward.

    python -m benchmarks trainer_costs            all three, anywhere; about five minutes on a CPU
    python -m benchmarks trainer_costs --smoke    the same code, small; the numbers mean nothing

* Toy run: `configs/toy_cpu.yaml` with model.forward stock and fused, two trainers in one process that take turns, so
  that what else the machine does hits both. Parity comes first: both start from the same weights and noise, so the
  metrics of the first iteration agree, or there is no ratio. On a CPU seconds are the processor's: time that other
  processes take away does not count; the clock on the wall is kept beside them.
* Checkpoint: that run, and a LoRA run of HunyuanVideo-1.5 with the default adapters and optimizer and an anchor, saved
  in the foreground, where training waits for disk and checksums, and in the background, where it waits for a copy; in
  turn, so that what else the disk does hits both. The first save of each, which makes the copies' memory, is not
  counted.
* Host: a forward of all 54 blocks so narrow that the arithmetic vanishes. On a GPU it is the time until the call
  returns, with the queue still running; on a CPU it is processor time and holds the tiny arithmetic.
"""

import argparse
import gc
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness, peers
from benchmarks.attention import relative_error
from benchmarks.budgets import meta_transformer
from benchmarks.workload import HUNYUAN_VIDEO_15, SMOKE, random_inputs, random_transformer
from sage_fast.checkpoint import CheckpointData, CheckpointWriter
from sage_fast.config.schema import OptimizerConfig
from sage_fast.models.attention.attention import resolve_backend
from sage_fast.optim import OptimizerSet
from sage_fast.policy.lora import trainable_parameters

ROOT = Path(__file__).resolve().parents[1]
TOY_CONFIG = ROOT / "configs" / "toy_cpu.yaml"
TOY_PATHS = {"data.prompts": "toy_train.csv", "evaluation.prompts": "toy_eval.csv"}
SMALL_TOY = ["--rollout.num_generations=2", "--rollout.batch_size=4", "--rollout.micro_batch_size=4"]
"""Overrides of a smoke run."""
SAME_METRICS = ("reward/mean", "grad_norm")
TOLERANCE = 1e-3
"""Relative difference of a metric of the first iteration; that of the convergence tests."""
NARROW: dict[str, Any] = {
    "num_attention_heads": 1,
    "text_embed_dim": 48,
    "text_embed_2_dim": 32,
    "image_embed_dim": 24,
}
"""The published transformer with one head, all its 54 blocks."""
NARROW_PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Relative difference of a velocity from P2's: rounding, through 54 blocks."""


# ------------------------------------------------------------------------------------------ toy run


def peak_resident_gib() -> float | None:
    """Most memory this process had since `forget_peak`, in GiB; None where the system does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text("utf-8")) if status.exists() else None
    return int(found[1]) / 2**20 if found else None


def forget_peak() -> bool:
    """Start the peak of this process anew; False where the system has no such switch."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    except OSError:
        return False
    return True


def processor_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of this process on a CPU, of all its threads; the clock on the wall where a GPU does the work."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def toy_iterations(*, iterations: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds and peak memory of an iteration of the toy run, stock and fused in turn.

    Returns:
        {"parity": {metric: relative difference}, "passed", "device", "checkpoint": state of the fused trainer for
        `checkpoint_stall`}, and if passed "seconds" (of the processor on a CPU), "wall_seconds" and "peak_memory_gib"
        per forward, and "times_stock", a ratio of medians of "seconds".
    """
    from sage_fast.config.load import load_config
    from sage_fast.run.run import build_trainer

    paths = [f"--{key}={ROOT / 'configs' / 'prompts' / name}" for key, name in TOY_PATHS.items()]
    trainers = {
        forward: build_trainer(load_config(TOY_CONFIG, [*paths, *overrides, f"--model.forward={forward}"]))
        for forward in ("stock", "fused")
    }
    first = {forward: trainer.iterate() for forward, trainer in trainers.items()}
    parity = {
        metric: abs(first["fused"][metric] - first["stock"][metric]) / max(abs(first["stock"][metric]), 1e-12)
        for metric in SAME_METRICS
    }
    fused = trainers["fused"]
    result: dict[str, Any] = {
        "parity": parity,
        "passed": max(parity.values()) <= TOLERANCE,
        "device": str(fused.device),
        "checkpoint": CheckpointData(tensors=fused.tensors(), state=fused.state()),
    }
    if not result["passed"]:
        return result
    clock = processor_clock(fused.device)
    seconds: dict[str, list[float]] = {forward: [] for forward in trainers}
    wall: dict[str, list[float]] = {forward: [] for forward in trainers}
    peaks: dict[str, list[float]] = {forward: [] for forward in trainers}
    for turn in range(iterations):
        # Who goes first alternates too.
        for forward, trainer in sorted(trainers.items(), reverse=bool(turn % 2)):
            gc.collect()
            restarted = forget_peak()
            start, began = clock(), time.perf_counter()
            trainer.iterate()
            seconds[forward].append(clock() - start)
            wall[forward].append(time.perf_counter() - began)
            peak = peak_resident_gib()
            if restarted and peak is not None:
                peaks[forward].append(peak)
    quantiles = {forward: harness.Quantiles.of(values) for forward, values in seconds.items()}
    result["seconds"] = {forward: asdict(found) for forward, found in quantiles.items()}
    result["wall_seconds"] = {forward: asdict(harness.Quantiles.of(values)) for forward, values in wall.items()}
    result["times_stock"] = quantiles["stock"].median / quantiles["fused"].median
    if all(peaks.values()):
        result["peak_memory_gib"] = {forward: max(values) for forward, values in peaks.items()}
    return result


# ------------------------------------------------------------------------------------------ checkpoint


def lora_state(num_layers: int = 54) -> CheckpointData:
    """A LoRA run of HunyuanVideo-1.5 as it is saved: adapters, anchor, optimizer."""
    shapes = {name: p.shape for name, p in trainable_parameters(meta_transformer(num_layers, "lora")).items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = OptimizerSet(weights, OptimizerConfig())
    optimizer.step()
    named: dict[Tensor, str] = {parameter: name for name, parameter in weights.items()}
    state = {
        f"{named[parameter]}.{key}": value
        for each in optimizer.optimizers
        for parameter, values in each.state.items()
        for key, value in values.items()
    }
    tensors: dict[str, Mapping[str, Tensor]] = {
        "weights": {name: p.detach() for name, p in weights.items()},
        "anchor": {name: p.detach().clone() for name, p in weights.items()},
        "optimizer": state,
    }
    return CheckpointData(tensors=tensors, state={})


def checkpoint_stall(data: CheckpointData, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Time that a save takes, with the adapter once more for diffusers as a run has it.

    The folder decides which disk is measured.

    Returns:
        {"bytes", "seconds": until training goes on, in the foreground; "gb_per_s": of it; "background": {"seconds":
        until training goes on, "until_saved": until it is on disk}, "background_over_foreground": ratio of the medians
        of "seconds"}.
    """

    def add_adapter(partial: Path) -> Callable[[], None]:
        copies = {name: tensor.cpu().clone() for name, tensor in data.tensors["weights"].items()}
        return lambda: save_file(copies, partial / "lora.safetensors")

    stalls: dict[str, list[float]] = {"foreground": [], "background": []}
    until_saved: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as root:
        writers = {
            name: CheckpointWriter(Path(root) / name, keep_last=1, asynchronous=name == "background") for name in stalls
        }
        for number in range(rounds + 1):
            for name, writer in writers.items():
                start = time.perf_counter()
                saved = writer.save(number, data, extra=add_adapter)
                stall = time.perf_counter() - start
                writer.wait()
                if number:
                    stalls[name].append(stall)
                if number and name == "background":
                    until_saved.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        for writer in writers.values():
            writer.close()
    foreground, background = (harness.Quantiles.of(seconds) for seconds in stalls.values())
    return {
        "bytes": size,
        "seconds": asdict(foreground),
        "gb_per_s": size / foreground.median / 1e9,
        "background": {"seconds": asdict(background), "until_saved": asdict(harness.Quantiles.of(until_saved))},
        "background_over_foreground": background.median / foreground.median,
    }


# ------------------------------------------------------------------------------------------ host


def host_overhead(device: torch.device, *, num_layers: int = 54, rounds: int = 10) -> dict[str, Any]:
    """{"dtype", "blocks", "parity", "passed", "seconds": {ours, P2, P1: until the call returns}} of one forward."""
    config = HUNYUAN_VIDEO_15 | NARROW | {"num_layers": num_layers}
    shape = SMOKE[1]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer = random_transformer(config, device, dtype)
    inputs = random_inputs(shape, config, device, dtype)
    backend = resolve_backend(
        "auto", device=device, dtype=dtype, head_dim=config["attention_head_dim"], deterministic=False
    )
    contenders = {
        "P2": lambda: peers.packed(transformer, backend=backend, cast_adapters=False),
        "ours": lambda: peers.fused(transformer, backend=backend),
        "P1": lambda: peers.padded(transformer, shape),
    }
    clock = processor_clock(device)
    seconds: dict[str, Any] = {}
    velocities: dict[str, Tensor] = {}
    for name, switch in contenders.items():
        with switch() as velocity, torch.no_grad():
            velocities[name] = velocity(inputs.latents, inputs.sigma, inputs.conditional)
            samples = []
            for _ in range(rounds):
                _wait(device)
                start = clock()
                velocity(inputs.latents, inputs.sigma, inputs.conditional)
                samples.append(clock() - start)
            _wait(device)
            seconds[name] = asdict(harness.Quantiles.of(samples))
    parity = {name: relative_error(v, velocities["P2"].double()) for name, v in velocities.items() if name != "P2"}
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "blocks": num_layers,
        "parity": parity,
        "passed": max(parity.values()) <= NARROW_PARITY[dtype],
        "seconds": seconds,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------ the command


def run(device: torch.device, *, smoke: bool, toy: bool = True, folder: Path | None = None) -> dict[str, Any]:
    """{"toy", "checkpoint": {toy, lora}, "host"}.

    Args:
        toy: time the toy run as well; it needs what reads configurations and videos.
        folder: where checkpoints are written; a temporary folder otherwise.
    """
    place = folder or Path(tempfile.gettempdir())
    result: dict[str, Any] = {"checkpoint": {}}
    if toy:
        measured = toy_iterations(iterations=1 if smoke else 4, overrides=SMALL_TOY if smoke else ())
        result["checkpoint"]["toy"] = checkpoint_stall(measured.pop("checkpoint"), place, rounds=2 if smoke else 5)
        result["toy"] = measured
        gc.collect()
    result["checkpoint"]["lora"] = checkpoint_stall(lora_state(1 if smoke else 54), place, rounds=2 if smoke else 3)
    result["host"] = host_overhead(device, num_layers=2 if smoke else 54, rounds=2 if smoke else 10)
    return result


def table(result: dict[str, Any]) -> str:
    """The figures for people; what failed its parity has words in their place."""
    lines = []
    if "toy" in result:
        toy = result["toy"]
        if toy["passed"]:
            for forward in ("stock", "fused"):
                peak = toy.get("peak_memory_gib", {}).get(forward)
                memory = "" if peak is None else f", peak {peak:.2f} GiB"
                lines.append(f"toy iteration, {forward}: {toy['seconds'][forward]['median']:.2f} s{memory}")
            lines.append(f"stock / fused: {toy['times_stock']:.2f}")
        else:
            lines.append(f"toy iteration: PARITY FAILED, no ratio: {toy['parity']}")
    for name, found in result["checkpoint"].items():
        seconds = found["seconds"]["median"]
        behind = found["background"]["seconds"]["median"]
        lines.append(
            f"checkpoint, {name}: {seconds:.2f} s for {found['bytes'] / 1e6:.1f} MB; in the background training waits "
            f"{behind:.3f} s, {found['background_over_foreground']:.2f} of it"
        )
    host = result["host"]
    for name, seconds in host["seconds"].items() if host["passed"] else ():
        lines.append(f"host, forward of {host['blocks']} narrow blocks, {name}: {seconds['median'] * 1e3:.1f} ms")
    if not host["passed"]:
        lines.append(f"host: PARITY FAILED, no figures: {host['parity']}")
    return "\n".join(lines)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether both parity checks were green."""
    return result["host"]["passed"] and result.get("toy", {"passed": True})["passed"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when a parity check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trainer_costs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--smoke", action="store_true", help="small and few rounds")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; it decides which disk is measured")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<device>/...-trainer.json")
    options = parser.parse_args(argv)
    logging.disable(logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = harness.environment()
    result = run(device, smoke=options.smoke, folder=options.folder)
    if options.smoke:
        print("SMOKE RUN: small and few rounds. The numbers below mean nothing.\n")
    print(table(result))
    path = options.output or (None if options.smoke else harness.result_file(environment, suffix="-trainer"))
    if path is not None:
        harness.write_result(path, {"environment": environment, "smoke": options.smoke} | result)
        print(f"written to {path}")
    return 0 if succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main())
