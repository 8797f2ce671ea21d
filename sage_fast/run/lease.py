"""One writer per run directory: a lock that the kernel frees when its process ends,
however it ends.
"""

import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import IO

from sage_fast.config.errors import CheckpointError, ConfigError, RunDirectoryError
from sage_fast.distributed.world import SINGLE_PROCESS, World
from sage_fast.run.directory import RunDirectory

logger = logging.getLogger(__name__)


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
        self._on_main(self._look)

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
