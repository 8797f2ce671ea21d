"""What every benchmark needs: a clock of the device, the ceilings of this machine, where results go."""

import datetime
import importlib.util
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sage_fast.files import replacing
from sage_fast.provenance import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"

HEAD_START_CYCLES = 20_000_000
"""Cycles that the GPU waits before a timed stretch (about 10 ms), in which the CPU queues what is to be timed."""
L2_BYTES = 256 * 2**20
"""Bytes over which repeated calls are spread, several times the largest L2 cache: each call finds it cold."""
STRETCH_SECONDS = 4e-3
"""Length of one timed stretch on a GPU, the sum of many calls."""

_started: list[torch.cuda.Event] = []


def _failures() -> tuple[type[Exception], ...]:
    kinds: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, AssertionError)
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError

        kinds += (TritonError,)
    return kinds


FAILURES = _failures()
"""What a library raises when a measurement cannot be made here; it is recorded and the run goes on, to exit status 1.
Out of memory is a RuntimeError."""


def device_clock() -> float:
    """A clock for pytest-benchmark that reads device time: calls alternate between start and stop.

    On a GPU the start call makes the device wait, so that the calls in between are queued when it goes on and the time
    holds no launch overhead of Python; the stop call returns the seconds between. On a CPU it is a plain clock.
    """
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    if not _started:
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        event.record()
        _started.append(event)
        return 0.0
    event.record()
    torch.cuda.synchronize()
    return _started.pop().elapsed_time(event) / 1e3


def reset_clock() -> None:
    """Forget a start call of `device_clock` whose stop never came, because what was timed failed."""
    _started.clear()


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Seconds of one call over the rounds of a measurement.

    Example:
        >>> Quantiles.of([3.0, 1.0, 2.0])
        Quantiles(minimum=1.0, q1=1.0, median=2.0, q3=3.0, maximum=3.0, rounds=3)
    """

    minimum: float
    q1: float
    median: float
    q3: float
    maximum: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Quantiles":
        """Quantiles of measured seconds."""
        q1, _, q3 = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(
            minimum=min(seconds),
            q1=q1,
            median=statistics.median(seconds),
            q3=q3,
            maximum=max(seconds),
            rounds=len(seconds),
        )


def calls_per_stretch(nbytes: int) -> int:
    """Calls in one timed stretch of an op that moves `nbytes`, at about 2 TB/s; 1 on a CPU."""
    if not torch.cuda.is_available():
        return 1
    return max(3, min(100, math.ceil(STRETCH_SECONDS * 2e12 / max(nbytes, 1))))


def copies_beyond_cache(nbytes: int) -> int:
    """How many sets of inputs to rotate through, so that none is in the cache when its turn comes; 1 on a CPU."""
    return max(1, min(32, math.ceil(L2_BYTES / max(nbytes, 1)))) if torch.cuda.is_available() else 1


def measure(call: Callable[[], object], *, calls: int, rounds: int, warmup: int = 3) -> Quantiles:
    """Seconds of one call, by `device_clock`."""
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(rounds):
        start = device_clock()
        for _ in range(calls):
            call()
        seconds.append((device_clock() - start) / calls)
    return Quantiles.of(seconds)


def copy_bandwidth(device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """Bandwidth of a device copy, bytes read plus bytes written: the ceiling of every memory-bound kernel."""
    numel = 2**20 if smoke else 2**30
    source, target = (torch.zeros(numel, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = measure(lambda: target.copy_(source), calls=1 if smoke else 5, rounds=3 if smoke else 20)
    return {"bytes": 2 * numel, "seconds": asdict(seconds), "gb_per_s": 2 * numel / seconds.median / 1e9}


def matmul_peak(device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """Rate of a large bfloat16 product: the ceiling of everything that multiplies matrices."""
    size = 64 if smoke else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = measure(lambda: a @ b, calls=1 if smoke else 5, rounds=3 if smoke else 20)
    return {"size": size, "seconds": asdict(seconds), "tflop_per_s": 2 * size**3 / seconds.median / 1e12}


def gpu_state() -> dict[str, Any] | None:
    """Driver, clocks, power and temperature of the current GPU; None without one or without NVML."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        }
    except pynvml.NVMLError as error:
        return {"error": str(error)}


def environment() -> dict[str, Any]:
    """Versions, commit, hardware and the state of the GPU now."""
    return describe_environment() | {"gpu_state": gpu_state()}


def result_file(environment: dict[str, Any], folder: Path = RESULTS) -> Path:
    """results/<gpu>/<date>-<commit>.json for a run in this environment."""
    name = environment["gpu"]["name"] if environment["gpu"] else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    commit, _, dirty = (environment["commit"] or "nocommit").partition("-")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return folder / slug / f"{day}-{commit[:9]}{'-dirty' if dirty else ''}.json"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
