"""Tests that need a GPU: parity of the compiled kernels, at small shapes and at the shapes of the model."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sage_kernels import linear_gelu_tanh, parity, registry
from sage_kernels.registry import Case, OpSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(spec, case, dtype, id=f"{spec.name}-{case.id}-{str(dtype).removeprefix('torch.')}")
        for spec in registry.specs().values()
        for case in getattr(spec, kind)
        for dtype in spec.dtypes
    ]


@pytest.mark.parametrize(("spec", "case", "dtype"), cases("bench_cases"))
def test_shapes_of_the_model(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    assert parity.failures(parity.compare(spec, case, dtype, "cuda")) == []


def test_epilogue_of_the_matrix_product_is_the_tanh_form() -> None:
    x, weight, bias = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 256, 512), (1024, 512), (1024,))
    )
    exact = F.gelu(F.linear(x.double(), weight.double() / 16, bias.double()), approximate="tanh")
    given = linear_gelu_tanh(x, weight / 16, bias)
    # The erf form differs by up to 5e-4, less than bfloat16 resolves near 1: the mean error tells them apart.
    erf = F.gelu(F.linear(x.double(), weight.double() / 16, bias.double()))
    assert float((given - exact).abs().max()) < 0.05
    assert abs(float((given - exact).mean())) < abs(float((given - erf).mean()))
