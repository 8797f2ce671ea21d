"""No kernel reads or writes beyond a tensor; see `guard_pages.py`."""

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels import guard_pages


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has memcheck for this")
def test_no_access_lies_beside_its_tensor() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "SAGE_KERNELS_POISON_EMPTY": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", guard_pages.__name__]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == guard_pages.DONE, (
        done.returncode,
        lines[-1:],
        done.stderr[-2000:],
    )
    assert len(lines) == len(guard_pages.CASES) + 1
