"""Serve rewards over HTTP: `python -m sage_fast.rewards.server CONFIG`, or the child
process of `reward.python`.

The child is another interpreter, whose environment has the packages of a reward and
none of ours. Therefore this file imports the standard library alone, takes torch or
else numpy for the videos, and runs on Python 3.8. In such an environment it also serves
by itself: `PYTHON server.py FILE.json`, which holds {"rewards": {"module:name":
options}}.

    GET  /health    nothing
    POST /prompts   JSON list of texts, which a reward may refuse
    POST /score     safetensors: `videos` (B, F, 3, H, W) uint8, `latents.ROW` (C, F, H,
                    W) float32 and `picture.ROW` (3, h, w) uint8, as far as they are
                    read; in its metadata the JSON lists `prompts`, `names` of the
                    rewards that are called (without it all), and `samples`, the other
                    fields of a `RewardSample`, where a reward takes them

Each connection carries one request and one answer, a JSON object: `rewards` {name:
{"options": ..., "lower_is_better": ..., "reads": ..., "whole_groups": ...,
"takes_samples": ...}}, `error` where a reward failed, and `scores` {name: B numbers} of
a batch. Spaces come before it while a batch is scored. A client whose connection breaks
sends the batch again.
"""

from __future__ import annotations

import argparse
import copy
import errno
import hmac
import importlib
import inspect
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

TOKEN = "SAGE_FAST_REWARD_TOKEN"
"""Environment variable, of the server and of its trainers, of the token that every
request must carry.
"""
LOOPBACK = "127.0.0.1"
BEAT = 1.0
"""Seconds between the spaces that tell a slow server from a dead one."""
TAKEN = ("reward", "overall", "Reward")
"""Names that no score can have: in metrics and tables they are sums of scores."""


# --------------------------------------------------------------------------------------
# words

# Commands and runs use it too. It stands here because this file imports nothing of the
# project.


class StandardStream(io.FileIO):
    """A descriptor for words, which ends no work: those that have nowhere to go are
    dropped.

    A pipe that nobody reads any more and a terminal that is gone lead to nowhere from
    then on, for all that writes there; a full disk may have room again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, words: Any) -> int:
        """See `io.RawIOBase.write`; all of the words count as written."""
        try:
            written = super().write(words)
        except OSError as error:
            written = None
            if error.errno in (errno.EPIPE, errno.EIO):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
        return len(words) if written is None else written


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Within the context `sys.stdout` and `sys.stderr` are `StandardStream`; those of a
    notebook stay as they are.
    """
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            raw = io.BufferedWriter(StandardStream(stream.fileno()))
            # A letter that the encoding lacks must not end anything either.
            errors = "backslashreplace"
            lasting = io.TextIOWrapper(
                raw, stream.encoding, errors, line_buffering=True
            )
            setattr(sys, name, lasting)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# --------------------------------------------------------------------------------------
# rewards


@dataclass(frozen=True, eq=False)
class RewardSample:
    """A generated video and its place in the run, for `score_samples(samples)`.

    Attributes:
        prompt: its text.
        columns: the other columns of its row in the prompt file, as texts.
        group: number that the videos of its group share, and no others of the rollout
            or evaluation.
        member: number of the video among those of its prompt.
        video: (F, 3, H, W) uint8 RGB.
        latents: (C, F, H, W) float32, which the video is decoded from.
        picture: (3, h, w) uint8 RGB that the video begins with, in the size of its
            file; None without one.

    Of the last three a reward gets what its attribute `READS` names, else None.
    """

    prompt: str
    columns: Mapping[str, str] = field(default_factory=dict)
    group: int = 0
    member: int = 0
    video: Any = None
    latents: Any = None
    picture: Any = None


READABLE = ("video", "latents", "picture")
"""Fields of a `RewardSample` that `READS` may name."""


class SetupError(ValueError):
    """A reward that cannot be built; the message names the key, the value and the fix."""


