"""The status of a run: as a bar on a terminal or lines in a log, in `status.json`, as it
is seen from outside, and for callbacks.

The run writes the file when a phase begins and every few seconds within one; it appears
whole. With the lease somebody else can then tell apart a run that goes on, one that
makes no progress any more although its process lives, and one whose process is gone and
left no error, as after a `kill -9`.

    class StopWhenGood(Callback):
        def on_evaluation(self, record: EvaluationRecord) -> None:
            if record.metrics["eval/paired_gain"] > 0.5:
                raise StopRun("the gain is 0.5")

    train(config, callbacks=[StopWhenGood()])

Callbacks are called on rank 0 alone, in the order in which they were given, between the
steps of the run; what they take, training waits for. They must not change what they are
given, and must not communicate with other ranks.
"""

import json
import logging
import math
import os
import platform
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from sage_fast.config.errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    DecodeError,
    RewardError,
    RunDirectoryError,
    TrainingError,
)
from sage_fast.config.files import loads, read_text, write_text
from sage_fast.config.load import load_config, outside_code
from sage_fast.config.registry import describe
from sage_fast.run.directory import RunDirectory, look_at

if TYPE_CHECKING:  # both import torch, which `sage-fast status` can do without
    from sage_fast.evaluation import Evaluation
    from sage_fast.records import RolloutRecord

logger = logging.getLogger(__name__)


class StopRun(Exception):
    """Raised by a callback to end the run: it finishes its update, saves, and says the
    reason. No error.
    """


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """An iteration that is finished and in metrics.jsonl.

    Attributes:
        update: optimizer updates done.
        total: `training.num_updates`.
        metrics: its row of metrics.jsonl.

    Example: `UpdateRecord(update=3, total=50, metrics={"reward/mean": 0.41,
    "grad_norm": 0.2, ...})`
    """

    update: int
    total: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation whose scores, videos and metrics are on disk. Update 0 is the model
    that the run starts from.

    Attributes:
        metrics: its row of metrics.jsonl, with `eval/...`.
        evaluation: the scores of every prompt.
        baseline: those of update 0.

    Example: `EvaluationRecord(update=10, metrics={"eval/paired_gain": 0.1, ...},
    evaluation=..., baseline=...)`
    """

    update: int
    metrics: Mapping[str, Any]
    evaluation: "Evaluation"
    baseline: "Evaluation"


@dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """A checkpoint that is complete on disk; with `checkpoint.asynchronous`, training
    has gone on since.

    Example: `SaveRecord(update=10, folder=Path("runs/mine/checkpoints/update-000010"))`
    """

    update: int
    folder: Path


class Callback:
    """Base class of callbacks: override what you need. Each may raise `StopRun`.

    Any other exception of a callback ends the run in the same orderly way: the update
    in progress is finished and saved, and `CallbackError` is raised, with the
    callback's exception as its cause. The callback is not called again.
    """

    def on_rollout(self, record: "RolloutRecord") -> None:
        """The videos of the coming update are scored; its gradient is not taken yet."""

    def on_update(self, record: UpdateRecord) -> None:
        """An iteration is finished; where an evaluation was due, `on_evaluation` comes
        next.
        """

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is finished, that of update 0 included."""

    def on_save(self, record: SaveRecord) -> None:
        """A checkpoint is complete."""


