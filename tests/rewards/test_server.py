"""Rewards in another process: the same scores to the bit, from another environment,
slow, killed, or shared.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import ConfigError, RewardError, RewardServerError
from sage_fast.config.load import check_trust, named_code
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RewardConfig
from sage_fast.rewards import remote, server
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.remote import RemoteReward
from sage_fast.rewards.server import RewardServer, SetupError
from sage_fast.run.run import build_trainer
from sage_fast.tools.diagnosis import examine
from tests.rewards import support
from tests.rewards.support import VIDEOS, here, samples

MakeRun = Callable[..., RunConfig]
Serve = Callable[..., str]
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


def drowsy(videos, prompts):
    import os, pathlib, time
    pathlib.Path(os.environ["NAP"]).touch()
    time.sleep(60)
'''


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
    numpy = Path(np.__file__).parent
    for source in (numpy, numpy.with_name("numpy.libs"), *packages.iterdir()):
        (site / source.name).symlink_to(source)
    return folder / "bin/python"


def rewards(
    url: str | None = None,
    python: Path | None = None,
    fps: float | None = None,
    prompts: Sequence[str] = (),
    **config: Any,
) -> CompositeReward:
    config = {"rewards": [here("brightness")], "weights": {"brightness": 1.0}} | config
    section = RewardConfig(url=url, python=python and str(python), **config)
    return CompositeReward.from_config(section, prompts, fps=fps)


@pytest.fixture
def serve(started: Callable[[ThreadingHTTPServer], str]) -> Serve:
    """Start a server of rewards of this process, and give its address."""

    def start(*names: str, token: str | None = None, **options: Any) -> str:
        spec = {"rewards": {here(name): options for name in names}}
        return started(RewardServer(spec, token=token))

    return start


HEALTH = {"rewards": {here("brightness"): {"options": {}, "lower_is_better": []}}}


@pytest.fixture
def scripted(started: Callable[[ThreadingHTTPServer], str]) -> Serve:
    """Start a server that answers the nth request by the nth of some texts, and all
    later ones by the last; nothing at all for None.
    """

    def start(*answers: str | None) -> str:
        left = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = left.pop(0) if len(left) > 1 else left[0]
                if answer is not None:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(answer.encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        return started(ThreadingHTTPServer(("127.0.0.1", 0), Handler))

    return start


# --------------------------------------------------------------------------------------
# the same scores


@pytest.mark.slow  # the process imports torch
def test_the_command_serves_a_preset() -> None:
    command = [sys.executable, "-m", "sage_fast.rewards.server", "toy_cpu", "--port=0"]
    videos = torch.zeros(1, 4, 3, 16, 16, dtype=torch.uint8)
    prompts = samples("a red circle moving left")
    toy = {"rewards": ["toy"], "weights": {"TA": 1.0}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            hello = server.stdout.readline()
            found = re.findall(r"^Serving \['toy'\] at (http://127.0.0.1:\d+)$", hello)
            served = rewards(*found, **toy).score(videos, prompts)
        finally:
            server.terminate()
    assert served == rewards(**toy).score(videos, prompts)


def awkward(videos: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
    """Every type of number that a reward may return."""
    mean = videos.double().mean((1, 2, 3, 4)) / 3
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {str(dtype): mean.to(dtype) for dtype in types} | {
        "list": mean.tolist(),
        "numpy": mean.numpy(),
        "numpy32": mean.numpy().astype(np.float32),
        "tensors": list(mean),
        "gradient": mean.clone().requires_grad_(),
    }


def test_served_scores_are_those_of_this_process_to_the_bit(serve: Serve) -> None:
    """Also where another reward of the server has changed its videos."""
    names = [here("darkens"), here("brightness"), f"{__name__}:awkward"]
    inline, served = (
        rewards(url, rewards=names).score(VIDEOS, SAMPLES)
        for url in (None, serve(*names))
    )
    assert inline.keys() == served.keys() and len(inline) == 11
    for key in inline:
        assert torch.equal(inline[key], served[key]), key
    expected = support.brightness(VIDEOS, PROMPTS).double()
    assert torch.equal(served["brightness"], expected)


@pytest.mark.parametrize("names", [["ocr", here("both")], [here("both")]])
def test_a_file_of_rewards_alone_is_served(names: list[str], tmp_path: Path) -> None:
    """Weights are the trainers' affair."""
    file = tmp_path / "rewards.yaml"
    file.write_text(json.dumps({"reward": {"rewards": names}}))
    spec = server.read_spec([str(file)], [])
    assert spec["rewards"] == {name: {} for name in names}


