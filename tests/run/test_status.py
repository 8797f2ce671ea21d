"""Runs as seen from outside: which lives, hangs, was killed, has failed; and what a log shows meanwhile."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sage_fast.commands.cli import main
from sage_fast.config.errors import TrainingError
from sage_fast.config.schema import RunConfig
from sage_fast.run import run_status
from sage_fast.run.lease import Lease
from sage_fast.run.run import Run
from sage_fast.run.run_status import (
    FILE_NAME,
    RunProgress,
    Status,
    format_seconds,
    look_at_run,
    patience,
    read_status,
)

MakeRun = Callable[..., RunConfig]

GOING = Status(update=4, num_updates=60, phase="rollout", done=1, total=4, reward=0.41, gain=0.05)


def make_run(directory: Path, status: Status | None) -> Path:
    directory.mkdir()
    (directory / "config.yaml").write_text("{}\n")
    if status is not None:
        (directory / FILE_NAME).write_text(json.dumps(asdict(status)))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of five: a finished run, one that failed, one that was killed, one that goes on, one that hangs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    make_run(folder / "done", replace(GOING, state="finished", update=60, phase=""))
    make_run(folder / "fails", replace(GOING, state="failed", error="The reward failed.\nSee above."))
    make_run(folder / "gone", GOING)
    make_run(folder / "goes", GOING)
    hanging = make_run(folder / "hangs", GOING)
    long_ago = time.time() - 100
    os.utime(hanging / FILE_NAME, (long_ago, long_ago))
    return folder


def test_five_runs_are_told_apart(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Lease(runs / "goes"), Lease(runs / "hangs"):
        assert main(["status", str(runs)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", str(runs / "goes"), str(runs / "done"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert [line.split()[1] for line in lines[1:6]] == ["finished", "failed", "running", "killed", "hangs"]
    goes = lines[3].split()
    assert goes[0] == str(runs / "goes") and goes[2:7] == ["4/60", "rollout", "1/4", "0.41", "+0.05"]
    notes = "\n".join(lines[6:])
    assert f"{runs / 'fails'}: The reward failed." in notes and "See above" not in notes
    assert f"sage-fast train {runs / 'gone'} --resume auto" in notes
    assert f"{runs / 'hangs'}: no progress, but alive: process {os.getpid()}" in notes
    assert [run["condition"] for run in found] == ["running", "finished"]
    assert found[0]["status"]["update"] == 4 and found[0]["holder"].startswith(f"process {os.getpid()} on")


def test_a_slow_run_does_not_hang(tmp_path: Path) -> None:
    """It may go without progress for as long as it has before, and for longer before its first update."""
    assert patience(GOING) == 60.0
    assert patience(replace(GOING, longest_seconds=600.0)) == 2400.0
    assert patience(replace(GOING, update=0)) == 1800.0
    run = make_run(tmp_path / "slow", replace(GOING, longest_seconds=600.0))
    with Lease(run):
        assert look_at_run(run, time.time() + 2000).condition == "running"
        assert look_at_run(run, time.time() + 2500).condition == "hangs"


# ------------------------------------------------------------------------------------------ what the run writes


def test_the_error_that_ends_a_run_is_kept(tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tiny_run())

    def fail() -> None:
        raise TrainingError("the gradient is not finite")

    monkeypatch.setattr(run.trainer, "iterate", fail)
    with pytest.raises(TrainingError):
        run.train()
    status, _ = read_status(run.directory)
    assert status is not None and (status.state, status.error) == ("failed", "the gradient is not finite")
    assert "the gradient is not finite" in (run.directory / "index.html").read_text("utf-8")


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


# ------------------------------------------------------------------------------------------ lines of a log


def test_the_time_left_is_that_of_updates_and_evaluations(tmp_path: Path) -> None:
    begun = replace(GOING, update=0, num_updates=100)
    shown = RunProgress(tmp_path, begun, step=2, evaluation_every=30)
    assert shown.seconds_left() is None
    shown.finished({"update": 0, "time/evaluation": 50.0})
    shown.finished({"update": 2, "time/iteration": 8.0, "time/checkpoint": 2.0})
    # 49 iterations, and evaluations after 30, 60, 90 and 100 updates.
    assert shown.seconds_left() == shown.status.seconds_left == 49 * 10 + 4 * 50
    assert [format_seconds(s) for s in (59, 200, 9000, 4e5)] == ["59 s", "3.3 min", "2.5 h", "4.6 days"]


def test_a_log_has_lines_a_terminal_a_bar_and_other_ranks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of 60 updates, which was at 3, with a line at least five times a second."""
    monkeypatch.setattr(run_status, "HEARTBEAT_SECONDS", 0.2)
    texts = []
    for shown, terminal in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(run_status.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        progress = RunProgress(tmp_path, GOING, step=1, evaluation_every=0, shown=shown)
        progress.learn({"update": 3, "time/iteration": 120.0})
        progress.begin(3)
        with progress:
            progress.phase("rollout", 1, 4)
            time.sleep(0.85)
            progress.finished({"update": 4, "reward/mean": 0.5})
            progress.end("finished")
        texts.append(capsys.readouterr().err)
        assert (tmp_path / FILE_NAME).exists() == shown
    nothing, log, bar = texts
    heartbeat, *others, last = log.splitlines()
    assert nothing == "" and heartbeat == "update 4/60  rollout 1/4  1.9 h left"
    assert 1 <= len(others) <= 3 and last.startswith("update 4/60")
    assert all(part in bar for part in ("3/60", "rollout 2/4", "4/60", "reward 0.5"))
