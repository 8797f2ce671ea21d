"""The state of this process around code of others: what a reward changes of it, the run
does not see.

A reward is called in the process of the policy and may leave anything of it changed,
such as the working directory or the default dtype. `Guard` puts all of `WATCHED` back
after each call and says so once; what a reward has changed while it was set up, such as
`sys.path`, it finds again in each call. The global random generators are not watched:
they are there for rewards, see `seed_generators`. Processes that a reward starts are
ended with the run.
"""

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import thread as executors
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

logger = logging.getLogger(__name__)

Part = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""A part of the process's state: its name for messages; a function that reads it, as a
copy that compares by value; a function that writes it. Parts may share a name.
"""

PATIENCE = 2.0
"""Seconds that a process started by a reward has to end after SIGTERM, before it is
killed.
"""

BECOME_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): processes whose parent has ended become children
of this one.
"""

SIGNALS = ("HUP", "INT", "QUIT", "PIPE", "ALRM", "TERM", "USR1", "USR2", "CHLD", "TSTP")
HANDLERS = "the handlers of signals"

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn


def _attributes(what: str, owner: Any, *names: str) -> list[Part]:
    return [
        (what, partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names
    ]


def _write_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)
    time.tzset()  # TZ may be among them


def _handler(name: str) -> Part:
    number = signal.Signals[f"SIG{name}"]
    return HANDLERS, partial(signal.getsignal, number), partial(signal.signal, number)


