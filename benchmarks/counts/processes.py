"""What a process of its own costs: the modules that an import loads, and the memory of the toy run."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

IMPORT = """
import json, sys, time
before, start = set(sys.modules), time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted(set(sys.modules) - before)}}))
"""

TOY_RUN = """
import json, re, sys
from sage_fast.config.load import load_config
from sage_fast.run.run import build_trainer

def mebibytes(field):
    with open("/proc/self/status") as file:
        return int(re.search(field + r":\\s+(\\d+) kB", file.read())[1]) / 1024

trainer = build_trainer(load_config("configs/toy_cpu.yaml", sys.argv[1:]))
loaded = mebibytes("VmRSS")
trainer.iterate()
print(json.dumps({"loaded": loaded, "peak": mebibytes("VmHWM")}))
"""
# The high-water mark of /proc belongs to this program alone; `ru_maxrss` is inherited from the parent process.

TOY_OVERRIDES = ("--rollout.batch_size=32", "--rollout.num_steps=2", "--evaluation.every=0", "--num_threads=1")
"""One micro-batch of the toy run instead of four, and two steps instead of eight: the peak is that of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ImportCost:
    """What an import loads, itself included.

    Example: `ImportCost(seconds=0.002, project=1, standard=0, third_party=())`
    """

    seconds: float
    project: int
    """Modules of sage_fast and sage_kernels, those of the commands left out: each is one more command's options."""
    standard: int
    """Modules of the standard library that were not loaded already."""
    third_party: tuple[str, ...]
    """Top-level names of everything else."""


def import_cost(module: str) -> ImportCost:
    """Import a module of this checkout in a fresh process."""
    found = _run(IMPORT.format(module=module))
    top = [name.split(".")[0] for name in found["modules"]]
    project = ("sage_fast", "sage_kernels")
    return ImportCost(
        seconds=found["seconds"],
        project=sum(n.split(".")[0] in project and not n.startswith("sage_fast.commands") for n in found["modules"]),
        standard=sum(name in sys.stdlib_module_names for name in top),
        third_party=tuple(sorted(set(top).difference(project, sys.stdlib_module_names))),
    )


def toy_run_growth() -> float | None:
    """MiB by which the first update of the toy run exceeds what imports and weights take: resident memory, one thread.

    None where the system has no /proc.
    """
    if not Path("/proc/self/status").exists():
        return None
    found = _run(TOY_RUN, *TOY_OVERRIDES)
    return float(found["peak"] - found["loaded"])


def _run(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program that prints JSON, with this checkout first on its path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGE_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the program to measure ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
