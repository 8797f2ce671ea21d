"""A run that was stopped or killed and goes on gives the numbers of an uninterrupted one, bit for bit."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sage_fast.checkpoint import list_checkpoints, open_checkpoint
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.run.run import Run
from sage_fast.single_pass import SinglePassGradient
from tests.run.test_run import ENVIRONMENT, command, count_lines, numbers, start, wait_until, with_output
from tests.test_single_pass import single_video

ROOT = Path(__file__).resolve().parents[2]
MakeRun = Callable[..., RunConfig]


@pytest.mark.parametrize(
    "overrides",
    [
        ("--objective.kl_mode=dual", "--training.anchor_interval=2", "--objective.kl_position_fraction=0.5"),
        pytest.param(
            (
                "--optimizer.name=muon",
                "--training.mode=full",
                "--optimizer.learning_rate=1e-3",
                "--training.ema_decay=0.9",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--rollout.sde_window.size=2", "--training.updates_per_rollout=2", "--optimizer.warmup_updates=3"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "--training.best_and_worst=1",
                "--rollout.num_generations=4",
                "--rollout.shared_initial_noise=true",
                "--rollout.sde_window.size=2",
                "--rollout.micro_batch_size=2",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora-anchor-drawn-kl", "full-muon-ema", "window-two-updates", "best-and-worst-shared-start"],
)
def test_resume_continues_bit_for_bit(tiny_run: MakeRun, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    def config(output: str, updates: int, resume: str) -> RunConfig:
        given = (*overrides, f"--training.num_updates={updates}", "--checkpoint.every=2", f"--resume={resume}")
        return with_output(tiny_run(*given), tmp_path / output)

    Run(config("whole", 4, "none")).train()
    Run(config("parts", 2, "none")).train()
    Run(config("parts", 4, "auto")).train()
    whole, parts = numbers(tmp_path / "whole"), numbers(tmp_path / "parts")
    # The shorter run also evaluated at its own end.
    assert [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in parts] == [
        {k: v for k, v in r.items() if not k.startswith("eval/")} for r in whole
    ]
    assert parts[-1] == whole[-1]


@pytest.mark.slow
def test_kill_minus_nine_at_three_random_moments(tiny_run: MakeRun, tmp_path: Path) -> None:
    files = {}
    for name in ("whole", "killed"):
        config = tiny_run("--training.num_updates=20", "--checkpoint.every=3", "--evaluation.every=10")
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(dump_config(with_output(config, tmp_path / name)))
    subprocess.run(command(files["whole"]), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=250)

    log, saved = tmp_path / "killed/metrics.jsonl", tmp_path / "killed/checkpoints"
    moments = random.Random(20)
    for attempt in range(3):
        # Lines of an earlier attempt do not count: the process must have trained before it dies.
        lines = count_lines(log)
        process = start(files["killed"])
        if attempt < 2:
            wait_until(lambda lines=lines: count_lines(log) > lines + 1, process)
            time.sleep(moments.uniform(0, 0.3))
        else:
            # The newest checkpoint is damaged below, and there must be another to fall back to.
            wait_until(lambda: len(list_checkpoints(saved)) > 1 and any(saved.glob(".update-*.partial")), process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    # A machine that died while writing: the newest checkpoint is there but cut short.
    newest = list_checkpoints(tmp_path / "killed/checkpoints")[-1]
    (shard,) = (newest / "shards").glob("*.distcp")
    with shard.open("r+b") as file:
        file.truncate(100)
    end = subprocess.run(
        command(files["killed"]), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=250, text=True
    )
    assert "Skipping a damaged checkpoint" in end.stderr and newest.name in end.stderr
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_resume_is_bit_for_bit_also_where_evaluation_and_rollout_batch_differently(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    """A resumed run meets the noise levels first in another batch than the whole run did."""
    options = ["--training.num_updates=3", "--rollout.micro_batch_size=1", "--evaluation.batch_size=4"]
    Run(with_output(tiny_run(*options), tmp_path / "whole")).train()
    half = tiny_run(*options)
    half.training.num_updates = 1
    Run(with_output(half, tmp_path / "half")).train()
    Run(with_output(tiny_run(*options), tmp_path / "half", resume="auto")).train()
    last, other = (numbers(tmp_path / name)[-1] for name in ("whole", "half"))
    assert {k: v for k, v in last.items() if not k.startswith("eval/")} == {
        k: v for k, v in other.items() if not k.startswith("eval/")
    }


def test_a_run_killed_between_rollout_and_update_resumes_to_the_bit(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(output: str, *more: str) -> Run:
        config = single_video(tiny_run, "--objective.kl_mode=dual", "--training.anchor_interval=2")(
            "single_pass",
            "--training.num_updates=4",
            "--training.ema_decay=0.9",
            "--checkpoint.every=2",
            "--evaluation.every=0",
            *more,
        )
        config.output_dir = str(tmp_path / output)
        return Run(config)

    run("whole").train()
    killed = run("killed")
    accumulate = SinglePassGradient.accumulate

    def dies(self: SinglePassGradient, *arguments) -> object:
        if killed.trainer.update == 3:
            raise KeyboardInterrupt
        return accumulate(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SinglePassGradient, "accumulate", dies)
        killed.train()
    assert list_checkpoints(tmp_path / "killed/checkpoints")[-1].name == "update-000002"
    run("killed", "--resume=auto").train()
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    whole, resumed = (
        open_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[-1]) for name in ("whole", "killed")
    )
    for stem, tensors in whole.tensors.items():
        assert all(torch.equal(resumed.tensors[stem][name], value) for name, value in tensors.items())
