"""Gated residual: out = x + gate * y, the gate per sample.

Source: DiT (arXiv 2212.09748), section 3.2; `HunyuanVideo15TransformerBlock.forward` in
diffusers.

Gradients: dx = g itself (no kernel), dy = gate * g, dgate = sum over tokens of g * y. A
program owns a range of a sample's tokens and keeps its part of dgate in registers; a
second stage adds the programs' parts in a fixed order. Where the gate needs no gradient
(frozen modulation), y is neither saved nor read.

Shapes: B batch, N tokens, D width, P programs of a sample.
Names in kernels: i_ index, o_ offsets, m_ mask.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels import common, reference
from sage_kernels.common import load, narrow
from sage_kernels.custom_op import operator
from sage_kernels.launch import (
    Launch,
    LaunchTable,
    cdiv,
    launch,
    next_power_of_2,
    split_tokens,
)
from sage_kernels.ops import adaln
from sage_kernels.registry import Case, OpSpec, nbytes

# With 4 warps, the compiler for B100 spills two registers of the float16 kernel.
FORWARD_LAUNCH = adaln.FORWARD_LAUNCH.with_row(
    2048, Launch(num_warps=8, rows=4), (10, 0)
)
BACKWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(4, 2, 1))


@triton.jit
def gated_residual_forward_kernel(
    x_ptr,  # (B, N, D), dense rows
    y_ptr,  # (B, N, D), dense rows
    gate_ptr,  # (B, D), dense rows
    out_ptr,  # (B, N, D), contiguous
    num_tokens,
    x_stride_b,
    x_stride_n,
    y_stride_b,
    y_stride_n,
    gate_stride_b,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, b) writes tokens i * ROWS ... of sample b; the gate stays in
    registers between them.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_first = tl.program_id(0).to(tl.int64) * ROWS
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < WIDTH
    gate = load(gate_ptr + i_b * gate_stride_b + o_d, m_d)
    for i in range(0, tl.minimum(ROWS, num_tokens - i_first)):
        i_n = i_first + i
        x = load(x_ptr + i_b * x_stride_b + i_n * x_stride_n + o_d, m_d)
        y = load(y_ptr + i_b * y_stride_b + i_n * y_stride_n + o_d, m_d)
        out = narrow(x + gate * y, out_ptr.dtype.element_ty)
        tl.store(out_ptr + (i_b * num_tokens + i_n) * WIDTH + o_d, out, mask=m_d)


@triton.jit
def gated_residual_backward_kernel(
    grad_ptr,  # (B, N, D), dense rows
    y_ptr,  # (B, N, D), dense rows; None for no sums
    gate_ptr,  # (B, D), dense rows
    dy_ptr,  # (B, N, D), contiguous
    sums_ptr,  # (B, P, D) float32: dgate of every program; None for no sums
    num_tokens,
    tokens_per_program,
    grad_stride_b,
    grad_stride_n,
    y_stride_b,
    y_stride_n,
    gate_stride_b,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (p, b) handles tokens_per_program tokens of sample b and leaves its sum
    over them where wanted.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < WIDTH
    gate = load(gate_ptr + i_b * gate_stride_b + o_d, m_d)
    dgate = tl.zeros([BLOCK], tl.float32)
    i_first = i_p * tokens_per_program
    for i in range(0, tl.minimum(tokens_per_program, num_tokens - i_first)):
        i_n = i_first + i
        grad = load(grad_ptr + i_b * grad_stride_b + i_n * grad_stride_n + o_d, m_d)
        if sums_ptr is not None:
            y = load(y_ptr + i_b * y_stride_b + i_n * y_stride_n + o_d, m_d)
            dgate += grad * y
        dy = narrow(grad * gate, dy_ptr.dtype.element_ty)
        tl.store(dy_ptr + (i_b * num_tokens + i_n) * WIDTH + o_d, dy, mask=m_d)
    if sums_ptr is not None:
        tl.store(
            sums_ptr + (i_b * tl.num_programs(0) + i_p) * WIDTH + o_d, dgate, mask=m_d
        )


def launch_forward(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """Run the forward kernel. x, y (B, N, D); gate (B, D)."""
    x, y, gate = (common.dense_rows(tensor) for tensor in (x, y, gate))
    batch, tokens, width = x.shape
    out = common.empty_like(x)
    settings = FORWARD_LAUNCH.find(width, x.device)
    launch(
        gated_residual_forward_kernel,
        (cdiv(tokens, settings.rows), batch),
        x,
        y,
        gate,
        out,
        tokens,
        *x.stride()[:2],
        *y.stride()[:2],
        gate.stride(0),
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ROWS=settings.rows,
        settings=settings,
    )
    return out


def launch_backward(
    grad: Tensor, y: Tensor | None, gate: Tensor, y_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run the backward kernel; arguments and results as `gated_residual_backward`."""
    grad = common.dense_rows(grad)
    gate = common.dense_rows(gate)
    batch, tokens, width = grad.shape
    dy = common.empty_like(grad, y_dtype)
    settings = BACKWARD_LAUNCH.find(width, grad.device)
    programs, each = split_tokens(tokens, batch, settings, grad.device)
    sums = None
    if y is not None:
        y = common.dense_rows(y)
        sums = common.empty(
            (batch, programs, width), dtype=torch.float32, device=grad.device
        )
    launch(
        gated_residual_backward_kernel,
        (programs, batch),
        grad,
        y,
        gate,
        dy,
        sums,
        tokens,
        each,
        *grad.stride()[:2],
        *((0, 0) if y is None else y.stride()[:2]),
        gate.stride(0),
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        settings=settings,
    )
    if sums is None:
        return dy, gate.new_empty(0)
    return dy, sums.sum(1).to(gate.dtype, copy=True)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, y, gate = inputs
    ctx.y_dtype = y.dtype
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, gate)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, gate = ctx.saved_tensors
    dy, dgate = gated_residual_backward(grad, y, gate, ctx.y_dtype)
    return grad, dy, dgate if ctx.needs_input_grad[2] else None


