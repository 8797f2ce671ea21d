"""Folders in which a checkpoint is being written or deleted, and which of them nobody works on any more.

A name such as `.update-000040.3f9a01c2-4711-88123-5be0.partial` says on which machine, by which process, started when,
and ends with a random number.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from sage_fast.checkpoint.folder import checkpoint_name

PATTERN = ".update-*.partial"
ABANDONED_SECONDS = 3600.0
"""A partial folder of another machine is given up when nothing in it has changed for so long. Writing changes it all
the time; the clocks of two machines may differ by minutes."""


def new_attempt() -> str:
    """Identity of a process's attempt at a run, which others on the same machine can ask to be alive."""
    return f"{_machine()}-{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(2)}"


def partial_name(update: int, attempt: str) -> str:
    """Folder name of a checkpoint while an attempt writes or deletes it; no two attempts share one."""
    return f".{checkpoint_name(update)}.{attempt}.partial"


def remove_abandoned(root: Path) -> None:
    """Delete what attempts that have ended left behind. OSError when that fails."""
    for folder in root.glob(PATTERN):
        if not _is_in_use(folder):
            shutil.rmtree(folder)


def _is_in_use(folder: Path) -> bool:
    match = re.fullmatch(r"\.update-\d+\.([0-9a-f]+)-(\d+)-(\d+)-[0-9a-f]+(\.deleted)?\.partial", folder.name)
    if match is not None and match[1] == _machine():
        return _start_of(int(match[2])) == int(match[3])
    return time.time() - _last_change(folder) < ABANDONED_SECONDS


def _last_change(folder: Path) -> float:
    """When a file below a folder was last written, in seconds since 1970."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # somebody is at work in it
            times.append(path.stat().st_mtime)
    return max(times)


def _machine() -> str:
    """Identity of the processes among which a number means one process; it tells nobody the machine's name."""
    words = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not on Linux
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        words.append(os.readlink("/proc/self/ns/pid"))  # containers of one machine count their processes apart
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _start_of(process: int) -> int | None:
    """When a process of this machine was started, in ticks since boot (0 where that is not known); None when there is
    none with this number.
    """
    try:
        os.kill(process, 0)
        words = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return None
    except OSError:  # another user's, or not on Linux
        return 0
    return int(words.rpartition(")")[2].split()[19])  # fields after the command's name, which may hold anything
