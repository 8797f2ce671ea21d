"""Serve rewards over HTTP: `python -m sage_fast.rewards.server CONFIG`, or the child process of `reward.python`.

The child is another interpreter, whose environment has the packages of a reward and none of ours. Therefore this file
imports the standard library alone, takes torch or else numpy for the videos, and runs on Python 3.8. In such an
environment it also serves by itself: `PYTHON server.py FILE.json`, with `rewards` and `options` as under `reward`.

    GET  /health       {"serves": digest, "rewards": {name: {"options": ..., "lower_is_better": ...}}}
    POST /prompts      JSON list of texts          {"error": message} where a reward refuses one
    POST /score/ID     safetensors: `videos` (B, F, 3, H, W) uint8, and in its metadata the JSON list `prompts`
    GET  /score/ID     the same answer for a batch that was sent before

The answer to a batch has a `state`: "done" with `scores` {name: B numbers}, "failed" with `error`, "scoring" (ask
again) or "unknown" (send again). An ID is scored once, so that a repeated request gets the same result.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "SAGE_FAST_REWARD_TOKEN"
"""Environment variable, of the server and of its trainers, of the token that every request must carry."""
LOOPBACK = ("127.0.0.1", "localhost")
ANSWER_AFTER = 10.0
"""Seconds until a batch that is not done is answered by "scoring": a slow server differs from a dead one."""
MOST_KEPT = 256
"""Results that are kept for repeated requests."""


# ------------------------------------------------------------------------------------------ rewards


class SetupError(ValueError):
    """A reward that cannot be built; the message names the key, the value and the fix."""


class FunctionReward:
    """A function f(videos, prompts, **options) as a reward; numbers it returns are the score called `name`."""

    def __init__(self, function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
        self.function, self.name, self.options = function, name, options

    def score(self, videos: Any, prompts: Any) -> Mapping[str, Any]:
        """See `Reward.score`."""
        result = self.function(videos, prompts, **self.options)
        return result if isinstance(result, Mapping) else {self.name: result}


def build_reward(name: str, found: Any, options: Mapping[str, Any]) -> Any:
    """The reward behind an entry of `reward.rewards`.

    Args:
        name: the entry. options: its `reward.options`.
        found: what the entry names. A class is constructed with the options, and an object with a method `score` is
            used as it is. A function whose first two parameters have no default is called as f(videos, prompts,
            **options) for every batch; any other function is called with the options and must return a reward.

    Raises:
        SetupError: the options do not fit, the reward refuses them or lacks a file, or it is not a reward.
    """
    wanted = (
        "Name a class with score(videos, prompts), a function f(videos, prompts), or a function that returns an object "
        "with such a method."
    )
    if hasattr(found, "score") and not inspect.isclass(found):
        if options:
            raise SetupError(f"reward.options.{name} = {options}, but {name} is an object and takes no options.")
        return found
    if not callable(found):
        raise SetupError(f"reward.rewards: {name!r} is of type {type(found).__name__}. {wanted}")
    takes = parameters(found)
    first = list(takes.values())[:2]
    scores_videos = not inspect.isclass(found) and [
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty and p.name not in options
        for p in first
    ] == [True, True]
    try:
        if takes:
            inspect.signature(found).bind(*([None, None] if scores_videos else []), **options)
    except TypeError as error:
        raise SetupError(
            f"reward.options.{name} = {options} does not fit {name}: {error}. Options are written as "
            f"--reward.options.{name}.OPTION=VALUE, or the same in the YAML."
        ) from error
    if scores_videos:
        return FunctionReward(found, name.rpartition(":")[2].rpartition(".")[2], options)
    try:
        reward = found(**options)
    except (TypeError, ValueError, OSError, ImportError) as error:
        given = f" with reward.options.{name} = {options}" if options else ""
        raise SetupError(f"reward.rewards: {name!r} cannot be set up{given}: {error}") from error
    if not callable(getattr(reward, "score", None)):
        raise SetupError(
            f"reward.rewards: {name!r} gives a {type(reward).__name__}, which has no method score. {wanted}"
        )
    return reward


def parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; none for an object without a signature, such as some built-in functions."""
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}


