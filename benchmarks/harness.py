"""Needs of every measurement: a clock of the device, its ceilings, its state, and where
results go.
"""

import contextlib
import datetime
import gc
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from sage_fast.config.files import write_text
from sage_fast.run.provenance import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"

HEAD_START_CYCLES = 20_000_000
MOST_HEAD_START_CYCLES = 160_000_000
"""Cycles that the GPU waits before a timed stretch, at first (about 10 ms) and at most:
meanwhile the CPU queues the stretch.
"""
LONG_STRETCH = 0.25
"""Seconds of a timed stretch in which it does not matter that the device begins before
all is queued: the launches that a queue holds, about a thousand, keep it busy.
"""
STRETCH_SECONDS = 4e-3
"""Length of one timed stretch on a GPU, the sum of many calls."""
FEWEST_CALLS = 3
"""Calls of a timed stretch whose launches do not fit into a queue."""
FEWEST_ROUNDS = 3
"""Rounds of a measurement whose time is short."""


class DeviceClock:
    """A clock of device time: calls alternate between start and stop.

    On a GPU the start call makes the device wait, so that the calls in between are
    queued when it goes on and the time holds no launch overhead of Python; the stop
    call returns the seconds between. On a CPU it is a plain clock.
    """

    __name__ = "device_clock"
    """By which pytest-benchmark looks up its timer."""

    def __init__(self) -> None:
        self.cycles = HEAD_START_CYCLES
        """How long the device waits."""
        self.late = False
        """True if the device began with the last stretch before all of it was queued,
        and it was a short one.
        """
        self._started: torch.cuda.Event | None = None

    def __call__(self) -> float:
        """Start, or stop."""
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        if self._started is None:
            torch.cuda.synchronize()
            torch.cuda._sleep(self.cycles)
            event.record()
            self._started = event
            return 0.0
        early = self._started.query()
        event.record()
        torch.cuda.synchronize()
        seconds = self._started.elapsed_time(event) / 1e3
        self._started = None
        self.late = early and seconds < LONG_STRETCH
        return seconds

    def reset(self) -> None:
        """Forget a start whose stop never came, because what was timed failed."""
        self.__init__()  # type: ignore[misc]


device_clock = DeviceClock()
"""The one that every measurement uses."""


Quantiles = dict[str, float]
"""q20, median and q80 of the seconds of one call, and the rounds of its measurement."""


def quantiles(seconds: list[float]) -> Quantiles:
    """Quantiles of measured seconds.

    Example:
        >>> quantiles([3.0, 1.0, 2.0])
        {'q20': 1.4, 'median': 2.0, 'q80': 2.6, 'rounds': 3}
    """
    fifths = seconds
    if len(seconds) > 1:
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {
        "q20": fifths[0],
        "median": statistics.median(seconds),
        "q80": fifths[-1],
        "rounds": len(seconds),
    }


def calls_per_stretch(nbytes: int) -> int:
    """Calls in one timed stretch of an op that moves `nbytes`, at about 2 TB/s; 1 on a
    CPU.
    """
    if not torch.cuda.is_available():
        return 1
    return max(
        FEWEST_CALLS, min(100, math.ceil(STRETCH_SECONDS * 2e12 / max(nbytes, 1)))
    )


