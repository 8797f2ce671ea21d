"""Fixtures of the kernel tests: where they run, and NaN in every buffer that a kernel
must fill.
"""

from collections.abc import Iterator

import pytest
import torch

from sage_kernels import common


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU with the kernels in Triton's
    interpreter.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert common.INTERPRETED, (
        "TRITON_INTERPRET must be set before sage_kernels is imported, see "
        "tests/conftest.py"
    )
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An element that no kernel writes is NaN."""
    monkeypatch.setattr(common, "POISON_EMPTY", True)
    yield