def fill_options(found: Any, options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The options of a reward, with those of a run that it takes and was not given."""
    taken = {key: value for key, value in defaults.items() if value is not None and key in parameters(found)}
    return {**taken, **options}


class Scorer:
    """Builds rewards, and scores one batch after another by them.

    spec: `rewards`, a list or {name: package.module:attribute}; `options`; `device` and `fps` for those that take them.

    Raises:
        SetupError: a reward cannot be built here.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.rewards: dict[str, Any] = {}
        self._results: dict[str, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        # One thread builds and scores: the queue of all trainers, and the one that libraries tie their state to.
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._build, spec).result()

    def _build(self, spec: Mapping[str, Any]) -> None:
        targets = spec["rewards"]
        for name in targets:
            target = targets[name] if isinstance(targets, Mapping) else name
            module, _, attribute = target.partition(":")
            try:
                found = getattr(importlib.import_module(module), attribute)
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error}"
                raise SetupError(f"reward.rewards: {target!r} is not in {sys.executable}: {reason}.") from error
            given = spec.get("options", {}).get(name, {})
            self.options[name] = fill_options(found, given, device=spec.get("device"), fps=spec.get("fps"))
            self.rewards[name] = build_reward(name, found, self.options[name])

    def health(self) -> dict[str, Any]:
        """Rewards that are served, and their digest: servers that share it give the same scores."""
        served = {
            name: {
                "options": self.options[name],
                "lower_is_better": getattr(getattr(reward, "function", reward), "LOWER_IS_BETTER", ()),
            }
            for name, reward in self.rewards.items()
        }
        return {"serves": hashlib.sha256(to_json(served)).hexdigest(), "rewards": served}

    def check(self, prompts: list[str]) -> dict[str, Any]:
        """Show the prompts to the rewards; the message of the first that refuses them."""
        for name, reward in self.rewards.items():
            try:
                getattr(reward, "check_prompts", lambda prompts: None)(prompts)
            except Exception as error:  # noqa: BLE001  any error of a reward is the answer
                return {"error": f"{name}: {error}"}
        return {}

    def result(self, key: str, body: bytearray | None) -> dict[str, Any]:
        """The state of batch `key`; `body` is the batch where it has been sent."""
        with self._lock:
            if body is not None and key not in self._results:
                self._results[key] = self._thread.submit(self._score, body)
                for old in list(self._results)[:-MOST_KEPT]:
                    del self._results[old]
            future = self._results.get(key)
        if future is None:
            return {"state": "unknown"}
        try:
            return future.result(ANSWER_AFTER)
        except NotYet:
            return {"state": "scoring"}

    def _score(self, body: bytearray) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        scoring = "The batch"
        try:
            videos, prompts = read_batch(body)
            for name, reward in self.rewards.items():
                scoring = name
                result = reward.score(videos, prompts)
                for key, numbers in dict(result).items():
                    if key in scores:
                        raise ValueError(f"another reward also returns {key!r}")
                    scores[key] = json.loads(to_json(numbers))
        except BaseException as error:  # noqa: BLE001  sys.exit too: whatever a reward does, the server lives
            return {"state": "failed", "error": f"{scoring} raised {type(error).__name__}: {error}"}
        return {"state": "done", "scores": scores}


def read_batch(body: bytearray) -> tuple[Any, list[str]]:
    """Videos and prompts of a request: uint8 (B, F, 3, H, W) of torch, or of numpy where that is not installed.

    The format is safetensors', read here so that no package has to be installed for it.
    """
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8:start]))
    entry, prompts = header["videos"], json.loads(header["__metadata__"]["prompts"])
    if entry["dtype"] != "U8":
        raise ValueError(f"videos are {entry['dtype']}, not U8")
    first, end = entry["data_offsets"]
    values = memoryview(body)[start + first : start + end]
    try:
        import torch
    except ImportError:
        import numpy

        return numpy.frombuffer(values, numpy.uint8).reshape(entry["shape"]), prompts
    return torch.frombuffer(values, dtype=torch.uint8).view(entry["shape"]), prompts


def to_json(value: Any) -> bytes:
    """JSON of values with tensors, arrays and numbers of theirs: exact for every floating-point type."""
    plain = lambda v: v.tolist() if hasattr(v, "tolist") else list(v)  # noqa: E731
    return json.dumps(value, default=plain, sort_keys=True).encode()


