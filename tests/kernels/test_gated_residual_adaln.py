"""gated_residual_adaln beyond parity: agreement with the two ops it joins."""

import pytest
import torch
from torch import Tensor

from sage_kernels import adaln, gated_residual, gated_residual_adaln, reference


def sample(batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, batch, tokens, width, generator=generator)
    modulation = torch.randn(3, batch, width, generator=generator)
    return [tensor.to(dtype) for tensor in (*rows, *modulation)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_two_ops_one_after_the_other(dtype: torch.dtype, device: torch.device) -> None:
    x, y, gate, scale, shift = (tensor.to(device) for tensor in sample(2, 7, 40, dtype))
    residual, normed = gated_residual_adaln(x, y, gate, scale, shift)
    assert torch.equal(residual, gated_residual(x, y, gate))
    assert torch.equal(normed, adaln(residual, scale, shift))


@pytest.mark.parametrize("unused", [0, 1])
def test_one_output_may_go_unused(unused: int, device: torch.device) -> None:
    inputs = [tensor.to(device).requires_grad_() for tensor in sample(2, 5, 24)]
    cotangent = torch.randn(2, 5, 24, device=device)
    given = torch.autograd.grad(gated_residual_adaln(*inputs)[1 - unused], inputs, cotangent, allow_unused=True)
    expected = torch.autograd.grad(
        reference.gated_residual_adaln(*inputs)[1 - unused], inputs, cotangent, allow_unused=True
    )
    for a, b in zip(given, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-5, atol=1e-5)