gated_residual_backward = operator(
    "gated_residual_backward(Tensor grad, Tensor? y, Tensor gate, ScalarType y_dtype) "
    "-> (Tensor, Tensor)",
    launcher=launch_backward,
    reference=reference.gated_residual_backward,
)
_gated_residual = operator(
    "gated_residual(Tensor x, Tensor y, Tensor gate) -> Tensor",
    launcher=launch_forward,
    reference=reference.gated_residual,
    save=_save,
    backward=_backward,
)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate * y.

    Args:
        x: (B, N, D) float32, bfloat16 or float16: the residual stream.
        y: (B, N, D), any of these dtypes: the branch. Rows of x and y may be strided.
        gate: (B, D), any of these dtypes.

    Returns:
        (B, N, D) in x's dtype, contiguous. Computed in float32, rounded once.

    Raises:
        ValueError: shapes that do not fit, another dtype, tensors on several devices.
    """
    check_gated_residual("gated_residual", x, y, gate)
    return _gated_residual(x, y, gate)


def check_gated_residual(op: str, x: Tensor, y: Tensor, gate: Tensor) -> None:
    """Refuse arguments that do not fit together; `op` is the name in the message."""
    common.check_tensors(op, {"x": x, "y": y, "gate": gate})
    common.check_ndim(op, "x", x, "(B, N, D)")
    common.check_shape(op, "y", y, x.shape, "(B, N, D)")
    common.check_shape(op, "gate", gate, (x.shape[0], x.shape[2]), "(B, D)")


SPEC = OpSpec(
    name="gated_residual",
    formula="x + gate * y",
    op=gated_residual,
    reference=reference.gated_residual,
    eager=reference.gated_residual_eager,
    make_inputs=partial(adaln.rows_and_modulation, {"x": False, "y": True}, ("gate",)),
    differentiable=("x", "y", "gate"),
    test_cases=adaln.MODULATION_TEST_CASES,
    bench_cases=(
        *(
            Case(id=id, shape=shape, frozen=("gate",))
            for id, shape in adaln.MODULATION_SHAPES.items()
        ),
        Case(id="B, modulation trained", shape=adaln.MODULATION_SHAPES["B"]),
    ),
    wide_cases=(Case(id="width 3072", shape=adaln.MODULATION_WIDE_SHAPE),),
    letters=lambda i: {"S": nbytes(i["x"]), "m": nbytes(i["gate"])},
    bytes_formula=("3 S + m", "2 S + m"),
)
