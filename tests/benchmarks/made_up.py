"""Results of a GPU that nobody has measured, in the format of `benchmarks.session`."""

from typing import Any

COMMIT = "0123456789abcdef"


def quantiles(median: float, spread: float = 0.002, rounds: int = 20) -> dict[str, Any]:
    """A timing whose q20 and q80 are `spread` below and above its median."""
    return {
        "q20": median * (1 - spread),
        "median": median,
        "q80": median * (1 + spread),
        "rounds": rounds,
    }


def environment(gpu: str | None = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    return {
        "commit": COMMIT,
        "packages": {"torch": "2.13.0"},
        "cpu": {"model": "A CPU", "count": 2, "torch_threads": 1},
        "gpu": None if gpu is None else {"name": gpu},
    }


def parity(suite: str, *, passed: bool = True) -> dict[str, Any]:
    return {"suite": suite, "needs": [], "status": "done", "errors": {"out": 1e-3}, "bounds": {}, "passed": passed}


def timed(
    suite: str, step: str, shape: str, contender: str, median: float, *, needs: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    row = {"step": step, "shape": shape, "contender": contender, "seconds": quantiles(median)} | more
    return {"suite": suite, "needs": list(needs), "status": "done", "rows": [row]}


def gpu_result() -> dict[str, Any]:
    """A run on an H100 in which every suite has something, and one attention backend is wrong."""
    cells: dict[str, Any] = {
        "ceilings copy": timed("ceilings", "copy", "", "device", 8e-4, bytes=2**31, rate=2700.0, unit="GB/s"),
        "ceilings matmul": timed(
            "ceilings", "matmul", "", "device", 1.5e-3, flop=2 * 8192**3, rate=730.0, unit="TFLOP/s"
        ),
    }

    def add(suite: str, step: str, shape: str, who: str, median: float, judge: str, **more: Any) -> None:
        name = " ".join(part for part in (suite, step, shape, who) if part)
        cells[f"{suite} parity {judge}"] = parity(suite)
        cells[name] = timed(suite, step, shape, who, median, needs=(f"{suite} parity {judge}",), **more)

    for who, median in (("ours", 6e-5), ("eager", 4e-4), ("compiled", 1e-4)):
        add("kernels", "adaln forward", "B", who, median, "adaln", bytes=2**27, rate=2237.0, unit="GB/s", share=0.83)
    work = {"flop": 200e12, "rate": 512.0, "unit": "TFLOP/s", "share": 0.64}
    for step, who, median, gb in (
        ("forward", "P1", 1.8, 30.0),
        ("forward", "P2", 1.2, 22.0),
        ("forward", "ours", 0.9, 20.0),
        ("rollout", "P2", 2.4, 22.0),
        ("rollout", "ours", 1.8, 20.0),
        ("train", "P2", 7.5, 60.0),
        ("train", "ours", 5.0, 55.0),
        ("single_pass", "ours", 5.2, 56.0),
    ):
        add("transformer", step, "B", who, median, who, peak_memory_gb=gb, attention="cudnn", **work)
    cells["transformer train B P2c"] = {"suite": "transformer", "needs": [], "status": "skipped: 180 s"}
    for who, median in (("ours", 2.0), ("stock", 2.2)):
        add("decode", "", "B", who, median, "B")
    cells["attention parity wrong"] = parity("attention", passed=False)
    cells["attention B wrong"] = timed("attention", "forward", "B", "wrong", 0.01, needs=("attention parity wrong",))
    add("attention", "forward", "B", "cudnn", 0.017, "cudnn", rate=595.0, unit="TFLOP/s", share=0.75)
    add("attention", "backward", "B", "cudnn", 0.05, "cudnn", rate=516.0, unit="TFLOP/s", share=0.65)
    cells["iteration parity"] = parity("iteration")
    iteration = timed("iteration", "2 videos of 4 steps", "B", "ours", 110.0, needs=("iteration parity",), videos=2)
    cells["iteration B"] = iteration
    lora = timed("sharded", "LoRA gradient", "B", "ours", 5.5)
    lora["rows"] += timed("sharded", "LoRA gradient", "B", "unwrapped", 5.0)["rows"]
    cells["sharded lora"] = lora
    return {"environment": environment(), "smoke": False, "cells": cells}
