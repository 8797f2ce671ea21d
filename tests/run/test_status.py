"""Runs as seen from outside: which lives, hangs, was killed, has failed; and what a log
shows meanwhile.
"""

import html
import json
import logging
import os
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from sage_fast.commands.cli import main
from sage_fast.config.errors import ConfigError, RewardError, TrainingError
from sage_fast.config.load import dump_config
from sage_fast.config.registry import register
from sage_fast.config.schema import RunConfig
from sage_fast.run import run_status
from sage_fast.run.directory import Lease
from sage_fast.run.page import write_run_page
from sage_fast.run.run import Run
from sage_fast.run.run_status import (
    RunProgress,
    Status,
    command_for,
    format_seconds,
    look_at_run,
    patience,
    read_status,
)

MakeRun = Callable[..., RunConfig]

GOING = Status(
    update=4, num_updates=60, phase="rollout", done=1, total=4, reward=0.41, gain=0.05
)


def make_run(directory: Path, status: Status | None) -> Path:
    directory.mkdir()
    (directory / "config.yaml").write_text("{}\n")
    if status is not None:
        (directory / "status.json").write_text(json.dumps(asdict(status)))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of five: a finished run, one that failed, one that was killed, one that
    goes on, one that hangs.
    """
    folder = tmp_path / "runs"
    folder.mkdir()
    make_run(folder / "done", replace(GOING, state="finished", update=60, phase=""))
    make_run(
        folder / "fails",
        replace(GOING, state="failed", error="The reward failed.\nSee above."),
    )
    make_run(folder / "gone", GOING)
    make_run(folder / "goes", GOING)
    hanging = make_run(folder / "hangs", GOING)
    long_ago = time.time() - 100
    os.utime(hanging / "status.json", (long_ago, long_ago))
    return folder


def test_five_runs_are_told_apart(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Lease(runs / "goes"), Lease(runs / "hangs"):
        assert main(["status", str(runs)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", str(runs / "goes"), str(runs / "done"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    states = [line.split()[1] for line in lines[1:6]]
    assert states == ["finished", "failed", "running", "killed", "hangs"]
    going = lines[3].removeprefix(str(runs / "goes")).split()
    assert " ".join(going[:6]) == "running 4/60 rollout 1/4 0.41 +0.05"
    notes = "\n".join(lines[6:])
    assert f"{runs / 'fails'}: The reward failed." in notes and "See above" not in notes
    assert f"train {runs / 'gone'} --resume auto" in notes
    assert f"{runs / 'hangs'}: no progress, but alive: process {os.getpid()}" in notes
    assert [run["condition"] for run in found] == ["running", "finished"]
    assert found[0]["status"]["update"] == 4
    assert found[0]["holder"].startswith(f"process {os.getpid()} on")


def test_a_state_that_was_seen_is_told_once(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(runs / "fails")
    assert main(["status", one]) == 1
    assert main(["status", one, "--acknowledge"]) == 0 and main(["status", one]) == 0
    assert "failed" in capsys.readouterr().out.splitlines()[-1], (
        "it is in the table all the same"
    )
    assert main(["status", str(runs)]) == 1, "others are told"
    later = time.time() + 10
    os.utime(runs / "fails" / "status.json", (later, later))
    assert main(["status", one]) == 1, "it has failed again"
    assert "The reward failed." in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "3",
        '{"state": "asleep", "num_updates": 3}',
        '{"state": "running", "num_updates": 3, "reward": []}',
    ],
    ids=["deep", "number", "asleep", "types"],
)
def test_one_strange_status_does_not_hide_the_others(
    text: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (runs / "goes" / "status.json").write_text(text)
    main(["status", str(runs)])
    lines = capsys.readouterr().out.splitlines()
    states = [line.split()[1] for line in lines[1:6]]
    assert states == ["finished", "failed", "unknown", "killed", "killed"]
    assert f"{runs / 'goes' / 'status.json'} cannot be used" in caplog.text


def test_a_status_gives_the_terminal_no_orders(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "The reward\x1b[2J\x1b]0;title\x07 failed.\u202e"
    status = replace(GOING, state="failed", error=error)
    (runs / "fails" / "status.json").write_text(json.dumps(asdict(status)))
    main(["status", str(runs / "fails")])
    shown = capsys.readouterr().out
    assert "The reward\\x1b[2J\\x1b]0;title\\x07 failed.\\u202e" in shown
    assert shown.replace("\n", "").isprintable()


@pytest.mark.usefixtures("nothing_drawn")
def test_commands_can_be_pasted_anywhere(
    tmp_path: Path,
    tiny_run: MakeRun,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From another folder, with a relative path, with code of others, and with a space
    in the path.
    """
    started = tmp_path / "where it began"
    started.mkdir()
    own = "def dark(videos, prompts):\n    return -videos.double().mean((1, 2, 3, 4))\n"
    (started / "own_rewards.py").write_text(own)
    (started / "weights").symlink_to(tiny_model)
    words = [
        "--output_dir=run of today",
        "--model.path=weights",
        "--evaluation.every=0",
        "--training.num_updates=1",
    ]
    (started / "own.yaml").write_text(dump_config(tiny_run(*words)))
    words += ["--reward.rewards=['own_rewards:dark']", "--reward.weights={dark: 1.0}"]
    (started / "start.yaml").write_text(dump_config(tiny_run(*words)))
    monkeypatch.syspath_prepend(started)
    monkeypatch.chdir(started)
    monkeypatch.setattr(run_status.shutil, "which", lambda name: name)
    assert main(["train", "start.yaml"]) == 0
    run = started / "run of today"
    status, _ = read_status(run)
    command = command_for(
        run, status, "train", "--resume", "auto", "--training.num_updates=2"
    )
    page = html.unescape((run / "index.html").read_text("utf-8"))
    assert (
        command_for(run, status, "evaluate", "--output_dir", str(run / "scores"))
        in page
    )
    # as a shell in another folder does
    monkeypatch.chdir(tmp_path)
    change, folder, both, program, *typed = shlex.split(command)
    assert (change, both, program) == ("cd", "&&", "sage-fast")
    monkeypatch.chdir(folder)
    assert main(typed) == 0
    assert read_status(run)[0].update == 2  # type: ignore[union-attr]
    assert "--trust-config" in command and "--trust-config" not in command_for(
        run, status, "export"
    )
    (started / "own.yaml").replace(run / "config.yaml")
    assert "--trust-config" not in command_for(run, status, "train")