def _precision() -> list[Part]:
    what = "torch's precision of float32"
    owners = [torch.backends, _cuda.matmul, _cudnn, _cudnn.conv, _cudnn.rnn]
    owners += [_mkldnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn]
    parts: list[Part] = [
        # The old settings first: they set the new ones too.
        (
            what,
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        *_attributes(what, _cudnn, "allow_tf32"),
    ]
    for owner in owners:
        parts += _attributes(what, owner, "fp32_precision")
    return parts


def _autocast(device: str) -> list[Part]:
    what = "torch's autocast"
    return [
        (
            what,
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        ),
        (
            what,
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        ),
    ]


def _attention(name: str) -> Part:
    read = getattr(_cuda, f"{name}_sdp_enabled")
    return "torch's kernels of attention", read, getattr(_cuda, f"enable_{name}_sdp")


WATCHED: list[Part] = [
    ("the working directory", os.getcwd, os.chdir),
    ("os.environ", os.environ.copy, _write_environment),
    *_attributes("sys.stdin, stdout or stderr", sys, "stdin", "stdout", "stderr"),
    *map(_handler, SIGNALS),
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    (
        "torch's default device",
        torch.get_default_device,
        # To set the CPU would leave a mode in force through which every later call of
        # torch passes.
        lambda device: torch.set_default_device(
            None if device.type == "cpu" else device
        ),
    ),
    (
        "torch's grad or inference mode",
        lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        lambda modes: torch.set_grad_enabled(modes[0]),  # `Guard` leaves the second
    ),
    (
        "torch's anomaly mode",
        torch.is_anomaly_enabled,
        lambda on: torch.autograd.set_detect_anomaly(on),
    ),
    (
        "torch's deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "torch's flushing of denormal numbers",
        # torch does not tell: where they are flushed, half of the smallest normal
        # number is 0.
        lambda: sys.float_info.min / 2 == 0,
        torch.set_flush_denormal,
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    *_precision(),
    (
        "functions of torch.nn.functional",  # some libraries replace them by theirs
        lambda: {
            name: value
            for name, value in vars(torch.nn.functional).items()
            if callable(value)
        },
        vars(torch.nn.functional).update,
    ),
    *_attributes(
        "torch.backends.cudnn", _cudnn, "enabled", "benchmark", "deterministic"
    ),
    *_attributes("torch.backends.mkldnn", _mkldnn, "enabled", "deterministic"),
    *map(_attention, ("flash", "mem_efficient", "math", "cudnn")),
    *_attributes(
        "torch.backends.cuda.matmul",
        _cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    (
        "the CUDA device",
        lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else 0,
        torch.cuda.set_device,
    ),
]
"""State of a process that matters to a run."""


def _read(part: Part) -> Any:
    # The working directory may be deleted; torch's old and new settings of precision
    # may contradict each other.
    with suppress(FileNotFoundError, RuntimeError):
        return part[1]()
    return None


def process_state() -> list[Any]:
    """The values of `WATCHED`; None for those that cannot be read."""
    return [_read(part) for part in WATCHED]


def _restore(values: Mapping[int, Any]) -> None:
    """Write parts of `WATCHED`, by their numbers, that are not as given."""

    def write(part: Part, value: Any) -> None:
        if value is not None and _read(part) != value:
            part[2](value)

    with ExitStack() as restoring:  # all of it, also where one fails
        # Called from the last one on.
        for number in sorted(values, reverse=True):
            restoring.callback(write, WATCHED[number], values[number])


class Guard:
    """The calls of one reward: within each, the process is the reward's, and after it
    as it was before.

    name: of the reward, for the warning at the first change of each kind.

    Example: `with guard("while it was set up"): reward = build()`
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: dict[int, Any] = {}
        self._told: set[str] = set()

    @contextmanager
    def __call__(self, when: str, *, keeps: bool = False) -> Iterator[None]:
        """Have a reward's code run within the context.

        Args:
            when: what it does, for the warning.
            keeps: whether later contexts begin with what it changes. Only set-up does,
                so that all calls are alike.
        """
        before = process_state()
        after = before
        children = _children()
        threads = set(threading.enumerate())
        try:
            # Leaving this restores autograd's modes, whatever was entered within.
            with (
                torch.inference_mode(torch.is_inference_mode_enabled()),
                torch.set_grad_enabled(torch.is_grad_enabled()),
                _adopting(),
            ):
                try:
                    _restore(self._own)
                    yield
                finally:
                    _started.update(_children() - children)
                    for thread in set(threading.enumerate()) - threads:
                        _threads[thread] = self.name
                    after = process_state()
                    _restore(dict(enumerate(before)))
        finally:
            # Told once all is restored: the logging and the streams are the run's
            # again.
            for number, (what, _, _) in enumerate(WATCHED):
                if after[number] == before[number]:
                    continue
                self.tell(what, when, _difference(before[number], after[number]))
                # In every call they would take from the run the signals that stop it.
                if keeps and what != HANDLERS:
                    self._own[number] = after[number]

    def tell(self, what: str, when: str, difference: str = "") -> None:
        """Warn of a change, once of each kind."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "Reward %r changed %s%s %s. It stays as it was for the run.",
                *(self.name, what, difference, when),
            )


def _difference(before: Any, after: Any) -> str:
    """Words on a change, where they are few."""
    if isinstance(before, dict):
        names = [k for k in before | after if before.get(k) != after.get(k)]
        return f" ({', '.join(sorted(names))})"
    text = f" ({before} -> {after})"
    return text if len(text) < 100 else ""


# --------------------------------------------------------------------------------------
# what outlives a call

_started: set[int] = set()
_threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


@contextmanager
def _adopting() -> Iterator[None]:
    """Within the context, processes whose parent ends become children of this process,
    instead of getting lost.
    """
    # Linux alone has it
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)
    prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(BECOME_SUBREAPER, 0, 0, 0, 0)


def _children() -> set[int]:
    """Ids of the child processes, without the one that cleans up for multiprocessing
    once this process has ended.
    """
    found = set[int]()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, file.read_text().split()))
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None)}


@atexit.register
def end_processes() -> None:
    """End the processes that rewards have started, and theirs: by SIGTERM, then by
    SIGKILL.
    """
    others = _children() - _started
    with _adopting():
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + PATIENCE
            asked = set[int]()
            # Looked up each time: as a parent ends, its children are adopted and turn
            # up here.
            while (left := _children() - others) and time.monotonic() < deadline:
                for pid in left:
                    with suppress(ProcessLookupError, ChildProcessError):
                        if pid not in asked:
                            os.kill(pid, number)
                        os.waitpid(pid, os.WNOHANG)
                asked |= left
                time.sleep(0.01)
    _started.clear()


def running_threads() -> dict[str, str]:
    """Threads of rewards that the end of this process would wait for: name -> reward.
    Executors end theirs.
    """
    waiting = (thread for thread in _threads if thread.is_alive() and not thread.daemon)
    return {
        thread.name: _threads[thread]
        for thread in waiting
        if thread not in executors._threads_queues
    }
