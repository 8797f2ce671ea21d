"""Requests to stop: every signal, a closed terminal, a STOP file; nothing that the user
has said to ignore.
"""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sage_fast.rewards.server import lasting_streams
from sage_fast.run.directory import SAME_KEY_PRESS, SIGNALS, GracefulStop

# The run stands for any loop that prints; a closed terminal must not turn its prints
# into errors.
LOOP = """
import sys, time
from sage_fast.rewards.server import lasting_streams
from sage_fast.run.directory import GracefulStop
with lasting_streams(), GracefulStop() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("saved")
"""


@pytest.mark.signals
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_every_signal_is_a_request(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before
    assert (
        f"{number.name}: finishing this update, then saving." in capfd.readouterr().err
    )


def test_a_terminal_that_is_closed_stops_the_loop_which_then_saves(
    tmp_path: Path,
) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", LOOP, str(tmp_path / "saved")])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    assert (tmp_path / "saved").read_text() == "saved"


def test_nohup_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.signals
def test_one_key_press_that_comes_twice_is_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        time.sleep(SAME_KEY_PRESS + 0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("finishing this update") == 1


def test_a_stop_file_asks_to_stop_and_is_gone_afterwards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with GracefulStop(tmp_path) as stop:
        assert not stop.requested
        (tmp_path / "STOP").touch()
        assert stop.requested and stop.requested
        assert (tmp_path / "STOP").exists()
    assert not (tmp_path / "STOP").exists()
    assert capfd.readouterr().err.count("saving after this update") == 1


# Ctrl-C in a shell reaches every program of a pipeline: the reader of the words is gone
# when the run speaks next.
PIPED = """
import os, signal, subprocess, sys, time
from sage_fast.rewards.server import lasting_streams
from sage_fast.run.directory import GracefulStop
with lasting_streams(), GracefulStop() as stop:
    print("ready", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
    os.write(1, b"C code")
    subprocess.run(["echo", "a child"], check=True)
with open(sys.argv[1], "w") as file:
    file.write("saved")
"""


def test_words_that_nobody_reads_any_more_end_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PIPED, str(tmp_path / "saved")]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    process = subprocess.Popen(words, **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    process.stdin.write(b"go\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "saved"


def test_words_for_a_full_disk_are_dropped_and_later_ones_are_not(
    tmp_path: Path,
) -> None:
    """A log of at most 4 kB: words beyond are an error of the disk, EFBIG, that must
    not end anything.
    """
    log = tmp_path / "log"
    program = (
        "import os, resource, signal\n"
        "from sage_fast.rewards.server import lasting_streams\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "with lasting_streams():\n"
        "    for _ in range(100):\n"
        "        print('x' * 100)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, "
        "resource.RLIM_INFINITY))\n"
        "    print('room again')\n"
    )
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    text = log.read_text()
    assert len(text) <= 4096 + len("room again\n") and text.endswith("room again\n")


def test_streams_of_a_host_program_stay_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout
    with lasting_streams():
        assert sys.stdout is before
        print("heard")
    assert capsys.readouterr().out == "heard\n"


@pytest.mark.signals
@pytest.mark.parametrize(
    ("number", "from_thread"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)],
)
def test_a_process_that_a_reward_forks_ends_by_signals(
    number: signal.Signals, from_thread: bool
) -> None:
    """Multiprocessing's `terminate` and a scheduler mean what they say to it."""
    children: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            try:
                time.sleep(60)
            finally:
                os._exit(7)
        children.append(child)

    with GracefulStop() as stop:
        if from_thread:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        else:
            fork()
        time.sleep(0.1)
        os.kill(children[0], number)
        _, status = os.waitpid(children[0], 0)
        assert not stop.requested
    ended_by_python = number == signal.SIGINT
    assert (
        (os.WEXITSTATUS(status) == 7)
        if ended_by_python
        else (os.WTERMSIG(status) == number)
    )


@pytest.mark.signals
def test_a_process_is_ended_as_soon_as_it_is_forked() -> None:
    """As by `start` and `terminate` of multiprocessing, before the process has run a
    line.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with GracefulStop() as stop:
        for _ in range(25):
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(7)
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert (
            signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask and not stop.requested
        )


@pytest.mark.signals
@pytest.mark.parametrize("first", ["asked", "hung"])
def test_a_reward_that_hangs_is_not_waited_for(
    first: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with GracefulStop() as stop:
        if first == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
            telling = threading.Timer(
                0.1,
                stop.watch,
                ["Reward 'slow' has been running for 5 min on prompt 3."],
            )
        else:
            stop.watch("Reward 'slow' has been running for 5 min on prompt 3.")
            telling = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM])
        telling.start()
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(30)
        telling.join()
    assert (
        "Reward 'slow' has been running for 5 min on prompt 3. Ending without "
        "this update"
    ) in capfd.readouterr().err


@pytest.mark.signals
def test_a_reward_that_ended_after_all_is_forgotten() -> None:
    with GracefulStop() as stop:
        stop.watch("Reward 'slow' has been running for 5 min on prompt 3.")
        stop.watch(None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