def measure(
    call: Callable[[], object],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 1,
    limit: float = math.inf,
    left: float = math.inf,
) -> Quantiles:
    """Seconds of one call over rounds of `calls` calls.

    There are fewer rounds when they would take more than `limit` seconds in all, but
    `FEWEST_ROUNDS` as long as these end within `left` seconds, and one in any case.
    Where the device did not wait for Python, all rounds are repeated with fewer calls,
    then with a longer head start.
    """
    for _ in range(warmup):
        call()
    began = time.monotonic()
    seconds: list[float] = []
    while len(seconds) < rounds:
        after = time.monotonic() - began + (calls * seconds[-1] if seconds else 0.0)
        if seconds and after > (left if len(seconds) < FEWEST_ROUNDS else limit):
            break
        start = device_clock()
        for _ in range(calls):
            call()
        seconds.append((device_clock() - start) / calls)
        if not device_clock.late:
            continue
        if calls > FEWEST_CALLS:
            # A queue holds about a thousand launches, and a stretch of eager calls can
            # have more.
            calls = max(FEWEST_CALLS, calls // 4)
            seconds.clear()
        # Where the longest head start is too short, what is timed waits for the device
        # itself.
        elif device_clock.cycles < MOST_HEAD_START_CYCLES:
            device_clock.cycles *= 2
            seconds.clear()
    return quantiles(seconds)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + o, tl.load(source_ptr + o))


Calls = dict[str, Callable[[], object]]
"""Contender -> its call."""


def products(device: torch.device, smoke: bool) -> tuple[Calls, dict[str, int]]:
    """A large bfloat16 product, and its operations."""
    size = 64 if smoke else 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    b = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return {"device": lambda: a @ b}, {"flop": 2 * size**3}


def copies(device: torch.device, smoke: bool) -> tuple[Calls, dict[str, int]]:
    """Two ways to copy 1 GiB on a GPU (1 MiB on a CPU), and the bytes that each reads
    and writes.
    """
    numel = 2**28 if device.type == "cuda" else 2**18
    block = 4096
    source = torch.zeros(numel, dtype=torch.float32, device=device)
    target = torch.zeros(numel, dtype=torch.float32, device=device)
    calls: Calls = {
        "memcpy": lambda: target.copy_(source),
        "Triton": lambda: _copy_kernel[numel // block,](
            source, target, BLOCK=block, num_warps=8
        ),
    }
    return calls, {"bytes": 8 * numel}


CEILINGS = {"copy": copies, "matmul": products}
"""Measurements of what the device can do, the denominators of every share."""


def wait(device: torch.device) -> None:
    """Until a GPU has done what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gb(device: torch.device) -> float | None:
    """1e9 bytes at the peak since `forget_peak`; None on a CPU."""
    return (
        torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    )


def release(module: torch.nn.Module | None = None) -> None:
    """Give memory back to the device, the gradients of a module included."""
    if module is not None:
        module.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------
# state of the machine


def gpu_state() -> dict[str, Any] | None:
    """State of the current GPU by NVML, as far as it says: clock, power and
    temperature; None without a GPU.

    Example: ``{"sm_mhz": 1980, "power_w": 412.0, "temperature_c": 51}``
    """
    if not torch.cuda.is_available():
        return None
    readings: dict[str, Callable[[], Any]] = {
        "sm_mhz": torch.cuda.clock_rate,
        "power_w": lambda: torch.cuda.power_draw() / 1e3,
        "temperature_c": torch.cuda.temperature,
    }
    state = {}
    for name, read in readings.items():
        # No library, no driver in a container, or no such reading in a slice of a GPU:
        # each raises its own.
        with contextlib.suppress(Exception):
            state[name] = read()
    return state


def environment() -> dict[str, Any]:
    """Versions, commit, hardware, how busy the machine is (load averages) and the state
    of the GPU now.
    """
    return describe_environment() | {
        "load_average": list(os.getloadavg()),
        "gpu_state": gpu_state(),
    }


def result_file(environment: dict[str, Any], *, suffix: str = "") -> Path:
    """results/<device>/<date>-<commit><suffix>.json of a run in this environment; a
    CPU's folder begins with `cpu-`.
    """
    name = f"cpu {environment['cpu']['model']}"
    if environment["gpu"]:
        name = environment["gpu"]["name"]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    commit, _, dirty = (environment["commit"] or "nocommit").partition("-")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    changed = "-dirty" if dirty else ""
    return RESULTS / slug / f"{day}-{commit[:9]}{changed}{suffix}.json"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, whole or not at all."""
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
