"""Rewards in another process: the same scores to the bit, from another environment,
slow, killed, or shared.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import (
    BaseHTTPRequestHandler,
    SimpleHTTPRequestHandler,
    ThreadingHTTPServer,
)
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.load import check_trust, named_code
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RewardConfig
from sage_fast.rewards import remote, server
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.remote import SERVER, RemoteReward
from sage_fast.rewards.server import RewardServer, SetupError
from sage_fast.run.run import Run, build_trainer
from sage_fast.tools.diagnosis import examine
from tests.made_runs import numbers
from tests.rewards import support
from tests.rewards.support import VIDEOS, here, samples

MakeRun = Callable[..., RunConfig]
PROMPTS = ["a red circle moving left", "ein Bär – größer", "c"]
SAMPLES = support.samples(*PROMPTS)

STYLE = '''
"""An old scorer: it needs packages that this project's environment lacks, or has in another version."""
import numpy as np
import clip

assert clip.RELEASE == "of 2021", "the clip of this environment, not a file of somebody else's"


class Style:
    def __init__(self, scale=1.0):
        self.scale = np.float32(scale)

    def score(self, videos, prompts):
        frames = np.asarray(videos).astype(np.float32) / np.float32(255)
        style = self.scale * np.sin(37 * frames).mean((1, 2, 3, 4), dtype=np.float32)
        lengths = np.array([len(prompt) for prompt in prompts], np.float32)
        return {"style": style + np.float32(0.1) * lengths, "mean": frames.mean((1, 2, 3, 4))}


def starter(videos, prompts):
    import subprocess
    return [subprocess.Popen(["sleep", "60"]).pid for _ in prompts]