@dataclass
class FunctionReward:
    """A function f(videos, prompts, **options) as a reward; numbers it returns are the
    score called `name`.
    """

    function: Callable[..., Any]
    name: str
    options: Mapping[str, Any]

    def score(self, videos: Any, prompts: Any) -> Mapping[str, Any]:
        result = self.function(videos, prompts, **self.options)
        return result if isinstance(result, Mapping) else {self.name: result}


def function_score(name: str) -> str:
    """Name of the score of a function's numbers: the function's, or `lambda`; of one
    called `reward`, `reward_score`.

    Example: `function_score("__main__:main.<locals>.bright")` is `bright`.
    """
    own = name.rpartition(":")[2].rpartition(".")[2].replace("<lambda>", "lambda")
    return f"{own}_score" if own in TAKEN else own


WANTED = (
    "Name a class with score(videos, prompts) or score_samples(samples), a function "
    "f(videos, prompts), or a function that returns an object with such a method."
)


def check_reward(
    name: str, found: Any, options: Mapping[str, Any]
) -> Literal["object", "function", "maker"]:
    """Tell what an entry of `reward.rewards` names, without calling it.

    Args:
        name: the entry.
        options: its `reward.options`.
        found: what the entry names.

    Raises:
        SetupError: the options do not fit, or it cannot be a reward.
    """
    if _has_scores(found) and not inspect.isclass(found):
        if options:
            raise SetupError(
                f"reward.options.{name} = {options}, but {name} is an object and "
                "takes no options."
            )
        _check_order(name, getattr(found, "score", None))
        return "object"
    if not callable(found):
        raise SetupError(
            f"reward.rewards: {name!r} is of type {type(found).__name__}. {WANTED}"
        )
    # Two parameters at the front that nothing else fills are the videos and the
    # prompts.
    needed = [
        p.name
        for p in list(parameters(found).values())[:2]
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.default is p.empty
        and p.name not in options
    ]
    scores_videos = not inspect.isclass(found) and len(needed) == 2
    given = [None, None] if scores_videos else []
    try:
        with suppress(ValueError):  # some built-in functions have no signature
            inspect.signature(found).bind(*given, **options)
    except TypeError as error:
        raise SetupError(
            f"reward.options.{name} = {options} does not fit {name}: {error}. A "
            "function that scores is called as f(videos, prompts). Options are written "
            f"as --reward.options.{name}.OPTION=VALUE, or the same in the YAML."
        ) from error
    if scores_videos:
        _check_order(name, found)
        return "function"
    return "maker"


def build_reward(name: str, found: Any, options: Mapping[str, Any]) -> Any:
    """The reward behind an entry of `reward.rewards`.

    Args:
        name: the entry.
        options: its `reward.options`.
        found: what the entry names. A class is constructed with the options, and an
            object with a method `score` or `score_samples` is used as it is. A function
            whose first two parameters have no default is called as f(videos, prompts,
            **options) for every batch; any other function is called with the options
            and must return a reward.

    Raises:
        SetupError: the options do not fit, the reward refuses them or lacks a file, or
            it is not a reward.
    """
    options = copy.deepcopy(dict(options))  # a reward may change what it is given
    kind = check_reward(name, found, options)
    if kind == "object":
        return found
    if kind == "function":
        return FunctionReward(found, function_score(name), options)
    try:
        reward = found(**options)
    except (TypeError, ValueError, OSError, ImportError) as error:
        given = f" with reward.options.{name} = {options}" if options else ""
        raise SetupError(
            f"reward.rewards: {name!r} cannot be set up{given}: {error}"
        ) from error
    if not _has_scores(reward):
        raise SetupError(
            f"reward.rewards: {name!r} gives a {type(reward).__name__}, which has no "
            f"method score. {WANTED}"
        )
    _check_order(name, getattr(reward, "score", None))
    return reward


def _has_scores(found: Any) -> bool:
    return callable(getattr(found, "score", None)) or takes_samples(found)


