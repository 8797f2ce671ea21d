"""Modules that an import loads, counted in a fresh process."""

import json
import os
import subprocess
import sys
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
# Start-up hooks of other installed packages may have loaded `typing`, and load more at the first search for a module:
# both happen before the count.


def import_cost(module: str) -> dict[str, float]:
    """Costs of importing a module of this checkout in a fresh process, by quantity.

    Returns:
        seconds; project_modules of sage_fast and sage_kernels, itself included, without the commands (each is one more
        command's options); standard_modules that were not loaded already; third_party packages.

    Example: ``{"seconds": 0.002, "project_modules": 1, "standard_modules": 0, "third_party": 0}``
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGE_KERNELS")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORT.format(module=module)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"import {module} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    top = [name.split(".")[0] for name in found["modules"]]
    project = ("sage_fast", "sage_kernels")
    own = [name for name in found["modules"] if name.split(".")[0] in project]
    return {
        "seconds": found["seconds"],
        "project_modules": sum(not name.startswith("sage_fast.commands") for name in own),
        "standard_modules": sum(name in sys.stdlib_module_names for name in top),
        "third_party": len(set(top).difference(project, sys.stdlib_module_names)),
    }
