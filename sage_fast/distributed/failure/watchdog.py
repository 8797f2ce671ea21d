"""Who holds the others up: every rank tells all others what it is doing, and one that dies or stops ends the run.

A thread of each rank writes a line about its main thread into the store of the launcher about once a second, and reads
everybody's. It is read again when a collective fails, because the error of a collective names an address, not the rank,
the phase and the prompt that the user has to know.

    dead        its process is gone (asked on its own node), or it has written nothing for `SECONDS_UNHEARD`
    failed      it has said with which error it ends
    late        it has made no progress for the timeout, and is not itself waiting in a collective

The first rank that finds one of these tells the others, and all end with the same message. `rank_table.py` judges.
"""

import faulthandler
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

import torch
from torch import distributed as dist

from sage_fast.config.errors import RankFailure
from sage_fast.distributed.failure.rank_table import FINISHED, FOLLOWED, RUNNING, Line, RankTable, process_exists
from sage_fast.distributed.launch import connect_store, end_process, report_error
from sage_fast.distributed.world import World, set_group_timeouts

INTERVAL = 1.0
"""Seconds between two lines of a rank."""
RANKS_PER_SECOND = 64
"""Lines that a rank reads in a second: more ranks are read less often, so that one store serves them all."""
SECONDS_UNHEARD = 60.0
"""A rank of another node that has written nothing for so long is dead. (A long call that holds Python's global lock
also holds the thread up; on its own node a rank is asked whether it exists.)"""
SECONDS_TO_EXPLAIN = 4.0
"""How long a failed collective waits for the table to show which rank has caused it."""
SECONDS_TO_LEAVE_TOGETHER = 3.0
"""How long the rank that ends the run leaves the others to write down where they are."""
SLACK = 30.0
"""What the process groups wait longer than the watchdog, which knows more to say than they do."""
EXIT_STATUS = 1
ADVICE = "Stopping all processes; --resume auto goes on from the last checkpoint."


class Store(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True)
class _Verdict:
    """Why the run must end, and the ranks whose stacks tell more."""

    text: str
    hung: list[int] = field(default_factory=list)


