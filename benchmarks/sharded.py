"""FSDP2 on one rank against the same transformer unwrapped, and a full fine-tune step with its state in CPU memory.

    python -m benchmarks sharded                  8.3 B random weights on one GPU, 480x832x81
    python -m benchmarks sharded --budget 300     seconds after which nothing new begins
    python -m benchmarks sharded --smoke          the same code anywhere on a tiny model; the numbers mean nothing

One rank communicates with nobody, so what FSDP2 adds here is its own: copies of gathered blocks, their allocation and
hooks.

* LoRA: the gradient of a guided step as an update takes it (`GuidedPolicy`, split guidance, selective checkpointing),
  first with the weights whole, then with the same weights sharded and gathered block by block. A run on one rank does
  not wrap frozen weights; this is what a rank of a larger run has to do besides communicating.
* Full: float32 masters, gradients and Muon's momentum in CPU memory (`distributed.cpu_offload`), computed in bfloat16:
  gradient, clipping, optimizer. It has as many of the layers as fit into free CPU memory and into the time; a probe of
  a few layers says how long one takes.

Parity comes first, on two layers of full width: velocity and every gradient, and for full the optimizer's change of
every weight, may differ from the unwrapped ones by `TOLERANCE`. At full size, where rounding adds up over 54 layers,
LoRA's must still resemble each other. What fails is not timed and has no ratio.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import benchmarks  # noqa: F401  first, because it decides where kernels run
from benchmarks import harness
from benchmarks.policy import ASSUMED_MFU
from benchmarks.sharded_steps import (
    PROBE_LAYERS,
    Mode,
    check,
    choose_layers,
    free_host_memory,
    measure_full,
    measure_lora,
    one_rank,
    release_everything,
    run_config,
)
from benchmarks.workload import HUNYUAN_VIDEO_15, PARITY, SMOKE, STEP_WORK, TINY, B, forward_work
from sage_fast.config.schema import LoraConfig
from sage_fast.distributed.world import World

ROUNDS, FULL_ROUNDS = 6, 3
"""Most timed rounds."""
LORA_SHARE = 0.7
"""Of the time, as long as the full step is to come."""
BUILD_SECONDS, RESERVE_SECONDS = 15.0, 4.0
"""Guess for drawing weights and comparing two layers; what is kept back for tidying up."""


@dataclass(kw_only=True)
class ShardedRun:
    """What is measured and how much time is left."""

    device: torch.device
    smoke: bool
    budget: float
    """Seconds from the start, after which nothing new begins."""
    save: Callable[[dict[str, Any]], None]
    """Called with {"sharded": ...} whenever it has grown."""
    matmul_tflop_per_s: float | None = None
    """Rate of a large product, to guess what still fits."""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.config = TINY if self.smoke else HUNYUAN_VIDEO_15
        self.shape = SMOKE[1] if self.smoke else B
        self.small = SMOKE[1] if self.smoke else PARITY

    @property
    def left(self) -> float:
        """Seconds for further measurements. A smoke run measures nothing, so on a busy machine it may take its time."""
        if self.smoke:
            return math.inf
        return self.budget - RESERVE_SECONDS - (time.monotonic() - self.started)

    def lora(self, world: World, *, share: float) -> dict[str, Any]:
        """The record of LoRA; without "passed" where the time is too short.

        Args:
            share: of the time that is left.
        """
        record: dict[str, Any] = {"rank": LoraConfig().rank, "layers": self.config["num_layers"]}
        if self.matmul_tflop_per_s is not None:
            # Built once; each contender is called once to be compared and once to be timed.
            work = forward_work(self.config, self.shape).times(*STEP_WORK["train_split"]).total
            needed = BUILD_SECONDS + 4 * work / (ASSUMED_MFU * self.matmul_tflop_per_s * 1e12)
            if self.left < needed:
                return record | {"status": f"skipped: it takes about {needed:.0f} s and {self.left:.0f} s are left"}
        record["parity"] = parity = check("lora", self.config, self.small, world, self.device)
        release_everything(self.device)
        if not parity["passed"]:
            return record | {"passed": False}
        rounds = 2 if self.smoke else ROUNDS
        return record | measure_lora(
            self.config, self.shape, world, self.device, rounds=rounds, budget=share * self.left
        )

    def full(self, world: World) -> dict[str, Any]:
        """The record of the full step; without "passed" where the time is too short."""
        record: dict[str, Any] = {"optimizer": run_config("full").optimizer.name}
        late = record | {"status": f"skipped: {max(self.left, 0):.0f} s are left"}
        if self.left < BUILD_SECONDS:
            return late
        record["parity"] = parity = check("full", self.config, self.small, world, self.device)
        release_everything(self.device)
        if not parity["passed"]:
            return record | {"passed": False}
        began = time.monotonic()
        probed = {**self.config, "num_layers": min(PROBE_LAYERS, self.config["num_layers"])}
        measure_full(probed, self.shape, world, self.device, rounds=0, budget=0.0)
        release_everything(self.device)
        took = time.monotonic() - began
        left = self.left
        if left <= took:
            return late
        layers, limit = choose_layers(self.config, free_host_memory(), probe_seconds=took, left=left)
        config = {**self.config, "num_layers": layers}
        rounds = 1 if self.smoke else FULL_ROUNDS
        record |= measure_full(config, self.shape, world, self.device, rounds=rounds, budget=left)
        return record | {"of_layers": self.config["num_layers"], "limited_by": limit}


def run(plan: ShardedRun, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """{"sharded": {"lora", "full"}}, and "status" where something is missing for lack of time.

    Args:
        known: "sharded" of an earlier run, which is gone on from. What failed is tried again, and so is, once, a full
            step that had the time for some of the layers only.
    """
    found: dict[str, Any] = {mode: record for mode, record in (known or {}).items() if "status" not in record}
    whole_time = "lora" in found
    missing = []
    with one_rank(plan.device) as world:
        parts: dict[Mode, Callable[[], dict[str, Any]]] = {
            "lora": lambda: plan.lora(world, share=1.0 if "full" in found else LORA_SHARE),
            "full": lambda: plan.full(world),
        }
        for mode, measure in parts.items():
            if mode in found and (mode == "lora" or found[mode].get("limited_by") != "time"):
                continue
            try:
                record = measure()
            except harness.FAILURES as error:
                lines = str(error).strip().splitlines() or [""]
                record = {"passed": False, "status": f"failed: {type(error).__name__}: {lines[0]}"}
            release_everything(plan.device)
            if "passed" not in record:
                missing.append(f"{mode} {record['status']}")
                continue
            found[mode] = {"shape": plan.shape.name} | record
            plan.save({"sharded": dict(found)})
            if record.get("limited_by") == "time" and not whole_time:
                missing.append(f"{mode}: time for {record['layers']} of {record['of_layers']} layers")
    result: dict[str, Any] = {"sharded": found} if found else {}
    return result | ({"status": f"not finished: {'; '.join(missing)}"} if missing else {})


def table(result: dict[str, Any]) -> str:
    """The records for people; what failed its parity has words in place of figures."""
    lines = []
    for mode, record in result["sharded"].items():
        if not record["passed"]:
            reason = record.get("status") or f"PARITY FAILED, no figures: {record.get('difference', record['parity'])}"
            lines.append(f"FSDP2 on one rank, {mode}: {reason}")
            continue
        peak = record.get("peak_memory_gb")
        if mode == "lora":
            lines.append(
                f"FSDP2 on one rank, LoRA, {record['layers']} layers, shape {record['shape']}, gradient of a step"
            )
            for name, seconds in record["seconds"].items():
                memory = "" if peak is None else f", peak {peak[name]:.1f} GB"
                lines.append(f"  {name:10} {seconds['median']:.3f} s{memory}")
            lines.append(f"  FSDP2 over unwrapped: {record['fsdp_over_unwrapped']:.3f}")
            continue
        parts = ", ".join(f"{name} {seconds['median']:.3f} s" for name, seconds in record["seconds"].items())
        memory = "" if peak is None else f", peak {peak:.1f} GB"
        lines.append(
            f"FSDP2 on one rank, full, state in CPU memory, {record['layers']} of {record['of_layers']} layers "
            f"(limited by {record['limited_by']}): {parts}{memory}, {record['host_gb']:.1f} GB of CPU memory"
        )
    return "\n".join(lines)


def succeeded(result: dict[str, Any]) -> bool:
    """Whether both were measured and passed their parity."""
    records = result.get("sharded", {})
    return {"lora", "full"} <= records.keys() and all(record["passed"] for record in records.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 when something failed or is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sharded", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few rounds; runs without a GPU")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which nothing new begins")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/<gpu>/...-sharded.json")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not options.smoke:
        sys.exit("There is no CUDA device here: run with --smoke, or on a machine with a GPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = harness.environment()
    path = options.output or (None if options.smoke else harness.result_file(environment, suffix="-sharded"))
    head = {"environment": environment, "smoke": options.smoke}

    def save(found: dict[str, Any]) -> None:
        if path is not None:
            harness.write_result(path, head | found)

    result = run(ShardedRun(device=device, smoke=options.smoke, budget=options.budget, save=save))
    status = result.pop("status", None)
    if options.smoke:
        print("SMOKE RUN: a tiny model. The numbers below mean nothing.\n")
    print(table({"sharded": {}} | result))
    if status is not None:
        print(status)
    if path is not None and result:
        print(f"written to {path}")
    return 0 if status is None and succeeded(result) else 1


if __name__ == "__main__":
    sys.exit(main())
