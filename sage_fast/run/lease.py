"""One writer per run directory: a small file says who writes there, and its age says whether that process lives.

Creating a file exclusively and reading its age work on every file system, NFS included, where locks may not. The holder
touches the file every few seconds. A lease is stale, and is taken over, when

    its process is gone           on the same machine, as after a `kill -9`: at once
    it was not touched for long   on another machine, as after a node was lost: when `STALE_SECONDS` have passed

Ages are differences of times that the file system gave, so clocks of machines need not agree.
"""

import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from sage_fast.config.errors import CheckpointError, ConfigError, RunDirectoryError
from sage_fast.config.files import write_text
from sage_fast.distributed.world import ALONE, World

FILE_NAME = "lease.json"
TOUCH_SECONDS = 10.0
STALE_SECONDS = 120.0
"""A holder on another machine that has not touched its lease for so long is taken for dead."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that writes a run directory.

    machine: tells apart machines and containers that have the same host name. started: when the process was started, in
    the system's own count, which tells it from a later one with the same number. attempt: a random word.

    Example: `Holder(host="node7", machine="5d2f... pid:[402653]", pid=4711, started="88123", attempt="9f3a...",
    since="2026-01-31T12:00:00+00:00")`
    """

    host: str
    machine: str
    pid: int
    started: str
    attempt: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool:
        """Whether this machine knows that the process has ended."""
        return self.machine == _machine() and self.started != _started(self.pid)


@dataclass(frozen=True, kw_only=True)
class SignOfLife:
    """The lease of a run as it is found. holder: None where the file was cut short. touched: seconds since the epoch.

    Example: `SignOfLife(holder=Holder(...), touched=1769860800.0)`
    """

    holder: Holder | None
    touched: float

    def is_gone(self, now: float) -> bool:
        """Whether the holder has ended, or is on another machine and has not touched the lease for too long."""
        if self.holder is not None and self.holder.machine == _machine():
            return self.holder.is_gone()
        return now - self.touched > STALE_SECONDS


def look_at(directory: Path) -> SignOfLife | None:
    """Who holds the lease of a run directory; None when nobody does, or nobody can tell."""
    try:
        holder, touched = _look(directory / FILE_NAME)
    except OSError:
        return None
    return SignOfLife(holder=holder, touched=touched / 1e9)


