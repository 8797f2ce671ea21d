"""Rewards in a process of their own: they score one batch, on another GPU perhaps, while the policy samples the next.

    trainer                                      worker
    submit    videos to shared memory  ------->  build the rewards once, then score batch after batch
    result    wait for the answer      <-------  scores, or the error and its traceback

At most `reward.queue_size` batches are under way, so memory is bounded, and answers come in the order of submission.
Both ends notice when the other one is gone: the worker leaves when the trainer does, however it ends, and whatever
happens to the worker (it dies, hangs, cannot start) becomes an error of the trainer.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError
from sage_fast.config.schema import RewardConfig
from sage_fast.records import Prompt, PromptEmbeds, Sample
from sage_fast.rewards.base import OnFailure, Reward, ScoredBatch, Scorer, describe_batch
from sage_fast.rewards.composite import CompositeReward

# Ctrl-C and the signals of a job scheduler reach the whole process group. The trainer then finishes its update, for
# which it needs its scores; it ends the worker itself.
LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS_TO_LEAVE = 5.0
# What the worker is doing, where it is not in one of its rewards.
SETTING_UP, IDLE = -2, -1


def load_scorer(
    config: RewardConfig, prompts: Sequence[str] = (), *, device: str | None = None, fps: float | None = None
) -> Scorer:
    """The rewards of a run, set up and ready, where `reward.placement` wants them.

    Args:
        config: which rewards.
        prompts: what they will score videos of; a reward with a method `check_prompts` sees them now.
        device: the policy's. Rewards that take a device use it where `reward.device` is null.
        fps: frames per second of the videos, for rewards that take it.

    Raises:
        ConfigError: a reward cannot be built, or refuses a prompt.
    """
    defaults = {name: value for name, value in (("device", device), ("fps", fps)) if value is not None}
    if config.placement == "process":
        return RewardProcess(config, prompts, defaults)
    return CompositeReward.from_config(config, prompts, defaults)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One batch; `samples` is JSON in bytes, (N,) uint8. The tensors are in shared memory."""

    videos: Tensor
    samples: Tensor
    on_failure: OnFailure


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What came of a batch, or of building the rewards: scores or an error, and what the rewards logged."""

    scores: dict[str, list[float]] | None = None
    failed: list[bool] | None = None
    seconds: float = 0.0
    error: Exception | None = None
    remote_traceback: str = ""
    messages: Sequence[tuple[str, int, str]] = ()


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What the worker takes over from the trainer's process, so that both compute the same numbers."""

    prompts: Sequence[str]
    defaults: Mapping[str, Any]
    num_threads: int
    cuda_device: int | None
    log_level: int


class RemoteTraceback(Exception):
    """The cause of an error that a reward raised in its own process; its text is the traceback from there."""


# ---------------------------------------------------------------------------------------------- in the trainer