FIRST_OF_OTHERS = ("prompts", "prompt", "completions", "captions", "texts")
"""First parameters of functions that would take the videos for something else."""


def _check_order(name: str, function: Any) -> None:
    """SetupError for a function that would take the videos for the prompts, as TRL's
    f(prompts, completions) does.
    """
    takes = list(parameters(function))
    if takes[:1] and takes[0] in FIRST_OF_OTHERS:
        raise SetupError(
            f"reward.rewards: {name!r} takes ({', '.join(takes)}), but a reward is "
            "called as f(videos, prompts), with videos (B, F, 3, H, W) uint8 and B "
            "texts. Give it these two parameters first, in this order."
        )


def parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; none for an object without a signature, such as some built-in
    functions.
    """
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return {}


def fill_options(
    found: Any, options: Mapping[str, Any], **defaults: Any
) -> dict[str, Any]:
    """The options of a reward, with those of a run that it takes and was not given."""
    filled = dict(options)
    for key, value in defaults.items():
        if value is not None and key in parameters(found):
            filled.setdefault(key, value)
    return filled


def lower_is_better(reward: Any) -> list[str]:
    """Names of its scores that fall as videos get better. TypeError for other than
    names.
    """
    return _declared(reward, "LOWER_IS_BETTER", ())


def takes_samples(reward: Any) -> bool:
    """True for a reward that is called as `score_samples(samples)`."""
    return callable(getattr(reward, "score_samples", None))


def whole_groups(reward: Any) -> bool:
    """True for a reward whose every call must hold whole groups."""
    return bool(getattr(getattr(reward, "function", reward), "WHOLE_GROUPS", False))


def reads(reward: Any) -> list[str]:
    """Fields of a `RewardSample` that it reads. TypeError for others than `READABLE`."""
    found = _declared(reward, "READS", ("video",))
    if not set(found) <= set(READABLE):
        raise TypeError(f"READS is {found}, but it must be names of {READABLE}.")
    return found


def _declared(reward: Any, key: str, usual: tuple[str, ...]) -> list[str]:
    declared = getattr(getattr(reward, "function", reward), key, usual)
    # A lone name instead of a tuple would count as its letters.
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{key} is {declared!r}, but it must be a tuple of names, such as "
            '("distance",).'
        )
    return list(names)


def call_reward(
    reward: Any, videos: Any, prompts: list[str], samples: list[RewardSample]
) -> Any:
    """Return what a reward of either kind returns."""
    if takes_samples(reward):
        return reward.score_samples(samples)
    return reward.score(videos, prompts)


class RewardServer(ThreadingHTTPServer):
    """Builds rewards, and scores the batches of all trainers by them, one after
    another; `serve_forever` runs it.

    spec: `rewards`, {name: options}; `targets`, the package.module:attribute of short
    names; `device` and `fps` for rewards that take them.

    Raises:
        SetupError: a reward cannot be built here, or another machine could reach the
            server and there is no token.
    """

    daemon_threads = True
    request_queue_size = 1024  # clients that connect at once

    def __init__(
        self,
        spec: Mapping[str, Any],
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
    ) -> None:
        if host not in (LOOPBACK, "localhost") and not token:
            raise SetupError(
                f"--host is {host}, which other machines reach. Set {TOKEN} here and "
                "for the trainers."
            )
        self.token = token
        self.rewards: dict[str, Any] = {}
        self.served: dict[str, dict[str, Any]] = {}
        # One thread builds and scores: it is the queue, and libraries tie state to the
        # thread that loads them.
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self._build, spec).result()
        super().__init__((host, port), _Handler)

    def _build(self, spec: Mapping[str, Any]) -> None:
        for name, given in spec["rewards"].items():
            target = spec.get("targets", {}).get(name, name)
            module, _, attribute = target.partition(":")
            try:
                found = getattr(importlib.import_module(module), attribute)
            except (Exception, SystemExit) as error:
                raise SetupError(
                    f"reward.rewards: {target!r} is not in {sys.executable}: "
                    f"{type(error).__name__}: {error}."
                ) from error
            options = fill_options(
                found, given, device=spec.get("device"), fps=spec.get("fps")
            )
            self.rewards[name] = build_reward(name, found, options)
            takes = parameters(found)
            if "fps" in takes:  # a trainer compares it with the rate of its videos
                options = {"fps": takes["fps"].default, **options}
            reward = self.rewards[name]
            self.served[name] = {
                "options": options,
                "lower_is_better": lower_is_better(reward),
                "reads": reads(reward),
                "whole_groups": whole_groups(reward),
                "takes_samples": takes_samples(reward),
            }

    def work(self, path: str, body: bytearray) -> dict[str, Any]:
        """The scores of a batch, the refusal of a prompt, or an error."""
        scores: dict[str, Any] = {}
        scoring = "the request"
        try:
            named = None if path == "/prompts" else read_header(body)[1].get("names")
            for name, reward in self.rewards.items():
                scoring = name
                if path == "/prompts":
                    if hasattr(reward, "check_prompts"):
                        reward.check_prompts(json.loads(body))
                    continue
                if name not in (named or self.rewards):
                    continue
                # a copy, which the reward may change
                batch = read_batch(bytearray(body), reads(reward))
                found = dict(call_reward(reward, *batch))
                # As a trainer will read it: what JSON cannot hold is an error of this
                # reward.
                result = json.loads(to_json(found))
                if twice := sorted(scores.keys() & result.keys()):
                    raise ValueError(f"another reward also returns {twice}")
                scores.update(result)
        except BaseException as error:  # noqa: BLE001  sys.exit too: whatever a reward does, the server lives
            return {"error": f"{scoring} raised {type(error).__name__}: {error}"}
        return {"scores": scores}


def read_header(body: bytearray) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Type, shape and place of the arrays of a request, the JSON values of its
    metadata, and the byte that the arrays begin at.

    The format is safetensors', read here so that no package has to be installed for it.
    """
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8:start]))
    given = {key: json.loads(text) for key, text in header.pop("__metadata__").items()}
    return header, given, start


