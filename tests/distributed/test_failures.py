"""Whole runs on several ranks: one that dies, hangs or meets NaN ends all; what was saved goes on bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.checkpoint import list_checkpoints
from sage_fast.run.metrics import read_metrics
from tests.conftest import TINY_RUN
from tests.distributed.ranks import free_port, try_ranks
from tests.made_runs import numbers

pytestmark = pytest.mark.slow

UPDATES = 4


def run_file(tiny_model: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    tree = json.loads(json.dumps(TINY_RUN))
    tree["rollout"] |= {"num_generations": 4, "batch_size": 4, "micro_batch_size": 2}
    tree["training"] = {"num_updates": UPDATES}
    tree["checkpoint"] = {"every": 1, "keep_last": 3}
    tree["model"] = {"path": str(tiny_model), "adaln": "weights", "device": "cpu"}
    tree["distributed"] = {"timeout_seconds": 20}
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    file = folder / "run.yaml"
    file.write_text(json.dumps(tree | {"output_dir": str(folder / "run")}))
    return file


def sage_fast(log: str, words: list[str], disturb: Any = None) -> int:
    """The command line on this rank, its terminal going to a file; `disturb(rank)` first."""
    from sage_fast.commands import cli

    rank = int(os.environ["RANK"])
    terminal = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    if disturb is not None:
        disturb(rank)
    return cli.main(words)


def kill_at(victim: int, call: int, rank: int) -> None:
    """Let the rank `victim` die at its progress report number `call`."""
    from sage_fast.distributed.failure import HangGuard

    report, calls = HangGuard.progress, iter(range(10**6))

    def progress(self: HangGuard) -> None:
        report(self)
        if rank == victim and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    HangGuard.progress = progress  # type: ignore[method-assign]


def hang_at(victim: int, update: int, rank: int) -> None:
    """Let the rank `victim` stop before an update."""
    from sage_fast.distributed import failure
    from sage_fast.trainer import Trainer

    failure.STACKS_AFTER, iterate = 2.0, Trainer.iterate

    def hang(self: Trainer) -> dict[str, Any]:
        if rank == victim and self.update == update:
            time.sleep(600)
        return iterate(self)

    Trainer.iterate = hang  # type: ignore[method-assign]


def poison(victim: int, rank: int) -> None:
    """NaN velocities with a graph, on one rank."""
    from sage_fast.policy.guidance import GuidedPolicy

    velocity = GuidedPolicy.velocity

    def poisoned(self: GuidedPolicy, *rest: Any, **options: Any) -> torch.Tensor:
        v = velocity(self, *rest, **options)
        return v * float("nan") if torch.is_grad_enabled() and rank == victim else v

    GuidedPolicy.velocity = poisoned  # type: ignore[method-assign]


def terminal(log: Path, ranks: int) -> str:
    """Everything the ranks have printed since the last call."""
    texts = []
    for rank in range(ranks):
        file = Path(f"{log}-{rank}")
        texts.append(file.read_text() if file.exists() else "")
        file.unlink(missing_ok=True)
    return "".join(texts)


def test_a_rank_that_is_killed_ends_all(tiny_model: Path, tmp_path: Path) -> None:
    log, start = tmp_path / "log", time.monotonic()
    words = ["train", str(run_file(tiny_model, tmp_path))]
    results = try_ranks(sage_fast, 2, str(log), words, partial(kill_at, 0, 12))
    text = terminal(log, 2)
    assert results == [("gone", -signal.SIGKILL), ("gone", 1)], text
    assert time.monotonic() - start < 60
    assert re.search(r"\[rank 1\] error: A collective failed: .*--resume auto", text), text
    assert "Traceback" not in text, text


def test_a_run_of_four_ranks_goes_on_with_two_and_with_one(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"training": {"mode": "full", "num_updates": 3}, "optimizer": {"name": "muon"}}
    file = run_file(tiny_model, tmp_path, **settings)
    log = tmp_path / "log"
    for ranks, updates in ((4, 1), (2, 2), (1, 3)):
        words = ["train", str(file), f"--rollout.batch_size={8 // ranks}", f"--training.num_updates={updates}"]
        words += ["--rollout.micro_batch_size=2", "--resume=auto", "--evaluation.every=0"]
        words += ["--distributed.dp_shard=2", "--distributed.dp_replicate=2"] if ranks == 4 else []
        assert [code for _, code in try_ranks(sage_fast, ranks, str(log), words)] == [0] * ranks, terminal(log, ranks)
    straight = tmp_path / "straight"
    words = ["train", str(file), "--rollout.batch_size=8", f"--output_dir={straight}", "--evaluation.every=0"]
    assert try_ranks(sage_fast, 1, str(log), words) == [("value", 0)], terminal(log, 1)
    for expected, given in zip(numbers(straight), numbers(tmp_path / "run"), strict=True):
        for name in ("grad_norm", "reward/mean", "kl/weight", "learning_rate", "advantage/abs_mean"):
            assert given[name] == pytest.approx(expected[name], rel=1e-3), name
    # Another number of videos would be another run.
    words = ["train", str(file), "--rollout.batch_size=4", "--resume=auto", "--evaluation.every=0"]
    assert try_ranks(sage_fast, 1, str(log), [*words, "--training.num_updates=6"]) == [("value", 2)]
    assert "Set rollout.batch_size to 8" in terminal(log, 1)


def test_a_rank_that_hangs_shows_where_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    file = run_file(tiny_model, tmp_path, distributed={"timeout_seconds": 8})
    log = tmp_path / "log"
    start = time.monotonic()
    results = try_ranks(sage_fast, 2, str(log), ["train", str(file)], partial(hang_at, 1, 1))
    hung = Path(f"{log}-1").read_text()
    text = terminal(log, 2)
    assert results == [("gone", 1)] * 2, text
    assert time.monotonic() - start < 60
    assert "Timeout (0:00:10)!" in hung and "in hang" in hung, text
    assert "[rank 0] error: A collective failed" in text and "Traceback" not in text, text


def fail_to_score(victim: int, rank: int) -> None:
    """A reward that raises on one rank, at once, as rewards of the training process do."""
    from sage_fast.rewards.toy import ToyReward

    def score(self: ToyReward, videos: torch.Tensor, prompts: Any) -> Any:
        raise ValueError("no eyes")

    if rank == victim:
        ToyReward.score = score  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (poison, r"Update 1: on rank 1 the loss of prompt \d+ \('a .*not finite"),
        (fail_to_score, r"On rank 1: Reward .* raised ValueError: no eyes on prompt \d+"),
    ],
)
def test_what_fails_on_one_rank_is_said_by_all(kind: Any, message: str, tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["train", str(run_file(tiny_model, tmp_path, evaluation={"every": 0}))]
    results = try_ranks(sage_fast, 2, str(log), words, partial(kind, 1))
    text = terminal(log, 2)
    assert results == [("gone", 1)] * 2, text
    assert len(re.findall(message, text)) == 2, text


def restarted_on(node: int, rank: int) -> None:
    """torchrun's count of restarts is that of a node; here each rank stands for one."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(rank == node))


