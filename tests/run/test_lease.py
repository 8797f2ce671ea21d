"""One writer per run directory: who holds it is named, who has died gives way, and what is deleted is called that."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sage_fast.config.errors import CheckpointError, RunDirectoryError
from sage_fast.config.schema import RunConfig
from sage_fast.run import lease as lease_module
from sage_fast.run.lease import FILE_NAME, STALE_SECONDS, Holder, Lease
from sage_fast.run.run import Run

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def leave_lease(directory: Path, holder: Holder, age: float = 0.0) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / FILE_NAME
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age,) * 2)


def holder_of(pid: int, directory: Path) -> Holder:
    return replace(Lease(directory)._own, pid=pid, started=lease_module._started(pid), attempt="other")


def elsewhere(directory: Path) -> Holder:
    return replace(Lease(directory)._own, host="node7", machine="node7 boot", attempt="other")


def test_a_second_run_is_refused_before_the_model_is_loaded(tiny_run: MakeRun, tmp_path: Path) -> None:
    config = tiny_run("--model.path=nowhere")
    with (
        Lease(Path(config.output_dir)),
        pytest.raises(RunDirectoryError, match=rf"written by another run: process {os.getpid()} on .*since 2.*STOP"),
    ):
        Run(config)


def test_a_run_that_was_loading_meanwhile_changes_nothing(tiny_run: MakeRun) -> None:
    """Both found the directory free; the second starts while the first trains, and again after it has ended."""
    first, second = Run(tiny_run()), Run(tiny_run())
    with first.lease, pytest.raises(RunDirectoryError, match="written by another run"):
        second.train()
    result = Run(tiny_run()).train()
    before = {p: p.read_bytes() for p in result.output_dir.rglob("*") if p.is_file()}
    late = Run(tiny_run("--resume=auto"))
    (result.output_dir / "metrics.jsonl").open("a").write('{"update": 3}\n')
    with pytest.raises(RunDirectoryError, match="while this one was being loaded"):
        late.train()
    (result.output_dir / "metrics.jsonl").write_bytes(before[result.output_dir / "metrics.jsonl"])
    assert {p: p.read_bytes() for p in result.output_dir.rglob("*") if p.is_file()} == before


def test_a_live_holder_on_this_machine_is_not_waited_for(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    leave_lease(tmp_path, holder_of(other_process.pid, tmp_path), age=10 * STALE_SECONDS)
    with pytest.raises(RunDirectoryError, match=rf"kill {other_process.pid} on"):
        Lease(tmp_path).refuse_others()


@pytest.mark.parametrize("end", ["killed", "not buried", "number used again"])
def test_a_dead_holder_on_this_machine_gives_way_at_once(
    tmp_path: Path, other_process: subprocess.Popen[bytes], end: str
) -> None:
    holder = holder_of(other_process.pid, tmp_path)
    if end == "number used again":
        holder = replace(holder, started="1")
    else:
        other_process.kill()
        if end == "killed":
            other_process.wait()
        else:
            os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)
    leave_lease(tmp_path, holder)
    start = time.monotonic()
    with Lease(tmp_path) as lease:
        lease.check()
        assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()
    assert time.monotonic() - start < 1
    assert not (tmp_path / FILE_NAME).exists()


def test_a_holder_elsewhere_is_believed_dead_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_lease(tmp_path, elsewhere(tmp_path), age=STALE_SECONDS + 1)
    with Lease(tmp_path) as lease:
        lease.check()
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.5)
    leave_lease(tmp_path, elsewhere(tmp_path))
    start = time.monotonic()
    with Lease(tmp_path):
        assert 0.3 < time.monotonic() - start < 5


def test_a_holder_elsewhere_that_shows_a_sign_of_life_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_lease(tmp_path, elsewhere(tmp_path), age=5)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.utime(tmp_path / FILE_NAME))
    with pytest.raises(RunDirectoryError, match="process .* on node7"):
        Lease(tmp_path).refuse_others()


def test_a_lease_cut_short_counts_as_one_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE_NAME).write_text('{"host": "no')
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.2)
    with Lease(tmp_path) as lease:
        lease.check()


def test_a_held_lease_is_kept_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "TOUCH_SECONDS", 0.01)
    with Lease(tmp_path):
        os.utime(tmp_path / FILE_NAME, (0, 0))
        deadline = time.monotonic() + 5
        while (tmp_path / FILE_NAME).stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / FILE_NAME).stat().st_mtime > 1


def test_who_was_taken_for_dead_stops_and_leaves_the_other_its_lease(tiny_run: MakeRun) -> None:
    run = Run(tiny_run("--training.num_updates=4", "--evaluation.every=0"))
    iterate = run.trainer.iterate

    def taken_over() -> dict[str, float]:
        leave_lease(run.directory, elsewhere(run.directory))
        return iterate()

    run.trainer.iterate = taken_over  # type: ignore[method-assign]
    with pytest.raises(RunDirectoryError, match="taken over by another run .*node7"):
        run.train()
    assert (run.directory / FILE_NAME).exists()


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_directory_that_is_deleted_is_named_as_that(tiny_run: MakeRun, asynchronous: str) -> None:
    import shutil

    run = Run(tiny_run("--training.num_updates=4", f"--checkpoint.asynchronous={asynchronous}"))
    iterate = run.trainer.iterate

    def delete() -> dict[str, float]:
        record = iterate()
        if record["update"] == 2:
            run.writer.wait()
            shutil.rmtree(run.directory)
        return record

    run.trainer.iterate = delete  # type: ignore[method-assign]
    with pytest.raises(RunDirectoryError, match="was deleted or moved while the run was writing"):
        run.train()


def test_other_failures_keep_their_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="disk full"), Lease(tmp_path):
        raise CheckpointError("disk full")
    assert not (tmp_path / FILE_NAME).exists()
