"""sde_step beyond parity: rounding as eager PyTorch does, the log-probability,
refusals.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sage_kernels import gaussian_log_prob, sde_step, sde_step_log_prob
from sage_kernels.ops import sde_step as module
from sage_kernels.reference.philox import philox_normal

SHAPE = (3, 4, 3, 5, 7)
IDS = torch.tensor([[11, 12, 4], [13, 14, 4], [15, 16, 4]])


def latents(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(count)]


def test_it_is_eager_pytorch_bit_for_bit(device: torch.device) -> None:
    x, v = (t.to(device) for t in latents(2))
    for velocity in (v, v.bfloat16()):
        given = sde_step(x, velocity, None, 0.9848, -0.0837, 0.0)
        assert given.dtype == torch.float32
        assert torch.equal(given, 0.9848 * x + -0.0837 * velocity.float())
    noise = sde_step(torch.zeros_like(x), v, IDS.to(device), 0.0, 0.0, 1.0)
    given = sde_step(x, v, IDS.to(device), 0.9848, -0.0837, 0.0795)
    assert torch.equal(given, (0.9848 * x + -0.0837 * v) + 0.0795 * noise)


def test_log_probability_counts_every_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 5 * 128 + 3
    for name, value in (("BLOCK", 128), ("INTERPRETED_BLOCK", 128), ("SUM_BLOCK", 2)):
        monkeypatch.setattr(module, name, value)
    x = torch.zeros(3, numel, device=device)
    _, given = sde_step_log_prob(x, x, IDS.to(device), 1.0, 0.0, 1.0)
    squares = philox_normal(IDS, numel, dtype=torch.float64).square().mean(1)
    expected = -squares / 2 - torch.log(torch.tensor(2 * torch.pi).double()) / 2
    torch.testing.assert_close(given.cpu().double(), expected, rtol=0, atol=5e-6)


def test_explicit_log_probability_has_the_gradient_of_its_density() -> None:
    x, v, x_next = (t.double().requires_grad_() for t in latents(3))
    std = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    given = torch.autograd.grad(
        gaussian_log_prob(x_next, x, v, a=0.9, b=-0.1, std=std).sum(), (x_next, x, v)
    )
    rows = std.view(-1, 1, 1, 1, 1)
    density = (
        torch.distributions.Normal(0.9 * x - 0.1 * v, rows)
        .log_prob(x_next)
        .flatten(1)
        .mean(1)
    )
    for a, b in zip(
        given, torch.autograd.grad(density.sum(), (x_next, x, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_gradient_is_refused_not_dropped(device: torch.device) -> None:
    x, v = (t.to(device) for t in latents(2))
    x_next = sde_step(x, v.requires_grad_(), IDS.to(device), 0.95, -0.08, 0.2)
    with pytest.raises(RuntimeError, match="autograd"):
        x_next.sum().backward()


@pytest.mark.parametrize("function", [sde_step, sde_step_log_prob])
def test_refuses(function: Callable[..., object]) -> None:
    x, v = latents(2)
    with pytest.raises(ValueError, match="noise_ids are None but std is 0.5"):
        function(x, v, None, 1.0, -0.1, 0.5)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 3\)"):
        function(x, v, IDS[:2], 1.0, -0.1, 0.5)
    with pytest.raises(ValueError, match="needs noise; std is 0.0"):
        sde_step_log_prob(x, v, IDS, 1.0, -0.1, 0.0)
