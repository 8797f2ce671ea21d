"""Stopping politely: a signal, or a file named STOP in the run's directory, ends the
run after the update in progress.

    SIGINT      Ctrl-C
    SIGTERM     preemption, and the end of a container
    SIGUSR1     sent by a scheduler some time before it ends the job (`sbatch --signal`)
    SIGHUP      a terminal that was closed, a connection that was lost; `nohup` makes the run go on instead
    STOP        anybody who can write into the run's directory, on any system and under any launcher

torchrun passes SIGINT, SIGTERM and SIGHUP on to its workers (SIGUSR1 only with
`--signals-to-handle`), and kills them 30 seconds later unless `--shutdown-timeout` says
otherwise; the file gives an update all the time that it takes.

A process that a reward forks has none of this: there the signals do what they did
before.
"""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from weakref import WeakSet

from sage_fast.rewards.server import StandardStream
from sage_fast.run.directory import RunDirectory

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
        run_directory: where a STOP file asks the same; None: nowhere. A file left over
            from earlier is removed on entry, one that came during the context on exit.
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
        self._remove_file()
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
        self._remove_file()

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

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)

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