def read_batch(
    body: bytearray, fields: Iterable[str]
) -> tuple[Any, list[str], list[RewardSample]]:
    """Videos, prompts, and samples with these fields, of a request. Arrays are torch's,
    or numpy's where that is not installed.
    """
    header, given, start = read_header(body)
    values = memoryview(body)[start:]
    arrays = {
        key: _array(values[slice(*found["data_offsets"])], found)
        for key, found in header.items()
    }
    videos = arrays.get("videos")
    if videos is not None:
        arrays.update({f"video.{row}": video for row, video in enumerate(videos)})
    samples = []
    for row, known in enumerate(given.get("samples", ())):
        known.update({key: arrays.get(f"{key}.{row}") for key in fields})
        samples.append(RewardSample(**known))
    return videos, given["prompts"], samples


def _array(values: memoryview, found: Mapping[str, Any]) -> Any:
    kind = {"U8": "uint8", "F32": "float32"}[found["dtype"]]
    try:
        import torch
    except ImportError:
        import numpy

        return numpy.frombuffer(values, kind).reshape(found["shape"])
    return torch.frombuffer(values, dtype=getattr(torch, kind)).view(found["shape"])


def to_json(value: Any) -> bytes:
    """JSON of values with tensors, arrays and numbers of theirs: exact for every
    floating-point type.
    """
    return json.dumps(
        value,
        default=lambda v: v.tolist() if hasattr(v, "tolist") else list(v),
    ).encode()


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # a client that is gone keeps no thread
    server: RewardServer

    def do_GET(self) -> None:
        with suppress(OSError):  # a client that has gone asks again
            self._answer()

    do_POST = do_GET

    def _answer(self) -> None:
        server = self.server
        sent = self.headers.get("Authorization", "").encode()
        if server.token and not hmac.compare_digest(
            sent, f"Bearer {server.token}".encode()
        ):
            error = f"the token in {TOKEN} is not that of the server"
            self._send(401, to_json({"error": error}))
            return
        body = bytearray(int(self.headers.get("Content-Length", 0)))
        if self.rfile.readinto(body) != len(body):  # type: ignore[attr-defined]
            return  # half a batch: its client has gone
        self._send(200, b"")
        result = {}
        if self.path in ("/score", "/prompts"):
            result = self._wait(server.thread.submit(server.work, self.path, body))
        self.wfile.write(to_json({"rewards": server.served, **result}))

    def _wait(self, work: Future[dict[str, Any]]) -> dict[str, Any]:
        try:
            while True:
                with suppress(NotYet):
                    return work.result(BEAT)
                self.wfile.write(b" ")
        finally:
            work.cancel()  # nobody waits for a batch whose client has gone

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing per request."""


# --------------------------------------------------------------------------------------
# program


def read_spec(files: list[str], overrides: list[str]) -> dict[str, Any]:
    """Read what to serve, see `RewardServer`: from stdin (`-`), a JSON file, or the files of
    a configuration.
    """
    if files == ["-"]:
        spec: dict[str, Any] = json.loads(sys.stdin.readline())
        # The trainer keeps its end open until it closes it or dies.
        threading.Thread(
            target=lambda: os._exit(len(sys.stdin.read())), daemon=True
        ).start()
        return spec
    if files[0].endswith(".json"):
        with open(files[0], encoding="utf-8") as file:
            return dict(json.load(file))
    from sage_fast.config.load import load_config, read_tree
    from sage_fast.config.registry import REWARDS, SCORES

    # A file to be laid over a preset may hold the rewards alone, and the rest of a run
    # does not matter here.
    tree = read_tree(files, overrides)
    unused = {"output_dir": "none", "data.prompts": ["none"]}
    reward = tree.get("reward", {})
    # weights are the trainers' affair, and such a file may have none
    for name in (reward.get("rewards") or [])[:1]:
        reward.setdefault("weights", {SCORES.get(name, ("any",))[0]: 1.0})
    config = load_config(
        None, unused | {key: tree[key] for key in ("reward", "video") if key in tree}
    )
    rewards = {
        name: config.reward.options.get(name, {}) for name in config.reward.named
    }
    return {"rewards": rewards, "targets": REWARDS, "fps": config.video.fps}


def main() -> int:
    """Serve until interrupted; returns the exit status, 2 for what cannot be served."""
    text = "Serve the rewards of a configuration to trainers with reward.url."
    parser = argparse.ArgumentParser(
        prog="python -m sage_fast.rewards.server", description=text
    )
    parser.add_argument(
        "config",
        nargs="+",
        help="as of `sage-fast train`, with overrides; or a JSON file",
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help=f"default 127.0.0.1; others need a token in {TOKEN}",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="default 8000; 0 takes a free one"
    )
    options, overrides = parser.parse_known_args()
    if not __package__:
        # this file's folder, whose clip.py would stand in for OpenAI's clip
        del sys.path[0]
    # A reward may print: stdout carries one line, which a trainer reads.
    hello = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with lasting_streams():
        try:
            spec = read_spec(options.config, overrides)
            server = RewardServer(
                spec,
                options.host,
                options.port,
                spec.get("token") or os.environ.get(TOKEN),
            )
        except Exception as error:  # noqa: BLE001  a reward may fail in any way
            print(
                f"error: {type(error).__name__}:",
                *str(error).splitlines(),
                file=hello,
                flush=True,
            )
            return 2
        print(
            f"Serving {list(server.rewards)} at "
            f"http://{options.host}:{server.server_port}",
            file=hello,
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        os._exit(0)  # a batch in progress has nobody left to ask for it


if __name__ == "__main__":
    sys.exit(main())
