"""The directory of a run: where everything in it lies, who may write, and how it is
asked to stop.

One process writes: it holds a lock that the kernel frees when the process ends, however
it ends. A signal, or a file named STOP in the directory, ends the run after the update
in progress.

    SIGINT      Ctrl-C
    SIGTERM     preemption, and the end of a container
    SIGUSR1     sent by a scheduler some time before it ends the job (`sbatch --signal`)
    SIGHUP      a terminal that was closed, a connection that was lost; `nohup` makes the run go on instead
    STOP        anybody who can write into the run's directory, on any system and under any launcher

torchrun passes SIGINT, SIGTERM and SIGHUP on to its workers (SIGUSR1 only with
`--signals-to-handle`), and kills them 30 seconds later unless `--shutdown-timeout` says
otherwise; the file gives an update all the time that it takes. A process that a reward
forks has none of this: there the signals do what they did before.
"""

import fcntl
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any
from weakref import WeakSet

from sage_fast.checkpoint.folder import (
    BEST,
    CHECKPOINT_NAME,
    checkpoint_name,
    list_checkpoints,
    read_best,
    update_of,
)
from sage_fast.config.errors import CheckpointError, ConfigError, RunDirectoryError
from sage_fast.config.files import loads
from sage_fast.config.schema import settings_of
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.rewards.server import StandardStream

logger = logging.getLogger(__name__)

EXPORT_RECORD = "export.json"
"""File of an export, which has a config.yaml too."""