class Watchdog:
    """Watches over the ranks of a run; a context manager around everything that the run does.

    Args:
        rank, size: this process among all.
        store: a connection of its own, which no other thread uses.
        timeout: seconds without progress after which a rank is late.
        nonce: distinguishes this attempt from an earlier one in the same store; the same on every rank.
        directory: where Python stacks and the flight recorder go when the run is ended; created then. None: stderr.
        interval: seconds between two looks.

    Within the context an error of a collective is raised as `RankFailure`, which names the rank that caused it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None,
        *,
        timeout: float,
        nonce: str = "",
        directory: Path | None = None,
        interval: float = INTERVAL,
        unheard: float = SECONDS_UNHEARD,
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout = timeout
        self.directory = directory
        self._store = store
        self._interval = interval
        self._main = threading.get_ident()
        self._beats = itertools.count(1)
        self._host, self._pid = _host(), os.getpid()
        self._counter, self._phase, self._done, self._total = 0, "start", 0, 0
        self._subject, self._state = "", RUNNING
        self._table = RankTable(rank, self._host, patience=1.5 * interval, unheard=unheard)
        self._all_have_written = False
        self._prefix = f"sage_fast/watchdog/{nonce}"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._lost: float | None = None
        """When the store stopped to answer."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ------------------------------------------------------------------------------------------ told by the trainer

    def progress(self, phase: str, done: int = 0, total: int = 1) -> None:
        """Say what begins now; the time without progress starts anew. Cheap: nothing is sent here."""
        self._phase, self._done, self._total = phase, done, total
        self._counter += 1

    def working_on(self, subject: str) -> None:
        """Say on what, as it is to stand in a message: "prompt 12: 'a red fox'"."""
        self._subject = subject

    # ------------------------------------------------------------------------------------------ context

    def __enter__(self) -> "Watchdog":
        if self._store is not None:
            self._write()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        if isinstance(error, Exception) and is_communication_error(error):
            if threading.current_thread() is threading.main_thread():
                # torchrun asks the others to end as soon as one has died. This process does, when it has said why.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            message = self.explain(error)
            self._end(FOLLOWED)
            raise RankFailure(message) from error
        if error is None:
            self._end(FINISHED)
        else:
            self._end(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def explain(self, error: Exception) -> str:
        """What has happened to the other ranks, after a collective of this one has failed with `error`.

        Takes up to `SECONDS_TO_EXPLAIN`: a rank that has just died is known by its silence. The first rank to find out
        tells the others, so that all say the same.
        """
        self._stop.set()
        deadline = time.monotonic() + SECONDS_TO_EXPLAIN * self._interval
        while True:
            self._look()
            with self._lock:
                verdict = self._read_verdict()
                culprits = self._table.failed() or self._table.dead(time.monotonic())
                if self._lost is not None:
                    return self._without_store().text
                if verdict is None and (culprits or time.monotonic() > deadline):
                    verdict = self._agree(self._describe(culprits) if culprits else self._describe_unknown(error), [])
                if verdict is not None:
                    return verdict.text
            time.sleep(self._interval / 4)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        pause = self._interval * max(1.0, self.size / RANKS_PER_SECOND)
        next_look = time.monotonic()
        while not self._stop.wait(self._interval):
            self._write()
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + pause
            with self._lock:
                verdict = self._read_verdict() or self._judge()
            # The main thread may have met the same failure since: it then speaks for this rank.
            if verdict is not None and not self._stop.is_set():
                self._leave(verdict)

    def _write(self) -> None:
        assert self._store is not None
        try:
            self._store.set(self._key(self.rank), json.dumps(vars(self._line())))
        except dist.DistError:
            self._lose_store()

    def _line(self) -> Line:
        where, waiting = _main_thread(self._main)
        return Line(
            beat=next(self._beats),
            counter=self._counter,
            phase=self._phase,
            done=self._done,
            total=self._total,
            subject=self._subject,
            where=where,
            waiting=waiting,
            state=self._state,
            host=self._host,
            pid=self._pid,
        )

    def _look(self) -> None:
        """Read everybody's line."""
        assert self._store is not None
        keys = [self._key(rank) for rank in range(self.size)]
        with self._lock:
            try:
                # multi_get would wait for a key that nobody has written yet.
                self._all_have_written = self._all_have_written or self._store.check(keys)
                if not self._all_have_written:
                    return
                answers = self._store.multi_get(keys)
            except dist.DistError:
                self._lose_store()
                return
            lines = {rank: Line(**json.loads(answer)) for rank, answer in enumerate(answers)}
            self._table.update(lines, time.monotonic())

    def _read_verdict(self) -> _Verdict | None:
        """Why the run must end, as another rank has found."""
        assert self._store is not None
        key = f"{self._prefix}/verdict"
        try:
            if self._store.check([key]):
                return _Verdict(**json.loads(self._store.multi_get([key])[0]))
        except dist.DistError:
            self._lose_store()
        return None

    def _judge(self) -> _Verdict | None:
        """Why the run must end, as this rank finds; None while all is well."""
        now = time.monotonic()
        if self._lost is not None:
            # Without an agent rank 0 hosts the store, and at the end of a run may be the first to leave.
            over = 0 in self._table and self._table[0].state == FINISHED
            return None if over or now - self._lost < 5 * self._interval else self._without_store()
        # A rank that failed has said so itself, and the collectives of the others should fail too. NCCL's may not.
        culprits = self._table.failed(since=now - 10 * self._interval) or self._table.dead(now)
        if culprits:
            return self._agree(self._describe(culprits), [])
        late = self._table.late(now, self.timeout)
        return self._agree(self._describe(late), late) if late else None

    def _without_store(self) -> _Verdict:
        if 0 not in self._table or self._agent_hosts:
            return _Verdict(f"The store of the launcher no longer answers: its node is gone. {ADVICE}")
        return _Verdict(f"Rank 0, which hosts the store, is gone. It was in {self._table[0].doing()}. {ADVICE}")

    def _describe(self, culprits: Sequence[int]) -> str:
        return self._table.describe(culprits, time.monotonic())

    def _describe_unknown(self, error: Exception) -> str:
        """A collective failed although every rank still runs."""
        first = (str(error).splitlines() or [type(error).__name__])[0]
        doing = self._line().doing(where=False)
        behind = self._describe(self._table.furthest_behind())
        return f"A collective failed on rank {self.rank} in {doing}: {first} Furthest behind: {behind}"

    def _agree(self, text: str, hung: Sequence[int]) -> _Verdict:
        """Make a verdict everybody's; the first one counts."""
        assert self._store is not None
        verdict = _Verdict(f"{text} {ADVICE}", list(hung))
        try:
            answer = self._store.compare_set(f"{self._prefix}/verdict", "", json.dumps(vars(verdict)))
            return _Verdict(**json.loads(answer))
        except dist.DistError:
            self._lose_store()
            return verdict

    def _leave(self, verdict: _Verdict) -> None:
        """Write down where this rank is, and end the process."""
        if verdict.hung and (self.directory is not None or self.rank in verdict.hung):
            self._dump()
        self._state = FOLLOWED
        self._write()
        report_error(f"error: {verdict.text}")
        # The others see the verdict within a moment. Who leaves first makes the launcher end them.
        time.sleep(SECONDS_TO_LEAVE_TOGETHER * self._interval)
        self._end_frozen(verdict.hung)
        end_process(EXIT_STATUS)

    def _end_frozen(self, hung: Sequence[int]) -> None:
        """End the ranks of this node whose watchdog is stuck like the rest of them; torchrun would take 30 seconds."""
        self._look()
        for rank in hung:
            line = self._table[rank]
            stuck = line.state == RUNNING and line.host == self._host
            if rank != self.rank and stuck and process_exists(line.pid):
                os.kill(line.pid, signal.SIGKILL)

    def _dump(self) -> None:
        """Write the Python stacks, and what NCCL's flight recorder has kept."""
        if self.directory is None:
            print(f"[rank {self.rank}] where its threads are:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / f"stacks_rank_{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            trace = _flight_recorder()
            if trace is not None:
                (self.directory / f"nccl_trace_rank_{self.rank}").write_bytes(trace)
        except OSError as error:
            print(f"[rank {self.rank}] {error}", file=sys.stderr)

    def _end(self, state: str) -> None:
        """Stop watching, and let the others know how this rank ended."""
        self._stop.set()
        self._thread.join(10 * self._interval)
        self._state = state
        self._write()
        if state == FINISHED:
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Whoever may host the store is the last to leave, so that nobody takes its leaving for its death."""
        assert self._store is not None
        key = f"{self._prefix}/finished"
        try:
            count = self._store.add(key, 1)
            deadline = time.monotonic() + 10 * self._interval
            while self.rank == 0 and count < self.size and time.monotonic() < deadline:
                time.sleep(self._interval / 10)
                count = self._store.add(key, 0)
        except dist.DistError:
            self._lose_store()

    def _lose_store(self) -> None:
        self._lost = self._lost or time.monotonic()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"


def start_watchdog(world: World, timeout: float, directory: Path | None = None) -> Watchdog:
    """The watchdog of this rank; without a process group one that does nothing. Collective.

    Args:
        world: the processes, already joined.
        timeout: seconds without progress after which a rank is late.
        directory: where stacks and traces go when it ends the run.
    """
    if world.mesh is None:
        return Watchdog(world.rank, world.size, None, timeout=timeout)
    nonce = world.broadcast(secrets.token_hex(8))
    store = connect_store(timeout_seconds=30.0)
    return Watchdog(world.rank, world.size, store, timeout=timeout, nonce=nonce, directory=directory)


def use_steady_timeout(watchdog: Watchdog, seconds: float) -> None:
    """From now on a rank may make no progress, and a collective may wait, for `seconds` alone.

    To be called once the first update is done, after which nothing is compiled or loaded any more. torchtitan lowers
    the timeouts of its process groups at the same place. They are left some slack: the watchdog goes first.
    """
    watchdog.timeout = seconds
    if dist.is_initialized():
        set_group_timeouts(seconds + SLACK)


def is_communication_error(error: Exception) -> bool:
    """Whether torch.distributed has raised this because of another rank or of the network."""
    if isinstance(error, dist.DistError):
        return True
    # Gloo raises plain RuntimeErrors, which name its source file.
    text = str(error)
    return type(error) is RuntimeError and any(
        sign in text for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    )


def _host() -> str:
    """This node; where containers share its name, the one in which process numbers mean the same."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _main_thread(identity: int) -> tuple[str, bool]:
    """The innermost line of this package that a thread is in, and whether it is in a call of torch.distributed."""
    frame: FrameType | None = sys._current_frames().get(identity)
    package, collectives = str(Path(__file__).parents[2]), str(Path(dist.__file__).parent)
    # Functional collectives go through the dispatcher's file.
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        frame = frame.f_back
    waiting = frame is not None and frame.f_code.co_filename.startswith(collectives)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(package):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}", waiting
        frame = frame.f_back
    return "", waiting


def _flight_recorder() -> bytes | None:
    """What NCCL's flight recorder has kept, as `torch.distributed.flight_recorder` reads it; None without one."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"))
    return None if dump is None or size == "0" else dump()
