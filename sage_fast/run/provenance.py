"""Versions, commit and hardware that a run was made with; nothing that identifies the
host or its user.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from sage_fast import __version__
from sage_fast.config.files import write_text

SOURCE_ROOT = Path(__file__).resolve().parents[2]


def describe_environment() -> dict[str, Any]:
    """Versions, source commit and machine, as JSON values.

    Example:
        ``{"sage_fast": "0.1.0", "commit": "3f2c...-dirty", "python": "3.11.7", "system": "Linux x86_64",
        "packages": {"torch": "2.13.0", ...}, "cpu": {"model": "...", "count": 16, "torch_threads": 16},
        "gpu": {"name": "NVIDIA H100 80GB HBM3", "count": 8, "capability": "9.0", "memory_gib": 79.1,
        "cuda": "13.0"}}``; ``commit`` and ``gpu`` are None where there is none.
    """
    # Here, because `sage-fast --version` imports this file for the commit.
    import torch

    from sage_fast.distributed.failure import package_versions

    return {
        "sage_fast": __version__,
        "commit": git_commit(SOURCE_ROOT),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": package_versions(),
        "cpu": {
            "model": _cpu_model(),
            "count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "gpu": _describe_gpu(),
    }


def write_environment(run_dir: str | os.PathLike[str], update: int = 0) -> Path:
    """Write ``describe_environment()`` into the run's folder and return the path.

    A run that was resumed has another file for what came after that update.
    """
    from sage_fast.run.directory import RunDirectory

    path = RunDirectory(run_dir).environment_after(update)
    write_text(path, json.dumps(describe_environment(), indent=2) + "\n")
    return path


def git_commit(root: Path) -> str | None:
    """The commit checked out at ``root``, with ``-dirty`` after it when tracked files
    differ from it.

    Without a checkout at ``root`` (an installed package, an archive), without a commit
    or without git it is the environment's ``SAGE_FAST_COMMIT``; None where that is not
    set.
    """
    given = os.environ.get("SAGE_FAST_COMMIT")
    # Without this, a package installed inside somebody's repository would report their
    # commit.
    if not (root / ".git").exists():
        return given
    # The hash alone, whatever tags there are.
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return given


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    else:
        lines = []
    models = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def _describe_gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
