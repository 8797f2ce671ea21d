"""Timings of SAGE-Fast. `python -m benchmarks` lists the commands; none prints a
speed-up of what failed its parity.

On a machine without a GPU every command runs with --smoke: tiny shapes, kernels in
Triton's interpreter, all of the code and none of the meaning.
"""

import os
import time

STARTED = time.monotonic()
"""When this process began, all but an instant: a budget counts the seconds that
importing takes too.
"""

import torch  # noqa: E402

# Triton reads this when a kernel is defined, hence before any module of this package
# imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