class RunDirectory(os.PathLike[str]):
    """Every path inside a run's directory is spelled here, and nowhere else.

    It is a path itself, also as a text. Nothing needs to exist.

    Example: `RunDirectory("runs/demo").metrics` is the path runs/demo/metrics.jsonl.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = root = Path(path)
        # What the run is made with.
        self.config = root / "config.yaml"
        self.environment = root / "environment.json"
        # What it measures and makes.
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.wandb_id = root / "wandb_run_id"
        self.checkpoints = root / "checkpoints"
        self._evaluation = root / "evaluation"
        self.result = self._evaluation / "result.json"
        self.samples = root / "samples"
        self.reward_plot = root / "reward.png"
        self.before_after = root / "before_after.png"
        # How it goes.
        self.page = root / "index.html"
        self.status = root / "status.json"
        self.lease = root / "lease.txt"
        self.stop = root / "STOP"
        self.acknowledged = root / "acknowledged"
        # Made of it later, unless another folder is given.
        self.scores = root / "scores"
        self.generated = root / "generated"
        self.exported = root / "exported"

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def environment_after(self, update: int) -> Path:
        """Versions of what went on after an update: those that the first part was made
        with stay on record.
        """
        if update:
            return self.path / f"environment-{checkpoint_name(update)}.json"
        return self.environment

    def evaluation(self, update: int) -> Path:
        """Scores per prompt after an update."""
        return self._evaluation / f"{checkpoint_name(update)}.json"

    def sample_folder(self, update: int) -> Path:
        """The mp4 files of an evaluation."""
        return self.samples / checkpoint_name(update)

    def sheet(self, update: int) -> Path:
        """The contact sheet of an evaluation."""
        return self.samples / f"{checkpoint_name(update)}.png"

    def traces(self) -> tuple[list[Path], int]:
        """Traces of a run that goes on: its checkpoints, and bytes of metrics."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        return list_checkpoints(self.checkpoints), size

    def left_by_a_run(self) -> list[Path]:
        """Files that a new run in this directory would take for its own, in the order
        in which it is moved away.

        Checkpoints go first: a run that is killed in between is then one whose
        checkpoints are gone, which starts nothing.
        """
        made = [
            self.checkpoints,
            self.metrics,
            self._evaluation,
            self.samples,
            self.tensorboard,
            self.wandb_id,
            self.config,
            *sorted(self.path.glob("environment*.json")),
            self.reward_plot,
            self.before_after,
            self.page,
            self.status,
            *sorted(self.path.glob("abandoned-*")),
        ]
        return [path for path in made if path.exists()]

    def made_after(self, update: int) -> list[Path]:
        """Files of later updates, and what is made of the last one, in the order in
        which they are renamed.

        The newest checkpoint goes first: a run that is killed in between goes on from
        an older one of the same part.
        """
        later = []
        numbered = [
            *reversed(list_checkpoints(self.checkpoints)),
            *self.path.glob("environment-*.json"),
            *self._evaluation.glob("*"),
            *self.samples.glob("*"),
        ]
        for path in numbered:
            name = CHECKPOINT_NAME.fullmatch(path.stem.removeprefix("environment-"))
            if name and int(name[1]) > update:
                later.append(path)
        if later:
            later += [self.result, self.before_after]
        # Without its pin an update that is made again is not taken for the best.
        if read_best(self.checkpoints, newest=update) is None:
            later.insert(0, self.checkpoints / BEST)
        return [path for path in later if path.exists()]

    # ----------------------------------------------------------------------------------
    # content

    @property
    def is_run(self) -> bool:
        """True where there is a configuration."""
        # False, not an error, for a word too long to be a path
        return os.path.isfile(self.config)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted key. ConfigError where there is none."""
        # its library may not be on a machine that measures
        from sage_fast.config.load import read_config_file

        if not self.is_run:
            raise ConfigError(
                f"{self} has no config.yaml, so it is not a run. Give directories of "
                "`sage-fast train`."
            )
        return settings_of(read_config_file(self.config))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics at the first look, one record per update, oldest first. ConfigError,
        RunDirectoryError.
        """
        if not self.metrics.is_file():
            raise ConfigError(
                f"{self} has no metrics.jsonl: the run has not begun yet."
            )
        merged: dict[int, dict[str, Any]] = {}
        for row in read_metrics(self.metrics):
            # Training and evaluation may each have a record of an update; where both
            # have a key, the later one counts.
            merged.setdefault(row["update"], {}).update(row)
        return [merged[update] for update in sorted(merged)]

    def curve(self, key: str) -> dict[int, float]:
        """A metric by update, where it was logged."""
        return {
            row["update"]: float(row[key])
            for row in self.rows
            if isinstance(row.get(key), int | float)
        }

    def evaluations(self) -> dict[int, Path]:
        """Files of scores per prompt, by update, oldest first."""
        return {
            update_of(file.with_suffix("")): file
            for file in sorted(self._evaluation.glob("update-*.json"))
        }


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, oldest first.

    A last line that was cut short (the run was killed while it wrote) is left out with
    a warning.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: a line before the last is not a record; the message starts
            with ``path:line``.
    """
    lines = Path(path).read_bytes().split(b"\n")
    # Without blank ends the last line is the last record, the only one that a kill can
    # have cut short.
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("update"), int):
                raise ValueError("it is not an object with a whole number 'update'")
        except ValueError as error:
            if number == len(lines):
                logger.warning(
                    "%s:%d: dropped the last line, which was cut short", path, number
                )
                break
            raise RunDirectoryError(
                f"{path}:{number}: not a metrics record ({error}); delete or mend "
                "that line."
            ) from error
        rows.append(row)
    return rows


def look_at(directory: str | os.PathLike[str]) -> tuple[str, bool]:
    """The process that writes a run directory, or wrote it last, and True where it
    lives.

    A file system without locks tells of none; then nobody is said to live.
    """
    try:
        with RunDirectory(directory).lease.open("rb") as file:
            # Shared, so that two that look do not take each other for the writer.
            return file.read().decode(errors="replace").strip(), not _try_lock(
                file, fcntl.LOCK_SH
            )
    except OSError:
        return "", False


class Lease:
    """The right to write a run directory, held within the context by rank 0 for all
    ranks. Collective.

    Raises:
        RunDirectoryError: another process holds it, which is looked for before the
            context too, or the directory is gone; on all ranks where that is found at
            the begin.
        ConfigError: the directory cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], world: World = SINGLE_PROCESS
    ) -> None:
        self.directory = RunDirectory(directory)
        # It stays after the run: removing it would let two others lock two files.
        self.path = self.directory.lease
        self._world = world
        self._file: IO[bytes] | None = None
        self._text = b""
        # Not taken yet, but what is found later is found sooner: before the model is
        # loaded.
        self._on_main(self._look_first)

    def __enter__(self) -> "Lease":
        self._on_main(self._take)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            if isinstance(error, OSError | CheckpointError):
                # A folder that is gone fails as a full disk does, whatever was being
                # written.
                self.check()
        finally:
            if self._file is not None:
                self._file.close()

    def is_own(self) -> bool:
        """True when the file in the directory is the one that this process has locked,
        and names it.

        On a mount whose locks are local to each client (NFS with nolock, Lustre with
        localflock) another process may have got the lock too; then the file names that
        one.
        """
        try:
            same = self._file is not None and os.path.samestat(
                os.fstat(self._file.fileno()), self.path.stat()
            )
            return same and self.path.read_bytes() == self._text
        except FileNotFoundError:
            return False
        # it may pass; what has to be written says whether it does
        except OSError as error:
            logger.warning("%s cannot be read for now: %s", self.path, error)
            return True

    def check(self) -> None:
        """Raise on rank 0 when the directory was deleted or moved, or another process
        writes there too.
        """
        if self._world.is_main and not self.is_own():
            holder = look_at(self.directory)[0]
            found = f"names {holder}" if holder else "is gone"
            raise RunDirectoryError(
                f"output_dir {str(self.directory)!r} was deleted or moved while the "
                "run was writing to it, or another "
                f"run writes there ({self.path} {found}), so this run has stopped. "
                "Put the directory back or end the "
                "other run, and continue by --resume auto, or start a new run."
            )

    def _on_main(self, step: Callable[[], None]) -> None:
        """Do a step on rank 0, and raise on all ranks what is in the way."""
        failure: Exception | None = None
        if self._world.is_main:
            try:
                step()
            except OSError as error:
                failure = unwritable(self.directory, error)
            except RunDirectoryError as error:
                failure = error
        # Every rank waits in this broadcast, so rank 0 must not raise before it.
        failure = self._world.broadcast(failure)
        if failure is not None:
            raise failure

    def _look_first(self) -> None:
        self._look()
        # Nobody writes here: it was for a run that is gone. One that comes from now on,
        # while the model is loaded, is for this run.
        self.directory.stop.unlink(missing_ok=True)

    def _look(self) -> None:
        holder, alive = look_at(self.directory)
        if alive:
            raise RunDirectoryError(
                f"output_dir {str(self.directory)!r} is being written by another run: "
                f"{holder}. Wait for it, stop it "
                f"(kill it, or touch {self.directory.stop}), or choose another "
                "output_dir."
            )

    def _take(self) -> None:
        self.directory.path.mkdir(parents=True, exist_ok=True)
        # Opened without emptying it: as long as another run holds the lock, the file
        # names that one.
        file = self.path.open("a+b")
        try:
            # `check` finds out where it was deleted meanwhile.
            while self.path.exists() and not _try_lock(file, fcntl.LOCK_EX):
                self._look()
                time.sleep(0.1)  # somebody who looks holds it for a moment
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): a second run that writes there would not "
                "be refused. Start one at a time, "
                "or choose an output_dir on a file system with locks.",
                *(self.path, error.strerror),
            )
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        self._text = (
            f"process {os.getpid()} on {platform.node()}, since {since}\n".encode()
        )
        file.write(self._text)
        file.flush()
        self._file = file
        # A lock belongs to all processes that have the file open: a fork that lives on
        # would keep it.
        os.register_at_fork(after_in_child=file.close)


