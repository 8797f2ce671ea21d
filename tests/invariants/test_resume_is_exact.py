"""A run that was stopped or killed and goes on gives the numbers of an uninterrupted
one, bit for bit.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.config.load import dump_config
from sage_fast.run.run import Run
from tests.made_runs import numbers
from tests.run.test_run import MakeRun, with_output

pytestmark = pytest.mark.usefixtures("nothing_drawn")
ROOT = Path(__file__).resolve().parents[2]


RUNS = {
    # Saved between two refreshes of the anchor, and where the last KL alone would move
    # lambda otherwise than all do.
    "lora-anchor-drawn-kl": "objective.kl_mode=dual training.anchor_interval=2 "
    "objective.kl_position_fraction=0.5 "
    "kl_weight.warmup_updates=1 kl_weight.target=2.9e-9",
    "single-pass": "training.update=single_pass rollout.micro_batch_size=1 "
    "training.anchor_interval=2 "
    "training.ema_decay=0.9",
    "forward-process": "training.update=forward_process rollout.sde_type=ode objective.kl_mode=moving",
    # Of single videos, so that the run that goes on meets the noise levels first in
    # another batch than the whole one.
    "full-muon-ema": (
        "training.mode=full optimizer.name=muon training.ema_decay=0.9 "
        "rollout.micro_batch_size=1"
    ),
    "window-two-updates": (
        "rollout.sde_window.size=2 training.updates_per_rollout=2 "
        "optimizer.warmup_updates=3"
    ),
    "best-and-worst-shared-start": "training.best_and_worst=1 rollout.num_generations=4 "
    "rollout.initial_noise=shared rollout.sde_window.size=2 rollout.micro_batch_size=2 "
    "rollout.solver_order=2",
}
SLOW = ("full-muon-ema", "window-two-updates", "best-and-worst-shared-start")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RUNS],
)
def test_resume_continues_bit_for_bit(
    tiny_run: MakeRun, tmp_path: Path, name: str
) -> None:
    overrides = [f"--{word}" for word in RUNS[name].split()]
    saved, total = (4, 6) if "updates_per_rollout=2" in RUNS[name] else (3, 5)
    overrides += [
        f"--training.num_updates={total}",
        f"--checkpoint.every={saved}",
        "--evaluation.num_samples=0",
        "--evaluation.num_prompts=2",
        f"--evaluation.every={total}",
    ]
    whole = tmp_path / "whole"
    Run(with_output(tiny_run(*overrides), whole)).train()
    # As a kill after the last update and before its checkpoint leaves it.
    parts = shutil.copytree(whole, tmp_path / "parts")
    first, *later = list_checkpoints(parts / "checkpoints")
    assert int(first.name[-6:]) == saved and later
    for path in later:
        shutil.rmtree(path)
    Run(with_output(tiny_run(*overrides, "--resume=auto"), parts)).train()
    assert numbers(parts) == numbers(whole)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_kill_minus_nine_at_three_random_moments(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    words = (
        "--training.num_updates=20",
        "--checkpoint.every=3",
        "--evaluation.every=10",
        "--evaluation.num_samples=0",
    )
    Run(with_output(tiny_run(*words), tmp_path / "whole")).train()
    config = with_output(tiny_run(*words, "--resume=auto"), tmp_path / "killed")
    (tmp_path / "killed.yaml").write_text(dump_config(config))
    log = tmp_path / "killed/metrics.jsonl"
    moments = random.Random(20)
    command = [
        sys.executable,
        "-m",
        "sage_fast",
        "train",
        str(tmp_path / "killed.yaml"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(3):
        # Lines of an earlier attempt do not count: the process must have trained before
        # it dies.
        lines = count_lines(log)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        while count_lines(log) <= lines + 1:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    Run(config).train()
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
