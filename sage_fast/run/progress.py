"""Progress of a run on a terminal or in a log: phase, rewards and the time left."""

import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from sage_fast.run.run_status import StatusFile

HEARTBEAT_SECONDS = 60.0
"""Off a terminal there is a line at least so often."""

PHASE_LINE_SECONDS = 10.0
"""A phase that begins sooner after the last line is not printed, so that a quick run shows its results."""

RECENT = 20
"""Iterations and evaluations that the pace is measured by."""


class EtaEstimator:
    """Time left, by the measured seconds of an update and of an evaluation, and how many are left of each.

    Args:
        total: updates of the run.
        step: updates of an iteration.
        evaluation_every: updates between two evaluations, 0 for none.
        clock: seconds, monotonic.
    """

    def __init__(
        self, total: int, step: int, evaluation_every: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._step, self._every = total, step, evaluation_every
        # Tuples that are replaced: the thread of the heartbeat reads them while the run adds to them.
        self._iterations: tuple[float, ...] = ()
        self._evaluations: tuple[float, ...] = ()
        self._clock = clock
        self._since = clock()

    def learn(self, record: Mapping[str, Any]) -> None:
        """Take over the times of an update's record."""
        if "time/iteration" in record:
            seconds = record["time/iteration"] + record.get("time/checkpoint", 0.0)
            self._iterations = (*self._iterations, seconds)[-RECENT:]
        if "time/evaluation" in record:
            self._evaluations = (*self._evaluations, record["time/evaluation"])[-RECENT:]
        self._since = self._clock()

    def seconds_left(self, update: int) -> float | None:
        """Until the end of the run; None as long as nothing has been measured.

        Args:
            update: the last that is done.
        """
        if not self._iterations:
            return None
        iterations = -(-max(0, self._total - update) // self._step)
        seconds = iterations * fmean(self._iterations)
        if self._every and self._evaluations:
            # One at every multiple, and one at the end.
            evaluations = -(-self._total // self._every) - update // self._every
            seconds += evaluations * fmean(self._evaluations)
        return max(0.0, seconds - (self._clock() - self._since))


class RunProgress:
    """A progress bar on a terminal; lines elsewhere (a log file, CI); nothing unless `shown`.

    Elsewhere there is a line for each update, one when a phase begins, and one a minute within a phase, which a thread
    prints because the step that it tells of may take longer.

    Args:
        total, done: updates of the run, and those it goes on from.
        videos: of a rollout and of an evaluation, on all ranks.
        eta: for the time left.
        status: the same for a look from outside.
    """

    def __init__(
        self,
        total: int,
        done: int,
        *,
        videos: tuple[int, int],
        eta: EtaEstimator,
        status: StatusFile,
        shown: bool = True,
    ) -> None:
        self.total, self.update = total, done
        self.shown = shown
        self.eta, self.status = eta, status
        self._videos = videos
        self.bar: tqdm | None = None
        self._stack = ExitStack()
        if shown and sys.stderr.isatty():
            # Log messages go above the bar instead of through it.
            self._stack.enter_context(logging_redirect_tqdm())
            self.bar = tqdm(total=total, initial=done, unit="update", dynamic_ncols=True)
        self._last_refresh = 0.0
        self._summary = ""
        self._phase, self._progress, self._working_on = "", (0, 1), done
        self._last_line = self._last_step = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._print_heartbeats, name="progress", daemon=True)

    def __enter__(self) -> "RunProgress":
        if self.shown and self.bar is None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.bar is not None:
            self.bar.close()
        self._stack.close()

    def phase(self, name: str, done: int, total: int, updates: int) -> None:
        """Show where the run is, on a terminal at most five times a second.

        Args:
            updates: that are done; those before an evaluation or a checkpoint are, although nothing of them is shown.
        """
        if not self.shown:
            return
        # Decoding comes between the batches of a rollout or an evaluation and belongs to it.
        begins = name not in ("decode", self._phase)
        self._last_step = time.monotonic()
        if name != "decode":
            self._phase, self._progress = name, (done, max(1, total))
            self._working_on = updates + (name not in ("evaluation", "checkpoint"))
        left = self.eta.seconds_left(self.update)
        self.status.step(self._phase, *self.videos(), left)
        if self.bar is not None:
            if time.monotonic() - self._last_refresh > 0.2:
                self._last_refresh = time.monotonic()
                self.bar.set_postfix_str(f"{name} {done + 1}/{total}  {self._summary}")
        elif begins and time.monotonic() - self._last_line > PHASE_LINE_SECONDS:
            self._print_phase()

    def videos(self) -> tuple[int, int]:
        """Videos of the phase that are done, and all of them."""
        done, total = self._progress
        if self._phase == "checkpoint":
            return 0, 0
        videos = self._videos[self._phase == "evaluation"]
        return videos * done // total, videos

    def finished(self, record: dict[str, Any]) -> None:
        """Show the result of an iteration."""
        self.eta.learn(record)
        self.status.finished(record)
        parts = []
        if "reward/mean" in record:
            parts.append(f"reward {record['reward/mean']:.4f}")
        if "eval/reward_mean" in record:
            parts.append(f"evaluation {record['eval/reward_mean']:.4f} (gain {record['eval/paired_gain']:+.4f})")
        self._summary = "  ".join(parts)
        self.update = update = record["update"]
        if self.bar is not None:
            # A baseline evaluated on resume belongs to update 0, which the bar has passed.
            self.bar.update(max(0, update - self.bar.n))
            self.bar.set_postfix_str(self._summary)
        elif self.shown:
            self._print(f"update {update}/{self.total}  {self._summary}{self._time_left()}")

    def _print_phase(self) -> None:
        done, videos = self.videos()
        of_videos = f"  {done} of {videos} videos" if videos else ""
        quiet = time.monotonic() - self._last_step
        since = f"  ({format_seconds(quiet)} in this step)" if quiet > 1.5 * HEARTBEAT_SECONDS else ""
        self._print(f"update {self._working_on}/{self.total}  {self._phase}{of_videos}{self._time_left()}{since}")

    def _time_left(self) -> str:
        left = self.eta.seconds_left(self.update)
        return f"  {format_seconds(left)} left" if left else ""

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def _print_heartbeats(self) -> None:
        wait = HEARTBEAT_SECONDS
        while not self._closed.wait(max(0.1, wait)):
            wait = self._last_line + HEARTBEAT_SECONDS - time.monotonic()
            if wait <= 0 and self._phase:
                try:
                    self._print_phase()
                except OSError:  # nobody reads any more; the run's own next line says so
                    return
                wait = HEARTBEAT_SECONDS


def format_seconds(seconds: float) -> str:
    """Example: `format_seconds(200)` is `3.3 min`, `format_seconds(9000)` is `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the device, or of this process on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