# ------------------------------------------------------------------------------------------ HTTP


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # a client that is gone keeps no thread
    server: RewardServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(int(self.headers.get("Content-Length") or 0))

    def _answer(self, length: int | None) -> None:
        with suppress(OSError):  # the client has gone, and asks again
            sent = self.headers.get("Authorization", "").encode()
            if self.server.token and not hmac.compare_digest(sent, f"Bearer {self.server.token}".encode()):
                self.close_connection = True  # its body is not read
                return self._reply(401, {"error": f"the token in {TOKEN} is not that of the server"})
            body = None if length is None else bytearray(length)
            if body is not None and self.rfile.readinto(body) != length:  # type: ignore[attr-defined]
                self.close_connection = True
                return None
            scorer, (_, kind, *key) = self.server.scorer, self.path.split("/")
            if (kind, body) == ("health", None):
                return self._reply(200, scorer.health())
            if kind == "prompts" and body is not None:
                return self._reply(200, scorer.check(json.loads(body)))
            if kind == "score" and key:
                return self._reply(200, {"serves": self.server.serves, **scorer.result(key[0], body)})
            return self._reply(400, {"error": f"{self.command} {self.path} is not a request of this server"})

    def _reply(self, status: int, answer: Mapping[str, Any]) -> None:
        body = to_json(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing per request."""


class RewardServer(ThreadingHTTPServer):
    """The server of a `Scorer`; `serve_forever` runs it.

    Raises:
        SetupError: another machine could reach it, and there is no token.
    """

    daemon_threads = True

    def __init__(self, scorer: Scorer, host: str = LOOPBACK[0], port: int = 0, token: str | None = None) -> None:
        if host not in LOOPBACK and not token:
            raise SetupError(f"--host is {host}, which other machines reach. Set {TOKEN} here and for the trainers.")
        self.scorer, self.token = scorer, token
        self.serves = scorer.health()["serves"]
        super().__init__((host, port), _Handler)


def _end_with_parent() -> None:
    sys.stdin.read()  # until the trainer closes it, or has died
    os._exit(0)


def _read_spec(files: list[str], overrides: list[str]) -> dict[str, Any]:
    if files == ["-"]:
        spec: dict[str, Any] = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        return spec
    if files[0].endswith(".json"):
        with open(files[0], encoding="utf-8") as file:
            return dict(json.load(file))
    from sage_fast.config.load import load_config
    from sage_fast.config.registry import REWARDS

    config = load_config(files, overrides)
    targets = {name: REWARDS.get(name, name) for name in config.reward.rewards}
    more = {"device": config.reward.device, "fps": config.video.fps}
    return {"rewards": targets, "options": config.reward.options, **more}


def main() -> int:
    """Serve until interrupted; returns the exit status, 2 for what cannot be served."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_fast.rewards.server",
        description="Serve the rewards of a configuration to trainers with reward.url.",
        epilog=f"Beyond loopback (--host) a token is needed: the environment variable {TOKEN}.",
    )
    parser.add_argument("config", nargs="+", help="as of `sage-fast train`, with overrides; or a JSON file")
    parser.add_argument("--host", default=LOOPBACK[0], help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    options, overrides = parser.parse_known_args()
    child = options.config == ["-"]
    if not __package__:
        del sys.path[0]  # this file's folder, whose clip.py would stand in for OpenAI's clip
    # A reward may print: stdout carries one line, the address.
    hello = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        spec = _read_spec(options.config, overrides)
        token = spec.get("token") or os.environ.get(TOKEN)
        server = RewardServer(Scorer(spec), options.host, 0 if child else options.port, token)
    except Exception as error:
        if not child and not isinstance(error, (ValueError, OSError)):
            raise
        print(json.dumps({"error": str(error)}) if child else f"error: {error}", file=hello, flush=True)
        return 2
    url = f"http://{options.host}:{server.server_port}"
    line = json.dumps({"url": url}) if child else f"Serving {list(server.scorer.rewards)} at {url}"
    print(line, file=hello, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    os._exit(0)  # a batch in progress has nobody left to ask for it


if __name__ == "__main__":
    sys.exit(main())
