"""RMSNorm of queries and keys per head, rotary embedding of the video tokens, written
into the joint layout.

    video token n:  out[n]     = R(n) (w * x / sqrt(mean(x^2) + eps))
    text token l:   out[N + l] =       w * x / sqrt(mean(x^2) + eps)

R(n) turns every interleaved pair (2i, 2i + 1): (e, o) -> (e cos - o sin, o cos + e
sin). Video and text have norm separate weights w, as do queries and keys.

Source: RoFormer (arXiv 2104.09864), section 3.4; `RMSNorm`,
`apply_rotary_emb(use_real_unbind_dim=-1)` and `HunyuanVideo15AttnProcessor2_0` in
diffusers, here without their roundings between the steps.

With n = x * rstd, g = dL/dout, p = R(n)^T g (p = g for text) and h = p * w, the
gradients are

    dx = rstd * (h - n * mean(h * n)),   dw = sum over tokens and heads of p * n;   cos and sin get none

One launch serves queries and keys, video and text: cos and sin are read once for all
heads of both. Sums over tokens are taken in two stages without atomics, as in adaln,
and not at all where no weight needs a gradient.

Shapes: B batch, N video tokens, L text tokens, H heads, D head dim, P programs of a
sample.
Names in kernels: i_ index, o_ offsets, m_ mask.
"""

from collections.abc import Iterable
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
from sage_kernels.registry import Case, Device, Inputs, OpSpec, nbytes, random_tensor

TOKENS = ("q", "k", "q_text", "k_text")
WEIGHTS = tuple(f"{name}_weight" for name in TOKENS)

# Keyed by H * D, the elements of a token.
FORWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), rows=4)
BACKWARD_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(2, 1, 1))
FROZEN_LAUNCH = LaunchTable.by_width((8, 16, 32), programs_per_sm=(4, 1, 1)).with_row(
    2048, Launch(num_warps=8, programs_per_sm=3), (8, 9), (10, 0)
)
"""Of a backward pass without sums over tokens, which needs fewer registers; on some
GPUs a few more than elsewhere.
"""


@triton.jit
def quarter_turn(x, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """(x0, x1, x2, x3, ...) -> (-x1, x0, -x3, x2, ...) along the last dimension of a
    (BLOCK_H, BLOCK_D) tile.
    """
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(-odd, even), (BLOCK_H, BLOCK_D))


@triton.jit
def rms_rstd(x, eps, HEAD_DIM: tl.constexpr):
    """1 / root mean square of every row of a tile, as a column; columns beyond HEAD_DIM
    hold zeros.
    """
    return tl.math.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]


@triton.jit
def rms_norm_backward(grad, x, weight, eps, HEAD_DIM: tl.constexpr):
    """Gradient of x, and grad * n, which sums up to the gradient of the weight."""
    rstd = rms_rstd(x, eps, HEAD_DIM)
    normed = x * rstd
    inner = grad * weight
    along = (tl.sum(inner * normed, 1) / HEAD_DIM)[:, None]
    return rstd * (inner - normed * along), grad * normed


