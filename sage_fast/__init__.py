"""SAGE-Fast: GRPO post-training of HunyuanVideo-1.5 and Wan. Importing this
package loads nothing heavy.

run = train("toy_cpu")              docs/how_to/python.md
accelerate(pipe.transformer)        docs/how_to/generate.md
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage_fast.config.errors import SageError
    from sage_fast.config.load import load_config
    from sage_fast.config.schema import RunConfig
    from sage_fast.models.fused import accelerate
    from sage_fast.models.hunyuan15.fused import Acceleration
    from sage_fast.records import Prompt, RolloutRecord
    from sage_fast.run.run_status import (
        Callback,
        EvaluationRecord,
        SaveRecord,
        StopRun,
        UpdateRecord,
    )
    from sage_fast.tools.api import TrainedRun, evaluate, generate, open_run, train
    from sage_fast.tools.exporting import export

__all__ = [
    "Acceleration",
    "Callback",
    "EvaluationRecord",
    "Prompt",
    "RolloutRecord",
    "RunConfig",
    "SageError",
    "SaveRecord",
    "StopRun",
    "TrainedRun",
    "UpdateRecord",
    "accelerate",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "open_run",
    "train",
]

__version__ = "0.1.0"

# OpenMP reads it when torch is loaded. By default its threads spin while they wait for
# one another, and on a busy machine take the very core that the other one needs: a
# forward of the toy network took four times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Module -> names of it, imported when one is asked for.
_HOMES = {
    "sage_fast.config.errors": ("SageError",),
    "sage_fast.config.load": ("load_config",),
    "sage_fast.config.schema": ("RunConfig",),
    "sage_fast.models.fused": ("accelerate",),
    "sage_fast.records": ("Prompt", "RolloutRecord"),
    "sage_fast.run.run_status": (
        "Callback",
        "EvaluationRecord",
        "SaveRecord",
        "StopRun",
        "UpdateRecord",
    ),
    "sage_fast.tools.api": ("TrainedRun", "evaluate", "generate", "open_run", "train"),
    "sage_fast.tools.exporting": ("export",),
}


def __getattr__(name: str) -> Any:
    # torch and diffusers take seconds to import.
    if name == "Acceleration":
        from sage_fast.models.hunyuan15.fused import Acceleration

        return Acceleration
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