'''
STYLE_RUN = [
    "--reward.rewards=[style:Style]",
    "--reward.options={style:Style: {scale: 0.3}}",
    "--reward.weights={style: 1.0}",
]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of an old scorer."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "style.py").write_text(STYLE)
    (folder / "clip.py").write_text('RELEASE = "of 2021"\n')
    return folder


@pytest.fixture(scope="module")
def other_python(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with these packages and numpy, and nothing of
    this project's.
    """
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    own = Path(np.__file__).parent
    for source in (own, own.with_name("numpy.libs"), *packages.iterdir()):
        if source.exists():
            (site / source.name).symlink_to(source)
    python = folder / "bin/python"
    for name in ("torch", "safetensors", "sage_fast", "yaml"):
        assert subprocess.run(
            [python, "-c", f"import {name}"], capture_output=True, cwd=folder
        ).returncode, name
    return python


def rewards(
    url: str | None = None, python: Path | None = None, **config: Any
) -> CompositeReward:
    config = {"rewards": [here("brightness")], "weights": {"brightness": 1.0}} | config
    section = RewardConfig(url=url, python=str(python) if python else None, **config)
    return CompositeReward.from_config(section, PROMPTS)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Start a server of rewards of this process, and give its address."""
    running = []

    def start(
        *names: str, options: Mapping[str, Any] | None = None, token: str | None = None
    ) -> str:
        spec = {
            "rewards": {
                here(name): (options or {}).get(here(name), {}) for name in names
            }
        }
        running.append(RewardServer(spec, token=token))
        threading.Thread(
            target=running[-1].serve_forever, args=[0.01], daemon=True
        ).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield start
    for each in running:
        each.shutdown()
        each.server_close()


# ------------------------------------------------------------------------------------------
# the same scores


@pytest.mark.slow  # the process imports torch
def test_the_command_serves_a_preset() -> None:
    command = [
        sys.executable,
        "-m",
        "sage_fast.rewards.server",
        "toy_cpu",
        "--port",
        "0",
    ]
    prompts = ["a red circle moving left", "a blue square moving up"]
    videos = (
        torch.arange(2 * 4 * 3 * 64 * 64).view(2, 4, 3, 64, 64).mul(7).to(torch.uint8)
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            (url,) = re.findall(
                r"^Serving \['toy'\] at (http://127\.0\.0\.1:\d+)$",
                server.stdout.readline(),
            )
            toy = {"rewards": ["toy"], "weights": {"TA": 1.0}}
            found = [
                CompositeReward.from_config(RewardConfig(**toy, **where), prompts)
                for where in ({}, {"url": url})
            ]
            here_and_there = [each.score(videos, samples(*prompts)) for each in found]
        finally:
            server.terminate()
    assert here_and_there[0].keys() == here_and_there[1].keys()
    assert all(
        torch.equal(value, here_and_there[1][name])
        for name, value in here_and_there[0].items()
    )


def awkward(videos: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
    """Every type of number that a reward may return."""
    mean = videos.double().mean((1, 2, 3, 4)) / 3
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    scores: dict[str, Any] = {str(dtype): mean.to(dtype) for dtype in types}
    scores |= {
        "list": mean.tolist(),
        "numpy": mean.numpy(),
        "numpy32": mean.numpy().astype(np.float32),
    }
    return scores | {"tensors": list(mean), "gradient": mean.clone().requires_grad_()}


def test_served_scores_are_those_of_this_process_to_the_bit(
    serve: Callable[..., str],
) -> None:
    name = f"{__name__}:awkward"
    config = {"rewards": [here("brightness"), name], "weights": {"brightness": 1.0}}
    inline, served = (
        rewards(url, **config).score(VIDEOS, SAMPLES)
        for url in (None, serve("brightness", name))
    )
    assert inline.keys() == served.keys() and len(inline) == 10
    for key in inline:
        assert torch.equal(inline[key], served[key]), key


def test_another_environment_scores_the_toy_run(
    other_python: Path,
    packages: Path,
    tiny_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampling, updates and evaluation come out the same, number for number."""
    Run(tiny_run(f"--reward.python={other_python}", *STYLE_RUN)).train()
    folder = Path(tiny_run().output_dir)
    folder.rename(folder.with_name("served"))
    monkeypatch.syspath_prepend(packages)
    Run(tiny_run(*STYLE_RUN)).train()
    served = numbers(folder.with_name("served"))
    assert served == numbers(folder)
    assert {"reward/style_mean", "eval/paired_gain"} <= set().union(*served)


@pytest.mark.parametrize(
    "rewards", [["toy"], ["ocr"], ["ocr", here("both")], [here("both"), "clip_score"]]
)
def test_a_file_of_rewards_alone_is_served(rewards: list[str], tmp_path: Path) -> None:
    """Weights are the trainers' affair."""
    (tmp_path / "rewards.yaml").write_text(json.dumps({"reward": {"rewards": rewards}}))
    assert server._read_spec([str(tmp_path / "rewards.yaml")], [])["rewards"] == {
        name: {} for name in rewards
    }


def test_rewards_that_ship_stay_here_when_another_interpreter_has_the_rest(
    other_python: Path,
) -> None:
    config = RewardConfig(
        rewards=["toy", "style:Style"],
        weights={"VQ": 1.0, "style": 1.0},
        python=str(other_python),
    )
    found = CompositeReward.from_config(config)
    assert (
        next(iter(found.rewards)) == "toy"
        and len(found.rewards) == 2
        and found.thread is None
    )
    # another user of this machine has none
    with pytest.raises(RewardServerError, match="the token in"):
        RemoteReward(list(found.rewards.values())[1].url, None)  # type: ignore[attr-defined]
    toy = torch.zeros(1, 8, 3, 16, 16, dtype=torch.uint8)
    assert {"VQ", "style"} <= found.score(toy, SAMPLES[:1]).keys()


def test_options_and_names_that_differ_from_the_servers_are_refused(
    serve: Callable[..., str],
) -> None:
    url = serve("Bright", options={here("Bright"): {"scale": 2.0}})
    config: dict[str, Any] = {"rewards": [here("Bright")], "weights": {"bright": 1.0}}
    assert rewards(url, **config).score(VIDEOS, SAMPLES)["bright"].shape == (3,)
    with pytest.raises(
        ConfigError,
        match=r"has '.*Bright' with the options \{'scale': 2\.0.*\}, not \{'scale': 3\.0\}\. Start",
    ):
        rewards(url, options={here("Bright"): {"scale": 3.0}}, **config)
    with pytest.raises(
        ConfigError,
        match="has 'tests.rewards.support:brightness' with the options None",
    ):
        rewards(url)


def test_a_server_that_was_told_no_rate_is_held_to_its_default(
    serve: Callable[..., str],
) -> None:
    section = RewardConfig(
        url=serve("timed"), rewards=[here("timed")], weights={"timed": 1.0}
    )
    assert (
        CompositeReward.from_config(section, fps=24.0)
        .score(VIDEOS, SAMPLES)["timed"]
        .tolist()
        == [24.0] * 3
    )
    with pytest.raises(
        ConfigError, match=r"options \{'fps': 24\.0\}, not \{'fps': 8\.0\}\. Start"
    ):
        CompositeReward.from_config(section, fps=8.0)


@pytest.mark.parametrize("served", [False, True])
def test_what_a_reward_says_of_its_scores_and_prompts_is_heard(
    served: bool, serve: Callable[..., str]
) -> None:
    def build(name: str, score: str) -> CompositeReward:
        section = RewardConfig(
            url=serve(name) if served else None,
            rewards=[here(name)],
            weights={score: 1.0},
        )
        return CompositeReward.from_config(section, ["a cat", "a dog"])

    with pytest.raises(
        ConfigError,
        match=r"reward\.weights\.falling is 1, but its reward says that lower is better",
    ):
        build("falling", "falling")
    with pytest.raises(
        ConfigError, match=r"data.prompts or evaluation.prompts: .*no score for 'a dog'"
    ):
        build("Choosy", "cats")


# ------------------------------------------------------------------------------------------
# failures


@pytest.mark.parametrize("fault", ["crash", "sys.exit"])
def test_a_failing_reward_is_named_and_the_server_goes_on(
    fault: str, serve: Callable[..., str]
) -> None:
    name = here("Faulty")
    url = serve("Faulty", options={name: {"fault": fault}})
    found, batch = (
        rewards(url, rewards=[name], weights={"score": 1.0}),
        support.samples("good", "bad"),
    )
    with pytest.raises(RewardError, match=r"Faulty raised \w+: .*prompt 7 \('bad'\)"):
        found.score(VIDEOS[1:2], batch[1:])
    scores, failed = found.score_or_mark(VIDEOS[:2], batch)
    assert failed.tolist() == [False, True] and scores["score"][
        0
    ] == support.brightness(VIDEOS[:1], ["good"])


class Counting:
    """Brightness and the number of the call, which two batches at once would share."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, 0

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
        call = self.calls + 1
        time.sleep(self.seconds)
        self.calls = call
        return {
            "calls": torch.full((len(videos),), float(call)),
            "bright": support.brightness(videos, prompts),
        }


COUNTING: dict[str, Any] = {
    "rewards": [f"{__name__}:Counting"],
    "weights": {"calls": 1.0},
}


def test_a_slow_reward_is_waited_for(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_AFTER", 0.05)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    name = COUNTING["rewards"][0]
    found = rewards(serve(name, options={name: {"seconds": 1.0}}), **COUNTING)
    assert [found.score(VIDEOS, SAMPLES)["calls"][0].item() for _ in range(2)] == [
        1.0,
        2.0,
    ]


@pytest.mark.parametrize("lost", ["reply", "half of it", "timeout"])
def test_a_repeated_request_gets_the_same_result(
    lost: str, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, requests = COUNTING["rewards"][0], list[str]()
    found = rewards(serve(name), **COUNTING)
    monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    reply = server._Handler._reply

    def lose(handler: Any, status: int, answer: Mapping[str, Any]) -> None:
        requests.append(handler.path)
        if len(requests) > 2:
            return reply(handler, status, answer)
        handler.close_connection = True
        if lost == "half of it":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        elif lost == "timeout":
            time.sleep(0.7)
        return None

    monkeypatch.setattr(server._Handler, "_reply", lose)
    assert found.score(VIDEOS, SAMPLES)["calls"].tolist() == [1.0, 1.0, 1.0]
    assert len(requests) == 3 and len(set(requests)) == 1


def again(videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    return {"brightness": support.brightness(videos, prompts)}


def test_a_server_takes_a_score_of_one_reward_alone(serve: Callable[..., str]) -> None:
    second = f"{__name__}:again"
    served = rewards(serve("brightness", second), rewards=[here("brightness"), second])
    with pytest.raises(
        RewardError,
        match=r"again raised ValueError: another reward also returns \['brightness'\]",
    ):
        served.score(VIDEOS, samples(*PROMPTS))


def test_what_comes_with_a_wrong_token_is_not_read(serve: Callable[..., str]) -> None:
    """Neither as a batch nor as the next request."""
    port = int(serve("brightness", token="right").rpartition(":")[2])
    body = b"GET /health HTTP/1.1\r\nAuthorization: Bearer right\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = (
            "POST /score/1 HTTP/1.1\r\nAuthorization: Bearer "
            f"wrong\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        with suppress(ConnectionResetError):
            answer = b""
            while part := connection.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 401 ") and answer.count(b"HTTP/1.1 ") == 1


def test_half_a_batch_is_not_scored(serve: Callable[..., str]) -> None:
    """A connection that breaks while videos are sent leaves nothing behind that a
    repeated request would get.
    """
    url = serve("brightness")
    reward, (host, port) = (
        RemoteReward(url, None),
        url.removeprefix("http://").split(":"),
    )
    body = save({"videos": VIDEOS}, {"prompts": json.dumps(PROMPTS)})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /score/7 HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body[:-100]
        )
    for _ in range(20):
        assert reward._ask("/score/7")["state"] == "unknown"
        time.sleep(0.01)
    assert (
        reward._ask("/score/7", body)["scores"]["brightness"]
        == support.brightness(VIDEOS, PROMPTS).tolist()
    )


def score_and_kill(score: Any, process: Any, nap: Path) -> Any:
    """Score a batch, and `kill -9` the server in the middle of it; the pending result."""
    pending = ThreadPoolExecutor(1).submit(score, VIDEOS, SAMPLES)
    while not nap.exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    return pending


DROWSY: dict[str, Any] = {"rewards": [here("drowsy")], "weights": {"drowsy": 1.0}}


def test_a_child_that_is_killed_in_a_batch_stops_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No video is at fault, so none is marked as failed."""
    monkeypatch.setenv("NAP", str(tmp_path / "nap"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    )
    found = rewards(python=Path(sys.executable), **DROWSY)
    (reward,) = found.rewards.values()
    assert isinstance(reward, RemoteReward) and reward.child is not None
    pending = score_and_kill(found.score_or_mark, reward.child, tmp_path / "nap")
    with pytest.raises(
        RewardServerError, match=r"process of reward\.python .* ended, status -9"
    ):
        pending.result(60)


def start_process(
    name: str, nap: Path, port: int = 0
) -> tuple[subprocess.Popen[str], str]:
    """Start a server as another process, and read its address."""
    config = nap.with_suffix(".json")
    config.write_text(json.dumps({"rewards": {here(name): {}}}))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "NAP": str(nap)}
    command = [sys.executable, SERVER, config, "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restarted", "message"),
    [
        ("drowsy", None),
        ("brightness", "has other rewards or options now"),
        (None, r"has not answered for 3 s \(.*refused"),
    ],
)
def test_a_server_that_is_killed_in_a_batch(
    restarted: str | None,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Started again, the batch goes there; with other options, or not at all, the run
    stops.
    """
    nap = tmp_path / "nap"
    process, url = start_process("drowsy", nap)
    monkeypatch.setattr(remote, "PATIENCE", 120.0 if restarted else 3.0)
    pending = score_and_kill(rewards(url, **DROWSY).score, process, nap)
    process.wait()
    if restarted:
        process, _ = start_process(restarted, nap, int(url.rpartition(":")[2]))
    try:
        if message is None:
            assert torch.equal(
                pending.result(60)["drowsy"],
                support.brightness(VIDEOS, PROMPTS).double(),
            )
        else:
            with pytest.raises(RewardServerError, match=message):
                pending.result(60)
    finally:
        process.kill()
        process.wait()


def test_a_child_ends_with_the_run_and_all_that_it_started(other_python: Path) -> None:
    found = rewards(
        python=other_python, rewards=["style:starter"], weights={"starter": 1.0}
    )
    pids = found.score(VIDEOS, SAMPLES)["starter"].int().tolist()
    found.close()
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    deadline = time.monotonic() + 10
    while any(
        state.exists() and state.read_text().split()[2] != "Z" for state in states
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_ends_with_its_parent(other_python: Path) -> None:
    (reward,) = rewards(
        python=other_python, rewards=["style:Style"], weights={"style": 1.0}
    ).rewards.values()
    assert (
        isinstance(reward, RemoteReward)
        and reward.child is not None
        and reward.child.stdin is not None
    )
    reward.child.stdin.close()  # the kernel does so where the parent is killed
    assert reward.child.wait(10) == 0


@pytest.mark.parametrize(
    ("python", "name", "message"),
    [
        (
            "/nowhere/python",
            "style:Style",
            r"'/nowhere/python', which cannot be started: .*No such file",
        ),
        (
            "/bin/true",
            "style:Style",
            "which cannot (serve .*it ended with status 0|be started: .*Broken pipe)",
        ),
        (
            None,
            "absent:Nothing",
            r"'absent:Nothing' is not in .*python: .*No module named 'absent'",
        ),
        (
            None,
            "toy",
            r"\['toy'\] are scored in this process: .* Set reward.python to null",
        ),
    ],
)
def test_a_child_that_cannot_serve_is_a_config_error(
    python: str | None, name: str, message: str, other_python: Path
) -> None:
    with pytest.raises(ConfigError, match=f"reward.python is .*{message}"):
        rewards(python=Path(python or other_python), rewards=[name])


def test_a_server_that_never_answered_is_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is started a moment later is found, and one that has answered is waited
    for as long as before.
    """
    assert remote.FIRST_PATIENCE <= 10 < remote.PATIENCE
    monkeypatch.setattr(remote, "FIRST_PATIENCE", 0.3)
    with pytest.raises(
        RewardServerError,
        match=r"127\.0\.0\.1:9 has not answered for 0\.3 s \(.*refused.*Start it: ",
    ):
        rewards("http://127.0.0.1:9")


def test_rewards_do_not_see_what_another_did_to_the_videos(
    serve: Callable[..., str],
) -> None:
    url = serve("darkens", "brightness")
    found = rewards(
        url, rewards=[here("darkens"), here("brightness")], weights={"brightness": 1.0}
    )
    assert torch.equal(
        found.score(VIDEOS, SAMPLES)["brightness"],
        support.brightness(VIDEOS, PROMPTS).double(),
    )


# ------------------------------------------------------------------------------------------
# sharing, safety


def test_trainers_share_a_server(serve: Callable[..., str]) -> None:
    """Their batches are scored one after another, and each gets its own scores."""
    name = COUNTING["rewards"][0]
    url = serve(name, options={name: {"seconds": 0.005}})
    found = [rewards(url, **COUNTING) for _ in range(2)]

    def train(which: int) -> list[float]:
        calls = []
        for batch in range(20):
            videos = VIDEOS // (2 + which) + batch
            scores = found[which].score(videos, SAMPLES)
            assert torch.equal(
                scores["bright"], support.brightness(videos, PROMPTS).double()
            )
            calls.append(scores["calls"][0].item())
        return calls

    with ThreadPoolExecutor(2) as trainers:
        one, other = trainers.map(train, range(2))
    assert sorted(one + other) == list(range(1, 41))


def test_a_batch_that_waits_for_its_turn_is_kept(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More trainers than results are kept, each with one batch."""
    monkeypatch.setattr(server, "MOST_KEPT", 2)
    monkeypatch.setattr(server, "ANSWER_AFTER", 0.01)
    url = serve(f"{__name__}:late")
    clients = [RemoteReward(url, None) for _ in range(24)]
    with ThreadPoolExecutor(len(clients)) as trainers:
        answers = [
            trainers.submit(client.score, VIDEOS[:1], [f"{n}"])
            for n, client in enumerate(clients)
        ]
        assert [answer.result(60)["late"].tolist() for answer in answers] == [
            [n] for n in range(len(clients))
        ]


def late(videos: Tensor, prompts: Sequence[str]) -> list[float]:
    time.sleep(0.02)
    return [float(prompt) for prompt in prompts]


class Front(ThreadingHTTPServer):
    """One address, where `answer` is what a test makes of the answers of reward
    servers.
    """

    token = None
    daemon_threads = True

    def __init__(
        self, answer: Callable[[str, bytearray | None], dict[str, Any]]
    ) -> None:
        self.answer = answer
        super().__init__(("127.0.0.1", 0), server._Handler)
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()


@contextmanager
def client_of(
    answer: Callable[[str, bytearray | None], dict[str, Any]],
) -> Iterator[RemoteReward]:
    with Front(answer) as front:
        yield RemoteReward(f"http://127.0.0.1:{front.server_port}", None)
        front.shutdown()


def test_servers_that_share_an_address_are_named() -> None:
    """Each has its own batches, so that a client would ask one for the result of
    another.
    """
    several = [RewardServer({"rewards": {here("brightness"): {}}}) for _ in range(3)]
    turns = itertools.cycle(several)
    with (
        client_of(lambda path, body: next(turns).answer(path, body)) as client,
        pytest.raises(
            RewardServerError, match="Several servers answer at http.* in turn"
        ),
    ):
        for _ in range(4):
            client.score(VIDEOS, PROMPTS)
    for each in several:
        each.server_close()


def test_a_server_that_was_started_again_a_few_times_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[RewardServer] = []

    def answer(path: str, body: bytearray | None) -> dict[str, Any]:
        # It dies with every batch until it has had three.
        if (body is not None and len(made) < 4) or not made:
            made.append(RewardServer({"rewards": {here("brightness"): {}}}))
            return (
                made[-1].answer("/score/other", None)
                if body
                else made[-1].answer(path, None)
            )
        return made[-1].answer(path, body)

    with client_of(answer) as client:
        assert torch.equal(
            client.score(VIDEOS, PROMPTS)["brightness"],
            support.brightness(VIDEOS, PROMPTS).double(),
        )
    for each in made:
        each.server_close()


def test_a_server_that_loses_every_batch_is_given_up() -> None:
    only = RewardServer({"rewards": {here("brightness"): {}}})

    def answer(path: str, body: bytearray | None) -> dict[str, Any]:
        return (
            only.answer("/score/other", None)
            if path.startswith("/score")
            else only.answer(path, body)
        )

    with (
        client_of(answer) as client,
        pytest.raises(
            RewardServerError,
            match="has lost a batch 11 times: it is started again and again",
        ),
    ):
        client.score(VIDEOS, PROMPTS)
    only.server_close()


def test_a_batch_is_no_longer_waited_for_once_the_run_has_ended(
    serve: Callable[..., str],
) -> None:
    """As where the server's reward hangs, and the user has ended the run."""
    client = RemoteReward(serve("brightness"), None)
    client._ask = lambda *_, **__: {"state": "scoring"}  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.score, VIDEOS, PROMPTS)
        assert not waiting.done()
        client.close()
        with pytest.raises(RewardServerError, match="ended while"):
            waiting.result(10)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"server": "a"}, "is not a reward server: a batch is answered by {"),
        ({"scores": [1.0, 2.0, 3.0]}, "is not a reward server: a batch is answered by"),
        (
            {"scores": {"brightness": {"a": 1}}},
            "is not a reward server: a batch is answered by",
        ),
        (
            {"scores": {"brightness": ["x"]}},
            "is not a reward server: a batch is answered by",
        ),
    ],
    ids=["none", "list", "mapping", "text"],
)
def test_scores_that_are_none_are_no_error_of_python(
    answers: dict[str, Any], message: str
) -> None:
    only = RewardServer({"rewards": {here("brightness"): {}}})

    def answer(path: str, body: bytearray | None) -> dict[str, Any]:
        return (
            {"serves": only.serves, **answers}
            if path.startswith("/score")
            else only.answer(path, body)
        )

    with client_of(answer) as client, pytest.raises(RewardServerError, match=message):
        client.score(VIDEOS, PROMPTS)
    only.server_close()


@pytest.mark.parametrize("way", ["trickles", "is endless"])
def test_an_answer_that_does_not_end_is_given_up(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 2**18)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            part = b"[" if way == "trickles" else b"[" * 2**16
            with suppress(OSError):
                while True:
                    self.wfile.write(part)
                    time.sleep(0.02)

        def log_message(self, *_: object) -> None:
            pass

    reason = (
        "not complete within 1 s" if way == "trickles" else "larger than 262,144 bytes"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        other.daemon_threads = True
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        with pytest.raises(
            RewardServerError, match=f"has not answered for 0.5 s.*{reason}"
        ):
            RemoteReward(f"http://127.0.0.1:{other.server_port}", None)
        other.shutdown()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            '{"scores": {"brightness": [1, 1, 1]}}',
            "is not a reward server: /health answers",
        ),
        ('{"rewards": {}}', "is not a reward server: /health answers"),
        (
            '{"serves": "x", "rewards": {"brightness": {}}}',
            "is not a reward server: /health answers",
        ),
        (
            '{"serves": "x", "rewards": {"brightness": 3}}',
            "is not a reward server: /health answers",
        ),
        ("hello", "has not answered for 0 s"),
        ("[" * 100_000, "has not answered for 0 s .*nested too deep"),
    ],
)
def test_nothing_is_taken_from_a_server_of_something_else(
    answer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "health").write_text(answer)
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    ) as other:
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        with pytest.raises(RewardServerError, match=message):
            RemoteReward(f"http://127.0.0.1:{other.server_port}", None)
        other.shutdown()


def test_a_token_is_asked_for_and_needed_where_other_machines_reach_the_server(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve("brightness", token="secret")
    for sent in ("", "wrong", "secré"):
        monkeypatch.setenv(server.TOKEN, sent)
        with pytest.raises(
            RewardServerError,
            match="token in SAGE_FAST_REWARD_TOKEN is not that of the server",
        ):
            rewards(url)
    monkeypatch.setenv(server.TOKEN, "secret")
    assert len(rewards(url).score(VIDEOS, SAMPLES)["brightness"]) == 3
    with pytest.raises(
        SetupError,
        match=r"--host is 0\.0\.0\.0, which other machines reach\. Set SAGE_FAST_REWARD",
    ):
        RewardServer({"rewards": {}}, "0.0.0.0")
    for given in ({}, {"host": "localhost"}):
        with RewardServer({"rewards": {}}, **given) as alone:
            assert alone.server_address[0] == "127.0.0.1"


def test_a_run_directory_names_no_program_and_no_server_without_trust(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    for key, value in (("python", "/tmp/theirs"), ("url", "http://theirs:80")):
        word = f"--reward.{key}={value}"
        config = tiny_run(word, "--reward.rewards=[toy]")
        with pytest.raises(ConfigError, match=f"names '{value}' under reward.{key}"):
            check_trust(config, tmp_path, named_code([], []))
        check_trust(config, tmp_path, named_code([], [word]))


# ------------------------------------------------------------------------------------------
# the rest of a run


def test_sampling_goes_on_while_a_server_scores(
    serve: Callable[..., str], tiny_run: MakeRun
) -> None:
    name = COUNTING["rewards"][0]
    words = (
        f"--reward.rewards=[{name}]",
        "--reward.weights={calls: 1.0}",
        "--rollout.micro_batch_size=1",
    )
    trainer = build_trainer(
        tiny_run(
            *words, f"--reward.url={serve(name, options={name: {'seconds': 0.5}})}"
        )
    )
    reward = next(iter(trainer.reward.rewards.values()))
    decode, busy, scorings, scoring = (
        trainer.decoder.decode,
        list[int](),
        [],
        trainer._new_scoring,
    )
    trainer._new_scoring = lambda **options: (
        scorings.append(scoring(**options)) or scorings[-1]
    )  # type: ignore

    def watch(latents: Tensor) -> Tensor:
        busy.append(sum(not batch.done() for batch in scorings[-1].pending))
        return decode(latents)

    trainer.decoder.decode = watch  # type: ignore[method-assign]
    record = trainer.iterate()
    assert isinstance(reward, RemoteReward) and record["reward/calls_mean"] == 2.5
    assert max(busy) > 0


def test_doctor_and_plan_ask_for_nothing_of_a_served_reward(tiny_run: MakeRun) -> None:
    from sage_fast.planning.memory import rewards_here

    words = ["--reward.rewards=[absent:Judge]", "--reward.weights={judge: 1.0}"]
    places = {
        "url=http://127.0.0.1:9": "info",
        f"python={sys.executable}": "info",
        "python=/nowhere/python": "missing",
    }
    for place, status in places.items():
        config = tiny_run(*words, f"--reward.{place}")
        (check,) = [
            check for check in examine(config) if check.name == "reward absent:Judge"
        ]
        assert check.status == status, check
        assert rewards_here(config)["absent:Judge"].weights == 0
