"""Requests to stop: every signal, a closed terminal, a STOP file; nothing that the user has said to ignore."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from sage_fast.run.interrupt import SAME_KEY_PRESS, SIGNALS, GracefulStop

# The run stands for any loop that prints; a closed terminal must not turn its prints into errors.
LOOP = """
import sys, time
from sage_fast.run.interrupt import GracefulStop
with GracefulStop() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("saved")
"""


@pytest.mark.signals
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_every_signal_is_a_request(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before
    assert f"{number.name}: finishing this update, then saving." in capfd.readouterr().err


def test_a_terminal_that_is_closed_stops_the_loop_which_then_saves(tmp_path: Path) -> None:
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
def test_one_key_press_that_comes_twice_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        time.sleep(SAME_KEY_PRESS + 0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("finishing this update") == 1


def test_a_stop_file_asks_to_stop_and_is_gone_afterwards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "STOP").touch()  # of another time
    with GracefulStop(tmp_path) as stop:
        assert not stop.requested
        (tmp_path / "STOP").touch()
        assert stop.requested and stop.requested
        assert (tmp_path / "STOP").exists()
    assert not (tmp_path / "STOP").exists()
    assert capfd.readouterr().err.count("saving after this update") == 1
