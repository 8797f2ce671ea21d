"""RMSNorm of queries and keys over all heads of a token, and rotary embedding of both
where there are tables.

    out[n] = R(n) (w * x / sqrt(mean(x^2) + eps)),   the mean over the H * D numbers of a token

R(n) turns every interleaved pair (2i, 2i + 1) of every head: (e, o) -> (e cos - o sin,
o cos + e sin). Without tables it is left out, and there may be another number of keys
than of queries, as in attention over a text.

Source: RoFormer (arXiv 2104.09864), section 3.4; `WanAttnProcessor` in diffusers
(`rms_norm_across_heads`), here without its roundings between the steps.

With n = x * rstd, g = dL/dout, p = R(n)^T g and h = p * w, the gradients are

    dx = rstd * (h - n * mean(h * n)),   dw = sum over tokens of p * n;   cos and sin get none

One launch serves queries and keys, and reads cos and sin once for both and for all
heads. Sums over tokens are taken in two stages without atomics, as in adaln, and not at
all where no weight needs a gradient.

Shapes: B batch, N queries, M keys, H heads, D head dim, P programs of a sample.
Names in kernels: i_ index, o_ offsets, m_ mask.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor

from sage_kernels import common, reference
from sage_kernels.common import load, store
from sage_kernels.custom_op import operator
from sage_kernels.launch import LaunchTable, cdiv, launch, split_tokens
from sage_kernels.ops.qk_norm_rope import (
    blocks_of,
    dense_tokens,
    draw_heads,
    quarter_turn,
    save_tensors,
    strides,
)
from sage_kernels.registry import Case, Device, Inputs, OpSpec, nbytes, random_tensor

WEIGHTS = ("q_weight", "k_weight")

# Keyed by H * D, the elements of a token.
FORWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), rows=4)
BACKWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(2, 1, 1))
FROZEN_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(3, 1, 1))
"""Of a backward pass without sums over tokens, which needs fewer registers."""


@triton.jit
def token_rstd(x, eps, WIDTH: tl.constexpr):
    """1 / root mean square of a whole tile, which holds zeros beyond its WIDTH
    elements.
    """
    return tl.math.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / WIDTH + eps)


@triton.jit
def token_norm_backward(grad, x, weight, eps, WIDTH: tl.constexpr):
    """Gradient of x, and grad * n, which sums up to the gradient of the weight."""
    rstd = token_rstd(x, eps, WIDTH)
    normed = x * rstd
    inner = grad * weight
    return rstd * (
        inner - normed * (tl.sum(tl.sum(inner * normed, 1), 0) / WIDTH)
    ), grad * normed


@triton.jit
def norm_token(x_ptr, weight_ptr, out_ptr, o_hd, m_hd, eps, WIDTH: tl.constexpr):
    """Write a token that is not rotated. The pointers are to its first element."""
    x = load(x_ptr + o_hd, m_hd)
    weight = load(weight_ptr + o_hd, m_hd)
    store(out_ptr + o_hd, x * token_rstd(x, eps, WIDTH) * weight, m_hd)


@triton.jit
def norm_token_backward(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, o_hd, m_hd, eps, WIDTH: tl.constexpr
):
    """Write the gradient of a token that is not rotated, and return what sums up to the
    gradient of the weight.
    """
    grad = load(grad_ptr + o_hd, m_hd)
    x = load(x_ptr + o_hd, m_hd)
    weight = load(weight_ptr + o_hd, m_hd)
    dx, part = token_norm_backward(grad, x, weight, eps, WIDTH)
    store(dx_ptr + o_hd, dx, m_hd)
    return part


@triton.jit
def qk_norm_across_heads_forward_kernel(
    q_ptr,  # (B, N, H, D), dense tokens
    k_ptr,  # (B, M, H, D), dense tokens
    q_weight_ptr,  # (H * D,)
    k_weight_ptr,  # (H * D,)
    cos_ptr,  # (N, D), contiguous; None for no rotation
    sin_ptr,  # (N, D), contiguous; None likewise
    q_out_ptr,  # (B, N, H, D), contiguous
    k_out_ptr,  # (B, M, H, D), contiguous
    num_q,
    num_k,
    q_stride_b,
    q_stride_n,
    k_stride_b,
    k_stride_n,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, b) writes queries and keys i * ROWS ... of sample b, as far as there
    are any.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_first = tl.program_id(0).to(tl.int64) * ROWS
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < HEAD_DIM
    m_hd = (o_h < HEADS) & m_d
    o_hd = o_h * HEAD_DIM + o_d
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    for i in range(0, tl.minimum(ROWS, tl.maximum(num_q, num_k) - i_first)):
        i_n = i_first + i
        p_q = q_ptr + i_b * q_stride_b + i_n * q_stride_n
        p_k = k_ptr + i_b * k_stride_b + i_n * k_stride_n
        p_q_out = q_out_ptr + (i_b * num_q + i_n) * WIDTH
        p_k_out = k_out_ptr + (i_b * num_k + i_n) * WIDTH
        if cos_ptr is not None:  # then there are as many keys as queries
            q = load(p_q + o_hd, m_hd)
            k = load(p_k + o_hd, m_hd)
            cos = load(cos_ptr + i_n * HEAD_DIM + o_d, m_d)
            sin = load(sin_ptr + i_n * HEAD_DIM + o_d, m_d)
            q_weight = load(q_weight_ptr + o_hd, m_hd)
            q = q * token_rstd(q, eps, WIDTH) * q_weight
            q = q * cos + quarter_turn(q, BLOCK_H, BLOCK_D) * sin
            k_weight = load(k_weight_ptr + o_hd, m_hd)
            k = k * token_rstd(k, eps, WIDTH) * k_weight
            k = k * cos + quarter_turn(k, BLOCK_H, BLOCK_D) * sin
            store(p_q_out + o_hd, q, m_hd)
            store(p_k_out + o_hd, k, m_hd)
        else:  # a text has far fewer keys, and an empty one would take as long
            if i_n < num_q:
                norm_token(p_q, q_weight_ptr, p_q_out, o_hd, m_hd, eps, WIDTH)
            if i_n < num_k:
                norm_token(p_k, k_weight_ptr, p_k_out, o_hd, m_hd, eps, WIDTH)


@triton.jit
def qk_norm_across_heads_backward_kernel(
    grad_q_ptr,  # (B, N, H, D), dense tokens
    grad_k_ptr,  # (B, M, H, D), dense tokens
    q_ptr,  # (B, N, H, D), dense tokens
    k_ptr,  # (B, M, H, D), dense tokens
    q_weight_ptr,  # (H * D,)
    k_weight_ptr,  # (H * D,)
    cos_ptr,  # (N, D), contiguous; None for no rotation
    sin_ptr,  # (N, D), contiguous; None likewise
    dq_ptr,  # (B, N, H, D), contiguous
    dk_ptr,  # (B, M, H, D), contiguous
    # (B, P, 2, H * D) float32: dw of queries and keys of every program; None for no
    # sums
    sums_ptr,
    num_q,
    num_k,
    tokens_per_program,
    grad_q_stride_b,
    grad_q_stride_n,
    grad_k_stride_b,
    grad_k_stride_n,
    q_stride_b,
    q_stride_n,
    k_stride_b,
    k_stride_n,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (p, b) handles a range of queries and keys of sample b and leaves its
    sums where wanted.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < HEAD_DIM
    m_hd = (o_h < HEADS) & m_d
    o_hd = o_h * HEAD_DIM + o_d
    dq_weight = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    dk_weight = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    i_first = i_p * tokens_per_program
    for i in range(
        0, tl.minimum(tokens_per_program, tl.maximum(num_q, num_k) - i_first)
    ):
        i_n = i_first + i
        p_grad_q = grad_q_ptr + i_b * grad_q_stride_b + i_n * grad_q_stride_n
        p_grad_k = grad_k_ptr + i_b * grad_k_stride_b + i_n * grad_k_stride_n
        p_q = q_ptr + i_b * q_stride_b + i_n * q_stride_n
        p_k = k_ptr + i_b * k_stride_b + i_n * k_stride_n
        p_dq = dq_ptr + (i_b * num_q + i_n) * WIDTH
        p_dk = dk_ptr + (i_b * num_k + i_n) * WIDTH
        if cos_ptr is not None:  # then there are as many keys as queries
            grad_q = load(p_grad_q + o_hd, m_hd)
            grad_k = load(p_grad_k + o_hd, m_hd)
            q = load(p_q + o_hd, m_hd)
            k = load(p_k + o_hd, m_hd)
            cos = load(cos_ptr + i_n * HEAD_DIM + o_d, m_d)
            sin = load(sin_ptr + i_n * HEAD_DIM + o_d, m_d)
            # The transpose of a quarter turn is the turn backwards.
            grad_q = grad_q * cos - quarter_turn(grad_q * sin, BLOCK_H, BLOCK_D)
            # Queries before keys, and weights from the first-level cache every time:
            # all at once take more registers than there are for two programs.
            q_weight = load(q_weight_ptr + o_hd, m_hd)
            dq, part = token_norm_backward(grad_q, q, q_weight, eps, WIDTH)
            if sums_ptr is not None:
                dq_weight += part
            store(p_dq + o_hd, dq, m_hd)
            grad_k = grad_k * cos - quarter_turn(grad_k * sin, BLOCK_H, BLOCK_D)
            k_weight = load(k_weight_ptr + o_hd, m_hd)
            dk, part = token_norm_backward(grad_k, k, k_weight, eps, WIDTH)
            if sums_ptr is not None:
                dk_weight += part
            store(p_dk + o_hd, dk, m_hd)
        else:  # a text has far fewer keys, and an empty one would take as long
            if i_n < num_q:
                part = norm_token_backward(
                    p_grad_q, p_q, q_weight_ptr, p_dq, o_hd, m_hd, eps, WIDTH
                )
                if sums_ptr is not None:
                    dq_weight += part
            if i_n < num_k:
                part = norm_token_backward(
                    p_grad_k, p_k, k_weight_ptr, p_dk, o_hd, m_hd, eps, WIDTH
                )
                if sums_ptr is not None:
                    dk_weight += part
    if sums_ptr is not None:
        p_sums = (
            sums_ptr + (i_b * tl.num_programs(0) + i_p) * 2 * HEADS * HEAD_DIM + o_hd
        )
        tl.store(p_sums, dq_weight, mask=m_hd)
        tl.store(p_sums + HEADS * HEAD_DIM, dk_weight, mask=m_hd)


def launch_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel; arguments as `qk_norm_across_heads`."""
    cos, sin, eps = rest
    q = dense_tokens(q)
    k = dense_tokens(k)
    q_out = common.empty_like(q)
    k_out = common.empty_like(k)
    batch, num_q, heads, head_dim = q.shape
    num_k = k.shape[1]
    settings = FORWARD_LAUNCH.find(heads * head_dim, q.device)
    launch(
        qk_norm_across_heads_forward_kernel,
        (cdiv(max(num_q, num_k), settings.rows), batch),
        q,
        k,
        *common.contiguous(q_weight, k_weight, cos, sin),
        q_out,
        k_out,
        num_q,
        num_k,
        *q.stride()[:2],
        *k.stride()[:2],
        eps,
        **blocks_of(q),
        ROWS=settings.rows,
        settings=settings,
    )
    return q_out, k_out