class RewardProcess(Scorer):
    """`CompositeReward` in another process.

    Raises:
        ConfigError: the rewards cannot be built there, by the same message as in this process; or the process died or
            took longer than `reward.timeout_seconds`.
    """

    def __init__(
        self, config: RewardConfig, prompts: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(config.weights)
        self._names = list(config.rewards)
        self._queue_size, self._timeout = config.queue_size, config.timeout_seconds
        self._outstanding: deque[_Pending] = deque()
        self._last_answer = time.monotonic()
        self._broken: str | None = None
        self._running = torch.full((1,), SETTING_UP).share_memory_()
        """Number of the reward that the worker is in, for naming one that does not return."""
        settings = _Settings(
            prompts=list(prompts),
            defaults=dict(defaults or {}),
            num_threads=torch.get_num_threads(),
            cuda_device=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs, config, self._running, settings), name="rewards"
        )
        with _signals_held_back():
            self._process.start()
        # The only other copy is the worker's, so that its end is seen here.
        theirs.close()
        # Before multiprocessing waits for its children at exit, hence the priority; also when this object goes.
        self._stop = Finalize(self, _end_worker, (self._process, self._connection, self._running), exitpriority=10)
        try:
            self._unpack(self._next_answer(self._last_answer, "while it was set up"))
        except RewardError as error:
            raise ConfigError(str(error)) from error
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
        copy = videos.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        texts = [[s.prompt.text, s.prompt.index, s.prompt.seed, s.member] for s in samples]
        try:
            request = _Request(
                videos=copy.share_memory_(),
                # Not in the message: a message this small always fits into the pipe, so that sending never waits for a
                # worker that does not read.
                samples=torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8).share_memory_(),
                on_failure=on_failure,
            )
        except RuntimeError as error:
            raise RewardError(
                f"There is no shared memory for a batch of videos of {copy.nbytes / 2**20:.0f} MiB: {error}. Enlarge "
                "/dev/shm (`docker run --shm-size`), lower reward.queue_size, or set reward.placement to inline."
            ) from error
        try:
            self._connection.send(request)
        except ConnectionError:
            self._fail_dead(f"on {describe_batch(samples)}")
        pending = _Pending(self, samples)
        self._outstanding.append(pending)
        return pending

    def close(self) -> None:
        """End the worker."""
        if self._broken is None:
            self._broken = "The process of the rewards has been closed."
        self._stop()

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RewardError(self._broken)

    def _receive(self) -> None:
        """Wait for the answer to the oldest batch."""
        self._check_alive()
        pending = self._outstanding[0]
        # The worker began with this batch when it had both the batch and nothing else to do.
        start = max(pending.submitted, self._last_answer)
        pending.answer = self._next_answer(start, f"on {describe_batch(pending.samples)}")
        self._outstanding.popleft()
        self._last_answer = time.monotonic()

    def _next_answer(self, start: float, where: str) -> _Answer:
        """The worker's next message. RewardError when none comes within the time allowed, counted from `start`.

        `where` says, in messages, what the worker is at.
        """
        deadline = start + self._timeout
        # In slices: a Ctrl-C that comes just before a wait begins does not end it, and is answered after it.
        while not wait([self._connection, self._process.sentinel], min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() < deadline:
                continue
            culprit = self._culprit()
            self._fail(
                f"{culprit[0].upper()}{culprit[1:]} took longer than {self._timeout:g} s {where}, and its process was "
                "stopped. Raise reward.timeout_seconds if it needs longer."
            )
        try:
            # A worker that died may have answered before.
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
def _signals_held_back() -> Iterator[None]:
    """A process started within holds back what it will ignore, until it has come to the line that ignores it."""
    # It would be started by the first process, and would let the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_worker(process: BaseProcess, connection: Connection, running: Tensor) -> None:
    """End the worker: an idle one leaves when its connection closes, one in a reward is killed."""
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

    try:
        rewards = CompositeReward.from_config(config, settings.prompts, settings.defaults)
    except ConfigError as error:
        connection.send(_Answer(error=error, messages=collector.take()))
        return
    except Exception as error:
        message = f"The process of the rewards {config.rewards} could not build them: {type(error).__name__}: {error}"
        connection.send(_Answer(error=ConfigError(message), remote_traceback=traceback.format_exc()))
        raise
    for number, name in enumerate(rewards.rewards):
        rewards.rewards[name] = _Marked(rewards.rewards[name], number, running)
    running.fill_(IDLE)
    connection.send(_Answer(messages=collector.take()))
    while True:
        try:
            request: _Request = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer = _answer(rewards, request, collector)
        running.fill_(IDLE)
        del request  # the batch goes before the next one comes
        try:
            connection.send(answer)
        except ConnectionError:
            return


def _answer(rewards: CompositeReward, request: _Request, collector: "_Collector") -> _Answer:
    nothing = PromptEmbeds(text=torch.empty(0, 0), glyph=torch.empty(0, 0))  # rewards read texts
    samples = [
        Sample(prompt=Prompt(text=text, index=index, seed=seed), embeds=nothing, member=member)
        for text, index, seed, member in json.loads(bytes(request.samples.tolist()))
    ]
    try:
        batch = rewards.submit(request.videos, samples, request.on_failure).result()
    except (RewardError, ConfigError) as error:
        return _Answer(
            error=type(error)(str(error)), remote_traceback=traceback.format_exc(), messages=collector.take()
        )
    return _Answer(
        scores={name: values.tolist() for name, values in batch.scores.items()},
        failed=batch.failed.tolist(),
        seconds=batch.seconds,
        messages=collector.take(),
    )


def _leave_with_trainer() -> None:
    """End this process, whatever it is doing, when the trainer's is gone."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)


@dataclass(frozen=True)
class _Marked:
    """A reward that notes in shared memory that it is running."""

    reward: Reward
    number: int
    running: Tensor

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Any:
        self.running.fill_(self.number)
        return self.reward.score(videos, prompts)


class _Collector(logging.Handler):
    """Keeps what is logged for the trainer, whose progress bar and log file it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        # The trainer's own format comes on top.
        self.setFormatter(logging.Formatter("%(message)s"))
        self._messages: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        taken, self._messages = self._messages, []
        return taken
