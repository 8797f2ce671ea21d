"""gated_residual beyond parity: the reference's own backward, per-sample independence, the gradient of x."""

import torch
from torch import Tensor

from sage_kernels import gated_residual, reference
from tests.kernels.support import assert_backward_is_autograd


def sample(batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, batch, tokens, width, generator=generator)
    return x.to(dtype), y.to(dtype), torch.randn(batch, width, generator=generator).to(dtype)


def test_reference_backward_is_autograd_of_the_reference() -> None:
    x, y, gate = sample(2, 5, 7, torch.float64)
    assert_backward_is_autograd(
        reference.gated_residual,
        (x, y, gate),
        lambda cotangents: (cotangents[0], *reference.gated_residual_backward(cotangents[0], y, gate, y.dtype)),
    )


def test_a_sample_does_not_see_its_batch(device: torch.device) -> None:
    x, y, gate = (tensor.to(device) for tensor in sample(3, 9, 40))
    together = gated_residual(x, y, gate)
    for i in range(3):
        assert torch.equal(gated_residual(x[i : i + 1], y[i : i + 1], gate[i : i + 1])[0], together[i])


def test_gate_zero_is_the_residual_itself(device: torch.device) -> None:
    x, y, gate = (tensor.to(device) for tensor in sample(2, 3, 8, torch.bfloat16))
    assert torch.equal(gated_residual(x, y, torch.zeros_like(gate)), x)


def test_gradient_of_x_is_the_cotangent(device: torch.device) -> None:
    x, y, gate = (tensor.to(device) for tensor in sample(2, 3, 8))
    x.requires_grad_()
    cotangent = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(gated_residual(x, y, gate), x, cotangent)
    assert torch.equal(gradient, cotangent)


def test_no_tokens(device: torch.device) -> None:
    x, y, gate = (tensor.to(device).requires_grad_() for tensor in sample(2, 0, 16))
    out = gated_residual(x, y, gate)
    _, _, dgate = torch.autograd.grad(out, (x, y, gate), torch.empty_like(out))
    assert out.shape == (2, 0, 16)
    assert not dgate.any()