class Callbacks:
    """The callbacks of a run as one that raises nothing: what they want is asked for
    when the run can act on it.

    Args:
        callbacks: none of them on ranks other than 0.

    Raises:
        ConfigError: one is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks: {callback!r} is not a sage_fast.Callback. Give "
                    "objects of classes derived from it, "
                    "such as [Mine()]."
                )
        self._active = list(callbacks)
        self.stop_reason: str | None = None
        """Reason of the first `StopRun`; None where there was none."""
        self._failure: tuple[str, Exception] | None = None

    @property
    def wants_stop(self) -> bool:
        """A callback has raised, `StopRun` or anything else."""
        return self.stop_reason is not None or self._failure is not None

    def raise_failure(self, update: int, directory: Path) -> None:
        """CallbackError where a callback has failed, now that the run is saved at
        `update`.
        """
        if self._failure is None:
            return
        name, error = self._failure
        raise CallbackError(
            f"Callback {name} raised {describe(error)}. The run in {directory} was "
            f"ended after update {update} and nothing of it is lost: fix or remove the "
            "callback, and continue with resume set to auto."
        ) from error

    def tell(self, event: str, record: object) -> None:
        """Call the method of this name, such as `on_update`, of every callback."""
        # A copy, because one that fails is removed on the way.
        for callback in list(self._active):
            name = f"{type(callback).__name__}.{event}"
            try:
                getattr(callback, event)(record)
            except StopRun as stop:
                if not self.wants_stop:
                    logger.info("%s stops the run: %s", name, stop)
                self.stop_reason = self.stop_reason or str(stop) or name
            except Exception as error:  # noqa: BLE001  the user's own code; raised again when the run is saved
                logger.error(
                    "%s raised %s: the run is saved and ends.", name, describe(error)
                )
                self._active.remove(callback)
                self._failure = self._failure or (name, error)


HEARTBEAT_SECONDS = 60.0
"""A log has a line at least so often."""
SECONDS_BETWEEN_WRITES = 5.0
"""Of the file, within a phase."""
MAX_ERROR = 500
"""Characters of an error that the status keeps."""
RECENT = 20
"""Iterations and evaluations that the pace is measured by."""

QUIET_SECONDS = 60.0
"""A run may go at least so long without progress."""
QUIET_FACTOR = 4.0
"""And this many times as long as it has gone without before."""
QUIET_FIRST_SECONDS = 1800.0
"""And so long before its first update, whose pace nobody knows."""

OWN_ERRORS = (
    CheckpointError,
    DecodeError,
    OSError,
    RewardError,
    RunDirectoryError,
    TrainingError,
)
"""Errors that the same start would meet again; others come from another rank, a server
or the hardware.
"""

State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of a run.

    Attributes:
        state: stopped means on request.
        update, num_updates: done, and of how many.
        phase, done, total: what it does, and how many of its batches are done.
        reward: of the last evaluation, or of the last rollout where there is none.
        gain: paired, over update 0.
        worse: see `describe_worse`.
        slowest: rank of the last rollout, where there are several.
        seconds_left: by the measured pace.
        longest_seconds: that it has gone without progress.
        videos_per_rollout: on all ranks.
        folder: in which it was started.
        gpus: its processes, if one node has them all.
        error: that ended it.
        repeats: a restart would meet it again.
        written: UTC.

    Example: `Status(state="running", update=4, num_updates=60, phase="rollout", done=2,
    total=8, reward=0.41, gain=0.05, seconds_left=1800.0, longest_seconds=2.5,
    videos_per_rollout=128, error=None, written="2026-01-31T12:03:00+00:00")`
    """

    state: State = "running"
    update: int = 0
    num_updates: int
    phase: str = "start"
    done: int = 0
    total: int = 0
    reward: float | None = None
    gain: float | None = None
    worse: str | None = None
    slowest: str | None = None
    seconds_left: float | None = None
    longest_seconds: float = 0.0
    videos_per_rollout: int = 0
    folder: str = ""
    gpus: int = 1
    error: str | None = None
    repeats: bool = False
    written: str = ""


# --------------------------------------------------------------------------------------
# what the run tells


