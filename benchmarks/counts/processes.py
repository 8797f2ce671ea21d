"""Modules that an import loads, and CPU time of commands, each in a fresh process."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

IMPORT = """
import importlib.util, json, sys, time, typing
importlib.util.find_spec("a_module_that_does_not_exist")
before, start = set(sys.modules), time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted(set(sys.modules) - before)}}))
"""
# Start-up hooks of other installed packages may have loaded `typing`, and load more at
# the first search for a module: both happen before the count.


def measure_imports() -> dict[str, float]:
    """Imports of the package and its command line: seconds; modules of sage_fast and
    sage_kernels, without the commands (each is one more command's options); standard
    modules that were not loaded already; third-party packages.
    """
    costs: dict[str, float] = {}
    for module in ("sage_fast", "sage_fast.commands.cli"):
        found = json.loads(_run(IMPORT.format(module=module)).splitlines()[-1])
        top = [name.split(".")[0] for name in found["modules"]]
        project = ("sage_fast", "sage_kernels")
        own = [name for name in found["modules"] if name.split(".")[0] in project]
        costs |= {
            f"imports.seconds/{module}": found["seconds"],
            f"imports.project_modules/{module}": sum(
                not name.startswith("sage_fast.commands") for name in own
            ),
            f"imports.standard_modules/{module}": sum(
                name in sys.stdlib_module_names for name in top
            ),
            f"imports.third_party/{module}": len(
                set(top).difference(project, sys.stdlib_module_names)
            ),
        }
    return costs


RUN = (
    "import sys\nfrom sage_fast.commands.cli import main\nsys.exit(main({words!r}) "
    "not in (0, 1))"
)
"""A command that has done its work: `doctor` and `plan` end with 1 where the machine is
not ready.
"""

PROGRAMS = {
    "status": RUN.format(words=["status", "{run}"]),
    "configuration": (
        "from sage_fast.config.load import "
        "load_config\nload_config('hv15_480p_lora_8gpu')"
    ),
    "doctor": RUN.format(words=["doctor"]),
    "plan": RUN.format(words=["plan", "hv15_480p_lora_8gpu"]),
}


ROUNDS = 2
"""Processes of each, the least of which counts."""


def measure_commands() -> dict[str, float]:
    """CPU time of commands, user and system, over that of importing torch; each the
    least of some rounds.

    A busy machine lengthens all of them, by up to two where hyperthreads share a core,
    and their ratios less.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text("output_dir: here\n", encoding="utf-8")
        programs = {"torch": "import torch"} | {
            name: program.replace("{run}", folder) for name, program in PROGRAMS.items()
        }
        rounds = [
            {name: _cpu_seconds(program) for name, program in programs.items()}
            for _ in range(ROUNDS)
        ]
    least = {name: min(seconds[name] for seconds in rounds) for name in programs}
    return {
        f"commands.cpu_time/{name}": least[name] / least["torch"] for name in PROGRAMS
    }


def _cpu_seconds(program: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(program)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run(program: str) -> str:
    """Output of a program that Python runs in a fresh process, with this checkout."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SAGE_KERNELS")
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{program} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout
