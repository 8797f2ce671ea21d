"""Gated residual followed by adaptive layer norm, both results kept.

    r = x + gate * y,   z = (r - mean(r)) / sqrt(var(r) + eps) * (1 + scale) + shift

Source: DiT (arXiv 2212.09748), section 3.2; `HunyuanVideo15TransformerBlock.forward` in
diffusers. This is adaln after gated_residual with one read of r saved: r is normalised
as it was rounded for storage, so the three ops agree.

With n = (r - mean) * rstd, gr = dL/dr from outside, g = dL/dz and h = g * (1 + scale),
the gradients are

    dx = gr + rstd * (h - mean(h) - n * mean(h * n)),   dy = gate * dx
    dgate = sum of dx * y,   dscale = sum of g * n,   dshift = sum of g        (sums over the tokens of a sample)

Statistics are recomputed from r; sums over tokens are taken in two stages without
atomics, as in adaln. Where neither gate nor scale nor shift needs a gradient (frozen
modulation), no sums are taken and y is neither saved nor read.

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
from sage_kernels.common import load, narrow, store
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
from sage_kernels.ops.adaln import (
    FORWARD_LAUNCH,
    FROZEN_LAUNCH,
    normalize_row,
    normalize_row_backward,
)
from sage_kernels.ops.gated_residual import check_gated_residual
from sage_kernels.registry import Case, OpSpec, nbytes

# An RTX 4090, an L40S and an RTX 5090 have shared memory for one program in float32.
BACKWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(2, 1, 1)).with_row(
    2048, Launch(num_warps=8), (8, 9), (12, 0)
)


@triton.jit
def gated_residual_adaln_forward_kernel(
    x_ptr,  # (B, N, D), dense rows
    y_ptr,  # (B, N, D), dense rows
    gate_ptr,  # (B, D), dense rows
    scale_ptr,  # (B, D), dense rows
    shift_ptr,  # (B, D), dense rows
    residual_ptr,  # (B, N, D), contiguous
    out_ptr,  # (B, N, D), contiguous
    num_tokens,
    x_stride_b,
    x_stride_n,
    y_stride_b,
    y_stride_n,
    gate_stride_b,
    scale_stride_b,
    shift_stride_b,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, b) writes tokens i * ROWS ... of sample b; the modulation stays in
    registers between them.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_first = tl.program_id(0).to(tl.int64) * ROWS
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < WIDTH
    gate = load(gate_ptr + i_b * gate_stride_b + o_d, m_d)
    scale = 1.0 + load(scale_ptr + i_b * scale_stride_b + o_d, m_d)
    shift = load(shift_ptr + i_b * shift_stride_b + o_d, m_d)
    for i in range(0, tl.minimum(ROWS, num_tokens - i_first)):
        i_n = i_first + i
        x = load(x_ptr + i_b * x_stride_b + i_n * x_stride_n + o_d, m_d)
        y = load(y_ptr + i_b * y_stride_b + i_n * y_stride_n + o_d, m_d)
        residual = narrow(x + gate * y, residual_ptr.dtype.element_ty)
        normed, _ = normalize_row(residual.to(tl.float32), m_d, eps, WIDTH)
        o_out = (i_b * num_tokens + i_n) * WIDTH + o_d
        tl.store(residual_ptr + o_out, residual, mask=m_d)
        store(out_ptr + o_out, normed * scale + shift, m_d)


@triton.jit
def gated_residual_adaln_backward_kernel(
    grad_residual_ptr,  # (B, N, D), dense rows
    grad_ptr,  # (B, N, D), dense rows
    residual_ptr,  # (B, N, D), contiguous
    y_ptr,  # (B, N, D), dense rows; None for no sums
    gate_ptr,  # (B, D), dense rows
    scale_ptr,  # (B, D), dense rows
    dx_ptr,  # (B, N, D), contiguous
    dy_ptr,  # (B, N, D), contiguous
    # (B, P, 3, D) float32: dgate, dscale and dshift of every program; None for no sums
    sums_ptr,
    num_tokens,
    tokens_per_program,
    grad_residual_stride_b,
    grad_residual_stride_n,
    grad_stride_b,
    grad_stride_n,
    y_stride_b,
    y_stride_n,
    gate_stride_b,
    scale_stride_b,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (p, b) handles tokens_per_program tokens of sample b and leaves its sums
    over them where wanted.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < WIDTH
    gate = load(gate_ptr + i_b * gate_stride_b + o_d, m_d)
    scale = 1.0 + load(scale_ptr + i_b * scale_stride_b + o_d, m_d)
    dgate = tl.zeros([BLOCK], tl.float32)
    dscale = tl.zeros([BLOCK], tl.float32)
    dshift = tl.zeros([BLOCK], tl.float32)
    p_grad_residual = grad_residual_ptr + i_b * grad_residual_stride_b
    i_first = i_p * tokens_per_program
    # Three stages: the next two tokens are on their way to shared memory while the
    # reductions wait for each other.
    for i in tl.range(
        0, tl.minimum(tokens_per_program, num_tokens - i_first), num_stages=3
    ):
        i_n = i_first + i
        o_row = (i_b * num_tokens + i_n) * WIDTH + o_d
        residual = load(residual_ptr + o_row, m_d)
        grad = load(grad_ptr + i_b * grad_stride_b + i_n * grad_stride_n + o_d, m_d)
        dx = load(p_grad_residual + i_n * grad_residual_stride_n + o_d, m_d)
        if sums_ptr is not None:
            y = load(y_ptr + i_b * y_stride_b + i_n * y_stride_n + o_d, m_d)
        normed, rstd = normalize_row(residual, m_d, eps, WIDTH)
        dx += normalize_row_backward(grad * scale, normed, rstd, WIDTH)
        if sums_ptr is not None:
            dgate += dx * y
            dscale += grad * normed
            dshift += grad
        store(dx_ptr + o_row, dx, m_d)
        store(dy_ptr + o_row, dx * gate, m_d)
    if sums_ptr is not None:
        p_sums = sums_ptr + (i_b * tl.num_programs(0) + i_p) * 3 * WIDTH + o_d
        tl.store(p_sums, dgate, mask=m_d)
        tl.store(p_sums + WIDTH, dscale, mask=m_d)
        tl.store(p_sums + 2 * WIDTH, dshift, mask=m_d)


def launch_forward(x, y, gate, scale, shift, eps) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. x, y (B, N, D); gate, scale, shift (B, D)."""
    x, y, gate, scale, shift = (
        common.dense_rows(tensor) for tensor in (x, y, gate, scale, shift)
    )
    batch, tokens, width = x.shape
    residual = common.empty_like(x)
    out = common.empty_like(x)
    settings = FORWARD_LAUNCH.find(width, x.device)
    launch(
        gated_residual_adaln_forward_kernel,
        (cdiv(tokens, settings.rows), batch),
        x,
        y,
        gate,
        scale,
        shift,
        residual,
        out,
        tokens,
        *x.stride()[:2],
        *y.stride()[:2],
        gate.stride(0),
        scale.stride(0),
        shift.stride(0),
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ROWS=settings.rows,
        settings=settings,
    )
    return residual, out


