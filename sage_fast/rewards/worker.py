"""Rewards in a process of their own: they score one batch, on another GPU perhaps, while the policy samples the next.

    trainer                                      worker
    submit    videos to shared memory  ------->  build the rewards once, then score batch after batch
    result    wait for the answer      <-------  scores, or the error and its traceback

At most `reward.queue_size` batches are in flight, which bounds memory, and answers arrive in order of submission. Each
end notices when the other is gone: the worker exits with the trainer, however that ends, and a worker that dies, hangs
or cannot start is an error in the trainer. The worker's random generators are part of a checkpoint.
"""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.training_sections import RewardConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rewards.base import OnFailure, Reward, ScoredBatch, Scorer, describe_batch
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.generators import generator_state, load_generator_state, seed_generators

# Ctrl-C and the signals of a job scheduler reach the whole process group. The trainer needs the scores to finish its
# update, and stops the worker itself.
LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_LEAVE = 5.0
SECONDS_BETWEEN_INTERRUPT_CHECKS = 0.2
# What the worker is doing while it is not inside a reward.
SETTING_UP, IDLE = -2, -1


def load_scorer(
    config: RewardConfig,
    prompts: Sequence[str] = (),
    *,
    device: str | None = None,
    fps: float | None = None,
    seed: int = 0,
) -> Scorer:
    """The rewards of a run, set up and ready, in the process that `reward.placement` names.

    Args:
        config: which rewards.
        prompts: the prompts of the videos to be scored; a reward with a method `check_prompts` sees them now.
        device: the policy's. Rewards that take a device use it where `reward.device` is null.
        fps: frames per second of the videos, for rewards that take it.
        seed: of the random generators of a reward process. Inline, rewards share those of this process.

    Raises:
        ConfigError: the options of a reward do not fit, or it refuses its options or a prompt.
        RewardError: a reward failed while it was set up.
    """
    defaults = {name: value for name, value in (("device", device), ("fps", fps)) if value is not None}
    if config.placement == "process":
        return RewardProcess(config, prompts, defaults, seed)
    return CompositeReward.from_config(config, prompts, defaults)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One batch; `samples` is JSON in bytes, (N,) uint8. The tensors are in shared memory."""

    videos: Tensor
    samples: Tensor
    on_failure: OnFailure


@dataclass(frozen=True)
class _GeneratorRequest:
    """Take over `state` of the random generators, where it is given, and answer with the present one."""

    state: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The outcome of a request or of the set-up: scores, generator state or an error, and what the rewards logged.

    lower_is_better: of the set-up, see `Scorer`.
    """

    scores: dict[str, list[float]] | None = None
    failed: list[bool] | None = None
    seconds: float = 0.0
    generators: dict[str, Any] | None = None
    error: Exception | None = None
    remote_traceback: str = ""
    messages: Sequence[tuple[str, int, str]] = ()
    lower_is_better: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What the worker adopts from the trainer's process, so that both compute the same numbers."""

    prompts: Sequence[str]
    defaults: Mapping[str, Any]
    seed: int
    num_threads: int
    cuda_device: int | None
    log_level: int


class RemoteTraceback(Exception):
    """The cause of an error that a reward raised in the worker; its text is the worker's traceback."""


# ---------------------------------------------------------------------------------------------- in the trainer


