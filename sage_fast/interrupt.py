"""Stopping politely: SIGINT and SIGTERM end the run after the update in progress."""

import os
import signal
from types import FrameType, TracebackType


class GracefulStop:
    """Context manager that turns the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "GracefulStop":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the host program keeps its own handlers
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the middle of one.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: finishing this update, then saving. Press Ctrl-C again to stop at once.\n".encode())