def launch_backward(
    grad_residual, grad, residual, y, gate, scale, y_dtype, shift_dtype, eps
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernel; arguments and results as
    `gated_residual_adaln_backward`.
    """
    grad_residual, grad, gate, scale = (
        common.dense_rows(tensor) for tensor in (grad_residual, grad, gate, scale)
    )
    residual = residual.contiguous()
    batch, tokens, width = residual.shape
    dx = common.empty_like(residual)
    dy = common.empty_like(residual, y_dtype)
    settings = (FROZEN_LAUNCH if y is None else BACKWARD_LAUNCH).find(
        width, residual.device
    )
    programs, each = split_tokens(tokens, batch, settings, residual.device)
    sums = None
    if y is not None:
        y = common.dense_rows(y)
        sums = common.empty(
            (batch, programs, 3, width), dtype=torch.float32, device=residual.device
        )
    launch(
        gated_residual_adaln_backward_kernel,
        (programs, batch),
        grad_residual,
        grad,
        residual,
        y,
        gate,
        scale,
        dx,
        dy,
        sums,
        tokens,
        each,
        *grad_residual.stride()[:2],
        *grad.stride()[:2],
        *((0, 0) if y is None else y.stride()[:2]),
        gate.stride(0),
        scale.stride(0),
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        settings=settings,
    )
    if sums is None:
        return (
            dx,
            dy,
            gate.new_empty(0),
            scale.new_empty(0),
            scale.new_empty(0, dtype=shift_dtype),
        )
    dgate, dscale, dshift = sums.sum(1).unbind(1)
    copies = (
        dgate.to(gate.dtype, copy=True),
        dscale.to(scale.dtype, copy=True),
        dshift.to(shift_dtype, copy=True),
    )
    return dx, dy, *copies


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, y, gate, scale, shift, ctx.eps = inputs
    ctx.dtypes = y.dtype, shift.dtype
    ctx.save_for_backward(
        output[0], y if any(ctx.needs_input_grad[2:5]) else None, gate, scale
    )


def _backward(
    ctx: Any, grad_residual: Tensor, grad: Tensor
) -> tuple[Tensor | None, ...]:
    arguments: tuple[Any, ...] = (
        grad_residual,
        grad,
        *ctx.saved_tensors,
        *ctx.dtypes,
        ctx.eps,
    )
    dx, dy, *modulation = gated_residual_adaln_backward(*arguments)
    wanted = ctx.needs_input_grad[2:5]
    return (
        dx,
        dy,
        *(
            gradient if wants else None
            for gradient, wants in zip(modulation, wanted, strict=True)
        ),
        None,
    )


gated_residual_adaln_backward = operator(
    """gated_residual_adaln_backward(Tensor grad_residual, Tensor grad, Tensor residual, Tensor? y, Tensor gate,
    Tensor scale, ScalarType y_dtype, ScalarType shift_dtype, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)""",
    launcher=launch_backward,
    reference=reference.gated_residual_adaln_backward,
)
_gated_residual_adaln = operator(
    "gated_residual_adaln(Tensor x, Tensor y, Tensor gate, Tensor scale, Tensor "
    "shift, float eps) -> (Tensor, Tensor)",
    launcher=launch_forward,
    reference=reference.gated_residual_adaln,
    save=_save,
    backward=_backward,
)


def gated_residual_adaln(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The residual stream r = x + gate * y and its adaptive layer norm, LayerNorm(r) *
    (1 + scale) + shift.

    Args:
        x: (B, N, D) float32, bfloat16 or float16: the residual stream.
        y: (B, N, D), any of these dtypes: the branch. Rows of x and y may be strided.
        gate: (B, D), any of these dtypes.
        scale: (B, D), any of these dtypes.
        shift: (B, D), any of these dtypes.
        eps: added to the variance.

    Returns:
        r and its norm, both (B, N, D) in x's dtype, contiguous. r is rounded once and
        normalised as rounded.

    Raises:
        ValueError: shapes that do not fit, another dtype, tensors on several devices,
            eps <= 0.
    """
    check_gated_residual("gated_residual_adaln", x, y, gate)
    common.check_tensors(
        "gated_residual_adaln", {"x": x, "scale": scale, "shift": shift}
    )
    for name, tensor in (("scale", scale), ("shift", shift)):
        common.check_shape(
            "gated_residual_adaln", name, tensor, (x.shape[0], x.shape[2]), "(B, D)"
        )
    common.check_eps("gated_residual_adaln", eps)
    return _gated_residual_adaln(x, y, gate, scale, shift, eps)


SPEC = OpSpec(
    name="gated_residual_adaln",
    formula="r = x + gate * y; LayerNorm(r) * (1 + scale) + shift",
    op=gated_residual_adaln,
    reference=reference.gated_residual_adaln,
    eager=reference.gated_residual_adaln_eager,
    make_inputs=partial(
        adaln.rows_and_modulation, {"x": False, "y": True}, ("gate", "scale", "shift")
    ),
    differentiable=("x", "y", "gate", "scale", "shift"),
    test_cases=adaln.MODULATION_TEST_CASES,
    bench_cases=(
        *(
            Case(id=id, shape=shape, frozen=("gate", "scale", "shift"))
            for id, shape in adaln.MODULATION_SHAPES.items()
        ),
        Case(id="B, modulation trained", shape=adaln.MODULATION_SHAPES["B"]),
    ),
    wide_cases=(Case(id="width 3072", shape=adaln.MODULATION_WIDE_SHAPE),),
    letters=lambda i: {"S": nbytes(i["x"]), "m": nbytes(i["gate"])},
    bytes_formula=("4 S + 3 m", "5 S + 2 m"),
)