class Lease:
    """The right to write a run directory, held within the context by rank 0 for all ranks. Collective.

    Raises:
        RunDirectoryError: another process holds it, or has taken it over, or the directory is gone; on all ranks where
            that is found at the begin.
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path, world: World = ALONE) -> None:
        self.directory = directory
        self.path = directory / FILE_NAME
        self._world = world
        self._own = Holder(
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            attempt=secrets.token_hex(8),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_touching, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        self._on_main(self._take)
        if self._world.is_main:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._world.is_main:
            return
        self._released.set()
        self._thread.join()
        if isinstance(error, OSError | CheckpointError):
            # A folder that is gone fails as a full disk does, whatever was being written.
            self.check()
        if self.is_own():
            self.path.unlink(missing_ok=True)

    def refuse_others(self) -> None:
        """Raise if another process holds the lease, without taking it: what is found later is found sooner."""
        self._on_main(self._wait_for_others)

    def is_own(self) -> bool:
        """Whether this process still holds the lease."""
        return _read(self.path) == self._own

    def check(self) -> None:
        """Raise on rank 0 unless the lease is still its own."""
        if not self._world.is_main:
            return
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"output_dir {str(self.directory)!r} was deleted or moved while the run was writing to it ({self.path} "
                "is gone), so the run has stopped. Put the directory back and go on by --resume auto, or start a new "
                "run."
            ) from error
        except OSError as error:  # it may pass; what has to be written says whether it does
            logger.warning("%s cannot be read for now: %s", self.path, error)
            return
        holder = _parse(text)
        if holder == self._own:
            return
        raise RunDirectoryError(
            f"output_dir {str(self.directory)!r} was taken over by another run ({holder or 'unknown'}), because this "
            f"process had shown no sign of life for {STALE_SECONDS:.0f} s. This run has stopped; the other goes on."
        )

    def _on_main(self, step: Callable[[], None]) -> None:
        """Do a step on rank 0, and raise what it raises on all ranks."""
        failure: Exception | None = None
        if self._world.is_main:
            try:
                step()
            except (RunDirectoryError, ConfigError) as error:
                failure = error
        failure = self._world.broadcast(failure)
        if failure is not None:
            raise failure

    def _take(self) -> None:
        self._wait_for_others()
        text = json.dumps(asdict(self._own)) + "\n"
        stale = _read(self.path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if _read(self.path) == stale:  # nobody else has taken it over in the meantime
                    write_text(self.path, text)
            else:
                self._create(text)
        except FileExistsError:
            pass  # somebody was faster: told below
        except OSError as error:
            raise unwritable(self.directory, error) from error
        if (holder := _read(self.path)) != self._own:
            raise self._held(holder)

    def _create(self, text: str) -> None:
        """Make the file, whole from the first moment: who is killed here leaves none that names nobody.

        Raises:
            FileExistsError: there is one.
        """
        draft = self.path.with_name(f".{FILE_NAME}.{self._own.attempt}.draft")
        try:
            draft.write_text(text, encoding="utf-8")
            os.link(draft, self.path)
        finally:
            draft.unlink(missing_ok=True)

    def _wait_for_others(self) -> None:
        """Return when nobody holds the lease; raise once the holder shows a sign of life."""
        try:
            holder, first = _look(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise unwritable(self.directory, error) from error
        if holder is not None and holder.is_gone():
            logger.info("The process that wrote %s last is gone (%s).", self.directory, holder)
            return
        if holder is not None and holder.machine == _machine():
            raise self._held(holder)
        left = STALE_SECONDS - self._age(first)
        if left > 0:
            logger.warning("%s: %s may still be writing; looking for %.0f s.", self.path, holder or "a process", left)
        deadline = time.monotonic() + left
        while time.monotonic() < deadline:
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
            try:
                holder, touched = _look(self.path)
            except FileNotFoundError:
                return
            except OSError as error:  # it may pass; the holder's next touch shows as well
                logger.debug("%s cannot be read for now: %s", self.path, error)
                continue
            if touched != first:
                raise self._held(holder)

    def _held(self, holder: Holder | None) -> RunDirectoryError:
        who = str(holder) if holder is not None else "a process that cannot be told from its file"
        stop = f"kill {holder.pid} on {holder.host}" if holder is not None else f"see {self.path}"
        return RunDirectoryError(
            f"output_dir {str(self.directory)!r} is being written by another run: {who}. Wait for it, stop it "
            f"({stop}, or touch {self.directory / 'STOP'}), or choose another output_dir."
        )

    def _age(self, touched: int) -> float:
        """Seconds since then by the clock that stamps the files of this directory."""
        probe = self.directory / f".{FILE_NAME}.{self._own.attempt}"
        try:
            probe.write_text("")
            return (probe.stat().st_mtime_ns - touched) / 1e9
        except OSError as error:
            raise unwritable(self.directory, error) from error
        finally:
            probe.unlink(missing_ok=True)

    def _keep_touching(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            try:
                if self.is_own():
                    os.utime(self.path)
            except OSError as error:
                # The file system may come back; if not, the run's own writing says what is wrong.
                logger.debug("%s could not be touched: %s", self.path, error)


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The error of a run directory that cannot be written."""
    return ConfigError(
        f"output_dir {str(directory)!r} cannot be written: {error}. Choose a folder on a disk with free space and "
        "write permission."
    )


def _read(path: Path) -> Holder | None:
    """Who holds a lease; None where the file is not there or was cut short."""
    try:
        return _parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _parse(text: str) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _look(path: Path) -> tuple[Holder | None, int]:
    """Who holds a lease, and when it was last touched, in ns. Opening makes a network file system ask its server."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return _parse(file.read()), os.fstat(file.fileno()).st_mtime_ns


def _machine() -> str:
    """This machine, since it was started, and its space of process numbers: two containers do not share theirs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _started(pid: int) -> str:
    """When a process was started, as the system counts; empty when there is none, or it waits to be buried."""
    try:
        # The second field is the program's name, which may hold anything but ends at the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return _alive_elsewhere(pid) if not Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _alive_elsewhere(pid: int) -> str:
    """As `_started` on systems without /proc: a process number alone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
