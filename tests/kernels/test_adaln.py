"""adaln and gated_residual_adaln beyond parity: odd inputs, room behind rows, agreement
of joined and separate ops.
"""

import pytest
import torch
from torch import Tensor

from sage_kernels import (
    adaln,
    adaln_backward,
    gated_residual,
    gated_residual_adaln,
    reference,
)


def sample(
    batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, tokens, width, generator=generator)
    scale, shift = torch.randn(2, batch, width, generator=generator)
    return x.to(dtype), scale.to(dtype), shift.to(dtype)


def test_a_large_mean_does_not_drown_the_variance(device: torch.device) -> None:
    # The one-pass formula mean(x^2) - mean(x)^2 loses every digit here.
    x, scale, shift = sample(1, 3, 256)
    wide = adaln((x + 1000).to(device), scale.to(device), shift.to(device)).cpu()
    exact = reference.adaln((x + 1000).double(), scale.double(), shift.double())
    assert float((wide - exact).abs().max()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tail_is_room_behind_every_row(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, scale, shift = (
        tensor.to(device).requires_grad_() for tensor in sample(2, 5, 24, dtype)
    )
    narrow = adaln(x, scale, shift)
    wide = adaln(x, scale, shift, tail=12)
    assert wide.shape == (2, 5, 48) and wide.is_contiguous(), (
        "rows are a multiple of 16"
    )
    assert torch.equal(wide[..., :24], narrow)
    grad = torch.randn_like(wide)
    given, expected = (
        torch.autograd.grad(out, (x, scale, shift), g)
        for out, g in ((wide, grad), (narrow, grad[..., :24]))
    )
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    torch.library.opcheck(
        torch.ops.sage_kernels.adaln,
        (x, scale, shift, 1e-6, 12),
        test_utils="test_faketensor",
    )
    for wrong in (-1, -20, 2.5, None):
        with pytest.raises(
            ValueError,
            match=f"^adaln: tail is {wrong}; it must be a number of columns, 0 or more",
        ):
            adaln(x, scale, shift, tail=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("modulation", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_past_the_norm_is_added_before_rounding(
    dtype: torch.dtype, modulation: bool, device: torch.device
) -> None:
    x, scale, shift = (t.to(device) for t in sample(2, 13, 40, dtype))
    grad, residual = (
        t.to(device)
        for t in (torch.randn(2, 13, 40).to(dtype), torch.randn(13, 2, 40).to(dtype))
    )
    residual = residual.transpose(0, 1)  # rows of another stride
    wide = [t.double().cpu() for t in (grad, x, scale)]
    expected, *sums = reference.adaln_backward(*wide, torch.float64, 1e-6, modulation)
    expected = expected + residual.double().cpu()
    given, *given_sums = adaln_backward(
        grad, x, scale, shift.dtype, 1e-6, modulation, residual
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        given.double().cpu(), expected, rtol=tolerance, atol=tolerance
    )
    for a, b in zip(given_sums, sums, strict=True):
        torch.testing.assert_close(
            a.double().cpu(), b, rtol=2 * tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_with_the_residual_it_is_the_two_ops_one_after_the_other(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, scale, shift = (tensor.to(device) for tensor in sample(2, 7, 40, dtype))
    y = x.flip(1)
    gate = scale.flip(1)
    residual, normed = gated_residual_adaln(x, y, gate, scale, shift)
    assert torch.equal(residual, gated_residual(x, y, gate))
    assert torch.equal(normed, adaln(residual, scale, shift))