@triton.jit
def qk_norm_rope_forward_kernel(
    q_ptr,  # (B, N, H, D), dense tokens
    k_ptr,  # (B, N, H, D), dense tokens
    q_text_ptr,  # (B, L, H, D), dense tokens
    k_text_ptr,  # (B, L, H, D), dense tokens
    q_weight_ptr,  # (D,)
    k_weight_ptr,  # (D,)
    q_text_weight_ptr,  # (D,)
    k_text_weight_ptr,  # (D,)
    cos_ptr,  # (N, D), contiguous
    sin_ptr,  # (N, D), contiguous
    q_out_ptr,  # (B, N + L, H, D), contiguous
    k_out_ptr,  # (B, N + L, H, D), contiguous
    num_video,
    num_text,
    q_stride_b,
    q_stride_n,
    k_stride_b,
    k_stride_n,
    q_text_stride_b,
    q_text_stride_n,
    k_text_stride_b,
    k_text_stride_n,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, b) writes ROWS tokens of sample b: the first ceil(N / ROWS) programs
    video, the others text.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < HEAD_DIM
    m_hd = (o_h < HEADS) & m_d
    o_hd = o_h * HEAD_DIM + o_d
    video_programs = tl.cdiv(num_video, ROWS)
    o_sample = i_b * (num_video + num_text)
    if i_p < video_programs:
        q_weight = load(q_weight_ptr + o_d, m_d)
        k_weight = load(k_weight_ptr + o_d, m_d)
        i_first = i_p * ROWS
        for i in range(0, tl.minimum(ROWS, num_video - i_first)):
            i_n = i_first + i
            cos = load(cos_ptr + i_n * HEAD_DIM + o_d, m_d)
            sin = load(sin_ptr + i_n * HEAD_DIM + o_d, m_d)
            o_out = (o_sample + i_n) * HEADS * HEAD_DIM + o_hd
            q = load(q_ptr + i_b * q_stride_b + i_n * q_stride_n + o_hd, m_hd)
            k = load(k_ptr + i_b * k_stride_b + i_n * k_stride_n + o_hd, m_hd)
            q = q * rms_rstd(q, eps, HEAD_DIM) * q_weight
            k = k * rms_rstd(k, eps, HEAD_DIM) * k_weight
            q = q * cos + quarter_turn(q, BLOCK_H, BLOCK_D) * sin
            k = k * cos + quarter_turn(k, BLOCK_H, BLOCK_D) * sin
            store(q_out_ptr + o_out, q, m_hd)
            store(k_out_ptr + o_out, k, m_hd)
    else:
        q_weight = load(q_text_weight_ptr + o_d, m_d)
        k_weight = load(k_text_weight_ptr + o_d, m_d)
        i_first = (i_p - video_programs) * ROWS
        for i in range(0, tl.minimum(ROWS, num_text - i_first)):
            i_l = i_first + i
            o_out = (o_sample + num_video + i_l) * HEADS * HEAD_DIM + o_hd
            p_q = q_text_ptr + i_b * q_text_stride_b + i_l * q_text_stride_n
            p_k = k_text_ptr + i_b * k_text_stride_b + i_l * k_text_stride_n
            q = load(p_q + o_hd, m_hd)
            k = load(p_k + o_hd, m_hd)
            q = q * rms_rstd(q, eps, HEAD_DIM) * q_weight
            k = k * rms_rstd(k, eps, HEAD_DIM) * k_weight
            store(q_out_ptr + o_out, q, m_hd)
            store(k_out_ptr + o_out, k, m_hd)