def test_where_one_node_is_restarted_all_go_on(tiny_model: Path, tmp_path: Path) -> None:
    file = run_file(tiny_model, tmp_path, evaluation={"every": 0})
    log = tmp_path / "log"
    for updates, disturb in ((1, None), (2, partial(restarted_on, 1))):
        words = ["train", str(file), f"--training.num_updates={updates}"]
        codes = [code for _, code in try_ranks(sage_fast, 2, str(log), words, disturb)]
        assert codes == [0, 0], terminal(log, 2)
    assert [row["update"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2]


def ask_to_stop(how: str, run: Path, rank: int) -> None:
    """Ask the second rank to stop, in its third update."""
    from sage_fast.trainer import Trainer

    iterate = Trainer.iterate

    def asked(self: Trainer) -> dict[str, Any]:
        if rank == 1 and self.update == 2:
            (run / "STOP").touch() if how == "STOP" else os.kill(os.getpid(), signal.SIGTERM)
        return iterate(self)

    Trainer.iterate = asked  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["SIGTERM", "STOP"])
def test_who_asks_one_rank_to_stop_stops_all_after_a_checkpoint(how: str, tiny_model: Path, tmp_path: Path) -> None:
    file = run_file(tiny_model, tmp_path, training={"num_updates": 500}, checkpoint={"every": 500})
    log, run = tmp_path / "log", tmp_path / "run"
    results = try_ranks(sage_fast, 2, str(log), ["train", str(file)], partial(ask_to_stop, how, run))
    assert [code for _, code in results] == [0, 0], terminal(log, 2)
    last = read_metrics(run / "metrics.jsonl")[-1]["update"]
    assert last < 5 and list_checkpoints(run / "checkpoints")[-1].name == f"update-{last:06d}"


def test_torchrun_restarts_and_the_run_goes_on_by_itself(tiny_model: Path, tmp_path: Path) -> None:
    """Weights sharded, and rank 0 killed, which hosts the store. The numbers are those of a run without."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sections: dict[str, Any] = {"training": {"mode": "full", "num_updates": 3}, "evaluation": {"num_samples": 0}}
    for folder in (whole, killed):
        folder.mkdir()
        file = run_file(tiny_model, folder, **sections, distributed={"dp_shard": 2})
    dies_once = tmp_path / "dies_once.py"
    dies_once.write_text(
        "import os, signal, sys\n"
        "from sage_fast import trainer\nfrom sage_fast.commands import cli\n"
        "iterate, attempt = trainer.Trainer.iterate, int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "def dies(self):\n"
        "    if attempt == 0 and self.update == 2 and self.world.rank == 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return iterate(self)\n"
        "trainer.Trainer.iterate = dies\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", str(dies_once), "train", str(file)]
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    end = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert end.returncode == 0, end.stderr
    assert end.stderr.count("as with --resume auto") == 1
    assert "Done: " in end.stdout
    log = tmp_path / "log"
    assert [code for _, code in try_ranks(sage_fast, 2, str(log), ["train", str(whole / "run.yaml")])] == [0, 0]
    assert numbers(killed / "run") == numbers(whole / "run"), terminal(log, 2)
