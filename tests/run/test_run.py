"""A run as the user sees it: files, resume after any end, signals, damaged checkpoints."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sage_fast.checkpoint.folder import list_checkpoints
from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError
from sage_fast.config.load import dump_config, load_config
from sage_fast.config.schema import RunConfig
from sage_fast.models.toy.components import WEIGHTS_NAME
from sage_fast.run.directory import read_metrics
from sage_fast.run.metrics import MetricsLogger
from sage_fast.run.run import Run
from sage_fast.run.run_status import Callback, read_status
from sage_fast.tools.api import train
from tests.made_runs import numbers

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")


def with_output(config: RunConfig, output: Path, **changes: Any) -> RunConfig:
    config.output_dir = str(output)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_a_run_leaves_everything_a_user_looks_for(
    finished_run: Path, tiny_run: MakeRun
) -> None:
    run = finished_run
    for name in (
        "config.yaml",
        "environment.json",
        "reward.png",
        "before_after.png",
        "evaluation/result.json",
    ):
        assert (run / name).stat().st_size > 0, name
    assert [row["update"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert len(list((run / "samples/update-000002").glob("*.mp4"))) == 2
    assert (run / "samples/update-000000.png").exists()
    assert load_config(run / "config.yaml") == with_output(tiny_run(), run)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] == version("torch")
    wanted = {
        "reward/mean", "reward/std", "reward/VQ_mean", "advantage/group_std", "advantage/zero_spread_groups",
        "ratio/mean", "ratio/max_deviation", "log_ratio/std", "ratio/clip_fraction", "kl/position", "kl/velocity",
        "kl/weight", "grad_norm", "learning_rate", "time/rollout", "time/update", "memory/peak_gib",
    }  # fmt: skip
    assert wanted <= set(read_metrics(run / "metrics.jsonl")[-1])


class Moves(Callback):
    """Changes the working directory."""

    def on_rollout(self, record: Any) -> None:
        os.chdir("/")


def test_a_relative_output_dir_is_meant_from_where_the_run_was_started(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--logging.report_to=[tensorboard]", "--evaluation.every=0")
    run = train(with_output(tiny_run(*words), Path("relative")), callbacks=[Moves()])
    assert run.finished and run.output_dir == tmp_path / "relative"
    assert [row["update"] for row in run.metrics] == [1, 2]
    assert list((tmp_path / "relative/tensorboard").iterdir())
    assert load_config(tmp_path / "relative/config.yaml").output_dir == "relative"


@pytest.mark.signals
def test_a_signal_between_two_updates_loses_neither_and_the_run_says_how_to_resume(
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes when the update has been found to need no checkpoint."""
    config = tiny_run(
        "--checkpoint.every=500", "--training.num_updates=500", "--evaluation.every=0"
    )
    file = tmp_path / "stopped.yaml"
    file.write_text(dump_config(config))
    log = MetricsLogger.log

    def log_and_be_asked(self: MetricsLogger, record: dict[str, float]) -> None:
        log(self, record)
        if record["update"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLogger, "log", log_and_be_asked)
    assert main(["train", str(file)]) == 0
    assert [
        p.name for p in list_checkpoints(Path(config.output_dir) / "checkpoints")
    ] == ["update-000002"]
    printed = capsys.readouterr().out
    assert "Stopped after update 2" in printed
    assert f"train {config.output_dir} --resume auto" in printed


def test_a_run_stopped_before_its_first_checkpoint_starts_again_and_does_not_trust_its_old_baseline(
    tiny_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    first = Run(tiny_run("--checkpoint.every=2"))
    first.trainer.iterate = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.train()
    begun = (first.directory / "metrics.jsonl").read_bytes()
    result = Run(tiny_run("--resume=auto", "--reward.weights={MQ: 1}")).train()
    assert "stopped before its first checkpoint" in caplog.text
    assert (
        len(begun.splitlines()) == 1
        and (first.directory / "previous-1/metrics.jsonl").read_bytes() == begun
    )
    rows = numbers(result.output_dir)
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert (
        rows[0]["eval/reward_mean"] == rows[0]["eval/MQ_mean"]
        and rows[0]["eval/paired_gain"] == 0.0
    )
    assert result.test is not None and abs(result.test.mean) < 0.1


def test_evaluation_that_is_switched_on_after_the_end_compares_the_last_update(
    tiny_run: MakeRun, finished_run: Path
) -> None:
    run = Run(tiny_run("--evaluation.every=0")).train().output_dir
    result = Run(tiny_run("--resume=auto")).train()
    assert result.finished and result.update == 2 and result.test is not None
    for update in (0, 2):
        name = f"evaluation/update-{update:06d}.json"
        assert (run / name).read_text() == (finished_run / name).read_text()
    rows = {row["update"]: row for row in numbers(run)}
    assert [rows[update] for update in (0, 1, 2)] == numbers(finished_run)
    status, _ = read_status(run)
    assert status is not None and (status.state, status.update) == ("finished", 2)
    assert (
        status.gain == rows[2]["eval/paired_gain"]
        and status.reward == rows[2]["eval/reward_mean"]
    )


def test_who_asks_to_stop_does_not_wait_for_an_evaluation_and_loses_none(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "--training.num_updates=4",
        "--checkpoint.every=3",
        "--checkpoint.keep_last=1",
    ]
    Run(with_output(tiny_run(*options), tmp_path / "whole")).train()
    # Update 2 is evaluated, and the best until update 4, which is the last, has been.
    checkpoints = tmp_path / "whole/checkpoints"
    scores = numbers(tmp_path / "whole")
    assert [p.name for p in list_checkpoints(checkpoints)] == [
        "update-000002",
        "update-000004",
    ]
    best = json.loads((checkpoints / "best.json").read_text())["score"]
    assert best == max(
        row["eval/paired_gain"] for row in scores if row["update"] in (2, 4)
    )
    broken = Run(with_output(tiny_run(*options), tmp_path / "broken"))
    iterate = broken.trainer.iterate

    def interrupted() -> dict[str, float]:
        record = iterate()
        if record["update"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return record

    monkeypatch.setattr(broken.trainer, "iterate", interrupted)
    assert not broken.train().finished
    assert list_checkpoints(tmp_path / "broken/checkpoints")[-1].name.endswith("2")
    assert [row["update"] for row in numbers(tmp_path / "broken")] == [0, 1]
    status, _ = read_status(tmp_path / "broken")
    assert status is not None and (status.state, status.update) == ("stopped", 2)
    for _ in range(2):  # going on once more makes up for nothing twice
        Run(with_output(tiny_run(*options), tmp_path / "broken", resume="auto")).train()
        assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")


def test_the_models_folder_may_move_but_not_change(
    tiny_run: MakeRun, finished_run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    words = ("--resume=auto", "--training.num_updates=3", "--evaluation.every=0")
    again = tiny_run(*words, f"--model.path={moved}")
    run = Run(again)
    assert run.train().update == 3
    # a run that just fits would not fit beside its own checkpoint
    assert run.checkpoint is None
    weights = load_file(moved / WEIGHTS_NAME)
    weights["proj_out.weight"] += 1
    save_file(weights, moved / WEIGHTS_NAME)
    with pytest.raises(
        ConfigError, match=r"model\.path: the weights at .*moved are not those"
    ):
        Run(again)
