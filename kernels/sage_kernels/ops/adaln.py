"""Adaptive layer norm: y = (x - mean) / sqrt(var + eps) * (1 + scale) + shift,
statistics over the last dimension.

Source: DiT (arXiv 2212.09748), section 3.2; diffusers `AdaLayerNormZero` and `norm2` of
HunyuanVideo-1.5's block. The layer norm has no weights; scale and shift are per sample.

With n = (x - mean) * rstd, g = dL/dy and h = g * (1 + scale), the gradients are

    dx = rstd * (h - mean(h) - n * mean(h * n)),   dscale = sum over tokens of g * n,   dshift = sum over tokens of g

The backward kernel recomputes mean and rstd from the row it reads anyway, so nothing
but x and scale is saved. A program owns a range of a sample's tokens and keeps its sums
over tokens in registers; a second stage adds the programs' sums in a fixed order. No
float is added atomically: the same input gives the same bits. Where neither scale nor
shift needs a gradient (frozen modulation), no sums are taken.

Shapes: B batch, N tokens, D width, P programs of a sample.
Names in kernels: i_ index, o_ offsets, m_ mask.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from sage_kernels import common, reference
from sage_kernels.common import load, store
from sage_kernels.custom_op import operator
from sage_kernels.launch import (
    Launch,
    LaunchTable,
    cdiv,
    launch,
    next_power_of_2,
    split_tokens,
)
from sage_kernels.reference.adaln import row_length
from sage_kernels.registry import Case, Device, Inputs, OpSpec, nbytes, random_tensor

FORWARD_LAUNCH = LaunchTable.by_width((4, 8, 16), rows=4)
_LITTLE_SHARED = ((8, 9), (12, 0))
"""RTX 4090, L40S and RTX 5090: 100 KiB of shared memory, for 2 programs in float32."""
BACKWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(3, 2, 1)).with_row(
    2048, Launch(num_warps=8, programs_per_sm=2), *_LITTLE_SHARED
)
FROZEN_LAUNCH = (
    LaunchTable.by_width((8, 16, 32), programs_per_sm=(4, 2, 1))
    .with_row(2048, Launch(num_warps=8, programs_per_sm=3), (8, 0))
    .with_row(2048, Launch(num_warps=8, programs_per_sm=2), *_LITTLE_SHARED)
)
"""Of a backward pass without sums over tokens, which needs fewer registers. An A100 has
shared memory for 3 programs in float32.
"""


@triton.jit
def normalize_row(x, m_d, eps, WIDTH: tl.constexpr):
    """Normalised row and 1 / std. `x` holds zeros where the mask m_d is off, and so
    does the result.
    """
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(m_d, x - mean, 0.0)
    rstd = tl.math.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    return centred * rstd, rstd


@triton.jit
def normalize_row_backward(grad, normed, rstd, WIDTH: tl.constexpr):
    """Gradient of the row from the gradient of its normalised value."""
    return rstd * (
        grad - tl.sum(grad, 0) / WIDTH - normed * (tl.sum(grad * normed, 0) / WIDTH)
    )


@triton.jit
def adaln_forward_kernel(
    x_ptr,  # (B, N, D), dense rows
    scale_ptr,  # (B, D), dense rows
    shift_ptr,  # (B, D), dense rows
    out_ptr,  # (B, N, D + room for a tail), contiguous
    num_tokens,
    x_stride_b,
    x_stride_n,
    scale_stride_b,
    shift_stride_b,
    out_stride_n,
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
    scale = 1.0 + load(scale_ptr + i_b * scale_stride_b + o_d, m_d)
    shift = load(shift_ptr + i_b * shift_stride_b + o_d, m_d)
    # Without stages, as in the forwards of gated_residual_adaln and qk_norm_rope: by
    # the builds ahead of time the next tokens on their way take up to 3 registers here
    # and 23 there, and the third kernel loads cos and sin 4 bytes wide.
    for i in range(0, tl.minimum(ROWS, num_tokens - i_first)):
        i_n = i_first + i
        x = load(x_ptr + i_b * x_stride_b + i_n * x_stride_n + o_d, m_d)
        normed, _ = normalize_row(x, m_d, eps, WIDTH)
        out = normed * scale + shift
        p_out = out_ptr + (i_b * num_tokens + i_n) * out_stride_n
        store(p_out + o_d, out, m_d)


@triton.jit
def adaln_backward_kernel(
    grad_ptr,  # (B, N, D), dense rows
    x_ptr,  # (B, N, D), dense rows
    scale_ptr,  # (B, D), dense rows
    grad_residual_ptr,  # (B, N, D), contiguous: added to dx; or None
    dx_ptr,  # (B, N, D), contiguous
    # (B, P, 2, D) float32: dscale and dshift of every program; None for no sums
    sums_ptr,
    num_tokens,
    tokens_per_program,
    grad_stride_b,
    grad_stride_n,
    x_stride_b,
    x_stride_n,
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
    scale = 1.0 + load(scale_ptr + i_b * scale_stride_b + o_d, m_d)
    dscale = tl.zeros([BLOCK], tl.float32)
    dshift = tl.zeros([BLOCK], tl.float32)
    i_first = i_p * tokens_per_program
    # Three stages: the next two tokens are on their way to shared memory while the
    # reductions wait for each other.
    for i in tl.range(
        0, tl.minimum(tokens_per_program, num_tokens - i_first), num_stages=3
    ):
        i_n = i_first + i
        o_row = (i_b * num_tokens + i_n) * WIDTH + o_d
        grad = load(grad_ptr + i_b * grad_stride_b + i_n * grad_stride_n + o_d, m_d)
        x = load(x_ptr + i_b * x_stride_b + i_n * x_stride_n + o_d, m_d)
        if grad_residual_ptr is not None:
            dx = load(grad_residual_ptr + o_row, m_d)
        else:
            dx = 0.0
        normed, rstd = normalize_row(x, m_d, eps, WIDTH)
        if sums_ptr is not None:
            dscale += grad * normed
            dshift += grad
        dx += normalize_row_backward(grad * scale, normed, rstd, WIDTH)
        store(dx_ptr + o_row, dx, m_d)
    if sums_ptr is not None:
        p_sums = sums_ptr + (i_b * tl.num_programs(0) + i_p) * 2 * WIDTH + o_d
        tl.store(p_sums, dscale, mask=m_d)
        tl.store(p_sums + WIDTH, dshift, mask=m_d)


def launch_forward(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, tail: int = 0
) -> Tensor:
    """Run the forward kernel. x (B, N, D); scale, shift (B, D)."""
    x, scale, shift = (common.dense_rows(tensor) for tensor in (x, scale, shift))
    batch, tokens, width = x.shape
    stride = row_length(width, tail) if tail else width
    out = common.empty((batch, tokens, stride), dtype=x.dtype, device=x.device)
    settings = FORWARD_LAUNCH.find(width, x.device)
    launch(
        adaln_forward_kernel,
        (cdiv(tokens, settings.rows), batch),
        x,
        scale,
        shift,
        out,
        tokens,
        *x.stride()[:2],
        scale.stride(0),
        shift.stride(0),
        stride,
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ROWS=settings.rows,
        settings=settings,
    )
    return out


def launch_backward(
    grad, x, scale, shift_dtype, eps, modulation, grad_residual=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernel; arguments and results as `adaln_backward`."""
    grad, x, scale = (common.dense_rows(tensor) for tensor in (grad, x, scale))
    batch, tokens, width = x.shape
    dx = common.empty_like(x)
    settings = (BACKWARD_LAUNCH if modulation else FROZEN_LAUNCH).find(width, x.device)
    programs, each = split_tokens(tokens, batch, settings, x.device)
    sums = None
    if modulation:
        sums = common.empty(
            (batch, programs, 2, width), dtype=torch.float32, device=x.device
        )
    residual = None if grad_residual is None else grad_residual.contiguous()
    launch(
        adaln_backward_kernel,
        (programs, batch),
        grad,
        x,
        scale,
        residual,
        dx,
        sums,
        tokens,
        each,
        *grad.stride()[:2],
        *x.stride()[:2],
        scale.stride(0),
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        settings=settings,
    )
    if sums is None:
        return dx, scale.new_empty(0), scale.new_empty(0, dtype=shift_dtype)
    dscale, dshift = sums.sum(1).unbind(1)
    return dx, dscale.to(scale.dtype, copy=True), dshift.to(shift_dtype, copy=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, ctx.eps, _ = inputs
    ctx.shift_dtype = shift.dtype
    ctx.save_for_backward(x, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, scale_needs, shift_needs = ctx.needs_input_grad[:3]
    x, scale = ctx.saved_tensors
    grad = grad[..., : x.shape[-1]]
    dx, dscale, dshift = adaln_backward(
        grad, x, scale, ctx.shift_dtype, ctx.eps, scale_needs or shift_needs
    )
    return (
        dx,
        dscale if scale_needs else None,
        dshift if shift_needs else None,
        None,
        None,
    )


adaln_backward = operator(
    """adaln_backward(Tensor grad, Tensor x, Tensor scale, ScalarType shift_dtype, float eps, bool modulation,
    Tensor? grad_residual=None) -> (Tensor, Tensor, Tensor)""",
    launcher=launch_backward,
    reference=reference.adaln_backward,
)
_adaln = operator(
    "adaln(Tensor x, Tensor scale, Tensor shift, float eps, int tail=0) -> Tensor",
    launcher=launch_forward,
    reference=reference.adaln,
    save=_save,
    backward=_backward,
)


def adaln(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, tail: int = 0
) -> Tensor:
    """LayerNorm without weights, then a per-sample scale and shift: normed * (1 +
    scale) + shift.

    Args:
        x: (B, N, D) float32, bfloat16 or float16. Rows may be strided; the last
            dimension is copied if it is.
        scale: (B, D), any of these dtypes.
        shift: (B, D), any of these dtypes.
        eps: added to the variance.
        tail: columns behind every row of the result that the caller fills.

    Returns:
        (B, N, D) in x's dtype, contiguous; with a tail (B, N, D + tail rounded up to a
        multiple of 16), so that a store is 16 bytes wide whatever the tail is. Computed
        in float32, rounded once.

    Raises:
        ValueError: shapes that do not fit, another dtype, tensors on several devices,
            eps <= 0, tail < 0.
    """
    common.check_tensors("adaln", {"x": x, "scale": scale, "shift": shift})
    common.check_ndim("adaln", "x", x, "(B, N, D)")
    for name, tensor in (("scale", scale), ("shift", shift)):
        common.check_shape("adaln", name, tensor, (x.shape[0], x.shape[2]), "(B, D)")
    common.check_eps("adaln", eps)
    # the kernel would write its rows beyond a smaller buffer
    if not isinstance(tail, int) or tail < 0:
        raise ValueError(
            f"adaln: tail is {tail!r}; it must be a number of columns, 0 or more"
        )
    return _adaln(x, scale, shift, eps, tail)


MODULATION_TEST_CASES = (
    Case(id="one-element", shape={"batch": 1, "tokens": 1, "width": 1}),
    Case(id="one-token", shape={"batch": 2, "tokens": 1, "width": 16}),
    Case(id="odd", shape={"batch": 3, "tokens": 17, "width": 37}),
    Case(id="strided", shape={"batch": 2, "tokens": 9, "width": 24}, strided=True),
    Case(id="mixed", shape={"batch": 2, "tokens": 5, "width": 64}, mixed=True),
    Case(id="model-width", shape={"batch": 2, "tokens": 3, "width": 2048}),
)
"""Test shapes of the ops with per-sample modulation."""

MODULATION_SHAPES = {
    "A": {"batch": 1, "tokens": 18018, "width": 2048},
    "B": {"batch": 1, "tokens": 32760, "width": 2048},
}
"""Video tokens of HunyuanVideo-1.5 at 352x624 and 480x832, 81 frames."""

MODULATION_WIDE_SHAPE = {"batch": 1, "tokens": 32760, "width": 3072}
"""A width that is no power of two: part of the block is masked off."""


def rows_and_modulation(
    rows: Mapping[str, bool],
    modulation: Sequence[str],
    case: Case,
    dtype: torch.dtype,
    device: Device,
    generator: Generator | None,
) -> Inputs:
    """Random rows (B, N, D) by name, where the value is true in `dtype` in a mixed case
    too, and modulation (B, D).
    """
    batch, tokens, width = (case.shape[name] for name in ("batch", "tokens", "width"))
    small = torch.float32 if case.mixed else dtype
    draw = partial(
        random_tensor, device=device, generator=generator, strided=case.strided
    )
    inputs = {
        name: draw(batch, tokens, width, dtype=dtype if keeps else small)
        for name, keeps in rows.items()
    }
    return inputs | {name: draw(batch, width, dtype=small) for name in modulation}


def _make_inputs(case: Case, *rest: Any) -> Inputs:
    inputs = rows_and_modulation({"x": True}, ("scale", "shift"), case, *rest)
    return inputs | {"tail": case.shape.get("tail", 0)}


_FROZEN = ("scale", "shift")
_RESIDUAL = {"grad_residual": lambda arguments: torch.randn_like(arguments["grad"])}

SPEC = OpSpec(
    name="adaln",
    formula="LayerNorm(x) * (1 + scale) + shift",
    op=adaln,
    reference=reference.adaln,
    eager=reference.adaln_eager,
    make_inputs=_make_inputs,
    differentiable=("x", "scale", "shift"),
    test_cases=MODULATION_TEST_CASES,
    bench_cases=(
        *(
            Case(id=id, shape=shape, frozen=_FROZEN, backward=_RESIDUAL)
            for id, shape in MODULATION_SHAPES.items()
        ),
        Case(id="B, last layer", shape=MODULATION_SHAPES["B"], frozen=_FROZEN),
        Case(
            id="B, modulation trained", shape=MODULATION_SHAPES["B"], backward=_RESIDUAL
        ),
        Case(id="B, last layer, modulation trained", shape=MODULATION_SHAPES["B"]),
    ),
    wide_cases=(
        Case(id="width 3072", shape=MODULATION_WIDE_SHAPE),
        # x A^T of three adapters of rank 8 behind x, whose width 16 does not divide.
        Case(
            id="B, rank 8",
            shape=MODULATION_SHAPES["B"] | {"tail": 24},
            frozen=_FROZEN,
            backward=_RESIDUAL,
        ),
    ),
    letters=lambda i: {"S": nbytes(i["x"]), "m": nbytes(i["scale"])},
    bytes_formula=("2 S + 2 m", "4 S + m"),
)
