"""What a running job shows: phase, rewards and the time left."""

import resource
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class RunProgress:
    """A progress bar on a terminal; one line per update elsewhere (a log file, CI); nothing unless `shown`."""

    def __init__(self, total: int, done: int, *, shown: bool = True) -> None:
        self.total = total
        self.shown = shown
        self.bar: tqdm | None = None
        self._stack = ExitStack()
        if shown and sys.stderr.isatty():
            # Log messages go above the bar instead of through it.
            self._stack.enter_context(logging_redirect_tqdm())
            self.bar = tqdm(total=total, initial=done, unit="update", dynamic_ncols=True)
        self._start, self._first = time.monotonic(), done
        self._last_refresh = 0.0
        self._summary = ""

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        self._stack.close()

    def phase(self, name: str, done: int, total: int) -> None:
        """Show where the iteration is; at most five times a second."""
        if self.bar is not None and time.monotonic() - self._last_refresh > 0.2:
            self._last_refresh = time.monotonic()
            self.bar.set_postfix_str(f"{name} {done + 1}/{total}  {self._summary}")

    def finished(self, record: dict[str, Any]) -> None:
        """Show the result of an iteration."""
        parts = []
        if "reward/mean" in record:
            parts.append(f"reward {record['reward/mean']:.4f}")
        if "eval/reward_mean" in record:
            parts.append(f"evaluation {record['eval/reward_mean']:.4f} (gain {record['eval/paired_gain']:+.4f})")
        self._summary = "  ".join(parts)
        update = record["update"]
        if self.bar is not None:
            # A baseline evaluated on resume belongs to update 0, which the bar has passed.
            self.bar.update(max(0, update - self.bar.n))
            self.bar.set_postfix_str(self._summary)
            return
        if not self.shown:
            return
        seconds = time.monotonic() - self._start
        left = (self.total - update) * seconds / max(1, update - self._first)
        eta = f"  {left / 60:.1f} min left" if update > self._first else ""
        print(f"update {update}/{self.total}  {self._summary}{eta}", file=sys.stderr, flush=True)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the device, or of this process on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
