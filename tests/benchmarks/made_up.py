"""Results of a GPU that nobody has measured, in the format of `benchmarks.session`."""

from typing import Any

from benchmarks.results import name_of

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


def timed(
    suite: str,
    step: str,
    shape: str,
    contender: str,
    median: float,
    *,
    needs: tuple[str, ...] = (),
    **more: Any,
) -> dict[str, Any]:
    row = {
        "step": step,
        "shape": shape,
        "contender": contender,
        "seconds": quantiles(median),
    } | more
    return {"suite": suite, "needs": list(needs), "status": "done", "rows": [row]}


def gpu_result() -> dict[str, Any]:
    """A run on an H100 in which every suite has something, and one attention backend is
    wrong.
    """
    cells: dict[str, Any] = {}

    def add(
        suite: str,
        step: str,
        shape: str,
        who: str,
        median: float,
        *,
        passed: bool = True,
        **more: Any,
    ) -> None:
        parity = f"{suite} parity {who}"
        cells[parity] = {
            "suite": suite,
            "needs": [],
            "status": "done",
            "errors": {"out": 1e-3},
            "passed": passed,
        }
        cells[name_of(suite, step, shape, who)] = timed(
            suite, step, shape, who, median, needs=(parity,), **more
        )

    add("ceilings", "copy", "", "device", 8e-4, bytes=2**31, rate=2700.0, unit="GB/s")
    add(
        "ceilings",
        "matmul",
        "",
        "device",
        1.5e-3,
        flop=2 * 8192**3,
        rate=730.0,
        unit="TFLOP/s",
    )
    for who, median in (("ours", 6e-5), ("eager", 4e-4), ("compiled", 1e-4)):
        add(
            "kernels",
            "adaln forward",
            "B",
            who,
            median,
            bytes=2**27,
            rate=2237.0,
            unit="GB/s",
            share=0.83,
        )
    work = {
        "flop": 200e12,
        "rate": 512.0,
        "unit": "TFLOP/s",
        "share": 0.64,
        "layers": 9,
    }
    for step, who, median, gb in (
        ("forward", "P1", 0.75, 30.0),
        ("forward", "P2", 0.28, 22.0),
        ("forward", "ours", 0.21, 20.0),
        ("rollout", "P2", 0.54, 22.0),
        ("rollout", "ours", 0.42, 20.0),
        ("train", "P2", 2.4, 60.0),
        ("train", "ours", 1.5, 55.0),
        ("single_pass", "ours", 1.6, 56.0),
    ):
        add(
            "transformer",
            step,
            "B",
            who,
            median,
            peak_memory_gb=gb,
            attention="cudnn",
            **work,
        )
    cells["transformer train B P2c"] = {
        "suite": "transformer",
        "needs": [],
        "status": "skipped: 180 s",
    }
    add("decode", "", "B", "ours", 5.1, tiled=False)
    add("decode", "", "B", "stock", 8.9)
    add("attention", "forward", "B", "wrong", 0.01, passed=False)
    work = {"rate": 595.0, "unit": "TFLOP/s", "share": 0.75}
    add("attention", "forward", "B", "cudnn", 0.017, flop=8.9e12, **work)
    add("attention", "backward", "B", "cudnn", 0.05, flop=22.3e12, **work)
    add("iteration", "2 videos of 2 steps, cold", "B", "ours", 80.0, videos=2)
    add(
        "iteration",
        "2 videos of 2 steps",
        "B",
        "ours",
        64.0,
        videos=2,
        peak_memory_gb=41.0,
        planned_memory_gb=45.0,
    )
    return {"environment": environment(), "smoke": False, "cells": cells}