def test_a_command_starts_as_many_processes_as_the_run_had(tmp_path: Path) -> None:
    several = replace(GOING, gpus=4)
    assert "--gpus 4" in command_for(tmp_path, several, "train")
    assert "--gpus" not in command_for(tmp_path, several, "generate")
    assert "--gpus" not in command_for(tmp_path, GOING, "train")


def test_an_export_is_no_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (runs / "done", runs / "fails", runs / "gone"):
        (folder / "export.json").touch()
    main(["status", str(runs), "--json"])
    assert [Path(run["run"]).name for run in json.loads(capsys.readouterr().out)] == [
        "goes",
        "hangs",
    ]
    assert main(["status", str(runs / "done")]) == 2


def test_a_slow_run_does_not_hang(tmp_path: Path) -> None:
    """It may go without progress for as long as it has before, and for longer before
    its first update.
    """
    assert patience(GOING) == 60.0
    assert patience(replace(GOING, longest_seconds=600.0)) == 2400.0
    assert patience(replace(GOING, update=0)) == 1800.0
    run = make_run(tmp_path / "slow", replace(GOING, longest_seconds=600.0))
    with Lease(run):
        assert look_at_run(run, time.time() + 2000).condition == "running"
        assert look_at_run(run, time.time() + 2500).condition == "hangs"


# --------------------------------------------------------------------------------------
# what the run writes


def test_the_error_that_ends_a_run_is_kept(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_run())

    def fail() -> None:
        raise TrainingError("the gradient is not finite")

    monkeypatch.setattr(run.trainer, "iterate", fail)
    with pytest.raises(TrainingError):
        run.train()
    status, _ = read_status(run.directory)
    assert status is not None and (status.state, status.error) == (
        "failed",
        "the gradient is not finite",
    )
    assert "the gradient is not finite" in (run.directory / "index.html").read_text(
        "utf-8"
    )


