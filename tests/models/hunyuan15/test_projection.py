"""Linear layers with low-rank updates, in their narrow and wide form, against autograd
in float64.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from sage_fast.models.projection import (
    Gradients,
    LowRank,
    Projection,
    input_backward,
    project,
    read_adapters,
    room_for_low,
    stack_weights,
    stacked,
    weights_backward,
)

WIDTH = 16
ROWS = 40


def layers_of(
    ranks: Sequence[tuple[int, ...]], *, stack: bool = True, bias: bool = True
) -> list[Projection]:
    """A layer for each entry, with an update of each of its ranks; scales are 1, 2, ..."""
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64) for _ in ranks]
    if stack:
        stack_weights(linears)
    layers = []
    first = 0
    for i, (linear, updates) in enumerate(zip(linears, ranks, strict=True)):
        low_rank = tuple(
            LowRank(
                *(
                    torch.randn(s, dtype=torch.float64)
                    for s in ((r, WIDTH), (WIDTH, r))
                ),
                1.0 + i,
            )
            for r in updates
        )
        layers.append(
            Projection(
                linear.weight.detach(),
                linear.bias.detach() if bias else None,
                low_rank,
                first,
            )
        )
        first += len(layers[-1].tensors())
    return layers


def written_out(x: Tensor, layers: Sequence[Projection]) -> list[Tensor]:
    """y = x W^T + b + sum_i s_i (x A_i^T) B_i^T of every layer."""
    results = []
    for layer in layers:
        y = x @ layer.weight.t() + (0 if layer.bias is None else layer.bias)
        results.append(
            y + sum(u.scale * (x @ u.a.t()) @ u.b.t() for u in layer.low_rank)
        )
    return results


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("stack", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    "ranks",
    [((8,), (8,), (8,)), ((4, 3), (), (1,)), ((2,),), ((2,), (6,))],
    ids=["equal", "some", "one", "unequal"],
)
def test_is_what_the_formula_says(
    ranks: tuple[tuple[int, ...], ...], bias: bool, stack: bool, wide: bool
) -> None:
    layers = layers_of(ranks, stack=stack, bias=bias)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    tensors = [
        tensor.requires_grad_() for layer in layers for tensor in layer.tensors()
    ]
    leaf = x.clone().requires_grad_()
    outputs = written_out(leaf, layers)
    grads = [torch.randn_like(output) for output in outputs]
    expected_x, *expected = torch.autograd.grad(outputs, [leaf, *tensors], grads)

    with torch.no_grad():
        (adapter,) = read_adapters([layers], torch.float64)
        assert adapter is not None
        rows = torch.cat([x, x @ adapter.a.t()], dim=1) if wide else x
        given, low = project(rows, layers, adapter)
        torch.testing.assert_close(given, torch.cat(outputs, dim=1))
        torch.testing.assert_close(low, x @ adapter.a.t())
        gradients = Gradients([True] * len(tensors))
        given_x, low_grad = input_backward(grads, layers, adapter, rows)
        weights_backward(
            grads, rows, layers, gradients, adapter, low_grad=low_grad, low=low
        )
    torch.testing.assert_close(given_x, expected_x)
    for value, exact in zip(gradients.values, expected, strict=True):
        torch.testing.assert_close(value, exact)


def test_unwanted_gradients_are_not_computed() -> None:
    layers = layers_of([(4,), (4,)])
    (adapter,) = read_adapters([layers], torch.float64)
    gradients = Gradients([False, False, True, False, False, False, False, True])
    grads = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in layers]
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    _, low_grad = input_backward(grads, layers, adapter, x)
    weights_backward(grads, x, layers, gradients, adapter, low_grad=low_grad)
    assert [value is not None for value in gradients.values] == list(gradients.wanted)


def test_the_wide_form_is_for_many_tokens_and_aligned_rows() -> None:
    (aligned,), (odd,) = (
        read_adapters([layers_of([(r,), (r,)])], torch.bfloat16) for r in (8, 3)
    )
    assert aligned is not None and aligned.a.dtype == torch.bfloat16
    assert [room_for_low(aligned, tokens) for tokens in (2 * WIDTH, 2 * WIDTH + 1)] == [
        0,
        16,
    ]
    assert room_for_low(odd, 10_000) == room_for_low(None, 10_000) == 0


def test_rows_of_a_gradient_before_an_adapter_are_a_multiple_of_16() -> None:
    """So a kernel reads them 16 bytes at a time; two adapters of rank 4 alone would
    make them 8 longer.
    """
    layers = layers_of([(4,), (4,)])
    (adapter,) = read_adapters([layers], torch.float64)
    grads = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in layers]
    x = torch.randn(ROWS, WIDTH + 8).double()
    found, _ = input_backward(grads, layers, adapter, x)
    assert found.shape == (ROWS, WIDTH) and found.stride() == (
        -(-(WIDTH + 8) // 16) * 16,
        1,
    )


def test_only_neighbours_in_memory_are_one_tensor() -> None:
    rows = torch.arange(24.0).view(6, 4)
    joint = stacked([rows[:2], rows[2:5]])
    assert joint is not None and torch.equal(joint, rows[:5])
    for apart in (
        [rows[:2], rows[3:5]],
        [rows[2:4], rows[:2]],
        [rows[:2], rows[2:5].clone()],
        [rows[:2], rows[2:4, :2]],
    ):
        assert stacked(apart) is None
