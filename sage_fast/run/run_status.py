"""The status of a run in `status.json`, and the condition of a run as it and the lease show it from outside.

The run writes the file when a phase begins and every few seconds within one; it appears whole. Somebody else can then
tell apart a run that goes on, one that makes no progress any more although its process lives, and one whose process is
gone without a last word, as after a `kill -9`.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sage_fast.config.files import write_text
from sage_fast.run.lease import Holder, look_at

FILE_NAME = "status.json"
SECONDS_BETWEEN_WRITES = 5.0

QUIET_SECONDS = 60.0
"""A run may go at least so long without progress."""
QUIET_FACTOR = 4.0
"""And this many times as long as it has gone without before."""
QUIET_FIRST_SECONDS = 1800.0
"""And so long before its first update, whose pace nobody knows."""

MAX_ERROR = 500
"""Characters of an error that are kept."""

State = Literal["running", "finished", "stopped", "failed"]

logger = logging.getLogger(__name__)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of a run.

    state: stopped means on request. update, num_updates: done, and of how many. phase, videos_done, videos: what it
    does, for how many videos that is done, and all of them. reward: of the last evaluation, or of the
    last rollout where there is none. gain: paired, over update 0. seconds_left: by the measured pace. longest_seconds:
    that it has gone without progress. videos_per_rollout: on all ranks. error: that ended it. started, written: UTC.

    Example: `Status(state="running", update=4, num_updates=60, phase="rollout", videos_done=32, videos=128,
    reward=0.41, gain=0.05, seconds_left=1800.0, longest_seconds=2.5, videos_per_rollout=128, error=None,
    started="2026-01-31T12:00:00+00:00", written="2026-01-31T12:03:00+00:00")`
    """

    state: State = "running"
    update: int = 0
    num_updates: int
    phase: str = "start"
    videos_done: int = 0
    videos: int = 0
    reward: float | None = None
    gain: float | None = None
    seconds_left: float | None = None
    longest_seconds: float = 0.0
    videos_per_rollout: int = 0
    error: str | None = None
    started: str = field(default_factory=_now)
    written: str = field(default_factory=_now)


class StatusFile:
    """Writes the status of a run. A file that cannot be written is a warning: a run does not end for it.

    Args:
        directory: of the run.
        first: what is known before it begins.
        shown: whether this rank writes.
    """

    def __init__(self, directory: Path, first: Status, *, shown: bool = True) -> None:
        self.path = directory / FILE_NAME
        self.shown = shown
        self.status = first
        self._last_step = time.monotonic()
        self._last_write = -SECONDS_BETWEEN_WRITES
        self._begun = False
        self._failed = False

    def begin(self, update: int) -> None:
        """The run goes on from this update, and owns the directory."""
        self._begun = True
        self._last_step = time.monotonic()
        self.status = replace(self.status, update=update, started=_now())
        self._write()

    def step(self, phase: str, videos_done: int, videos: int, seconds_left: float | None) -> None:
        """The run has made progress: so much of a phase is done."""
        now = time.monotonic()
        begins = phase != self.status.phase
        longest = max(self.status.longest_seconds, now - self._last_step)
        self._last_step = now
        self.status = replace(
            self.status,
            phase=phase,
            videos_done=videos_done,
            videos=videos,
            seconds_left=seconds_left,
            longest_seconds=longest,
        )
        # The phases of a quick run are over before anybody could read them.
        wait = SECONDS_BETWEEN_WRITES
        if begins:
            wait = 0.0 if longest > SECONDS_BETWEEN_WRITES else 1.0
        if now - self._last_write >= wait:
            self._write()

    def finished(self, record: Mapping[str, Any]) -> None:
        """An update is done, with these metrics."""
        scores = _scores(record, evaluated=self.status.gain is not None)
        self.status = replace(self.status, update=record["update"], **scores)

    def end(self, state: State, error: BaseException | None = None) -> None:
        """The last word of the run."""
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
        self.status = replace(self.status, written=_now())
        try:
            write_text(self.path, json.dumps(asdict(self.status), indent=1) + "\n", lasting=False)
        except OSError as error:
            if not self._failed:
                logger.warning("%s is not up to date: %s", self.path, error)
            self._failed = True
        else:
            self._failed = False


def _scores(record: Mapping[str, Any], *, evaluated: bool) -> dict[str, Any]:
    """The reward and the gain that a record of the metrics tells; that of a rollout where nothing was evaluated."""
    names = {"reward": "eval/reward_mean", "gain": "eval/paired_gain"}
    if not evaluated and "eval/reward_mean" not in record:
        names = {"reward": "reward/mean"}
    return {name: record[key] for name, key in names.items() if key in record}


# ------------------------------------------------------------------------------------------------ from outside

Condition = Literal["running", "hangs", "killed", "finished", "stopped", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Condition of a run, seen from outside.

    condition: `hangs` where its process lives but makes no progress, `killed` where the process is gone without a last
    word, `unknown` where it has no status. quiet_seconds: since its last progress.

    Example: `RunState(run=Path("runs/demo"), condition="running", status=Status(...), holder=Holder(...),
    quiet_seconds=2.0)`
    """

    run: Path
    condition: Condition
    status: Status | None
    holder: Holder | None
    quiet_seconds: float | None

    @property
    def needs_attention(self) -> bool:
        return self.condition in ("hangs", "killed", "failed")


def is_run(directory: Path) -> bool:
    """A directory with a `config.yaml` is that of a run."""
    return (directory / "config.yaml").is_file()


def look_at_run(directory: Path, now: float | None = None) -> RunState:
    """Read what a run says of itself, and hold it against its lease.

    Args:
        now: seconds since the epoch, by the clock of this machine where it is None.
    """
    now = time.time() if now is None else now
    holder, alive = look_at(directory)
    status, written = read_status(directory)
    quiet = None if written is None else max(0.0, now - written)
    condition: Condition = "unknown"
    if written is None:
        condition = "running" if alive else "unknown"
    elif status is not None and status.state != "running":
        condition = status.state
    elif not alive:
        condition = "killed"
    elif status is not None and quiet is not None:
        condition = "hangs" if quiet > patience(status) else "running"
    return RunState(run=directory, condition=condition, status=status, holder=holder, quiet_seconds=quiet)


def patience(status: Status) -> float:
    """Seconds without progress from which on a run is said to hang."""
    least = QUIET_SECONDS if status.update else QUIET_FIRST_SECONDS
    return max(least, QUIET_FACTOR * status.longest_seconds)


def read_status(directory: Path) -> tuple[Status | None, float | None]:
    """The status of a run and when it was written, in seconds since the epoch; None where there is none."""
    path = directory / FILE_NAME
    try:
        with path.open(encoding="utf-8") as file:
            tree, written = json.load(file), path.stat().st_mtime
        known = {key: tree[key] for key in Status.__dataclass_fields__ if key in tree}
        return Status(**known), written
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be used: %s", path, error)
        return None, None