@triton.jit
def qk_norm_rope_backward_kernel(
    grad_q_ptr,  # (B, N + L, H, D), dense tokens
    grad_k_ptr,  # (B, N + L, H, D), dense tokens
    q_ptr,  # (B, N, H, D), dense tokens
    k_ptr,  # (B, N, H, D), dense tokens
    q_text_ptr,  # (B, L, H, D), dense tokens
    k_text_ptr,  # (B, L, H, D), dense tokens
    q_weight_ptr,  # (D,)
    k_weight_ptr,  # (D,)
    q_text_weight_ptr,  # (D,)
    k_text_weight_ptr,  # (D,)
    cos_ptr,  # (N, D), contiguous
    sin_ptr,  # (N, D), contiguous
    dq_ptr,  # (B, N, H, D), contiguous
    dk_ptr,  # (B, N, H, D), contiguous
    dq_text_ptr,  # (B, L, H, D), contiguous
    dk_text_ptr,  # (B, L, H, D), contiguous
    # (B, P, 2, D) float32: dw of queries and keys of every program, video programs
    # first; None for no sums
    sums_ptr,
    num_video,
    num_text,
    video_programs,
    tokens_per_program,
    grad_q_stride_b,
    grad_q_stride_n,
    grad_k_stride_b,
    grad_k_stride_n,
    q_stride_b,
    q_stride_n,
    k_stride_b,
    k_stride_n,
    q_text_stride_b,
    q_text_stride_n,
    k_text_stride_b,
    k_text_stride_n,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (p, b) handles a range of the video or the text tokens of sample b and
    leaves its sums where wanted.
    """
    i_b = tl.program_id(1).to(tl.int64)
    i_p = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < HEAD_DIM
    m_hd = (o_h < HEADS) & m_d
    o_hd = o_h * HEAD_DIM + o_d
    p_grad_q = grad_q_ptr + i_b * grad_q_stride_b
    p_grad_k = grad_k_ptr + i_b * grad_k_stride_b
    dq_weight = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    dk_weight = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if i_p < video_programs:
        q_weight = load(q_weight_ptr + o_d, m_d)
        k_weight = load(k_weight_ptr + o_d, m_d)
        i_first = i_p * tokens_per_program
        for i in range(0, tl.minimum(tokens_per_program, num_video - i_first)):
            i_n = i_first + i
            cos = load(cos_ptr + i_n * HEAD_DIM + o_d, m_d)
            sin = load(sin_ptr + i_n * HEAD_DIM + o_d, m_d)
            o_out = (i_b * num_video + i_n) * HEADS * HEAD_DIM + o_hd
            grad_q = load(p_grad_q + i_n * grad_q_stride_n + o_hd, m_hd)
            grad_k = load(p_grad_k + i_n * grad_k_stride_n + o_hd, m_hd)
            q = load(q_ptr + i_b * q_stride_b + i_n * q_stride_n + o_hd, m_hd)
            k = load(k_ptr + i_b * k_stride_b + i_n * k_stride_n + o_hd, m_hd)
            # The transpose of a quarter turn is the turn backwards.
            grad_q = grad_q * cos - quarter_turn(grad_q * sin, BLOCK_H, BLOCK_D)
            grad_k = grad_k * cos - quarter_turn(grad_k * sin, BLOCK_H, BLOCK_D)
            dq, dq_weight_part = rms_norm_backward(grad_q, q, q_weight, eps, HEAD_DIM)
            dk, dk_weight_part = rms_norm_backward(grad_k, k, k_weight, eps, HEAD_DIM)
            if sums_ptr is not None:
                dq_weight += dq_weight_part
                dk_weight += dk_weight_part
            store(dq_ptr + o_out, dq, m_hd)
            store(dk_ptr + o_out, dk, m_hd)
    else:
        q_weight = load(q_text_weight_ptr + o_d, m_d)
        k_weight = load(k_text_weight_ptr + o_d, m_d)
        p_q = q_text_ptr + i_b * q_text_stride_b
        p_k = k_text_ptr + i_b * k_text_stride_b
        i_first = (i_p - video_programs) * tokens_per_program
        for i in range(0, tl.minimum(tokens_per_program, num_text - i_first)):
            i_l = i_first + i
            o_out = (i_b * num_text + i_l) * HEADS * HEAD_DIM + o_hd
            o_grad_q = (num_video + i_l) * grad_q_stride_n + o_hd
            o_grad_k = (num_video + i_l) * grad_k_stride_n + o_hd
            grad_q = load(p_grad_q + o_grad_q, m_hd)
            grad_k = load(p_grad_k + o_grad_k, m_hd)
            q = load(p_q + i_l * q_text_stride_n + o_hd, m_hd)
            k = load(p_k + i_l * k_text_stride_n + o_hd, m_hd)
            dq, dq_weight_part = rms_norm_backward(grad_q, q, q_weight, eps, HEAD_DIM)
            dk, dk_weight_part = rms_norm_backward(grad_k, k, k_weight, eps, HEAD_DIM)
            if sums_ptr is not None:
                dq_weight += dq_weight_part
                dk_weight += dk_weight_part
            store(dq_text_ptr + o_out, dq, m_hd)
            store(dk_text_ptr + o_out, dk, m_hd)
    if sums_ptr is not None:
        p_sums = sums_ptr + (i_b * tl.num_programs(0) + i_p) * 2 * HEAD_DIM
        o_sum = tl.arange(0, BLOCK_D)
        m_sum = o_sum < HEAD_DIM
        tl.store(p_sums + o_sum, tl.sum(dq_weight, 0), mask=m_sum)
        tl.store(p_sums + HEAD_DIM + o_sum, tl.sum(dk_weight, 0), mask=m_sum)


def dense_tokens(tensor: Tensor) -> Tensor:
    """A (B, N, H, D) tensor as it is where the H * D elements of a token lie next to
    each other, else a copy.
    """
    if tensor.numel() == 0 or tensor[0, 0].is_contiguous():
        return tensor
    return tensor.contiguous()


def strides(tensors: Iterable[Tensor]) -> list[int]:
    """Batch and token stride of each (B, N, H, D) tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def blocks_of(q: Tensor) -> dict[str, Any]:
    """Compile-time sizes of a token (H, D), and of the tile that holds it."""
    heads, head_dim = q.shape[2:]
    tile = {"BLOCK_H": next_power_of_2(heads), "BLOCK_D": next_power_of_2(head_dim)}
    return {"HEADS": heads, "HEAD_DIM": head_dim, **tile}


def launch_forward(
    q: Tensor, k: Tensor, q_text: Tensor, k_text: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel; arguments as `qk_norm_rope`."""
    *small, eps = rest
    tokens = [dense_tokens(tensor) for tensor in (q, k, q_text, k_text)]
    batch, num_video, heads, head_dim = q.shape
    num_text = q_text.shape[1]
    joint = (batch, num_video + num_text, heads, head_dim)
    q_out, k_out = (
        common.empty(joint, dtype=tensor.dtype, device=q.device) for tensor in (q, k)
    )
    settings = FORWARD_LAUNCH.find(heads * head_dim, q.device)
    launch(
        qk_norm_rope_forward_kernel,
        (cdiv(num_video, settings.rows) + cdiv(num_text, settings.rows), batch),
        *tokens,
        *(tensor.contiguous() for tensor in small),
        q_out,
        k_out,
        num_video,
        num_text,
        *strides(tokens),
        eps,
        **blocks_of(q),
        ROWS=settings.rows,
        settings=settings,
    )
    return q_out, k_out


def launch_backward(grad_q, grad_k, q, k, q_text, k_text, *rest) -> tuple[Tensor, ...]:
    """Run the backward kernel; arguments and results as `qk_norm_rope_backward`."""
    *weights, cos, sin, eps, weight_gradients = rest
    tokens = [dense_tokens(tensor) for tensor in (grad_q, grad_k, q, k, q_text, k_text)]
    batch, num_video, heads, head_dim = q.shape
    num_text = q_text.shape[1]
    gradients = [common.empty_like(tensor) for tensor in (q, k, q_text, k_text)]
    settings = (BACKWARD_LAUNCH if weight_gradients else FROZEN_LAUNCH).find(
        heads * head_dim, q.device
    )
    video_programs, each = split_tokens(num_video, batch, settings, q.device)
    # As many tokens as a video program, so that no program outlasts the others.
    programs = video_programs + cdiv(num_text, each)
    sums = None
    if weight_gradients:
        sums = common.empty(
            (batch, programs, 2, head_dim), dtype=torch.float32, device=q.device
        )
    launch(
        qk_norm_rope_backward_kernel,
        (programs, batch),
        *tokens,
        *(tensor.contiguous() for tensor in (*weights, cos, sin)),
        *gradients,
        sums,
        num_video,
        num_text,
        video_programs,
        each,
        *strides(tokens),
        eps,
        **blocks_of(q),
        settings=settings,
    )
    if sums is None:
        return *gradients, *(weight.new_empty(0) for weight in weights)
    # Rows of the query and the key weight, first of the video, then of the text
    # programs.
    rows = (
        *sums[:, :video_programs].sum((0, 1)),
        *sums[:, video_programs:].sum((0, 1)),
    )
    return *gradients, *(
        row.to(weight.dtype, copy=True)
        for row, weight in zip(rows, weights, strict=True)
    )


def save_tensors(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    """Keep all inputs for the backward pass; the last one is eps."""
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    needs = any(ctx.needs_input_grad[4:8])
    arguments: tuple[Any, ...] = (grad_q, grad_k, *ctx.saved_tensors, ctx.eps, needs)
    found = qk_norm_rope_backward(*arguments)
    return *found[:4], *(found[4:] if needs else [None] * 4), None, None, None


_ARGUMENTS = """Tensor q, Tensor k, Tensor q_text, Tensor k_text, Tensor q_weight, Tensor k_weight,
    Tensor q_text_weight, Tensor k_text_weight, Tensor cos, Tensor sin, float eps"""
qk_norm_rope_backward = operator(
    f"""qk_norm_rope_backward(Tensor grad_q, Tensor grad_k, {_ARGUMENTS}, bool weight_gradients)
    -> ({", ".join(["Tensor"] * 8)})""",
    launcher=launch_backward,
    reference=reference.qk_norm_rope_backward,
)
_qk_norm_rope = operator(
    f"qk_norm_rope({_ARGUMENTS}) -> (Tensor, Tensor)",
    launcher=launch_forward,
    reference=reference.qk_norm_rope,
    save=save_tensors,
    backward=_backward,
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_text: Tensor,
    k_text: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_text_weight: Tensor,
    k_text_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Normalised queries and keys of video (rotated) and text tokens, in one joint
    sequence with the video first.

    Args:
        q: (B, N, H, D) video queries, float32, bfloat16 or float16, D even. Tokens may
            be strided, as slices of a fused projection are.
        k: (B, N, H, D) video keys.
        q_text: (B, L, H, D) text queries; L may be 0.
        k_text: (B, L, H, D) text keys.
        q_weight: (D,) RMSNorm weight of the video queries; the next three of the
            others.
        k_weight: (D,)
        q_text_weight: (D,)
        k_text_weight: (D,)
        cos: (N, D) cosines of the rotary angles, each twice in a row for its pair, as
            diffusers builds them. No gradient flows into cos and sin.
        sin: (N, D) sines.
        eps: added to the mean square.

    Returns:
        Joint queries and keys, (B, N + L, H, D) contiguous, in the dtypes of q and k.
        Computed in float32, rounded once.

    Raises:
        ValueError: shapes that do not fit, odd D, another dtype, tensors on several
            devices, eps <= 0.
    """
    op = "qk_norm_rope"
    weights = dict(
        zip(WEIGHTS, (q_weight, k_weight, q_text_weight, k_text_weight), strict=True)
    )
    tensors = {
        "q": q,
        "k": k,
        "q_text": q_text,
        "k_text": k_text,
        **weights,
        "cos": cos,
        "sin": sin,
    }
    common.check_tensors(op, tensors)
    common.check_ndim(op, "q", q, "(B, N, H, D)")
    common.check_ndim(op, "q_text", q_text, "(B, L, H, D)")
    batch, num_video, heads, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(
            f"{op}: the head dim of q is {head_dim}; it must be even, the rotary "
            "embedding turns pairs"
        )
    common.check_shape(op, "k", k, q.shape, "(B, N, H, D)")
    common.check_shape(
        op, "q_text", q_text, (batch, q_text.shape[1], heads, head_dim), "(B, L, H, D)"
    )
    common.check_shape(op, "k_text", k_text, q_text.shape, "(B, L, H, D)")
    for name, weight in weights.items():
        common.check_shape(op, name, weight, (head_dim,), "(D,)")
    for name, table in (("cos", cos), ("sin", sin)):
        common.check_shape(op, name, table, (num_video, head_dim), "(N, D)")
    common.check_eps(op, eps)
    return _qk_norm_rope(
        q,
        k,
        q_text,
        k_text,
        q_weight,
        k_weight,
        q_text_weight,
        k_text_weight,
        cos,
        sin,
        eps,
    )


def draw_heads(
    case: Case,
    tokens: int,
    dtype: torch.dtype,
    device: Device,
    generator: Generator | None,
) -> Tensor:
    """Random (B, N, H, D) of the case's sizes. Strided: slices of one row per token, as
    of a fused projection.
    """
    batch, heads, head_dim = (
        case.shape[name] for name in ("batch", "heads", "head_dim")
    )
    flat = random_tensor(
        batch,
        tokens,
        heads * head_dim,
        dtype=dtype,
        device=device,
        generator=generator,
        strided=case.strided,
    )
    return flat.unflatten(-1, (heads, head_dim))


def _make_inputs(
    case: Case, dtype: torch.dtype, device: Device, generator: Generator | None
) -> Inputs:
    video, text, head_dim = (case.shape[name] for name in ("video", "text", "head_dim"))
    small = torch.float32 if case.mixed else dtype
    draw = partial(random_tensor, device=device, generator=generator)
    angles = draw(video, head_dim // 2, dtype=torch.float32).repeat_interleave(
        2, dim=-1
    )
    inputs: Inputs = {}
    for name, count in zip(TOKENS, (video, video, text, text), strict=True):
        inputs[name] = draw_heads(case, count, dtype, device, generator)
    for name in WEIGHTS:
        inputs[name] = draw(head_dim, dtype=small, strided=case.strided)
    return inputs | {"cos": angles.cos(), "sin": angles.sin()}


def _shape(
    batch: int, video: int, text: int, heads: int, head_dim: int
) -> dict[str, int]:
    return {
        "batch": batch,
        "video": video,
        "text": text,
        "heads": heads,
        "head_dim": head_dim,
    }


_SHAPE = _shape(1, 32760, 250, 16, 128)

SPEC = OpSpec(
    name="qk_norm_rope",
    formula=(
        "R(n) (w * x / sqrt(mean(x^2) + eps)) for video, without R for text; q and k, "
        "joint layout"
    ),
    op=qk_norm_rope,
    reference=reference.qk_norm_rope,
    eager=reference.qk_norm_rope_eager,
    make_inputs=_make_inputs,
    differentiable=(*TOKENS, *WEIGHTS),
    test_cases=(
        Case(id="one-pair", shape=_shape(1, 1, 1, 1, 2)),
        Case(id="no-text", shape=_shape(2, 5, 0, 2, 8)),
        Case(id="odd", shape=_shape(2, 13, 7, 3, 12)),
        Case(id="strided", shape=_shape(2, 9, 5, 2, 16), strided=True),
        Case(id="mixed", shape=_shape(2, 5, 3, 2, 16), mixed=True),
        Case(id="model-width", shape=_shape(1, 3, 2, 16, 128)),
    ),
    bench_cases=(
        Case(id="A", shape=_SHAPE | {"video": 18018}, frozen=WEIGHTS),
        Case(id="B", shape=_SHAPE, frozen=WEIGHTS),
        Case(id="B, weights trained", shape=_SHAPE),
    ),
    wide_cases=(Case(id="24 heads", shape=_SHAPE | {"heads": 24}),),
    letters=lambda i: {
        "S": nbytes(i["q"], i["q_text"]),
        "c": nbytes(i["cos"]),
        "w": nbytes(i["q_weight"]),
    },
    bytes_formula=("4 S + 2 c + 4 w", "6 S + 2 c + 4 w"),
)