def launch_backward(
    grad_q, grad_k, q, k, q_weight, k_weight, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernel; arguments and results as
    `qk_norm_across_heads_backward`.
    """
    cos, sin, eps, weight_gradients = rest
    tokens = [dense_tokens(tensor) for tensor in (grad_q, grad_k, q, k)]
    batch, num_q, heads, head_dim = q.shape
    num_k = k.shape[1]
    dq = common.empty_like(q)
    dk = common.empty_like(k)
    settings = (BACKWARD_LAUNCH if weight_gradients else FROZEN_LAUNCH).find(
        heads * head_dim, q.device
    )
    programs, each = split_tokens(max(num_q, num_k), batch, settings, q.device)
    sums = None
    if weight_gradients:
        sums = common.empty(
            (batch, programs, 2, heads * head_dim), dtype=torch.float32, device=q.device
        )
    launch(
        qk_norm_across_heads_backward_kernel,
        (programs, batch),
        *tokens,
        *common.contiguous(q_weight, k_weight, cos, sin),
        dq,
        dk,
        sums,
        num_q,
        num_k,
        each,
        *strides(tokens),
        eps,
        **blocks_of(q),
        settings=settings,
    )
    if sums is None:
        return dq, dk, q_weight.new_empty(0), k_weight.new_empty(0)
    dq_weight, dk_weight = sums.sum((0, 1))
    return (
        dq,
        dk,
        dq_weight.to(q_weight.dtype, copy=True),
        dk_weight.to(k_weight.dtype, copy=True),
    )


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    needs = any(ctx.needs_input_grad[2:4])
    arguments: tuple[Any, ...] = (grad_q, grad_k, *ctx.saved_tensors, ctx.eps, needs)
    dq, dk, *weights = qk_norm_across_heads_backward(*arguments)
    return dq, dk, *(weights if needs else (None, None)), None, None, None


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor? cos, Tensor? sin, "
    "float eps"
)
qk_norm_across_heads_backward = operator(
    f"""qk_norm_across_heads_backward(Tensor grad_q, Tensor grad_k, {_ARGUMENTS}, bool weight_gradients)
    -> (Tensor, Tensor, Tensor, Tensor)""",
    launcher=launch_backward,
    reference=reference.qk_norm_across_heads_backward,
)
_qk_norm_across_heads = operator(
    f"qk_norm_across_heads({_ARGUMENTS}) -> (Tensor, Tensor)",
    launcher=launch_forward,
    reference=reference.qk_norm_across_heads,
    save=save_tensors,
    backward=_backward,
)


def qk_norm_across_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Queries and keys normalised over all heads of a token and, where there are
    tables, rotated.

    Args:
        q: (B, N, H, D) float32, bfloat16 or float16. Tokens may be strided, as slices
            of a fused projection are.
        k: (B, M, H, D).
        q_weight: (H * D,) RMSNorm weight of the queries.
        k_weight: (H * D,)
        cos: (N, D) cosines of the rotary angles, each twice in a row for its pair; D is
            even, and M is N. None: no token is rotated. No gradient flows into cos and
            sin.
        sin: (N, D) sines, or None.
        eps: added to the mean square.

    Returns:
        Queries (B, N, H, D) and keys (B, M, H, D), contiguous, in the dtypes of q and
        k. Computed in float32, rounded once.

    Raises:
        ValueError: shapes that do not fit, odd D, another dtype, tensors on several
            devices, eps <= 0.
    """
    op = "qk_norm_across_heads"
    tensors = {
        "q": q,
        "k": k,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "cos": cos,
        "sin": sin,
    }
    common.check_tensors(op, tensors, optional=("cos", "sin"))
    common.check_ndim(op, "q", q, "(B, N, H, D)")
    common.check_ndim(op, "k", k, "(B, M, H, D)")
    batch, num_q, heads, head_dim = q.shape
    common.check_shape(
        op,
        "k",
        k,
        (batch, k.shape[1] if cos is None else num_q, heads, head_dim),
        "(B, M, H, D)",
    )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        common.check_shape(op, name, weight, (heads * head_dim,), "(H * D,)")
    if (cos is None) != (sin is None):
        raise ValueError(
            f"{op}: one of cos and sin is None; give both, or none for no rotation"
        )
    if cos is not None and sin is not None:
        if head_dim % 2:
            raise ValueError(
                f"{op}: the head dim of q is {head_dim}; it must be even, pairs are "
                "turned"
            )
        common.check_shape(op, "cos", cos, (num_q, head_dim), "(N, D)")
        common.check_shape(op, "sin", sin, (num_q, head_dim), "(N, D)")
    common.check_eps(op, eps)
    return _qk_norm_across_heads(q, k, q_weight, k_weight, cos, sin, eps)


def _make_inputs(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Inputs:
    tokens, keys, heads, head_dim = (
        case.shape[name] for name in ("tokens", "keys", "heads", "head_dim")
    )
    small = torch.float32 if case.mixed else dtype
    draw = partial(random_tensor, device=device, generator=generator)
    q, k = (
        draw_heads(case, count, dtype, device, generator)
        for count in (tokens, keys or tokens)
    )
    inputs: Inputs = {"q": q, "k": k}
    inputs |= {
        name: draw(heads * head_dim, dtype=small, strided=case.strided)
        for name in WEIGHTS
    }
    if keys:
        return inputs | {"cos": None, "sin": None}
    angles = draw(tokens, head_dim // 2, dtype=torch.float32).repeat_interleave(
        2, dim=-1
    )
    return inputs | {"cos": angles.cos(), "sin": angles.sin()}


def _shape(
    batch: int, tokens: int, heads: int, head_dim: int, keys: int = 0
) -> dict[str, int]:
    """Sizes of a case; keys: their number where nothing is rotated, 0 for as many as
    queries, rotated.
    """
    return {
        "batch": batch,
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "keys": keys,
    }


_SHAPE = _shape(1, 32760, 12, 128)

SPEC = OpSpec(
    name="qk_norm_across_heads",
    formula=(
        "R(n) (w * x / sqrt(mean(x^2) + eps)), the mean over all heads; q and k; "
        "without R for a text's keys"
    ),
    op=qk_norm_across_heads,
    reference=reference.qk_norm_across_heads,
    eager=reference.qk_norm_across_heads_eager,
    make_inputs=_make_inputs,
    differentiable=("q", "k", *WEIGHTS),
    test_cases=(
        Case(id="one-pair", shape=_shape(1, 1, 1, 2)),
        Case(id="odd", shape=_shape(2, 13, 3, 12)),
        Case(id="fewer-keys", shape=_shape(2, 11, 3, 5, keys=4)),
        Case(id="more-keys", shape=_shape(1, 2, 2, 8, keys=9)),
        Case(id="strided", shape=_shape(2, 9, 2, 16), strided=True),
        Case(id="mixed", shape=_shape(2, 5, 2, 16), mixed=True),
        Case(id="model-width", shape=_shape(1, 3, 12, 128)),
    ),
    bench_cases=(
        Case(id="A", shape=_SHAPE | {"tokens": 18018}, frozen=WEIGHTS),
        Case(id="B", shape=_SHAPE, frozen=WEIGHTS),
        Case(id="B, text", shape=_SHAPE | {"keys": 512}, frozen=WEIGHTS),
        Case(id="B, weights trained", shape=_SHAPE),
        Case(id="B, text, weights trained", shape=_SHAPE | {"keys": 512}),
    ),
    letters=lambda i: {
        "S": nbytes(i["q"]),
        "c": nbytes(i["cos"]),
        "w": nbytes(i["q_weight"]),
    },
    bytes_formula=("4 S + 2 c + 2 w", "6 S + 2 c + 2 w"),
)