def test_a_status_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RunProgress(tmp_path, GOING, step=1, evaluation_every=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        file.begin(4)
        file.end("failed", RuntimeError("x"))
    assert caplog.text.count("No space left on device") == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    file.end("stopped")
    status, _ = read_status(tmp_path)
    assert status is not None and status.state == "stopped"


# --------------------------------------------------------------------------------------
# lines of a log


def test_the_time_left_is_that_of_updates_and_evaluations(tmp_path: Path) -> None:
    begun = replace(GOING, update=0, num_updates=100)
    shown = RunProgress(tmp_path, begun, step=2, evaluation_every=30)
    assert shown.seconds_left() is None
    shown.finished({"update": 0, "time/evaluation": 50.0})
    shown.finished({"update": 2, "time/iteration": 8.0, "time/checkpoint": 2.0})
    # 49 iterations, and evaluations after 30, 60, 90 and 100 updates.
    assert shown.seconds_left() == shown.status.seconds_left == 49 * 10 + 4 * 50
    shown.finished({"update": 98, "time/iteration": 8.0, "time/checkpoint": 2.0})
    # a baseline that is made on resume
    shown.finished({"update": 0, "time/evaluation": 50.0})
    assert shown.status.update == 98 and shown.seconds_left() == 10 + 50
    shown.finished({"update": 100, "time/iteration": 10.0})
    assert shown.seconds_left() == 0
    assert [format_seconds(s) for s in (59, 200, 9000, 4e5)] == [
        "59 s",
        "3.3 min",
        "2.5 h",
        "4.6 days",
    ]


@pytest.mark.parametrize(
    ("error", "text", "repeats"),
    [
        (
            RewardError("no scores " + 99 * "for this video "),
            ("no scores " + 99 * "for this video ")[:500],
            True,
        ),
        (OSError("the disk is full"), "the disk is full", True),
        (RuntimeError("another rank is gone"), "another rank is gone", False),
        (KeyboardInterrupt(), "KeyboardInterrupt", False),
    ],
)
def test_an_error_is_kept_in_short_and_with_whether_a_restart_would_meet_it(
    tmp_path: Path, error: BaseException, text: str, repeats: bool
) -> None:
    progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=0)
    progress.begin(4)
    progress.end("failed", error)
    status, _ = read_status(tmp_path)
    assert status is not None and (status.error, status.repeats) == (text, repeats)


def test_the_longest_step_is_that_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(time, "monotonic", clock)
    progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=0)
    progress.begin(4)
    for clock.return_value in (3.0, 45.0, 47.0):
        progress.phase("rollout", 0, 4)
    assert progress.status.longest_seconds == 42.0


def test_the_status_names_a_phase_that_begins_at_once(tmp_path: Path) -> None:
    """Its reward may hang before anything else is heard of it."""
    progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=0)
    progress.begin(4)
    for phase in ("rollout", "decode"):
        progress.phase(phase, 0, 4)
        status, _ = read_status(tmp_path)
        assert status is not None and status.phase == phase


def test_a_run_of_another_machine_lives_as_long_as_its_status_is_fresh(
    tmp_path: Path,
) -> None:
    """Its lock is not seen on every mount."""
    found = []
    for holder in ("elsewhere", platform.node()):
        run = make_run(tmp_path / holder, GOING)
        (run / "lease.txt").write_text(f"process 4711 on {holder}, since 2026-01-31\n")
        found.append(
            [look_at_run(run, time.time() + later).condition for later in (0, 100)]
        )
    assert found == [["running", "killed"], ["killed", "killed"]]


def test_the_reward_is_that_of_the_last_evaluation_where_there_is_one(
    tmp_path: Path,
) -> None:
    progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=2, shown=False)
    progress.status = replace(GOING, reward=None, gain=None)
    evaluated = {
        "eval/reward_mean": 0.6,
        "eval/paired_gain": 0.1,
        "eval/paired_gain_stderr": 0.01,
    }
    found = []
    for record in (
        {"reward/mean": 0.3},
        {"reward/mean": 0.4, **evaluated},
        {"reward/mean": 0.5},
    ):
        progress.learn({"update": len(found), **record})
        found.append((progress.status.reward, progress.status.gain))
    assert found == [(0.3, None), (0.6, 0.1), (0.6, 0.1)]


