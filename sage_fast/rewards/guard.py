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
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

logger = logging.getLogger(__name__)

Watched = tuple[Callable[[], Any], Callable[[Any], object]]
"""Reads a part of the process's state, as a copy that compares by value; writes it."""

PATIENCE = 2.0
"""Seconds that a process started by a reward has to end after SIGTERM, before it is
killed.
"""

GRAD = "torch's grad or inference mode"

BECOME_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): processes whose parent has ended become children
of this one.
"""


def _each(*parts: Watched) -> Watched:
    """Several as one. What already is as it should be is not written."""

    def write(values: list[Any]) -> None:
        for (read, set_value), value in zip(parts, values, strict=True):
            if read() != value:
                set_value(value)

    return lambda: [read() for read, _ in parts], write


def _attributes(owner: Any, *names: str) -> Watched:
    return _each(
        *(
            (partial(getattr, owner, name), partial(setattr, owner, name))
            for name in names
        )
    )


def _write_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in values.items() if os.environ.get(name) != value}
    )
    time.tzset()  # TZ may be among them


def _unless_unknown(
    get: Callable[[], Any], set_value: Callable[[Any], object]
) -> Watched:
    """State that the process cannot always tell: it is then left as it is.

    The working directory may be deleted; torch's old and new settings of precision may
    contradict each other.
    """

    def read() -> Any:
        with suppress(FileNotFoundError, RuntimeError):
            return get()
        return None

    return read, lambda value: None if value is None else set_value(value)


NAMES = ("HUP", "INT", "QUIT", "PIPE", "ALRM", "TERM", "USR1", "USR2", "CHLD", "TSTP")
SIGNALS = [getattr(signal, f"SIG{name}") for name in NAMES]

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_MKLDNN = (_mkldnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn)

WATCHED: dict[str, Watched] = {
    "the working directory": _unless_unknown(os.getcwd, os.chdir),
    "os.environ": (os.environ.copy, _write_environment),
    "sys.stdin, stdout or stderr": _attributes(sys, "stdin", "stdout", "stderr"),
    "the handlers of signals": _each(
        *((partial(signal.getsignal, n), partial(signal.signal, n)) for n in SIGNALS)
    ),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        torch.get_default_device,
        # To set the CPU would leave a mode in force through which every later call of
        # torch passes.
        lambda device: torch.set_default_device(
            None if device.type == "cpu" else device
        ),
    ),
    GRAD: (  # the second is left with the guard
        lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        lambda modes: torch.set_grad_enabled(modes[0]),
    ),
    "torch's anomaly mode": (
        torch.is_anomaly_enabled,
        lambda on: torch.autograd.set_detect_anomaly(on),
    ),
    "torch's deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    # torch does not tell: where they are flushed, half of the smallest normal number is
    # 0.
    "torch's flushing of denormal numbers": (
        lambda: sys.float_info.min / 2 == 0,
        torch.set_flush_denormal,
    ),
    "torch's autocast": _each(
        *(
            (
                partial(torch.is_autocast_enabled, d),
                partial(torch.set_autocast_enabled, d),
            )
            for d in ("cpu", "cuda")
        ),
        *(
            (partial(torch.get_autocast_dtype, d), partial(torch.set_autocast_dtype, d))
            for d in ("cpu", "cuda")
        ),
    ),
    "torch's precision of float32": _each(
        # The old settings first: they set the new ones too.
        _unless_unknown(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        _unless_unknown(
            lambda: _cudnn.allow_tf32, partial(setattr, _cudnn, "allow_tf32")
        ),
        *(
            _unless_unknown(
                partial(getattr, owner, "fp32_precision"),
                partial(setattr, owner, "fp32_precision"),
            )
            for owner in (
                torch.backends,
                _cuda.matmul,
                _cudnn,
                _cudnn.conv,
                _cudnn.rnn,
                *_MKLDNN,
            )
        ),
    ),
    "functions of torch.nn.functional": (  # some libraries replace them by theirs
        lambda: {
            name: value
            for name, value in vars(torch.nn.functional).items()
            if callable(value)
        },
        vars(torch.nn.functional).update,
    ),
    "torch.backends.cudnn": _attributes(
        _cudnn, "enabled", "benchmark", "deterministic"
    ),
    "torch.backends.mkldnn": _attributes(_mkldnn, "enabled", "deterministic"),
    "torch's kernels of attention": _each(
        *(
            (
                getattr(_cuda, f"{name}_sdp_enabled"),
                getattr(_cuda, f"enable_{name}_sdp"),
            )
            for name in ("flash", "mem_efficient", "math", "cudnn")
        )
    ),
    "torch.backends.cuda.matmul": _attributes(
        _cuda.matmul,
        *(
            f"allow_{name}"
            for name in (
                "fp16_reduced_precision_reduction",
                "bf16_reduced_precision_reduction",
            )
        ),
        "allow_fp16_accumulation",
    ),
    "the CUDA device": (
        lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else 0,
        torch.cuda.set_device,
    ),
}
"""State of a process that matters to a run."""


class Guard:
    """The calls of one reward: within each, the process is the reward's, and after it
    as it was before.

    name: of the reward, for the warning at the first change of each kind.

    Example: `with guard("while it was set up"): reward = build()`
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: dict[str, Any] = {}
        self._told: set[str] = set()

    @contextmanager
    def __call__(self, when: str, *, keeps: bool = False) -> Iterator[None]:
        """Have a reward's code run within the context.

        Args:
            when: what it does, for the warning.
            keeps: whether later contexts begin with what it changes. Only set-up does,
                so that all calls are alike.
        """
        before = {what: read() for what, (read, _) in WATCHED.items()}
        children = _children()
        threads = set(threading.enumerate())
        changed: dict[str, str] = {}
        try:
            # Leaving this restores autograd's modes, whatever was entered within.
            with (
                torch.inference_mode(before[GRAD][1]),
                torch.set_grad_enabled(before[GRAD][0]),
                _adopting(),
            ):
                try:
                    for what, value in self._own.items():
                        WATCHED[what][1](value)
                    yield
                finally:
                    _started.update(_children() - children)
                    _threads.update(
                        dict.fromkeys(set(threading.enumerate()) - threads, self.name)
                    )
                    with ExitStack() as restoring:  # all of it, also where one fails
                        for what, (read, write) in WATCHED.items():
                            if (after := read()) != before[what]:
                                restoring.callback(write, before[what])
                                changed[what] = _difference(before[what], after)
                                # In every call they would take from the run the signals
                                # that stop it.
                                if keeps and not what.endswith("signals"):
                                    self._own[what] = after
        finally:
            # Told once all is restored: the logging and the streams are the run's
            # again.
            for what, difference in changed.items():
                self.tell(what, when, difference)

    def tell(self, what: str, when: str, difference: str = "") -> None:
        """Warn of a change, once of each kind."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "Reward %r changed %s%s %s. It stays as it was for the run.",
                self.name,
                what,
                difference,
                when,
            )


def _difference(before: Any, after: Any) -> str:
    """Words on a change, where they are few."""
    if isinstance(before, dict):
        return (
            " "
            f"({', '.join(sorted(k for k in before | after if before.get(k) != after.get(k)))})"
        )
    text = f" ({before} -> {after})"
    return text if len(text) < 100 else ""


# ------------------------------------------------------------------------------------------
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
    try:
        # Raises where there is no child at all. WNOWAIT leaves exit statuses to those
        # who started the children.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
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
            begin = time.monotonic()
            asked = set[int]()
            # Looked up each time: as a parent ends, its children are adopted and turn
            # up here.
            while (
                left := _children() - others
            ) and time.monotonic() < begin + PATIENCE:
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
