"""Rewards that another process scores: the server at `reward.url`, or a child of the interpreter `reward.python`."""

import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
import uuid
import weakref
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.sections import RewardConfig
from sage_fast.rewards.base import scored_elsewhere
from sage_fast.rewards.server import TOKEN

PATIENCE = 120.0
"""Seconds for which a server that does not answer is asked again; it may have been started again meanwhile."""
TIMEOUT = 60.0
"""Seconds without a byte after which a request is repeated; a server that scores for longer says so before."""

SERVER = Path(__file__).with_name("server.py")


class RemoteReward:
    """Rewards behind a server, as one reward.

    url: of the server. token: carried by every request. child: the process of the server, if it is this one's.
    patience: seconds for which a server that does not answer is asked again; `PATIENCE` by default.

    Raises:
        RewardServerError: nothing answers there, or it is not a reward server.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        child: "subprocess.Popen[str] | None" = None,
        patience: float | None = None,
    ) -> None:
        self.url, self.token, self.child = url.rstrip("/"), token, child
        self.patience = PATIENCE if patience is None else patience
        # A proxy of the environment is for the internet.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        health = self._ask("/health")
        if not isinstance(health.get("rewards"), dict):
            raise RewardServerError(f"{self.url} is not a reward server: /health answers {health!s:.200}.")
        self.serves: str = health["serves"]
        self.rewards: dict[str, Any] = health["rewards"]
        declared = [reward["lower_is_better"] for reward in self.rewards.values()]
        self.takes_device = any("device" in reward["options"] for reward in self.rewards.values())
        self.LOWER_IS_BETTER = tuple(name for names in declared for name in names)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """See `Reward`."""
        if error := self._ask("/prompts", json.dumps(list(prompts)).encode()).get("error"):
            raise RewardError(error)

    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Reward.score`. Asks until there is a result, and never makes one up.

        Raises:
            RewardError: the reward failed. RewardServerError: the server is gone, or is not the same any more.
        """
        body = save({"videos": videos.contiguous()}, {"prompts": json.dumps(list(prompts))})
        # The server scores an ID once: a repeated request gets the result of the first.
        path, sent = f"/score/{uuid.uuid4().hex}", True
        while (answer := self._ask(path, body if sent else None)).get("state") in ("scoring", "unknown"):
            sent = answer["state"] == "unknown"  # it was started again
            time.sleep(0.1)
        if answer.get("serves") != self.serves:
            raise RewardServerError(
                f"The server at {self.url} was started again with other rewards or options: its scores would not "
                "compare with those before. Start it as it was."
            )
        if answer.get("state") == "failed":
            raise RewardError(str(answer["error"]))
        return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in answer["scores"].items()}

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        """One exchange, repeated while the server cannot be reached."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        begin = time.monotonic()
        while True:
            try:
                with self._open(urllib.request.Request(self.url + path, body, headers), timeout=TIMEOUT) as reply:
                    answer = json.load(reply)
                if isinstance(answer, dict):
                    return answer
                problem = f"it answers {answer!s:.200}"
            except urllib.error.HTTPError as error:
                problem = f"{error}: {error.read(1000).decode(errors='replace')}"
                if error.code < 500:
                    raise RewardServerError(f"The reward server at {self.url} refuses {path}: {problem}") from error
            except (OSError, HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if self.child is not None and (status := self.child.poll()) is not None:
                raise RewardServerError(
                    f"The process of reward.python (pid {self.child.pid}) has ended with status {status} "
                    "(-9: killed, perhaps for its memory)."
                )
            if time.monotonic() - begin >= self.patience:
                raise RewardServerError(
                    f"The reward server at {self.url} has not answered for {self.patience:g} s ({problem}). Start it: "
                    "python -m sage_fast.rewards.server CONFIG."
                )
            time.sleep(min(1.0, self.patience / 10))


def connect(config: RewardConfig, device: str | None, fps: float | None) -> RemoteReward | None:
    """The rewards of a config that are scored elsewhere; None where all are scored here.

    Args:
        device, fps: for rewards of `reward.python` that take them.

    Raises:
        ConfigError: the server has other rewards or options, or the child cannot be started.
        RewardServerError: nothing answers at `reward.url`.
    """
    names = scored_elsewhere(config)
    if config.python is not None:
        if not names:
            raise ConfigError(
                f"reward.python is {config.python!r}, but {config.rewards} are scored in this process: it is for "
                "package.module:attribute. Set reward.python to null."
            )
        spec = {"rewards": names, "options": config.options, "device": config.device or device, "fps": fps}
        return _start(config.python, spec)
    if config.url is None:
        return None
    remote = RemoteReward(config.url, os.environ.get(TOKEN))
    if missing := sorted(set(names) - set(remote.rewards)):
        raise ConfigError(
            f"reward.rewards has {missing}, but the server at {config.url} serves {sorted(remote.rewards)}. Start it "
            "with them."
        )
    for name in names:
        theirs = remote.rewards[name]["options"]
        wanted = ({"fps": fps} if "fps" in theirs and fps is not None else {}) | config.options.get(name, {})
        for key, value in wanted.items():
            if key != "device" and theirs.get(key) != value:
                raise ConfigError(
                    f"reward.options.{name}.{key} is {value!r}, but the server at {config.url} has "
                    f"{theirs.get(key)!r}. Start it with the same configuration."
                )
    return remote


def _start(python: str, spec: Mapping[str, Any]) -> RemoteReward:
    """Start the server by another interpreter. It listens on loopback, and ends when this process does."""
    token = secrets.token_hex()
    try:
        child = subprocess.Popen(
            [str(Path(python).expanduser()), str(SERVER), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
            start_new_session=True,  # Ctrl-C asks the run to stop after its update, which still needs scores
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps({**spec, "token": token}) + "\n")
        child.stdin.flush()
        hello = json.loads(child.stdout.readline() or '{"error": "it ended at once; see above"}')
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.python is {python!r}, which cannot be started: {error}") from error
    if "error" in hello:
        child.wait()
        raise ConfigError(f"reward.python is {python!r}, which cannot serve {spec['rewards']}: {hello['error']}")
    remote = RemoteReward(hello["url"], token, child)
    weakref.finalize(remote, _end, child)
    return remote


def _end(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
