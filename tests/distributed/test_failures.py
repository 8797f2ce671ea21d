"""Whole runs on several ranks: one that dies, hangs or meets NaN ends all; what was
saved goes on bit for bit.
"""

import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from sage_fast import rollout
from sage_fast.checkpoint import writer
from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.commands import cli
from sage_fast.config.sections import DistributedConfig
from sage_fast.distributed import failure
from sage_fast.distributed.start import start_world
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.rewards.toy import ToyReward
from sage_fast.run.directory import read_metrics
from sage_fast.run.run import Run
from sage_fast.trainer import Trainer
from tests.distributed.ranks import run_ranks, try_ranks, write_run
from tests.made_runs import numbers

pytestmark = pytest.mark.slow

TIMEOUT = "--distributed.timeout_seconds=20"
KILL = partial(signal.raise_signal, signal.SIGKILL)


def sage_fast(log: str, words: list[str], disturb: Any = None) -> int:
    """The command line on this rank, its terminal going to a file; `disturb(rank)`
    first.
    """
    rank = int(os.environ["RANK"])
    terminal = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    if disturb is not None:
        disturb(rank)
    return cli.main([word.format(number=rank + 1) for word in words])


def on_ranks(
    ranks: int, words: list[str], folder: Path, disturb: Any = None
) -> tuple[list[tuple[str, Any]], str]:
    """How a command ends on each rank, and what all of them print. One that has not
    ended in two minutes is killed.
    """
    results = try_ranks(sage_fast, ranks, str(folder / "log"), words, disturb)
    return results, "".join(
        (folder / f"log-{rank}").read_text() for rank in range(ranks)
    )


def finish(ranks: int, words: list[str], folder: Path, disturb: Any = None) -> None:
    """Let a command end well on every rank."""
    results, text = on_ranks(ranks, words, folder, disturb)
    assert [code for _, code in results] == [0] * ranks, text


