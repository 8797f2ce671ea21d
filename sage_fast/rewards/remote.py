"""Rewards that another process scores: the server at `reward.url`, or a child of the
interpreter `reward.python`.
"""

import copy
import json
import os
import secrets
import signal
import subprocess
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.files import loads
from sage_fast.config.sections import RewardConfig
from sage_fast.rewards.base import scored_elsewhere
from sage_fast.rewards.server import READABLE, TOKEN, RewardSample

PATIENCE = 120.0
"""Seconds for which a server is asked again after it has failed to answer; it may have
been started again meanwhile.
"""
FIRST_PATIENCE = 10.0
"""The same for a server that has never answered: it may still be starting, but more
likely it is not there.
"""
TIMEOUT = 60.0
"""Seconds without a byte after which a request is repeated. A server that scores for
longer sends spaces meanwhile.
"""
MAX_ANSWER_BYTES = 2**24
"""Scores of a batch take some hundreds."""

SERVER = Path(__file__).with_name("server.py")


class RemoteReward:
    """Rewards behind a server, as one reward.

    Attributes:
        url: of the server.
        token: carried by every request.
        child: the process of the server, if it is this one's.

    Raises:
        RewardServerError: nothing answers there, or it is not a reward server.
    """

    def __init__(
        self, url: str, token: str | None, child: "subprocess.Popen[str] | None" = None
    ) -> None:
        self.url = url.rstrip("/")
        self.child = child
        self._closed = False
        self._server: RemoteReward | None = None
        # Without the handlers of proxies, which are for the internet, and of statuses:
        # every answer is read.
        self._opener = urllib.request.OpenerDirector()
        self._opener.add_handler(urllib.request.HTTPHandler())
        self._opener.add_handler(urllib.request.HTTPSHandler())
        if token:
            self._opener.addheaders = [("Authorization", f"Bearer {token}")]
        health = self._ask("/health", patience=min(FIRST_PATIENCE, PATIENCE))
        self.served: dict[str, Any] = health["rewards"]
        self._take(list(self.served))

    def _take(self, names: list[str]) -> None:
        """Score by these rewards of the server, and say what they say."""
        self.names = names
        facts = [self.served[name] for name in names]
        self.LOWER_IS_BETTER = [n for known in facts for n in known["lower_is_better"]]
        self.WHOLE_GROUPS = any(known.get("whole_groups") for known in facts)
        self.READS = [n for known in facts for n in known.get("reads") or ["video"]]
        self.takes_samples = any(known.get("takes_samples") for known in facts)

    def only(self, names: list[str]) -> "RemoteReward":
        """Some rewards of the same server, as one reward."""
        part = copy.copy(self)
        part._take(names)
        part._server = self  # whose end would be the child's
        return part

    def close(self) -> None:
        """End the child, and whatever it has started; nothing is waited for any more."""
        self._closed = True
        if self.child is not None:
            _end(self.child)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        self._ask("/prompts", json.dumps(list(prompts)).encode())

    @property
    def score_samples(self) -> Callable[[list[RewardSample]], Mapping[str, Any]] | None:
        """As `score`, where a reward of the server takes samples."""
        return self._score_samples if self.takes_samples else None

    def _score_samples(self, samples: list[RewardSample]) -> Mapping[str, Any]:
        fields = [dict(vars(sample)) for sample in samples]
        tensors = {
            f"{key}.{row}": value
            for row, known in enumerate(fields)
            for key in READABLE
            if (value := known.pop(key)) is not None
        }
        videos = [tensors.pop(key) for key in list(tensors) if key.startswith("video.")]
        if videos:
            tensors["videos"] = torch.stack(videos)
        return self._scores(tensors, [sample.prompt for sample in samples], fields)

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Any]:
        """Scores as the lists of numbers that the server sent. Asks until it answers.

        Raises:
            RewardError: the reward failed. RewardServerError: the server is gone, or is
                not the same any more.
        """
        return self._scores({"videos": videos.contiguous()}, list(prompts), [])

    def _scores(
        self, tensors: dict[str, Tensor], prompts: list[str], samples: list[Any]
    ) -> Mapping[str, Any]:
        given = {"prompts": prompts, "names": self.names, "samples": samples}
        body = save(tensors, {key: json.dumps(value) for key, value in given.items()})
        answer = self._ask("/score", body)
        if answer["rewards"] != self.served:
            raise RewardServerError(
                f"The server at {self.url} has other rewards or options now. Start it "
                "as it was."
            )
        if not isinstance(answer.get("scores"), dict):
            raise RewardServerError(
                f"{self.url} is not a reward server: a batch is answered by "
                f"{answer!s:.200}."
            )
        return dict(answer["scores"])

    def _ask(
        self, path: str, body: bytes | None = None, patience: float | None = None
    ) -> dict[str, Any]:
        """One exchange, repeated while no whole answer comes. RewardError where the
        answer is an error.
        """
        if patience is None:
            patience = PATIENCE
        request = urllib.request.Request(self.url + path, body)
        # of a host that does not even refuse
        timeout = min(TIMEOUT, max(1.0, patience))
        give_up = None
        while True:
            try:
                with self._opener.open(request, timeout=timeout) as reply:
                    answer = loads(self._read(reply))
                break
            except (OSError, HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if self._closed:
                raise RewardServerError(
                    f"The run ended while the server at {self.url} scored a batch."
                )
            if self.child is not None and (status := self.child.poll()) is not None:
                raise RewardServerError(
                    f"The process of reward.python (pid {self.child.pid}) ended, "
                    f"status {status}."
                )
            now = time.monotonic()
            if give_up is None:
                give_up = now + patience
            if now >= give_up:
                raise RewardServerError(
                    f"The reward server at {self.url} has not answered for "
                    f"{patience:g} s ({problem}). Start it: "
                    "python -m sage_fast.rewards.server CONFIG."
                )
            time.sleep(min(1.0, patience / 10))
        if isinstance(answer, dict) and "error" in answer:
            kind = RewardError if reply.status == 200 else RewardServerError
            raise kind(f"{answer['error']} (the reward server at {self.url})")
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), dict):
            raise RewardServerError(
                f"{self.url} is not a reward server: {path} answers {answer!s:.200}."
            )
        return answer

    def _read(self, reply: HTTPResponse) -> bytes:
        """The body of an answer, cut off where it is endless or the run has ended."""
        data = bytearray()
        while not self._closed and len(data) <= MAX_ANSWER_BYTES:
            part = reply.read1(2**16)
            if not part:
                break
            data += part
        return bytes(data)


