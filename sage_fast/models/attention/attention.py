"""Attention as one op over the libraries that compute it fast; no kernel is written
here.

    out = softmax(scale q k^T) v,   lse = log sum_j exp(scale q . k_j),   scale = 1 / sqrt(D)

Dense, not causal, no mask, no dropout: what HunyuanVideo-1.5 needs once padded tokens
are dropped. The pair (out, lse) is all that a backward pass wants apart from q, k and
v, so a caller may keep it and recompute the rest. With p = exp(scale q k^T - lse) and
delta = rowsum(grad_out * out):

    dv = p^T grad_out,   ds = scale p (grad_out v^T - delta),   dq = ds k,   dk = ds^T q

Source: Dao (arXiv 2307.08691), section 3.1 and algorithm 2.

`attention` and `attention_backward` are `torch.library` ops: they trace, run on fake
and meta tensors whether or not the library is installed, and count their floating-point
operations. `resolve_backend` chooses among the libraries, whose calls are in
`libraries.py`.

Shapes: B batch, Nq and Nk tokens of query and key, H heads, D head dim.
"""

import logging
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sage_fast.config.errors import ConfigError
from sage_fast.models.attention.libraries import (
    LIBRARIES,
    Backend,
    Use,
    dtype_names,
    empty_gradients,
)

__all__ = ["BACKENDS", "Backend", "attention", "backend_report", "resolve_backend"]

logger = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = get_args(Backend)

# The order in which `auto` tries, by major compute capability: the fastest published
# first. A training run on a GPU times what is installed instead
# (`run/resume.py`). bf16, head dim 128:
# * Hopper, forward / backward TFLOP/s on an H100: FlashAttention-3 648 / 561, cuDNN 595
#   / 516, FlashAttention-2 370 / 322 (Shah et al., arXiv 2407.08608, section 4.1).
#   FlashAttention-4 has no figure there and is left to an explicit choice.
# * Blackwell: FlashAttention-4 up to 1.3x cuDNN 9.13 on a B200 (Zadouri et al.,
# "FlashAttention-4", 2026, abstract).
# * Ampere and Ada: FlashAttention-2, up to 73 % of an A100's peak (Dao, arXiv
#   2307.08691, section 4.1); cuDNN comes second for want of a figure there.
# xformers dispatches to FlashAttention-2 where it can; `sdpa` is torch's own build of
# it.
_ORDER: Mapping[int, tuple[Backend, ...]] = {
    7: ("xformers", "sdpa"),
    8: ("flash2", "cudnn", "xformers", "sdpa"),
    9: ("flash3", "cudnn", "flash2", "xformers", "sdpa"),
    10: ("flash4", "cudnn", "flash2", "xformers", "sdpa"),
}


_logged: set[tuple[str, str]] = set()


def resolve_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool = False,
) -> Backend:
    """The backend that `name` means on a device.

    `auto` is the fastest one, by published speed, that is installed and can run: on a
    GPU see `_ORDER`, on a CPU `sdpa`, for float64 `reference`. The choice, and why
    faster ones were passed over, is logged once per device and choice.

    Args:
        name: `auto` or one of `BACKENDS`.
        device: where q, k and v live; on `meta` every name will do, as only shapes are
            computed.
        dtype: of q, k and v.
        head_dim: D.
        deterministic: the backward pass must give the same bits every time.

    Raises:
        ConfigError: an unknown name, or a backend that cannot run there; says why and
            what to do.
    """
    use = Use(torch.device(device), dtype, head_dim, deterministic)
    if name != "auto":
        if name not in LIBRARIES:
            raise ConfigError(
                f"model.attention is {name!r}, but it must be auto or one of "
                f"{', '.join(BACKENDS)}."
            )
        reason = LIBRARIES[name].unavailable(use)
        if reason is not None:
            able = (b for b in BACKENDS if not LIBRARIES[b].unavailable(use))
            raise ConfigError(
                f"The attention backend {name!r} cannot run on {use.device}: {reason}. "
                "Or set model.attention to auto, or to one that can run here: "
                f"{', '.join(able) or 'none'}."
            )
        return name  # type: ignore[return-value]  # a key of LIBRARIES is a Backend
    candidates: tuple[Backend, ...] = ("sdpa", "reference")
    if dtype == torch.float64:
        candidates = ("reference",)
    elif use.device.type == "cuda":
        # A GPU older or newer than the table takes the order of its nearest end.
        major = torch.cuda.get_device_capability(use.device)[0]
        candidates = (*_ORDER[min(max(major, min(_ORDER)), max(_ORDER))], "reference")
    passed_over: list[str] = []
    for candidate in candidates:
        reason = LIBRARIES[candidate].unavailable(use)
        if reason is None:
            if (str(device), candidate) not in _logged:
                _logged.add((str(device), candidate))
                why = f" ({'; '.join(passed_over)})" if passed_over else ""
                # The reference stores every score; on a real video that is where memory
                # ends.
                costly = candidate == "reference" and dtype != torch.float64
                logger.log(
                    logging.WARNING if costly else logging.INFO,
                    "Attention on %s: %s%s",
                    device,
                    candidate,
                    why,
                )
            return candidate
        passed_over.append(f"not {candidate}: {reason}")
    raise ConfigError(
        f"No attention backend can run on {device} in {dtype_names((dtype,))}: "
        f"{'; '.join(passed_over)}."
    )