def test_a_log_has_lines_a_terminal_a_bar_and_other_ranks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of 60 updates, which was at 3, with a line at least five times a second."""
    monkeypatch.setattr(run_status, "HEARTBEAT_SECONDS", 0.2)
    texts = []
    for shown, terminal in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(
            run_status.sys.stderr, "isatty", lambda terminal=terminal: terminal
        )
        progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=0, shown=shown)
        progress.learn({"update": 3, "time/iteration": 120.0})
        progress.begin(3)
        with progress:
            progress.phase("rollout", 1, 4)
            time.sleep(0.85)
            progress.finished({"update": 4, "reward/mean": 0.5})
            progress.end("finished")
        texts.append(capsys.readouterr().err)
        assert (tmp_path / "status.json").exists() == shown
    nothing, log, bar = texts
    heartbeat, *others, last = log.splitlines()
    assert nothing == "" and heartbeat == "update 4/60  rollout 1/4  1.9 h left"
    assert 1 <= len(others) <= 3 and last.startswith("update 4/60")
    assert all(part in bar for part in ("3/60", "rollout 2/4", "4/60", "reward 0.5"))


def test_a_narrow_terminal_shows_the_reward_and_the_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 columns, at an update after an evaluation and in the phase after it."""
    monkeypatch.setattr(run_status.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        "tqdm.std._screen_shape_wrapper", lambda: lambda stream: (50, 20)
    )
    row = {
        "update": 199,
        "reward/mean": 0.4123,
        "eval/reward_mean": 0.4,
        "eval/paired_gain": 0.16432,
        "eval/paired_gain_stderr": 0.05,
    }
    with RunProgress(
        tmp_path, replace(GOING, num_updates=200), step=1, evaluation_every=10
    ) as progress:
        progress.finished(row)
        progress.finished({"update": 200, "reward/mean": 0.4223})
        progress.phase("evaluation", 14, 16)
    lines = [line.strip() for line in capsys.readouterr().err.split("\r")]
    assert max(map(len, lines)) <= 50
    assert any(
        line.startswith("200/200 reward 0.4223 gain +0.164 evaluation 15/16")
        for line in lines
    )


# --------------------------------------------------------------------------------------
# a model that got worse


def test_a_run_that_got_worse_says_so_until_an_evaluation_takes_it_back(
    runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    done = runs / "done"
    status = replace(GOING, state="finished", gain=None)
    progress = RunProgress(done, status, step=1, evaluation_every=10)
    progress.begin(10)
    row = {
        "update": 20,
        "eval/reward_mean": 0.1,
        "eval/paired_gain": -0.31,
        "eval/paired_gain_stderr": 0.1,
    }
    progress.finished(row)
    progress.end("finished")
    said = "The model is worse than at update 0 since update 20"
    assert said in caplog.text
    write_run_page(done)
    assert said in (done / "index.html").read_text("utf-8")
    assert main(["status", str(done)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "finished, worse" in lines[1]
    assert lines[2].startswith(f"{done}: worse than at update 0 since")
    progress.finished(row | {"update": 30, "eval/paired_gain": -0.2})
    assert progress.status.worse is None


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_stops_when_it_got_worse_and_goes_on_when_it_is_told_to(
    tiny_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls: list[int] = []

    def falling(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        if len(prompts) > 1:  # a video alone is scored a second time
            calls.append(len(prompts))
        # not at update 1
        return torch.linspace(0, 0.01, len(prompts)) - len(calls) * (len(calls) > 3)

    reward = [
        f"--reward.rewards=[{register(falling)}]",
        "--reward.weights={falling: 1}",
    ]
    words = [
        *reward,
        "--evaluation.every=1",
        "--training.num_updates=3",
        "--checkpoint.asynchronous=false",
    ]
    file = tmp_path / "falling.yaml"
    file.write_text(dump_config(tiny_run(*words)))

    def train(*more: str) -> list[str]:
        assert main(["train", str(file), *more]) == 0
        return capsys.readouterr().out.splitlines()[-2:]

    stop = "--evaluation.stop_when_worse=true"
    back = f"{tmp_path}/run/checkpoints/update-000001"
    # a job that is queued again does not go on by itself
    for resume in ("none", "auto", back):
        before = len(calls)
        model, stopped = train(stop, f"--resume={resume}")
        assert "worse than at update 0 since update 2" in model
        assert stopped.startswith(
            "Stopped after update 2, as evaluation.stop_when_worse says."
        )
        assert (len(calls) == before) == (resume == "auto")
    result = Run(tiny_run(*words, stop, "--resume=auto")).train()
    assert (
        not result.finished
        and result.update == 2
        and result.stop_reason == result.worse is not None
    )
    model, end = train("--resume=auto")
    assert (
        "worse than at update 0 since update 2" in model
        and "Finished, but it got worse: look at" in end
    )
    with pytest.raises(
        ConfigError, match=r"stop_when_worse is True, but it must be false with every 0"
    ):
        tiny_run(stop, "--evaluation.every=0")