def connect(
    config: RewardConfig, device: str | None, fps: float | None
) -> RemoteReward | None:
    """The rewards of a config that are scored elsewhere; None where all are scored
    here.

    Args:
        device, fps: for rewards of `reward.python` that take them.

    Raises:
        ConfigError: the server has other rewards or options, or the child cannot be
            started. RewardServerError: nothing answers at `reward.url`.
    """
    rewards = {name: config.options.get(name, {}) for name in scored_elsewhere(config)}
    if config.python is not None:
        if not rewards:
            raise ConfigError(
                f"reward.python is {config.python!r}, but {config.rewards} are scored "
                "in this process: it is for package.module:attribute. Set "
                "reward.python to null."
            )
        return _start(config.python, {"rewards": rewards, "device": device, "fps": fps})
    if config.url is None:
        return None
    remote = RemoteReward(config.url, os.environ.get(TOKEN))
    for name, options in rewards.items():
        theirs = remote.served.get(name, {}).get("options")
        wanted = dict(options)
        # The device is the server's own affair.
        wanted.pop("device", None)
        if fps is not None and theirs is not None and "fps" in theirs:
            # It decides which frames are scored.
            wanted.setdefault("fps", fps)
        if theirs is None or not wanted.items() <= theirs.items():
            raise ConfigError(
                f"reward.url is {config.url!r}, which has {name!r} with the options "
                f"{theirs}, not {wanted}. Start it with the same configuration."
            )
    return remote


def _start(python: str, spec: Mapping[str, Any]) -> RemoteReward:
    """Start the server by another interpreter. It listens on loopback, and ends when
    this process does.
    """
    token = secrets.token_hex()
    try:
        child = subprocess.Popen(
            [str(Path(python).expanduser()), str(SERVER), "-", "--port=0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # No more threads than this rank uses: the children of all ranks share the
            # cores.
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
            # Ctrl-C asks the run to stop after its update, which still needs scores
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        # The token goes by the pipe, because every user of the machine can read the
        # words of a command.
        child.stdin.write(json.dumps({**spec, "token": token}) + "\n")
        child.stdin.flush()
        hello = child.stdout.readline().strip()
    except OSError as error:
        raise ConfigError(
            f"reward.python is {python!r}, which cannot be started: {error}"
        ) from error
    if not hello.startswith("Serving"):
        child.wait()
        reason = hello or f"it ended with status {child.returncode}"
        raise ConfigError(
            f"reward.python is {python!r}, which cannot serve "
            f"{sorted(spec['rewards'])}: {reason}"
        )
    remote = RemoteReward(hello.rpartition(" ")[2], token, child)
    weakref.finalize(remote, _end, child)
    return remote


def _end(child: "subprocess.Popen[str]") -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # its session
        child.wait()
