"""The status of a run in `status.json`, and the condition of a run as it and the lease show it from outside.

The run (`progress.py`) writes the file when a phase begins and every few seconds within one; it appears whole. Somebody
else can then tell apart a run that goes on, one that makes no progress any more although its process lives, and one
whose process is gone without a last word, as after a `kill -9`.
"""

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from sage_fast.run.lease import Holder, look_at

FILE_NAME = "status.json"

QUIET_SECONDS = 60.0
"""A run may go at least so long without progress."""
QUIET_FACTOR = 4.0
"""And this many times as long as it has gone without before."""
QUIET_FIRST_SECONDS = 1800.0
"""And so long before its first update, whose pace nobody knows."""

State = Literal["running", "finished", "stopped", "failed"]

logger = logging.getLogger(__name__)


def utc_now() -> str:
    """The time as a status has it."""
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
    started: str = field(default_factory=utc_now)
    written: str = field(default_factory=utc_now)


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