class RunProgress:
    """Shows the progress of a run, and keeps its `status.json` for a look from outside.

    It shows a progress bar on a terminal; lines elsewhere: one for each update, and one
    a minute in between, which a thread prints because the step that they tell of may
    take longer.

    Args:
        directory: of the run. A status that cannot be written there is a warning: a run
            does not end for it.
        status: what is known before the run begins.
        step: updates of an iteration.
        evaluation_every: updates between two evaluations, 0 for none.
        shown: whether this rank shows and writes anything.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        status: Status,
        *,
        step: int,
        evaluation_every: int,
        shown: bool = True,
    ) -> None:
        self.path = RunDirectory(directory).status
        self.status = status
        self.shown = shown
        self._step = step
        self._evaluation_every = evaluation_every
        self._iterations: deque[float] = deque(maxlen=RECENT)
        self._evaluations: deque[float] = deque(maxlen=RECENT)
        self._gains: dict[int, tuple[float, float]] = {}
        self._begun = False
        self._failed = False
        self._last_step = self._last_line = time.monotonic()
        self._last_write = self._last_refresh = -math.inf
        self._stack = ExitStack()
        self._bar: tqdm | None = None
        self._summary = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._print_heartbeats, name="progress", daemon=True
        )

    def begin(self, update: int) -> None:
        """The run goes on from this update, and owns the directory."""
        self._begun = True
        self._last_step = time.monotonic()
        self.status = replace(self.status, update=update)
        self._write()

    def learn(self, record: Mapping[str, Any]) -> None:
        """Take over the times, the reward and the paired gain of an update's record."""
        if "time/iteration" in record:
            self._iterations.append(
                record["time/iteration"] + record.get("time/checkpoint", 0.0)
            )
        if "time/evaluation" in record:
            self._evaluations.append(record["time/evaluation"])
        if "eval/paired_gain" in record:
            from sage_fast.evaluation import describe_worse  # imports torch

            gain = record["eval/paired_gain"]
            self._gains[record["update"]] = gain, record["eval/paired_gain_stderr"]
            self.status = replace(
                self.status,
                reward=record["eval/reward_mean"],
                gain=gain,
                worse=describe_worse(self._gains),
            )
        elif "reward/mean" in record and self.status.gain is None:
            # The reward of a training batch stands in until an evaluation has one.
            self.status = replace(self.status, reward=record["reward/mean"])

    def seconds_left(self) -> float | None:
        """From the last update to the end of the run, by the measured times; None as
        long as there are none.
        """
        if not self._iterations:
            return None
        update = self.status.update
        total = self.status.num_updates
        every = self._evaluation_every
        iterations = math.ceil(max(0, total - update) / self._step)
        seconds = iterations * fmean(self._iterations)
        if every and self._evaluations and update < total:
            # One at every multiple, and one at the end.
            evaluations = math.ceil(total / every) - update // every
            seconds += evaluations * fmean(self._evaluations)
        return seconds

    def __enter__(self) -> "RunProgress":
        if self.shown and sys.stderr.isatty():
            # Log messages go above the bar instead of through it.
            self._stack.enter_context(logging_redirect_tqdm())
            # A narrow terminal cuts from the right: the numbers come first, then the
            # phase, the bar and the time.
            self._bar = tqdm(
                total=self.status.num_updates,
                initial=self.status.update,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} {desc}|{bar}| {remaining} left",
            )
            self._stack.enter_context(self._bar)
        elif self.shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # This wakes the thread, which otherwise sleeps for up to a minute.
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stack.close()

    def phase(self, name: str, done: int, total: int) -> None:
        """Take note of where the run is."""
        now = time.monotonic()
        # A phase that hangs is the one that the file names.
        pause = SECONDS_BETWEEN_WRITES if name == self.status.phase else 0.0
        self.status = replace(
            self.status,
            phase=name,
            done=done,
            total=total,
            seconds_left=self.seconds_left(),
            longest_seconds=max(self.status.longest_seconds, now - self._last_step),
        )
        self._last_step = now
        if now - self._last_write >= pause:
            self._write()
        if self._bar is not None and now - self._last_refresh > 0.2:
            self._last_refresh = now
            self._bar.set_description_str(f"{self._summary}{name} {done + 1}/{total} ")

    def finished(self, record: Mapping[str, Any]) -> None:
        """Show the result of an iteration."""
        self.learn(record)
        update = record["update"]
        # A baseline evaluated on resume belongs to update 0, which the run has passed.
        done = max(update, self.status.update)
        self.status = replace(
            self.status, update=done, slowest=record.get("time/slowest")
        )
        # In a second step, since the time left is counted from the update that was just
        # set.
        self.status = replace(self.status, seconds_left=self.seconds_left())
        evaluated = "eval/reward_mean" in record
        if evaluated and self.status.worse is not None and self.shown:
            logger.warning("The model is %s.", self.status.worse)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            reward = record.get("reward/mean", self.status.reward or math.nan)
            self._summary = f"reward {reward:.4g} "
            if self.status.gain is not None:
                self._summary += f"gain {self.status.gain:+.3g} "
            self._bar.set_description_str(self._summary)
            return
        text = f"update {update}/{self.status.num_updates}"
        if "reward/mean" in record:
            text += f"  reward {record['reward/mean']:.4g}"
        if evaluated:
            text += (
                f"  evaluation {record['eval/reward_mean']:.4g} (gain "
                f"{record['eval/paired_gain']:+.3g})"
            )
        self._print(text)

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Write how the run ended."""
        text = None
        if error is not None:
            text = (str(error) or type(error).__name__)[:MAX_ERROR]
        self.status = replace(
            self.status,
            state=state,
            phase="",
            done=0,
            total=0,
            seconds_left=0.0 if state == "finished" else None,
            error=text,
            repeats=isinstance(error, OWN_ERRORS),
        )
        self._write()

    def _write(self) -> None:
        # Who has deleted the directory does not want it back.
        if not (self.shown and self._begun and self.path.parent.exists()):
            return
        self._last_write = time.monotonic()
        self.status = replace(
            self.status, written=datetime.now(UTC).isoformat(timespec="seconds")
        )
        try:
            write_text(
                self.path,
                json.dumps(asdict(self.status), indent=1) + "\n",
                lasting=False,
            )
            self._failed = False
        except OSError as error:
            # Said once, until a write has succeeded again.
            if not self._failed:
                logger.warning("%s is not up to date: %s", self.path, error)
            self._failed = True

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self.status.seconds_left:
            text += f"  {format_seconds(self.status.seconds_left)} left"
        if self.shown:
            print(text, file=sys.stderr, flush=True)

    def _seconds_to_heartbeat(self) -> float:
        return self._last_line + HEARTBEAT_SECONDS - time.monotonic()

    def _print_heartbeats(self) -> None:
        while not self._closed.wait(max(0.1, self._seconds_to_heartbeat())):
            status = self.status
            # The run may have printed a line of its own while this thread slept.
            if status.phase and self._seconds_to_heartbeat() <= 0:
                update = min(status.update + 1, status.num_updates)
                self._print(
                    f"update {update}/{status.num_updates}  {status.phase} "
                    f"{status.done}/{status.total}"
                )


def format_seconds(seconds: float) -> str:
    """Example: `format_seconds(200)` is `3.3 min`, `format_seconds(9000)` is `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


# --------------------------------------------------------------------------------------
# seen from outside


Condition = Literal[
    "running", "hangs", "killed", "finished", "stopped", "failed", "unknown"
]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Condition of a run, seen from outside.

    Attributes:
        condition: `hangs` where its process lives but makes no progress, `killed` where
            the process is gone without a last word, `unknown` where it has no status.
        holder: the process, of `lease.txt`.
        quiet_seconds: since its last progress.
        acknowledged: `sage-fast status --acknowledge` was called since then.

    Example: `RunState(run=Path("runs/demo"), condition="running", status=Status(...),
    holder="process 4711 on node7", quiet_seconds=2.0)`
    """

    run: Path
    condition: Condition
    status: Status | None
    holder: str
    quiet_seconds: float | None
    acknowledged: bool = False

    @property
    def needs_attention(self) -> bool:
        """True where somebody should look: it does not go on by itself, or the model
        got worse.
        """
        if self.acknowledged:
            return False
        return self.condition in ("hangs", "killed", "failed") or self.worse is not None

    @property
    def worse(self) -> str | None:
        return None if self.status is None else self.status.worse


def look_at_run(directory: Path, now: float | None = None) -> RunState:
    """Read what a run says of itself, and hold it against its lease.

    Args:
        now: seconds since the epoch, by the clock of this machine where it is None.
    """
    now = time.time() if now is None else now
    holder, alive = look_at(directory)
    status, written = read_status(directory)
    condition: Condition
    if status is None or written is None:
        return RunState(
            run=directory,
            condition="running" if alive else "unknown",
            status=None,
            holder=holder,
            quiet_seconds=None,
        )
    quiet = max(0.0, now - written)
    # The lock of another machine is not seen on every mount; there a status that is
    # fresh tells of its run.
    elsewhere = holder != "" and f" on {platform.node()}," not in holder
    if status.state != "running":
        condition = status.state
    elif quiet <= patience(status) and (alive or elsewhere):
        condition = "running"
    else:
        condition = "hangs" if alive else "killed"
    seen = RunDirectory(directory).acknowledged
    return RunState(
        run=directory,
        condition=condition,
        status=status,
        holder=holder,
        quiet_seconds=quiet,
        acknowledged=seen.exists() and seen.stat().st_mtime >= written,
    )


def command_for(run: Path, status: Status | None, command: str, *options: str) -> str:
    """A command on a run as it can be pasted into a shell of any folder.

    Paths in its configuration may be relative to the folder in which it was started.

    Example: `command_for(run, status, "train", "--resume", "auto")`
    """
    words = ["sage-fast"]
    if not shutil.which("sage-fast"):
        words = [sys.executable, "-m", "sage_fast"]
    words += [command, str(run.absolute()), *options]
    if status is not None and status.gpus > 1 and command == "train":
        words += ["--gpus", str(status.gpus)]
    # the command itself says what is wrong with the configuration
    with suppress(OSError, ValueError):
        config = load_config(RunDirectory(run).config)
        if outside_code(config, rewards=command in ("train", "evaluate")):
            words.append("--trust-config")
    line = shlex.join(words)
    if status is None or not status.folder:
        return line
    return f"cd {shlex.quote(status.folder)} && {line}"


def patience(status: Status) -> float:
    """Seconds without progress from which on a run is said to hang."""
    least = QUIET_SECONDS if status.update else QUIET_FIRST_SECONDS
    return max(least, QUIET_FACTOR * status.longest_seconds)


def read_status(
    directory: str | os.PathLike[str],
) -> tuple[Status | None, float | None]:
    """The status of a run and when it was written, in seconds since the epoch; None
    where there is none.
    """
    path = RunDirectory(directory).status
    try:
        tree = loads(read_text(path))
        written = path.stat().st_mtime
        # The status of another version may have other fields; what else stands there is
        # not shown as if it were one.
        known = {key: tree[key] for key in Status.__dataclass_fields__ if key in tree}
        return TypeAdapter(Status).validate_python(known), written
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None, None
