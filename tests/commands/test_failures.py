"""Faults that a run survives: each ends in one clear message and an intact output
directory.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_fast.checkpoint.folder import (
    describe_files,
    list_checkpoints,
    verify_checkpoint,
    write_manifest,
)
from sage_fast.commands.cli import main
from sage_fast.config.errors import (
    CheckpointError,
    ConfigError,
    RewardError,
    TrainingError,
)
from sage_fast.config.load import dump_config
from sage_fast.config.schema import RunConfig
from sage_fast.policy.guidance import GuidedPolicy
from sage_fast.run.directory import read_metrics
from sage_fast.run.run import Run, build_trainer
from sage_fast.run.run_status import read_status

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")


# --------------------------------------------------------------------------------------
# rewards


class FaultyReward:
    """Scores brightness; fails in a chosen way on the videos of some prompts."""

    def __init__(self, fault: str, word: str = "red") -> None:
        self.fault = fault
        self.word = word

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        values = videos.float().mean((1, 2, 3, 4))
        bad = torch.tensor([self.word in p for p in prompts])
        if bad.any():
            if self.fault == "raise":
                raise ConnectionError("the scoring server is gone")
            values = values.masked_fill(bad, float(self.fault))
        return {"brightness": values}


def faulty(tiny_run: MakeRun, tmp_path: Path, fault: str, on_failure: str) -> RunConfig:
    prompts = tmp_path / "two.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    return tiny_run(
        f"--data.prompts={prompts}",
        "--evaluation.every=0",
        "--evaluation.num_prompts=null",
        f"--reward.rewards=['{__name__}:FaultyReward']",
        f"--reward.options={{'{__name__}:FaultyReward': {{fault: {fault}}}}}",
        "--reward.weights={brightness: 1}",
        f"--reward.on_failure={on_failure}",
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise", "ConnectionError: the scoring server is gone"),
        ("nan", "brightness = nan"),
    ],
)
def test_a_failed_reward_stops_the_run_and_names_the_prompt(
    tiny_run: MakeRun, tmp_path: Path, fault: str, expected: str
) -> None:
    run = Run(faulty(tiny_run, tmp_path, fault, "stop"))
    before = {n: p.detach().clone() for n, p in run.trainer.parameters.items()}
    with pytest.raises(
        RewardError, match=r"'a red circle moving left'\), sample 0"
    ) as error:
        run.train()
    assert expected in str(error.value)
    assert all(torch.equal(before[n], p) for n, p in run.trainer.parameters.items())
    assert not list_checkpoints(run.checkpoints)


def test_a_dropped_group_takes_no_part_in_the_gradient(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    """The gradient is that of a run on the other prompt alone."""
    both = build_trainer(faulty(tiny_run, tmp_path, "nan", "drop_group"))
    alone = tmp_path / "one.csv"
    alone.write_text("prompt,index\na blue square moving up,1\n")
    config = faulty(tiny_run, tmp_path, "nan", "stop")
    config.data.prompts = str(alone)
    config.rollout.batch_size = config.rollout.micro_batch_size = 2
    record = both.iterate()
    assert record["reward/dropped_groups"] == 1
    assert record["grad_norm"] == pytest.approx(
        build_trainer(config).iterate()["grad_norm"], rel=1e-4
    )


def test_every_group_dropped_is_an_error(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = faulty(tiny_run, tmp_path, "nan", "drop_group")
    config.reward.options[f"{__name__}:FaultyReward"]["word"] = "moving"
    with pytest.raises(TrainingError, match="failed in every group"):
        Run(config).train()


# --------------------------------------------------------------------------------------
# numbers, memory


def test_a_nan_loss_keeps_the_last_checkpoint_and_names_the_prompt(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_run("--evaluation.every=0"))
    velocity = GuidedPolicy.velocity

    def poisoned(self: GuidedPolicy, *rest: object, **options: object) -> Tensor:
        v = velocity(self, *rest, **options)
        return (
            v * float("nan")
            if torch.is_grad_enabled() and run.trainer.update == 1
            else v
        )

    monkeypatch.setattr(GuidedPolicy, "velocity", poisoned)
    with pytest.raises(
        TrainingError, match=r"Update 2: the loss of prompt \d+ \('a .*not finite"
    ):
        run.train()
    newest = list_checkpoints(run.checkpoints)[-1]
    verify_checkpoint(newest)
    assert newest.name == "update-000001"
    assert [r["update"] for r in read_metrics(run.files.metrics)] == [1]
    monkeypatch.undo()
    assert Run(tiny_run("--evaluation.every=0", "--resume=auto")).train().finished


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train"], ["rollout.micro_batch_size", "--resume auto"]),
        (
            ["generate", "--checkpoint=none", "--output_dir=v"],
            ["evaluation.batch_size", "The same command continues"],
        ),
    ],
    ids=["train", "generate"],
)
def test_out_of_memory_says_what_to_lower_and_how_to_go_on(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], advice: list[str],
) -> None:  # fmt: skip
    def exhausted(*_: object) -> Tensor:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB.\nlong advice"
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(GuidedPolicy, "velocity", exhausted)
    assert main([words[0], str(config_file), *words[1:]]) == 1
    errors = capsys.readouterr().err
    assert "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB." in errors
    assert all(part in errors for part in advice) and "Traceback" not in errors


# --------------------------------------------------------------------------------------
# directories, disks


def test_a_full_disk_during_a_checkpoint_loses_nothing(tiny_run: MakeRun) -> None:
    """The size limit of the process stands in for a full disk: both fail in the middle
    of a write.
    """
    run = Run(tiny_run("--training.num_updates=3", "--evaluation.every=0"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    iterate = run.trainer.iterate

    def limited() -> dict[str, float]:
        if run.trainer.update == 2:
            deadline = time.monotonic() + 20
            while (
                not (run.checkpoints / "update-000002").exists()
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)  # it is being written while training goes on
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        return iterate()

    run.trainer.iterate = limited  # type: ignore[method-assign]
    try:
        with pytest.raises(
            (CheckpointError, OSError), match=r"update-000003.*--resume auto"
        ):
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for checkpoint in list_checkpoints(run.checkpoints):
        verify_checkpoint(checkpoint)
    assert not list(run.checkpoints.glob(".*partial"))
    resumed = Run(
        tiny_run("--training.num_updates=3", "--evaluation.every=0", "--resume=auto")
    ).train()
    assert resumed.update == 3


# --------------------------------------------------------------------------------------
# checkpoints


def test_a_damaged_checkpoint_is_named(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    newest = list_checkpoints(run / "checkpoints")[-1]
    (shard,) = (newest / "shards").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main(["train", str(run), f"--resume={newest}"]) == 1
    assert f"{shard.name} is missing, truncated or altered" in capsys.readouterr().err


def test_prompts_that_changed_since_the_checkpoint(
    finished_run: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    prompts = tmp_path / "mine.txt"
    prompts.write_text("a red circle moving left\na blue square moving down\n" * 2)
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: a file has changed"):
        Run(tiny_run(f"--evaluation.prompts={prompts}", "--resume=auto"))


def test_a_checkpoint_of_another_model(
    finished_run: Path, tiny_run: MakeRun, tmp_path: Path
) -> None:
    """Its configuration claims to be that of the run."""
    other = shutil.copytree(
        list_checkpoints(finished_run / "checkpoints")[-1], tmp_path / "other"
    )
    state = json.loads((other / "state.json").read_text())
    config = tiny_run(
        "--lora.rank=4", f"--output_dir={tmp_path / 'second'}", f"--resume={other}"
    )
    state["config"]["lora"]["rank"] = 4
    (other / "state.json").write_text(json.dumps(state))
    (other / "manifest.json").unlink()
    write_manifest(
        other, 2, describe_files((p for p in other.rglob("*") if p.is_file()), other)
    )
    with pytest.raises(CheckpointError, match=r"does not fit this run: .*of shape"):
        Run(config)
    assert not (tmp_path / "second").exists()


# --------------------------------------------------------------------------------------
# signals


@pytest.mark.slow
def test_a_run_whose_tee_dies_of_the_same_ctrl_c_is_saved(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    """`train ... 2>&1 | tee log`, and a Ctrl-C, which reaches the whole group."""
    config = tiny_run(
        "--training.num_updates=10000",
        "--evaluation.every=0",
        "--checkpoint.every=10000",
    )
    (tmp_path / "start.yaml").write_text(dump_config(config))
    log = tmp_path / "log"
    words = [sys.executable, "-m", "sage_fast", "train", str(tmp_path / "start.yaml")]
    run = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    with log.open("wb") as file:
        tee = subprocess.Popen(
            ["cat"], stdin=run.stdout, stdout=file, process_group=run.pid
        )
    assert run.stdout is not None
    run.stdout.close()
    while "update 2/" not in log.read_text():
        assert run.poll() is None
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGINT)
    assert tee.wait(60) == -signal.SIGINT and run.wait(120) == 0
    status, _ = read_status(config.output_dir)
    assert status is not None and status.state == "stopped"
    assert [
        int(path.name[-6:])
        for path in list_checkpoints(Path(config.output_dir) / "checkpoints")
    ] == [status.update]