class RewardProcess(Scorer):
    """`CompositeReward` in another process.

    Raises:
        ConfigError, RewardError: the rewards cannot be set up there, with the same message as in this process.
        RewardError: the process died, or took longer than `reward.timeout_seconds`.
    """

    def __init__(
        self,
        config: RewardConfig,
        prompts: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(config.weights)
        self._names = list(config.rewards)
        self._queue_size, self._timeout = config.queue_size, config.timeout_seconds
        self._outstanding: deque[_Pending] = deque()
        self._last_answer = time.monotonic()
        self._broken: str | None = None
        self._running = torch.full((1,), SETTING_UP).share_memory_()
        """Number of the reward that the worker is in, to name one that does not return."""
        settings = _Settings(
            prompts=list(prompts),
            defaults=dict(defaults or {}),
            seed=seed,
            num_threads=torch.get_num_threads(),
            cuda_device=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, config, self._running, settings), name="rewards"
        )
        # Deferred, because a worker that nobody has promised to stop would be waited for at exit, for ever.
        with _interrupts_deferred() as deliver_interrupt:
            with _signals_blocked():
                self._process.start()
            # The only other copy is the worker's, so that its end is seen here.
            theirs.close()
            # Runs before multiprocessing joins its children at exit, hence the priority, and when this object goes.
            self._stop = Finalize(self, _end_worker, (self._process, self._connection, self._running), exitpriority=10)
            try:
                built = self._next_answer(self._last_answer, "while it was set up", deliver_interrupt)
                self._unpack(built)
                self.lower_is_better = frozenset(built.lower_is_better)
            except BaseException:
                self.close()
                raise

    def submit(self, videos: Tensor, samples: Sequence[Sample], on_failure: OnFailure = "stop") -> "_Pending":
        """Hand one batch over; waits while `reward.queue_size` batches are under way. See `Scorer.submit`.

        Raises:
            RewardError: the worker is gone, or there is no shared memory left.
        """
        self._check_alive()
        while len(self._outstanding) >= self._queue_size:
            self._receive()
        with _interrupts_deferred():
            return self._send_batch(videos, samples, on_failure)

    def _send_batch(self, videos: Tensor, samples: Sequence[Sample], on_failure: OnFailure) -> "_Pending":
        copy = videos.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        texts = [[s.prompt.text, s.prompt.index, s.prompt.seed, s.member] for s in samples]
        try:
            request = _Request(
                videos=copy.share_memory_(),
                # Not in the message: one this small always fits into the pipe, so that sending never waits for a worker
                # that does not read.
                samples=torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8).share_memory_(),
                on_failure=on_failure,
            )
        except RuntimeError as error:
            raise RewardError(
                f"There is no shared memory for a batch of videos of {copy.nbytes / 2**20:.0f} MiB: {error}. Enlarge "
                "/dev/shm (`docker run --shm-size`), lower reward.queue_size, or set reward.placement to inline."
            ) from error
        self._send(request, f"on {describe_batch(samples)}")
        pending = _Pending(self, samples)
        self._outstanding.append(pending)
        return pending

    def state(self) -> dict[str, Any]:
        """The worker's random generators after every batch submitted so far, fit for JSON.

        Raises:
            RewardError: the worker is gone.
        """
        return self._generators(None)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Raises as `state`."""
        self._generators(state)

    def _generators(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        self._check_alive()
        while self._outstanding:
            self._receive()
        where = "while its random generators were read"
        with _interrupts_deferred() as deliver_interrupt:
            self._send(_GeneratorRequest(state), where)
            answer = self._next_answer(time.monotonic(), where, deliver_interrupt)
        assert answer.generators is not None
        return answer.generators

    def _send(self, request: "_Request | _GeneratorRequest", where: str) -> None:
        try:
            self._connection.send(request)
        except ConnectionError:
            self._fail_dead(where)

    def close(self) -> None:
        """Stop the worker."""
        if self._broken is None:
            self._broken = "The reward process has been closed."
        self._stop()

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RewardError(self._broken)

    def _receive(self) -> None:
        """Wait for the answer to the oldest batch."""
        self._check_alive()
        with _interrupts_deferred() as deliver_interrupt:
            pending = self._outstanding[0]
            # The worker began with this batch when it had both the batch and nothing else to do.
            start = max(pending.submitted, self._last_answer)
            pending.answer = self._next_answer(start, f"on {describe_batch(pending.samples)}", deliver_interrupt)
            self._outstanding.popleft()
            self._last_answer = time.monotonic()

    def _next_answer(self, start: float, where: str, deliver_interrupt: Callable[[], None]) -> _Answer:
        """The worker's next message.

        Args:
            start: when the worker began, from which the time allowed is counted.
            where: says in messages what the worker is working on.
            deliver_interrupt: see `_interrupts_deferred`.

        Raises:
            RewardError: the worker is gone, or none came in time.
        """
        deadline = start + self._timeout
        ends: list[Connection | int] = [self._connection, self._process.sentinel]
        while not wait(ends, min(SECONDS_BETWEEN_INTERRUPT_CHECKS, max(0.0, deadline - time.monotonic()))):
            deliver_interrupt()
            if time.monotonic() < deadline:
                continue
            culprit = self._culprit()
            self._fail(
                f"{culprit[0].upper()}{culprit[1:]} took longer than {self._timeout:g} s {where}, and its process was "
                "stopped. Raise reward.timeout_seconds if it needs longer."
            )
        try:
            # A worker that died may have answered first.
            if not self._connection.poll(1.0):
                self._fail_dead(where)
            answer: _Answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._fail_dead(where)
        for name, level, message in answer.messages:
            logging.getLogger(name).log(level, "%s", message)
        return answer

    @staticmethod
    def _unpack(answer: _Answer) -> ScoredBatch:
        if answer.error is not None:
            raise answer.error from (RemoteTraceback(answer.remote_traceback) if answer.remote_traceback else None)
        scores = {name: torch.tensor(values, dtype=torch.float64) for name, values in (answer.scores or {}).items()}
        return ScoredBatch(scores=scores, failed=torch.tensor(answer.failed or []).bool(), seconds=answer.seconds)

    def _culprit(self) -> str:
        running = int(self._running)
        if running >= 0 or len(self._names) == 1:
            return f"reward {self._names[max(running, 0)]!r}"
        return f"the rewards {self._names}"

    def _fail_dead(self, where: str) -> NoReturn:
        self._process.join(SECONDS_TO_LEAVE)
        code = self._process.exitcode
        if code is None:
            how = "broke off its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += ", as the kernel does when memory runs out,"
        else:
            how = f"ended with exit code {code} (its output is above)"
        self._fail(f"The process of {self._culprit()} {how} {where}.")

    def _fail(self, message: str) -> NoReturn:
        self._broken = message
        self._stop()
        raise RewardError(message)


class _Pending:
    """The scores of one submitted batch, see `PendingScores`."""

    def __init__(self, owner: RewardProcess, samples: Sequence[Sample]) -> None:
        self.submitted = time.monotonic()
        self.samples = samples
        self.answer: _Answer | None = None
        self._owner = owner

    def result(self) -> ScoredBatch:
        while self.answer is None:
            self._owner._receive()
        return self._owner._unpack(self.answer)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started within keeps the signals that it is going to ignore pending until it ignores them."""
    # Started by the first process otherwise, and that would unblock the signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Within the context Ctrl-C is noted only. It is delivered at the context's end, or by calling what this yields.

    Python runs a handler between any two instructions of the main thread, and an exception that it raises there ends
    whatever runs. In a weak reference's callback or a destructor it is printed as "Exception ignored in" and lost, so
    that the wait that follows goes on; between the start of the worker and the line that registers its end, or inside
    a lock of torch's shared memory, it leaves something behind that the exit of this process then waits for. Blocking
    the signal is not enough: another thread may take it, and its handler runs in the main thread all the same.

    Handlers are left alone where they cannot raise here: in other threads, and where SIGINT is ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    noted: list[FrameType | None] = []

    def deliver() -> None:
        if noted:
            frame = noted[-1]
            noted.clear()
            handler(signal.SIGINT, frame)

    signal.signal(signal.SIGINT, lambda number, frame: noted.append(frame))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()


