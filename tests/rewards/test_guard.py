"""A run does not notice what a reward changes of the process or of what it is given; a
warning names the reward.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sage_fast.config.errors import RewardError
from sage_fast.config.load import dump_config
from sage_fast.config.registry import REWARDS
from sage_fast.config.schema import RunConfig
from sage_fast.config.sections import RewardConfig
from sage_fast.rewards.base import find_reward
from sage_fast.rewards.composite import CompositeReward
from sage_fast.rewards.guard import process_state, running_threads
from sage_fast.rewards.server import FunctionReward, build_reward
from sage_fast.run.run import build_trainer
from tests.rewards.support import VIDEOS, samples

MakeRun = Callable[..., RunConfig]
RECORDS = samples("a", "bb", "c")
EXPECTED = VIDEOS.float().mean((1, 2, 3, 4)).double()
NAME = f"{__name__}:Leaves"


def _enter_inference() -> None:
    KEPT.append(torch.inference_mode())
    KEPT[-1].__enter__()


CHANGES: dict[str, Callable[[], object]] = {
    "the working directory": lambda: os.chdir("/"),
    "os.environ (ADDED)": lambda: os.environ.update(ADDED="1"),
    "os.environ (HOME)": lambda: os.environ.pop("HOME"),
    "sys.stdin, stdout or stderr": lambda: setattr(sys, "stdout", None),
    "the handlers of signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "torch's default dtype (torch.float32 -> torch.bfloat16)": lambda: (
        torch.set_default_dtype(torch.bfloat16)
    ),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's grad or inference mode": lambda: torch.set_grad_enabled(False),
    "torch's grad or inference mode ": _enter_inference,
    "torch's anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "torch's number of threads": lambda: torch.set_num_threads(2),
    "torch's flushing of denormal numbers": lambda: torch.set_flush_denormal(True),
    "torch's autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "torch's precision of float32": lambda: torch.set_float32_matmul_precision(
        "medium"
    ),
    "torch's precision of float32 ": lambda: setattr(
        torch.backends, "fp32_precision", "tf32"
    ),
    "functions of torch.nn.functional (gelu)": lambda: setattr(
        torch.nn.functional, "gelu", torch.nn.functional.relu
    ),
    "torch.backends.cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch's kernels of attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.backends.cuda.matmul": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_accumulation", True
    ),
    "the videos that it was given": lambda: GIVEN[-1][0].zero_(),
}
"""Words of the warning -> a change."""

SEEDS = {"seeds": lambda: (random.seed(0), np.random.seed(0), torch.manual_seed(0))}
"""Not put back: the global generators are there for rewards."""

KEPT: list[Any] = []
GIVEN: list[tuple[Tensor, list[str]]] = []


class Leaves:
    """Scores brightness; leaves something changed after its first call, or as it is
    built.
    """

    def __init__(self, what: Sequence[str] = (), when: str = "score") -> None:
        self.what = list(what)
        self.seen: list[Any] = []
        if when == "build":
            self._change()

    def _change(self) -> None:
        while self.what:
            (CHANGES | SEEDS)[self.what.pop(0)]()

    def score(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        scores = videos.float().mean((1, 2, 3, 4))
        self.seen = [os.getcwd(), signal.getsignal(signal.SIGTERM)]
        GIVEN.append((videos, prompts))
        self._change()
        prompts.clear()
        return {"bright": scores}


def composite(*what: str, when: str = "score") -> CompositeReward:
    section = RewardConfig(
        rewards=[NAME],
        weights={"bright": 1.0},
        options={NAME: {"what": list(what), "when": when}},
    )
    return CompositeReward.from_config(section)


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_call_changes_is_put_back_and_told_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = process_state()
    reward = composite(what)
    videos = VIDEOS.clone()
    (leaves,) = reward.rewards.values()
    assert isinstance(leaves, Leaves)
    for _ in range(2):
        assert torch.equal(reward.score(videos, RECORDS)["bright"], EXPECTED)
        assert process_state() == before and torch.equal(videos, VIDEOS)
        assert leaves.seen[0] == os.getcwd()  # each call begins alike
        leaves.what = [what]
    (told,) = caplog.messages
    assert told.startswith(f"Reward '{NAME}' changed {what.strip()}")
    assert "on prompt 7 ('a'), sample 0" in told


def test_a_run_has_the_numbers_of_one_whose_reward_changes_nothing(
    tiny_run: MakeRun,
) -> None:
    """Weights and metrics, with everything changed at once in its first call."""

    def train(**options: Any) -> tuple[dict[str, float], list[Tensor]]:
        config = tiny_run(
            f"--reward.rewards=[{NAME}]",
            "--reward.weights={bright: 1.0}",
            f"--reward.options={{{NAME}: {options}}}",
        )
        trainer = build_trainer(config)
        record = trainer.iterate()
        metrics = {key: value for key, value in record.items() if "time/" not in key}
        return metrics, list(trainer.parameters.values())

    clean, clean_weights = train()
    metrics, weights = train(what=[*CHANGES, *SEEDS])
    assert metrics == clean and all(map(torch.equal, weights, clean_weights))


def test_what_is_changed_at_set_up_is_there_in_every_call_but_for_signals() -> None:
    here = os.getcwd()
    handler = signal.getsignal(signal.SIGTERM)
    found = composite("the working directory", "the handlers of signals", when="build")
    for _ in range(2):
        assert os.getcwd() == here
        found.score(VIDEOS, RECORDS)
        (reward,) = found.rewards.values()
        assert isinstance(reward, Leaves) and reward.seen == ["/", handler]


def test_a_reward_that_raises_changes_nothing_either() -> None:
    before = process_state()

    def fails(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        raise RuntimeError("no")

    reward = CompositeReward({"mine": FunctionReward(fails, "s", {})}, {"s": 1.0})
    with pytest.raises(RewardError, match="'mine' raised RuntimeError: no on prompt 7"):
        reward.score(VIDEOS, RECORDS)
    assert process_state() == before


def test_a_module_is_guarded_as_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever asks for it: doctor and plan build no reward."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "moves.py").write_text("import os\nos.chdir('/')\nnear = 1\n")
    before = process_state()
    find_reward("moves:near")
    assert process_state() == before
    (told,) = caplog.messages
    assert (
        told.startswith("Reward 'moves:near' changed the working directory (")
        and "while it was imported" in told
    )


def test_options_and_results_are_copies() -> None:
    kept = torch.zeros(3, dtype=torch.float64)

    def grows(videos: Tensor, prompts: Sequence[str], *, table: list[int]) -> Tensor:
        table.append(1)
        return kept.add_(len(table))

    options = {"table": [0]}
    reward = build_reward("grows", grows, options)
    found = CompositeReward({"mine": reward}, {"grows": 1.0})
    first = found.score(VIDEOS, RECORDS)["grows"]
    second = found.score(VIDEOS, RECORDS)["grows"]
    assert options == {"table": [0]}
    assert first.tolist() == [2.0] * 3 and second.tolist() == [5.0] * 3


def test_shipped_rewards_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    CompositeReward.from_config(RewardConfig(), [])
    for name in REWARDS:
        find_reward(name)
    assert not caplog.messages


# --------------------------------------------------------------------------------------
# processes, threads


def scores_by(function: Callable[[Tensor, Sequence[str]], Tensor]) -> CompositeReward:
    """A run's reward of this function, called once."""
    reward = CompositeReward({"mine": FunctionReward(function, "s", {})}, {"s": 1.0})
    reward.score(VIDEOS, RECORDS)
    return reward


