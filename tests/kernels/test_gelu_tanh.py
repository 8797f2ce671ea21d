"""gelu_tanh beyond parity: tails, the matrix product with its epilogue."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sage_kernels.ops.gelu_tanh as gelu_module
from sage_kernels import gelu_tanh, gelu_tanh_backward, linear_gelu_tanh, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_can_return_the_activation(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.linspace(-6, 6, 5000, dtype=dtype, device=device).view(8, 625)
    gradient, activation = gelu_tanh_backward(torch.ones_like(x), x, True)
    assert torch.equal(activation, gelu_tanh(x))
    alone, nothing = gelu_tanh_backward(torch.ones_like(x), x, False)
    assert torch.equal(alone, gradient)
    assert nothing.numel() == 0


def test_tails_are_finite_and_keep_their_digits(device: torch.device) -> None:
    x = torch.tensor(
        [-3e38, -50.0, -10.0, -6.0, 0.0, 6.0, 10.0, 50.0, 3e38], device=device
    ).requires_grad_()
    y = gelu_tanh(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all()
    assert y[[0, 1, 4]].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(y[5:], x[5:])
    # Half of x (1 + tanh(u)) keeps no digit at -6 in float32; the sigmoid form does.
    exact = reference.gelu_tanh(x.detach().double().cpu())[3]
    assert abs(float(y[3]) / float(exact) - 1) < 2e-5
    assert slope[[1, 4, 7]].tolist() == [0.0, 0.5, 1.0]


def test_elements_beyond_two_to_the_31(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip(
            "runs the one program that begins there, which only the interpreter can"
        )
    from triton.runtime.interpreter import interpreter_builder

    # The tensors begin in the middle of their buffers: an address that wraps around is
    # wrong, not beyond them.
    first = 2**31
    block = 256
    grad, x, dx, out = (
        torch.empty(2 * first + block, dtype=torch.bfloat16)[first:] for _ in range(4)
    )
    values, cotangent = torch.randn(
        2, block, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    x[first:] = values
    grad[first:] = cotangent
    program: Any = interpreter_builder.create_get_program_id
    monkeypatch.setattr(
        interpreter_builder,
        "create_get_program_id",
        lambda axis: interpreter_builder.create_add(
            program(axis), interpreter_builder.get_int32(first // block)
        ),
    )
    gelu_module.gelu_tanh_backward_kernel[(1,)](
        grad, x, dx, out, first + block, BLOCK=block
    )
    gelu_module.gelu_tanh_forward_kernel[(1,)](x, grad, first + block, BLOCK=block)
    monkeypatch.undo()
    gradient, activation = gelu_tanh_backward(cotangent, values, True)
    assert torch.equal(dx[first:], gradient) and torch.equal(grad[first:], activation)
    assert torch.equal(out[first:], activation)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_linear_gelu_tanh(needs_gradient: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((2, 5, 8), (16, 8), (16,))
    )
    weight.requires_grad_(needs_gradient)
    given = linear_gelu_tanh(x, weight, bias)
    expected = F.gelu(
        F.linear(x.double(), weight.double(), bias.double()), approximate="tanh"
    )
    assert given.requires_grad == needs_gradient
    tolerance = 2e-2 if device.type == "cuda" else 1e-5  # a GPU may multiply in TF32
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (2, 0)], ids=str)
def test_linear_gelu_tanh_has_the_shape_of_torchs_linear(
    shape: tuple[int, ...], device: torch.device
) -> None:
    """Also where the product has the GELU in its epilogue, as on a GPU."""
    for where in (device, torch.device("meta")):
        x, weight, bias = (
            torch.zeros(*size, device=where) for size in ((*shape, 8), (16, 8), (16,))
        )
        assert linear_gelu_tanh(x, weight, bias).shape == (*shape, 16)
        assert linear_gelu_tanh(x, weight.requires_grad_(), bias).shape == (*shape, 16)
    with pytest.raises(ValueError, match="^linear_gelu_tanh: bias is None;"):
        linear_gelu_tanh(x, weight, None)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_epilogue_of_the_matrix_product_is_the_tanh_form() -> None:
    x, weight, bias = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((4, 256, 512), (1024, 512), (1024,))
    )
    exact = F.gelu(
        F.linear(x.double(), weight.double() / 16, bias.double()), approximate="tanh"
    )
    given = linear_gelu_tanh(x, weight / 16, bias)
    # The erf form differs by up to 5e-4, less than bfloat16 resolves near 1: the mean
    # error tells them apart.
    erf = F.gelu(F.linear(x.double(), weight.double() / 16, bias.double()))
    assert float((given - exact).abs().max()) < 0.05
    assert abs(float((given - exact).mean())) < abs(float((given - erf).mean()))