def test_rewards_that_ship_stay_here_when_another_interpreter_has_the_rest(
    other_python: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are those of this one's to the bit."""
    section: dict[str, Any] = {
        "rewards": ["toy", "style:Style"],
        "options": {"style:Style": {"scale": 0.3}},
        "weights": {"VQ": 1.0, "style": 1.0},
    }
    found = rewards(python=other_python, **section)
    _, style = found.rewards.values()
    assert isinstance(style, RemoteReward) and found.thread is None
    # another user of this machine has none
    with pytest.raises(RewardServerError, match="the token in"):
        RemoteReward(style.url, None)
    videos = torch.randint(0, 256, (1, 8, 3, 16, 16), dtype=torch.uint8)
    monkeypatch.syspath_prepend(packages)
    inline = rewards(**section).score(videos, SAMPLES[:1])
    assert found.score(videos, SAMPLES[:1]) == inline and "style" in inline


BRIGHT: dict[str, Any] = {"rewards": [here("Bright")], "weights": {"bright": 1.0}}
TIMED: dict[str, Any] = {"rewards": [here("timed")], "weights": {"timed": 1.0}}


@pytest.mark.parametrize(
    ("served", "fitting", "other", "message"),
    [
        (
            {"scale": 2.0},
            BRIGHT,
            BRIGHT | {"options": {here("Bright"): {"scale": 3.0}}},
            r"Bright' with the options \{'scale': 2.0\}, not \{'scale': 3.0\}. Start",
        ),
        ({"scale": 2.0}, BRIGHT, {}, ":brightness' with the options None"),
        (
            {},  # it was given no rate, and is held to its default
            TIMED | {"fps": 24.0},
            TIMED | {"fps": 8.0},
            r"options \{'fps': 24.0\}, not \{'fps': 8.0\}. Start",
        ),
    ],
    ids=["options", "names", "rate"],
)
def test_what_differs_from_the_servers_is_refused(
    served: dict[str, Any],
    fitting: dict[str, Any],
    other: dict[str, Any],
    message: str,
    serve: Serve,
) -> None:
    url = serve(*fitting["rewards"], **served)
    assert all(
        len(s) == 3 for s in rewards(url, **fitting).score(VIDEOS, SAMPLES).values()
    )
    with pytest.raises(ConfigError, match=message):
        rewards(url, **other)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(
    ("name", "score", "message"),
    [
        ("falling", "falling", r"weights.falling is 1, .* says that lower is better"),
        (
            "Choosy",
            "cats",
            "data.prompts or evaluation.prompts: .*no score for 'a dog'",
        ),
    ],
)
def test_what_a_reward_says_of_its_scores_and_prompts_is_heard(
    served: bool, name: str, score: str, message: str, serve: Serve
) -> None:
    url = serve(name) if served else None
    asked = {"rewards": [here(name)], "weights": {score: 1.0}}
    with pytest.raises(ConfigError, match=message):
        rewards(url, prompts=["a cat", "a dog"], **asked)


# --------------------------------------------------------------------------------------
# failures


@pytest.mark.parametrize("fault", ["crash", "sys.exit"])
def test_a_failing_reward_is_named_and_the_server_goes_on(
    fault: str, serve: Serve
) -> None:
    url = serve("Faulty", fault=fault)
    found = rewards(url, rewards=[here("Faulty")], weights={"score": 1.0})
    batch = samples("good", "bad")
    with pytest.raises(RewardError, match=r"Faulty raised \w+: .*prompt 7 \('bad'\)"):
        found.score(VIDEOS[1:2], batch[1:])
    scores, failed = found.score_or_mark(VIDEOS[:2], batch)
    assert failed.tolist() == [False, True]
    assert scores["score"][0] == support.brightness(VIDEOS[:1], ["good"])


class Counting:
    """Brightness and the number of the call, which two batches at once would share."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls = 0

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
        call = self.calls + 1
        time.sleep(self.seconds)
        self.calls = call
        bright = support.brightness(videos, prompts)
        return {"calls": [call] * len(videos), "bright": bright}


COUNTING = f"{__name__}:Counting"
counted = partial(rewards, rewards=[COUNTING], weights={"calls": 1.0})


def test_a_slow_reward_is_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BEAT", 0.05)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    found = counted(serve(COUNTING, seconds=0.7))
    assert found.score(VIDEOS, SAMPLES)["calls"].tolist() == [1, 1, 1]


def test_a_batch_is_no_longer_waited_for_once_the_run_has_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server's reward hangs, and the user has ended the run."""
    monkeypatch.setattr(server, "BEAT", 0.05)
    client = RemoteReward(serve(COUNTING, seconds=2.0), None)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.score, VIDEOS, PROMPTS)
        time.sleep(0.1)
        assert not waiting.done()
        client.close()
        with pytest.raises(RewardServerError, match="The run ended while"):
            waiting.result(1.0)


