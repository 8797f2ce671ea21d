"""One writer per run directory: who holds it is named, who has died gives way, and what
is deleted is called that.
"""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from sage_fast.config.errors import RunDirectoryError
from sage_fast.config.schema import RunConfig
from sage_fast.run.directory import Lease, look_at
from sage_fast.run.run import Run
from sage_fast.run.run_status import Status, look_at_run
from tests.run.test_resume import contents

MakeRun = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("nothing_drawn")


def test_a_second_run_is_refused_before_the_model_is_loaded(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    """By name, also where both have the same process number and host."""
    config = tiny_run("--model.path=nowhere")
    with (
        Lease(Path(config.output_dir)),
        pytest.raises(
            RunDirectoryError,
            match=rf"written by another run: process {os.getpid()} on .*since 2.*STOP",
        ),
    ):
        Run(config)


def test_a_run_that_was_loading_meanwhile_changes_nothing(tiny_run: MakeRun) -> None:
    """Both found the directory free; the second starts while the first trains, and
    again after it has ended.
    """
    first = Run(tiny_run())
    second = Run(tiny_run())
    with first.lease, pytest.raises(RunDirectoryError, match="written by another run"):
        second.train()
    log = Run(tiny_run()).train().output_dir / "metrics.jsonl"
    late = Run(tiny_run("--resume=auto"))
    log.open("a").write('{"update": 3}\n')
    before = contents(log.parent)
    with pytest.raises(RunDirectoryError, match="while this one was being loaded"):
        late.train()
    assert contents(log.parent) | {"lease.txt": before["lease.txt"]} == before


def test_a_stop_file_counts_from_the_start_of_a_run_on(tiny_run: MakeRun) -> None:
    """One that comes while the model is loaded is for this run, one of another time is
    for none.
    """
    config = tiny_run()
    stop = Path(config.output_dir) / "STOP"
    stop.parent.mkdir(parents=True, exist_ok=True)
    stop.touch()
    run = Run(config)
    assert not stop.exists()
    stop.touch()
    result = run.train()
    assert not result.finished and result.update == 0 and not stop.exists()


HOLD = """
import sys
from pathlib import Path
from sage_fast.run.directory import Lease
with Lease(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_holder_is_named_as_long_as_it_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder, alive = look_at(tmp_path)
        assert alive and holder.startswith(f"process {process.pid} on ")
        process.kill()
    assert look_at(tmp_path) == (holder, False)
    with Lease(tmp_path) as lease:
        lease.check()
        assert (
            (tmp_path / "lease.txt")
            .read_text()
            .startswith(f"process {os.getpid()} on ")
        )
        assert look_at(tmp_path)[1]
    assert not look_at(tmp_path)[1]


def test_a_fork_that_lives_on_does_not_keep_the_lease(tmp_path: Path) -> None:
    """Such as a worker that a reward has started, when the run is killed."""
    waiting, end = os.pipe()
    running, started = os.pipe()
    with Lease(tmp_path):
        if not (child := os.fork()):
            os.write(started, b".")
            os.read(waiting, 1)
            os._exit(0)
        os.read(running, 1)
    assert not look_at(tmp_path)[1]
    os.write(end, b".")
    os.waitpid(child, 0)
    for descriptor in (waiting, end, running, started):
        os.close(descriptor)


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Lease(tmp_path) as lease:
        lease.check()
    assert "cannot be locked (No locks available): a second run" in caplog.text


def test_locks_that_are_local_to_a_client_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with nolock, Lustre with localflock: each client gets the lock, and sees
    nobody else's.
    """
    holds: set[str] = set()

    def local(file: object, kind: int) -> None:
        if platform.node() in holds:
            raise BlockingIOError
        holds.update({platform.node()} if kind & fcntl.LOCK_EX else ())

    def on(name: str) -> None:
        monkeypatch.setattr(platform, "node", lambda: name)

    monkeypatch.setattr(fcntl, "flock", local)
    on("node1")
    with Lease(tmp_path) as first:
        (tmp_path / "status.json").write_text(
            json.dumps(asdict(Status(update=4, num_updates=60)))
        )
        on("node2")
        assert look_at_run(tmp_path).condition == "running"
        assert look_at_run(tmp_path, now=time.time() + 100).condition == "killed"
        first.check()
        with Lease(tmp_path) as second:
            second.check()
            with pytest.raises(
                RunDirectoryError,
                match=r"another run writes there \(.*names process \d+ on node2, since",
            ):
                first.check()


def test_a_directory_that_another_run_has_made_again_is_not_written(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    with Lease(directory) as lease:
        directory.rename(tmp_path / "moved")
        with (
            Lease(directory) as other,
            pytest.raises(RunDirectoryError, match="deleted or moved"),
        ):
            other.check()
            assert not lease.is_own()
            lease.check()


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_directory_that_is_deleted_is_named_as_that(
    tiny_run: MakeRun, asynchronous: str
) -> None:
    run = Run(
        tiny_run(
            "--training.num_updates=4", f"--checkpoint.asynchronous={asynchronous}"
        )
    )
    iterate = run.trainer.iterate

    def delete() -> dict[str, float]:
        record = iterate()
        if record["update"] == 2:
            run.writer.wait()
            shutil.rmtree(run.directory)
        return record

    run.trainer.iterate = delete  # type: ignore[method-assign]
    with pytest.raises(
        RunDirectoryError, match="was deleted or moved while the run was writing"
    ):
        run.train()
