"""Rewards that another process scores: the server at `reward.url`, or a child of the
interpreter `reward.python`.
"""

import json
import os
import secrets
import signal
import subprocess
import time
import urllib.request
import uuid
import weakref
from collections.abc import Mapping, Sequence
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
from sage_fast.rewards.server import TOKEN

PATIENCE = 120.0
"""Seconds for which a server that does not answer is asked again; it may have been
started again meanwhile.
"""
FIRST_PATIENCE = 10.0
"""The same for a server that has never answered: it may still be starting, but more
likely it is not there.
"""
TIMEOUT = 60.0
"""Seconds without a byte after which a request is repeated; a server that scores for
longer says so before.
"""

MAX_ANSWER_BYTES = 2**24
"""Scores of a batch take some hundreds."""
MOST_LOST = 10
"""Times that a server may have lost one batch, because it was started again."""

SERVER = Path(__file__).with_name("server.py")


class RemoteReward:
    """Rewards behind a server, as one reward.

    url: of the server. token: carried by every request. child: the process of the
    server, if it is this one's.

    Raises:
        RewardServerError: nothing answers there, or it is not a reward server.
    """

    def __init__(
        self, url: str, token: str | None, child: "subprocess.Popen[str] | None" = None
    ) -> None:
        self.url = url.rstrip("/")
        self.child = child
        self._closed = False
        self._servers: list[str] = []
        # Without the handlers of proxies, which are for the internet, and of statuses:
        # every answer is read.
        self._opener = urllib.request.OpenerDirector()
        self._opener.add_handler(urllib.request.HTTPHandler())
        self._opener.add_handler(urllib.request.HTTPSHandler())
        self._opener.addheaders = (
            [("Authorization", f"Bearer {token}")] if token else []
        )
        health = self._ask("/health", patience=min(FIRST_PATIENCE, PATIENCE))
        try:
            self.serves: str = health["serves"]
            self.served: dict[str, Any] = dict(health["rewards"])
            self.LOWER_IS_BETTER = tuple(
                name
                for reward in self.served.values()
                for name in reward["lower_is_better"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answered = f"/health answers {health!s:.200}"
            raise RewardServerError(
                f"{self.url} is not a reward server: {answered}."
            ) from error

    def close(self) -> None:
        """End the child, and whatever it has started; nothing is waited for any more."""
        self._closed = True
        if self.child is not None:
            _end(self.child)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """See `Reward`."""
        self._ask("/prompts", json.dumps(list(prompts)).encode())

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Reward.score`. Asks until there is a result, and never makes one up.

        Raises:
            RewardError: the reward failed. RewardServerError: the server is gone, or is
                not the same any more.
        """
        body = save(
            {"videos": videos.contiguous()}, {"prompts": json.dumps(list(prompts))}
        )
        # The server scores an ID once: a repeated request gets the result of the first.
        path = f"/score/{uuid.uuid4().hex}"
        answer = self._ask(path, body)
        lost = 0
        while answer.get("state") in ("scoring", "unknown"):
            time.sleep(0.1)
            lost += answer["state"] == "unknown"  # it was started again
            if self._closed:
                raise RewardServerError(
                    f"The run ended while the server at {self.url} scored a batch."
                )
            if lost > MOST_LOST:
                raise RewardServerError(
                    f"The server at {self.url} has lost a batch {lost} times: it is "
                    "started again and again. Its own "
                    "log says why."
                )
            answer = self._ask(path, body if answer["state"] == "unknown" else None)
        if answer.get("serves") != self.serves:
            raise RewardServerError(
                f"The server at {self.url} has other rewards or options now. Start it "
                "as it was."
            )
        try:
            return {
                name: torch.tensor(numbers, dtype=torch.float64)
                for name, numbers in answer["scores"].items()
            }
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            answered = f"a batch is answered by {answer!s:.200}"
            raise RewardServerError(
                f"{self.url} is not a reward server: {answered}."
            ) from error

    def _ask(
        self, path: str, body: bytes | None = None, patience: float | None = None
    ) -> dict[str, Any]:
        """One exchange, repeated while the server cannot be reached. RewardError where
        it answers by an error.
        """
        begin = time.monotonic()
        patience = PATIENCE if patience is None else patience
        # of a host that does not even refuse
        timeout = min(TIMEOUT, max(1.0, patience))
        while True:
            try:
                with self._opener.open(
                    urllib.request.Request(self.url + path, body), timeout=timeout
                ) as reply:
                    answer = dict(loads(_read(reply, timeout)))
                if "error" in answer:
                    kind = RewardError if reply.status == 200 else RewardServerError
                    raise kind(f"{answer['error']} (the reward server at {self.url})")
                self._note_server(answer)
                return answer
            # No connection, or an answer that is not whole: asked again. The errors
            # that a server tells pass.
            except (OSError, HTTPException, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if self.child is not None and (status := self.child.poll()) is not None:
                raise RewardServerError(
                    f"The process of reward.python (pid {self.child.pid}) ended, "
                    f"status {status}."
                )
            if time.monotonic() - begin >= patience:
                raise RewardServerError(
                    f"The reward server at {self.url} has not answered for "
                    f"{patience:g} s ({problem}). Start it: "
                    "python -m sage_fast.rewards.server CONFIG."
                )
            time.sleep(min(1.0, patience / 10))

    def _note_server(self, answer: Mapping[str, Any]) -> None:
        """RewardServerError where an earlier server answers again: one that was started
        again has another id.
        """
        server = answer.get("server")
        if not isinstance(server, str) or server in self._servers[-1:]:
            return
        if server in self._servers:
            raise RewardServerError(
                f"Several servers answer at {self.url} in turn, and each keeps its "
                "own batches. Give every one its "
                "own address, and each trainer one of them."
            )
        self._servers.append(server)


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
                "in this process: it is for "
                "package.module:attribute. Set reward.python to null."
            )
        return _start(config.python, {"rewards": rewards, "device": device, "fps": fps})
    if config.url is None:
        return None
    remote = RemoteReward(config.url, os.environ.get(TOKEN))
    for name, options in rewards.items():
        theirs = remote.served.get(name, {}).get("options")
        # The rate is compared too, because it decides which frames are scored; the
        # device is the server's own affair.
        wanted = {"fps": fps, **options} if "fps" in (theirs or {}) and fps else options
        if theirs is None or any(
            theirs.get(key) != wanted[key] for key in wanted.keys() - {"device"}
        ):
            raise ConfigError(
                f"reward.url is {config.url!r}, which has {name!r} with the options "
                f"{theirs}, not {wanted}. Start it "
                "with the same configuration."
            )
    return remote


def _read(reply: HTTPResponse, seconds: float) -> bytes:
    """The body of an answer. TimeoutError for one that trickles in, ValueError for one
    of gigabytes.
    """
    end = time.monotonic() + seconds
    data = bytearray()
    while part := reply.read1(2**16):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > end:
            raise TimeoutError(f"the answer was not complete within {seconds:g} s")
    return bytes(data)


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