def _try_lock(file: IO[bytes], kind: int) -> bool:
    """Lock a file if nobody else has; returns the success. OSError where the file
    system has no locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unwritable(directory: RunDirectory, error: OSError) -> ConfigError:
    """The error of a run directory that cannot be written."""
    return ConfigError(
        f"output_dir {str(directory)!r} cannot be written: {error}. Choose a folder "
        "on a disk with free space and "
        "write permission."
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_KEY_PRESS = 1.0
"""Seconds within which two SIGINTs are one: the terminal and the launcher may both pass
on a single Ctrl-C.
"""


class GracefulStop:
    """Context manager that turns the signals above into a request.

    A second SIGINT interrupts at once, and so does any signal while a reward hangs, see
    `watch`.

    Args:
        run_directory: where a STOP file asks the same; None: nowhere. It is removed on
            exit; one of an earlier run by `Lease`.
        announce: say so on stderr; of many ranks one should.
    """

    def __init__(
        self, run_directory: str | os.PathLike[str] | None = None, announce: bool = True
    ) -> None:
        self._signalled: float | None = None
        self._announce = announce
        self._announced_file = False
        self._file = None if run_directory is None else RunDirectory(run_directory).stop
        self._previous: dict[int, object] = {}
        self._hangs: str | None = None

    @property
    def requested(self) -> bool:
        """True once the run was asked to stop."""
        if self._signalled is not None:
            return True
        asked = self._file is not None and self._file.exists()
        if asked and not self._announced_file:
            self._announced_file = True
            self._say(f"{self._file}: saving after this update.")
        return asked

    def __enter__(self) -> "GracefulStop":
        _active.add(self)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup
            try:
                self._previous[number] = signal.signal(number, self._handle)
            # not in the main thread: the host program keeps its own handlers
            except ValueError:
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore_handlers()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def restore_handlers(self) -> None:
        """Let the signals do what they did before the context."""
        _active.discard(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def watch(self, hangs: str | None) -> None:
        """Take note of a reward that hangs, in words; None: it has ended. An update
        that it holds up is not waited for.

        To be called from any thread.
        """
        self._hangs = hangs
        if hangs is not None and self._signalled is not None and self._previous:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._hangs is not None:
            self._say(
                f"{signal.Signals(number).name}: {self._hangs} Ending without this "
                "update; checkpoints stay."
            )
            raise KeyboardInterrupt
        now = time.monotonic()
        if self._signalled is not None:
            if number == signal.SIGINT and now - self._signalled > SAME_KEY_PRESS:
                raise KeyboardInterrupt
            return
        self._signalled = now
        hint = " Press Ctrl-C again to stop at once." if number == signal.SIGINT else ""
        self._say(
            f"{signal.Signals(number).name}: finishing this update, then saving.{hint}"
        )

    def _say(self, text: str) -> None:
        if self._announce:
            # Not print: the signal may have come in the middle of one.
            StandardStream(2).write(f"\n{text}\n".encode())


_active: WeakSet[GracefulStop] = WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    # A signal that reaches the child before its handlers are restored would be lost: it
    # waits until they are.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _active else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for stop in list(_active):
        stop.restore_handlers()
    _after_fork()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork,
    after_in_child=_after_fork_in_child,
)
