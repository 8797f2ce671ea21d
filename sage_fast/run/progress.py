"""Progress of a run on a terminal, in a log and in its `status.json`: phase, rewards and the time left."""

import json
import logging
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from sage_fast.config.files import write_text
from sage_fast.run.run_status import FILE_NAME, State, Status, utc_now

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60.0
"""Off a terminal there is a line at least so often."""

SECONDS_BETWEEN_WRITES = 5.0
"""Of the status, within a phase."""

MAX_ERROR = 500
"""Characters of an error that the status keeps."""

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
    """Shows the progress of a run, and keeps its `status.json` for a look from outside.

    It shows a progress bar on a terminal; lines elsewhere (a log file, CI): one for each update, and one a minute in
    between, which a thread prints because the step that it tells of may take longer.

    Args:
        directory: of the run. A status that cannot be written there is a warning: a run does not end for it.
        status: what is known before the run begins.
        eta: for the time left.
        evaluation_videos: of one evaluation, on all ranks.
        shown: whether this rank shows and writes anything.
    """

    def __init__(
        self, directory: Path, status: Status, eta: EtaEstimator, *, evaluation_videos: int, shown: bool = True
    ) -> None:
        self.path = directory / FILE_NAME
        self.status, self.eta, self.shown = status, eta, shown
        self._evaluation_videos = evaluation_videos
        self._bar: tqdm | None = None
        self._stack = ExitStack()
        self._summary, self._working_on = "", 0
        self._begun = self._failed = False
        self._last_step = self._last_line = time.monotonic()
        self._last_refresh = self._last_write = -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._print_heartbeats, name="progress", daemon=True)

    def begin(self, update: int) -> None:
        """The run goes on from this update, and owns the directory."""
        self._begun = True
        self._working_on, self._last_step = update, time.monotonic()
        self.status = replace(self.status, update=update, started=utc_now())
        self._write()

    def __enter__(self) -> "RunProgress":
        if self.shown and sys.stderr.isatty():
            # Log messages go above the bar instead of through it.
            self._stack.enter_context(logging_redirect_tqdm())
            total, done = self.status.num_updates, self.status.update
            self._bar = self._stack.enter_context(tqdm(total=total, initial=done, unit="update", dynamic_ncols=True))
        elif self.shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stack.close()

    def phase(self, name: str, done: int, total: int, updates: int) -> None:
        """Show where the run is, on a terminal at most five times a second.

        Args:
            updates: that are done; those before an evaluation or a checkpoint are, although nothing of them is shown.
        """
        if not self.shown:
            return
        now, before = time.monotonic(), self.status
        longest = max(before.longest_seconds, now - self._last_step)
        self._last_step = now
        phase, videos, videos_done = before.phase, before.videos, before.videos_done
        if name != "decode":  # it comes between the batches of a rollout or an evaluation and belongs to it
            by_phase = {"checkpoint": 0, "evaluation": self._evaluation_videos}
            phase, videos = name, by_phase.get(name, before.videos_per_rollout)
            videos_done = videos * done // max(1, total)
            self._working_on = updates + (name not in by_phase)
        self.status = replace(
            before,
            phase=phase,
            videos_done=videos_done,
            videos=videos,
            seconds_left=self.eta.seconds_left(before.update),
            longest_seconds=longest,
        )
        # The phases of a quick run are over before anybody could read them.
        begins = 0.0 if longest > SECONDS_BETWEEN_WRITES else 1.0
        if now - self._last_write >= (SECONDS_BETWEEN_WRITES if phase == before.phase else begins):
            self._write()
        if self._bar is not None and now - self._last_refresh > 0.2:
            self._last_refresh = now
            self._bar.set_postfix_str(f"{name} {done + 1}/{total}  {self._summary}")

    def finished(self, record: Mapping[str, Any]) -> None:
        """Show the result of an iteration."""
        self.eta.learn(record)
        update, parts = record["update"], []
        scores: dict[str, Any] = {}
        if "reward/mean" in record:
            parts.append(f"reward {record['reward/mean']:.4g}")
            if self.status.gain is None:
                scores = {"reward": record["reward/mean"]}
        if "eval/reward_mean" in record:
            scores = {"reward": record["eval/reward_mean"], "gain": record["eval/paired_gain"]}
            parts.append(f"evaluation {scores['reward']:.4g} (gain {scores['gain']:+.3g})")
        self._summary = "  ".join(parts)
        self.status = replace(self.status, update=update, **scores)
        if self._bar is not None:
            # A baseline evaluated on resume belongs to update 0, which the bar has passed.
            self._bar.update(max(0, update - self._bar.n))
            self._bar.set_postfix_str(self._summary)
        elif self.shown:
            self._print(f"update {update}/{self.status.num_updates}  {self._summary}{self._time_left()}")

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Write the last word of the run."""
        text = None if error is None else (str(error) or type(error).__name__)[:MAX_ERROR]
        left = 0.0 if state == "finished" else None
        self.status = replace(
            self.status, state=state, phase="", videos_done=0, videos=0, seconds_left=left, error=text
        )
        self._write()

    def _write(self) -> None:
        # Who has deleted the directory does not want it back.
        if not (self.shown and self._begun and self.path.parent.exists()):
            return
        self._last_write = time.monotonic()
        self.status = replace(self.status, written=utc_now())
        try:
            write_text(self.path, json.dumps(asdict(self.status), indent=1) + "\n", lasting=False)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("%s is not up to date: %s", self.path, error)
            self._failed = True

    def _time_left(self) -> str:
        left = self.eta.seconds_left(self.status.update)
        return f"  {format_seconds(left)} left" if left else ""

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def _print_heartbeats(self) -> None:
        while not self._closed.wait(max(0.1, self._last_line + HEARTBEAT_SECONDS - time.monotonic())):
            now, status = time.monotonic(), self.status
            if now < self._last_line + HEARTBEAT_SECONDS or not status.phase:
                continue
            of_videos = f"  {status.videos_done} of {status.videos} videos" if status.videos else ""
            quiet = now - self._last_step
            since = f"  ({format_seconds(quiet)} in this step)" if quiet > 1.5 * HEARTBEAT_SECONDS else ""
            where = f"update {self._working_on}/{status.num_updates}  {status.phase}{of_videos}"
            try:
                self._print(f"{where}{self._time_left()}{since}")
            except OSError:  # nobody reads any more; the run's own next line says so
                return


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
