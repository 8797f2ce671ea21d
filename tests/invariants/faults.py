"""Runs of the command line in which one file-system call ends the process or fails.

A server process preloads `faults.c`, imports everything once, and forks for every
command: a run of two updates then takes a fraction of a second. Nothing of what a fork
does differs from `python -m sage_fast`, but for a few things that only cost time: a
configuration is read once and the software is described once, a plot is a few bytes
instead of a drawing, and garbage is left to the end of the process.
"""

import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("faults.c")
WARM_UP = -1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended. status: its exit status, -9 after a SIGKILL. output: what it
    said. events: the file-system calls that it made below its folder, such as "rename
    /run/config.yaml".
    """

    status: int
    output: str
    events: list[str]


class FaultServer:
    """Runs commands of `sage-fast` and lets them fail at a file-system call.

    Args:
        scratch: a folder for its own files.
    """

    def __init__(self, scratch: Path) -> None:
        library = scratch / "faults.so"
        compiler = shutil.which("cc") or "gcc"
        subprocess.run(
            [
                compiler,
                "-O1",
                "-shared",
                "-fPIC",
                "-o",
                library,
                SOURCE,
                "-ldl",
                "-lpthread",
            ],
            check=True,
        )
        self._scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.invariants.faults", str(library)],
            cwd=ROOT,
            env=os.environ
            | {
                "LD_PRELOAD": str(library),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "FaultServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        at: int = 0,
        error: int = 0,
        reads: bool = False,
        copies: Path | None = None,
    ) -> Outcome:
        """Run a command.

        Args:
            arguments: of `sage-fast`.
            folder: calls below it are events.
            at: number of the event, from 1, that goes wrong; 0 for none. WARM_UP runs
                in the server itself.
            error: the errno it fails with; 0 kills the process.
            reads: whether opening a file or folder to read it is an event as well.
            copies: a folder in which every event leaves what a kill there would leave
                of `folder`, named by its number.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        output = self._scratch / "output"
        log = self._scratch / "events"
        request = {
            "arguments": list(arguments), "folder": str(folder), "at": at, "error": error, "reads": reads,
            "output": str(output), "log": str(log), "copies": str(copies or ""),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        events = log.read_text().splitlines() if log.exists() else []
        return Outcome(
            status=status, output=output.read_text("utf-8", "replace"), events=events
        )


def serve(library: ctypes.CDLL) -> None:
    """Answer requests, one a line, with the exit status of each."""
    from sage_fast.commands import cli

    for line in sys.stdin:
        request = json.loads(line)
        # before the first fork, so that the caches of a run are inherited
        if request["at"] == WARM_UP:
            with (
                Path(request["output"]).open("w", encoding="utf-8") as output,
                redirect_stdout(output),
            ):
                status = cli.main(request["arguments"])
            print(status, flush=True)
            # a collection takes a fifth of a run, as it goes through all that was
            # imported
            gc.disable()
            continue
        child = os.fork()
        if child == 0:
            _run_in_child(request, library)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_in_child(request: dict[str, Any], library: ctypes.CDLL) -> None:
    from sage_fast.commands.cli import main

    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    signal.alarm(60)
    copies = request["copies"].encode()
    library.faults_arm(
        request["folder"].encode(),
        request["at"],
        request["error"],
        request["reads"],
        log,
        copies,
    )
    status = 1
    try:
        status = main(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  as Python ends a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _take_shortcuts() -> None:
    import pytest
    import torch

    from sage_fast.config import load
    from sage_fast.run import provenance
    from tests.made_runs import draw_nothing

    read = load.load_config
    known: dict[str, Any] = {}

    def read_once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in known:
            known[key] = read(*arguments, **options)
        return known[key]

    torch.set_num_threads(1)
    vars(load)["load_config"] = read_once
    vars(provenance)["describe_environment"] = cache(provenance.describe_environment)
    draw_nothing(pytest.MonkeyPatch())


if __name__ == "__main__":
    _take_shortcuts()
    serve(ctypes.CDLL(sys.argv[1]))