def scored(numbers: object) -> str:
    return json.dumps(HEALTH | {"scores": {"brightness": numbers}})


def test_a_batch_without_a_whole_answer_is_sent_again(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 1.0)
    whole = scored([1, 2, 3])
    found = rewards(
        scripted(json.dumps(HEALTH), json.dumps(HEALTH), None, whole[:-4], "  " + whole)
    )
    assert found.score(VIDEOS, SAMPLES)["brightness"].tolist() == [1, 2, 3]


OTHERS = json.dumps({"rewards": {}, "scores": {"brightness": [1, 1, 1]}})


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (None, RewardServerError, "has not answered for 0.3 s"),
        (scored([1, 2, 3])[:-2], RewardServerError, "has not answered for 0.3 s"),
        (OTHERS, RewardServerError, "has other rewards or options now. Start it as"),
        (json.dumps(HEALTH), RewardServerError, "is not a reward server: a batch is"),
        (scored(["x"] * 3), RewardError, "which is not a tensor of numbers"),
    ],
    ids=["lost", "cut off", "others", "no scores", "no numbers"],
)
def test_no_score_is_made_up_where_a_server_sends_none(
    answer: str | None,
    error: type[Exception],
    message: str,
    scripted: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.3)
    found = rewards(scripted(json.dumps(HEALTH), json.dumps(HEALTH), answer))
    with pytest.raises(error, match=message):
        found.score(VIDEOS, SAMPLES)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"scores": {"brightness": [1, 1, 1]}}', "is not a reward server: /health"),
        ("[1]", "is not a reward server: /health answers"),
        ('{"rewards": {}}', "has '.*:brightness' with the options None"),
        ("hello", "has not answered for 0 s"),
        ("[" * 100_000, "has not answered for 0 s .*nested too deep"),
        (f"[{'1,' * 2**20}1]", "has not answered for 0 s"),
    ],
    ids=["scores", "list", "no rewards", "words", "deep", "long"],
)
def test_nothing_is_taken_from_a_server_of_something_else(
    answer: str, message: str, scripted: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 2**18)
    with pytest.raises((ConfigError, RewardServerError), match=message):
        rewards(scripted(answer))