def _end_worker(process: BaseProcess, connection: Connection, running: Tensor) -> None:
    """Stop the worker: an idle one exits when its connection closes, one inside a reward is killed."""
    with _interrupts_deferred():
        connection.close()
        process.join(SECONDS_TO_LEAVE if int(running) == IDLE else 0)
        if process.exitcode is None:
            process.kill()
            process.join(SECONDS_TO_LEAVE)


# ---------------------------------------------------------------------------------------------- in the worker


def _serve(connection: Connection, config: RewardConfig, running: Tensor, settings: _Settings) -> None:
    """Build the rewards, say so, and answer requests until the trainer closes the connection."""
    for left in LEFT_TO_THE_TRAINER:
        signal.signal(left, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_TRAINER)
    threading.Thread(target=_leave_with_trainer, daemon=True).start()
    torch.set_num_threads(settings.num_threads)
    if settings.cuda_device is not None and config.device is None:
        torch.cuda.set_device(settings.cuda_device)
    collector = _Collector()
    logging.basicConfig(level=settings.log_level, handlers=[collector])
    seed_generators(settings.seed)

    try:
        rewards = CompositeReward.from_config(config, settings.prompts, settings.defaults)
    except (ConfigError, RewardError) as error:
        connection.send(_failure(error, collector))
        return
    for number, name in enumerate(rewards.rewards):
        rewards.rewards[name] = _Marked(rewards.rewards[name], number, running)
    running.fill_(IDLE)
    connection.send(_Answer(messages=collector.take(), lower_is_better=rewards.lower_is_better))
    while True:
        try:
            request: _Request | _GeneratorRequest = connection.recv()
        except (EOFError, ConnectionError):
            return
        if isinstance(request, _GeneratorRequest):
            if request.state is not None:
                load_generator_state(request.state)
            answer = _Answer(generators=generator_state())
        else:
            answer = _score(rewards, request, collector)
        running.fill_(IDLE)
        del request  # the batch goes before the next one comes
        try:
            connection.send(answer)
        except ConnectionError:
            return


def _score(rewards: CompositeReward, request: _Request, collector: "_Collector") -> _Answer:
    nothing = PromptEmbeds(text=torch.empty(0, 0), glyph=torch.empty(0, 0))  # rewards read texts
    samples = [
        Sample(prompt=Prompt(text=text, index=index, seed=seed), embeds=nothing, member=member)
        for text, index, seed, member in json.loads(bytes(request.samples.tolist()))
    ]
    try:
        batch = rewards.submit(request.videos, samples, request.on_failure).result()
    except (RewardError, ConfigError) as error:
        return _failure(error, collector)
    return _Answer(
        scores={name: values.tolist() for name, values in batch.scores.items()},
        failed=batch.failed.tolist(),
        seconds=batch.seconds,
        messages=collector.take(),
    )


def _failure(error: ConfigError | RewardError, collector: "_Collector") -> _Answer:
    """The answer for the error being handled, without its causes, which may not be fit for sending."""
    return _Answer(error=type(error)(str(error)), remote_traceback=traceback.format_exc(), messages=collector.take())


def _leave_with_trainer() -> None:
    """End this process, whatever it is doing, once the trainer's is gone."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)


@dataclass(frozen=True)
class _Marked:
    """A reward that says in shared memory that it is running."""

    reward: Reward
    number: int
    running: Tensor

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Any:
        self.running.fill_(self.number)
        return self.reward.score(videos, prompts)


class _Collector(logging.Handler):
    """Collects log records for the trainer, which owns the progress bar and the log file."""

    def __init__(self) -> None:
        super().__init__()
        # The trainer adds its own format.
        self.setFormatter(logging.Formatter("%(message)s"))
        self._messages: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        taken, self._messages = self._messages, []
        return taken
