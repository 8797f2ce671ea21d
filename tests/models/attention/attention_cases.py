"""Inputs for tests of attention, and what the results must be, in float64."""

import torch
from torch import Tensor

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
# B, Nq, Nk, H, D
CASES = {
    "one-token": (1, 1, 1, 1, 8),
    "odd": (2, 7, 7, 3, 32),
    "more-keys": (1, 5, 70, 2, 12),
    "more-queries": (2, 37, 3, 1, 32),
    "half-a-tile": (1, 3, 64, 1, 8),
    "head-dim-128": (1, 19, 19, 2, 128),
}
# Relative to the norm of what is compared, plus one per element.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    case: str,
    dtype: torch.dtype,
    layout: str = "contiguous",
    device: torch.device = CPU,
) -> Inputs:
    """q, k, v and a gradient of out; `layout` says what the first three are views of."""
    batch, queries, keys, heads, dim = CASES[case]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(
            shape, generator=generator, dtype=torch.float64, device=device
        ).to(dtype)

    grad_out = normal(batch, queries, heads, dim)
    if layout == "contiguous":
        return (
            normal(batch, queries, heads, dim),
            *normal(2, batch, keys, heads, dim).unbind(0),
            grad_out,
        )
    if layout == "fused":  # what one projection to 3 H D gives
        buffer = normal(batch, max(queries, keys), 3, heads, dim)
        q, k, v = buffer.unbind(2)
        return q[:, :queries], k[:, :keys], v[:, :keys], grad_out
    assert layout == "tokens-first"
    q = normal(queries, batch, heads, dim).transpose(0, 1)
    k, v = (normal(keys + 4, batch, heads, dim)[2:-2].transpose(0, 1) for _ in range(2))
    return q, k, v, grad_out


def oracle(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse and the gradients of q, k, v in float64, by autograd through softmax."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return (
        out,
        scores.logsumexp(-1),
        *torch.autograd.grad(out, (q, k, v), grad_out.double()),
    )


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape, name
    error = (actual.double() - expected).norm()
    assert error <= tolerance * (expected.norm() + expected.numel() ** 0.5), (
        f"{name} is off by {error:.2e}"
    )


def assert_matches_oracle(
    results: tuple[Tensor, ...], inputs: Inputs, tolerance: float
) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    for name, actual, expected in zip(names, results, oracle(*inputs), strict=True):
        assert_close(name, actual, expected, tolerance)
