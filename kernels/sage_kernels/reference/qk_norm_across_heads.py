"""Query/key RMSNorm over all heads and rotary embedding in plain PyTorch; see
sage_kernels.qk_norm_across_heads.

Shapes: B batch, N queries, M keys, H heads, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sage_kernels.reference.precision import compute_dtype
from sage_kernels.reference.qk_norm_rope import quarter_turn, rotate


def qk_norm_across_heads(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Queries (B, N, H, D) and keys (B, M, H, D) normalised over their tokens' heads,
    and rotated by cos, sin (N, D).

    Weights (H * D,).
    """
    dtype = compute_dtype(q.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean((2, 3), keepdim=True) + eps)
        normed = normed * weight.to(dtype).view(x.shape[2:])
        if cos is not None and sin is not None:
            normed = rotate(normed, cos.to(dtype), sin.to(dtype))
        return normed.to(x.dtype)

    return norm(q, q_weight), norm(k, k_weight)


def qk_norm_across_heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    weight_gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and their weights; those of the weights empty on request."""
    dtype = compute_dtype(q.dtype)

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grad = grad.to(dtype)
        wide = x.to(dtype)
        if cos is not None and sin is not None:
            # The transpose of a quarter turn is the turn backwards.
            grad = grad * cos.to(dtype)[:, None] - quarter_turn(
                grad * sin.to(dtype)[:, None]
            )
        rstd = torch.rsqrt(wide.square().mean((2, 3), keepdim=True) + eps)
        normed = wide * rstd
        inner = grad * weight.to(dtype).view(x.shape[2:])
        dx = rstd * (inner - normed * (inner * normed).mean((2, 3), keepdim=True))
        dweight = weight.new_empty(0)
        if weight_gradients:
            dweight = (grad * normed).sum((0, 1)).flatten().to(weight.dtype)
        return dx.to(x.dtype), dweight

    dq, dq_weight = backward(grad_q, q, q_weight)
    dk, dk_weight = backward(grad_k, k, k_weight)
    return dq, dk, dq_weight, dk_weight


def qk_norm_across_heads_eager(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """As diffusers writes it (`WanAttnProcessor`): torch's RMSNorm, then every step of
    the rotation by itself.
    """

    def one(x: Tensor, weight: Tensor) -> Tensor:
        normed = F.rms_norm(
            x.flatten(2), weight.shape, weight.to(x.dtype), eps
        ).unflatten(2, x.shape[2:])
        if cos is None or sin is None:
            return normed
        even, odd = normed.unflatten(-1, (-1, 2)).unbind(-1)
        cosine = cos[None, :, None, 0::2]
        sine = sin[None, :, None, 1::2]
        out = torch.empty_like(normed)
        out[..., 0::2] = even * cosine - odd * sine
        out[..., 1::2] = even * sine + odd * cosine
        return out

    return one(q, q_weight), one(k, k_weight)