def again(videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    return {"brightness": support.brightness(videos, prompts)}


def test_a_server_takes_a_score_of_one_reward_alone(serve: Serve) -> None:
    names = [here("brightness"), f"{__name__}:again"]
    message = r"again raised ValueError: another reward also returns \['brightness'\]"
    with pytest.raises(RewardError, match=message):
        rewards(serve(*names), rewards=names).score(VIDEOS, SAMPLES)


def style(python: Path, name: str) -> tuple[CompositeReward, Any]:
    """A reward of that interpreter's, and its process."""
    found = rewards(
        python=python, rewards=[f"style:{name}"], weights={name.lower(): 1.0}
    )
    (reward,) = found.rewards.values()
    assert isinstance(reward, RemoteReward)
    return found, reward.child


def test_a_child_that_is_killed_in_a_batch_stops_the_run_by_name(
    other_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No video is at fault, so none is marked as failed."""
    monkeypatch.setenv("NAP", str(tmp_path / "nap"))
    found, child = style(other_python, "drowsy")
    pending = ThreadPoolExecutor(1).submit(found.score_or_mark, VIDEOS, SAMPLES)
    while not (tmp_path / "nap").exists():
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    message = r"process of reward\.python .* ended, status -9"
    with pytest.raises(RewardServerError, match=message):
        pending.result(60)


def test_a_child_ends_with_the_run_and_all_that_it_started(other_python: Path) -> None:
    found, _ = style(other_python, "starter")
    pids = found.score(VIDEOS, SAMPLES)["starter"].int().tolist()
    found.close()
    deadline = time.monotonic() + 10
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        while state.exists() and state.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_child_ends_with_its_parent(other_python: Path) -> None:
    found, child = style(other_python, "Style")
    child.stdin.close()  # the kernel does so where the parent is killed
    assert child.wait(10) == 0
    found.close()


@pytest.mark.parametrize(
    ("python", "name", "message"),
    [
        ("/nowhere/python", "style:Style", "cannot be started: .*No such file"),
        (
            "/bin/true",
            "style:Style",
            "cannot (serve .*it ended with status 0|be started: .*Broken pipe)",
        ),
        (
            None,
            "absent:Nothing",
            "'absent:Nothing' is not in .*python: .*No module named 'absent'",
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
    assert remote.FIRST_PATIENCE <= 10 < remote.PATIENCE
    monkeypatch.setattr(remote, "FIRST_PATIENCE", 0.3)
    message = r"127\.0\.0\.1:9 has not answered for 0\.3 s \(.*refused.*Start it: "
    with pytest.raises(RewardServerError, match=message):
        rewards("http://127.0.0.1:9")


# --------------------------------------------------------------------------------------
# sharing, safety


def test_trainers_share_a_server(serve: Serve) -> None:
    """Their batches are scored one after another, and each gets its own scores."""
    url = serve(COUNTING, seconds=0.005)

    def train(level: int) -> list[float]:
        found = counted(url)
        videos = VIDEOS // level
        expected = support.brightness(videos, PROMPTS).double()
        calls = []
        for _ in range(10):
            scores = found.score(videos, SAMPLES)
            assert torch.equal(scores["bright"], expected)
            calls.append(scores["calls"][0].item())
        return calls

    with ThreadPoolExecutor(2) as trainers:
        one, other = trainers.map(train, (2, 3))
    assert sorted(one + other) == list(range(1, 21))


def test_a_token_is_asked_for_and_needed_where_other_machines_reach_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve("brightness", token="secret")
    message = "token in SAGE_FAST_REWARD_TOKEN is not that of the server"
    for sent in ("", "wrong", "secré"):
        monkeypatch.setenv(server.TOKEN, sent)
        with pytest.raises(RewardServerError, match=message):
            rewards(url)
    monkeypatch.setenv(server.TOKEN, "secret")
    assert len(rewards(url).score(VIDEOS, SAMPLES)["brightness"]) == 3
    message = r"--host is 0\.0\.0\.0, which other machines reach\. Set SAGE_FAST_REWARD"
    with pytest.raises(SetupError, match=message):
        RewardServer({"rewards": {}}, "0.0.0.0")
    with RewardServer({"rewards": {}}) as alone:
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


# --------------------------------------------------------------------------------------
# the rest of a run


def test_sampling_goes_on_while_a_server_scores(
    serve: Serve, tiny_run: MakeRun
) -> None:
    config = tiny_run(
        f"--reward.rewards=[{COUNTING}]",
        "--reward.weights={calls: 1.0}",
        "--rollout.micro_batch_size=1",
        f"--reward.url={serve(COUNTING, seconds=0.5)}",
    )
    trainer = build_trainer(config)
    reward: Any = next(iter(trainer.reward.rewards.values()))
    decode = trainer.decoder.decode
    score = reward.score
    running: list[object] = []
    scored_while_decoding = []

    def watched_score(videos: Tensor, samples: Any, **options: Any) -> Any:
        running.append(videos)
        scores = score(videos, samples, **options)
        running.clear()
        return scores

    def watched_decode(latents: Tensor) -> Tensor:
        scored_while_decoding.append(bool(running))
        return decode(latents)

    reward.score = watched_score
    trainer.decoder.decode = watched_decode  # type: ignore[method-assign]
    assert trainer.iterate()["reward/calls_mean"] == 2.5
    assert any(scored_while_decoding)


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