def test_processes_end_with_the_run(tmp_path: Path) -> None:
    """Also those that a shell leaves behind; others go on."""
    command = f"sleep 60 & echo $! > {tmp_path}/left"
    other = subprocess.Popen(["sleep", "60"])
    own: list[int] = []

    def starts(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        subprocess.run(command, shell=True, check=True)
        own.append(subprocess.Popen(["sleep", "60"]).pid)
        return torch.zeros(3)

    reward = scores_by(starts)
    left = int((tmp_path / "left").read_text())
    os.kill(left, 0)
    reward.close()
    for pid in (*own, left):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert other.poll() is None
    other.kill()
    other.wait()


STAYS = """
import threading, time
def stays(videos, prompts):
    threading.Thread(target=time.sleep, args=(3600,), name="poll").start()
    return videos.float().mean((1, 2, 3, 4))
"""


@pytest.mark.slow
def test_a_command_ends_without_the_threads_of_a_reward(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(STAYS)
    config = tiny_run(
        "--reward.rewards=[own:stays]",
        "--reward.weights={stays: 1.0}",
        "--evaluation.every=0",
    )
    (tmp_path / "own.yaml").write_text(dump_config(config))
    command = [sys.executable, "-m", "sage_fast", "train", str(tmp_path / "own.yaml")]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and "Done: look at" in ended.stdout
    assert "Reward 'own:stays' has started the thread 'poll', which" in ended.stderr


def test_a_thread_that_stays_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """One that nothing waits for is not, nor an executor's."""
    end = threading.Event()
    executor = ThreadPoolExecutor(1)

    def starts(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        threading.Thread(target=end.wait, name="poll").start()
        threading.Thread(target=end.wait, daemon=True).start()
        executor.submit(int).result()
        return torch.zeros(3)

    reward = scores_by(starts)
    assert running_threads() == {"poll": "mine"}
    reward.close()
    end.set()
    (told,) = caplog.messages
    assert told.startswith(
        "Reward 'mine' has started the thread 'poll', which is still"
    )