def torchrun(*options: str) -> tuple[list[str], dict[str, str]]:
    """Words of a launch whose ranks may be started again, and its environment."""
    variables = {
        "PYTHONPATH": ".",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    words = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=c10d"]
    return [*words, *options], os.environ | variables


def at_update(
    action: Callable[[], object], victim: int, update: int, rank: int
) -> None:
    """Let the rank `victim` do something before an update."""
    iterate = Trainer.iterate

    def disturbed(self: Trainer) -> dict[str, Any]:
        if rank == victim and self.update == update:
            action()
        return iterate(self)

    Trainer.iterate = disturbed  # type: ignore[method-assign]


def broken_network(rank: int) -> None:
    """Small messages pass, and the first tensor of a group of the mesh does not."""
    reduce = dist.all_reduce

    def fail(
        tensor: torch.Tensor, *rest: Any, group: Any = None, **options: Any
    ) -> Any:
        if group is not None:
            raise dist.DistBackendError("NCCL error: unhandled system error")
        return reduce(tensor, *rest, **options)

    dist.all_reduce = fail
    Trainer.__init__ = None  # type: ignore[method-assign, assignment]  # nothing is loaded


def test_a_network_that_does_not_carry_is_found_before_the_model_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = ["train", write_run(tiny_model, tmp_path), "--distributed.sp=2"]
    results, text = on_ranks(2, words, tmp_path, broken_network)
    assert (
        results == [("gone", 1)] * 2
        and text.count("A collective failed: NCCL error") == 2
    ), text


def join_with_few_descriptors() -> bool:
    few = len(os.listdir("/proc/self/fd")) + 1
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    start_world(DistributedConfig(), "lora", torch.device("cpu"), {})
    return len(os.listdir("/proc/self/fd")) > few


def test_a_low_limit_of_descriptors_is_raised() -> None:
    assert all(run_ranks(join_with_few_descriptors, 2))


def timeouts_of_a_start() -> tuple[float, set[float], set[float]]:
    """Seconds that a collective may wait when the ranks meet, while groups are tried,
    and afterwards.
    """
    met: list[float] = []
    tried: set[float] = set()
    join = dist.init_process_group
    reduce = dist.all_reduce

    def meet(*rest: Any, timeout: timedelta | None = None, **options: Any) -> None:
        met.append(0.0 if timeout is None else timeout.total_seconds())
        join(*rest, timeout=timeout, **options)

    def waiting(group: Any) -> float:
        return float(
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        )

    def recorded(
        tensor: torch.Tensor, *rest: Any, group: Any = None, **options: Any
    ) -> Any:
        tried.add(waiting(group or dist.group.WORLD))
        return reduce(tensor, *rest, group=group, **options)

    dist.init_process_group = meet
    dist.all_reduce = recorded
    settings = DistributedConfig(timeout_seconds=55, sp=2)
    world = start_world(settings, "lora", torch.device("cpu"), {})
    assert world.fsdp_mesh is not None
    groups = (dist.group.WORLD, world.sp_group, *world.fsdp_mesh.get_all_groups())
    return met[0], tried, {waiting(group) for group in groups}


def test_the_start_has_its_own_timeout_but_for_the_trial_of_the_groups() -> None:
    assert run_ranks(timeouts_of_a_start, 2) == [(165.0, {55.0}, {165.0})] * 2


def sleep_in_the_rollout(rank: int) -> None:
    sample = rollout.sample_trajectory

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(3.0 * rank)
        return sample(*arguments, **options)

    rollout.sample_trajectory = slow


def test_a_slow_rank_is_named_and_the_reward_is_not_blamed(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = write_run(tiny_model, tmp_path, evaluation={"every": 0})
    finish(2, ["train", file], tmp_path, sleep_in_the_rollout)
    first, second = read_metrics(tmp_path / "run/metrics.jsonl")
    assert first["time/slowest"].startswith(f"rank 1 on {platform.node()}: ")
    assert second["time/reward"] < 0.6 and second["time/waiting"] > 3.0, (
        "two batches of 3 s"
    )


def at_phase(phase: str, victim: int, update: int, rank: int) -> None:
    """Kill the rank `victim` in a phase of an update."""
    tell = Run._tell

    def told(self: Run, name: str, *rest: Any) -> None:
        if rank == victim and name == phase and self.trainer.update == update:
            KILL()
        tell(self, name, *rest)

    Run._tell = told  # type: ignore[method-assign]


def test_kills_of_either_rank_cost_the_update_in_progress(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "training": {"num_updates": 5},
        "evaluation": {"every": 0},
    }
    file = write_run(
        tiny_model, tmp_path, **settings, checkpoint={"every": 1, "asynchronous": False}
    )
    # Updates done, and of which there is a checkpoint when the rank dies.
    for phase, victim, update, saved in (
        ("rollout", 1, 1, 1),
        ("update", 0, 2, 2),
        ("checkpoint", 1, 4, 3),
    ):
        words = ["train", file, TIMEOUT, "--resume=auto"]
        results, text = on_ranks(
            2, words, tmp_path, partial(at_phase, phase, victim, update)
        )
        assert results[victim] == ("gone", -signal.SIGKILL), text
        assert results[1 - victim] == ("gone", 1), text
        other = rf"\[rank {1 - victim}\] error: A collective failed: .*--resume auto"
        assert re.search(other, text) and "Traceback" not in text, text
        assert (
            list_checkpoints(tmp_path / "run/checkpoints")[-1].name
            == f"update-{saved:06d}"
        )
    finish(2, ["train", file, "--resume=auto"], tmp_path)
    finish(2, ["train", file, f"--output_dir={tmp_path / 'whole'}"], tmp_path)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_a_run_of_four_ranks_goes_on_with_two_and_with_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "training": {"mode": "full", "num_updates": 3},
        "optimizer": {"name": "muon"},
    }
    file = write_run(tiny_model, tmp_path, evaluation={"every": 0}, **settings)
    # the same words, and the same 8 videos
    replicas = ["--distributed.dp_shard=2", "--distributed.dp_replicate=2"]
    same = ["train", file, "--rollout.batch_size=2", "--resume=auto"]
    for ranks, updates, words in ((4, 1, replicas), (2, 2, []), (1, 3, [])):
        until = f"--training.num_updates={updates}"
        finish(ranks, [*same, until, *words], tmp_path)
    straight = tmp_path / "straight"
    words = ["train", file, "--rollout.batch_size=8", f"--output_dir={straight}"]
    finish(1, words, tmp_path)
    compared = ("grad_norm", "reward/mean", "kl/weight", "advantage/abs_mean")
    parts = numbers(tmp_path / "run")
    for expected, given in zip(numbers(straight), parts, strict=True):
        for name in (*compared, "learning_rate"):
            assert given[name] == pytest.approx(expected[name], rel=1e-3), name


def hang(rank: int) -> None:
    """Let rank 1 stop before its second update, while it also writes the first one's
    checkpoint.
    """
    if rank == 1:
        failure.STACKS_AFTER = 30.0
        writer.describe_files = lambda *_: time.sleep(600)  # type: ignore[assignment, return-value]
    at_update(partial(time.sleep, 600), 1, 1, rank)


def test_a_rank_that_hangs_shows_where_and_ends(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The others end when their collective has failed, and only the one that hangs
    shows its threads.
    """
    file = write_run(
        tiny_model,
        tmp_path,
        evaluation={"every": 0},
        checkpoint={"every": 1},
    )
    words = ["train", file, "--distributed.timeout_seconds=8"]
    results, text = on_ranks(2, words, tmp_path, hang)
    assert results == [("gone", 1)] * 2, text
    hung = (tmp_path / "log-1").read_text()
    assert "Timeout (0:00:38)!" in hung and "in disturbed" in hung, text
    assert "[rank 0] error: A collective failed" in text and "Traceback" not in text, (
        text
    )
    assert "Timeout (" not in (tmp_path / "log-0").read_text(), text


def poison(rank: int) -> None:
    """NaN velocities with a graph, on one rank."""
    velocity = GuidedPolicy.velocity

    def poisoned(self: GuidedPolicy, *rest: Any, **options: Any) -> torch.Tensor:
        v = velocity(self, *rest, **options)
        return v * float("nan") if torch.is_grad_enabled() and rank == 1 else v

    GuidedPolicy.velocity = poisoned  # type: ignore[method-assign]


def fail_to_score(rank: int) -> None:
    """A reward that raises on one rank, at once, as rewards of the training process do."""

    def score(self: ToyReward, videos: torch.Tensor, prompts: Any) -> Any:
        raise ValueError("no eyes")

    if rank == 1:
        ToyReward.score = score  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (poison, r"Update 1: on rank 1 the loss of prompt \d+ \('a .*not finite"),
        (
            fail_to_score,
            r"On rank 1: Reward .* raised ValueError: no eyes on prompt \d+",
        ),
    ],
)
def test_what_fails_on_one_rank_is_said_by_all(
    kind: Any, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = write_run(tiny_model, tmp_path, evaluation={"every": 0})
    results, text = on_ranks(2, ["train", file, TIMEOUT], tmp_path, kind)
    assert results == [("gone", 1)] * 2, text
    assert len(re.findall(message, text)) == 2, text


def test_a_signal_to_one_rank_stops_all_after_a_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = write_run(
        tiny_model, tmp_path, training={"num_updates": 500}, checkpoint={"every": 500}
    )
    run = tmp_path / "run"
    ask = partial(signal.raise_signal, signal.SIGTERM)
    finish(2, ["train", file], tmp_path, partial(at_update, ask, 1, 2))
    last = read_metrics(run / "metrics.jsonl")[-1]["update"]
    assert (
        last < 5
        and list_checkpoints(run / "checkpoints")[-1].name == f"update-{last:06d}"
    )


def test_torchrun_restarts_and_the_run_goes_on_by_itself(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Weights sharded, and rank 0 killed, which hosts the store. The numbers are those
    of a run without.
    """
    settings: dict[str, Any] = {
        "training": {"mode": "full", "num_updates": 3},
        "evaluation": {"num_samples": 0},
    }
    file = write_run(tiny_model, tmp_path, **settings, distributed={"dp_shard": 2})
    dies_once = tmp_path / "dies_once.py"
    dies_once.write_text(
        "import os, sys\n"
        "from sage_fast.commands import cli\n"
        "from tests.distributed.test_failures import KILL, at_update\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    at_update(KILL, 0, 2, int(os.environ['RANK']))\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    command, environment = torchrun(
        "--nproc_per_node=2", "--max-restarts=1", "--rdzv_endpoint=localhost:0"
    )
    command += [str(dies_once), "train", file, "--resume=auto"]
    end = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment
    )
    assert end.returncode == 0, end.stderr
    assert end.stderr.count("Going on from ") == 1
    assert "Done: " in end.stdout
    finish(2, ["train", file, f"--output_dir={tmp_path / 'whole'}"], tmp_path)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_a_spare_node_goes_on_where_one_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Three agents of one process for two places: the second dies with its process, the
    third takes its place.
    """
    file = write_run(
        tiny_model, tmp_path, evaluation={"every": 0}, training={"num_updates": 4}
    )
    node = tmp_path / "node.py"
    node.write_text(
        "import os, signal, sys\n"
        "from sage_fast.commands import cli\n"
        "from tests.distributed.test_failures import KILL, at_update\n"
        "def lose():\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    KILL()\n"
        "if sys.argv.pop(1) == '1':\n"
        "    at_update(lose, 0, 2, 0)\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    command, environment = torchrun(
        "--nnodes=2:2",
        "--nproc_per_node=1",
        "--max-restarts=3",
        f"--rdzv_endpoint=localhost:{meeting}",
        "--rdzv_id=spare",
    )
    agents = []
    for number in range(3):
        if number == 2:
            while (
                not (tmp_path / "run/lease.txt").exists() and agents[0].poll() is None
            ):
                time.sleep(0.2)
        pace = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
        settings = f"--rdzv_conf=is_host={number == 0},{pace}"
        words = [*command, settings, str(node), str(number)]
        words += ["train", file, "--resume=auto"]
        log = (tmp_path / f"agent-{number}").open("w")
        agents.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))
    try:
        codes = [agent.wait(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    text = "".join((tmp_path / f"agent-{number}").read_text() for number in range(3))
    assert codes == [0, -signal.SIGKILL, 0], text
    assert "Going on from " in text and not list(
        (tmp_path / "run").glob("previous-*")
    ), text
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