def backend_report(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, str | None]:
    """Backends on a device: name -> None if it can run there, else the reason why not."""
    use = Use(torch.device(device), dtype, head_dim)
    return {name: LIBRARIES[name].unavailable(use) for name in BACKENDS}


def call_forward(
    q: Tensor, k: Tensor, v: Tensor, backend: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """`attention` without graph and dispatcher, for callers that differentiate by
    themselves.
    """
    out, lse = LIBRARIES[backend].forward(q, k, v)
    return out.contiguous(), lse.contiguous()


def call_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`, for callers that write their backward pass by hand.

    Args:
        grad_out: (B, Nq, H, D), gradient with respect to out; copied if not contiguous.
        q, k, v: as given to `attention`.
        out, lse: as returned by it, by the same backend or another.

    Returns:
        dq (B, Nq, H, D), dk and dv (B, Nk, H, D), contiguous, in q's dtype. Not
        differentiable again.
    """
    # Autograd may hand over a broadcast gradient, which no library reads.
    grad_out = grad_out.contiguous()
    lse = lse.contiguous()
    library = LIBRARIES[backend]
    dq, dk, dv = library.backward(grad_out, q, k, v, out, lse, deterministic)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_attention = torch.library.custom_op(
    "sage_fast::attention", call_forward, mutates_args=()
)
_attention_backward = torch.library.custom_op(
    "sage_fast::attention_backward", call_backward, mutates_args=()
)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, backend: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=wide)


_attention_backward.register_fake(
    lambda grad_out, q, k, v, *others: empty_gradients(q, k, v)
)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, ctx.backend, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor | None):  # type: ignore[no-untyped-def]
    return (
        *_attention_backward(
            grad_out, *ctx.saved_tensors, ctx.backend, ctx.deterministic
        ),
        None,
        None,
    )


_attention.register_autograd(_backward, setup_context=_setup_context)


def _forward_flops(
    q_shape: torch.Size, k_shape: torch.Size, *args: object, out_shape: object = None
) -> int:
    """Two products of 2 B H Nq Nk D each, as torch counts its own attention."""
    batch, queries, heads, dim = q_shape
    return 4 * batch * heads * queries * k_shape[1] * dim


register_flop_formula(torch.ops.sage_fast.attention)(_forward_flops)
# Five products: the scores again, and the four of the formula above; torch counts the
# same.
register_flop_formula(torch.ops.sage_fast.attention_backward)(
    lambda grad_shape, *shapes, out_shape=None: 5 * _forward_flops(*shapes) // 2
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v and its log-sum-exp; differentiable in q, k and v, the
    lse taken as a constant.

    Args:
        q: (B, Nq, H, D). Batch and token strides may be anything, the last two
            dimensions are dense.
        k, v: (B, Nk, H, D), likewise.
        backend: one of `BACKENDS`, from `resolve_backend`.
        deterministic: the backward pass gives the same bits every time.

    Returns:
        out: (B, Nq, H, D) contiguous, in q's dtype.
        lse: (B, H, Nq) float32, float64 for float64; natural logarithm of the sum of
        exp(scaled scores).
    """
    return _attention(q, k, v, backend, deterministic)
